"""Encoders over a real server, whose jobs run until the test lets them end, and the receiver of all features."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from mmd_api.contract.errors import OverloadedError
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.pools import EncoderBatching, EncoderSpec
from mmd_workers.encoder.encoder_service import EncoderService
from mmd_workers.encoder.job_claims import JobClaims
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.features.cache import FeatureCache
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.job_runs import JobRuns, unwanted
from mmd_workers.wire.jobs import Delivery, EncodeQueue, QueueLimits
from mmd_workers.wire.messages.encoder import EncodeJob
from mmd_workers.wire.messages.message_parts import Acknowledged, FeatureRef
from mmd_workers.wire.messages.prefill import EncodeCheck, EncodeFailed, EncodeRun, EncodeWanted
from mmd_workers.wire.server import NatsServer
from support.harness.processes import frozen
from support.harness.waiting import DEADLINE_SECONDS, until

Connect = Callable[[str], Awaitable[Bus]]
LIMITS = QueueLimits(ack_wait_seconds=0.5)
MAX_ATTEMPTS = 3
GONE = EncodeRun("gone", "i1")


def job(number: int) -> EncodeJob:
    feature = FeatureRef(f"feature-{number}", f"digest-{number}", "image", 10, 4, [[0, 4]], {}, {}, 16)
    now = time.time()
    return EncodeJob(f"job-{number}", feature, "gateway-0", "prefill-0", "i1", now + 600, now, "r")


class Deployment:
    """Encoders whose jobs run until the test lets them end, and the receiver of all features."""

    def __init__(self, connect: Connect, server: NatsServer) -> None:
        self._connect, self._server = connect, server
        self.alive = {"prefill-0": "i1"}
        self.silent_seconds = 0.0  # how long pods that are not alive have been silent
        self.begun: Counter[str] = Counter()  # runs by job id
        self.redelivered: Counter[str] = Counter()
        self.attempts: dict[str, int] = {}  # the latest that the receiver counted, by job id
        self.failures: list[EncodeFailed] = []
        self.metrics = Metrics()
        self.may_end = asyncio.Event()
        self.hangs = False  # the receiver answers no check
        self.unanswered: set[str] = set()  # jobs whose next check the receiver refuses
        self.runs: dict[str, JobRuns] = {}  # by job id; the receiver waits for these jobs
        self.services: list[EncoderService] = []
        self._running: list[asyncio.Task[None]] = []

    async def start(self, encoders: int) -> None:
        self._receiver = bus = await self._connect("prefill-0")
        self._queue = EncodeQueue(bus, LIMITS)
        await self._queue.ensure()
        await self._answer_checks()
        await bus.serve(bus.subjects.encode_failed("prefill-0"), EncodeFailed, self._failed)
        for number in range(encoders):
            await self.start_encoder(f"encoder-{number}")

    async def start_encoder(self, name: str) -> None:
        bus = await self._connect(name)
        tower: Any = None  # jobs do not get that far
        queue = EncodeQueue(bus, LIMITS)
        pull = queue.pull

        async def count_redeliveries(*arguments: Any, **options: Any) -> list[Delivery]:
            deliveries = await pull(*arguments, **options)
            self.redelivered.update(one.job.job_id for one in deliveries if not one.is_first)
            return deliveries

        queue.pull = count_redeliveries  # type: ignore[method-assign]
        pipeline = EncodePipeline(
            *(tower, DecodePool(1, 5, 1 << 20), MediaPolicy()),
            *(EncoderSpec(batching=EncoderBatching(max_items=2)), FeatureCache(0), Metrics()),
        )
        service = EncoderService(
            *(bus, queue, pipeline, ["image"]),
            JobClaims(bus, "i1", self.alive.get, lambda _: self.silent_seconds),
            MAX_ATTEMPTS,
            metrics=self.metrics,
            tracing=Tracing("test", "test", "test", None),
        )
        service._serve = self._serve  # type: ignore[method-assign]
        self.alive[name] = "i1"
        self.services.append(service)
        self._running.append(asyncio.create_task(service.run()))

    @property
    def slots(self) -> int:
        return self.services[0]._max_jobs

    async def publish(self, *jobs: EncodeJob, is_suspect: bool = False) -> None:
        """Publish jobs, and wait for their features. `is_suspect`: a run of each has failed."""
        for one in jobs:
            self.runs[one.job_id] = runs = JobRuns()
            if is_suspect:
                runs.answer(EncodeCheck(one.feature.feature_id, one.job_id, run=GONE))
                runs.answer(EncodeCheck(one.feature.feature_id, one.job_id, ended=GONE, failed=True))
            await self._queue.publish(one)

    async def run(self, *jobs: EncodeJob) -> None:
        """Publish jobs, and wait until all of them run."""
        await self.publish(*jobs)
        await until(lambda: all(self.begun[one.job_id] for one in jobs))

    async def kill(self, number: int) -> None:
        """End an encoder without a word."""
        service = self.services[number]
        for task in (self._running[number], *service._jobs):
            task.cancel()
        await service._bus.close()
        del self.alive[service._bus.client_name]

    @asynccontextmanager
    async def receiver_cut_off(self) -> AsyncIterator[None]:
        """Nobody hears the receiver, and it hears nobody."""
        incarnation = self.alive.pop("prefill-0")
        await self._checks.unsubscribe()
        await self._receiver.flush()
        yield
        await self._answer_checks()
        await self._receiver.flush()
        self.alive["prefill-0"] = incarnation

    async def _answer_checks(self) -> None:
        bus = self._receiver
        self._checks = await bus.serve(bus.subjects.encode_wanted("prefill-0"), EncodeCheck, self._checked)

    @contextmanager
    def cut_off(self, number: int) -> Iterator[None]:
        """Nothing that an encoder sends reaches the server."""
        bus = self.services[number]._bus
        incarnation = self.alive.pop(bus.client_name)

        async def lose(*_: object, **__: object) -> None:
            pass

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bus.client, "publish", lose)
            yield
        self.alive[bus.client_name] = incarnation

    async def _serve(self, one: EncodeJob) -> None:
        self.begun[one.job_id] += 1
        await self.may_end.wait()
        self.runs.pop(one.job_id, None)  # the feature has arrived

    async def _checked(self, check: EncodeCheck) -> EncodeWanted:
        if self.hangs:
            await asyncio.Event().wait()
        if check.job_id in self.unanswered:
            self.unanswered.remove(check.job_id)
            raise OverloadedError("busy")
        runs = self.runs.get(check.job_id)
        if runs is None:
            return unwanted(check)
        answer = runs.answer(check)
        self.attempts[check.job_id] = answer.attempt
        return answer

    async def _failed(self, failure: EncodeFailed) -> Acknowledged:
        self.failures.append(failure)
        return Acknowledged()

    async def outages_until(self, condition: Callable[[], bool], freezes: bool = False) -> None:
        """A keep-alive that arrives at once may prevent a redelivery; then the next outage brings it."""
        while not condition():
            await self._outage(freezes)
            end = time.monotonic() + 3 * LIMITS.ack_wait_seconds
            await until(lambda end=end: condition() or time.monotonic() > end)

    async def _outage(self, freezes: bool) -> None:
        """End the server, or freeze it, for longer than its own acknowledgement wait, and have it back."""
        end = time.monotonic() + 1.5 * LIMITS.ack_wait_seconds
        if freezes:
            with frozen(self._server.pid):
                await until(lambda: time.monotonic() > end)
            return
        await asyncio.to_thread(self._server.kill)
        await until(lambda: time.monotonic() > end)
        await asyncio.to_thread(self._server.start)

    async def until_done(self) -> None:
        async def is_empty() -> bool:
            return not (await self._queue.depth())["image"].jobs

        self.may_end.set()
        await until(is_empty)
        for service, running in zip(self.services, self._running, strict=True):
            service.drain()
            await asyncio.wait([running])
            if not running.cancelled():
                assert service._slots._value == service._max_jobs, "all slots are free"

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


@asynccontextmanager
async def deployed(
    connect: Connect, server: NatsServer, encoders: int, running: Iterable[EncodeJob] = ()
) -> AsyncIterator[Deployment]:
    """A deployment of so many encoders, which run the jobs `running` already."""
    deployment = Deployment(connect, server)
    await deployment.start(encoders)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await deployment.run(*running)
            yield deployment
    finally:
        await deployment.close()
