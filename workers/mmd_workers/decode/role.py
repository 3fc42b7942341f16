"""The decode role of a pod that takes sequences over from prefill pods. Where it holds the prefill role itself, its sequences simply
stay in the engine, and there is nothing to do here.
"""

from __future__ import annotations

from mmd_workers.decode.service import DecodeService
from mmd_workers.pod import Part, Pod
from mmd_workers.sequences.engine import EngineHost
from mmd_workers.sequences.links import KvLinks
from mmd_workers.sequences.running import Sequences
from mmd_workers.wire.peers import PeerEvent


class DecodeRole(Part):
    """Owns the receiving side of handovers; attached sequences are those of `Sequences`."""

    def __init__(self, pod: Pod, engine: EngineHost, sequences: Sequences, links: KvLinks) -> None:
        self._pod = pod
        self._engine = engine
        self._sequences = sequences
        self._links = links
        self._service: DecodeService | None = None

    async def accept(self) -> None:
        """Take handovers."""
        pod = self._pod
        self._service = service = DecodeService(
            pod.bus,
            pod.name,
            self._engine.engine,
            self._links.manager,
            self._sequences.book,
            pod.metrics,
        )
        self._sequences.add(service)
        pod.directory.on_event(self._peer_event)
        await service.start()
        pod.tasks.spawn(service.run(), "decode")

    def _peer_event(self, event: PeerEvent) -> None:
        gone = event.before
        if event.kind in ("lost", "reborn") and gone is not None and self._service is not None:
            lost = self._service.peer_lost(gone.pod, gone.incarnation)
            self._pod.tasks.in_background(lost, f"end-handovers-of-{gone.pod}")

    def drain(self) -> None:
        """Grant no more handovers."""
        if self._service is not None:
            self._service.drain()

    @property
    def drained(self) -> bool:
        """Whether every handover that was granted is committed or has ended."""
        return self._service is None or not self._service.inbound

    async def sample(self) -> None:
        """Count the handovers in flight."""
        if self._service is not None:
            self._pod.metrics.inbound.set(self._service.inbound)
