"""The prefill role of a pod: takes placed requests, gathers their features and, unless this pod decodes too, hands sequences over."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial

import torch

from mmd_api.contract.errors import MmdError
from mmd_api.contract.load import PodLoad, WorkerState
from mmd_workers.basics.memory import MEBIBYTE
from mmd_workers.caches.feed import CacheFeed
from mmd_workers.caches.index import CacheIndex
from mmd_workers.caches.kinds import FEATURES
from mmd_workers.engine.memory.cache_changes import MOST_REPORTED
from mmd_workers.features.held import feature_identity
from mmd_workers.features.source import EitherSource, FeatureSource, LocalFeatureSource
from mmd_workers.features.store import FeatureState, FeatureStore
from mmd_workers.prefill.kv_sender import KvSender
from mmd_workers.prefill.prefill_service import PrefillService
from mmd_workers.prefill.queue_source import QueueSource
from mmd_workers.process.pod import Advertised, Part, Pod
from mmd_workers.process.warmup import warm_up
from mmd_workers.sequences.engine import EngineHost
from mmd_workers.sequences.links import KvLinks
from mmd_workers.sequences.sequence_events import Sequences
from mmd_workers.wire.messages.every_pod import Heartbeat
from mmd_workers.wire.peers import PeerEvent

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
# States in which an encoder sends its cached features.
HOLDER_STATES: tuple[WorkerState, ...] = ("ready", "draining")
LINK_SECONDS = 5.0  # limit for linking with decode pods that are already Ready


class PrefillRole(Part):
    """Owns the feature store, the source of features, the sending side of handovers, and the service that joins them."""

    def __init__(
        self,
        pod: Pod,
        engine: EngineHost,
        sequences: Sequences,
        links: KvLinks | None,
        local_source: Callable[[FeatureStore], LocalFeatureSource] | None,
    ) -> None:
        """`links`: None if sequences stay on this pod. `local_source`: makes the source for the tower in this process, if there is one."""
        self._pod = pod
        self._engine = engine
        self._sequences = sequences
        self._links = links
        self._local_source = local_source
        self._store: FeatureStore | None = None
        self._queue_source: QueueSource | None = None
        self._sender: KvSender | None = None
        self._service: PrefillService | None = None
        self._features = CacheIndex(most_in_all=MOST_REPORTED)  # the caches of encoder pods
        self._feed: CacheFeed | None = None

    # --- start ----------------------------------------------------------------------------------------------------

    async def accept(self) -> None:
        """Accept placed requests."""
        pod, prefill = self._pod, self._pod.prefill_spec
        self._store = store = FeatureStore(
            prefill.feature_budget_mebibytes * MEBIBYTE, self._count_transition, pod.held
        )
        source = await self._source(store)
        if self._links is not None:
            self._sender = self._make_sender(self._links)
        self._service = service = PrefillService(
            pod.bus,
            pod.name,
            self._engine.engine,
            store,
            source,
            self._sequences.book,
            self._sender,
            max_waiting=prefill.max_waiting_requests,
            max_in_engine=pod.spec.decode.max_sequences,
            overlap_tokens=prefill.chunk_tokens // 4,
            metrics=pod.metrics,
        )
        self._sequences.add(service)
        pod.directory.on_event(self._peer_event)
        await service.start()

    async def _source(self, store: FeatureStore) -> FeatureSource:
        """The source of features: encoder pods, the tower in this process, or both."""
        if self._local_source is None:
            return await self._start_queue_source(store)
        local = self._local_source(store)
        return (
            EitherSource(local, await self._start_queue_source(store))
            if self._pod.encodes_small_media
            else local
        )

    async def _start_queue_source(self, store: FeatureStore) -> QueueSource:
        pod, embedding = self._pod, self._pod.spec.transfer.embedding
        self._queue_source = source = QueueSource(
            pod.bus,
            pod.name,
            pod.settings.incarnation,
            pod.encode_queue(),
            self._encoders_with,
            lambda: pod.directory.absences,
            store,
            window_bytes=embedding.window_kibibytes * 1024,
            chunk_bytes=embedding.chunk_kibibytes * 1024,
            job_timeout_seconds=float(pod.encoder_spec.job_timeout_seconds),
            transfer_timeout_seconds=float(embedding.timeout_seconds),
            metrics=pod.metrics,
        )
        self._feed = CacheFeed(
            pod.bus, pod.directory, self._features, pod.name, pod.metrics, FEATURES, encoders_only=True
        )
        await self._feed.start()
        await source.start()
        return source

    def _encoders_with(self, feature_id: str) -> list[str]:
        """Encoder pods that report a feature, shuffled to spread the load, with draining pods last."""
        if not (holders := self._features.holders(feature_identity(feature_id))):
            return []
        candidates: list[str] = []
        for state in HOLDER_STATES:
            encoders = [
                beat.pod for beat in self._pod.directory.pods("encode", state) if beat.roles == ["encode"]
            ]
            holding_pods = [pod for pod in encoders if holders >> self._features.slot(pod) & 1]
            candidates += random.sample(holding_pods, len(holding_pods))
        return candidates

    def _make_sender(self, links: KvLinks) -> KvSender:
        pod = self._pod
        return KvSender(
            pod.bus,
            pod.name,
            pod.settings.incarnation,
            self._engine.engine,
            links.manager,
            float(pod.spec.transfer.kv.lease_seconds),
            lambda: {beat.pod: beat.incarnation for beat in pod.directory.pods("decode")},
            pod.metrics,
            pod.spec.transfer.kv.wire_format,
        )

    def _count_transition(self, _before: FeatureState | None, after: FeatureState) -> None:
        self._pod.metrics.feature_transitions.labels(after).inc()

    # --- links ----------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Link with the decode pods that are already Ready; later ones are linked when they appear."""
        if self._sender is not None:
            links = {"links": partial(self._link_decoders, self._sender)}
            await warm_up(links, self._pod.startup, CPU, LINK_SECONDS)

    async def _link_decoders(self, sender: KvSender) -> None:
        await asyncio.gather(*(self._link(sender, beat) for beat in self._pod.directory.pods("decode")))

    async def _link(self, sender: KvSender, decoder: Heartbeat) -> None:
        try:
            await sender.link(decoder.pod, decoder.incarnation)
        except MmdError as error:
            log.info(
                "failed to open the KV link to %s ahead of the first request: %s", decoder.pod, error.message
            )

    def _peer_event(self, event: PeerEvent) -> None:
        peer = event.heartbeat
        is_new_decoder = event.kind != "lost" and peer.state == "ready" and "decode" in peer.roles
        if is_new_decoder and self._sender is not None:
            self._pod.tasks.in_background(self._link(self._sender, peer), f"link-{peer.pod}")

    # --- end ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Accept no more requests."""
        if self._service is not None:
            self._service.drain()

    @property
    def drained(self) -> bool:
        """Whether every request has been handed over, or has ended."""
        return self._service is None or not self._service.active

    async def stop(self) -> None:
        """Stop following the caches of encoder pods."""
        if self._feed is not None:
            await self._feed.close()

    # --- report ---------------------------------------------------------------------------------------------------

    def load(self) -> PodLoad:
        """The load that the engine's figures do not include: waiting requests and bytes of features."""
        store, service = self._store, self._service
        if store is None:
            return PodLoad()
        if service is None or self._engine.stats is None:
            return PodLoad(
                feature_bytes_used=store.used_bytes,
                feature_bytes_budget=store.budget_bytes,
                feature_bytes_needed=store.needed_bytes,
            )
        return PodLoad(
            prefill_waiting_tokens=service.waiting_tokens(self._engine.sampled_at),
            prefill_blocked_tokens=service.blocked_tokens(),
            prefill_waiting_requests=service.active,
            feature_bytes_used=store.used_bytes,
            feature_bytes_budget=store.budget_bytes,
            feature_bytes_needed=store.needed_bytes,
        )

    def advertised(self) -> Advertised:
        """Whether small media may be encoded here."""
        return Advertised(encodes_small_media=self._pod.encodes_small_media)

    async def sample(self) -> None:
        """Expose features by state, bytes granted to transfers, and prompt tokens that wait in the engine or for it."""
        metrics = self._pod.metrics
        if self._store is not None:
            metrics.feature_budget.set(self._store.budget_bytes)
            for state, num_bytes in self._store.bytes_by_state().items():
                metrics.feature_bytes.labels(state).set(num_bytes)
        if self._queue_source is not None:
            metrics.credit.set(self._queue_source.reserved_bytes)
        if self._service is not None and (stats := self._engine.stats) is not None:
            blocked = stats.blocked_tokens + self._service.blocked_tokens()
            unsampled = self._service.waiting_tokens(self._engine.sampled_at)
            waiting = stats.waiting_tokens + unsampled - blocked
            metrics.prefill_waiting.labels("prefill").set(waiting)
            metrics.prefill_waiting.labels("encode").set(blocked)
            if stats.prefill_tokens_per_second:
                metrics.prefill_rate.set(stats.prefill_tokens_per_second)
                metrics.backlog.labels("prefill").set(waiting / stats.prefill_tokens_per_second)
