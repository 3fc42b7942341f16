"""Turns tokens into parts of answers, budgets the memory of answers, and writes HTTP responses. Knows the shape of no API."""
