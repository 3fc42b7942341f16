"""Shares the places for reconcile passes between namespaces: an API server or webhook that is slow for one must not hold up all others."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PassPlaces:
    """Places for passes that run at the same time.

    A namespace may take one more place while it holds fewer than are free: one alone gets half of all places, the next half of the rest. Of
    those that wait, the one that holds the fewest comes first. (The dynamic thresholds of Choudhury and Hahne, IEEE/ACM Transactions on
    Networking 6(2), 1998.)
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def of(self, namespace: str) -> AsyncIterator[None]:
        """A place for a pass of this namespace, once it is its turn."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(turn)
        self._grant()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._held[namespace] -= 1
                self._free += 1
            elif turn in self._waiting.get(namespace, ()):
                self._waiting[namespace].remove(turn)
            self._grant()

    def _grant(self) -> None:
        while self._free:
            for namespace in [name for name, turns in self._waiting.items() if not turns]:
                del self._waiting[namespace]
            able = [name for name in self._waiting if self._held[name] < self._free]
            if not able:
                return
            namespace = min(able, key=self._held.__getitem__)
            turns = self._waiting.pop(namespace)
            turn = turns.popleft()
            self._waiting[namespace] = turns  # behind the others that hold as many
            if not turn.cancelled():
                self._held[namespace] += 1
                self._free -= 1
                turn.set_result(None)
