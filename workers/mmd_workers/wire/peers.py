"""Sends heartbeats and keeps a live view of the other pods. Independent of what the pods do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from mmd_api.contract.errors import DeadlineError, MmdError
from mmd_api.contract.load import WorkerState
from mmd_api.contract.pools import Role
from mmd_workers.basics.clock import SYSTEM_CLOCK, Clock
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.wire.bus import Bus, Subscription
from mmd_workers.wire.messages.every_pod import Heartbeat

MAX_PODS = 4096
CLOSE_SECONDS = 1.0  # for a heartbeat on its way
ABSENCE_SECONDS = (
    5.0  # without contact; with the 15 s in which a client may not notice this, others may call this pod lost
)
_RETIRED_INCARNATIONS = 8
_log = logging.getLogger(__name__)

_STARTED_AT = time.time() - time.monotonic()

EventKind = Literal["appeared", "lost", "reborn", "state"]


def sent_now() -> float:
    """Unix time for `Heartbeat.sent`. It does not go back when this machine's clock is set: heartbeats would count as late."""
    return _STARTED_AT + time.monotonic()


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """A change of a pod: `appeared`, `lost`, `reborn` (a new incarnation; all that the old one held is lost) or `state` (it changed).

    `heartbeat`: the newest one. `before`: the previous one, None for `appeared`.
    """

    kind: EventKind
    heartbeat: Heartbeat
    before: Heartbeat | None


@dataclass(slots=True)
class _Peer:
    heartbeat: Heartbeat
    last_seen: float
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=_RETIRED_INCARNATIONS))


