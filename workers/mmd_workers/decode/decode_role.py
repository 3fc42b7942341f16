"""The decode role of a pod that takes sequences over from prefill pods, and computes short prompts itself. Where it holds the prefill role,
its sequences simply stay in the engine, and there is nothing to do here.
"""

from __future__ import annotations

from mmd_api.contract.load import PodLoad
from mmd_workers.decode.decode_service import DecodeService
from mmd_workers.decode.prompts import PromptService
from mmd_workers.process.pod import Advertised, Part, Pod
from mmd_workers.sequences.engine import EngineHost
from mmd_workers.sequences.links import KvLinks
from mmd_workers.sequences.sequence_events import Sequences
from mmd_workers.wire.peers import PeerEvent


class DecodeRole(Part):
    """Owns the receiving side of handovers, and takes short prompts; running sequences are those of `Sequences`."""

    def __init__(self, pod: Pod, engine: EngineHost, sequences: Sequences, links: KvLinks) -> None:
        self._pod = pod
        self._engine = engine
        self._sequences = sequences
        self._links = links
        self._service: DecodeService | None = None
        self._prompts: PromptService | None = None

    async def accept(self) -> None:
        """Take handovers and prompts."""
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
        gone = event.before
        if event.kind in ("lost", "reborn") and gone is not None and self._service is not None:
            lost = self._service.peer_lost(gone.pod, gone.incarnation)
            self._pod.tasks.in_background(lost, f"end-handovers-of-{gone.pod}")

    def drain(self) -> None:
        """Grant no more handovers, and take no more prompts."""
        if self._service is not None:
            self._service.drain()
        if self._prompts is not None:
            self._prompts.drain()

    @property
    def drained(self) -> bool:
        """Whether every handover that was granted is committed or has ended."""
        return self._service is None or not self._service.inbound

    def load(self) -> PodLoad:
        """Prompts that the engine's figures do not show: gateways count them themselves only until the next heartbeat."""
        waiting = self._prompts.waiting(self._engine.sampled_at) if self._prompts is not None else []
        return PodLoad(prefill_waiting_tokens=sum(waiting), decode_waiting=len(waiting))

    def advertised(self) -> Advertised:
        """That it takes prompts."""
        return Advertised(takes_prompts=self._prompts is not None)

    async def sample(self) -> None:
        """Count the handovers in flight."""
        if self._service is not None:
            self._pod.metrics.inbound.set(self._service.inbound)
