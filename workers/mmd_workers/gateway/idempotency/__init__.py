"""Requests with an idempotency key: all repeats get one answer, at every gateway. Knows no API and not how answers are made."""