class PeerTable:
    """The rules, without clock or network. `now` is seconds on any single clock that never goes back."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.tick_seconds = timeout_seconds / 8
        """Interval of `tick`."""
        self.refused = 0
        self.absences = 0
        """How often this process stood still or was disconnected for longer than `ABSENCE_SECONDS`."""
        self._heard_at: float | None = None  # when it last did neither
        self._silences: dict[str, float] = {}  # by lost pod: since when it is lost, oldest first
        self._listening_since: float | None = None  # lost pods may have been lost before
        self._peers: dict[str, _Peer] = {}
        self._places: dict[str, int] = {}  # index in `_beats`, by pod; empty: to be rebuilt
        self._beats: list[Heartbeat] = []
        self._last_tick: float | None = None

    def record(self, heartbeat: Heartbeat, now: float) -> list[PeerEvent]:
        """Record a heartbeat. One from a former incarnation (late on the wire) is ignored."""
        peer = self._peers.get(heartbeat.pod)
        if peer is None:
            if len(self._peers) >= MAX_PODS:
                self.refused += 1
                return []
            self._silences.pop(heartbeat.pod, None)
            self._peers[heartbeat.pod] = _Peer(heartbeat, now)
            self._places.clear()
            return [PeerEvent("appeared", heartbeat, None)]
        if heartbeat.incarnation in peer.retired:
            return []
        before = peer.heartbeat
        if heartbeat.incarnation == before.incarnation and heartbeat.sent < before.sent:
            return []
        peer.heartbeat, peer.last_seen = heartbeat, now
        if (place := self._places.get(heartbeat.pod)) is not None:
            self._beats[place] = heartbeat
        if heartbeat.incarnation != before.incarnation:
            peer.retired.append(before.incarnation)
            return [PeerEvent("reborn", heartbeat, before)]
        return [PeerEvent("state", heartbeat, before)] if heartbeat.state != before.state else []

    def tick(self, now: float, connected: bool = True) -> list[PeerEvent]:
        """Find lost pods. Silence proves nothing while this process is disconnected, or was itself stopped for half a timeout."""
        stalled = self._last_tick is not None and now - self._last_tick > self.timeout_seconds / 2
        self._last_tick = now
        if connected:
            if self._heard_at is not None and now - self._heard_at > ABSENCE_SECONDS + self.tick_seconds:
                self.absences += 1
            self._heard_at = now
        if stalled or not connected:
            self.forgive(now)
            return []
        lost = [pod for pod, peer in self._peers.items() if now - peer.last_seen > self.timeout_seconds]
        if lost:
            self._places.clear()
            self._silences |= dict.fromkeys(lost, now)
            for pod in list(self._silences)[:-MAX_PODS]:
                del self._silences[pod]  # lost before the others, and not before `_listening_since`
        return [PeerEvent("lost", peer.heartbeat, peer.heartbeat) for peer in map(self._peers.pop, lost)]

    def forgive(self, now: float) -> None:
        """Restart the timeout of every peer, and the silence of every lost pod."""
        self._listening_since = now
        self._silences.clear()
        for peer in self._peers.values():
            peer.last_seen = now

    def heartbeats(self) -> list[Heartbeat]:
        """Newest heartbeats of all pods, by pod name. Every request calls this, so names are sorted only when pods come or go."""
        if not self._places:
            self._beats = [self._peers[pod].heartbeat for pod in sorted(self._peers)]
            self._places = {beat.pod: place for place, beat in enumerate(self._beats)}
        return self._beats.copy()

    def get(self, pod: str) -> Heartbeat | None:
        """The newest heartbeat of a pod, None if it is unknown or lost."""
        peer = self._peers.get(pod)
        return None if peer is None else peer.heartbeat

    def silent_seconds(self, pod: str, now: float) -> float:
        """Seconds for which a pod has been lost, as far as this process could have heard it; 0 for a pod that is not lost."""
        if pod in self._peers or self._listening_since is None:
            return 0.0
        return now - self._silences.get(pod, self._listening_since)


class PeerDirectory:
    """A live `PeerTable` fed from the bus."""

    def __init__(self, bus: Bus, timeout_seconds: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._bus = bus
        self._clock = clock
        self._table = PeerTable(timeout_seconds)
        self._log = RateLimitedLog(_log)
        self._callbacks: list[Callable[[PeerEvent], None]] = []
        self._changed = asyncio.Event()
        self._subscription: Subscription | None = None
        self._ticker: asyncio.Task[None] | None = None

    @property
    def timeout_seconds(self) -> float:
        """Silence after which a pod counts as lost."""
        return self._table.timeout_seconds

    async def start(self) -> None:
        """Listen from now on.

        Raises:
            DeadlineError: the server did not confirm the subscription.
        """
        self._subscription = await self._bus.subscribe(
            self._bus.subjects.heartbeat("*"), Heartbeat, self._on_heartbeat
        )
        self._bus.on_reconnect(self._reconnected)
        await self._bus.flush()
        self._table.forgive(self._clock.now())
        self._ticker = asyncio.create_task(self._tick_for_ever(), name="peer-directory")

    async def close(self) -> None:
        """Stop listening; the last view stays readable."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait([self._ticker])
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def on_event(self, callback: Callable[[PeerEvent], None]) -> None:
        """Call `callback` on the bus's loop for every event from now on. It must not block."""
        self._callbacks.append(callback)

    def pods(self, role: Role | None = None, state: WorkerState | None = "ready") -> list[Heartbeat]:
        """Newest heartbeats of the pods that hold `role` and are in `state` (None: any), by pod name."""
        if role is None and state is None:
            return self._table.heartbeats()
        return [
            beat
            for beat in self._table.heartbeats()
            if (role is None or role in beat.roles) and (state is None or beat.state == state)
        ]

    def get(self, pod: str) -> Heartbeat | None:
        """Newest heartbeat of a pod, None if it is unknown or lost."""
        return self._table.get(pod)

    def silent_seconds(self, pod: str) -> float:
        """Seconds for which a pod has been lost or unknown, not counting those in which this process could not have heard it."""
        return self._table.silent_seconds(pod, self._clock.now())

    @property
    def absences(self) -> int:
        """How often this process was out of contact for so long that others may have called it lost."""
        return self._table.absences

    async def wait_for(self, predicate: Callable[[PeerDirectory], bool], timeout: float) -> None:  # noqa: ASYNC109
        """Wait until `predicate(self)` holds; it is evaluated at every heartbeat and loss.

        Raises:
            DeadlineError: it does not hold within `timeout` seconds; the message lists the pods that are there.
        """
        try:
            async with self._clock.timeout(timeout):
                while not predicate(self):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            heartbeats = ", ".join(f"{beat.pod}={beat.state}" for beat in self._table.heartbeats()) or "none"
            raise DeadlineError(
                f"the expected pods did not appear within {timeout:.1f} s; present: {heartbeats}"
            ) from error

    async def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._notify(self._table.record(heartbeat, self._clock.now()))
        self._changed.set()

    async def _reconnected(self) -> None:
        self._table.forgive(self._clock.now())

    async def _tick_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self._table.tick_seconds)
            try:
                events = self._table.tick(self._clock.now(), self._bus.is_connected)
                if events:
                    self._notify(events)
                    self._changed.set()
            except Exception as error:  # noqa: BLE001 - without this loop no peer would ever count as lost
                self._log.warning(
                    "tick", f"checking for lost pods failed: {type(error).__name__}: {error}", error
                )

    def _notify(self, events: list[PeerEvent]) -> None:
        for event in events:
            level = logging.WARNING if event.kind == "lost" else logging.DEBUG
            _log.log(level, "pod %s %s (%s)", event.heartbeat.pod, event.kind, event.heartbeat.state)
            for callback in self._callbacks:
                try:
                    callback(event)
                except Exception:  # noqa: BLE001 - a handler's error must not end the subscription
                    _log.exception("callback failed for %s of %s", event.kind, event.heartbeat.pod)


