"""A rule that one field alone cannot state, written once: pydantic evaluates `holds`, the API server evaluates `cel`.

Independent of the model: a model names its rules where it is defined. A rule about a value that this version does not serve yet goes away
when a later version serves it; the field stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a model and of its subclasses; `field` is where a reader should look, below that model.

    `cel` sees the same part of the resource as `self`. It is None where the schema itself already says it (unique list
    keys), and where it cannot see what the rule is about (below fields that keep what they get); the operator reports those. `cluster_only` rules are for the API server alone: the local runner serves what they refuse.
    """

    field: str
    cel: str | None
    holds: Callable[[Any], bool]
    problem: str
    remedy: str
    cluster_only: bool = False

    @property
    def message(self) -> str:
        """What is wrong and what to do, in the words that both evaluators use."""
        return f"{self.problem}; {self.remedy}"
