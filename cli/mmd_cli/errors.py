"""Base of the errors that a command reports and exits with.

They stay in this process, so they have no code of the contract's table.
"""

from __future__ import annotations


class CommandError(Exception):
    """A command cannot do what it was asked for; the message ends with the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
