"""The decode role of a pod that takes over sequences from prefill pods and computes short prompts itself.

On a pod that also holds the prefill role, sequences simply stay in the engine, and there is nothing to do here.
"""

from __future__ import annotations

from mmd_api.contract.load import PodLoad
from mmd_workers.decode.decode_service import DecodeService
from mmd_workers.decode.local_prompts import PromptService
from mmd_workers.process.pod import Advertised, Part, Pod
from mmd_workers.sequences.engine import EngineHost
from mmd_workers.sequences.links import KvLinks
from mmd_workers.sequences.sequence_events import Sequences
from mmd_workers.wire.peers import PeerEvent


class DecodeRole(Part):
    """Owns the receiving side of handovers, and accepts short prompts; `Sequences` owns the running sequences."""

    def __init__(self, pod: Pod, engine: EngineHost, sequences: Sequences, links: KvLinks) -> None:
        self._pod = pod
        self._engine = engine
        self._sequences = sequences
        self._links = links
        self._service: DecodeService | None = None
        self._prompts: PromptService | None = None

    async def accept(self) -> None:
        """Accept handovers and prompts."""
        pod = self._pod
        self._service = service = DecodeService(
            pod.bus,
            pod.name,
            self._engine.engine,
            self._links.manager,
            self._sequences.book,
            pod.metrics,
            pod.spec.transfer.kv.wire_format,
        )
        self._prompts = prompts = PromptService(
            pod.bus,
            pod.name,
            self._engine.engine,
            self._sequences.book,
            service.waiting,
            pod.spec.decode.max_sequences,
            pod.metrics,
        )
        self._sequences.add(service)
        self._sequences.add(prompts)
        pod.directory.on_event(self._peer_event)
        await service.start()
        await prompts.start()
        pod.tasks.spawn(service.run(), "decode")

    def _peer_event(self, event: PeerEvent) -> None:
        former = event.before
        if event.kind in ("lost", "reborn") and former is not None and self._service is not None:
            self._service.peer_lost(former.pod, former.incarnation)

    def drain(self) -> None:
        """Grant no more handovers, and accept no more prompts."""
        if self._service is not None:
            self._service.drain()
        if self._prompts is not None:
            self._prompts.drain()

    @property
    def drained(self) -> bool:
        """Whether every granted handover has been committed or has ended."""
        return self._service is None or not self._service.inbound

    def load(self) -> PodLoad:
        """The prompts missing from the engine's figures: gateways count them themselves only until the next heartbeat."""
        waiting = self._prompts.waiting(self._engine.sampled_at) if self._prompts is not None else []
        return PodLoad(prefill_waiting_tokens=sum(waiting), decode_waiting=len(waiting))

    def advertised(self) -> Advertised:
        """Whether this pod takes prompts."""
        return Advertised(takes_prompts=self._prompts is not None)

    async def sample(self) -> None:
        """Count the handovers in flight."""
        if self._service is not None:
            self._pod.metrics.inbound.set(self._service.inbound)
