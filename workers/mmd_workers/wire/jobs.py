"""The work queue of encode jobs on JetStream: one message per medium, one durable consumer per modality. Independent of encoders.

The amount of waiting work is read from the stream itself. The last token of a job's subject is its work, rounded up to two
significant digits, and the server counts messages by subject; a job leaves the stream when it is acknowledged or
terminated. So the sum is exact to 10%, needs no bookkeeping, and survives publishers, encoders and servers.

JetStream delivers a job again after a while without a sign of its encoder, which may have died; or the server was away. A delivery is
therefore no attempt. The receiver of the feature counts those, see `wire/job_runs.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgpack
from nats import errors as nats_errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js import api
from nats.js import errors as js_errors
from nats.js.manager import JetStreamManager

from mmd_api.contract.errors import (
    CapacityError,
    DeadlineError,
    MmdError,
    OverloadedError,
    PeerLostError,
    TooLongError,
    WireError,
)
from mmd_api.contract.pools import MODALITIES, Modality
from mmd_workers.basics.clock import SYSTEM_CLOCK, Clock
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.client import cancellable
from mmd_workers.wire.codec import MAX_MESSAGE_BYTES, pack, unpack
from mmd_workers.wire.messages.encoder import EncodeJob
from mmd_workers.wire.messages.message_parts import Acknowledged, FeatureRef
from mmd_workers.wire.messages.prefill import EncodeFailed

_STREAM_FULL = {10077, 10123}  # maximum messages or bytes exceeded; insufficient storage resources
MAX_WORK_DIGITS = 15  # a subject with more is no job of ours
_API_SECONDS = 3.0
_CONFIRM_SECONDS = 1.5
_POLL_SECONDS = 0.25
_HEADER_BYTES = 1024  # maximum for a published job; the server counts them
_ARRAY_BYTES = 5  # maximum for the length of a list
_RANGE_BYTES = 11  # maximum for a start and a length below 2 ** 32
_RANGES_AT_ONCE = 4096
_OTHER_FIELDS_BYTES = 4096  # maximum for a job without its feature: names, ids and times
_REPORTS = 4  # attempts to report a failure before the job goes back to the queue
_SOON_SECONDS = 0.01
_TIME_IS_UP = "408"  # status of an answer without a message
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queue.

    `max_age_seconds` must exceed every job's deadline: the server drops older jobs, whose receivers have long given up. A job whose
    encoder is silent for `ack_wait_seconds` is delivered again. `max_ack_pending` bounds the jobs of one modality that encoders
    hold: at least encoders x jobs per encoder.
    """

    max_jobs: int = 4096
    max_bytes: int = 64 << 20
    max_age_seconds: float = 3600.0
    ack_wait_seconds: float = 5.0
    max_ack_pending: int = 1024
    memory_storage: bool = False


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """The depth of the queue for one modality.

    `jobs`: number of jobs not yet done. `work`: the work in them, in units of `FeatureRef.work`. `running_jobs`: jobs of these that
    are with encoders.
    """

    jobs: int
    work: int
    running_jobs: int


