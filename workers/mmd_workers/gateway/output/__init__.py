"""The form that an answer must have, and how it is read: grammars, tool calls, reasoning, text from tokens. Knows no request."""
