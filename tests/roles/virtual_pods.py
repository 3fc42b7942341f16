"""Pods in one process and on one clock that nobody waits for: real services and caches, joined by messages that may be lost.

Time passes only when nothing is left to do, so that deadlines of minutes cost nothing and a seed repeats a run. Every task belongs to a pod:
one that is killed takes its tasks along, and those of one that lives can be counted. Threads are called in line.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import random
import selectors
import uuid
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mmd_api.contract.errors import DeadlineError, OverloadedError, PeerLostError
from mmd_api.contract.subjects import Subjects
from mmd_workers.wire.codec import pack, pack_frame, unpack, unpack_frame
from mmd_workers.wire.jobs import Delivery, QueueLimits
from mmd_workers.wire.messages.encoder import EncodeJob

LATENCY_SECONDS = 0.001
POLL_SECONDS = 0.05
LIMITS = QueueLimits(ack_wait_seconds=2.0)
_pod: contextvars.ContextVar[str] = contextvars.ContextVar("pod", default="client")


class InLine(ThreadPoolExecutor):
    """Calls at once, on the thread of the loop."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **named))
        except BaseException as error:  # noqa: BLE001 -- it belongs to the caller
            done.set_exception(error)
        return done


class Slowly(InLine):
    """Calls on the thread of the loop, `SECONDS` later."""

    SECONDS = 0.02

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def call() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(function(*args, **named))
                except BaseException as error:  # noqa: BLE001 -- it belongs to the caller
                    done.set_exception(error)

        asyncio.get_running_loop().call_later(self.SECONDS, call)
        return done


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    passed: Callable[[float], None]

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("nothing will ever happen again")
        self.passed(timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock moves to the next timer when nothing else is left."""

    def __init__(self) -> None:
        self.now = 1e6
        selector = _Selector()
        selector.passed = self._pass
        super().__init__(selector)
        self.owned: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)
        self.set_task_factory(self._make)  # type: ignore[arg-type]
        self.set_default_executor(InLine(1))

    def time(self) -> float:
        return self.now

    def _pass(self, seconds: float) -> None:
        self.now += max(0.0, seconds)

    def _make(self, loop: Any, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        context = options.get("context")
        tasks = self.owned[_pod.get() if context is None else context[_pod]]
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task


def context_of(pod: str) -> contextvars.Context:
    """In which tasks belong to a pod."""
    context = contextvars.copy_context()
    context.run(_pod.set, pod)
    return context


@contextmanager
def as_pod(pod: str) -> Iterator[None]:
    """What is started inside belongs to a pod."""
    token = _pod.set(pod)
    try:
        yield
    finally:
        _pod.reset(token)


# --- messages -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Subscription:
    net: Net
    subject: str
    pod: str
    receive: Callable[[Any], Awaitable[None]]
    waiting: deque[Any] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None

    def put(self, message: Any) -> None:
        self.waiting.append(message)
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(self._work(), context=context_of(self.pod))

    async def _work(self) -> None:
        while self.waiting:
            await asyncio.sleep(LATENCY_SECONDS)
            if self.waiting:  # not unsubscribed meanwhile
                await self.receive(self.waiting.popleft())

    async def unsubscribe(self) -> None:
        self.net.subscriptions[self.subject].discard(self)
        self.waiting.clear()


@dataclass(eq=False)
class _Queued:
    """A message of the queue. `visible`: time of its next delivery."""

    number: int
    job: EncodeJob
    visible: float = 0.0
    deliveries: int = 0


class Net:
    """What joins the pods. `faults`: the share of messages that are lost, and of jobs that are queued twice."""

    def __init__(self, rng: random.Random, faults: float) -> None:
        self.rng = rng
        self.faults = faults
        self.served: dict[str, tuple[str, type, Callable[[Any], Awaitable[Any]]]] = {}
        self.subscriptions: defaultdict[str, set[Subscription]] = defaultdict(set)
        self.queue: dict[int, _Queued] = {}  # by number
        self._numbers = itertools.count(1)
        self.incarnations: dict[str, str] = {}
        self._killed_at: dict[str, float] = {}
        self._published: set[str] = set()

    def unlucky(self) -> bool:
        return self.rng.random() < self.faults

    def kill(self, pod: str) -> None:
        """Its messages reach nobody, and it hears nothing."""
        self.incarnations.pop(pod, None)
        self._killed_at[pod] = asyncio.get_running_loop().time()
        self.served = {subject: one for subject, one in self.served.items() if one[0] != pod}
        for subscriptions in self.subscriptions.values():
            subscriptions -= {one for one in subscriptions if one.pod == pod}

    def silent_seconds(self, pod: str) -> float:
        return asyncio.get_running_loop().time() - self._killed_at[pod]

    def enqueue(self, job: EncodeJob, message_id: str) -> None:
        if message_id not in self._published:
            self._published.add(message_id)
            for _ in range(1 + self.unlucky()):
                number = next(self._numbers)
                self.queue[number] = _Queued(number, job)

    def settle(self, reply: str, verb: bytes, now: float, limits: QueueLimits) -> None:
        """As the server does, whichever delivery of the message the reply subject comes from."""
        _, number, _ = reply.split(".")
        if (queued := self.queue.get(int(number))) is None:
            return
        if verb.startswith(b"-NAK"):
            queued.visible = now + json.loads(verb[5:])["delay"] / 1e9
        elif verb == b"+WPI":
            queued.visible = now + limits.ack_wait_seconds
        else:
            del self.queue[int(number)]


class PodBus:
    """As much of a `Bus`, its client and its bulk connection as the services use."""

    is_connected = True
    is_closed = False

    def __init__(self, net: Net, pod: str, limits: QueueLimits = LIMITS) -> None:
        self.net = net
        self.limits = limits
        self.client_name = pod
        self.subjects = Subjects("test", "leaks", "r1")
        self.client = SimpleNamespace(
            is_closed=False, subscribe=self._subscribe, request=self._settle, publish=self._settle
        )
        self.bus = self

    async def bulk(self) -> PodBus:
        return self

    async def run(self, work: Coroutine[Any, Any, Any], timeout: float = 40.0) -> Any:
        async with asyncio.timeout(timeout):
            return await work

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        asyncio.get_running_loop().call_soon(function, *args, context=context_of(self.client_name))

    async def home(self, _timeout: float, function: Callable[..., Any], *args: Any) -> Any:
        found = function(*args)
        return await found if asyncio.iscoroutine(found) else found

    def on_reconnect(self, _: Any) -> None:
        pass

    async def flush(self) -> None:
        pass

    def new_inbox(self) -> str:
        return f"inbox.{self.client_name}.{uuid.uuid4().hex}"

    async def serve(self, subject: str, kind: type, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        self.net.served[subject] = self.client_name, kind, handler

        async def unsubscribe() -> None:
            self.net.served.pop(subject, None)

        return SimpleNamespace(unsubscribe=unsubscribe)

    async def request(
        self,
        subject: str,
        message: Any,
        _kind: type,
        timeout: float,
    ) -> Any:
        data = pack(message)
        await asyncio.sleep(LATENCY_SECONDS)
        if (served := self.net.served.get(subject)) is None:
            raise PeerLostError(f"nobody serves {subject}")
        if self.net.unlucky():
            await asyncio.sleep(timeout)
            raise DeadlineError("the request was lost")
        pod, kind, handler = served
        loop = asyncio.get_running_loop()
        answering = [loop.create_task(handler(unpack(kind, data)), context=context_of(pod))]  # type: ignore[arg-type]
        if self.net.unlucky():
            answering.append(loop.create_task(handler(unpack(kind, data)), context=context_of(pod)))  # type: ignore[arg-type]
        for task in answering:
            task.add_done_callback(lambda one: one.cancelled() or one.exception())
        await asyncio.wait(answering[:1], timeout=timeout)
        if not answering[0].done() or answering[0].cancelled():
            raise DeadlineError("the other side is lost")
        if self.net.unlucky():
            await asyncio.sleep(timeout)
            raise DeadlineError("the reply was lost")
        return answering[0].result()

    async def publish(self, subject: str, message: Any, reply: str = "") -> None:
        is_frame = hasattr(message, "payload")
        data = pack_frame(message.header, message.payload) if is_frame else pack(message)
        if not self.net.unlucky():
            for subscription in list(self.net.subscriptions[subject]):
                subscription.put(SimpleNamespace(data=data, reply=reply, headers=None))

    async def subscribe_frames(
        self, subject: str, kind: type, handler: Callable[..., Awaitable[None]], pending_bytes: int
    ) -> Subscription:
        async def receive(message: Any) -> None:
            header, payload = unpack_frame(kind, message.data)
            await handler(header, payload, message.reply)

        return await self._subscribe(subject, cb=receive)

    async def _subscribe(self, subject: str, cb: Callable[[Any], Awaitable[None]]) -> Subscription:
        made = Subscription(self.net, subject, self.client_name, cb)
        self.net.subscriptions[subject].add(made)
        return made

    async def _settle(self, reply: str, verb: bytes, **_: Any) -> None:
        await asyncio.sleep(LATENCY_SECONDS)
        if not self.net.unlucky():
            self.net.settle(reply, verb, asyncio.get_running_loop().time(), self.limits)


class PodQueue:
    """The queue of jobs as one pod has it. `test_virtual_queue.py` compares it with the real one."""

    def __init__(self, bus: PodBus) -> None:
        self._bus = bus
        self._net = bus.net
        self.last_batch = 0

    async def publish(self, job: EncodeJob, copy: int = 0) -> None:
        await asyncio.sleep(LATENCY_SECONDS)
        fate = self._net.rng.random() / max(self._net.faults, 1e-9)
        if fate < 0.5:
            raise OverloadedError("the queue is full")
        if fate > 1 or fate < 0.75:
            self._net.enqueue(job, f"{job.job_id}.{copy}")
        if fate < 1:
            raise DeadlineError("not confirmed")

    async def pull(self, modalities: Sequence[str], batch: int, wait: float) -> list[Delivery]:
        self.last_batch = batch
        now = asyncio.get_running_loop().time
        end = now() + wait
        while True:
            ready = [
                queued
                for queued in self._net.queue.values()
                if queued.visible <= now() and queued.job.feature.modality in modalities
            ]
            if ready or now() >= end:
                return [self._deliver(queued, now()) for queued in ready[:batch]]
            await asyncio.sleep(POLL_SECONDS)

    def _deliver(self, queued: _Queued, now: float) -> Delivery:
        queued.visible = now + self._bus.limits.ack_wait_seconds
        queued.deliveries += 1
        message: Any = SimpleNamespace(
            metadata=SimpleNamespace(
                num_delivered=queued.deliveries, sequence=SimpleNamespace(stream=queued.number)
            ),
            reply=f"ack.{queued.number}.{queued.deliveries}",
        )
        bus: Any = self._bus
        return Delivery(bus, message, queued.job, self._bus.limits)
