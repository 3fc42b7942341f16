"""Media bytes that the gateway holds for its requests, within one budget. Work waits for room; it is not dropped. Knows no request."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from mmd_workers.gateway.api import ApiError

WAIT_SECONDS = 20.0
RETRY_AFTER_SECONDS = 5.0


@dataclass(slots=True)
class _Held:
    data: bytes
    holders: int


class MediaHold:
    """A budget in bytes, granted first come first served, and the held media by content digest."""

    def __init__(self, budget_bytes: int, wait_seconds: float = WAIT_SECONDS) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._wait_seconds = wait_seconds
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._media: dict[str, _Held] = {}

    @property
    def held_media(self) -> int:
        """Distinct media held."""
        return len(self._media)

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiters)

    def get(self, digest: str) -> bytes | None:
        """Bytes of a held medium."""
        held = self._media.get(digest)
        return None if held is None else held.data

    def reservation(self) -> Reservation:
        """An empty share of the budget; `release` it whatever happens."""
        return Reservation(self)

    async def acquire(self, num_bytes: int) -> None:
        """Take room, waiting behind those who came first.

        Raises:
            ApiError: 503, there was none in time; 413, there can never be.
        """
        if num_bytes > self.budget_bytes:
            raise ApiError(
                413,
                f"the request's media need {num_bytes} bytes and the gateway holds at most {self.budget_bytes}: send less at once",
                code="request_too_large",
            )
        if not self._waiters and self.used_bytes + num_bytes <= self.budget_bytes:
            self.used_bytes += num_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (num_bytes, turn)
        self._waiters.append(entry)
        try:
            async with asyncio.timeout(self._wait_seconds):
                await asyncio.shield(turn)
        except TimeoutError as error:
            if turn.done():
                return
            self._waiters.remove(entry)
            self._admit()
            raise ApiError(
                503,
                "the gateway's memory for media is in use by other requests: retry",
                code="overloaded",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            ) from error
        except asyncio.CancelledError:
            if turn.done():
                self.give_back(num_bytes)
            else:
                self._waiters.remove(entry)
                self._admit()
            raise

    def give_back(self, num_bytes: int) -> None:
        """Return room."""
        self.used_bytes -= num_bytes
        self._admit()

    def put(self, digest: str, data: bytes) -> None:
        """Hold a medium once more (its room has been taken)."""
        held = self._media.setdefault(digest, _Held(data, 0))
        held.holders += 1

    def drop(self, digest: str) -> None:
        """Hold a medium once less."""
        held = self._media[digest]
        held.holders -= 1
        if not held.holders:
            del self._media[digest]

    def _admit(self) -> None:
        while self._waiters and self.used_bytes + self._waiters[0][0] <= self.budget_bytes:
            num_bytes, turn = self._waiters.popleft()
            self.used_bytes += num_bytes
            turn.set_result(None)


class Reservation:
    """One request's share of a `MediaHold`, and the media it holds there."""

    def __init__(self, hold: MediaHold) -> None:
        self._hold = hold
        self._digests: list[str] = []
        self.num_bytes = 0

    async def grow(self, num_bytes: int) -> None:
        """Take more room; see `MediaHold.acquire` for what it raises."""
        if num_bytes > 0:
            await self._hold.acquire(num_bytes)
            self.num_bytes += num_bytes

    def shrink(self, to_bytes: int) -> None:
        """Keep only so much."""
        if to_bytes < self.num_bytes:
            freed, self.num_bytes = self.num_bytes - to_bytes, to_bytes
            self._hold.give_back(freed)

    def put(self, digest: str, data: bytes) -> None:
        """Hold a medium until `release`."""
        self._hold.put(digest, data)
        self._digests.append(digest)

    def release(self) -> None:
        """Give everything back. Safe to call twice."""
        while self._digests:
            self._hold.drop(self._digests.pop())
        self.shrink(0)
