"""The encoder's end of a feature transfer: offers, waits for the grant, sends within the credit, offers again after a failure."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Literal

from nats.aio.msg import Msg

from mmd_api.contract.errors import (
    DeadlineError,
    LinkError,
    OverloadedError,
    PeerLostError,
    WireError,
)
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.codec import Frame, unpack
from mmd_workers.wire.embeddings import MAX_CHUNK_BYTES, RETRY_SECONDS, new_digest
from mmd_workers.wire.messages.encoder import EmbeddingCredit, EncodeJob
from mmd_workers.wire.messages.message_parts import TensorHeader
from mmd_workers.wire.messages.prefill import EmbeddingChunk, EmbeddingGrant, EmbeddingOffer

Sent = Literal["sent", "have", "refused"]

_ATTEMPTS = 4
_OFFER_SECONDS = 5.0  # an absent receiver is detected at once; a busy one may take this long

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
        """Send the feature of a job to the pod that requested it; see `send_to`."""
        return await self.send_to(
            job.receiver, job.feature.feature_id, job.deadline, tensors, timings=timings, spans=spans
        )

    async def send_to(
        self,
        receiver: str,
        feature_id: str,
        deadline: float,
        tensors: Sequence[tuple[TensorHeader, memoryview]],
        timings: dict[str, float] | None = None,
        spans: list[tuple[float, float]] | None = None,
        subject: str = "",
    ) -> Sent:
        """Send a feature to a pod by `deadline`.

        Returns `sent` or `have` if the pod has the feature, `refused` if the pod does not need it, or no longer. `subject`: subject of
        the offer; empty: the one for features that the pod requested. `spans` gets the begin and end (time.monotonic) of the transfer
        itself, without the wait for the receiver's memory. Waits while the receiver has no room. The memory of `tensors` must not
        change meanwhile.

        Raises:
            PeerLostError: the receiver is lost.
            LinkError: several transfers failed (lost chunks, silence beyond `timeout_seconds`).
            DeadlineError: the deadline passed.
            CapacityError: the feature exceeds the receiver's whole budget.
        """
        views = [view.cast("B") if view.nbytes else memoryview(b"") for _, view in tensors]
        for (header, _), view in zip(tensors, views, strict=True):
            if header.num_bytes != view.nbytes:
                raise WireError(
                    f"tensor {header.name} has {view.nbytes} bytes, but its header declares {header.num_bytes}"
                )
        offer = EmbeddingOffer(
            transfer_id=uuid.uuid4().hex,
            feature_id=feature_id,
            sender=self._bus.client_name,
            tensors=[header for header, _ in tensors],
            total_bytes=sum(view.nbytes for view in views),
            digest=await asyncio.to_thread(_digest, views),
            timings=timings or {},
        )
        abandoned = threading.Event()  # besides cancelling: the client's publish can swallow a cancellation
        try:
            remaining = max(0.0, deadline - time.time())
            async with asyncio.timeout(remaining):
                bulk = await self._bus.bulk()  # the first use connects, which waits for an absent server
                return await bulk.run(
                    self._send(bulk.bus, receiver, subject, offer, views, abandoned, spans), timeout=remaining
                )
        except TimeoutError as error:
            raise DeadlineError(
                f"feature {offer.feature_id[:16]} did not reach {receiver} before its deadline"
            ) from error
        finally:
            abandoned.set()

    async def _send(
        self,
        bus: Bus,
        receiver: str,
        subject: str,
        offer: EmbeddingOffer,
        views: list[memoryview],
        abandoned: threading.Event,
        spans: list[tuple[float, float]] | None,
    ) -> Sent:
        failures = 0
        while not abandoned.is_set():
            try:
                grant = await bus.request(
                    subject or bus.subjects.embedding(receiver), offer, EmbeddingGrant, timeout=_OFFER_SECONDS
                )
                if grant.verdict == "have":
                    return "have"
                if grant.verdict == "refuse":
                    _log.info("%s refused feature %s: %s", receiver, offer.feature_id[:16], grant.reason)
                    return "refused"
                if grant.verdict == "send":
                    start = time.monotonic()
                    await _Outgoing(bus, grant, views, offer.total_bytes, self._timeout, abandoned).run()
                    if spans is not None:
                        spans.append((start, time.monotonic()))
                    return "sent"
                pause = max(RETRY_SECONDS, min(grant.retry_seconds, 5.0))
            except (LinkError, DeadlineError, OverloadedError, PeerLostError) as error:
                if isinstance(error, PeerLostError) and not failures:
                    raise  # later it proves nothing: after a server's restart we may return before the receiver
                failures += 1
                if failures == _ATTEMPTS:
                    raise LinkError(
                        f"feature {offer.feature_id[:16]} did not reach {receiver} in {failures} attempts: {error.message}"
                    ) from error
                _log.warning("transfer to %s failed, retrying with a new offer: %s", receiver, error.message)
                pause = RETRY_SECONDS * 5 ** (failures - 1)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # noqa: S311
        raise asyncio.CancelledError


class _Outgoing:
    """A granted transfer at the sender."""

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
            self._error = "the receiver has abandoned this transfer"
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


def _pieces(views: Sequence[memoryview], chunk_bytes: int) -> Iterator[memoryview]:
    """Views of at most `chunk_bytes`, in order; one empty view if there are no bytes at all."""
    empty = True
    for view in views:
        for start in range(0, view.nbytes, chunk_bytes):
            empty = False
            yield view[start : start + chunk_bytes]
    if empty:
        yield memoryview(b"")


def _digest(views: Sequence[memoryview]) -> str:
    digest = new_digest()
    for view in views:
        digest.update(view)
    return digest.hexdigest()
