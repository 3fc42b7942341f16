"""Probes of media by their size, kept for the next medium of the same size. Independent of processors."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

OVERHEAD_BYTES = 4096  # a probe without its text and its key: its small geometry, and Python's objects
KEY_ELEMENT_BYTES = 40  # an integer and the tuple's reference to it


@dataclass(frozen=True, slots=True)
class Probe:
    """The facts of one processed medium: its text, its geometry, its work, and the bytes of the tower's inputs.

    The placeholders in the text `replacement` are the tokens of the medium.
    """

    replacement: str
    geometry: dict[str, Any]
    work: int
    input_bytes: int


class ProbeCache:
    """Calls `make` and keeps its results by their arguments, within `budget_bytes`. Thread safe.

    Clients choose how long the texts are, and send as many sizes as they like. The least recently used results go first; an error is
    not kept.
    """

    def __init__(self, make: Callable[..., Probe], budget_bytes: int) -> None:
        self._make = make
        self._budget = budget_bytes
        self._used = 0
        self._lock = threading.Lock()
        self._probes: OrderedDict[tuple[Hashable, ...], Probe] = OrderedDict()

    def __call__(self, *key: Hashable) -> Probe:
        """The probe of these arguments, from now or from an earlier call."""
        with self._lock:
            if (cached := self._probes.get(key)) is not None:
                self._probes.move_to_end(key)
                return cached
        probe = self._make(*key)
        with self._lock:
            if key not in self._probes:
                self._probes[key] = probe
                self._used += _size(key, probe)
            while self._used > self._budget:
                self._used -= _size(*self._probes.popitem(last=False))
        return probe


def _size(key: tuple[Hashable, ...], probe: Probe) -> int:
    elements = sum(len(part) for part in key if isinstance(part, tuple))
    return OVERHEAD_BYTES + sys.getsizeof(probe.replacement) + KEY_ELEMENT_BYTES * elements
