"""The decode role's side of a KV hand-over: grants blocks under a lease, receives their bytes, and starts the sequence at commit.

Once attached, a sequence is the engine's and the sequence book's business; this file only brings it there.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
import weakref
from dataclasses import asdict, dataclass, field

import torch

from mmd_workers.decode.params import media_spans_of, sampling_of
from mmd_workers.decode.tokens import SequenceBook, Tracked, sequence_id
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.errors import LeaseError, LinkError, MmdError
from mmd_workers.kv.chunks import recv_range
from mmd_workers.kv.leases import LeaseTable
from mmd_workers.kv.links import LinkManager, PairLink
from mmd_workers.model.types import LanguageModel
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages import KvChunk, KvCommit, KvCommitted, KvGrant, KvOffer, KvRelease, Phase

log = logging.getLogger(__name__)

LEASE_CHECK_SECONDS = 0.5
MAX_ANNOUNCED_CHUNKS = 65_536


@dataclass(slots=True)
class _Inbound:
    """A granted hand-over until it is committed or its lease ends."""

    offer: KvOffer
    sequence: str
    epoch: int  # of its link
    received: int = 0
    first_byte: float = 0.0
    last_byte: float = 0.0
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    error: MmdError | None = None


@dataclass(slots=True)
class _Pump:
    """Takes announced chunks off the newest link of a prefill pod, in order, one at a time."""

    incarnation: str
    epoch: int
    link: asyncio.Task[PairLink]
    chunks: asyncio.Queue[KvChunk] = field(default_factory=lambda: asyncio.Queue(MAX_ANNOUNCED_CHUNKS))
    task: asyncio.Task[None] | None = None

    def dead(self) -> str:
        """Why its link is dead; empty while it lives or is being made."""
        done = self.link.done() and not self.link.cancelled() and self.link.exception() is None
        return self.link.result().dead if done else ""


class DecodeService:
    """Grants, receives and commits. Blocks of a lease that ends without a commit are freed."""

    def __init__(
        self,
        bus: Bus,
        pod: str,
        runner: EngineRunner,
        model: LanguageModel,
        links: LinkManager,
        book: SequenceBook,
        metrics: Metrics,
    ) -> None:
        self._bus = bus
        self._pod = pod
        self._runner = runner
        self._model = model
        self._links = links
        self._book = book
        self._metrics = metrics
        self._layout = asdict(model.kv_layout)
        self._leases = LeaseTable()
        self._inbound: dict[str, _Inbound] = {}
        self._pumps: dict[str, _Pump] = {}  # by prefill pod
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._draining = False

    async def start(self) -> None:
        """Subscribe; hand-overs may come from now on."""
        subjects = self._bus.subjects
        await self._bus.serve(subjects.kv_offer(self._pod), KvOffer, self._offered)
        await self._bus.subscribe(subjects.kv_chunk(self._pod), KvChunk, self._announced)
        await self._bus.serve(subjects.kv_commit(self._pod), KvCommit, self._committed)
        await self._bus.subscribe(subjects.kv_release(self._pod), KvRelease, self._released)

    def drain(self) -> None:
        """Grant nothing more; what was granted may still be committed."""
        self._draining = True

    async def run(self) -> None:
        """Free what belongs to leases that ended and to links that died, until cancelled."""
        while True:
            await asyncio.sleep(LEASE_CHECK_SECONDS)
            for lease in self._leases.expire(time.monotonic()):
                self._metrics.transfer_failures.labels("kv", "lease_expired").inc()
                log.warning(
                    "lease of %s ended before its commit; its blocks are free again", lease.request_id
                )
                await self._drop(
                    lease.lease_id, LeaseError("the lease has ended: offer the request again"), "expired"
                )
            for pod, pump in list(self._pumps.items()):
                if reason := pump.dead():
                    self._metrics.transfer_failures.labels("kv", LinkError.code).inc()
                    await self._end_pump(pod, pump, LinkError(f"the link to {pod} died: {reason}"))

    async def peer_lost(self, pod: str, incarnation: str) -> None:
        """A prefill worker is gone: what it had not committed is freed now."""
        lost = LinkError(f"{pod} is gone")
        if (pump := self._pumps.get(pod)) is not None and pump.incarnation == incarnation:
            await self._end_pump(pod, pump, lost)
        for lease in self._leases.drop_owner(pod, incarnation):
            await self._drop(lease.lease_id, lost)

    @property
    def inbound(self) -> int:
        """Hand-overs that are granted and not committed."""
        return len(self._inbound)

    async def cancel(self, request_id: str, attempt: int) -> None:
        """Free the hand-overs of a request's attempts up to this one."""
        for lease_id, inbound in list(self._inbound.items()):
            if inbound.offer.request_id == request_id and inbound.offer.attempt <= attempt:
                await self._drop(
                    lease_id, LeaseError("the request was cancelled, or offered anew"), "released"
                )

    def _turn(self, request_id: str) -> asyncio.Lock:
        """Offers of one request, and their release, come after each other: each finds what the one before has reserved."""
        return self._turns.setdefault(request_id, asyncio.Lock())

    async def _released(self, release: KvRelease) -> None:
        if not release.lease_id:
            async with self._turn(release.request_id):
                await self.cancel(release.request_id, release.attempt)
            return
        await self._drop(release.lease_id, LeaseError("the prefill worker gave the lease back"), "released")

    async def _offered(self, offer: KvOffer) -> KvGrant:
        async with self._turn(offer.request_id):
            return await self._granted(offer)

    async def _granted(self, offer: KvOffer) -> KvGrant:
        def refuse(reason: str) -> KvGrant:
            self._metrics.leases.labels("refused").inc()
            return KvGrant(offer.request_id, granted=False, reason=reason)

        if self._draining:
            return refuse("draining")
        if self._book.was_cancelled(offer.request_id, offer.attempt):
            return refuse("cancelled")
        if offer.layout != self._layout:
            return refuse(f"KV layout {offer.layout} differs from {self._layout}")
        sequence = sequence_id(offer.request_id, offer.attempt)
        await self.cancel(offer.request_id, offer.attempt)  # a repeated offer replaces the first
        try:
            await self._runner.call(
                lambda engine: engine.reserve(sequence, offer.prompt_tokens, offer.max_tokens)
            )
        except MmdError as error:
            return refuse(error.message)
        try:
            epoch = self._links.epoch_for(offer.pod, offer.incarnation, offer.failed_epoch)
            await self._ensure_pump(offer, epoch)
        except MmdError as error:
            await self._runner.call(lambda engine: engine.abort(sequence))
            return refuse(error.message)
        if self._book.was_cancelled(offer.request_id, offer.attempt):  # meanwhile
            await self._runner.call(lambda engine: engine.abort(sequence))
            return refuse("cancelled")
        lease_id = uuid.uuid4().hex
        self._inbound[lease_id] = _Inbound(offer, sequence, epoch)
        self._leases.grant(
            lease_id, offer.pod, offer.incarnation, sequence, (), time.monotonic(), offer.lease_seconds
        )
        self._metrics.leases.labels("granted").inc()
        return KvGrant(
            offer.request_id,
            granted=True,
            lease_id=lease_id,
            epoch=epoch,
            link_endpoint=self._links.endpoint,
        )

    async def _ensure_pump(self, offer: KvOffer, epoch: int) -> None:
        """A pod has one live link: that of its newest incarnation and epoch. What came over an older one is void."""
        while (pump := self._pumps.get(offer.pod)) is not None:
            if (pump.incarnation, pump.epoch) == (offer.incarnation, epoch):
                return
            await self._end_pump(offer.pod, pump, LinkError(f"{offer.pod} went on to another link"))
        link = asyncio.create_task(
            asyncio.to_thread(self._links.connect, offer.pod, offer.incarnation, offer.link_endpoint, epoch)
        )
        pump = self._pumps[offer.pod] = _Pump(offer.incarnation, epoch, link)
        pump.task = asyncio.create_task(self._pump(offer.pod, pump), name=f"kv-from-{offer.pod}@{epoch}")

    async def _end_pump(self, pod: str, pump: _Pump, error: MmdError) -> None:
        """Free what was to come over this link, unless somebody did so first."""
        if self._pumps.get(pod) is not pump:
            return
        del self._pumps[pod]
        if pump.task is not None:
            pump.task.cancel()
        for lease_id, inbound in list(self._inbound.items()):
            offer = inbound.offer
            if (offer.pod, offer.incarnation, inbound.epoch) == (pod, pump.incarnation, pump.epoch):
                await self._drop(lease_id, error)

    async def _announced(self, chunk: KvChunk) -> None:
        pump = self._pumps.get(chunk.pod)
        if pump is not None and pump.epoch == chunk.epoch:
            pump.chunks.put_nowait(chunk)

    async def _pump(self, pod: str, pump: _Pump) -> None:
        try:
            link = await pump.link
            while True:
                chunk = await pump.chunks.get()
                if (inbound := self._inbound.get(chunk.lease_id)) is not None:
                    inbound.first_byte = inbound.first_byte or time.time()
                tensors = await asyncio.to_thread(
                    recv_range, link, self._model.kv_layout, chunk.num_tokens, chunk.first_tag
                )
                if (inbound := self._inbound.get(chunk.lease_id)) is not None:
                    await self._store(chunk, inbound, tensors)
        except MmdError as error:
            log.warning("KV link from %s (epoch %d) failed: %s", pod, pump.epoch, error.message)
            self._metrics.transfer_failures.labels("kv", error.code).inc()
            if self._pumps.get(pod) is pump:
                self._links.drop(pod)
                pump.task = None  # this very task: it ends by itself
                await self._end_pump(pod, pump, error)

    async def _store(self, chunk: KvChunk, inbound: _Inbound, tensors: list[torch.Tensor]) -> None:
        """Into the blocks of a live lease. What is wrong with one hand-over is not the link's fault."""
        try:
            self._leases.get(chunk.lease_id, time.monotonic())
            await self._runner.call(lambda engine: engine.write_kv(inbound.sequence, chunk.start, tensors))
            self._leases.renew(chunk.lease_id, time.monotonic(), inbound.offer.lease_seconds)
        except (MmdError, KeyError) as error:
            reason = error if isinstance(error, MmdError) else LeaseError("the reservation is gone")
            await self._drop(chunk.lease_id, reason)
            return
        num_bytes = chunk.num_tokens * self._model.kv_layout.bytes_per_token()
        self._metrics.transfer_bytes.labels("kv", "received").inc(num_bytes)
        inbound.received += 1
        inbound.last_byte = time.time()
        inbound.progress.set()

    async def _committed(self, commit: KvCommit) -> KvCommitted:
        inbound = self._inbound.get(commit.lease_id)
        if inbound is None:
            return KvCommitted(commit.lease_id, ok=False, reason="the lease has ended")
        try:
            async with asyncio.timeout(inbound.offer.lease_seconds):
                while inbound.received < commit.num_chunks and inbound.error is None:
                    inbound.progress.clear()
                    await inbound.progress.wait()
        except TimeoutError:
            await self._drop(commit.lease_id, LinkError("the KV chunks did not arrive within the lease"))
        if inbound.error is None:
            try:
                self._leases.commit(commit.lease_id, time.monotonic())
            except LeaseError as error:
                await self._drop(commit.lease_id, error)
        if inbound.error is not None:
            return KvCommitted(commit.lease_id, ok=False, reason=inbound.error.message)
        del self._inbound[commit.lease_id]
        request = commit.request
        self._note_transfer(self._book.open(request), inbound)
        try:
            await self._runner.call(
                lambda engine: engine.attach(
                    inbound.sequence,
                    token_ids=request.token_ids,
                    sampling=sampling_of(request, self._model),
                    output_token_ids=commit.output_token_ids,
                    next_position=commit.next_position,
                    media_spans=media_spans_of(request),
                )
            )
        except (MmdError, KeyError) as error:
            self._book.forget(inbound.sequence)
            await self._runner.call(lambda engine: engine.abort(inbound.sequence))
            return KvCommitted(commit.lease_id, ok=False, reason=f"the sequence could not start: {error}")
        self._metrics.leases.labels("committed").inc()
        return KvCommitted(commit.lease_id, ok=True)

    def _note_transfer(self, tracked: Tracked, inbound: _Inbound) -> None:
        now = time.time()
        first, last = inbound.first_byte or now, inbound.last_byte or now
        self._metrics.transfer.labels("kv").observe(last - first)
        tokens = len(tracked.request.token_ids)
        num_bytes = tokens * self._model.kv_layout.bytes_per_token()
        tracked.phases.append(Phase("kv_transfer", first, now, {"tokens": tokens, "bytes": num_bytes}))

    async def _drop(self, lease_id: str, error: MmdError, outcome: str = "lost") -> None:
        """End a hand-over that is not committed, and free its blocks."""
        self._leases.release(lease_id)
        if (inbound := self._inbound.pop(lease_id, None)) is not None:
            self._metrics.leases.labels(outcome).inc()
            inbound.error = error
            inbound.progress.set()
            await self._runner.call(lambda engine: engine.abort(inbound.sequence))
