"""Requests with an idempotency key: one answer for all that repeat it, at every gateway. Knows no API, and nothing of how answers are made."""
