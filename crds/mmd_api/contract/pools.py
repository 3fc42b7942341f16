"""Names of the pools, of the roles that their pods hold, and of the kinds of media that encoders take."""

from __future__ import annotations

from typing import Literal

PoolName = Literal["encoder", "prefill", "decode"]
Role = Literal["encode", "prefill", "decode"]
Modality = Literal["image", "video", "audio"]

POOL_NAMES: tuple[PoolName, ...] = ("encoder", "prefill", "decode")
ROLES: tuple[Role, ...] = ("encode", "prefill", "decode")
MODALITIES: tuple[Modality, ...] = ("image", "video", "audio")
