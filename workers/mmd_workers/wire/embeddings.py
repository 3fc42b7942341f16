"""Features from encoder to receiver: OFFER, GRANT, CHUNK x n, CREDIT, on the bulk connection. Knows no model.

Flow control is byte credit: the receiver reserves the whole feature in its budget before it grants, and the sender never
has more than the granted window unacknowledged. Chunks carry their sequence number and offset, the offer a blake2b-128
digest of all bytes; any gap, repetition, reordering or damage fails the transfer at both ends, and the sender offers again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from nats.aio.msg import Msg

from mmd_api.contract.errors import (
    CapacityError,
    DeadlineError,
    LinkError,
    MmdError,
    OverloadedError,
    PeerLostError,
    WireError,
)
from mmd_workers.wire.bulk import Bulk
from mmd_workers.wire.bus import Bus, Subscription
from mmd_workers.wire.codec import Frame, unpack
from mmd_workers.wire.messages import (
    EmbeddingChunk,
    EmbeddingCredit,
    EmbeddingGrant,
    EmbeddingOffer,
    EncodeJob,
    TensorHeader,
)

OfferDecision = Literal["send", "have", "wait", "refuse"]
Sent = Literal["sent", "have", "refused"]
Wants = Callable[[str, int], OfferDecision]
OnFeature = Callable[[str, list[TensorHeader], memoryview, dict[str, float]], Awaitable[None] | None]

MAX_CHUNK_BYTES = 960 << 10
_DIGEST_BYTES = 16
_MAX_TRANSFERS = 4
_MAX_TENSORS = 1024
_ATTEMPTS = 4
_RETRY_SECONDS = 0.05
_OFFER_SECONDS = 5.0  # an absent receiver is detected at once; a busy one may take this long
_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
}

_log = logging.getLogger(__name__)


class EmbeddingSender:
    """Sends features of finished encode jobs."""

    def __init__(self, bus: Bus, timeout_seconds: float = 2.0) -> None:
        self._bus = bus
        self._timeout = timeout_seconds

    async def send(
        self,
        job: EncodeJob,
        tensors: Sequence[tuple[TensorHeader, memoryview]],
        timings: dict[str, float] | None = None,
        spans: list[tuple[float, float]] | None = None,
    ) -> Sent:
        """Send a feature to the pod that requested it. `sent` and `have`: it is there; `refused`: it is no longer needed.

        `spans` gets the begin and end (time.monotonic) of the transfer itself, without the wait for the receiver's room.
        Waits while the receiver has no room. The memory of `tensors` must not change meanwhile.

        Raises:
            PeerLostError: the receiver is lost.
            LinkError: several transfers failed (lost chunks, silence beyond `timeout_seconds`).
            DeadlineError: the job's deadline passed.
            CapacityError: the feature exceeds the receiver's whole budget.
        """
        views = [view.cast("B") if view.nbytes else memoryview(b"") for _, view in tensors]
        for (header, _), view in zip(tensors, views, strict=True):
            if header.num_bytes != view.nbytes:
                raise WireError(
                    f"tensor {header.name} has {view.nbytes} bytes and its header says {header.num_bytes}"
                )
        offer = EmbeddingOffer(
            transfer_id=uuid.uuid4().hex,
            feature_id=job.feature.feature_id,
            sender=self._bus.client_name,
            tensors=[header for header, _ in tensors],
            total_bytes=sum(view.nbytes for view in views),
            digest=await asyncio.to_thread(_digest, views),
            timings=timings or {},
        )
        abandoned = threading.Event()  # besides cancelling: the client's publish can swallow a cancellation
        try:
            left = max(0.0, job.deadline - time.time())
            async with asyncio.timeout(left):
                bulk = await self._bus.bulk()  # the first use connects, which waits for an absent server
                return await bulk.run(
                    self._send(bulk.bus, job.receiver, offer, views, abandoned, spans), timeout=left
                )
        except TimeoutError as error:
            raise DeadlineError(
                f"feature {offer.feature_id[:16]} did not reach {job.receiver} before its job's deadline"
            ) from error
        finally:
            abandoned.set()

    async def _send(
        self,
        bus: Bus,
        receiver: str,
        offer: EmbeddingOffer,
        views: list[memoryview],
        abandoned: threading.Event,
        spans: list[tuple[float, float]] | None,
    ) -> Sent:
        failures = 0
        while not abandoned.is_set():
            try:
                grant = await bus.request(
                    bus.subjects.embedding(receiver), offer, EmbeddingGrant, timeout=_OFFER_SECONDS
                )
                if grant.verdict == "have":
                    return "have"
                if grant.verdict == "refuse":
                    _log.info("%s refused feature %s: %s", receiver, offer.feature_id[:16], grant.reason)
                    return "refused"
                if grant.verdict == "send":
                    begun = time.monotonic()
                    await _Outgoing(bus, grant, views, offer.total_bytes, self._timeout, abandoned).run()
                    if spans is not None:
                        spans.append((begun, time.monotonic()))
                    return "sent"
                pause = max(_RETRY_SECONDS, min(grant.retry_seconds, 5.0))
            except (LinkError, DeadlineError, OverloadedError, PeerLostError) as error:
                if isinstance(error, PeerLostError) and not failures:
                    raise  # later it proves nothing: after the server's restart we may be back before the receiver is
                failures += 1
                if failures == _ATTEMPTS:
                    raise LinkError(
                        f"feature {offer.feature_id[:16]} did not reach {receiver} in {failures} attempts: {error.message}"
                    ) from error
                _log.warning("transfer to %s failed, retrying with a new offer: %s", receiver, error.message)
                pause = _RETRY_SECONDS * 5 ** (failures - 1)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # noqa: S311
        raise asyncio.CancelledError


class _Outgoing:
    """One granted transfer, from the sender's side."""

    def __init__(
        self,
        bus: Bus,
        grant: EmbeddingGrant,
        views: list[memoryview],
        total_bytes: int,
        timeout_seconds: float,
        abandoned: threading.Event,
    ) -> None:
        self._bus = bus
        self._abandoned = abandoned
        self._grant = grant
        self._views = views
        self._total = total_bytes
        self._timeout = timeout_seconds
        self._received = 0
        self._complete = False
        self._error = ""
        self._news = asyncio.Event()

    async def run(self) -> None:
        grant = self._grant
        credits_inbox = self._bus.new_inbox()
        subscription = await self._bus.client.subscribe(credits_inbox, cb=self._credit)
        try:
            sent = 0
            for sequence, piece in enumerate(_pieces(self._views, min(grant.chunk_bytes, MAX_CHUNK_BYTES))):
                while sent + piece.nbytes - self._received > grant.window_bytes:
                    await self._wait("credit")
                self._check()
                end = sent + piece.nbytes
                header = EmbeddingChunk(grant.transfer_id, sequence, sent, last=end == self._total)
                await self._bus.publish(grant.inbox, Frame(header, piece), reply=credits_inbox)
                sent = end
            while not self._complete:
                await self._wait("the acknowledgement")
        finally:
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise LinkError("the sender was cancelled")
        if self._error:
            raise LinkError(self._error)

    async def _wait(self, what: str) -> None:
        self._check()
        self._news.clear()
        try:
            async with asyncio.timeout(self._timeout):
                await self._news.wait()
        except TimeoutError as error:
            raise LinkError(f"no {what} within {self._timeout} s after {self._received} bytes") from error
        self._check()

    async def _credit(self, message: Msg) -> None:
        if message.headers and message.headers.get("Status") == "503":
            self._error = "the receiver has given this transfer up"
        else:
            try:
                credit = unpack(EmbeddingCredit, message.data)
            except WireError as error:
                self._error = error.message
            else:
                if credit.transfer_id != self._grant.transfer_id:
                    return
                self._received = max(self._received, min(credit.received_bytes, self._total))
                self._complete = self._complete or credit.complete
                self._error = self._error or credit.error
        self._news.set()


