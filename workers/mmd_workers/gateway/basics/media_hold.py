"""Memory that requests hold at the gateway: bodies as they arrive, media until their request ends, answers until they are sent.
Independent of requests.

Each request has its own allowance, which is large enough for text and never waits. What a request needs beyond it comes from a
budget that all share, one for bodies and media and one for answers: work waits for room there; it is not dropped. So text never
waits for media.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from mmd_api.contract.errors import OverloadedError, RequestTooLargeError

WAIT_SECONDS = 20.0
RETRY_AFTER_SECONDS = 5.0
ALLOWANCE_BYTES = 2 << 20
"""Of each request that is let in: a body of 1 MiB, which is text of more than 200,000 tokens, takes twice its size to parse."""


@dataclass(slots=True)
class _Held:
    data: bytes
    holders: int


@dataclass(slots=True, eq=False)
class _Waiter:
    num_bytes: int
    turn: asyncio.Future[None]
    passed_bytes: int = 0  # granted to others that came later


class TooLargeError(Exception):
    """More than one request may ever hold."""


class NoRoomError(Exception):
    """Others held the budget for too long."""


class Budget:
    """Bytes that requests share.

    They are granted first come first served, but a request that holds some goes first, so that it can finish. One request
    may hold the budget divided by `share_divisor`. With `may_pass`, a newcomer that fits passes one that does not, until those that
    passed it were granted as much as the whole budget: after that they wait for it, so it cannot starve.
    """

    def __init__(
        self, budget_bytes: int, *, allowance_bytes: int = 0, share_divisor: int = 1, may_pass: bool = False
    ) -> None:
        self.budget_bytes = budget_bytes
        self.allowance_bytes = allowance_bytes
        self.used_bytes = 0
        self._share_divisor = share_divisor
        self._may_pass = may_pass
        self._holders: deque[_Waiter] = deque()
        self._newcomers: deque[_Waiter] = deque()

    @property
    def share_bytes(self) -> int:
        """What one request may hold at most."""
        return self.budget_bytes // self._share_divisor

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._holders) + len(self._newcomers)

    async def acquire(self, num_bytes: int, held_bytes: int, waits: bool = True) -> None:
        """Take room for one that holds `held_bytes` of the budget. Without `waits` it gets what is free while nobody waits.

        Raises:
            NoRoomError: there was none in time.
            TooLargeError: there can never be.
        """
        if held_bytes + num_bytes > self.share_bytes:
            raise TooLargeError
        if not waits and (self.waiting or self.used_bytes + num_bytes > self.budget_bytes):
            raise NoRoomError
        queue = self._holders if held_bytes else self._newcomers
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = _Waiter(num_bytes, turn)
        queue.append(entry)
        self._admit()
        if turn.done():
            return
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await asyncio.shield(turn)
        except TimeoutError as error:
            if turn.done():
                return
            queue.remove(entry)
            self._admit()
            raise NoRoomError from error
        except asyncio.CancelledError:
            if turn.done():
                self.give_back(num_bytes)
            else:
                queue.remove(entry)
                self._admit()
            raise

    def give_back(self, num_bytes: int) -> None:
        """Return room."""
        self.used_bytes -= num_bytes
        self._admit()

    def resize(self, budget_bytes: int) -> None:
        """Change the budget. What is held stays; a smaller budget admits nothing until enough is returned."""
        self.budget_bytes = budget_bytes
        self._admit()

    def _admit(self) -> None:
        while self._holders:
            if not self._fits(self._holders[0]):
                return
            self._grant(self._holders.popleft())
        passed: list[_Waiter] = []
        for waiter in list(self._newcomers):
            if self._fits(waiter):
                self._newcomers.remove(waiter)
                self._grant(waiter)
                for other in passed:
                    other.passed_bytes += waiter.num_bytes
                if any(other.passed_bytes >= self.budget_bytes for other in passed):
                    return
            elif self._may_pass and waiter.passed_bytes < self.budget_bytes:
                passed.append(waiter)
            else:
                return

    def _fits(self, waiter: _Waiter) -> bool:
        return self.used_bytes + waiter.num_bytes <= self.budget_bytes

    def _grant(self, waiter: _Waiter) -> None:
        self.used_bytes += waiter.num_bytes
        waiter.turn.set_result(None)


class Share:
    """One request's part of a budget: its allowance, and what it takes beyond it. `release` it whatever happens."""

    def __init__(self, budget: Budget, waits: bool = True) -> None:
        self._budget, self._waits = budget, waits
        self._granted_bytes = 0  # of the budget
        self.num_bytes = 0

    async def resize(self, num_bytes: int) -> None:
        """Hold exactly so much; see `Budget.acquire` for what it raises."""
        if num_bytes > self.num_bytes:
            await self.grow(num_bytes - self.num_bytes)
        else:
            self.shrink(num_bytes)

    async def grow(self, num_bytes: int) -> None:
        """Take more room; see `Budget.acquire` for what it raises."""
        self.num_bytes += num_bytes
        missing = self._beyond_allowance() - self._granted_bytes
        if missing <= 0:
            return
        held, self._granted_bytes = self._granted_bytes, self._granted_bytes + missing
        try:
            await self._budget.acquire(missing, held, self._waits)
        except BaseException:
            self._granted_bytes -= missing
            self.num_bytes -= num_bytes
            raise

    @property
    def room_bytes(self) -> int:
        """What it can still take, once others have returned what they hold."""
        return max(0, self._budget.allowance_bytes + self._budget.share_bytes - self.num_bytes)

    def shrink(self, to_bytes: int) -> None:
        """Keep only so much. No `grow` may be in flight."""
        if to_bytes < self.num_bytes:
            self.num_bytes = to_bytes
            freed = self._granted_bytes - self._beyond_allowance()
            if freed > 0:
                self._granted_bytes -= freed
                self._budget.give_back(freed)

    def release(self) -> None:
        """Give everything back. Safe to call twice."""
        self.shrink(0)

    def _beyond_allowance(self, more_bytes: int = 0) -> int:
        return max(0, self.num_bytes + more_bytes - self._budget.allowance_bytes)