class Delivery:
    """A job in progress. It returns to the queue unless it is acknowledged, terminated or kept alive within `ack_wait`."""

    def __init__(
        self, bus: Bus, message: Msg, job: EncodeJob, limits: QueueLimits, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.job = job
        self.is_first: bool = message.metadata.num_delivered == 1
        self.is_leaving = False  # acknowledged, terminated or given back: no other delivery may join it
        self._bus = bus
        self._replies: dict[int, str] = {message.metadata.sequence.stream: message.reply}  # by message
        self._ack_wait = limits.ack_wait_seconds
        self._clock = clock

    def join(self, again: Delivery) -> None:
        """Take over another delivery of this job: the same message again, or a copy. Both are kept alive and leave the queue together."""
        self._replies |= again._replies

    async def ack(self) -> None:
        """Take the job off the queue: its feature has arrived.

        An acknowledgement that the server does not confirm is only logged: the job is redelivered, and its OFFER answered `have`.
        """
        await self._settle(b"+ACK")

    async def retry(self, delay: float) -> None:
        """Give the job back. It is delivered again after `delay` seconds, to any encoder."""
        await self._settle(b"-NAK " + json.dumps({"delay": int(delay * 1e9)}).encode())

    async def terminate(self, reason: str) -> None:
        """Take the unfinished job off the queue. The caller has notified the receiver, or knows that none waits."""
        _log.warning("encode job %s terminated: %s", self.job.job_id, reason)
        await self._settle(b"+TERM " + reason.replace("\r", " ").replace("\n", " ").encode()[:512])

    @asynccontextmanager
    async def keep_alive(self) -> AsyncIterator[None]:
        """Extend the acknowledgement wait, after every third of it, while the job is in progress."""

        async def extend() -> None:
            while True:
                await self._clock.sleep(self._ack_wait / 3)
                try:
                    for reply in list(self._replies.values()):
                        if self.is_leaving:  # this would delay a job that was given back
                            return
                        await self._bus.client.publish(reply, b"+WPI")
                except Exception as error:  # noqa: BLE001 - without this loop the job would be delivered again and again
                    _log.warning(
                        "failed to extend the acknowledgement wait of job %s: %s: %s",
                        *(self.job.job_id, type(error).__name__, error),
                    )

        task = asyncio.create_task(extend(), name=f"keep-alive-{self.job.job_id}")
        try:
            yield
        finally:
            task.cancel()

    async def _settle(self, verb: bytes) -> None:
        self.is_leaving = True
        for reply in list(self._replies.values()):
            try:
                await self._bus.client.request(reply, verb, timeout=_API_SECONDS)
            except (nats_errors.Error, TimeoutError) as error:
                _log.warning(
                    "%s of job %s was not confirmed (%s); it may be redelivered",
                    *(verb[:5].decode(), self.job.job_id, type(error).__name__),
                )


class _Puller:
    """Sends pull requests for one modality. Its inbox is a core subscription, which the client restores after a reconnect."""

    def __init__(self, bus: Bus, stream: str, modality: Modality, clock: Clock = SYSTEM_CLOCK) -> None:
        self._bus = bus
        self._clock = clock
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{_consumer(modality)}"
        self._inbox = bus.new_inbox()
        self._counter = 0
        self._subscription: NatsSubscription | None = None

    async def open(self) -> None:
        self._subscription = await self._bus.client.subscribe(f"{self._inbox}.*", pending_msgs_limit=4096)
        self._bus.on_reconnect(self._end_request)

    async def close(self) -> None:
        if self._subscription is not None and not self._bus.client.is_closed:
            await self._subscription.unsubscribe()

    async def take(self, batch: int, linger_seconds: float = 0.0) -> list[Msg]:
        """Take up to `batch` messages: the available ones, or with `linger_seconds` the first to arrive.

        Raises:
            js_errors.ServiceUnavailableError: the consumer does not exist.
            TimeoutError: the server does not answer.
        """
        assert self._subscription is not None, "call open() first"
        messages: list[Msg] = []
        while len(messages) < batch and self._subscription.pending_msgs:  # late answers to an earlier request
            late = await self._message(_API_SECONDS)
            if not _status(late):
                messages.append(late)
        if len(messages) == batch:
            return messages
        self._counter += 1
        reply = f"{self._inbox}.{self._counter}"
        body: dict[str, Any] = {"batch": batch - len(messages)}
        body |= {"expires": int(linger_seconds * 1e9)} if linger_seconds else {"no_wait": True}
        await self._bus.client.publish(self._next, json.dumps(body).encode(), reply=reply)
        end = self._clock.now() + linger_seconds + _API_SECONDS
        while len(messages) < batch:
            try:
                message = await self._message(max(0.001, end - self._clock.now()))
            except TimeoutError:
                if messages:
                    break
                raise
            status = _status(message)
            if not status:
                messages.append(message)
            elif message.subject == reply:
                if status in ("503", "409"):  # no such consumer, or it was deleted
                    raise js_errors.ServiceUnavailableError(description=f"{self._next}: {status}")
                break  # 404: no messages; or _TIME_IS_UP
        return messages

    async def _end_request(self) -> None:
        """Answer the latest request ourselves: the server may have gone with it, and its jobs would wait for our next one."""
        if not self._bus.client.is_closed:
            headers = {api.Header.STATUS.value: _TIME_IS_UP}
            await self._bus.client.publish(f"{self._inbox}.{self._counter}", headers=headers)

    async def _message(self, seconds: float) -> Msg:
        """Wait for the next message, or be cancelled.

        The client swallows a cancellation that coincides with a message, and an encoder would never end.
        """
        assert self._subscription is not None, "call open() first"
        async with self._clock.timeout(seconds), cancellable():
            return await self._subscription.next_msg(timeout=None)


class EncodeQueue:
    """The queue of one pipeline revision."""

    def __init__(self, bus: Bus, limits: QueueLimits | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._bus = bus
        self._clock = clock
        self._limits = limits or QueueLimits()
        self._stream = bus.subjects.encode_stream
        self._manager = JetStreamManager(bus.client, timeout=_API_SECONDS)
        self._log = RateLimitedLog(_log)
        self._pullers: dict[Modality, _Puller] = {}
        self._wake = asyncio.Event()
        self._wakers: list[NatsSubscription] = []
        self._turn = 0

    async def ensure(self) -> None:
        """Create the stream and its consumers, or update them to these limits.

        Any number of gateways may call it at once, and no other role does: a user that can create streams can read every subject.

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
            num_replicas=self._bus.stream_replicas,
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
                f"cannot set up the encode queue {self._stream} ({error}); check that JetStream is enabled on the NATS server, and, of a "
                "cluster, that a majority of its servers is Ready and spec.nats.replicas is at most their number"
            ) from error

    async def publish(self, job: EncodeJob, copy: int = 0) -> None:
        """Queue a job. The same `copy` of it within two minutes is queued once, across restarts of the server as long as it is stored.

        Another copy is queued even if an encoder has taken the job off the queue meanwhile. Two that are queued run once.

        Raises:
            OverloadedError: the queue is full.
            DeadlineError: the server did not confirm: it is slow, or the gateway has not (re)created the queue yet. The job may have
                been queued; publishing again is safe.
            PeerLostError: no server, or one without JetStream.
        """
        try:
            answer = await self._send(job, f"{job.job_id}.{copy}" if copy else job.job_id)
        except (nats_errors.NoRespondersError, nats_errors.TimeoutError, TimeoutError) as error:
            # Without a stream there is no reply if pullers listen for the core copies of jobs, otherwise "no responders".
            raise DeadlineError(
                f"the encode queue did not confirm job {job.job_id} ({type(error).__name__}); publish it again"
            ) from error
        except nats_errors.OutboundBufferLimitError as error:
            raise OverloadedError(
                "NATS is disconnected and the send buffer is full; retry after it has reconnected"
            ) from error
        except nats_errors.Error as error:
            raise PeerLostError(f"cannot queue job {job.job_id}: {type(error).__name__} {error}") from error
        fault = json.loads(answer.data).get("error")
        if fault is None:
            return
        if fault.get("err_code") in _STREAM_FULL:
            raise OverloadedError(
                f"the encode queue is full ({fault['description']}); retry later, or add encoders (spec.encoder)"
            )
        raise PeerLostError(f"the encode queue refused job {job.job_id}: {fault.get('description')}")

    async def pull(self, modalities: Sequence[Modality], batch: int, wait: float) -> list[Delivery]:
        """Pull up to `batch` jobs, fairly by modality, waiting up to `wait` seconds for the first. Empty if none arrives in time.

        It never raises if the server is unreachable, but waits, as for an empty queue. One caller at a time.
        """
        end = self._clock.now() + wait
        while True:
            woken = self._wake.is_set()
            self._wake.clear()
            remaining = end - self._clock.now()
            try:
                await self._open(modalities)
                deliveries = await self._round(modalities, batch)
                if deliveries or remaining <= 0:
                    return deliveries
            except (js_errors.ServiceUnavailableError, js_errors.NotFoundError):
                self._log.warning(
                    "gone", f"encode queue {self._stream} does not exist yet; the gateway creates it"
                )
            except (nats_errors.Error, TimeoutError, MmdError) as error:
                self._log.warning("pull", f"reading the encode queue failed: {type(error).__name__} {error}")
            remaining = end - self._clock.now()
            if remaining <= 0:
                return []
            # The signal may arrive before the stream has its job: look again soon.
            pause = _SOON_SECONDS if woken else _POLL_SECONDS
            try:
                async with self._clock.timeout(min(remaining, pause)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def depth(self) -> dict[Modality, QueueDepth]:
        """The jobs that are queued and not yet done, by modality.

        Raises:
            PeerLostError: the server or the queue is not available.
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
                f"failed to read the depth of {self._stream}: {type(error).__name__} {error}"
            ) from error
        jobs = dict.fromkeys(MODALITIES, 0)
        work = dict.fromkeys(MODALITIES, 0)
        for subject, count in (info.state.subjects or {}).items():
            *_, name, size = subject.split(".")
            if not (size.isdecimal() and len(size) <= MAX_WORK_DIGITS):
                continue  # not our job: anyone who may publish chooses the subject
            for modality in MODALITIES:
                if name == modality:
                    jobs[modality] += count
                    work[modality] += count * int(size)
        return {m: QueueDepth(jobs=jobs[m], work=work[m], running_jobs=running[m]) for m in MODALITIES}

    async def close(self) -> None:
        """Stop listening for new jobs. Deliveries in progress stay valid until the bus closes."""
        for subscription in self._wakers:
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()
        for puller in self._pullers.values():
            await puller.close()
        self._wakers.clear()
        self._pullers.clear()

    async def _send(self, job: EncodeJob, message_id: str) -> Msg:
        subject = self._bus.subjects.encode_work(job.feature.modality, round_work(job.feature.work))
        headers = {api.Header.MSG_ID.value: message_id}
        try:
            data = pack(job, MAX_MESSAGE_BYTES - _HEADER_BYTES)
        except TooLongError as error:
            raise _too_large(job.feature) from error
        return await self._bus.client.request(subject, data, timeout=_CONFIRM_SECONDS, headers=headers)

    async def _open(self, modalities: Sequence[Modality]) -> None:
        async def wake(_: Msg) -> None:
            self._wake.set()

        for modality in modalities:
            if modality in self._pullers:
                continue
            puller = _Puller(self._bus, self._stream, modality, self._clock)
            await puller.open()
            # Core NATS delivers a copy of each job, the signal to pull: an idle queue is polled slowly.
            subject = self._bus.subjects.encode_work(modality, "*")
            self._wakers.append(await self._bus.client.subscribe(subject, cb=wake, pending_msgs_limit=4096))
            self._pullers[modality] = puller

    async def _round(self, modalities: Sequence[Modality], batch: int) -> list[Delivery]:
        """Ask each modality for its share of the remaining batch, beginning with another modality each time."""
        self._turn += 1
        order = [modalities[(self._turn + i) % len(modalities)] for i in range(len(modalities))]
        deliveries: list[Delivery] = []
        for turn in range(2 * len(order)):  # the second round hands out unused shares
            remaining = batch - len(deliveries)
            if remaining == 0:
                break
            share = remaining if turn >= len(order) else math.ceil(remaining / (len(order) - turn))
            if turn >= len(order) and not deliveries:
                break  # no puller had a job
            for message in await self._pullers[order[turn % len(order)]].take(share):
                delivery = await self._accept(message)
                if delivery is not None:
                    deliveries.append(delivery)
        return deliveries

    async def _accept(self, message: Msg) -> Delivery | None:
        try:
            job = unpack(EncodeJob, message.data)
        except WireError as error:
            self._log.warning("job", f"invalid encode job on {message.subject} terminated: {error.message}")
            await self._bus.client.publish(message.reply, b"+TERM not an EncodeJob")
            return None
        return Delivery(self._bus, message, job, self._limits, self._clock)


async def report_failure(
    bus: Bus, delivery: Delivery, failed: EncodeFailed, reason: str, clock: Clock = SYSTEM_CLOCK
) -> None:
    """Report to the receiver that the feature will not come, then take the job off the queue.

    Until the receiver confirms, the job stays queued, and the next encoder to get it reports again, unless the receiver is lost for good.
    """
    job = delivery.job
    for _ in range(_REPORTS):
        try:
            subject = bus.subjects.encode_failed(job.receiver)
            await bus.request(subject, failed, Acknowledged, timeout=_CONFIRM_SECONDS)
            break
        except MmdError as error:
            _log.warning(
                "failure report of job %s was not confirmed, retrying: %s", job.job_id, error.message
            )
            await clock.sleep(_POLL_SECONDS)
    else:
        if clock.unix() < job.deadline:
            await delivery.retry(_CONFIRM_SECONDS)
            return
    await delivery.terminate(reason)


def round_work(work: int) -> int:
    """Round up to two significant digits, so that the stream's subjects stay few."""
    if work < 100:
        return max(work, 0)
    unit: int = 10 ** (len(str(work)) - 2)
    return -(-work // unit) * unit


async def check_fits(feature: FeatureRef) -> None:
    """Check that the encode job of a feature fits one message, before any other pod has the request.

    Few ranges cost no time; many are measured outside the event loop.

    Raises:
        CapacityError: the job does not fit; the message names the cause and the remedy.
    """
    room = MAX_MESSAGE_BYTES - _HEADER_BYTES - _OTHER_FIELDS_BYTES
    try:
        room -= len(pack(replace(feature, ranges=[]), room)) + _ARRAY_BYTES
    except TooLongError as error:
        raise _too_large(feature) from error
    if len(feature.ranges) * _RANGE_BYTES <= room:
        return
    if await asyncio.to_thread(_packed_bytes, feature.ranges) > room:
        raise _too_large(feature)


def _packed_bytes(ranges: list[list[int]]) -> int:
    """Minimum bytes of the ranges in a message.

    They are packed in parts: packing holds the interpreter lock, and other threads run between parts.
    """
    parts = (ranges[at : at + _RANGES_AT_ONCE] for at in range(0, len(ranges), _RANGES_AT_ONCE))
    return sum(len(msgpack.packb(part)) for part in parts)


def _too_large(feature: FeatureRef) -> CapacityError:
    """The error for a job that is too large because of the medium's ranges in the prompt; it does not contain the medium."""
    remedy = {
        "image": "send a smaller image",
        "video": "send a shorter or smaller video, or lower spec.gateway.media.video.maxFrames",
        "audio": "send a shorter clip",
    }[feature.modality]
    return CapacityError(
        f"the {feature.num_tokens} tokens of this {feature.modality} are in {len(feature.ranges)} separate ranges of the prompt, "
        f"too many for a message on the encode queue ({MAX_MESSAGE_BYTES >> 10} KiB); {remedy}"
    )


def _consumer(modality: str) -> str:
    return f"encode-{modality}"


def _status(message: Msg) -> str | None:
    """The status that a reply has instead of a message (JetStream sends it without a body)."""
    return message.headers.get("Status") if message.headers and not message.data else None
