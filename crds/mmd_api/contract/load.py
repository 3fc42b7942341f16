"""Load of workers and gateways: the one definition for the wire, `/state`, `/demand`, autoscaler and
simulator.

A signal exists only if it is a field here, and then workers and gateways send it. Pure data: independent of
the transport and the clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from mmd_api.contract.pools import Modality, Role

WorkerState = Literal["loading", "ready", "draining", "drained"]
MAX_FAULT_CHARACTERS = 500
LARGEST_PLAUSIBLE = 1e15
"""Largest plausible amount of work, tokens or blocks. A larger one is a broken counter."""


_Name = Annotated[str, Field(max_length=253)]
Amount = Annotated[float, Field(ge=0, le=LARGEST_PLAUSIBLE, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class PodLoad:
    """Work of a pod, with units. Zero for roles that it does not hold."""

    encode_queued_work: dict[Modality, int] = field(default_factory=dict)  # by modality, in work units
    encode_running: int = 0
    encode_work_per_second: dict[Modality, float] = field(default_factory=dict)  # calibrated, by modality
    encode_busy_fraction: float = 0.0
    prefill_waiting_tokens: int = 0
    prefill_blocked_tokens: int = 0  # waiting tokens whose media are not encoded yet
    prefill_waiting_requests: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_running: int = 0
    decode_waiting: int = 0
    decode_max_sequences: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    kv_blocks_reserved: int = 0
    kv_block_tokens: int = 0
    feature_bytes_used: int = 0
    feature_bytes_budget: int = 0
    # Bytes of features that requests need, or wait for room for. The rest of the used bytes is cache.
    feature_bytes_needed: int = 0
    media_bytes_used: int = 0  # media that are being encoded
    media_bytes_budget: int = 0
    itl_seconds: float = 0.0

    def fault(self) -> str | None:
        """Why these numbers cannot be true, or None: not a number, negative, absurdly large, or more free
        than there is.
        """
        for name in _LOAD_FIELDS:
            value = getattr(self, name)
            for number in value.values() if isinstance(value, Mapping) else (value,):
                if not plausible(number):
                    return f"{name} is {number}"
        if self.kv_blocks_free > self.kv_blocks_total:
            return f"kv_blocks_free is {self.kv_blocks_free:g}, more than kv_blocks_total {self.kv_blocks_total:g}"
        return None


_LOAD_FIELDS = tuple(f.name for f in fields(PodLoad))


def plausible(number: float) -> bool:
    """Whether an amount can be true; NaN cannot."""
    return 0 <= number <= LARGEST_PLAUSIBLE


class _Report(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    pod: _Name
    revision: _Name


class WorkerStatus(_Report):
    """The part of a worker's `/state` that an autoscaler reads."""

    state: WorkerState
    load: PodLoad
    identity: _Name = ""
    commit: _Name = ""
    adapter_commits: Annotated[dict[str, _Name], Field(max_length=32)] = {}


class EncodeQueueStatus(BaseModel):
    """Encode work by modality that no encoder has taken, as read `age_seconds` ago."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    age_seconds: Amount
    waiting_work: dict[Modality, float]


class GatewayQueue(BaseModel):
    """Work of requests that a gateway has not started yet, because a pool lacks room for them.

    It is listed under the pool that lacks the room.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    encode_work: dict[Modality, Amount] = {}
    prompt_tokens: Annotated[int, Field(ge=0, le=LARGEST_PLAUSIBLE)] = 0
    sequences: Annotated[int, Field(ge=0, le=LARGEST_PLAUSIBLE)] = 0


class FirstTokens(BaseModel):
    """Time to the first token, at the percentile of the SLO.

    It is taken over the `requests` of the last `window_seconds`.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    window_seconds: Amount
    requests: Annotated[int, Field(ge=0, le=LARGEST_PLAUSIBLE)]
    seconds: Amount

    @classmethod
    def of(cls, ttft_seconds: Iterable[float], percentile: int, window_seconds: float) -> Self:
        """The nearest-rank percentile of the times; 0 if there are none."""
        ordered = sorted(ttft_seconds)
        place = math.ceil(len(ordered) * percentile / 100) - 1
        return cls(
            window_seconds=window_seconds, requests=len(ordered), seconds=ordered[place] if ordered else 0.0
        )


class GatewayStatus(_Report):
    """The answer of a gateway's `/demand`.

    `held`: requests by the role for which no pod is ready. `queue`: None if the queue cannot be read or there
    is no encoder pool. `waiting`: work that waits at the gateway itself for its turn. `keys_fault`: why the
    file of API keys cannot be used; empty if it can, or none is needed. `tls_fault`: the same for the TLS
    certificate. `missing_tenant`: `spec.gateway.auth.oidc.defaultTenant`, if the file in force has no such
    tenant. `issuer_fault`: why the keys of the issuer of tokens cannot be fetched. `picker_fault`: why its
    endpoint picker has ended, until it has run for a while again.
    """

    held: dict[Role, int] = {}
    queue: EncodeQueueStatus | None = None
    waiting: GatewayQueue = GatewayQueue()
    ttft: FirstTokens
    keys_fault: Annotated[str, Field(max_length=MAX_FAULT_CHARACTERS)] = ""
    missing_tenant: Annotated[str, Field(max_length=MAX_FAULT_CHARACTERS)] = ""
    tls_fault: Annotated[str, Field(max_length=MAX_FAULT_CHARACTERS)] = ""
    issuer_fault: Annotated[str, Field(max_length=MAX_FAULT_CHARACTERS)] = ""
    picker_fault: Annotated[str, Field(max_length=MAX_FAULT_CHARACTERS)] = ""
