"""What an answer must match, and how it is read: grammars, calls of tools, reasoning, text from tokens. Knows no request."""
