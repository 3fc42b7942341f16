"""The decode role's side of a KV hand-over: grants blocks under a lease, receives their bytes, and starts the sequence at commit.

Once attached, a sequence is the engine's and the sequence book's business; this file only brings it there.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import asdict, dataclass, field

import torch

from mmd_workers.decode.params import media_spans_of, sampling_of
from mmd_workers.decode.tokens import SequenceBook, sequence_id
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.errors import LeaseError, LinkError, MmdError
from mmd_workers.kv.chunks import recv_range
from mmd_workers.kv.leases import LeaseTable
from mmd_workers.kv.links import LinkManager, PairLink
from mmd_workers.model.types import LanguageModel
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages import KvChunk, KvCommit, KvCommitted, KvGrant, KvOffer, Phase

log = logging.getLogger(__name__)

LEASE_CHECK_SECONDS = 0.5
MAX_ANNOUNCED_CHUNKS = 65_536


@dataclass(slots=True)
class _Inbound:
    """A granted hand-over until it is committed or its lease ends."""

    offer: KvOffer
    sequence: str
    peer: tuple[str, int]  # pod and epoch of its link
    received: int = 0
    first_byte: float = 0.0
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    error: MmdError | None = None

    def fail(self, error: MmdError) -> None:
        """No more bytes will come."""
        self.error = error
        self.progress.set()


@dataclass(slots=True)
class _Pump:
    """Takes announced chunks off one link, in order, one at a time."""

    link: asyncio.Task[PairLink]
    chunks: asyncio.Queue[KvChunk] = field(default_factory=lambda: asyncio.Queue(MAX_ANNOUNCED_CHUNKS))
    task: asyncio.Task[None] | None = None


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
        self._pumps: dict[tuple[str, int], _Pump] = {}
        self._draining = False

    async def start(self) -> None:
        """Subscribe; hand-overs may come from now on."""
        subjects = self._bus.subjects
        await self._bus.serve(subjects.kv_offer(self._pod), KvOffer, self._offered)
        await self._bus.subscribe(subjects.kv_chunk(self._pod), KvChunk, self._announced)
        await self._bus.serve(subjects.kv_commit(self._pod), KvCommit, self._committed)

    def drain(self) -> None:
        """Grant nothing more; what was granted may still be committed."""
        self._draining = True

    async def run(self) -> None:
        """Free what belongs to leases that ended, until cancelled."""
        while True:
            await asyncio.sleep(LEASE_CHECK_SECONDS)
            for lease in self._leases.expire(time.monotonic()):
                self._metrics.transfer_failures.labels("kv", "lease_expired").inc()
                log.warning(
                    "lease of %s ended before its commit; its blocks are free again", lease.request_id
                )
                await self._drop(lease.lease_id)

    async def peer_lost(self, pod: str, incarnation: str) -> None:
        """A prefill worker is gone: what it had not committed is freed now."""
        self._links.notify_lost(pod)
        for lease in self._leases.drop_owner(pod, incarnation):
            await self._drop(lease.lease_id)

    @property
    def inbound(self) -> int:
        """Hand-overs that are granted and not committed."""
        return len(self._inbound)

    async def cancel(self, request_id: str, attempt: int) -> None:
        """Free the hand-overs of a request's attempts up to this one."""
        for lease_id, inbound in list(self._inbound.items()):
            if inbound.offer.request_id == request_id and inbound.offer.attempt <= attempt:
                self._leases.release(lease_id)
                await self._drop(lease_id)

    async def _offered(self, offer: KvOffer) -> KvGrant:
        def refuse(reason: str) -> KvGrant:
            return KvGrant(offer.request_id, granted=False, reason=reason)

        if self._draining:
            return refuse("draining")
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
        lease_id = uuid.uuid4().hex
        epoch = self._links.epoch_for(offer.pod, offer.incarnation, offer.failed_epoch)
        peer = (offer.pod, epoch)
        if peer not in self._pumps:
            self._open_pump(peer, offer)
        self._inbound[lease_id] = _Inbound(offer, sequence, peer)
        self._leases.grant(
            lease_id, offer.pod, offer.incarnation, sequence, (), time.monotonic(), offer.lease_seconds
        )
        return KvGrant(
            offer.request_id,
            granted=True,
            lease_id=lease_id,
            epoch=epoch,
            link_endpoint=self._links.endpoint,
        )

    def _open_pump(self, peer: tuple[str, int], offer: KvOffer) -> None:
        link = asyncio.create_task(
            asyncio.to_thread(self._links.connect, offer.pod, offer.incarnation, offer.link_endpoint, peer[1])
        )
        pump = _Pump(link)
        pump.task = asyncio.create_task(self._pump(peer, pump), name=f"kv-from-{peer[0]}@{peer[1]}")
        self._pumps[peer] = pump

    async def _announced(self, chunk: KvChunk) -> None:
        if (pump := self._pumps.get((chunk.pod, chunk.epoch))) is not None:
            pump.chunks.put_nowait(chunk)

    async def _pump(self, peer: tuple[str, int], pump: _Pump) -> None:
        try:
            link = await pump.link
            while True:
                chunk = await pump.chunks.get()
                inbound = self._inbound.get(chunk.lease_id)
                if inbound is not None:
                    inbound.first_byte = inbound.first_byte or time.time()
                tensors = await asyncio.to_thread(
                    recv_range, link, self._model.kv_layout, chunk.num_tokens, chunk.first_tag
                )
                if (inbound := self._inbound.get(chunk.lease_id)) is not None:
                    await self._store(chunk, inbound, tensors)
        except MmdError as error:
            log.warning("KV link from %s (epoch %d) failed: %s", *peer, error.message)
            self._metrics.transfer_failures.labels("kv", error.code).inc()
            self._links.drop(peer[0])
            for inbound in self._inbound.values():
                if inbound.peer == peer:
                    inbound.fail(error)
        finally:
            self._pumps.pop(peer, None)

    async def _store(self, chunk: KvChunk, inbound: _Inbound, tensors: list[torch.Tensor]) -> None:
        await self._runner.call(lambda engine: engine.write_kv(inbound.sequence, chunk.start, tensors))
        num_bytes = chunk.num_tokens * self._model.kv_layout.bytes_per_token()
        self._metrics.transfer_bytes.labels("kv", "received").inc(num_bytes)
        self._leases.renew(chunk.lease_id, time.monotonic(), inbound.offer.lease_seconds)
        inbound.received += 1
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
            inbound.fail(LinkError("the KV chunks did not arrive within the lease"))
        if inbound.error is not None:
            self._leases.release(commit.lease_id)
            await self._drop(commit.lease_id)
            return KvCommitted(commit.lease_id, ok=False, reason=inbound.error.message)
        try:
            self._leases.commit(commit.lease_id, time.monotonic())
        except LeaseError as error:
            await self._drop(commit.lease_id)
            return KvCommitted(commit.lease_id, ok=False, reason=error.message)
        self._inbound.pop(commit.lease_id)
        request = commit.request
        tracked = self._book.open(request)
        tracked.phases.append(
            Phase(
                "kv_transfer",
                inbound.first_byte or time.time(),
                time.time(),
                {
                    "tokens": len(request.token_ids),
                    "bytes": len(request.token_ids) * self._model.kv_layout.bytes_per_token(),
                },
            )
        )
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
        except MmdError as error:
            self._book.forget(inbound.sequence)
            return KvCommitted(commit.lease_id, ok=False, reason=error.message)
        return KvCommitted(commit.lease_id, ok=True)

    async def _drop(self, lease_id: str) -> None:
        if (inbound := self._inbound.pop(lease_id, None)) is not None:
            await self._runner.call(lambda engine: engine.abort(inbound.sequence))
