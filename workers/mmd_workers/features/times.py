"""The times of a feature's encoding and transfer steps, for timelines. Independent of the network."""

from __future__ import annotations

from collections import OrderedDict

MAX_REMEMBERED_TIMES = 4096


class FeatureTimes:
    """Unix times of the steps of recent features, and the `wire_seconds` of their transfers; a bounded memory, for timelines only."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, dict[str, float]] = OrderedDict()

    def add(self, feature_id: str, times: dict[str, float]) -> None:
        """Note the times of a feature."""
        self._times.setdefault(feature_id, {}).update(times)
        self._times.move_to_end(feature_id)
        while len(self._times) > MAX_REMEMBERED_TIMES:
            self._times.popitem(last=False)

    def take(self, feature_id: str) -> dict[str, float]:
        """The times of a feature, once: later users found it here and did not wait."""
        return self._times.pop(feature_id, {})


def steps_of(times: dict[str, float]) -> dict[str, float]:
    """Milliseconds of the steps of an encode: read, decode, process, wait (for its batch), tower; empty for a cached feature."""
    marks = ("start", "read", "decoded", "processed", "tower_start", "tower_end")
    names = ("read_ms", "decode_ms", "process_ms", "wait_ms", "tower_ms")
    if not all(mark in times for mark in marks):
        return {}
    return {
        name: round(1000 * max(0.0, times[end] - times[begin]), 3)
        for name, begin, end in zip(names, marks, marks[1:], strict=False)
    }
