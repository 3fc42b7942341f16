"""Why vLLM does not start, in one line. Independent of vLLM."""

from __future__ import annotations

import re
import traceback

from pydantic import ValidationError

_OF_ANOTHER = re.compile(
    r"connection (was |has been )?(likely )?(closed|reset|refused|aborted)|broken pipe|closed by (peer|remote)|peer closed"
    r"|remote (process|error)|did the remote server shutdown|client socket has failed to connect|communicator was aborted"
    r"|timed out|timeout",
    re.IGNORECASE,
)
"""What processes that compute together report when one of them has gone."""
_UNEXPLAINED = re.compile(r"without a reason|gave no reason|nothing was heard|was killed \(|exited with code")
MAX_CHARACTERS = 240  # with what surrounds it, no more than a condition keeps of a pod's last message
FROM_A_RANK = re.compile(r"^Worker failed with error '(.*)', please check the stack trace .*$", re.DOTALL)


def reason(error: BaseException) -> str:
    """vLLM's own words: those of the innermost cause, since outer ones point to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ValidationError):  # whose own text begins with how many errors there are
        words = "; ".join(str(one["msg"]) for one in error.errors(include_url=False))
    else:
        words = str(error) or _condition(error)
    words = FROM_A_RANK.sub(r"\1", words)
    line = " ".join(words.removeprefix("Value error, ").split()).rstrip(".:;")
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]}…"


def _condition(error: BaseException) -> str:
    """Of an error without words: its kind, and the line that raised it, which for an assertion has what did not hold."""
    frames = traceback.extract_tb(error.__traceback__)
    return " ".join([type(error).__name__, *([f"({frames[-1].line})"] if frames and frames[-1].line else [])])


def weight(words: str) -> int:
    """How much of an end a reason explains, to choose among those of processes that end together: 0, that another process is gone; 1,
    that this one has ended; 2, why it has."""
    if _OF_ANOTHER.search(words):
        return 0
    return 1 if _UNEXPLAINED.search(words) else 2
