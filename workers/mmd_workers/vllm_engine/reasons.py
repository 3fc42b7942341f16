"""Explains in one line why vLLM failed. Independent of vLLM."""

from __future__ import annotations

import re
import traceback

from pydantic import ValidationError

_PEER_GONE = re.compile(
    r"connection (was |has been )?(likely )?(closed|reset|refused|aborted)|broken pipe|closed by (peer|remote)|peer closed"
    r"|remote (process|error)|did the remote server shutdown|client socket has failed to connect|communicator was aborted"
    r"|timed out|timeout",
    re.IGNORECASE,
)
"""Errors that processes report when another process of their group has gone."""
_UNEXPLAINED = re.compile(r"without a reason|gave no reason|nothing was heard|was killed \(|exited with code")
MAX_CHARACTERS = 240  # with the surrounding text, at most what a condition keeps of a pod's last message
FROM_A_RANK = re.compile(r"^Worker failed with error '(.*)', please check the stack trace .*$", re.DOTALL)


def reason(error: BaseException) -> str:
    """Return vLLM's own text for the innermost cause, since outer errors only point to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ValidationError):  # its own text begins with the number of errors
        words = "; ".join(str(detail["msg"]) for detail in error.errors(include_url=False))
    else:
        words = str(error) or _condition(error)
    words = FROM_A_RANK.sub(r"\1", words)
    line = " ".join(words.removeprefix("Value error, ").split()).rstrip(".:;")
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]}…"


def _condition(error: BaseException) -> str:
    """Describe an error without text by its type and the line that raised it; for an assertion, that is the condition."""
    frames = traceback.extract_tb(error.__traceback__)
    return " ".join([type(error).__name__, *([f"({frames[-1].line})"] if frames and frames[-1].line else [])])


def weight(words: str) -> int:
    """Return how much a reason explains, to choose among the reasons of processes that end together.

    0: another process is gone. 1: this process has ended. 2: why it has ended.
    """
    if _PEER_GONE.search(words):
        return 0
    return 1 if _UNEXPLAINED.search(words) else 2
