"""The encode role: media in, features out."""