class Heartbeater:
    """Publishes the heartbeat that `make` returns every `period` seconds, and at once on `beat`. `make` is called on the bus's loop.

    `last_progress` (seconds of `clock`) advances with every turn, even while no server takes the heartbeat; a failing `make` stops it.
    """

    def __init__(
        self, bus: Bus, make: Callable[[], Heartbeat], period: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._bus = bus
        self._make = make
        self._period = period
        self._clock = clock
        self.last_progress = clock.now()
        self._log = RateLimitedLog(_log)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Send the first heartbeat and go on until `close`."""
        self._bus.on_reconnect(self._beat_again)
        await self.beat()
        self._task = asyncio.create_task(self._beat_for_ever(), name="heartbeat")

    async def beat(self) -> None:
        """Send a heartbeat now: a changed state should not wait for the period."""
        heartbeat = self._make()
        await self._bus.publish(self._bus.subjects.heartbeat(heartbeat.pod), heartbeat)

    async def announce(self) -> None:
        """Like `beat`, but a failure to send is only logged: the next heartbeat has the same content."""
        try:
            await self.beat()
        except MmdError as error:
            _log.warning(
                "failed to send a heartbeat; next attempt within %g s: %s", self._period, error.message
            )

    async def close(self, announce: bool = True) -> None:
        """Stop; unless `announce` is False, publish a final heartbeat with state drained."""
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(CLOSE_SECONDS):
                    await asyncio.wait([task])
        if announce and self._bus.is_connected:
            last = replace(self._make(), state="drained")
            try:
                await self._bus.publish(self._bus.subjects.heartbeat(last.pod), last)
                await self._bus.flush()
            except MmdError as error:
                _log.warning(
                    "failed to send the final heartbeat of %s; peers detect its exit after the heartbeat timeout: %s",
                    last.pod,
                    error.message,
                )

    async def _beat_again(self) -> None:
        if self._task is not None:
            await self.beat()

    async def _beat_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self._period)
            if self._task is None:
                return
            try:
                if self._bus.is_connected:  # a buffered heartbeat would arrive late and be wrong
                    await self.beat()
            except MmdError as error:
                self._log.warning("beat", f"failed to send a heartbeat: {error.message}")
            except Exception as error:  # noqa: BLE001 - the others would count this pod as lost while it serves
                self._log.warning(
                    "beat", f"failed to send a heartbeat: {type(error).__name__}: {error}", error
                )
                continue
            self.last_progress = self._clock.now()
