"""Service level objectives, logs, traces and heartbeats."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.rule import Rule


def _slo_order(s: SloSpec) -> bool:
    return (
        s.ttft_milliseconds is None or s.itl_milliseconds is None or s.itl_milliseconds <= s.ttft_milliseconds
    )


def _heartbeat_timeout(o: ObservabilitySpec) -> bool:
    return o.heartbeat_timeout_milliseconds >= 2 * o.heartbeat_milliseconds


SLO = (
    Rule(
        field="itlMilliseconds",
        cel="!has(self.ttftMilliseconds) || !has(self.itlMilliseconds)"
        " || self.itlMilliseconds <= self.ttftMilliseconds",
        holds=_slo_order,
        problem="the inter-token latency target exceeds the time-to-first-token target",
        remedy="lower itlMilliseconds or raise ttftMilliseconds",
    ),
)


OBSERVABILITY = (
    Rule(
        field="heartbeatTimeoutMilliseconds",
        cel="self.heartbeatTimeoutMilliseconds >= 2 * self.heartbeatMilliseconds",
        holds=_heartbeat_timeout,
        problem="a single late heartbeat would mark a pod as lost",
        remedy="set heartbeatTimeoutMilliseconds to at least twice heartbeatMilliseconds",
    ),
)


class SloSpec(ApiModel, rules=SLO):
    """Service level objectives. The autoscaler sizes the pools to meet them."""

    ttft_milliseconds: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    """Time to first token."""
    itl_milliseconds: Annotated[int, Field(ge=1, le=600_000)] | None = None
    """Inter-token latency."""
    percentile: Literal[50, 90, 95, 99] = 95
    """Percentile of requests that must meet the objectives."""


class ObservabilitySpec(ApiModel, rules=OBSERVABILITY):
    """Logging, tracing and heartbeats."""

    log_level: Literal["Debug", "Info", "Warning", "Error"] = "Info"
    """Minimum log level."""
    otlp_endpoint: Annotated[str, Field(max_length=512, pattern=r"^https?://\S+$")] | None = None
    """OTLP/HTTP endpoint for traces, such as http://collector:4318. If not set, traces are not exported."""
    heartbeat_milliseconds: Annotated[int, Field(ge=100, le=10_000)] = 500
    """Interval between heartbeats of a pod."""
    heartbeat_timeout_milliseconds: Annotated[int, Field(ge=300, le=60_000)] = 2500
    """Time without a heartbeat after which a pod is considered lost."""
