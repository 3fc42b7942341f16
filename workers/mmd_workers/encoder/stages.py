"""How much work each stage of encoding can do, and how busy it is. Independent of media and the network.

Every stage has servers: processes, threads or connections that work on one batch each. A pod encodes no faster than its
slowest stage, whichever that is for a modality: decoding for video, the tower for images, the transfer for slow links.

Modalities take turns at a stage and get the same time each, so that an image waits for no backlog of videos. No modality has the spare
servers of a stage as well, so that an image does not wait for the end of long videos either.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mmd_api.contract.pools import Modality
from mmd_workers.encoder.shares import FairShares

BUSY_WINDOW_SECONDS = 10.0
THROUGHPUT_SMOOTHING = 0.2  # weight of the newest run
MAX_RUNS = 4096  # runs remembered by a stage; more of them in one window are too short to matter
LEAST_DECODERS = 2  # so that a long video does not hold up the others
BYTES_PER_DECODER = 1 << 30
"""Bytes of the media budget per decoder: a decoder also needs memory of its own, which nothing counts."""
DECODERS_PER_PROCESSOR = 4  # most media occupy a decoder over this many times as long as a processor


def decoders_for(cores: int, media_bytes: int, most: int) -> int:
    """The number of decode processes: one per core, as far as `media_bytes` has `BYTES_PER_DECODER` for each.

    No more than `most`, the number of media that are encoded at once.
    """
    return max(LEAST_DECODERS, min(cores, media_bytes // BYTES_PER_DECODER, most))


def spare_servers(modalities: int) -> int:
    """Servers of a stage that one modality leaves to the others, beside those that it may have; none if there is only one modality."""
    return 1 if modalities > 1 else 0


def processors_beside(decoders: int) -> int:
    """The number of threads that process the output of this many decode processes."""
    return max(1, decoders // DECODERS_PER_PROCESSOR)


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers of the stages before the tower.

    `processors`: threads that process what was decoded. `spare`: servers of each stage that one modality leaves to the others; decode
    processes include them, other servers come on top.
    """

    processors: int = 1
    spare: int = 0


ONE_PROCESSOR = Servers()


class EncodeStage:
    """One stage and its servers. `clock` returns seconds and never goes back.

    A modality has at most `servers` servers at a time, and the stage has `spare` more.
    """

    def __init__(
        self,
        name: str,
        servers: int,
        on_end: Callable[[EncodeStage, float], None],
        clock: Callable[[], float] = time.monotonic,
        spare: int = 0,
    ) -> None:
        """`on_end(stage, seconds)` is called after each run."""
        self.name = name
        self.servers = servers
        self.spare = spare
        self.work_per_second: dict[Modality, float] = {}  # by modality, its servers together
        self.shares = FairShares()
        self._on_end = on_end
        self._clock = clock
        self._free = servers + spare
        self._taken = Counter[Modality]()  # servers by modality
        self._waiting: dict[Modality, deque[asyncio.Future[None]]] = {}
        self._running: dict[object, tuple[Modality, float]] = {}  # start of each run
        self._ended: deque[tuple[float, float]] = deque(maxlen=MAX_RUNS)

    @asynccontextmanager
    async def run(self, modality: Modality, work: int) -> AsyncIterator[None]:
        """Occupy a server, after waiting for one. A run that raises counts as busy time, not as throughput."""
        await self._take_server(modality)
        run, start = object(), self._clock()
        self._running[run] = modality, start
        finished = False
        try:
            yield
            finished = True
        finally:
            del self._running[run]
            end = self._clock()
            self.shares.add(modality, end - start)
            self._free_server(modality)
            self.record(modality, work if finished else 0, start, end)

    async def _take_server(self, modality: Modality) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turns = self._waiting.setdefault(modality, deque())
        turns.append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with contextlib.suppress(ValueError):  # it was passed over already
                    turns.remove(turn)
            else:
                self._free_server(modality)  # its turn came at the same moment
            raise

    def _free_server(self, modality: Modality) -> None:
        self._free += 1
        self._taken[modality] -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Hand the free servers to waiters, passing over those that have just been cancelled."""
        while self._free and (modality := self._next_modality()) is not None:
            turn = self._waiting[modality].popleft()
            if not turn.done():
                self._free -= 1
                self._taken[modality] += 1
                turn.set_result(None)

    def _next_modality(self) -> Modality | None:
        """The modality whose waiter gets the next server."""
        waiting = [modality for modality, turns in self._waiting.items() if turns]
        in_turn = self.shares.in_turn(waiting, self._having())
        return next((modality for modality in in_turn if self._taken[modality] < self.servers), None)

    def _having(self) -> dict[Modality, float]:
        """Seconds so far of the runs in progress, by modality."""
        now, seconds = self._clock(), dict[Modality, float]()
        for modality, start in self._running.values():
            seconds[modality] = seconds.get(modality, 0.0) + now - start
        return seconds

    def record(self, modality: Modality, work: int, start: float, end: float) -> None:
        """Record a run that was timed elsewhere, from `start` to `end` of the clock. Without work it counts as busy time alone."""
        self._ended.append((start, end))
        self._on_end(self, end - start)
        if work:
            rate = self.servers * work / max(end - start, 1e-6)
            previous_rate = self.work_per_second.get(modality, rate)
            self.work_per_second[modality] = previous_rate + THROUGHPUT_SMOOTHING * (rate - previous_rate)

    def busy_fraction(self) -> float:
        """Share of the last ten seconds that the servers worked, runs in flight included. At most 1, whatever the spare servers did."""
        now = self._clock()
        window_start = now - BUSY_WINDOW_SECONDS
        runs = (*self._ended, *((start, now) for _, start in self._running.values()))
        busy = sum(max(0.0, end - max(start, window_start)) for start, end in runs)
        return min(1.0, busy / (BUSY_WINDOW_SECONDS * self.servers))


class Stages:
    """The stages of one pod's encode role."""

    def __init__(self, on_end: Callable[[EncodeStage, float], None]) -> None:
        self.all: list[EncodeStage] = []
        self._on_end = on_end

    def add(self, name: str, servers: int, spare: int = 0) -> EncodeStage:
        """Add a stage."""
        stage = EncodeStage(name, servers, self._on_end, spare=spare)
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
