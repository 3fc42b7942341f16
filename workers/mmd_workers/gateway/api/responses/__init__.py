"""OpenAI's responses: requests as chats in another shape, and what clients get. Knows no other API."""
