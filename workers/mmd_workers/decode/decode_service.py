"""The decode role's side of a KV handover: grants blocks under a lease, receives their bytes, and starts the sequence at commit.

Once attached, a sequence belongs to the engine and the sequence book; this module only brings it there.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch

from mmd_api.contract.errors import (
    DrainingError,
    LayoutMismatchError,
    LeaseError,
    LinkError,
    MmdError,
    OverloadedError,
    RequestCancelledError,
)
from mmd_api.spec.transfer import KvWireFormat
from mmd_workers.basics.clock import SYSTEM_CLOCK, Clock
from mmd_workers.basics.overtaking import MAX_OVERTAKEN
from mmd_workers.decode.offer_queue import OfferQueue
from mmd_workers.kv.chunks import recv_range
from mmd_workers.kv.leases import LeaseTable
from mmd_workers.kv.links import LinkManager, PairLink
from mmd_workers.kv.quantize import KvWire
from mmd_workers.observe.metrics import Metrics
from mmd_workers.sequences.engine import SequenceEngine
from mmd_workers.sequences.sequence_events import SequenceOwner
from mmd_workers.sequences.token_publisher import SequenceBook, Tracked, sequence_id
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.decode import KvChunk, KvCommit, KvCommitted, KvGrant, KvOffer, KvRelease
from mmd_workers.wire.messages.message_parts import Acknowledged, Phase

log = logging.getLogger(__name__)


LEASE_CHECK_SECONDS = 0.5
MAX_ANNOUNCED_CHUNKS = 64  # limit per prefill pod, which announces one chunk after the other
ANNOUNCED_SECONDS = 0.5  # an announcement is answered within this time; prefill repeats it as often
ANSWER_SECONDS = 1.0  # a commit waits this long for the engine, then its sender is asked to repeat it
MAX_COMMITS = 8192  # limit of commits whose answers are remembered
UNWRITTEN_BYTES = 64 << 20
"""Limit of unpacked KV held while the engine is in a step, besides one chunk of each prefill pod."""


@dataclass(slots=True)
class _Inbound:
    """A granted handover until it is committed or its lease ends."""

    offer: KvOffer
    sequence: str
    epoch: int  # epoch of the link
    cached_tokens: int  # tokens with KV already here
    received: int = 0  # number of chunks; the engine writes them in this order
    first_byte: float = 0.0
    last_byte: float = 0.0
    wire_seconds: float = 0.0  # time while bytes came: a prefill in chunks leaves gaps
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    held: ExitStack = field(default_factory=ExitStack)  # keeps the link from eviction between two chunks
    error: MmdError | None = None


@dataclass(slots=True)
class _Pump:
    """Receives announced chunks over the newest link of a prefill pod, in order, one at a time."""

    incarnation: str
    epoch: int
    link: asyncio.Task[PairLink]
    chunks: asyncio.Queue[tuple[KvChunk, asyncio.Future[None]]] = field(
        default_factory=lambda: asyncio.Queue(MAX_ANNOUNCED_CHUNKS)
    )
    started: asyncio.Future[None] | None = None  # done when the newest chunk is being received
    task: asyncio.Task[None] | None = None
    newest: tuple[str, int] = ("", -1)  # lease and number of the last chunk announced
    unwritten: int = 0  # bytes received, or being received, and not in the engine yet

    @property
    def made(self) -> PairLink | None:
        """The link, once it is made."""
        done = self.link.done() and not self.link.cancelled() and self.link.exception() is None
        return self.link.result() if done else None

    def dead(self) -> str:
        """Why the link is dead; empty while it is alive or being made."""
        return "" if (link := self.made) is None else link.dead


class DecodeService(SequenceOwner):
    """Grants, receives and commits. Blocks of a lease that ends without a commit are freed."""

    def __init__(
        self,
        bus: Bus,
        pod: str,
        engine: SequenceEngine,
        links: LinkManager,
        book: SequenceBook,
        metrics: Metrics,
        wire_format: KvWireFormat = "Model",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`wire_format`: format of the KV that arrives. `clock`: of leases and of the queue."""
        self._bus = bus
        self._clock = clock
        self._pod = pod
        self._engine = engine
        self._links = links
        self._book = book
        self._metrics = metrics
        self._kv_layout = engine.kv_layout
        self._wire = KvWire(engine.kv_layout, wire_format)
        self._leases = LeaseTable()
        self._inbound: dict[str, _Inbound] = {}
        self._pumps: dict[str, _Pump] = {}  # by prefill pod
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._granting: dict[str, tuple[KvOffer, asyncio.Task[KvGrant]]] = {}  # by request
        self._commits: OrderedDict[str, asyncio.Task[KvCommitted]] = OrderedDict()
        self._writes: set[asyncio.Task[None]] = set()
        self._unwritten = 0  # bytes, over all links
        self._written = asyncio.Event()
        self._queue = OfferQueue()
        self._draining = False

    async def start(self) -> None:
        """Subscribe; handovers may arrive from now on."""
        subjects = self._bus.subjects
        await self._bus.serve(subjects.kv_offer(self._pod), KvOffer, self._offered)
        await self._bus.serve(subjects.kv_chunk(self._pod), KvChunk, self._announced)
        await self._bus.serve(subjects.kv_commit(self._pod), KvCommit, self._committed)
        await self._bus.serve(subjects.kv_release(self._pod), KvRelease, self._released)

    def drain(self) -> None:
        """Grant no more handovers; granted ones may still be committed."""
        self._draining = True

    async def run(self) -> None:
        """Free the blocks of ended leases and dead links, until cancelled."""
        while True:
            await self._clock.sleep(LEASE_CHECK_SECONDS)
            expired = self._leases.expire(self._clock.now())
            self._metrics.transfer_failures.labels("kv", "lease_expired").inc(len(expired))
            for lease in expired:
                log.warning("lease of %s expired before its commit; its blocks are freed", lease.sequence_id)
            self._drop(
                [lease.lease_id for lease in expired],
                LeaseError("the lease has expired; offer the request again"),
                "expired",
            )
            for pod, pump in list(self._pumps.items()):
                if reason := pump.dead():
                    self._metrics.transfer_failures.labels("kv", LinkError.code).inc()
                    self._end_pump(pod, pump, LinkError(f"the link to {pod} died: {reason}"))

    def peer_lost(self, pod: str, incarnation: str) -> None:
        """Free everything that a lost prefill worker had not committed."""
        lost = LinkError(f"{pod} is lost")
        if (pump := self._pumps.get(pod)) is not None and pump.incarnation == incarnation:
            self._end_pump(pod, pump, lost)
        self._drop([lease.lease_id for lease in self._leases.drop_owner(pod, incarnation)], lost)

    @property
    def inbound(self) -> int:
        """The number of handovers granted and not committed."""
        return len(self._inbound)

    def waiting(self) -> int:
        """The number of handovers that wait for KV blocks."""
        return self._queue.waiting(self._clock.now())

    def cancel_request(self, request_id: str, attempt: int) -> None:
        """Free the handovers of a request's attempts up to this one, and its place in the queue."""
        self._queue.leave(request_id)
        self._drop_attempts(request_id, attempt)

    def _drop_attempts(self, request_id: str, attempt: int) -> None:
        """End the uncommitted handovers of a request's attempts up to this one."""
        leases = [
            lease_id
            for lease_id, inbound in self._inbound.items()
            if inbound.offer.request_id == request_id and inbound.offer.attempt <= attempt
        ]
        self._drop(leases, LeaseError("the request was cancelled or offered again"), "released")

    def _turn(self, request_id: str) -> asyncio.Lock:
        """The lock that serializes offers and releases of one request: each sees what the previous one reserved."""
        return self._turns.setdefault(request_id, asyncio.Lock())

    async def _released(self, release: KvRelease) -> Acknowledged:
        if release.lease_id:
            lease_error = LeaseError("the prefill worker released the lease")
            self._drop([release.lease_id], lease_error, "released")
        else:
            self._granting.pop(release.request_id, None)  # a later offer comes after this release
            async with self._turn(release.request_id):
                self.cancel_request(release.request_id, release.attempt)
        return Acknowledged()

    async def _offered(self, offer: KvOffer) -> KvGrant:
        if not offer.prompt_tokens:
            return await self._linked(offer)
        return await asyncio.shield(self._grant_in_progress(offer))

    def _grant_in_progress(self, offer: KvOffer) -> asyncio.Task[KvGrant]:
        """The task that grants an offer; a repeated offer joins the first while that waits for the engine.

        Replacing the first would mean waiting for another step, every time.
        """
        pending = self._granting.get(offer.request_id)
        if pending is not None and pending[0] == offer and not pending[1].done():
            return pending[1]
        task = asyncio.create_task(self._in_turn(offer), name=f"grant-{offer.request_id}")
        self._granting[offer.request_id] = offer, task

        def forget(_: asyncio.Task[KvGrant]) -> None:
            if self._granting.get(offer.request_id) == (offer, task):
                del self._granting[offer.request_id]

        task.add_done_callback(forget)
        return task

    async def _in_turn(self, offer: KvOffer) -> KvGrant:
        async with self._turn(offer.request_id):
            return await self._granted(offer)

    async def _linked(self, offer: KvOffer) -> KvGrant:
        """Answer an offer that asks for the link alone, ahead of the first handover."""
        reason = "this pod is draining" if self._draining else self._mismatch(offer)
        if reason:
            code = DrainingError.code if self._draining else LayoutMismatchError.code
            return KvGrant(offer.request_id, granted=False, code=code, reason=reason)
        epoch = self._links.epoch_for(offer.pod, offer.incarnation, offer.failed_epoch)
        self._ensure_pump(offer, epoch)
        return KvGrant(offer.request_id, granted=True, epoch=epoch, link_endpoint=self._links.endpoint)

    def _mismatch(self, offer: KvOffer) -> str:
        """Why this pod cannot receive the KV of the offering pod; empty if it can."""
        if offer.layout.get("wire_format") != self._wire.terms.get("wire_format"):
            return f"{offer.pod} and {self._pod} pack KV differently on its way; set spec.transfer.kv.wireFormat once for both pools"
        if offer.layout != self._wire.terms:
            return f"KV layout {offer.layout} differs from {self._wire.terms}"
        if offer.backend != self._links.backend:
            return (
                f"{offer.pod} sends KV over {offer.backend}, and {self._pod} receives it over {self._links.backend};"
                " set spec.transfer.kv.backend once for both pools"
            )
        return ""

    async def _granted(self, offer: KvOffer) -> KvGrant:
        def refuse(code: str, reason: str) -> KvGrant:
            self._metrics.leases.labels("refused").inc()
            return KvGrant(offer.request_id, granted=False, code=code, reason=reason)

        if self._draining:
            return refuse(DrainingError.code, "this pod is draining")
        if self._book.was_cancelled(offer.request_id, offer.attempt):
            return refuse(RequestCancelledError.code, "the request was cancelled")
        if mismatch := self._mismatch(offer):
            return refuse(LayoutMismatchError.code, mismatch)
        sequence = sequence_id(offer.request_id, offer.attempt)
        # An offer made after the grant replaces it.
        self._drop_attempts(offer.request_id, offer.attempt)
        now = self._clock.now()
        if (turn := self._queue.turn(offer.request_id, offer.arrived, now)) is None:
            self._queue.join(offer.request_id, offer.arrived, now)
            return refuse(
                OverloadedError.code,
                f"an older request waits for KV blocks and was passed by {MAX_OVERTAKEN} others; try another decode pod",
            )
        try:
            cached = await self._engine.reserve(
                sequence, offer.prompt_tokens, offer.max_tokens, offer.prefix, offer.companion_tokens
            )
        except MmdError as error:
            turn.unused()
            if error.retryable:
                self._queue.join(offer.request_id, offer.arrived, self._clock.now())
            return refuse(error.code, error.message)
        except BaseException:
            turn.unused()
            raise
        self._queue.leave(offer.request_id)
        try:
            epoch = self._links.epoch_for(offer.pod, offer.incarnation, offer.failed_epoch)
            pump = self._ensure_pump(offer, epoch)
            inbound = _Inbound(offer, sequence, epoch, cached)
            if (link := pump.made) is not None:  # otherwise held once it is made
                inbound.held.enter_context(link.held())
        except MmdError as error:
            turn.unused()
            self._engine.abort(sequence)
            return refuse(error.code, error.message)
        if self._book.was_cancelled(offer.request_id, offer.attempt):  # cancelled meanwhile
            turn.unused()
            inbound.held.close()
            self._engine.abort(sequence)
            return refuse(RequestCancelledError.code, "the request was cancelled")
        lease_id = uuid.uuid4().hex
        self._inbound[lease_id] = inbound
        self._leases.grant(
            lease_id, offer.pod, offer.incarnation, sequence, self._clock.now(), offer.lease_seconds
        )
        self._metrics.leases.labels("granted").inc()
        return KvGrant(
            offer.request_id,
            granted=True,
            lease_id=lease_id,
            epoch=epoch,
            link_endpoint=self._links.endpoint,
            cached_tokens=cached,
        )

    def _ensure_pump(self, offer: KvOffer, epoch: int) -> _Pump:
        """The pump of a pod's only live link, that of its newest incarnation and epoch; KV from an older link is void."""
        if (pump := self._pumps.get(offer.pod)) is not None:
            if (pump.incarnation, pump.epoch) == (offer.incarnation, epoch):
                return pump
            self._end_pump(offer.pod, pump, LinkError(f"{offer.pod} switched to another link"))
        link = asyncio.create_task(
            asyncio.to_thread(self._links.connect, offer.pod, offer.incarnation, offer.link_endpoint, epoch)
        )
        pump = self._pumps[offer.pod] = _Pump(offer.incarnation, epoch, link)
        pump.task = asyncio.create_task(self._pump(offer.pod, pump), name=f"kv-from-{offer.pod}@{epoch}")
        return pump

    def _inbound_over(self, pod: str, pump: _Pump) -> Iterator[tuple[str, _Inbound]]:
        """Lease id and handover of everything that is to arrive over this link."""
        for lease_id, inbound in list(self._inbound.items()):
            offer = inbound.offer
            if (offer.pod, offer.incarnation, inbound.epoch) == (pod, pump.incarnation, pump.epoch):
                yield lease_id, inbound

    def _end_pump(self, pod: str, pump: _Pump, error: MmdError) -> None:
        """Free everything that was to arrive over this link, unless that is already done."""
        if self._pumps.get(pod) is not pump:
            return
        del self._pumps[pod]
        if pump.task is not None:
            pump.task.cancel()
        while not pump.chunks.empty():
            _, started = pump.chunks.get_nowait()
            started.set_exception(error)
        self._drop([lease_id for lease_id, _ in self._inbound_over(pod, pump)], error)

    async def _announced(self, chunk: KvChunk) -> Acknowledged:
        """Acknowledge a chunk when its bytes are being received.

        Before that the engine may be busy for any time; the link's deadline starts with the bytes and so measures only the link.

        Raises:
            LeaseError: the lease has ended, and no bytes of the chunk are received.
            LinkError: the link has ended.
            OverloadedError: the chunk is not being received yet.
        """
        pump = self._pumps.get(chunk.pod)
        if pump is None or pump.epoch != chunk.epoch:
            raise LinkError(f"epoch {chunk.epoch} of the link from {chunk.pod} has ended; offer again")
        if (chunk.lease_id, chunk.sequence) != pump.newest:  # otherwise the announcement is repeated
            if pump.chunks.full():
                raise OverloadedError(
                    f"{MAX_ANNOUNCED_CHUNKS} chunks of {chunk.pod} are already waiting; announce it again"
                )
            pump.newest = chunk.lease_id, chunk.sequence
            pump.started = asyncio.get_running_loop().create_future()
            pump.started.add_done_callback(lambda started: started.cancelled() or started.exception())
            pump.chunks.put_nowait((chunk, pump.started))
        if pump.started is not None:
            try:
                async with asyncio.timeout(ANNOUNCED_SECONDS):
                    await asyncio.shield(pump.started)
            except TimeoutError as error:
                raise OverloadedError(
                    f"an earlier chunk of {chunk.pod} is still being stored; announce it again"
                ) from error
        return Acknowledged()

    async def _pump(self, pod: str, pump: _Pump) -> None:
        try:
            link = await pump.link
            for _, pending in self._inbound_over(pod, pump):
                pending.held.enter_context(link.held())
            while True:
                chunk, started = await pump.chunks.get()
                num_bytes = chunk.num_tokens * self._kv_layout.bytes_per_token()
                await self._take(pump, num_bytes)
                try:
                    self._leases.get(chunk.lease_id, self._clock.now())
                except LeaseError as ended:
                    self._give(pump, num_bytes)
                    started.set_exception(ended)  # so its bytes are not sent
                    continue
                started.set_result(None)
                inbound = self._inbound[chunk.lease_id]
                inbound.first_byte = inbound.first_byte or time.time()
                receiving = asyncio.create_task(
                    self._receive(link, chunk, inbound), name=f"receive-{chunk.lease_id}"
                )
                try:
                    tensors = await asyncio.shield(receiving)
                except BaseException:
                    # The thread has its buffer until it ends, also when this pump is cancelled.
                    receiving.add_done_callback(partial(self._failed, pump, num_bytes))
                    raise
                writing = asyncio.create_task(self._store(chunk, tensors), name=f"write-{chunk.lease_id}")
                self._writes.add(writing)
                writing.add_done_callback(partial(self._wrote, pump, num_bytes))
        except Exception as failure:
            # This includes unexpected errors: a reader that ended silently would block every handover until its lease ends.
            error, cause = failure, None
            if not isinstance(error, MmdError):
                error, cause = LinkError(f"receiving failed: {type(failure).__name__}: {failure}"), failure
            what = "KV link from %s (epoch %d) failed: %s"
            log.warning(what, pod, pump.epoch, error.message, exc_info=cause)
            self._metrics.transfer_failures.labels("kv", error.code).inc()
            if self._pumps.get(pod) is pump:
                self._links.drop(pod)
                pump.task = None  # this very task: it ends by itself
                self._end_pump(pod, pump, error)

    async def _receive(self, link: PairLink, chunk: KvChunk, inbound: _Inbound) -> list[torch.Tensor]:
        """The KV of a chunk, unpacked. An empty chunk only renews the lease.

        Raises:
            LinkError: the link has failed, or its deadline has passed.
        """
        if not chunk.num_tokens:
            return []
        receive_start = time.monotonic()
        with link.held():  # the lease may end meanwhile
            tensors = await asyncio.to_thread(
                recv_range, link, self._wire.layout, chunk.num_tokens, chunk.first_tag, link.device
            )
        inbound.wire_seconds += time.monotonic() - receive_start
        return await asyncio.to_thread(self._wire.unpack, tensors) if self._wire.packs else tensors

    def _failed(self, pump: _Pump, num_bytes: int, receiving: asyncio.Task[list[torch.Tensor]]) -> None:
        """Give back the room of a chunk whose receive has ended without being stored."""
        if not receiving.cancelled():
            receiving.exception()  # the pump reports it, unless it was cancelled
        self._give(pump, num_bytes)

    def _wrote(self, pump: _Pump, num_bytes: int, writing: asyncio.Task[None]) -> None:
        self._writes.discard(writing)
        self._give(pump, num_bytes)

    async def _take(self, pump: _Pump, num_bytes: int) -> None:
        """Wait until there is room for these bytes, besides those that the engine has still to write."""
        while pump.unwritten and self._unwritten + num_bytes > UNWRITTEN_BYTES:
            self._written.clear()
            await self._written.wait()
        pump.unwritten += num_bytes
        self._unwritten += num_bytes

    def _give(self, pump: _Pump, num_bytes: int) -> None:
        """Give back the room of bytes that were written or are not needed."""
        pump.unwritten -= num_bytes
        self._unwritten -= num_bytes
        self._written.set()

    async def _store(self, chunk: KvChunk, tensors: list[torch.Tensor]) -> None:
        """Write a chunk to the blocks of a live lease. A fault of one handover does not end the link.

        The chunk counts as received as soon as the engine has the command, so that a commit can be right behind it: both run at the
        end of the engine's current step.
        """
        if (inbound := self._inbound.get(chunk.lease_id)) is None:
            return
        try:
            self._leases.renew(chunk.lease_id, self._clock.now(), inbound.offer.lease_seconds)
            num_bytes = chunk.num_tokens * self._wire.bytes_per_token
            self._metrics.transfer_bytes.labels("kv", "received").inc(num_bytes)
            inbound.received += 1
            inbound.last_byte = time.time()
            inbound.progress.set()
            if tensors:
                await self._engine.write_kv(inbound.sequence, chunk.start, tensors)
        except MmdError as error:
            self._drop([chunk.lease_id], error)
        except KeyError:
            self._drop([chunk.lease_id], LeaseError("the reservation no longer exists"))
        except Exception as failure:
            what = f"writing KV failed: {type(failure).__name__}: {failure}"
            log.exception("handover of %s has ended: %s", inbound.sequence, what)
            self._drop([chunk.lease_id], LinkError(what))

    async def _committed(self, commit: KvCommit) -> KvCommitted:
        """Answer a commit; a repeated one, whose first answer may have been lost, gets the same answer."""
        if (answer := self._commits.get(commit.lease_id)) is None:
            answer = asyncio.create_task(self._commit(commit), name=f"commit-{commit.lease_id}")
            self._commits[commit.lease_id] = answer
            if len(self._commits) > MAX_COMMITS:
                self._commits.popitem(last=False)
        done, _ = await asyncio.wait({answer}, timeout=ANSWER_SECONDS)
        if not done:  # each repetition would occupy a handler of the bus for the whole of a long step
            raise OverloadedError("the engine is in a long step; the commit is in progress, repeat it")
        return await asyncio.shield(answer)

    async def _commit(self, commit: KvCommit) -> KvCommitted:
        inbound = self._inbound.get(commit.lease_id)
        if inbound is None:
            return KvCommitted(commit.lease_id, ok=False, reason="the lease has ended")
        try:
            async with self._clock.timeout(inbound.offer.lease_seconds):
                while inbound.received < commit.num_chunks and inbound.error is None:
                    inbound.progress.clear()
                    await inbound.progress.wait()
        except TimeoutError:
            self._drop([commit.lease_id], LinkError("the KV chunks did not arrive within the lease"))
        if inbound.error is None:
            try:
                self._leases.commit(commit.lease_id, self._clock.now())
            except LeaseError as error:
                self._drop([commit.lease_id], error)
        if inbound.error is not None:
            return KvCommitted(commit.lease_id, ok=False, reason=inbound.error.message)
        del self._inbound[commit.lease_id]
        inbound.held.close()
        request = commit.request
        self._note_transfer(self._book.open(request), inbound)
        try:
            await self._engine.attach(
                inbound.sequence, request, commit.output_token_ids, commit.next_position
            )
        except Exception as error:  # noqa: BLE001  whatever it is, the prefill pod must know of it, and the blocks be freed
            self._book.forget(inbound.sequence)
            self._engine.abort(inbound.sequence)
            return KvCommitted(commit.lease_id, ok=False, reason=f"the sequence could not start: {error}")
        self._metrics.leases.labels("committed").inc()
        await self._book.report_phases(inbound.sequence)  # gateways learn from this how fast KV travels
        return KvCommitted(commit.lease_id, ok=True)

    def _note_transfer(self, tracked: Tracked, inbound: _Inbound) -> None:
        now = time.time()
        first, last = inbound.first_byte or now, inbound.last_byte or now
        if inbound.last_byte:  # otherwise all KV was cached here
            self._metrics.transfer.labels("kv").observe(last - first)
        tokens = inbound.offer.prompt_tokens - inbound.cached_tokens
        num_bytes = tokens * self._wire.bytes_per_token
        sizes = {"tokens": tokens, "bytes": num_bytes, "wire_seconds": round(inbound.wire_seconds, 6)}
        tracked.phases.append(Phase("kv_transfer", first, now, sizes))
        self._metrics.kv_cached_tokens.inc(inbound.cached_tokens)

    def _drop(self, lease_ids: Iterable[str], error: MmdError, outcome: str = "lost") -> None:
        """End uncommitted handovers and free their blocks, all before the engine's next step.

        Reasons: the lease expires, its link dies or is replaced, the prefill pod is lost or releases the lease, the request is cancelled or
        offered again, chunks are missing at the commit, or a write fails.
        """
        dropped: list[str] = []
        for lease_id in lease_ids:
            self._leases.release(lease_id)
            if (inbound := self._inbound.pop(lease_id, None)) is not None:
                self._metrics.leases.labels(outcome).inc()
                inbound.error = error
                inbound.held.close()
                inbound.progress.set()
                dropped.append(inbound.sequence)
        if dropped:
            self._engine.abort(*dropped)
