"""Transfers between pools."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.rule import Rule

KvBackend = Literal["Nccl", "Gloo", "Nixl"]
KvWireFormat = Literal["Model", "Fp8", "Int8", "Int4"]


def _lease_outlives_chunk(k: KvTransfer) -> bool:
    return k.lease_seconds * 1000 > k.chunk_timeout_milliseconds


def _chunk_in_window(e: EmbeddingTransfer) -> bool:
    return e.chunk_kibibytes <= e.window_kibibytes


KV_TRANSFER = (
    Rule(
        field="leaseSeconds",
        cel="self.leaseSeconds * 1000 > self.chunkTimeoutMilliseconds",
        holds=_lease_outlives_chunk,
        problem="the lease would expire before the timeout of a single chunk",
        remedy="raise leaseSeconds or lower chunkTimeoutMilliseconds",
    ),
)


EMBEDDING_TRANSFER = (
    Rule(
        field="chunkKibibytes",
        cel="self.chunkKibibytes <= self.windowKibibytes",
        holds=_chunk_in_window,
        problem="one chunk is larger than the credit window",
        remedy="lower chunkKibibytes or raise windowKibibytes",
    ),
)


class EmbeddingTransfer(ApiModel, rules=EMBEDDING_TRANSFER):
    """Transfer of embeddings over NATS."""

    chunk_kibibytes: Annotated[int, Field(ge=16, le=960)] = 512
    """Size of a chunk, which is sent as one NATS message."""
    window_kibibytes: Annotated[int, Field(ge=16, le=65_536)] = 8192
    """Maximum size of unacknowledged chunks in flight."""
    timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 30
    """Deadline of a transfer."""


class KvTransfer(ApiModel, rules=KV_TRANSFER):
    """Transfer of KV from prefill to decode."""

    backend: Literal["Auto", KvBackend] = "Auto"
    """Transport: Nccl between GPUs, Gloo over TCP, Nixl over RDMA where there is, else TCP. Auto is Nccl if prefill and decode pods have GPUs, else Gloo; `mmd up` then always uses Gloo."""
    wire_format: KvWireFormat = "Model"
    """Format of KV while it travels. Model is exact; Fp8, Int8 and Int4 have a scale for each token and head, and change tokens."""
    lease_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """How long granted KV blocks stay reserved for a transfer that does not finish."""
    chunk_timeout_milliseconds: Annotated[int, Field(ge=50, le=60_000)] = 2000
    """Deadline of a chunk. A lost peer is detected within this time."""


class TransferSpec(ApiModel):
    """Data transfer between pools."""

    embedding: EmbeddingTransfer = EmbeddingTransfer()
    """Transfer of embeddings from encoder to prefill."""
    kv: KvTransfer = KvTransfer()
    """Transfer of KV from prefill to decode."""
