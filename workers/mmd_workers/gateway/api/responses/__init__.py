"""OpenAI's Responses API: translation of its requests into chats, and the responses to clients. Knows no other API."""