@dataclass(slots=True, eq=False)
class _Incoming:
    """One granted transfer, from the receiver's side: straight into one buffer."""

    offer: EmbeddingOffer
    inbox: str
    buffer: memoryview
    last_activity: float
    received: int = 0
    credited: int = 0
    sequence: int = 0
    reply: str = ""
    handing_over: bool = False
    digest: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES))
    subscription: Subscription | None = None
    watch: asyncio.Task[None] | None = None

    def take(self, chunk: EmbeddingChunk, payload: memoryview, limit: int) -> str:
        """Put a chunk in its place; returns what is wrong with it, or nothing."""
        end = self.received + payload.nbytes
        if chunk.sequence != self.sequence or chunk.offset != self.received:
            return (
                f"chunk {chunk.sequence} at byte {chunk.offset} came where chunk {self.sequence} at "
                f"byte {self.received} was due"
            )
        if payload.nbytes > limit or end > self.offer.total_bytes:
            return f"chunk {chunk.sequence} of {payload.nbytes} bytes exceeds what was granted"
        if chunk.last != (end == self.offer.total_bytes) or (payload.nbytes == 0 and not chunk.last):
            return f"chunk {chunk.sequence} ends at byte {end} of {self.offer.total_bytes}, last={chunk.last}"
        self.buffer[self.received : end] = payload
        self.digest.update(payload)
        self.received = end
        self.sequence += 1
        return ""


