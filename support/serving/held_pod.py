"""A pod whose engine is held in a step, while a test ends its sequences by the thousand.

Engine steps are counted, and nothing is timed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch

from mmd_api.contract.load import PodLoad
from mmd_api.pipeline import PipelineConfig
from mmd_workers.engine.interface import StepOutput
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.process.pod import Pod
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.sequences.sequence_events import Sequences
from mmd_workers.sequences.step_thread import SteppedEngine, SteppedHost
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.every_pod import Heartbeat
from mmd_workers.wire.messages.gateway import SequenceReceipt, SequenceReport
from mmd_workers.wire.messages.message_parts import Sampling
from mmd_workers.wire.messages.prefill import Cancel, GenerateRequest
from mmd_workers.wire.peers import PeerDirectory, PeerEvent
from support.harness.clock import FakeClock
from support.harness.waiting import DEADLINE_SECONDS, until
from support.serving.memory_bus import MemoryNet

MANY = 1000
NAMES = [f"r{number}" for number in range(MANY)]
PROMPT = list(range(2, 11))
SPEC = {"model": {"id": "builtin/demo"}, "decode": {"replicas": 1, "gpus": 0}}
EngineOf = Callable[[EngineRunner[Any]], SteppedEngine]


class _Host(SteppedHost):
    """Runs one engine, of whatever kind."""

    def __init__(self, pod: Pod, stepped: Any, engine_of: EngineOf) -> None:
        super().__init__(pod, torch.device("cpu"))
        self._engine = engine_of(self._run(stepped))

    @property
    def engine(self) -> SteppedEngine:
        return self._engine


class HeldPod:
    """Takes MANY sequences of gateway-0 and one of gateway-1. The step that finds all of them lasts until `release`.

    loads: the number of sequences and reservations at the start of each step, from that one on.
    """

    def __init__(self, stepped: Any, engine_of: EngineOf) -> None:
        self.clock = FakeClock()
        self.net = MemoryNet(self.clock)
        config = {"namespace": "test", "name": "held", "revision": "r1", "spec": SPEC}
        settings = WorkerSettings(
            PipelineConfig.model_validate(config), "pod-0", "127.0.0.1", 0, "nats://unused", threads=1
        )
        self.pod = Pod.of(settings, "decode", ("prefill", "decode"))
        self.bus = self.pod.bus = self.net.bus("pod-0")
        self.pod.directory = PeerDirectory(self.bus, 5.0)
        self.loads: list[int] = []
        self.wanted = True  # by gateway-0
        self._stepped, self._step = stepped, stepped.step
        self._released = threading.Event()
        stepped.step = self._held_step
        self.host = _Host(self.pod, stepped, engine_of)
        self.engine = self.host.engine
        self.sequences = Sequences(self.pod, self.host)
        self.book = self.sequences.book

    @property
    def load(self) -> int:
        return len(self._stepped.table.sequences) + len(self._stepped.table.reservations)

    def _held_step(self) -> StepOutput:
        load = self.load
        if not self.loads and load <= MANY:
            return StepOutput()
        self.loads.append(load)
        if len(self.loads) > 1:  # the sequence of gateway-1 must not end before the test has looked
            return StepOutput()
        assert self._released.wait(DEADLINE_SECONDS)
        output: StepOutput = self._step()
        return output

    async def start(self) -> None:
        bus = self.net.bus("gateways")
        for gateway in ("gateway-0", "gateway-1"):
            await bus.serve(bus.subjects.sequences(gateway), SequenceReport, self._receipt)
        await self.sequences.start()
        await self.sequences.accept()

    async def _receipt(self, report: SequenceReport) -> SequenceReceipt:
        return SequenceReceipt(
            [0 if self.wanted or held.request_id == "other" else -1 for held in report.sequences]
        )

    async def add(self, *names: str, gateway: str = "gateway-0") -> None:
        """Add sequences that no role owns."""
        for name in names:
            self.book.open(request(name, gateway))
        await asyncio.gather(
            *(
                self.engine.add(f"{name}#0", request(name, gateway), stop_after_prefill=False)
                for name in names
            )
        )

    async def hold(self) -> None:
        """Add the sequence of gateway-1, which makes the engine step, and wait for the step that is held."""
        await self.add("other", gateway="gateway-1")
        await until(lambda: self.loads)

    async def settle(self) -> None:
        """Let everything that has arrived on the event loop be handled."""
        await self.clock.let_pass(0.0)

    async def loads_of_two_steps(self) -> list[int]:
        """End the held step; loads of this one and of the next."""
        await self.settle()
        self.release()
        await until(lambda: len(self.loads) > 1)
        return self.loads[:2]

    def release(self) -> None:
        self._released.set()


@asynccontextmanager
async def held_pod(stepped: Any, engine_of: EngineOf) -> AsyncIterator[HeldPod]:
    held = HeldPod(stepped, engine_of)
    await held.start()
    try:
        yield held
    finally:
        held.release()
        await held.pod.tasks.cancel()
        assert await held.host._runner.stop(10)  # type: ignore[union-attr]


def request(name: str, gateway: str = "gateway-0", decode_pods: Sequence[str] = ()) -> GenerateRequest:
    now, sampling = time.time(), Sampling(64, ignore_eos=True)
    return GenerateRequest(name, 0, gateway, PROMPT, [], sampling, list(decode_pods), now + 600, now)


# --- reasons to end the sequences of gateway-0 ----------------------------------------------------------------------


async def cancel(held: HeldPod) -> None:
    """Every client disconnects."""
    bus: Bus = held.net.bus("gateway-0")
    for name in NAMES:
        await bus.publish(bus.subjects.cancel, Cancel(name, 0))


async def pass_deadlines(held: HeldPod) -> None:
    """Every request is late."""
    for name in NAMES:
        tracked = held.book.get(f"{name}#0")
        assert tracked is not None
        tracked.request = replace(tracked.request, deadline=0.0)
    await until(lambda: held.book.unconfirmed)


async def lose_the_gateway(held: HeldPod) -> None:
    lost = Heartbeat("gateway-0", "gateway", [], "i1", "r1", "ready", "127.0.0.1:1", 0.0, PodLoad())
    held.sequences._peer_event(PeerEvent("lost", lost, lost))


async def want_none(held: HeldPod) -> None:
    """The gateway has forgotten every request, as after lost cancellations."""
    held.wanted = False
    await until(lambda: len(held.book) <= MANY)


REASONS = [cancel, pass_deadlines, lose_the_gateway, want_none]
