"""What the model of the pipeline asks whoever places its requests. The gateway's router does, outside of the operator, which does not know it.

Without anybody to place them, requests wait in one queue for the first replica that is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mmd_operator.simulate.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class PlacedAt:
    """Names of pods: the one that prefills, and those that may decode, in order of preference. `needs_media`: its media are not in that
    pod's prefix cache, so they have to be encoded. `encode_here`: by that pod, although there are encoder pods.
    """

    prefill: str
    decode: tuple[str, ...]
    needs_media: bool = True
    encode_here: bool = False


class Placing(Protocol):
    """Places the requests of one run. Times are seconds of the trace; requests are their numbers in it."""

    def place(self, now: float, request: int, telemetry: Telemetry) -> PlacedAt | None:
        """Where a request goes; None: it is refused."""

    def begin(self, pod: str, request: int) -> int:
        """A pod begins to prefill a request: how many of its first tokens it has cached."""

    def computed(self, now: float, pod: str, request: int) -> None:
        """A pod has computed the prompt, and the client gets the first token."""

    def pods_changed(self) -> None:
        """A pod has become ready, or has been asked to leave."""
