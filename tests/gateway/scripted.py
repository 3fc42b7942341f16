"""A worker that speaks the real protocol on a bus and answers as a test scripts it, misbehaving on demand."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from mmd_api.contract.errors import MmdError
from mmd_api.contract.load import PodLoad, WorkerState
from mmd_api.contract.pools import Role
from mmd_api.contract.subjects import Subjects
from mmd_workers.basics.clock import SYSTEM_CLOCK, Clock
from mmd_workers.wire.bus import Bus, Subscription
from mmd_workers.wire.messages.every_pod import Heartbeat
from mmd_workers.wire.messages.gateway import (
    HeldSequence,
    PhaseReport,
    RequestFailed,
    SequenceReceipt,
    SequenceReport,
    TokenBatch,
    TokenItem,
)
from mmd_workers.wire.messages.message_parts import Phase, PromptLogprob, TokenLogprob
from mmd_workers.wire.messages.prefill import Cancel, GenerateRequest, Placed
from mmd_workers.wire.peers import Heartbeater
from support.harness.waiting import DEADLINE_SECONDS, until

Script = Callable[["ScriptedWorker", GenerateRequest], Awaitable[None]]


def _of_prompt(request: GenerateRequest) -> list[PromptLogprob]:
    if not request.sampling.prompt_logprobs:
        return []
    likeliest = [TokenLogprob(i, -float(i)) for i in range(request.sampling.logprobs or 0)]
    return [PromptLogprob(-float(at), likeliest) for at in range(1, len(request.token_ids))]


@dataclass
class ScriptedWorker:
    """Plays `script` for each request it takes. `answer` are the token ids of every output."""

    bus: Bus
    pod: str
    answer: list[int]
    script: Script
    roles: list[Role] = field(default_factory=lambda: ["encode", "prefill", "decode"])
    state: WorkerState = "ready"
    load: PodLoad = field(default_factory=PodLoad)
    revision: str = "r1"
    incarnation: str = "one"
    answers: Callable[[GenerateRequest], list[int]] | None = None  # in place of `answer`
    refuse: Placed | None = None
    placing: asyncio.Event | None = None  # until it is set, no placement is answered
    max_model_len: int = 0
    prefix_number: int = 0
    encodes_small_media: bool = False
    period_seconds: float = 0.1  # of its heartbeats and reports
    clock: Clock = SYSTEM_CLOCK  # likewise
    requests: list[GenerateRequest] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    receipts: dict[tuple[str, int], int] = field(default_factory=dict)
    made: dict[tuple[str, int], int] = field(
        default_factory=dict
    )  # tokens that it reports, by request and attempt
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: dict[tuple[str, int], asyncio.Task[None]] = field(default_factory=dict)
    _subscriptions: list[Subscription] = field(default_factory=list)
    _heartbeater: Heartbeater | None = None
    _reporter: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, url: str, subjects: Subjects, pod: str, answer: list[int], script: Script, **more
    ) -> ScriptedWorker:
        return await cls.on(await Bus.connect(url, pod, subjects), answer, script, **more)

    @classmethod
    async def on(cls, bus: Bus, answer: list[int], script: Script, **more) -> ScriptedWorker:
        """Start the pod that is named as its bus."""
        worker = cls(bus, bus.client_name, answer, script, **more)
        worker._subscriptions = [
            await bus.serve(bus.subjects.prefill(worker.pod), GenerateRequest, worker._take),
            await bus.subscribe(bus.subjects.cancel, Cancel, worker._cancel),
        ]
        await bus.flush()
        worker._heartbeater = Heartbeater(bus, worker._beat, worker.period_seconds, worker.clock)
        await worker._heartbeater.start()
        worker._reporter = asyncio.create_task(worker._report_forever())
        return worker

    async def die(self) -> None:
        """As a killed process: no final heartbeat, nothing sent any more."""
        assert self._heartbeater is not None
        await self._heartbeater.close(announce=False)
        self._stop_reporting()
        for task in self._tasks.values():
            task.cancel()
        await self.bus.close()

    async def close(self) -> None:
        if not self.bus.client.is_closed:
            assert self._heartbeater is not None
            await self._heartbeater.close()
            self._stop_reporting()
            for task in self._tasks.values():
                task.cancel()
            await self.bus.close()

    @property
    def running(self) -> set[tuple[str, int]]:
        return {key for key, task in self._tasks.items() if not task.done()}

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait for something that this worker takes, sends or ends."""
        await until(predicate, changed=self.changed)

    def answer_to(self, request: GenerateRequest) -> list[int]:
        """The token ids of a request's output."""
        return self.answer if self.answers is None else self.answers(request)

    async def tokens(
        self,
        request: GenerateRequest,
        indices: list[int],
        attempt: int | None = None,
        pod: str | None = None,
        finish: bool = True,
    ) -> None:
        """Send the answer's tokens of these indices as one step's batch; the last one of the answer ends it."""
        answer = self.answer_to(request)
        last = min(len(answer), request.sampling.max_tokens) - 1
        full = len(answer) <= request.sampling.max_tokens
        items = [
            TokenItem(
                request.request_id,
                request.attempt if attempt is None else attempt,
                index,
                answer[index],
                ("stop" if full else "length") if finish and index == last else None,
                logprob=-0.25 if request.sampling.logprobs is not None else None,
                top_logprobs=[
                    TokenLogprob(answer[index] + i, -0.25 - i) for i in range(request.sampling.logprobs or 0)
                ],
                prompt_logprobs=_of_prompt(request) if index == 0 else [],
            )
            for index in indices
            if index <= last
        ]
        await self.bus.publish(
            self.bus.subjects.tokens(request.gateway), TokenBatch(pod or self.pod, 0, items)
        )

    async def fail(
        self, request: GenerateRequest, code: str, message: str, retryable: bool, feature_id: str = ""
    ) -> None:
        await self.bus.publish(
            self.bus.subjects.failures(request.gateway),
            RequestFailed(
                request.request_id, request.attempt, self.pod, code, message, retryable, feature_id
            ),
        )

    async def phases(self, request: GenerateRequest, *phases: Phase) -> None:
        await self.bus.publish(
            self.bus.subjects.phases(request.gateway),
            PhaseReport(request.request_id, request.attempt, self.pod, list(phases)),
        )

    def _stop_reporting(self) -> None:
        assert self._reporter is not None
        self._reporter.cancel()

    async def _report_forever(self) -> None:
        """What it still plays, it reports to hold."""
        while True:
            await self.clock.sleep(self.period_seconds)
            gateways = {
                r.gateway: [q for q in self.requests if q.gateway == r.gateway] for r in self.requests
            }
            for gateway, requests in gateways.items():
                held = [
                    (r.request_id, r.attempt) for r in requests if (r.request_id, r.attempt) in self.running
                ]
                with contextlib.suppress(MmdError):
                    await self.report(
                        gateway, [HeldSequence(*key, self.made.get(key, 0), open=True) for key in held]
                    )

    async def report(self, gateway: str, held: list[HeldSequence]) -> None:
        """Report these sequences; the reply goes to `receipts`."""
        subject = self.bus.subjects.sequences(gateway)
        receipt = await self.bus.request(subject, SequenceReport(self.pod, held), SequenceReceipt, timeout=2)
        for line, received in zip(held, receipt.received, strict=True):
            self.receipts[(line.request_id, line.attempt)] = received
        self.changed.set()

    async def _take(self, request: GenerateRequest) -> Placed:
        self.requests.append(request)
        self.changed.set()
        if self.placing is not None:
            await self.placing.wait()
        if self.refuse is not None:
            return Placed(request.request_id, False, self.refuse.code, self.refuse.message)
        task = asyncio.create_task(self._play(request))
        self._tasks[(request.request_id, request.attempt)] = task
        return Placed(request.request_id, True)

    async def _play(self, request: GenerateRequest) -> None:
        try:
            await self.script(self, request)
        finally:
            self.changed.set()

    async def _cancel(self, cancel: Cancel) -> None:
        self.cancels.append(cancel)
        for (request_id, attempt), task in list(self._tasks.items()):
            if request_id == cancel.request_id and attempt <= cancel.attempt:
                task.cancel()
        self.changed.set()

    def _beat(self) -> Heartbeat:
        return Heartbeat(
            pod=self.pod,
            pool="decode",
            roles=self.roles,
            incarnation=self.incarnation,
            revision=self.revision,
            state=self.state,
            http_endpoint="127.0.0.1:1",
            sent=time.time(),
            load=self.load,
            max_model_len=self.max_model_len,
            prefix_number=self.prefix_number,
            encodes_small_media=self.encodes_small_media,
        )


# --- scripts --------------------------------------------------------------------------------------------------


async def answer_well(worker: ScriptedWorker, request: GenerateRequest) -> None:
    """One message a token, from where the request's output so far ends."""
    for index in range(len(request.output_token_ids), len(worker.answer_to(request))):
        await worker.tokens(request, [index])


async def say_nothing(worker: ScriptedWorker, request: GenerateRequest) -> None:
    await worker.clock.sleep(3600)


async def forget(worker: ScriptedWorker, request: GenerateRequest) -> None:
    """Not a word, and no trace of the request."""


def half_then(then):
    """A script: half of the answer, then something; attempts after the first answer well."""

    async def script(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if request.attempt:
            await answer_well(worker, request)
            return
        half = len(worker.answer_to(request)) // 2
        await worker.tokens(request, list(range(half)))
        await then(worker, request)

    return script


@dataclass
class HalfFirst:
    """A script: the tokens before `count`, and the rest once `seen` is set. Who sees them has got them before there were more."""

    count: int
    seen: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.tokens(request, list(range(self.count)))
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self.seen.wait()
        await worker.tokens(request, list(range(self.count, len(worker.answer_to(request)))))
