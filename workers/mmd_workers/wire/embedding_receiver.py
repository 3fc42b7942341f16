"""The receiver's end of a feature transfer: grants within the budget of bytes in flight, takes chunks in order, verifies, stores.

Each sender has `PLACES_PER_SENDER` transfers at a time, so that one that freezes holds up nobody else. An offer without room is answered
when its turn comes, or after `ANSWER_SECONDS`; then it keeps its turn until the sender repeats it. The oldest offer comes first. One that
fits into the budget passes older ones that do not, within the bound of `next_in_line`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mmd_api.contract.errors import (
    CapacityError,
    MmdError,
    OverloadedError,
    WireError,
)
from mmd_workers.basics.overtaking import next_in_line
from mmd_workers.wire.bulk import Bulk
from mmd_workers.wire.bus import Bus, Subscription
from mmd_workers.wire.embeddings import MAX_CHUNK_BYTES, RETRY_SECONDS, new_digest
from mmd_workers.wire.messages.encoder import EmbeddingCredit
from mmd_workers.wire.messages.message_parts import TensorHeader
from mmd_workers.wire.messages.prefill import EmbeddingChunk, EmbeddingGrant, EmbeddingOffer

OfferDecision = Literal["send", "have", "wait", "refuse"]
Wants = Callable[[str, int], OfferDecision]
OnFeature = Callable[[str, list[TensorHeader], memoryview, dict[str, float]], Awaitable[None] | None]

PLACES_PER_SENDER = 4
ANSWER_SECONDS = (
    1.0  # an offer is answered after this time at the latest; senders expect an answer within 5 s
)
REPEAT_SECONDS = 1.0  # an offer keeps its turn for this long after its answer
MAX_WAITING = 128  # offers that wait here; others are refused and repeated, without a turn
_MAX_TENSORS = 1024
_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
}

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Incoming:
    """A granted transfer at the receiver, straight into one buffer."""

    offer: EmbeddingOffer
    inbox: str
    buffer: memoryview
    granted: float  # time.monotonic
    last_activity: float
    received: int = 0
    credited: int = 0
    sequence: int = 0
    reply: str = ""
    storing: bool = False
    digest: hashlib.blake2b = field(default_factory=new_digest)
    subscription: Subscription | None = None
    watch: asyncio.Task[None] | None = None

    def take(self, chunk: EmbeddingChunk, payload: memoryview, limit: int) -> str:
        """Put a chunk in its place; returns its fault, or an empty string."""
        end = self.received + payload.nbytes
        if chunk.sequence != self.sequence or chunk.offset != self.received:
            return (
                f"chunk {chunk.sequence} at byte {chunk.offset} arrived, but chunk {self.sequence} at "
                f"byte {self.received} was expected"
            )
        if payload.nbytes > limit or end > self.offer.total_bytes:
            return f"chunk {chunk.sequence} of {payload.nbytes} bytes exceeds the granted credit"
        if chunk.last != (end == self.offer.total_bytes) or (payload.nbytes == 0 and not chunk.last):
            return f"chunk {chunk.sequence} ends at byte {end} of {self.offer.total_bytes}, last={chunk.last}"
        self.buffer[self.received : end] = payload
        self.digest.update(payload)
        self.received = end
        self.sequence += 1
        return ""


@dataclass(slots=True, eq=False)
class _Waiting:
    """An offer that waits for room."""

    offer: EmbeddingOffer
    turn: asyncio.Future[_Incoming]  # cancelled if it did not come before the answer
    until: float = math.inf  # time.monotonic, after such an answer: the offer must be repeated by then
    overtaken: int = 0


class EmbeddingReceiver:
    """Receives the features of one pod, within a budget of bytes in flight.

    A feature of up to `largest_bytes` that exceeds the budget comes alone. `wants(feature_id, num_bytes)` answers an offer.
    `on_feature(feature_id, headers, data, timings)` gets the verified bytes of all tensors one after the other, and the sender's
    timings with `wire_seconds`, from the grant to the last byte. It owns the bytes from then on (the budget here covers transfers in
    flight); the encode job is acknowledged only after it returns. Both run on the bus's loop and must be quick.
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
        subject: str = "",
        largest_bytes: int = 0,
    ) -> None:
        """Prepare a receiver.

        `subject`: subject of the offers; empty: the subject for requested features. `largest_bytes`: 0 means the budget.
        """
        self._bus = bus
        self._pod = pod
        self._subject = subject or bus.subjects.embedding(pod)
        self._budget = budget_bytes
        self._largest = max(budget_bytes, largest_bytes)
        self._wants = wants
        self._on_feature = on_feature
        self._chunk = min(chunk_bytes, MAX_CHUNK_BYTES)
        self._window = max(window_bytes, self._chunk)
        self._timeout = timeout_seconds
        self._reserved = 0
        # Used on the bulk loop only.
        self._transfers: dict[str, _Incoming] = {}  # by feature
        self._waiting: list[_Waiting] = []  # oldest first
        self._bulk: Bulk[Bus] | None = None
        self._offers: Subscription | None = None
        self._endings: set[asyncio.Task[None]] = set()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the budget that transfers in flight hold."""
        return self._reserved

    def receives(self, feature_id: str) -> bool:
        """Whether a transfer of this feature is in flight."""
        return feature_id in self._transfers

    async def start(self) -> None:
        """Take offers from now on."""
        self._bulk = await self._bus.bulk()
        await self._bulk.run(self._start(self._bulk.bus))

    async def close(self) -> None:
        """Take no more offers and give up the transfers in flight; their senders are notified at once."""
        if self._bulk is not None and self._bus.is_connected:
            await self._bulk.run(self._close())

    def cancel(self, feature_id: str) -> None:
        """End the transfer of a feature that is no longer needed, if there is one.

        Call it on the bus's loop, once `wants` refuses the feature.
        """
        if self._bulk is not None:
            self._bulk.post(self._cancel, feature_id)

    async def _start(self, bus: Bus) -> None:
        self._offers = await bus.serve(self._subject, EmbeddingOffer, self._offered)
        await bus.flush()

    async def _close(self) -> None:
        if self._offers is not None:
            await self._offers.unsubscribe()
        self._waiting.clear()  # their handlers have been cancelled
        for incoming in list(self._transfers.values()):
            self._end(incoming, "the receiver is closing")
        if self._endings:
            await asyncio.wait(self._endings, timeout=self._timeout)

    def _cancel(self, feature_id: str) -> None:
        incoming = self._transfers.get(feature_id)
        if incoming is not None and not incoming.storing:
            self._end(incoming, "cancelled by the receiver")

    async def _offered(self, offer: EmbeddingOffer) -> EmbeddingGrant:
        bulk = self._bulk
        if bulk is None:
            raise OverloadedError("this receiver has not started; offer again")
        _check(offer)
        if offer.total_bytes > self._largest:
            raise CapacityError(
                f"a feature of {offer.total_bytes} bytes exceeds the receiver's budget of {self._largest}; send fewer "
                f"frames or pixels, or raise the feature budget of the pool"
            )
        if (verdict := await self._verdict(offer, bulk)) != "send":
            return _refusal(offer, verdict, "not needed on this pod")
        earlier = self._transfers.get(offer.feature_id)
        if earlier is not None and earlier.offer.transfer_id == offer.transfer_id and not earlier.storing:
            self._end(earlier, "its sender offered it again")
        if (waiting := self._joined(offer)) is None:
            return _refusal(offer, "wait", f"{MAX_WAITING} offers are waiting")
        self._grant_waiting()
        had_to_wait = not waiting.turn.done()
        if had_to_wait and not await self._has_turn(waiting):
            return _refusal(offer, "wait", self._obstacle(offer))
        incoming = waiting.turn.result()
        try:
            if had_to_wait and (verdict := await self._verdict(offer, bulk)) != "send":
                self._end(incoming, "")
                return _refusal(offer, verdict, "no longer needed on this pod")
            if not await self._open(incoming, bulk):
                return _refusal(offer, "wait", "the transfer ended before it began")
        except BaseException:
            self._end(incoming, "the receiver could not take it")
            raise
        return EmbeddingGrant(
            offer.transfer_id, "send", incoming.inbox, window_bytes=self._window, chunk_bytes=self._chunk
        )

    async def _verdict(self, offer: EmbeddingOffer, bulk: Bulk[Bus]) -> OfferDecision:
        try:
            verdict: OfferDecision = await bulk.home(
                self._timeout, self._wants, offer.feature_id, offer.total_bytes
            )
        except TimeoutError as error:
            raise OverloadedError(
                f"{self._pod} was too busy to answer an offer within {self._timeout} s; offer again"
            ) from error
        return verdict

    async def _has_turn(self, waiting: _Waiting) -> bool:
        """Wait for the turn of an offer, for as long as its sender awaits an answer; returns whether it has its room."""
        turn = waiting.turn
        try:
            await asyncio.wait([turn], timeout=ANSWER_SECONDS)
        finally:
            if turn.cancel():
                waiting.until = time.monotonic() + REPEAT_SECONDS
        return not turn.cancelled()

    def _joined(self, offer: EmbeddingOffer) -> _Waiting | None:
        """The place in line of an offer, which keeps it when it is repeated; None if too many offers wait."""
        turn: asyncio.Future[_Incoming] = asyncio.get_running_loop().create_future()
        now = time.monotonic()
        self._waiting = [waiting for waiting in self._waiting if waiting.until > now]
        for waiting in self._waiting:
            if waiting.offer == offer:
                waiting.turn.cancel()
                waiting.turn, waiting.until = turn, math.inf
                return waiting
        if len(self._waiting) >= MAX_WAITING:
            return None
        waiting = _Waiting(offer, turn)
        self._waiting.append(waiting)
        return waiting

    def _grant_waiting(self) -> None:
        """Reserve room for the offers whose turn it is."""
        # An offer that waits for its sender holds up nobody.
        while (
            waiting := next_in_line(
                (waiting for waiting in self._waiting if self._may_send(waiting)),
                lambda waiting: self._fits(waiting.offer),
            )
        ) is not None:
            self._waiting.remove(waiting)
            waiting.turn.set_result(self._reserve(waiting.offer))

    def _may_send(self, waiting: _Waiting) -> bool:
        """Whether the sender awaits the answer, has a free place, and is the only one to send this feature."""
        offer = waiting.offer
        return (
            not waiting.turn.done()
            and offer.feature_id not in self._transfers
            and self._places_of(offer.sender) < PLACES_PER_SENDER
        )

    def _places_of(self, sender: str) -> int:
        return sum(incoming.offer.sender == sender for incoming in self._transfers.values())

    def _fits(self, offer: EmbeddingOffer) -> bool:
        return self._reserved == 0 or self._reserved + offer.total_bytes <= self._budget

    def _obstacle(self, offer: EmbeddingOffer) -> str:
        """What an offer waits for."""
        if offer.feature_id in self._transfers:
            return "another sender is already sending it"
        if self._places_of(offer.sender) >= PLACES_PER_SENDER:
            return f"{offer.sender} has {PLACES_PER_SENDER} transfers in flight here"
        return "no capacity now"

    def _reserve(self, offer: EmbeddingOffer) -> _Incoming:
        assert self._bulk is not None
        now, bus = time.monotonic(), self._bulk.bus
        buffer = np.empty(offer.total_bytes, dtype=np.uint8).data
        incoming = _Incoming(offer, bus.new_inbox(), buffer, now, now)
        self._transfers[offer.feature_id] = incoming
        self._reserved += offer.total_bytes
        incoming.watch = asyncio.create_task(self._watch(incoming))
        return incoming

    async def _open(self, incoming: _Incoming, bulk: Bulk[Bus]) -> bool:
        """Listen for the chunks of a transfer; returns False if it has ended meanwhile."""

        async def receive(chunk: EmbeddingChunk, payload: memoryview, reply: str) -> None:
            await self._receive(incoming, chunk, payload, reply)

        pending_bytes = min(2 * self._window, incoming.offer.total_bytes) + MAX_CHUNK_BYTES
        subscription = await bulk.bus.subscribe_frames(incoming.inbox, EmbeddingChunk, receive, pending_bytes)
        if self._transfers.get(incoming.offer.feature_id) is not incoming:
            await subscription.unsubscribe()
            return False
        incoming.subscription = subscription
        await bulk.bus.flush()
        incoming.granted = incoming.last_activity = time.monotonic()
        return True

    async def _receive(
        self, incoming: _Incoming, chunk: EmbeddingChunk, payload: memoryview, reply: str
    ) -> None:
        if self._transfers.get(incoming.offer.feature_id) is not incoming or incoming.storing:
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
        offer, wire_seconds = incoming.offer, time.monotonic() - incoming.granted
        if incoming.digest.hexdigest() != offer.digest:
            return "the bytes do not match the digest in the offer"
        incoming.storing = True
        if incoming.watch is not None:
            incoming.watch.cancel()
        bulk = self._bulk
        if bulk is None:
            return "the receiver is closing"
        try:
            await bulk.home(
                self._timeout,
                self._on_feature,
                *(offer.feature_id, offer.tensors, incoming.buffer),
                {**offer.timings, "wire_seconds": wire_seconds},
            )
        except TimeoutError:
            return f"the receiver did not store the feature within {self._timeout} s"
        except Exception as error:  # noqa: BLE001 - the sender must be notified
            _log.exception("storing received feature %s failed", offer.feature_id[:16])
            return f"the receiver could not store the feature: {type(error).__name__}: {error}"
        return ""

    async def _watch(self, incoming: _Incoming) -> None:
        """End a transfer whose sender is silent, which frees its memory."""
        while (remaining := incoming.last_activity + self._timeout - time.monotonic()) > 0:
            await asyncio.sleep(remaining)
        self._end(incoming, f"no chunk within {self._timeout} s")

    def _end(self, incoming: _Incoming, fault: str, complete: bool = False) -> None:
        """Free the memory of a transfer, which nothing touches afterwards. A separate task sends the result."""
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
        self._grant_waiting()

    async def _send_result(self, incoming: _Incoming, fault: str, complete: bool) -> None:
        try:
            await self._credit(incoming, fault, complete)
        except MmdError as error:
            _log.warning(
                "failed to send the result of transfer %s to its sender: %s",
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


def _refusal(offer: EmbeddingOffer, verdict: OfferDecision, reason: str) -> EmbeddingGrant:
    return EmbeddingGrant(offer.transfer_id, verdict, retry_seconds=RETRY_SECONDS, reason=reason)


def _check(offer: EmbeddingOffer) -> None:
    """Refuse an offer that contradicts itself, before memory is set aside for it."""
    if len(offer.tensors) > _MAX_TENSORS:
        raise WireError(f"the offer has {len(offer.tensors)} tensors, more than the limit of {_MAX_TENSORS}")
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
