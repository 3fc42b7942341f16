"""How fast bytes travel between pods, from the transfers of requests that this gateway placed. Pure.

A pair of which nothing is known is as fast as others of its kind: on one node, or between two. What is known of a pair fades with time, so
that one that was slow once gets another chance.
"""

from __future__ import annotations

from collections import OrderedDict

KEPT_PAIRS = 4096
HALF_LIFE_SECONDS = 20.0  # after which half of what is known of a pair is what is known of its kind
AVERAGE_WEIGHT = 0.2  # of the newest transfer
LEAST_BYTES = 4096  # of a transfer that says something about a rate
LEAST_SECONDS = 1e-5
RATE_BOUNDS = (1e5, 1e12)  # bytes a second


class Links:
    """Of one kind of payload: embeddings, or KV."""

    def __init__(
        self, same_node_bytes_per_second: float, other_node_bytes_per_second: float, bytes_per_token: float
    ) -> None:
        """What counts until something has been measured, and then less with each transfer."""
        self._by_kind = {True: same_node_bytes_per_second, False: other_node_bytes_per_second}
        self._by_pair: OrderedDict[tuple[str, str], tuple[float, float]] = (
            OrderedDict()
        )  # with when it moved something last
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
        """A transfer has ended. Small ones say how many bytes a token has, but nothing of a rate. `now`: seconds on a clock that never goes
        back.
        """
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
        """Bytes a second of a pair."""
        kind = self._by_kind[same_node]
        if (known := self._by_pair.get((sender, receiver))) is None:
            return kind
        rate, newest = known
        return _average(kind, rate, 0.5 ** (max(0.0, now - newest) / HALF_LIFE_SECONDS))

    def knows(self, sender: str, receiver: str) -> bool:
        """Whether the rate of a pair is another than that of its kind."""
        return (sender, receiver) in self._by_pair

    def rate_of_kind(self, *, same_node: bool) -> float:
        """Bytes a second of a pair of which nothing is known."""
        return self._by_kind[same_node]


def _average(old: float, new: float, weight: float) -> float:
    """Of seconds a byte: of transfers of one size, the time for all. `weight`: of the new one."""
    return 1 / (1 / old + weight * (1 / new - 1 / old))
