"""The work queue of encode jobs on JetStream: one message a medium, one durable consumer a modality. Knows no encoder.

How much work waits is read off the stream itself. The last token of a job's subject is its work, rounded up to two
significant digits, and the server counts messages by subject; a job leaves the stream when it is acknowledged or
terminated. So the sum is exact to 10%, needs no bookkeeping, and survives publishers, encoders and servers.

The bound on deliveries is kept by whoever pulls, not by the server: JetStream would only stop redelivering, with an
advisory that nobody may hear. Here the delivery after the last attempt is answered with `EncodeFailed` and terminated.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, get_args

from nats import errors as nats_errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js import api
from nats.js import errors as js_errors
from nats.js.manager import JetStreamManager

from mmd_workers.errors import DeadlineError, MmdError, OverloadedError, PeerLostError
from mmd_workers.wire.bus import Bus, RateLimitedLog
from mmd_workers.wire.codec import WireError, pack, unpack
from mmd_workers.wire.messages import EncodeFailed, EncodeJob, Modality

MODALITIES: tuple[Modality, ...] = get_args(Modality)
_STREAM_FULL = {10077, 10123}  # maximum messages or bytes exceeded; insufficient storage resources
_API_SECONDS = 3.0
_CONFIRM_SECONDS = 1.5
_POLL_SECONDS = 0.25
_SOON_SECONDS = 0.01
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the queue.

    `max_age_seconds` must exceed every job's deadline: what is older is dropped by the server, and its receiver has long
    given up. A job whose encoder is silent for `ack_wait_seconds` goes to another one. `max_ack_pending` bounds the jobs of one modality in encoders' hands: at least encoders x jobs per encoder.
    """

    max_jobs: int = 4096
    max_bytes: int = 64 << 20
    max_age_seconds: float = 3600.0
    ack_wait_seconds: float = 5.0
    max_attempts: int = 4
    max_ack_pending: int = 1024
    memory_storage: bool = False


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Of one modality: `jobs` not yet done and the `work` in them (units of `FeatureRef.work`), of which `running_jobs` are with encoders."""

    jobs: int
    work: int
    running_jobs: int


class Delivery:
    """A job in hand. It returns to the queue unless it is acknowledged, terminated or kept alive within `ack_wait`."""

    def __init__(self, bus: Bus, message: Msg, job: EncodeJob, ack_wait_seconds: float) -> None:
        self.job = job
        self.attempt: int = message.metadata.num_delivered
        self._bus = bus
        self._reply = message.reply
        self._ack_wait = ack_wait_seconds

    async def ack(self) -> None:
        """The feature has arrived: take the job off the queue.

        An acknowledgement that the server does not confirm is only logged: the job comes again, and its OFFER is answered `have`.
        """
        await self._settle(b"+ACK")

    async def retry(self, delay: float) -> None:
        """Give the job back; it is delivered again after `delay` seconds, to any encoder. Counts as an attempt."""
        await self._settle(b"-NAK " + json.dumps({"delay": int(delay * 1e9)}).encode())

    async def terminate(self, reason: str) -> None:
        """Take the job off the queue undone. Whoever calls this has told the receiver, or knows that nobody waits."""
        _log.warning("encode job %s terminated: %s", self.job.job_id, reason)
        await self._settle(b"+TERM " + reason.replace("\r", " ").replace("\n", " ").encode()[:512])

    @asynccontextmanager
    async def keep_alive(self) -> AsyncIterator[None]:
        """Tell the server every third of `ack_wait` that the job is being worked on."""

        async def tell() -> None:
            while True:
                await asyncio.sleep(self._ack_wait / 3)
                try:
                    await self._bus.client.publish(self._reply, b"+WPI")
                except nats_errors.Error as error:
                    _log.warning("job %s not kept alive: %s", self.job.job_id, type(error).__name__)

        task = asyncio.create_task(tell(), name=f"keep-alive-{self.job.job_id}")
        try:
            yield
        finally:
            task.cancel()

    async def _settle(self, verb: bytes) -> None:
        try:
            await self._bus.client.request(self._reply, verb, timeout=_API_SECONDS)
        except (nats_errors.Error, TimeoutError) as error:
            _log.warning(
                "%s of job %s not confirmed (%s): it may be delivered again",
                *(verb[:5].decode(), self.job.job_id, type(error).__name__),
            )


class _Puller:
    """Pull requests for one modality. The inbox is a core subscription, which the client restores after a reconnect."""

    def __init__(self, bus: Bus, stream: str, modality: Modality) -> None:
        self._bus = bus
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{_consumer(modality)}"
        self._inbox = bus.new_inbox()
        self._counter = 0
        self._subscription: NatsSubscription | None = None

    async def open(self) -> None:
        self._subscription = await self._bus.client.subscribe(f"{self._inbox}.*", pending_msgs_limit=4096)

    async def close(self) -> None:
        if self._subscription is not None and not self._bus.client.is_closed:
            await self._subscription.unsubscribe()

    async def take(self, batch: int, linger_seconds: float = 0.0) -> list[Msg]:
        """Up to `batch` messages: what is there, or with `linger_seconds` the first one that comes.

        Raises:
            js_errors.ServiceUnavailableError: the consumer does not exist.
            nats_errors.TimeoutError: the server does not answer.
        """
        assert self._subscription is not None, "open() first"
        messages: list[Msg] = []
        while len(messages) < batch and self._subscription.pending_msgs:  # late answers to an earlier request
            late = await self._subscription.next_msg(timeout=_API_SECONDS)
            if not _status(late):
                messages.append(late)
        if len(messages) == batch:
            return messages
        self._counter += 1
        reply = f"{self._inbox}.{self._counter}"
        body: dict[str, Any] = {"batch": batch - len(messages)}
        body |= {"expires": int(linger_seconds * 1e9)} if linger_seconds else {"no_wait": True}
        await self._bus.client.publish(self._next, json.dumps(body).encode(), reply=reply)
        end = time.monotonic() + linger_seconds + _API_SECONDS
        while len(messages) < batch:
            try:
                message = await self._subscription.next_msg(timeout=max(0.001, end - time.monotonic()))
            except nats_errors.TimeoutError:
                if messages:
                    break
                raise
            status = _status(message)
            if not status:
                messages.append(message)
            elif message.subject == reply:
                if status in ("503", "409"):  # no such consumer, or it was deleted
                    raise js_errors.ServiceUnavailableError(description=f"{self._next}: {status}")
                break  # 404: nothing there; 408: the time is up
        return messages


class EncodeQueue:
    """The queue of one pipeline revision."""

    def __init__(self, bus: Bus, limits: QueueLimits | None = None) -> None:
        self._bus = bus
        self._limits = limits or QueueLimits()
        self._stream = bus.subjects.encode_stream
        self._manager = JetStreamManager(bus.client, timeout=_API_SECONDS)
        self._log = RateLimitedLog(_log)
        self._pullers: dict[Modality, _Puller] = {}
        self._wake = asyncio.Event()
        self._wakers: list[NatsSubscription] = []
        self._turn = 0

    async def ensure(self) -> None:
        """Create the stream and its consumers, or bring them to these limits. Any number of gateways may call it at once, and
        nobody else does: whoever can make streams can read every subject.

        Raises:
            PeerLostError: the server has no JetStream or does not answer.
        """
        limits = self._limits
        stream = api.StreamConfig(
            name=self._stream,
            subjects=[self._bus.subjects.encode_work("*", "*")],
            retention=api.RetentionPolicy.WORK_QUEUE,
            discard=api.DiscardPolicy.NEW,
            max_msgs=limits.max_jobs,
            max_bytes=limits.max_bytes,
            max_age=limits.max_age_seconds,
            duplicate_window=min(120.0, limits.max_age_seconds),
            storage=api.StorageType.MEMORY if limits.memory_storage else api.StorageType.FILE,
        )
        try:
            try:
                await self._manager.add_stream(stream)
            except js_errors.BadRequestError as error:
                if error.err_code != 10058:  # stream name already in use with a different configuration
                    raise
                await self._manager.update_stream(stream)
            for modality in MODALITIES:
                await self._manager.add_consumer(
                    self._stream,
                    api.ConsumerConfig(
                        durable_name=_consumer(modality),
                        filter_subject=self._bus.subjects.encode_work(modality, "*"),
                        ack_policy=api.AckPolicy.EXPLICIT,
                        ack_wait=limits.ack_wait_seconds,
                        max_deliver=-1,
                        max_ack_pending=limits.max_ack_pending,
                        max_waiting=4096,
                    ),
                )
        except (nats_errors.Error, TimeoutError) as error:
            raise PeerLostError(
                f"cannot set up the encode queue {self._stream} ({error}): does the NATS server run with JetStream?"
            ) from error

    async def publish(self, job: EncodeJob) -> None:
        """Queue a job; the same `job_id` within two minutes is queued once.

        Raises:
            OverloadedError: the queue is full.
            DeadlineError: the server did not confirm: it is slow, or the gateway has not made the queue (again) yet. The job may have
                been queued; publishing again is safe.
            PeerLostError: no server, or one without JetStream.
        """
        try:
            answer = await self._publish(job)
        except (nats_errors.NoRespondersError, nats_errors.TimeoutError, TimeoutError) as error:
            # No stream: no reply at all where pullers listen for the core copies of jobs, "no responders" elsewhere.
            raise DeadlineError(
                f"the encode queue did not confirm job {job.job_id} ({type(error).__name__}): publish it again"
            ) from error
        except nats_errors.OutboundBufferLimitError as error:
            raise OverloadedError(
                "NATS is gone and the send buffer is full: retry once it is back"
            ) from error
        except nats_errors.Error as error:
            raise PeerLostError(f"cannot queue job {job.job_id}: {type(error).__name__} {error}") from error
        fault = json.loads(answer.data).get("error")
        if fault is None:
            return
        if fault.get("err_code") in _STREAM_FULL:
            raise OverloadedError(
                f"the encode queue is full ({fault['description']}): retry later, or add encoders (spec.encoder)"
            )
        raise PeerLostError(f"the encode queue refused job {job.job_id}: {fault.get('description')}")

    async def pull(self, modalities: Sequence[Modality], batch: int, wait: float) -> list[Delivery]:
        """Up to `batch` jobs, fairly by modality; waits up to `wait` seconds for the first. None in time: an empty list.

        Never raises for a server that is away: it waits, as for an empty queue. One caller at a time.
        """
        end = time.monotonic() + wait
        while True:
            woken = self._wake.is_set()
            self._wake.clear()
            left = end - time.monotonic()
            try:
                await self._open(modalities)
                deliveries = await self._round(modalities, batch)
                if deliveries or left <= 0:
                    return deliveries
            except (js_errors.ServiceUnavailableError, js_errors.NotFoundError):
                self._log.warning(
                    "gone", f"the encode queue {self._stream} is not there: the gateway makes it"
                )
            except (nats_errors.Error, TimeoutError, MmdError) as error:
                self._log.warning("pull", f"no answer from the encode queue: {type(error).__name__} {error}")
            left = end - time.monotonic()
            if left <= 0:
                return []
            # The signal may be here before the stream has its job: then a second look, soon.
            pause = _SOON_SECONDS if woken else _POLL_SECONDS
            try:
                async with asyncio.timeout(min(left, pause)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def depth(self) -> dict[Modality, QueueDepth]:
        """What is queued and not yet done, by modality.

        Raises:
            PeerLostError: the server or the queue is not there.
        """
        try:
            info = await self._manager.stream_info(
                self._stream, subjects_filter=self._bus.subjects.encode_work("*", "*")
            )
            running = {
                modality: (
                    await self._manager.consumer_info(self._stream, _consumer(modality))
                ).num_ack_pending
                or 0
                for modality in MODALITIES
            }
        except (nats_errors.Error, TimeoutError) as error:
            raise PeerLostError(
                f"the depth of {self._stream} cannot be read: {type(error).__name__} {error}"
            ) from error
        jobs = dict.fromkeys(MODALITIES, 0)
        work = dict.fromkeys(MODALITIES, 0)
        for subject, count in (info.state.subjects or {}).items():
            *_, name, size = subject.split(".")
            for modality in MODALITIES:
                if name == modality:
                    jobs[modality] += count
                    work[modality] += count * int(size)
        return {m: QueueDepth(jobs=jobs[m], work=work[m], running_jobs=running[m]) for m in MODALITIES}

    async def close(self) -> None:
        """Stop listening for new jobs. Deliveries in hand stay valid until the bus closes."""
        for subscription in self._wakers:
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()
        for puller in self._pullers.values():
            await puller.close()
        self._wakers.clear()
        self._pullers.clear()

    async def _publish(self, job: EncodeJob) -> Msg:
        subject = self._bus.subjects.encode_work(job.feature.modality, round_work(job.feature.work))
        headers = {api.Header.MSG_ID.value: job.job_id}
        return await self._bus.client.request(subject, pack(job), timeout=_CONFIRM_SECONDS, headers=headers)

    async def _open(self, modalities: Sequence[Modality]) -> None:
        async def wake(_: Msg) -> None:
            self._wake.set()

        for modality in modalities:
            if modality in self._pullers:
                continue
            puller = _Puller(self._bus, self._stream, modality)
            await puller.open()
            # The copy of a job that core NATS brings is the signal to pull: nobody polls an idle queue at speed.
            subject = self._bus.subjects.encode_work(modality, "*")
            self._wakers.append(await self._bus.client.subscribe(subject, cb=wake, pending_msgs_limit=4096))
            self._pullers[modality] = puller

    async def _round(self, modalities: Sequence[Modality], batch: int) -> list[Delivery]:
        """Ask each modality for its share of what is left of the batch, beginning with another one each time."""
        self._turn += 1
        order = [modalities[(self._turn + i) % len(modalities)] for i in range(len(modalities))]
        taken: list[Delivery] = []
        for asked in range(2 * len(order)):  # the second time round hands out what others left over
            left = batch - len(taken)
            if left == 0:
                break
            share = left if asked >= len(order) else math.ceil(left / (len(order) - asked))
            if asked >= len(order) and not taken:
                break  # nobody had anything
            for message in await self._pullers[order[asked % len(order)]].take(share):
                delivery = await self._accept(message)
                if delivery is not None:
                    taken.append(delivery)
        return taken

    async def _accept(self, message: Msg) -> Delivery | None:
        try:
            job = unpack(EncodeJob, message.data)
        except WireError as error:
            self._log.warning("job", f"a job on {message.subject} is not one, terminated: {error.message}")
            await self._bus.client.publish(message.reply, b"+TERM not an EncodeJob")
            return None
        delivery = Delivery(self._bus, message, job, self._limits.ack_wait_seconds)
        if delivery.attempt <= self._limits.max_attempts:
            return delivery
        attempts = delivery.attempt - 1
        failed = EncodeFailed(
            feature_id=job.feature.feature_id,
            job_id=job.job_id,
            code="too_many_attempts",
            message=f"{attempts} encoders began this {job.feature.modality} and none finished: the medium may crash them",
            retryable=False,
        )
        await self._bus.publish(self._bus.subjects.encode_failed(job.receiver), failed)
        await delivery.terminate(f"not done after {attempts} attempts")
        return None


def round_work(work: int) -> int:
    """Round up to two significant digits, so that the stream's subjects stay few."""
    if work < 100:
        return max(work, 0)
    unit: int = 10 ** (len(str(work)) - 2)
    return -(-work // unit) * unit


def _consumer(modality: str) -> str:
    return f"encode-{modality}"


def _status(message: Msg) -> str | None:
    """A status instead of a message (JetStream sends those without a body)."""
    return message.headers.get("Status") if message.headers and not message.data else None
