"""The prefill role's side of a KV hand-over: reserve blocks at a decode pod, send ranges as they are finished, commit.

The KV stays here until the decoder has said that it owns the sequence; when a peer or a link fails before that, the next
candidate gets everything from the start.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field

import torch

from mmd_workers.engine.runner import EngineRunner
from mmd_workers.errors import DeadlineError, LinkError, MmdError, OverloadedError
from mmd_workers.kv.chunks import num_pieces, send_range
from mmd_workers.kv.links import LinkManager, PairLink
from mmd_workers.model.types import KvLayout
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages import (
    GenerateRequest,
    KvChunk,
    KvCommit,
    KvCommitted,
    KvGrant,
    KvOffer,
    KvRelease,
)

log = logging.getLogger(__name__)

OFFER_TIMEOUT_SECONDS = 5.0
RETRY_SECONDS = (0.02, 0.25)  # first and longest pause while no decode pod has room
COMMIT_TIMEOUT_SECONDS = 15.0  # everything has been sent by then
MAX_TRIES = 5  # pairs that may fail during one hand-over


@dataclass(slots=True)
class Finished:
    """What a finished prefill hands to the decoder: the tokens so far, the rotary position that follows."""

    output_token_ids: list[int]
    next_position: int


@dataclass(slots=True)
class Ranges:
    """Token ranges whose KV is complete, in order; `finished` is set after the last. Written by the engine's events."""

    ready: list[tuple[int, int]] = field(default_factory=list)
    finished: Finished | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks that a decode pod holds for us, and the link to it."""

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
        runner: EngineRunner,
        links: LinkManager,
        kv_layout: KvLayout,
        lease_seconds: float,
        incarnations: Callable[[], Mapping[str, str]],
        metrics: Metrics,
    ) -> None:
        """`incarnations()`: of the decode pods that are ready now, by name."""
        self._bus = bus
        self._pod = pod
        self._incarnation = incarnation
        self._runner = runner
        self._links = links
        self._kv_layout = kv_layout
        self._lease_seconds = lease_seconds
        self._incarnations = incarnations
        self._metrics = metrics
        self._order: dict[str, asyncio.Lock] = {}

    async def reserve(self, request: GenerateRequest, avoid: Collection[str] = ()) -> Reservation:
        """Find a decode pod with room, in the router's order (those to avoid last), again and again until the deadline.

        Raises:
            OverloadedError: no pod answered or had room in time, or none of those named is there any more.
        """
        reason, pause = "no decode pod was named", RETRY_SECONDS[0]
        pods = sorted(request.decode_pods, key=lambda pod: pod in avoid)
        while time.time() < request.deadline:
            there = self._incarnations()
            for pod in pods:
                if pod not in there:
                    reason = f"decode pod {pod} is gone"
                    continue
                try:
                    grant = await self._offer(request, pod, there[pod])
                except MmdError as error:
                    reason = error.message
                    if isinstance(error, DeadlineError):  # it may have been granted
                        await self._release(request, pod)
                    continue
                if grant.granted:
                    return Reservation(pod, grant, self._connect(pod, there[pod], grant))
                reason = grant.reason
            if not any(pod in there for pod in pods):
                break
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, RETRY_SECONDS[1])
        raise OverloadedError(f"no decode pod took the sequence: {reason}")

    def _connect(self, pod: str, incarnation: str, grant: KvGrant) -> asyncio.Task[PairLink]:
        link = asyncio.create_task(
            asyncio.to_thread(self._links.connect, pod, incarnation, grant.link_endpoint, grant.epoch)
        )
        link.add_done_callback(lambda task: task.cancelled() or task.exception())  # told to whoever awaits it
        return link

    async def _offer(self, request: GenerateRequest, pod: str, incarnation: str) -> KvGrant:
        offer = KvOffer(
            request_id=request.request_id,
            attempt=request.attempt,
            pod=self._pod,
            incarnation=self._incarnation,
            prompt_tokens=len(request.token_ids) + len(request.output_token_ids),
            max_tokens=request.sampling.max_tokens,
            layout=asdict(self._kv_layout),
            link_endpoint=self._links.endpoint,
            lease_seconds=self._lease_seconds,
            failed_epoch=self._links.failed_epoch(pod, incarnation),
        )
        return await self._bus.request(
            self._bus.subjects.kv_offer(pod), offer, KvGrant, timeout=OFFER_TIMEOUT_SECONDS
        )

    async def hand_over(
        self, request: GenerateRequest, sequence: str, reservation: Reservation, ranges: Ranges
    ) -> None:
        """Send every range as it becomes ready, then commit. While the KV is still ours alone, a pair that fails is replaced by
        the next, which gets everything from the start. What was not committed is given back, however this ends.

        Raises:
            LinkError, OverloadedError: no pair could do it.
            PeerLostError, DeadlineError: nobody knows whether the decoder took it: only a new attempt is safe.
        """
        failed: list[str] = []
        while True:
            committed = False
            try:
                await self._try(request, sequence, reservation, ranges)
                committed = True
                return
            except (LinkError, OverloadedError) as error:
                self._metrics.transfer_failures.labels("kv", error.code).inc()
                failed.append(reservation.pod)
                if len(failed) == MAX_TRIES or not error.retryable:
                    raise
                log.warning(
                    "hand-over of %s to %s failed, trying again: %s",
                    sequence,
                    reservation.pod,
                    error.message,
                )
            finally:
                if not committed:
                    await self._release(request, reservation.pod, reservation.grant.lease_id)
            reservation = await self.reserve(request, avoid=failed)

    async def _release(self, request: GenerateRequest, pod: str, lease_id: str = "") -> None:
        release = KvRelease(request.request_id, request.attempt, lease_id)
        try:
            await self._bus.publish(self._bus.subjects.kv_release(pod), release)
        except MmdError as error:
            log.warning("blocks at %s wait for their lease to end: %s", pod, error.message)

    async def _try(
        self, request: GenerateRequest, sequence: str, reservation: Reservation, ranges: Ranges
    ) -> None:
        try:
            link = await reservation.link
            with link.held():
                sent = 0
                while sent < len(ranges.ready) or ranges.finished is None:
                    if sent == len(ranges.ready):
                        ranges.changed.clear()
                        async with asyncio.timeout(max(0.0, request.deadline - time.time())):
                            await ranges.changed.wait()
                        continue
                    start, end = ranges.ready[sent]
                    await self._send(link, reservation, sequence, sent, start, end)
                    sent += 1
                await self._commit(request, reservation, ranges.finished, sent)
        except TimeoutError as error:
            raise DeadlineError("the request's deadline passed while its KV was being sent") from error

    async def _send(
        self, link: PairLink, reservation: Reservation, sequence: str, number: int, start: int, end: int
    ) -> None:
        tensors = await self._runner.call(lambda engine: engine.read_kv(sequence, start, end))
        tag = link.reserve_tags(num_pieces(self._kv_layout, end - start))
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
        self._metrics.transfer_bytes.labels("kv", "sent").inc(
            (end - start) * self._kv_layout.bytes_per_token()
        )

    async def _announce_and_send(
        self, link: PairLink, pod: str, chunk: KvChunk, tensors: list[torch.Tensor]
    ) -> None:
        """What is announced is sent: never cancelled in between."""
        await self._bus.publish(self._bus.subjects.kv_chunk(pod), chunk)
        await asyncio.to_thread(send_range, link, tensors, chunk.first_tag)

    async def _commit(
        self, request: GenerateRequest, reservation: Reservation, finished: Finished, num_chunks: int
    ) -> None:
        commit = KvCommit(
            lease_id=reservation.grant.lease_id,
            request=request,
            output_token_ids=finished.output_token_ids,
            next_position=finished.next_position,
            num_chunks=num_chunks,
        )
        reply = await self._bus.request(
            self._bus.subjects.kv_commit(reservation.pod), commit, KvCommitted, timeout=COMMIT_TIMEOUT_SECONDS
        )
        if not reply.ok:
            raise OverloadedError(f"decode pod {reservation.pod} did not take the sequence: {reply.reason}")
