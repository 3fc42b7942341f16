"""Every NATS subject and stream name of one pipeline revision; nobody else spells a subject.

A subject starts with `mmd.<namespace>.<name>.<revision>`, so peers of different revisions cannot hear each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmd_workers.wire.messages import Modality


@dataclass(frozen=True, slots=True)
class Subjects:
    """Subject names of one pipeline revision of one deployment."""

    namespace: str
    name: str
    revision: str

    @property
    def prefix(self) -> str:
        """First tokens of every subject of this pipeline revision."""
        return f"mmd.{self.namespace}.{self.name}.{self.revision}"

    @property
    def encode_stream(self) -> str:
        """Name of the JetStream work queue of encode jobs."""
        return f"mmd-{self.namespace}-{self.name}-{self.revision}-encode"

    def encode_job(self, modality: Modality | str) -> str:
        """Subject of encode jobs of one modality (`*` for all)."""
        return f"{self.prefix}.job.encode.{modality}"

    def encode_work(self, modality: Modality | str, work: int | str) -> str:
        """Subject of encode jobs of one modality and size, so that the stream's counts by subject tell the queued work."""
        return f"{self.encode_job(modality)}.{work}"

    def heartbeat(self, pod: str) -> str:
        """Where a pod says how it is (`*` for all pods)."""
        return f"{self.prefix}.heartbeat.{pod}"

    def prefill(self, pod: str) -> str:
        """Request/reply: gateway places a `GenerateRequest` on a prefill-capable pod."""
        return f"{self.prefix}.prefill.{pod}"

    def embedding(self, pod: str) -> str:
        """Request/reply: encoder sends an `EmbeddingOffer` to the pod that asked for the feature."""
        return f"{self.prefix}.embedding.{pod}"

    def encode_failed(self, pod: str) -> str:
        """`EncodeFailed` to the pod that asked for a feature."""
        return f"{self.prefix}.encode-failed.{pod}"

    def kv_offer(self, pod: str) -> str:
        """Request/reply: prefill worker sends a `KvOffer` to a decode pod."""
        return f"{self.prefix}.kv-offer.{pod}"

    def kv_chunk(self, pod: str) -> str:
        """Prefill worker announces a `KvChunk` to a decode pod, in the order sent."""
        return f"{self.prefix}.kv-chunk.{pod}"

    def kv_commit(self, pod: str) -> str:
        """Request/reply: prefill worker sends the `KvCommit` of a sequence."""
        return f"{self.prefix}.kv-commit.{pod}"

    def kv_release(self, pod: str) -> str:
        """Prefill worker gives back a `KvRelease`d lease before its end."""
        return f"{self.prefix}.kv-release.{pod}"

    def media(self, gateway: str) -> str:
        """Request/reply: encoder reads the bytes of a medium from the gateway that holds it."""
        return f"{self.prefix}.media.{gateway}"

    def tokens(self, gateway: str) -> str:
        """`TokenBatch` to one gateway."""
        return f"{self.prefix}.tokens.{gateway}"

    def failures(self, gateway: str) -> str:
        """`RequestFailed` to one gateway."""
        return f"{self.prefix}.failures.{gateway}"

    def phases(self, gateway: str) -> str:
        """`PhaseReport` to one gateway."""
        return f"{self.prefix}.phases.{gateway}"

    @property
    def cancel(self) -> str:
        """Broadcast of `Cancel`: whoever knows the request frees it."""
        return f"{self.prefix}.cancel"

    def control(self, pod: str) -> str:
        """Request/reply with one pod: drain, state."""
        return f"{self.prefix}.control.{pod}"
