"""The engine that runs the language model."""

from __future__ import annotations

from typing import Literal

from mmd_api.base import ApiModel

EngineType = Literal["Native", "VLLM"]


class EngineSpec(ApiModel):
    """Engine of prefill and decode pods."""

    type: EngineType = "Native"
    """Native is part of the worker image and needs no GPU. VLLM needs an image that contains vLLM (build argument ENGINE=vllm)."""
