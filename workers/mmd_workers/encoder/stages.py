"""How much work each stage of encoding can do, and how busy it is. Independent of media and the network.

Every stage has servers: processes, threads or connections that work on one batch each. A pod encodes no faster than its
slowest stage, whichever that is for a modality: decoding for video, the tower for images, the transfer for slow links.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from mmd_api.contract.pools import Modality

BUSY_WINDOW_SECONDS = 10.0
THROUGHPUT_SMOOTHING = 0.2  # weight of the newest run
MAX_RUNS = 4096  # runs remembered by a stage; more of them in one window are too short to matter


class EncodeStage:
    """One stage and its servers. `clock` returns seconds and never goes back."""

    def __init__(
        self,
        name: str,
        servers: int,
        on_end: Callable[[EncodeStage, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_end(stage, seconds)` is called after each run."""
        self.name = name
        self.servers = servers
        self.work_per_second: dict[Modality, float] = {}  # by modality, all servers together
        self._on_end = on_end
        self._clock = clock
        self._free = asyncio.Semaphore(servers)
        self._running: dict[object, float] = {}  # start of each run
        self._ended: deque[tuple[float, float]] = deque(maxlen=MAX_RUNS)

    @asynccontextmanager
    async def run(self, modality: Modality, work: int) -> AsyncIterator[None]:
        """Occupy a server, after waiting for one. A run that raises counts as busy time, not as throughput."""
        async with self._free:
            run, start = object(), self._clock()
            self._running[run] = start
            finished = False
            try:
                yield
                finished = True
            finally:
                del self._running[run]
                self.record(modality, work if finished else 0, start, self._clock())

    def record(self, modality: Modality, work: int, start: float, end: float) -> None:
        """Note a run that was timed elsewhere, from `start` to `end` of the clock. Without work it counts as busy time alone."""
        self._ended.append((start, end))
        self._on_end(self, end - start)
        if work:
            rate = self.servers * work / max(end - start, 1e-6)
            old = self.work_per_second.get(modality, rate)
            self.work_per_second[modality] = old + THROUGHPUT_SMOOTHING * (rate - old)

    def busy_fraction(self) -> float:
        """Share of the last ten seconds that the servers worked, runs in flight included."""
        now = self._clock()
        begin = now - BUSY_WINDOW_SECONDS
        runs = (*self._ended, *((start, now) for start in self._running.values()))
        busy = sum(max(0.0, end - max(start, begin)) for start, end in runs)
        return busy / (BUSY_WINDOW_SECONDS * self.servers)


class Stages:
    """The stages of one pod's encode role."""

    def __init__(self, on_end: Callable[[EncodeStage, float], None]) -> None:
        self.all: list[EncodeStage] = []
        self._on_end = on_end

    def add(self, name: str, servers: int) -> EncodeStage:
        """Add a stage."""
        stage = EncodeStage(name, servers, self._on_end)
        self.all.append(stage)
        return stage

    def work_per_second(self) -> dict[Modality, float]:
        """Throughput of the slowest stage, by modality; stages that have not seen a modality are not counted."""
        slowest: dict[Modality, float] = {}
        for stage in self.all:
            for modality, rate in stage.work_per_second.items():
                slowest[modality] = min(rate, slowest.get(modality, rate))
        return slowest

    def busy_fraction(self) -> float:
        """The busy fraction of the busiest stage."""
        return max((stage.busy_fraction() for stage in self.all), default=0.0)
