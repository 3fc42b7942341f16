"""How the answer of a sequence ends, as pods report it to each other."""

from __future__ import annotations

from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]
