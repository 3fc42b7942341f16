"""OpenAI's text completions: what clients get. Knows no other API."""
