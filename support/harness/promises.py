"""The promises of the project for every request.

A test that sees one broken never runs again in the hope of a better draw.
"""

from __future__ import annotations


class BrokenPromiseError(AssertionError):
    """A request was lost, answered twice or wrongly, left something held, or a secret was shown."""


def promise(kept: object, message: str) -> None:
    """Raise `BrokenPromiseError` unless the promise was kept."""
    if not kept:
        raise BrokenPromiseError(message)
