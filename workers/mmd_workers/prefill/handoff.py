"""The prefill role's side of a KV hand-over: reserve blocks at a decode pod, send ranges as they are finished, commit.

The KV stays here until the decoder has said that it owns the sequence; when a peer or a link fails before that, the next
candidate gets everything from the start.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from mmd_workers.engine.runner import EngineRunner
from mmd_workers.errors import DeadlineError, LinkError, MmdError, OverloadedError
from mmd_workers.kv.chunks import num_pieces, send_range
from mmd_workers.kv.links import LinkManager, PairLink
from mmd_workers.model.types import KvLayout
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages import GenerateRequest, KvChunk, KvCommit, KvCommitted, KvGrant, KvOffer

log = logging.getLogger(__name__)

OFFER_TIMEOUT_SECONDS = 5.0
RETRY_SECONDS = (0.02, 0.25)  # first and longest pause while no decode pod has room


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
        metrics: Metrics,
    ) -> None:
        self._bus = bus
        self._pod = pod
        self._incarnation = incarnation
        self._runner = runner
        self._links = links
        self._kv_layout = kv_layout
        self._lease_seconds = lease_seconds
        self._metrics = metrics
        self._order: dict[str, asyncio.Lock] = {}

    async def reserve(self, request: GenerateRequest, incarnation_of: Mapping[str, str]) -> Reservation:
        """Find a decode pod with room, in the router's order, again and again until the request's deadline.

        Raises:
            OverloadedError: no pod answered or had room in time.
        """
        reason, pause = "no decode pod was named", RETRY_SECONDS[0]
        while time.time() < request.deadline:
            for pod in request.decode_pods:
                if pod not in incarnation_of:
                    reason = f"decode pod {pod} is gone"
                    continue
                try:
                    grant = await self._offer(request, pod, incarnation_of[pod])
                except MmdError as error:
                    reason = error.message
                    continue
                if grant.granted:
                    link = asyncio.create_task(
                        asyncio.to_thread(
                            self._links.connect, pod, incarnation_of[pod], grant.link_endpoint, grant.epoch
                        )
                    )
                    return Reservation(pod, grant, link)
                reason = grant.reason
            if not any(pod in incarnation_of for pod in request.decode_pods):
                break
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, RETRY_SECONDS[1])
        raise OverloadedError(f"no decode pod took the sequence: {reason}")

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
        """Send every range as it becomes ready, then commit.

        Raises:
            LinkError: the pair failed before the commit; the reservation is void and the KV is still here.
            OverloadedError: the decoder did not take the sequence; likewise.
            PeerLostError, DeadlineError: nobody knows whether it did: only a new attempt is safe.
        """
        try:
            link = await reservation.link
            with link.held():
                sent = 0
                while sent < len(ranges.ready) or ranges.finished is None:
                    if sent == len(ranges.ready):
                        ranges.changed.clear()
                        await asyncio.wait_for(
                            ranges.changed.wait(), max(0.0, request.deadline - time.time())
                        )
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
            await self._bus.publish(self._bus.subjects.kv_chunk(reservation.pod), chunk)
            sending = asyncio.ensure_future(asyncio.to_thread(send_range, link, tensors, tag))
            try:
                await asyncio.shield(sending)
            except asyncio.CancelledError:
                await asyncio.wait([sending])  # what is announced is sent: the link outlives this request
                raise
        self._metrics.transfer_bytes.labels("kv", "sent").inc(
            (end - start) * self._kv_layout.bytes_per_token()
        )

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
            self._bus.subjects.kv_commit(reservation.pod), commit, KvCommitted, timeout=self._lease_seconds
        )
        if not reply.ok:
            raise OverloadedError(f"decode pod {reservation.pod} did not take the sequence: {reply.reason}")
