"""Anthropic's messages: requests as chats in another shape, and what clients get. Knows no other API."""
