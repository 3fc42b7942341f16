"""Keeps an index of caches up to date: takes the reports of pods, and asks a pod for everything after a gap.

A gap shows in the numbers of reports or, if the last ones were lost, in a pod's heartbeats: they name its newest report.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from mmd_api.contract.errors import MmdError
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.caches.index import CacheIndex
from mmd_workers.caches.kinds import CacheKind
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus, Subscription
from mmd_workers.wire.messages.every_pod import CacheReport, CacheWanted, Heartbeat
from mmd_workers.wire.messages.message_parts import Acknowledged
from mmd_workers.wire.peers import PeerDirectory, PeerEvent

CHECK_SECONDS = 0.5
REPLY_SECONDS = 1.0
ASK_AGAIN_SECONDS = 3.0  # time for a pod to report everything before it is asked again
ASKED_AT_ONCE = 64

_log = logging.getLogger(__name__)


class CacheFeed:
    """Joins the bus, the directory and the index."""

    def __init__(
        self,
        bus: Bus,
        directory: PeerDirectory,
        index: CacheIndex,
        by: str,
        metrics: Metrics,
        kind: CacheKind,
        *,
        encoders_only: bool = False,
    ) -> None:
        """`by`: name of the pod that follows. `encoders_only`: follow encoder pods and no others."""
        self._bus = bus
        self._directory = directory
        self._index = index
        self._by = by
        self._metrics = metrics
        self._kind = kind
        self._encoders_only = encoders_only
        self._remedy = "" if encoders_only else "; raise spec.gateway.resources.memory"
        self._log = RateLimitedLog(_log)
        # By pod: incarnation and newest report in its heartbeat at the previous check.
        self._due: dict[str, tuple[str, int]] = {}
        self._asked_at: dict[str, float] = {}  # by pod: when (time.monotonic)
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen from now on."""
        subject = self._kind.report(self._bus.subjects, "*")
        self._subscription = await self._bus.subscribe(subject, CacheReport, self._on_report)
        self._directory.on_event(self._on_peer)
        await self._bus.flush()
        self._task = asyncio.create_task(self._check_for_ever(), name="cache-feed")

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def _on_report(self, report: CacheReport) -> None:
        beat = self._directory.get(report.pod)
        if beat is not None and not self._follows(beat):
            return
        self._index.take(report)
        await asyncio.sleep(0)  # other tasks have their turn between two reports

    def _on_peer(self, event: PeerEvent) -> None:
        if event.kind in ("lost", "reborn"):
            pod = event.heartbeat.pod
            self._index.forget(pod)
            for table in (self._due, self._asked_at):
                table.pop(pod, None)

    async def _check_for_ever(self) -> None:
        self._due = self._reported(self._pods())  # reports from before it listened are not on the wire
        while True:
            try:
                await self._check()
            except Exception as error:  # noqa: BLE001 - without this loop a gap would never be closed
                self._log.warning(
                    "check", f"checking the index of caches failed: {type(error).__name__}: {error}", error
                )
            await asyncio.sleep(CHECK_SECONDS)

    async def _check(self) -> None:
        """Ask pods whose reports up to the previous check have not all come, and pods of which more entries fit in now."""
        while self._index.tidy():
            await asyncio.sleep(0)
        self._show()
        now = time.monotonic()
        beats = self._pods()
        behind = [
            beat
            for beat in beats
            if (due := self._due.get(beat.pod)) is not None
            and due[0] == beat.incarnation
            and (not self._index.follows(beat.pod, *due) or self._index.has_room_again(beat.pod))
            and now - self._asked_at.get(beat.pod, -ASK_AGAIN_SECONDS) >= ASK_AGAIN_SECONDS
        ]
        self._due = self._reported(beats)
        for name in self._index.pods:
            if name not in self._due:  # the pod is lost, and this report of it came late
                self._index.forget(name)
        if behind and self._bus.is_connected:
            await asyncio.gather(*map(self._ask, behind[:ASKED_AT_ONCE]))

    def _pods(self) -> list[Heartbeat]:
        """The newest heartbeats of the pods that are followed."""
        return [beat for beat in self._directory.pods(state=None) if self._follows(beat)]

    def _follows(self, beat: Heartbeat) -> bool:
        return not self._encoders_only or beat.roles == ["encode"]

    def _reported(self, beats: Sequence[Heartbeat]) -> dict[str, tuple[str, int]]:
        """By pod: its incarnation and the number of its newest report, from its heartbeat."""
        return {beat.pod: (beat.incarnation, self._kind.number(beat)) for beat in beats}

    def _show(self) -> None:
        metrics, index = self._metrics, self._index
        cut = len(index.cut_pods)
        label = self._kind.label
        metrics.prefix_index_blocks.labels(label).set(index.num_blocks)
        metrics.prefix_index_limit.labels(label).set(index.most_in_all)
        metrics.prefix_index_cut.labels(label).set(cut)
        if cut:
            self._log.warning(
                "cut",
                f"the index of what pods have cached ({self._kind.name}), of {index.most_in_all} entries at most, leaves out some of {cut} "
                f"pods, so that it may be computed again elsewhere{self._remedy}",
            )

    async def _ask(self, beat: Heartbeat) -> None:
        self._asked_at[beat.pod] = time.monotonic()
        self._metrics.prefix_snapshots.labels(self._kind.label).inc()
        request = CacheWanted(self._by, beat.incarnation)
        try:
            subject = self._kind.wanted(self._bus.subjects, beat.pod)
            await self._bus.request(subject, request, Acknowledged, timeout=REPLY_SECONDS)
        except MmdError as error:
            self._log.warning(
                "ask",
                f"{beat.pod} was not asked for what it has cached, next attempt in {ASK_AGAIN_SECONDS:g} s: {error.message}",
            )
