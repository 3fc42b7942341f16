"""A condition of a deployment. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmd_api.status import ConditionType

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class ConditionState:
    """Current state of a condition. `conditions.dated` adds the time of its last transition later."""

    type: ConditionType
    status: Truth
    reason: str
    message: str
