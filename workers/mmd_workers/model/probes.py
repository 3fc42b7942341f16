"""What media of some size become, kept for the next of the same size. Independent of processors."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

OVERHEAD_BYTES = (
    4096  # of a probe besides its text and its key: geometry, which is small, and Python's objects
)
KEY_ELEMENT_BYTES = 40  # an integer and the tuple's reference to it


@dataclass(frozen=True, slots=True)
class Probe:
    """What one medium becomes: its text, its facts, its work, and the bytes of the tower's inputs."""

    replacement: str
    geometry: dict[str, Any]
    work: int
    input_bytes: int


class ProbeCache:
    """`make`, remembering its results by their arguments within `budget_bytes`: clients choose how long the texts are, and send as many
    sizes as they like. The least recently used go first; an error is not kept. Thread safe.
    """

    def __init__(self, make: Callable[..., Probe], budget_bytes: int) -> None:
        self._make = make
        self._budget = budget_bytes
        self._used = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Hashable, ...], Probe] = OrderedDict()

    def __call__(self, *key: Hashable) -> Probe:
        """The probe of these arguments, made now or earlier."""
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return known
        made = self._make(*key)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._used += _size(key, made)
            while self._used > self._budget:
                self._used -= _size(*self._kept.popitem(last=False))
        return made


def _size(key: tuple[Hashable, ...], probe: Probe) -> int:
    elements = sum(len(part) for part in key if isinstance(part, tuple))
    return OVERHEAD_BYTES + sys.getsizeof(probe.replacement) + KEY_ELEMENT_BYTES * elements
