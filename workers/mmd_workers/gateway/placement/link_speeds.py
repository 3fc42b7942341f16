"""Speeds of transfers between pods, measured on transfers of requests that this gateway placed. Pure.

A pair without measurements is assumed as fast as others of its kind: on one node, or on two. Measurements fade with time, so that a
pair that was slow once gets another chance.
"""

from __future__ import annotations

from collections import OrderedDict

KEPT_PAIRS = 4096
HALF_LIFE_SECONDS = 20.0  # after this time a pair's rate weighs as much as that of its kind
AVERAGE_WEIGHT = 0.2  # weight of the newest transfer
LEAST_BYTES = 4096  # smaller transfers say nothing about a rate
LEAST_SECONDS = 1e-5
RATE_BOUNDS = (1e5, 1e12)  # bytes a second


class Links:
    """Rates for one kind of payload: embeddings, or KV."""

    def __init__(
        self, same_node_bytes_per_second: float, other_node_bytes_per_second: float, bytes_per_token: float
    ) -> None:
        """Set the initial values, which weigh less with each measured transfer."""
        self._by_kind = {True: same_node_bytes_per_second, False: other_node_bytes_per_second}
        # Rate of each pair, with the time of its last transfer.
        self._by_pair: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()
        self.bytes_per_token = bytes_per_token

    def note(
        self,
        sender: str,
        receiver: str,
        *,
        same_node: bool,
        tokens: int,
        num_bytes: int,
        seconds: float,
        now: float,
    ) -> None:
        """Note a finished transfer. A small one gives the bytes per token, but no rate. `now`: seconds on a monotonic clock."""
        if tokens > 0 and num_bytes > 0:
            self.bytes_per_token = num_bytes / tokens
        if num_bytes < LEAST_BYTES or seconds <= 0:
            return
        low, high = RATE_BOUNDS
        rate = min(high, max(low, num_bytes / max(seconds, LEAST_SECONDS)))
        before = self.rate(sender, receiver, same_node=same_node, now=now)
        self._by_pair[sender, receiver] = _average(before, rate, AVERAGE_WEIGHT), now
        self._by_pair.move_to_end((sender, receiver))
        if len(self._by_pair) > KEPT_PAIRS:
            self._by_pair.popitem(last=False)
        self._by_kind[same_node] = _average(self._by_kind[same_node], rate, AVERAGE_WEIGHT)

    def rate(self, sender: str, receiver: str, *, same_node: bool, now: float) -> float:
        """Bytes per second between a pair of pods."""
        kind = self._by_kind[same_node]
        if (measured := self._by_pair.get((sender, receiver))) is None:
            return kind
        rate, newest = measured
        return _average(kind, rate, 0.5 ** (max(0.0, now - newest) / HALF_LIFE_SECONDS))

    def knows(self, sender: str, receiver: str) -> bool:
        """True if the pair has a measured rate of its own."""
        return (sender, receiver) in self._by_pair

    def rate_of_kind(self, *, same_node: bool) -> float:
        """Bytes per second between a pair without measurements."""
        return self._by_kind[same_node]


def _average(old: float, new: float, weight: float) -> float:
    """Average two rates by their seconds per byte, so that transfers of one size take the mean time. `weight`: of the new rate."""
    return 1 / (1 / old + weight * (1 / new - 1 / old))
