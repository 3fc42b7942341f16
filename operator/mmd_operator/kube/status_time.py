"""The time as a status shows it."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> datetime:
    """The present second, in UTC."""
    return datetime.now(UTC).replace(microsecond=0)
