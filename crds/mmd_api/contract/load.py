"""What workers and gateways report about their load: the one definition for the wire, `/state`, `/demand`, autoscaler and simulator.

A signal exists only if it is a field here, and then workers and gateways send it. Pure data: independent of the transport and the clock.
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
"""A larger amount of work, tokens or blocks is a broken counter."""


_Name = Annotated[str, Field(max_length=253)]
Amount = Annotated[float, Field(ge=0, le=LARGEST_PLAUSIBLE, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class PodLoad:
    """What a pod has to do, with units. Zero where it does not hold the role."""

    encode_queued_work: dict[Modality, int] = field(default_factory=dict)  # by modality, in work units
    encode_running: int = 0
    encode_work_per_second: dict[Modality, float] = field(default_factory=dict)  # calibrated, by modality
    encode_busy_fraction: float = 0.0
    prefill_waiting_tokens: int = 0
    prefill_blocked_tokens: int = 0  # those of them that wait for media to be encoded
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
    feature_bytes_needed: int = (
        0  # those of them that requests need, and what requests wait for room for; the rest is cache
    )
    media_bytes_used: int = 0  # of media that are being encoded
    media_bytes_budget: int = 0
    itl_seconds: float = 0.0

    def fault(self) -> str | None:
        """Why these numbers cannot be true (no number, negative, absurdly large, more free than there is), or None."""
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
    """Encode work that no encoder has taken, by modality, as read `age_seconds` ago."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    age_seconds: Amount
    waiting_work: dict[Modality, float]


class GatewayQueue(BaseModel):
    """Work of requests that a gateway has not started yet because a pool lacks room for them, under the pool that lacks it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    encode_work: dict[Modality, Amount] = {}
    prompt_tokens: Annotated[int, Field(ge=0, le=LARGEST_PLAUSIBLE)] = 0
    sequences: Annotated[int, Field(ge=0, le=LARGEST_PLAUSIBLE)] = 0


class FirstTokens(BaseModel):
    """Time to the first token of the `requests` of the last `window_seconds`, at the percentile of the SLO."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    window_seconds: Amount
    requests: Annotated[int, Field(ge=0, le=LARGEST_PLAUSIBLE)]
    seconds: Amount

    @classmethod
    def of(cls, ttft_seconds: Iterable[float], percentile: int, window_seconds: float) -> Self:
        """The nearest-rank percentile of what was seen; 0 where nothing was."""
        seen = sorted(ttft_seconds)
        place = math.ceil(len(seen) * percentile / 100) - 1
        return cls(window_seconds=window_seconds, requests=len(seen), seconds=seen[place] if seen else 0.0)


class GatewayStatus(_Report):
    """What `/demand` of a gateway answers.

    `held`: requests by the role for which no pod is ready. `queue` is None where the queue cannot be read or there is no encoder pool.
    `keys_fault`: why the file of API keys cannot be used; empty if it can, or none is needed. `tls_fault`: the same of the TLS certificate.
    `missing_tenant`: that of `spec.gateway.auth.oidc.defaultTenant`, where the file in force has no such tenant. `issuer_fault`: why the keys
    of the issuer of tokens cannot be fetched. `picker_fault`: why its endpoint picker has ended, until it has run for a while again.
    `waiting`: what waits at the gateway itself for its turn.
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
