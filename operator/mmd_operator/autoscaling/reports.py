"""What pods answer when they are asked how they are, read as the autoscaler's numbers. What cannot be believed is refused by name.

Pure: takes the bytes of an HTTP answer and the name of the pod that was asked. Knows the JSON of workers and gateways, not how it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from mmd_api.pools import Role
from mmd_operator.autoscaling.types import PodLoad

WORKER_PATH = "/state"
GATEWAY_PATH = "/demand"
MAX_REPORT_BYTES = 256 * 1024
ReportedState = Literal["loading", "ready", "draining", "drained"]


class ReportError(ValueError):
    """The answer is not this pod's report; the message says why, and the answer counts for nothing."""


class _Report(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    pod: str
    revision: str


class _Load(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    encode_queued_work: dict[str, float] = {}
    encode_work_per_second: dict[str, float] = {}
    encode_busy_fraction: float = 0.0
    prefill_waiting_tokens: float = 0.0
    prefill_blocked_tokens: float = 0.0
    prefill_tokens_per_second: float = 0.0
    decode_running: float = 0.0
    decode_waiting: float = 0.0
    decode_max_sequences: float = 0.0
    kv_blocks_total: float = 0.0
    kv_blocks_free: float = 0.0
    itl_seconds: float = 0.0


class _Worker(_Report):
    state: ReportedState
    load: _Load


class _Queue(BaseModel):
    age_seconds: float
    waiting_work: dict[str, float]


class _FirstTokens(BaseModel):
    window_seconds: float
    requests: int
    seconds: float


class _Gateway(_Report):
    held: dict[Role, int] = {}
    queue: _Queue | None = None
    ttft: _FirstTokens


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """State and load of a worker."""

    state: ReportedState
    load: PodLoad


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """What waits at a gateway.

    `held`: requests by the role that is missing. `waiting_work`: encode work in the queue that no encoder has taken, by
    modality, `queue_age_seconds` old; None where the queue cannot be read. `ttft_seconds` is over the `requests` of the last
    `window_seconds`, at the percentile of the SLO.
    """

    held: Mapping[Role, int]
    waiting_work: Mapping[str, float] | None
    queue_age_seconds: float
    window_seconds: float
    requests: int
    ttft_seconds: float


def worker_report(answer: bytes, pod: str, revision: str) -> WorkerReport:
    """Read a worker's `/state`.

    Raises:
        ReportError: no such report, or another pod's or another pipeline revision's.
    """
    found = _read(_Worker, answer, pod, revision)
    load = PodLoad(**found.load.model_dump())
    if fault := load.fault():
        raise ReportError(f"pod {pod} reports what cannot be ({fault})")
    return WorkerReport(found.state, load)


def gateway_report(answer: bytes, pod: str, revision: str) -> GatewayReport:
    """Read a gateway's `/demand`.

    Raises:
        ReportError: no such report, or another pod's or another pipeline revision's.
    """
    found = _read(_Gateway, answer, pod, revision)
    queue, ttft = found.queue, found.ttft
    return GatewayReport(
        held=found.held,
        waiting_work=queue.waiting_work if queue else None,
        queue_age_seconds=queue.age_seconds if queue else 0.0,
        window_seconds=ttft.window_seconds,
        requests=ttft.requests,
        ttft_seconds=ttft.seconds,
    )


_R = TypeVar("_R", bound=_Report)


def _read(kind: type[_R], answer: bytes, pod: str, revision: str) -> _R:
    if len(answer) > MAX_REPORT_BYTES:
        raise ReportError(f"pod {pod} answers with more than {MAX_REPORT_BYTES} bytes")
    try:
        found = kind.model_validate_json(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise ReportError(f"pod {pod} answers garbage ({where}: {first['msg']})") from error
    if found.pod != pod:
        raise ReportError(f"pod {pod} answers as pod {found.pod}")
    if found.revision != revision:
        raise ReportError(f"pod {pod} is of revision {found.revision}, not {revision}")
    return found
