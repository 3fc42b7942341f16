"""Interface between the model of the pipeline and the placer of its requests.

The gateway's router is a placer; it lives outside of the operator, which does not know it. Without a placer, requests wait in one queue
for the first free replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mmd_operator.simulate.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class PlacedAt:
    """Pods of a request by name: one pod to prefill, and pods that may decode, in order of preference.

    `needs_media`: its media are not in the prefill pod's prefix cache, so they have to be encoded. `encode_here`: the prefill pod encodes
    them, although there are encoder pods.
    """

    prefill: str
    decode: tuple[str, ...]
    needs_media: bool = True
    encode_here: bool = False


class Placing(Protocol):
    """Places the requests of one run. Times are seconds of the trace; requests are their numbers in it."""

    def place(self, now: float, request: int, telemetry: Telemetry) -> PlacedAt | None:
        """Return where a request goes; None: it is refused."""

    def begin(self, pod: str, request: int) -> int:
        """Note that a pod begins to prefill a request, and return how many of its first tokens the pod has cached."""

    def computed(self, now: float, pod: str, request: int) -> None:
        """Note that a pod has computed the prompt, and that the client gets the first token."""

    def pods_changed(self) -> None:
        """Note that a pod has become ready, or has been asked to leave."""