class EmbeddingReceiver:
    """Takes features in on one pod, within a budget of bytes under way.

    `wants(feature_id, num_bytes)` answers an offer; `on_feature(feature_id, headers, data, timings)` gets the verified bytes of
    all tensors one after the other, owns them from then on (the budget here covers transfers under way), and is done when
    it returns: only then is the encode job acknowledged. Both run on the bus's loop and must be quick.
    """

    def __init__(
        self,
        bus: Bus,
        pod: str,
        budget_bytes: int,
        wants: Wants,
        on_feature: OnFeature,
        window_bytes: int = 8 << 20,
        chunk_bytes: int = 512 << 10,
        timeout_seconds: float = 2.0,
    ) -> None:
        self._bus = bus
        self._pod = pod
        self._budget = budget_bytes
        self._wants = wants
        self._on_feature = on_feature
        self._chunk = min(chunk_bytes, MAX_CHUNK_BYTES)
        self._window = max(window_bytes, self._chunk)
        self._timeout = timeout_seconds
        self._reserved = 0
        self._transfers: dict[str, _Incoming] = {}  # by feature; touched on the bulk loop only
        self._bulk: Bulk[Bus] | None = None
        self._offers: Subscription | None = None
        self._endings: set[asyncio.Task[None]] = set()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the budget that transfers under way hold."""
        return self._reserved

    async def start(self) -> None:
        """Take offers from now on."""
        self._bulk = await self._bus.bulk()
        await self._bulk.run(self._start(self._bulk.bus))

    async def close(self) -> None:
        """Take no more offers and give up the transfers under way; their senders are notified at once."""
        if self._bulk is not None and self._bus.is_connected:
            await self._bulk.run(self._close())

    def cancel(self, feature_id: str) -> None:
        """This feature is no longer needed: end its transfer, if there is one. From the bus's loop, after `wants` says so."""
        if self._bulk is not None:
            self._bulk.post(self._cancel, feature_id)

    async def _start(self, bus: Bus) -> None:
        self._offers = await bus.serve(bus.subjects.embedding(self._pod), EmbeddingOffer, self._offered)
        await bus.flush()

    async def _close(self) -> None:
        if self._offers is not None:
            await self._offers.unsubscribe()
        for incoming in list(self._transfers.values()):
            self._end(incoming, "the receiver is closing")
        if self._endings:
            await asyncio.wait(self._endings, timeout=self._timeout)

    def _cancel(self, feature_id: str) -> None:
        incoming = self._transfers.get(feature_id)
        if incoming is not None and not incoming.handing_over:
            self._end(incoming, "cancelled by the receiver")

    async def _offered(self, offer: EmbeddingOffer) -> EmbeddingGrant:
        bulk = self._bulk
        if bulk is None:
            raise OverloadedError("this receiver has not started; offer again")
        _check(offer)
        if offer.total_bytes > self._budget:
            raise CapacityError(
                f"a feature of {offer.total_bytes} bytes exceeds the receiver's budget of {self._budget}; send fewer "
                f"frames or pixels, or raise the feature budget of the pool"
            )
        verdict: OfferDecision
        try:
            verdict = await bulk.home(self._timeout, self._wants, offer.feature_id, offer.total_bytes)
        except TimeoutError as error:
            raise OverloadedError(
                f"{self._pod} was too busy to answer an offer within {self._timeout} s; offer again"
            ) from error
        if verdict != "send":
            return EmbeddingGrant(
                offer.transfer_id, verdict, retry_seconds=_RETRY_SECONDS, reason="not wanted here"
            )
        earlier = self._transfers.get(offer.feature_id)
        if (
            earlier is not None
            and earlier.offer.transfer_id == offer.transfer_id
            and not earlier.handing_over
        ):
            self._end(earlier, "its sender offered it again")
        full = self._reserved + offer.total_bytes > self._budget or len(self._transfers) >= _MAX_TRANSFERS
        if full or offer.feature_id in self._transfers:
            reason = "no room now" if full else "another sender is at it"
            return EmbeddingGrant(offer.transfer_id, "wait", retry_seconds=_RETRY_SECONDS, reason=reason)
        incoming = _Incoming(
            offer,
            bulk.bus.new_inbox(),
            np.empty(offer.total_bytes, dtype=np.uint8).data,
            time.monotonic(),
        )
        self._transfers[offer.feature_id] = incoming
        self._reserved += offer.total_bytes
        try:

            async def receive(chunk: EmbeddingChunk, payload: memoryview, reply: str) -> None:
                await self._receive(incoming, chunk, payload, reply)

            incoming.subscription = await bulk.bus.subscribe_frames(
                incoming.inbox, EmbeddingChunk, receive, pending_bytes=2 * self._window + MAX_CHUNK_BYTES
            )
            incoming.watch = asyncio.create_task(self._watch(incoming))
            await bulk.bus.flush()
        except BaseException:
            self._end(incoming, "the receiver could not subscribe")
            raise
        return EmbeddingGrant(
            offer.transfer_id, "send", incoming.inbox, window_bytes=self._window, chunk_bytes=self._chunk
        )

    async def _receive(
        self, incoming: _Incoming, chunk: EmbeddingChunk, payload: memoryview, reply: str
    ) -> None:
        if self._transfers.get(incoming.offer.feature_id) is not incoming or incoming.handing_over:
            return
        incoming.last_activity = time.monotonic()
        incoming.reply = reply
        fault = incoming.take(chunk, payload, self._chunk)
        if not fault and chunk.last:
            fault = await self._hand_over(incoming)
            self._end(incoming, fault, complete=not fault)
        elif fault:
            self._end(incoming, fault)
        elif incoming.received - incoming.credited >= self._window // 4:
            incoming.credited = incoming.received
            await self._credit(incoming)

    async def _hand_over(self, incoming: _Incoming) -> str:
        offer = incoming.offer
        if incoming.digest.hexdigest() != offer.digest:
            return "the bytes do not match the digest in the offer"
        incoming.handing_over = True
        if incoming.watch is not None:
            incoming.watch.cancel()
        bulk = self._bulk
        if bulk is None:
            return "the receiver is closing"
        try:
            await bulk.home(
                self._timeout,
                self._on_feature,
                *(offer.feature_id, offer.tensors, incoming.buffer, dict(offer.timings)),
            )
        except TimeoutError:
            return f"the receiver did not store the feature within {self._timeout} s"
        except Exception as error:  # noqa: BLE001 - the sender must be notified
            _log.exception("storing received feature %s failed", offer.feature_id[:16])
            return f"the receiver could not store the feature: {type(error).__name__}: {error}"
        return ""

    async def _watch(self, incoming: _Incoming) -> None:
        """Free the room of a transfer whose sender is silent."""
        while (left := incoming.last_activity + self._timeout - time.monotonic()) > 0:
            await asyncio.sleep(left)
        self._end(incoming, f"no chunk within {self._timeout} s")

    def _end(self, incoming: _Incoming, fault: str, complete: bool = False) -> None:
        """Free the room; nothing after this touches the transfer. The result is sent by a task of its own."""
        if self._transfers.get(incoming.offer.feature_id) is not incoming:
            return
        del self._transfers[incoming.offer.feature_id]
        self._reserved -= incoming.offer.total_bytes
        if fault:
            _log.warning(
                "transfer of feature %s from %s failed after %d of %d bytes: %s",
                *(incoming.offer.feature_id[:16], incoming.offer.sender),
                *(incoming.received, incoming.offer.total_bytes, fault),
            )
        task = asyncio.create_task(self._send_result(incoming, fault, complete))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _send_result(self, incoming: _Incoming, fault: str, complete: bool) -> None:
        try:
            await self._credit(incoming, fault, complete)
        except MmdError as error:
            _log.warning(
                "result of transfer %s not sent to its sender: %s",
                incoming.offer.feature_id[:16],
                error.message,
            )
        if incoming.watch is not None:
            incoming.watch.cancel()
        if incoming.subscription is not None:
            await incoming.subscription.unsubscribe()

    async def _credit(self, incoming: _Incoming, fault: str = "", complete: bool = False) -> None:
        if incoming.reply and self._bulk is not None:
            credit = EmbeddingCredit(incoming.offer.transfer_id, incoming.received, complete, fault)
            await self._bulk.bus.publish(incoming.reply, credit)


