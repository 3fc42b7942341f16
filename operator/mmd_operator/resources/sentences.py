"""Sentence of a rule or a step: the first paragraph of its docstring. Docs and `mmd explain` use the same words. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable


def sentence_of(rule: Callable[..., object]) -> str:
    """Sentence on one line, without backticks and a full stop, for a table or after a colon."""
    words = " ".join((inspect.getdoc(rule) or "").partition("\n\n")[0].split()).rstrip(".").replace("`", "")
    return words if words[1:2].isupper() else words[:1].lower() + words[1:]
