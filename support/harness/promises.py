"""The promises of the project for every request.

A test that sees one broken never runs again in the hope of a better draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class BrokenPromiseError(AssertionError):
    """A request was lost, answered twice or wrongly, left something held, or a secret was shown."""


def promise(kept: object, message: str) -> None:
    """Raise `BrokenPromiseError` unless the promise was kept."""
    if not kept:
        raise BrokenPromiseError(message)


@contextmanager
def promised(what: str) -> Iterator[None]:
    """Take whatever ends the block early for a broken promise: an error, or the timeout of the test."""
    try:
        yield
    except BrokenPromiseError:
        raise
    except (Exception, pytest.fail.Exception) as error:
        raise BrokenPromiseError(f"not kept: {what}: {error!r}") from error
