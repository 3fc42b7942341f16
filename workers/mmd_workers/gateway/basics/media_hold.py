"""Memory that requests hold at the gateway: bodies while they arrive, media until the request ends, answers until they are sent.

Each request has its own allowance, which is large enough for text and never waits. Further memory comes from shared budgets, one for bodies
and media and one for answers. Requests wait for room there, and are not dropped. So text never waits for media. Independent of requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from mmd_api.contract.errors import OverloadedError, RequestTooLargeError

WAIT_SECONDS = 20.0
RETRY_AFTER_SECONDS = 5.0
ALLOWANCE_BYTES = 2 << 20
"""Allowance of each admitted request. A body of 1 MiB, which is text of more than 200,000 tokens, takes twice its size to parse."""


@dataclass(slots=True)
class _Held:
    data: bytes
    holders: int


@dataclass(slots=True, eq=False)
class _Waiter:
    num_bytes: int
    turn: asyncio.Future[None]
    passed_bytes: int = 0  # granted to later requests meanwhile


class TooLargeError(Exception):
    """The request needs more than one request may ever hold."""


class NoRoomError(Exception):
    """Other requests held the budget for too long."""


class Budget:
    """Bytes that requests share.

    They are granted in order of arrival, but requests that already hold some come first, so that they can finish. One request may hold the
    budget divided by `share_divisor`. With `may_pass`, a new request that fits passes one that does not. Once those that passed it were granted
    as much as the whole budget, others wait for it, so it cannot starve.
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
        """Maximum bytes that one request may hold."""
        return self.budget_bytes // self._share_divisor

    @property
    def waiting(self) -> int:
        """Number of requests that wait for room."""
        return len(self._holders) + len(self._newcomers)

    async def acquire(self, num_bytes: int, held_bytes: int, waits: bool = True) -> None:
        """Take room for a request that holds `held_bytes` of the budget. Without `waits`, it only gets free room, and only if nobody waits.

        Raises:
            NoRoomError: no room was free in time.
            TooLargeError: there can never be enough room.
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
        """Return room to the budget."""
        self.used_bytes -= num_bytes
        self._admit()

    def resize(self, budget_bytes: int) -> None:
        """Change the budget. Held bytes stay held; a smaller budget admits nothing until enough is returned."""
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
    """One request's part of a budget: its allowance, and any bytes beyond it. It must be released whatever happens."""

    def __init__(self, budget: Budget, waits: bool = True) -> None:
        self._budget, self._waits = budget, waits
        self._granted_bytes = 0  # bytes of the budget, beyond the allowance
        self.num_bytes = 0

    async def resize(self, num_bytes: int) -> None:
        """Hold exactly this many bytes; see `Budget.acquire` for the errors raised."""
        if num_bytes > self.num_bytes:
            await self.grow(num_bytes - self.num_bytes)
        else:
            self.shrink(num_bytes)

    async def grow(self, num_bytes: int) -> None:
        """Take more room; see `Budget.acquire` for the errors raised."""
        self.num_bytes += num_bytes
        missing_bytes = self._beyond_allowance() - self._granted_bytes
        if missing_bytes <= 0:
            return
        held_bytes, self._granted_bytes = self._granted_bytes, self._granted_bytes + missing_bytes
        try:
            await self._budget.acquire(missing_bytes, held_bytes, self._waits)
        except BaseException:
            self._granted_bytes -= missing_bytes
            self.num_bytes -= num_bytes
            raise

    @property
    def room_bytes(self) -> int:
        """Bytes that it can still take, once others have returned theirs."""
        return max(0, self._budget.allowance_bytes + self._budget.share_bytes - self.num_bytes)

    def shrink(self, to_bytes: int) -> None:
        """Reduce it to this many bytes. No `grow` may be in flight."""
        if to_bytes < self.num_bytes:
            self.num_bytes = to_bytes
            freed_bytes = self._granted_bytes - self._beyond_allowance()
            if freed_bytes > 0:
                self._granted_bytes -= freed_bytes
                self._budget.give_back(freed_bytes)

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
        """Number of distinct media held."""
        return len(self._media)

    def get(self, digest: str) -> bytes | None:
        """The bytes of a held medium; None if it is not held."""
        medium = self._media.get(digest)
        return None if medium is None else medium.data

    def reservation(self, waits: bool = True) -> RequestReservation:
        """An empty share of the budget, which must be released whatever happens. See `Budget.acquire` for `waits`."""
        return RequestReservation(self, waits)

    def put(self, digest: str, data: bytes) -> None:
        """Add a holder of a medium, whose room has been taken."""
        medium = self._media.setdefault(digest, _Held(data, 0))
        medium.holders += 1

    def drop(self, digest: str) -> None:
        """Remove a holder of a medium."""
        medium = self._media[digest]
        medium.holders -= 1
        if not medium.holders:
            del self._media[digest]


class RequestReservation(Share):
    """One request's share for its body and media, and the media it holds in a `MediaHold`."""

    def __init__(self, hold: MediaHold, waits: bool = True) -> None:
        super().__init__(hold, waits)
        self._hold = hold
        self._digests: list[str] = []

    async def grow(self, num_bytes: int) -> None:
        """Take more room.

        Raises:
            OverloadedError: no room was free in time.
            RequestTooLargeError: there can never be enough room.
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
