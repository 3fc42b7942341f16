"""OpenAI's text completions: the responses to clients. Knows no other API."""
