"""Decides which pods take a request, and when: router, admission, and the life of a sequence at the workers. Knows no HTTP and no text."""
