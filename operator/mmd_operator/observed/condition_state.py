"""A condition of a deployment. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmd_api.status import ConditionType

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class ConditionState:
    """A condition as it is now; the time of its last transition is added later, by `conditions.dated`."""

    type: ConditionType
    status: Truth
    reason: str
    message: str
