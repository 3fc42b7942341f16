"""Records a request after its end: counts, latencies, its SLO outcome, its span. Changes nothing about requests."""

from __future__ import annotations

from typing import Any

from mmd_api.contract.errors import DeadlineError, TooManyRequestsError
from mmd_api.spec.observability import SloSpec
from mmd_workers.gateway.placement.timeline import Attempt, Timeline
from mmd_workers.observe.metrics import Metrics, exemplar
from mmd_workers.observe.tracing import Root, Tracing


def count_tokens(metrics: Metrics, usage: dict[str, Any]) -> None:
    """Count the tokens of a request, given its `Usage` as a dictionary."""
    for modality in ("text", "image", "video", "audio"):
        metrics.tokens.labels(f"prompt_{modality}").inc(usage["prompt_tokens_details"][f"{modality}_tokens"])
    metrics.tokens.labels("prompt_cached").inc(usage["prompt_tokens_details"]["cached_tokens"])
    metrics.tokens.labels("output").inc(usage["completion_tokens"])


def count_request(metrics: Metrics, slo: SloSpec, timeline: Timeline) -> None:
    """Count an ended request: its outcome, its latencies, and which promises of `slo` it kept."""
    modality = timeline.modality()
    metrics.requests.labels(modality, timeline.code).inc()
    trace = exemplar(timeline.trace_id)
    total_seconds = (timeline.last_token or timeline.finished) - timeline.arrived
    metrics.e2e.labels(modality).observe(total_seconds, trace)
    if timeline.first_token:
        metrics.ttft.labels(modality).observe(timeline.first_token - timeline.arrived, trace)
    if timeline.code != "ok":
        metrics.errors.labels(timeline.code).inc()
    for signal, kept in kept_promises(timeline, slo).items():
        metrics.slo.labels(signal, "kept" if kept else "missed").inc()


def end_trace(tracing: Tracing, timeline: Timeline, root: Root) -> None:
    """Close the request's span; workers record their own spans."""
    gateway_phases = [phase for pod, _, _, phase in timeline.phases if pod == "gateway"]
    tracing.record(root.carrier, gateway_phases)
    for attempt in timeline.attempts:
        root.event("placed", attempt.placed, **_facts_of(attempt))
    if timeline.first_token:
        root.event("first token", timeline.first_token)
    facts: dict[str, str | float] = {"modality": timeline.modality(), "status": timeline.status}
    if timeline.tenant:
        facts["tenant"] = timeline.tenant
    if timeline.usage:
        facts |= {name: timeline.usage[name] for name in ("prompt_tokens", "completion_tokens")}
    root.end(timeline.finished, "" if timeline.code == "ok" else timeline.code, **facts)


def _facts_of(attempt: Attempt) -> dict[str, str | float]:
    facts: dict[str, str | float] = {"pod": attempt.prefill_pod, "attempt": attempt.number}
    facts |= {f"estimated_{term}_seconds": seconds for term, seconds in attempt.estimated.items()}
    return facts | ({"ttft_seconds": attempt.ttft_seconds} if attempt.ttft_seconds else {})


def kept_promises(timeline: Timeline, slo: SloSpec) -> dict[str, bool]:
    """Tells for each promise in `slo` whether a finished request kept it: `ttft`, and `itl` as the mean over its tokens.

    Failures that the client caused (an invalid request, exceeded limits, hanging up, its own deadline) are not counted; any other failed request
    kept no promise.
    """
    if 400 <= timeline.status < 500 and timeline.code != TooManyRequestsError.code:
        return {}
    failed = timeline.code != "ok"
    # A pod whose clock is ahead ends the request before this clock reaches the deadline.
    at_deadline = timeline.code == DeadlineError.code or timeline.finished >= timeline.own_deadline
    if failed and timeline.own_deadline and at_deadline:
        return {}
    kept = {}
    if slo.ttft_milliseconds is not None:
        ttft_seconds = timeline.first_token - timeline.arrived
        kept["ttft"] = (
            not failed and bool(timeline.first_token) and ttft_seconds * 1000 <= slo.ttft_milliseconds
        )
    gaps = timeline.usage.get("completion_tokens", 0) / max(1, len(timeline.finish_reasons)) - 1
    if slo.itl_milliseconds is not None and (failed or gaps > 0):
        mean_gap_seconds = (timeline.last_token - timeline.first_token) / max(gaps, 1)
        kept["itl"] = not failed and mean_gap_seconds * 1000 <= slo.itl_milliseconds
    return kept
