"""The life of features on the worker that needs them, within a budget of bytes: work waits for room, it is never dropped.

Registered → Encoding → Encoded → Merged → Prefilled → Discarded. A request is admitted with all its features at once, so that
two half-admitted requests can never wait for each other's bytes. The oldest request is admitted first; while it does not fit, younger
ones that do pass it, at most `MAX_OVERTAKEN` times. Whoever adds a feature starts its encoding in the same turn of the event loop, so
that no request ever waits for a feature that nobody makes. The features of a finished request stay as cache until their bytes are needed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Literal

from mmd_api.contract.errors import CapacityError, MmdError
from mmd_workers.basics.overtaking import next_in_line
from mmd_workers.features.held import HeldFeatures
from mmd_workers.model.prompt import Feature


class FeatureState(StrEnum):
    """Where a feature is in its life on this worker."""

    REGISTERED = "registered"
    ENCODING = "encoding"
    ENCODED = "encoded"
    MERGED = "merged"
    PREFILLED = "prefilled"
    DISCARDED = "discarded"


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    state: FeatureState
    arrival: asyncio.Future[Feature]
    users: set[str] = field(default_factory=set)

    @property
    def is_here(self) -> bool:
        """Whether the feature has arrived."""
        arrival = self.arrival
        return arrival.done() and not arrival.cancelled() and arrival.exception() is None


@dataclass(frozen=True, slots=True)
class Admitted:
    """The features of a request that has its room.

    `arrivals`: a future per feature id, of the feature or of the error that ended its life. Shared by all users: await it shielded.
    `new_ids`: ids of the features whose encoding this request has started.
    """

    arrivals: dict[str, asyncio.Future[Feature]]
    new_ids: list[str]


@dataclass(slots=True, eq=False)
class _Waiting:
    request_id: str
    needs: dict[str, int]
    encode: Callable[[str], None]
    turn: asyncio.Future[Admitted]
    overtaken: int = 0


class FeatureStore:
    """Reserves, holds and evicts features. Belongs to one event loop; `on_transition(from, to)` counts every step."""

    def __init__(
        self,
        budget_bytes: int,
        on_transition: Callable[[FeatureState | None, FeatureState], None],
        held: HeldFeatures | None = None,
    ) -> None:
        """`held`: notes which features come and go."""
        self._held = held if held is not None else HeldFeatures()
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._on_transition = on_transition
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._waiting: list[_Waiting] = []  # oldest first

    async def admit(
        self, request_id: str, needs: Mapping[str, int], encode: Callable[[str], None]
    ) -> Admitted:
        """Reserve room for all features of a request (feature id → bytes), and start the encoding of those that are missing.

        `encode(feature_id)` starts it, and must not raise: the feature, or its failure, arrives in the store later.

        Raises:
            CapacityError: the features can never fit into the budget.
        """
        if (total := sum(needs.values())) > self.budget_bytes:
            raise CapacityError(
                f"the media of this request need {total} bytes of embeddings, more than the budget of "
                f"{self.budget_bytes}; send fewer or smaller media, or raise featureBudgetMebibytes of the pool"
            )
        turn: asyncio.Future[Admitted] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(request_id, dict(needs), encode, turn)
        self._waiting.append(waiting)
        self._admit_waiting()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit_waiting()
            else:
                self.release(request_id)
            raise

    def _admit_waiting(self) -> None:
        while self._waiting:
            self._waiting = [waiting for waiting in self._waiting if not waiting.turn.cancelled()]
            used_bytes = sum(entry.num_bytes for entry in self._entries.values() if entry.users)
            admitted = next_in_line(self._waiting, partial(self._fits, used_bytes))
            if admitted is None:
                return
            self._waiting.remove(admitted)
            self._admit(admitted)

    def _fits(self, used_bytes: int, waiting: _Waiting) -> bool:
        """Whether there is room for these features beside those with users, which have `used_bytes`."""
        for feature_id, num_bytes in waiting.needs.items():
            entry = self._entries.get(feature_id)
            if entry is None:
                used_bytes += num_bytes
            elif not entry.users:
                used_bytes += entry.num_bytes
        return used_bytes <= self.budget_bytes

    def _admit(self, admitted: _Waiting) -> None:
        new_ids = [feature_id for feature_id in admitted.needs if feature_id not in self._entries]
        for feature_id in admitted.needs.keys() - set(new_ids):
            self._entries[feature_id].users.add(admitted.request_id)
        self._make_room(sum(admitted.needs[feature_id] for feature_id in new_ids))
        for feature_id in new_ids:
            self._register(feature_id, admitted.needs[feature_id], admitted.request_id)
        for feature_id in admitted.needs:
            self._entries.move_to_end(feature_id)
        arrivals = {feature_id: self._entries[feature_id].arrival for feature_id in admitted.needs}
        admitted.turn.set_result(Admitted(arrivals, new_ids))
        for feature_id in new_ids:
            self._move(self._entries[feature_id], FeatureState.ENCODING)
            admitted.encode(feature_id)

    def _make_room(self, num_bytes: int) -> None:
        """Discard features without users, least recently used first, until there is room."""
        idle_ids = iter([feature_id for feature_id, entry in self._entries.items() if not entry.users])
        while self.used_bytes + num_bytes > self.budget_bytes:
            self._discard(next(idle_ids))

    def _register(self, feature_id: str, num_bytes: int, user: str) -> None:
        arrival: asyncio.Future[Feature] = asyncio.get_running_loop().create_future()
        # The error is retrieved, so that a failure that nobody waits for is not logged.
        arrival.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._entries[feature_id] = _Entry(num_bytes, FeatureState.REGISTERED, arrival, {user})
        self.used_bytes += num_bytes
        self._on_transition(None, FeatureState.REGISTERED)

    def _move(self, entry: _Entry, state: FeatureState) -> None:
        if entry.state is not state:
            self._on_transition(entry.state, state)
            entry.state = state

    def arrival(self, feature_id: str) -> asyncio.Future[Feature]:
        """The future of a feature in the store, for who makes it. Users get theirs from `admit`."""
        return self._entries[feature_id].arrival

    def verdict(self, feature_id: str, num_bytes: int) -> Literal["send", "have", "refuse"]:
        """The answer to an OFFER of this feature: its bytes were reserved at admission, or nothing needs it."""
        entry = self._entries.get(feature_id)
        if entry is None or num_bytes > entry.num_bytes:
            return "refuse"
        return "have" if entry.arrival.done() else "send"

    def deliver(self, feature_id: str, feature: Feature) -> None:
        """Store a feature that arrived complete and verified."""
        entry = self._entries.get(feature_id)
        if entry is None or entry.arrival.done():
            return
        self.used_bytes += feature.num_bytes - entry.num_bytes
        entry.num_bytes = feature.num_bytes
        self._move(entry, FeatureState.ENCODED)
        entry.arrival.set_result(feature)
        self._held.add(feature_id)
        self._admit_waiting()

    def fail(self, feature_id: str, error: MmdError) -> None:
        """Give up a feature that will not arrive: all waiters get the error, and its room is freed."""
        if (entry := self._entries.get(feature_id)) is None or entry.arrival.done():
            return
        entry.arrival.set_exception(error)
        self._discard(feature_id)
        self._admit_waiting()

    def merged(self, feature_id: str) -> None:
        """Note that a prompt has the feature."""
        if (entry := self._entries.get(feature_id)) is not None and entry.state is FeatureState.ENCODED:
            self._move(entry, FeatureState.MERGED)

    def release(self, request_id: str) -> None:
        """Release a request that was prefilled, failed or cancelled. A feature without users stays as cache, if it ever came."""
        for fid, entry in list(self._entries.items()):
            if request_id not in entry.users:
                continue
            entry.users.discard(request_id)
            if entry.users:
                continue
            if entry.arrival.done():
                self._move(entry, FeatureState.PREFILLED)
            else:
                entry.arrival.cancel()
                self._discard(fid)
        self._admit_waiting()

    def _discard(self, feature_id: str) -> None:
        entry = self._entries.pop(feature_id)
        self.used_bytes -= entry.num_bytes
        self._move(entry, FeatureState.DISCARDED)
        if entry.is_here:
            self._held.remove(feature_id)

    @property
    def needed_bytes(self) -> int:
        """Bytes of features in use, which no other request can have, and of features that requests wait for room for."""
        used = sum(entry.num_bytes for entry in self._entries.values() if entry.users)
        waiting = {
            fid: size
            for waiting in self._waiting
            if not waiting.turn.cancelled()
            for fid, size in waiting.needs.items()
        }
        return used + sum(size for fid, size in waiting.items() if fid not in self._entries)

    def bytes_by_state(self) -> dict[FeatureState, int]:
        """Reserved and held bytes by the state of their features."""
        totals = dict.fromkeys(FeatureState, 0)
        for entry in self._entries.values():
            totals[entry.state] += entry.num_bytes
        return totals

    def newest(self, count: int) -> list[str]:
        """Up to `count` ids of features that are here, most recently used first."""
        return [fid for fid, entry in reversed(self._entries.items()) if entry.arrival.done()][:count]
