"""The prefill role's side of a KV handover: reserve blocks at a decode pod, send ranges as they are finished, commit.

The KV stays here until the decoder has confirmed that it owns the sequence. If a peer or a link fails before that, the next
candidate gets everything from the start.
"""

from __future__ import annotations

import asyncio
import logging
import random
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from mmd_api.contract.errors import (
    CapacityError,
    DeadlineError,
    LayoutMismatchError,
    LeaseError,
    LinkError,
    MmdError,
    OverloadedError,
    PeerLostError,
)
from mmd_api.spec.transfer import KvWireFormat
from mmd_workers.basics.backoff import Backoff
from mmd_workers.basics.clock import SYSTEM_CLOCK, Clock
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.engine.memory.blocks import MAX_NAMED_BLOCKS
from mmd_workers.kv.chunks import num_pieces, send_range
from mmd_workers.kv.links import LinkManager, PairLink
from mmd_workers.kv.quantize import KvWire
from mmd_workers.observe.metrics import Metrics
from mmd_workers.sequences.engine import SequenceEngine
from mmd_workers.sequences.prefixes import prefix_of
from mmd_workers.sequences.token_publisher import sequence_id
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.decode import KvChunk, KvCommit, KvCommitted, KvGrant, KvOffer, KvRelease
from mmd_workers.wire.messages.message_parts import Acknowledged
from mmd_workers.wire.messages.prefill import GenerateRequest

__all__ = ("Finished", "KvReservation", "KvSender", "Ranges", "prefix_of")

log = logging.getLogger(__name__)

OFFER_SECONDS = 5.0  # an unanswered offer is repeated after this time
RETRY_SECONDS = (0.02, 0.25)  # first and longest pause while a decode pod has no room, or does not answer
REPLY_SECONDS = 2.0  # an unanswered message that may be repeated is repeated after this time
# An unacknowledged chunk is announced again after ANNOUNCE_SECONDS, or sooner: after ANNOUNCE_FRACTION of the chunk's deadline, which
# runs once the decoder receives, even if the acknowledgement was lost.
ANNOUNCE_SECONDS = 0.5
ANNOUNCE_FRACTION = 0.25
LONGEST_STEP_SECONDS = 120.0  # longer than any engine step that the decoder's liveness allows
LINKS_AHEAD = 8  # limit of links made before a request needs them
# While the decoder already has the KV, a chunk without tokens renews the lease after this fraction of it.
RENEW_FRACTION = 0.25
MAX_TRIES = 5  # pairs that may fail in one handover
COPIES_PER_POD = 2  # copied ranges: one is being sent, and the next one is read meanwhile


@dataclass(slots=True)
class Finished:
    """The result of a finished prefill for the decoder: the tokens so far and the next rotary position."""

    output_token_ids: list[int]
    next_position: int


@dataclass(slots=True)
class Ranges:
    """Token ranges with complete KV, in order; `finished` is set after the last. Written by the engine's events."""

    ready: list[tuple[int, int]] = field(default_factory=list)
    finished: Finished | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class KvReservation:
    """Blocks reserved for us at a decode pod, and the link to that pod."""

    pod: str
    grant: KvGrant
    link: asyncio.Task[PairLink]


