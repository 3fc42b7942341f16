"""Anthropic's messages: their translation into chats, and the responses to clients. Knows no other API."""
