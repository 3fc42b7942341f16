"""Time at the resolution of a status."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> datetime:
    """The current time in UTC, without fractions of a second."""
    return datetime.now(UTC).replace(microsecond=0)
