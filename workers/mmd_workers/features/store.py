"""The life of features on the worker that needs them, within a budget of bytes: work waits for room, it is never dropped.

Registered → Encoding → Encoded → Merged → Prefilled → Discarded. A request is admitted with all its features at once, in
order of arrival, so that two half-admitted requests can never wait for each other's bytes. The features of a finished request
stay as cache until their bytes are needed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from mmd_api.contract.errors import CapacityError, FeatureLostError, MmdError
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
        self._waiting: deque[tuple[dict[str, int], str, asyncio.Future[list[str]]]] = deque()

    async def admit(self, request_id: str, needs: Mapping[str, int]) -> list[str]:
        """Reserve room for all features of a request (feature id → bytes); returns the ids nobody is encoding yet.

        Raises:
            CapacityError: the features can never fit into the budget.
        """
        if (total := sum(needs.values())) > self.budget_bytes:
            raise CapacityError(
                f"the media of this request need {total} bytes of embeddings, more than the budget of "
                f"{self.budget_bytes}; send fewer or smaller media, or raise featureBudgetMebibytes of the pool"
            )
        turn: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._waiting.append((dict(needs), request_id, turn))
        self._admit_waiting()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(request_id)
            else:
                self._waiting = deque(item for item in self._waiting if item[2] is not turn)
                self._admit_waiting()
            raise

    def _admit_waiting(self) -> None:
        while self._waiting:
            needs, request_id, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
                continue
            new_sizes = {fid: size for fid, size in needs.items() if fid not in self._entries}
            if not self._make_room(sum(new_sizes.values()), keep=needs.keys()):
                return
            self._waiting.popleft()
            for fid in needs:
                if fid in new_sizes:
                    self._register(fid, new_sizes[fid])
                self._entries[fid].users.add(request_id)
                self._entries.move_to_end(fid)
            turn.set_result(list(new_sizes))

    def _make_room(self, num_bytes: int, keep: Collection[str]) -> bool:
        missing_bytes = self.used_bytes + num_bytes - self.budget_bytes
        if missing_bytes <= 0:
            return True
        idle = [(fid, entry) for fid, entry in self._entries.items() if not entry.users and fid not in keep]
        if sum(entry.num_bytes for _, entry in idle) < missing_bytes:
            return False
        for fid, entry in idle:
            if missing_bytes <= 0:
                break
            missing_bytes -= entry.num_bytes
            self._discard(fid)
        return True

    def _register(self, feature_id: str, num_bytes: int) -> None:
        arrival: asyncio.Future[Feature] = asyncio.get_running_loop().create_future()
        # The error is retrieved, so that a failure that nobody waits for is not logged.
        arrival.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._entries[feature_id] = _Entry(num_bytes, FeatureState.REGISTERED, arrival)
        self.used_bytes += num_bytes
        self._on_transition(None, FeatureState.REGISTERED)

    def _move(self, entry: _Entry, state: FeatureState) -> None:
        if entry.state is not state:
            self._on_transition(entry.state, state)
            entry.state = state

    def arrival(self, feature_id: str) -> asyncio.Future[Feature]:
        """A future of the feature, or of the error that ended its life. Shared by all users: await it shielded.

        Raises:
            FeatureLostError: the feature failed for others between this request's admission and now.
        """
        if (entry := self._entries.get(feature_id)) is None:
            raise FeatureLostError(
                "a medium failed for another request that shares it; place this request again"
            )
        return entry.arrival

    def encoding(self, feature_id: str) -> None:
        """Note that the feature's encode job has been published or started."""
        if (entry := self._entries.get(feature_id)) is not None and entry.state is FeatureState.REGISTERED:
            self._move(entry, FeatureState.ENCODING)

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
            fid: size for needs, _, turn in self._waiting if not turn.done() for fid, size in needs.items()
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
