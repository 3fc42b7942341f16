"""The KV links of a pod whose sequences move between prefill and decode pods. Independent of the engine and sequences."""

from __future__ import annotations

import asyncio

import torch

from mmd_workers.kv.links import LinkManager
from mmd_workers.observe.server import Progress
from mmd_workers.process.pod import LIVENESS_SECONDS, Part, Pod
from mmd_workers.wire.peers import PeerEvent


def device_of_kv(pod: Pod, device: torch.device) -> torch.device:
    """The device of KV between an engine and a link.

    This is the pod's device, unless ranks hand KV over in the host's memory and gloo takes it there.
    """
    ranks = pod.vllm_spec.ranks if pod.spec.engine.type == "VLLM" else 1
    return torch.device("cpu") if ranks > 1 and pod.spec.kv_backend == "Gloo" else device


class KvLinks(Part):
    """Owns the link manager, and closes links with lost pods."""

    def __init__(self, pod: Pod, device: torch.device) -> None:
        self._pod = pod
        self._device = device
        self._manager: LinkManager | None = None

    @property
    def manager(self) -> LinkManager:
        """The link manager, once this part accepts."""
        assert self._manager is not None
        return self._manager

    async def accept(self) -> None:
        """Let peers make links."""
        settings, kv = self._pod.settings, self._pod.spec.transfer.kv
        self._manager = LinkManager(
            self._pod.spec.kv_backend,
            settings.pod,
            settings.incarnation,
            settings.pod_ip,
            device_of_kv(self._pod, self._device),
            chunk_timeout_seconds=kv.chunk_timeout_milliseconds / 1000,
        )
        self._pod.directory.on_event(self._peer_event)

    def _peer_event(self, event: PeerEvent) -> None:
        if event.kind in ("lost", "reborn") and event.before is not None:
            self.manager.notify_lost(event.before.pod)

    async def stop(self) -> None:
        """Close every link."""
        if self._manager is not None:
            await asyncio.to_thread(self._manager.close)

    def progress(self) -> dict[str, Progress]:
        """The progress of the link that has been connecting for longest."""
        if (manager := self._manager) is None:
            return {}
        return {"kv-connect": Progress(lambda: manager.connecting_seconds, LIVENESS_SECONDS)}
