"""Names of the pools and of the roles that their pods hold."""

from __future__ import annotations

from typing import Literal

PoolName = Literal["encoder", "prefill", "decode"]
Role = Literal["encode", "prefill", "decode"]

POOL_NAMES: tuple[PoolName, ...] = ("encoder", "prefill", "decode")
