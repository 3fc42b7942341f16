"""OpenAI's files API: upload, list, read and delete. Knows no other API and not how files are stored."""