class MediaHold(Budget):
    """The budget of bodies and media, and the held media by content digest."""

    def __init__(self, budget_bytes: int, *, allowance_bytes: int = 0) -> None:
        super().__init__(budget_bytes, allowance_bytes=allowance_bytes)
        self._media: dict[str, _Held] = {}

    @property
    def held_media(self) -> int:
        """Distinct media held."""
        return len(self._media)

    def get(self, digest: str) -> bytes | None:
        """Bytes of a held medium."""
        held = self._media.get(digest)
        return None if held is None else held.data

    def reservation(self, waits: bool = True) -> RequestReservation:
        """An empty share of the budget; `release` it whatever happens. See `Budget.acquire` for `waits`."""
        return RequestReservation(self, waits)

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


class RequestReservation(Share):
    """One request's body, its media, and the media that it holds in a `MediaHold`."""

    def __init__(self, hold: MediaHold, waits: bool = True) -> None:
        super().__init__(hold, waits)
        self._hold = hold
        self._digests: list[str] = []

    async def grow(self, num_bytes: int) -> None:
        """Take more room.

        Raises:
            OverloadedError: there was none in time.
            RequestTooLargeError: there can never be.
        """
        try:
            await super().grow(num_bytes)
        except TooLargeError as error:
            raise RequestTooLargeError(
                f"the request's body and media need {self._beyond_allowance(num_bytes)} bytes, but the gateway holds at most "
                f"{self._hold.budget_bytes}; send less data per request, or raise spec.gateway.maxBodyMebibytes"
            ) from error
        except NoRoomError as error:
            raise OverloadedError(
                f"the gateway's memory for media ({self._hold.budget_bytes} bytes) is in use by other requests; retry",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            ) from error

    def put(self, digest: str, data: bytes) -> None:
        """Hold a medium until `release`."""
        self._hold.put(digest, data)
        self._digests.append(digest)

    def release(self) -> None:
        """Give everything back. Safe to call twice."""
        while self._digests:
            self._hold.drop(self._digests.pop())
        super().release()