def _check(offer: EmbeddingOffer) -> None:
    """Refuse an offer that contradicts itself, before memory is set aside for it."""
    if len(offer.tensors) > _MAX_TENSORS:
        raise WireError(f"an offer of {len(offer.tensors)} tensors; the limit is {_MAX_TENSORS}")
    for tensor in offer.tensors:
        item = _ITEM_BYTES.get(tensor.dtype)
        if (
            item is None
            or min(tensor.shape, default=0) < 0
            or math.prod(tensor.shape) * item != tensor.num_bytes
        ):
            raise WireError(
                f"tensor {tensor.name}: {tensor.num_bytes} bytes are not {tensor.dtype} of shape {tensor.shape}"
            )
    if sum(tensor.num_bytes for tensor in offer.tensors) != offer.total_bytes:
        raise WireError(
            f"the tensors of transfer {offer.transfer_id} do not add up to {offer.total_bytes} bytes"
        )


def _pieces(views: Sequence[memoryview], chunk_bytes: int) -> Iterator[memoryview]:
    """Views of at most `chunk_bytes`, in order; one empty piece when there is nothing at all."""
    empty = True
    for view in views:
        for start in range(0, view.nbytes, chunk_bytes):
            empty = False
            yield view[start : start + chunk_bytes]
    if empty:
        yield memoryview(b"")


def _digest(views: Sequence[memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for view in views:
        digest.update(view)
    return digest.hexdigest()