class KvSender:
    """Hands sequences over to decode pods. One chunk at a time per link, announced before it is sent."""

    def __init__(
        self,
        bus: Bus,
        pod: str,
        incarnation: str,
        engine: SequenceEngine,
        links: LinkManager,
        lease_seconds: float,
        incarnations: Callable[[], Mapping[str, str]],
        metrics: Metrics,
        wire_format: KvWireFormat = "Model",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`incarnations()`: incarnations of the decode pods that are Ready now, by name. `wire_format`: format of the KV that is sent."""
        self._bus = bus
        self._clock = clock
        self._pod = pod
        self._incarnation = incarnation
        self._engine = engine
        self._links = links
        self._announce_seconds = min(ANNOUNCE_SECONDS, ANNOUNCE_FRACTION * links.chunk_timeout_seconds)
        self._wire = KvWire(engine.kv_layout, wire_format)
        self._lease_seconds = lease_seconds
        self._incarnations = incarnations
        self._metrics = metrics
        self._order: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()  # by pod
        self._copies: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        self._releases: set[asyncio.Task[None]] = set()
        self._log = RateLimitedLog(log)
        self._linking = 0  # links ahead of requests that are requested or being made

    async def reserve(self, request: GenerateRequest, avoid: Collection[str] = ()) -> KvReservation:
        """Find a decode pod with room, trying again until the deadline.

        Pods are asked in the router's order, then those that have appeared since; pods to avoid come last.

        Raises:
            CapacityError: the sequence fits into none of the pods, even if they were idle.
            LayoutMismatchError: the pods' KV has another layout.
            OverloadedError: no pod answered or had room in time, or no decode pod is left.
        """
        queued: set[str] = set()
        try:
            reservation = await self._reserve(request, avoid, queued)
            queued.discard(reservation.pod)
            return reservation
        finally:
            for pod in queued:  # younger requests wait behind this one there
                self._release(request, pod)

    async def _reserve(
        self, request: GenerateRequest, avoid: Collection[str], queued: set[str]
    ) -> KvReservation:
        """Do the work of `reserve`; `queued` collects the pods that keep a place in their queue for this request."""
        reason, pauses = "no decode pod was specified", Backoff(*RETRY_SECONDS)
        unable: dict[str, MmdError] = {}
        sequence = sequence_id(request.request_id, request.attempt)
        prefix = (await self._engine.identities(sequence, request))[:MAX_NAMED_BLOCKS]
        while self._clock.unix() < request.deadline:
            ready_pods = self._incarnations()
            if not ready_pods:
                reason = f"{', '.join(request.decode_pods)} lost and no other pod is ready"
                break
            new_pods = [pod for pod in ready_pods if pod not in request.decode_pods]
            routed_pods = [pod for pod in request.decode_pods if pod in ready_pods]
            pods = sorted(
                [*routed_pods, *random.sample(new_pods, len(new_pods))], key=lambda pod: pod in avoid
            )
            for pod in pods:
                if pod in unable:
                    continue
                is_last_candidate = all(other == pod or other in unable for other in pods)
                try:
                    patience = LONGEST_STEP_SECONDS if is_last_candidate else 0.0
                    grant = await self._offer(request, prefix, pod, ready_pods[pod], patience)
                except asyncio.CancelledError:
                    # The answer is in flight: the pod may have granted blocks, or queued the request.
                    queued.add(pod)
                    raise
                except MmdError as error:
                    reason = error.message
                    if isinstance(error, (DeadlineError, OverloadedError)):  # the pod may still grant it
                        queued.add(pod)
                    continue
                if grant.granted:
                    return KvReservation(pod, grant, self._connect(pod, ready_pods[pod], grant))
                reason = grant.reason
                if grant.code == CapacityError.code:
                    unable[pod] = CapacityError(grant.reason)
                elif grant.code == LayoutMismatchError.code:
                    unable[pod] = LayoutMismatchError(grant.reason)
                else:
                    queued.add(pod)
            if all(pod in unable for pod in pods):
                all_layouts_differ = all(isinstance(error, LayoutMismatchError) for error in unable.values())
                reasons = "; ".join(f"{pod}: {error.message}" for pod, error in unable.items())
                raise LayoutMismatchError(reasons) if all_layouts_differ else CapacityError(reasons)
            await self._clock.sleep(pauses.next())
        raise OverloadedError(f"no decode pod accepted the sequence: {reason}")

    def _connect(self, pod: str, incarnation: str, grant: KvGrant) -> asyncio.Task[PairLink]:
        link = asyncio.create_task(
            asyncio.to_thread(self._links.connect, pod, incarnation, grant.link_endpoint, grant.epoch)
        )
        # The error is raised where the link is awaited.
        link.add_done_callback(lambda task: task.cancelled() or task.exception())
        return link

    async def link(self, pod: str, incarnation: str) -> None:
        """Make the link to a decode pod before a request needs it; nothing is reserved there.

        Does nothing if there are already many links: those of requests come first.

        Raises:
            MmdError: the pod did not answer or could not be linked; the next handover tries again.
        """
        if self._links.live_links + self._linking >= LINKS_AHEAD:
            return
        self._linking += 1
        try:
            grant = await self._ask(pod, incarnation, f"link-{self._pod}", 0, 0, 0, self._clock.unix(), [], 0)
            if not grant.granted:
                raise OverloadedError(f"{pod} refused the link: {grant.reason}")
            await self._connect(pod, incarnation, grant)
        finally:
            self._linking -= 1

    async def _offer(
        self,
        request: GenerateRequest,
        prefix: list[bytes],
        pod: str,
        incarnation: str,
        patience_seconds: float,
    ) -> KvGrant:
        """Offer a request to a pod, and again for `patience_seconds` while the pod is alive: its engine may be in a long step.

        A repeated offer gets the grant in progress, even if other pods were asked meanwhile.

        Raises:
            DeadlineError: the pod did not answer: it may have granted the offer.
            OverloadedError: the pod, or this connection, accepted no more requests for all that time.
        """
        tokens = len(request.token_ids) + len(request.output_token_ids)
        remaining_tokens = request.sampling.max_tokens - len(request.output_token_ids)
        name, attempt = request.request_id, request.attempt
        end = min(request.deadline, self._clock.unix() + patience_seconds)
        pauses = Backoff(*RETRY_SECONDS)
        while True:
            try:
                return await self._ask(
                    *(pod, incarnation, name, attempt, tokens, remaining_tokens, request.arrived, prefix),
                    request.companion_tokens,
                )
            except (DeadlineError, OverloadedError) as error:
                if self._clock.unix() > end or self._incarnations().get(pod) != incarnation:
                    raise
                if isinstance(error, OverloadedError):  # the answer came at once
                    await self._clock.sleep(pauses.next())

    async def _ask(
        self,
        pod: str,
        incarnation: str,
        request_id: str,
        attempt: int,
        prompt_tokens: int,
        max_tokens: int,
        arrived: float,
        prefix: list[bytes],
        companion_tokens: int,
    ) -> KvGrant:
        offer = KvOffer(
            request_id=request_id,
            attempt=attempt,
            pod=self._pod,
            incarnation=self._incarnation,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            layout=self._wire.terms,
            backend=self._links.backend,
            link_endpoint=self._links.endpoint,
            lease_seconds=self._lease_seconds,
            arrived=arrived,
            failed_epoch=self._links.failed_epoch(pod, incarnation),
            prefix=prefix,
            companion_tokens=companion_tokens,
        )
        return await self._bus.request(
            self._bus.subjects.kv_offer(pod), offer, KvGrant, timeout=OFFER_SECONDS
        )

    async def hand_over(
        self, request: GenerateRequest, sequence: str, reservation: KvReservation, ranges: Ranges
    ) -> None:
        """Send every range as it becomes ready, then commit.

        While no decoder owns the sequence, a failed pair is replaced by the next, which gets everything from the start. A lease that
        ended while the prompt waited is replaced once the prompt is complete, so that nothing is sent a third time. Blocks that were not
        committed are released, however this ends.

        Raises:
            LeaseError, LinkError, OverloadedError: no pair completed the handover.
            PeerLostError, DeadlineError: it is unknown whether the decoder accepted the sequence: only a new attempt is safe.
        """
        failed: list[str] = []
        tries = 0
        while True:
            committed = False
            try:
                await self._try(request, sequence, reservation, ranges)
                committed = True
                return
            except (LeaseError, LinkError, OverloadedError) as error:
                self._metrics.transfer_failures.labels("kv", error.code).inc()
                tries += 1
                if tries == MAX_TRIES or not error.retryable:
                    raise
                lease_ended = isinstance(error, LeaseError)
                if not lease_ended:  # otherwise the pod is in order, and may have a prefix of it
                    failed.append(reservation.pod)
                log.warning(
                    "handover of %s to %s failed, retrying: %s",
                    sequence,
                    reservation.pod,
                    error.message,
                )
            finally:
                if not committed:
                    self._release(request, reservation.pod, reservation.grant.lease_id)
            while lease_ended and ranges.finished is None:
                await self._next_range(request, ranges)
            reservation = await self.reserve(request, avoid=failed)

    def _release(self, request: GenerateRequest, pod: str, lease_id: str = "") -> None:
        release = KvRelease(request.request_id, request.attempt, lease_id)
        task = asyncio.create_task(self._until_released(release, pod), name=f"release-{request.request_id}")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _until_released(self, release: KvRelease, pod: str) -> None:
        """Repeat a release until the decoder confirms it, is lost, or has freed the blocks because their lease has ended."""
        end = self._clock.now() + self._lease_seconds
        pauses = Backoff(*RETRY_SECONDS)
        while self._clock.now() < end:
            try:
                await self._bus.request(
                    self._bus.subjects.kv_release(pod), release, Acknowledged, timeout=REPLY_SECONDS
                )
                return
            except MmdError as error:
                if pod not in self._incarnations():
                    return
                log.warning(
                    "release of %s on %s failed, retrying: %s", release.request_id, pod, error.message
                )
            await self._clock.sleep(pauses.next())

    async def _try(
        self, request: GenerateRequest, sequence: str, reservation: KvReservation, ranges: Ranges
    ) -> None:
        link = await reservation.link
        with link.held():
            range_number = sent = 0
            renewed_at = self._clock.now()
            while range_number < len(ranges.ready) or ranges.finished is None:
                if range_number == len(ranges.ready):
                    await self._next_range(request, ranges)
                    continue
                start, end = ranges.ready[range_number]
                range_number += 1
                start = max(start, cached := reservation.grant.cached_tokens)
                if start < end:
                    await self._send(link, reservation, sequence, sent, start, end)
                elif self._clock.now() - renewed_at > RENEW_FRACTION * self._lease_seconds:
                    await self._send(link, reservation, sequence, sent, cached, cached)
                else:
                    continue
                sent += 1
                renewed_at = self._clock.now()
            await self._commit(request, reservation, ranges.finished, sent)

    async def _next_range(self, request: GenerateRequest, ranges: Ranges) -> None:
        """Wait until another range is ready, or the prompt is complete.

        Raises:
            DeadlineError: the request's deadline has passed.
        """
        ranges.changed.clear()
        try:
            async with self._clock.timeout(max(0.0, request.deadline - self._clock.unix())):
                await ranges.changed.wait()
        except TimeoutError as error:
            raise DeadlineError("request deadline exceeded while its KV was being sent") from error

    async def _send(
        self, link: PairLink, reservation: KvReservation, sequence: str, number: int, start: int, end: int
    ) -> None:
        """Send a range, or a chunk without tokens. Ranges are copied in the order of their turns, and few at a time: a decoder that is
        busy or silent holds no memory for the rest.
        """
        copies = self._copies.setdefault(reservation.pod, asyncio.Semaphore(COPIES_PER_POD))
        async with copies:
            await self._copy_and_send(link, reservation, sequence, number, start, end)
        self._metrics.transfer_bytes.labels("kv", "sent").inc((end - start) * self._wire.bytes_per_token)

    async def _copy_and_send(
        self, link: PairLink, reservation: KvReservation, sequence: str, number: int, start: int, end: int
    ) -> None:
        tensors: list[torch.Tensor] = []
        if start < end:
            tensors = await self._engine.read_kv(sequence, start, end)
            if self._wire.packs:
                tensors = await asyncio.to_thread(self._wire.pack, tensors)
        tag = link.reserve_tags(num_pieces(self._wire.layout, end - start))
        chunk = KvChunk(
            pod=self._pod,
            epoch=link.epoch,
            lease_id=reservation.grant.lease_id,
            sequence=number,
            start=start,
            num_tokens=end - start,
            first_tag=tag,
        )
        async with self._order.setdefault(reservation.pod, asyncio.Lock()):
            sending = asyncio.create_task(self._announce_and_send(link, reservation.pod, chunk, tensors))
            try:
                await asyncio.shield(sending)
            except asyncio.CancelledError:
                await asyncio.gather(sending, return_exceptions=True)  # the link outlives this request
                raise

    async def _announce_and_send(
        self, link: PairLink, pod: str, chunk: KvChunk, tensors: list[torch.Tensor]
    ) -> None:
        """Announce and send a chunk, never cancelled in between. A link whose peer does not expect the chunk is closed.

        Raises:
            LeaseError: the lease has ended. Nothing is sent, and the link stays.
            LinkError: the link has failed.
        """
        try:
            await self._announce(link, pod, chunk)
        except LeaseError:
            raise
        except MmdError as error:
            link.close()
            raise LinkError(f"{pod} does not expect the chunk: {error.message}") from error
        if tensors:
            await asyncio.to_thread(send_range, link, tensors, chunk.first_tag)

    async def _announce(self, link: PairLink, pod: str, chunk: KvChunk) -> None:
        """Announce a chunk until the decoder receives it.

        The decoder's engine may be in a long step, so only a silent pod or a dead link ends this early. No pause is longer than a
        fraction of the chunk's deadline.
        """
        end = self._clock.now() + LONGEST_STEP_SECONDS
        subject, seconds = self._bus.subjects.kv_chunk(pod), self._announce_seconds
        while True:
            try:
                await self._bus.request(subject, chunk, Acknowledged, timeout=seconds)
                return
            except (DeadlineError, PeerLostError, OverloadedError) as error:
                if link.dead or pod not in self._incarnations() or self._clock.now() > end:
                    raise
                if not isinstance(error, DeadlineError):  # the answer came at once
                    await self._clock.sleep(seconds)

    async def _commit(
        self, request: GenerateRequest, reservation: KvReservation, finished: Finished, num_chunks: int
    ) -> None:
        commit = KvCommit(
            lease_id=reservation.grant.lease_id,
            request=request,
            output_token_ids=finished.output_token_ids,
            next_position=finished.next_position,
            num_chunks=num_chunks,
        )
        reply = await self._until_answered(reservation.pod, commit)
        if not reply.ok:
            raise OverloadedError(f"decode pod {reservation.pod} did not accept the sequence: {reply.reason}")

    async def _until_answered(self, pod: str, commit: KvCommit) -> KvCommitted:
        """Repeat a commit until the decoder answers it.

        A repeated commit gets the answer of the first, so a lost message costs two seconds and no attempt. The decoder's engine may
        be in a long step, so only a silent pod ends this early.

        Raises:
            DeadlineError, PeerLostError: no answer: it is unknown whether the decoder accepted the sequence.
        """
        end = self._clock.now() + LONGEST_STEP_SECONDS
        pauses = Backoff(*RETRY_SECONDS)
        while True:
            try:
                return await self._bus.request(
                    self._bus.subjects.kv_commit(pod), commit, KvCommitted, timeout=REPLY_SECONDS
                )
            except (DeadlineError, PeerLostError, OverloadedError) as error:
                if self._clock.now() > end or pod not in self._incarnations():
                    if isinstance(error, OverloadedError):  # an earlier try may have been accepted
                        raise DeadlineError(f"{pod} did not answer the commit: {error.message}") from error
                    raise
                self._log.warning(
                    pod, f"commit of {commit.lease_id} on {pod} failed, retrying: {error.message}"
                )
            await self._clock.sleep(pauses.next())
