"""`mmd top`: pools, queues, KV and decisions of a deployment as they are now, from what its gateway reports of every pod."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmd_api.contract import paths
from mmd_cli.errors import CommandError

ROLES = ("encode", "prefill", "decode")
TIMEOUT_SECONDS = 5.0


class UnreachableError(CommandError):
    """The gateway does not respond."""


@dataclass(frozen=True, slots=True)
class GatewaySnapshot:
    """What a gateway returned at one time: its view of the pods, and its own counters (name and labels → value)."""

    taken: float
    state: Mapping[str, Any]
    counters: Mapping[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """The sum over the series of a metric that have these labels."""
        wanted = set(labels.items())
        return sum(value for (n, have), value in self.counters.items() if n == name and wanted <= set(have))

    def buckets(self, name: str) -> dict[float, float]:
        """The cumulative counts of a histogram by upper bound, over all labels."""
        found: dict[float, float] = defaultdict(float)
        for (n, labels), value in self.counters.items():
            if n == f"{name}_bucket":
                found[float(dict(labels)["le"])] += value
        return found


def look(admin_url: str) -> GatewaySnapshot:
    """Ask a gateway at its admin port.

    Raises:
        UnreachableError: it does not answer.
    """
    try:
        with httpx.Client(base_url=admin_url, timeout=TIMEOUT_SECONDS) as client:
            state = client.get(paths.GATEWAY_STATE).raise_for_status().json()
            text = client.get(paths.METRICS).raise_for_status().text
    except (httpx.HTTPError, ValueError) as error:
        raise UnreachableError(
            f"no gateway responded at {admin_url} ({error}); check that it is its admin port"
        ) from error
    counters = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return GatewaySnapshot(time.time(), state, counters)


def quantile(now: Mapping[float, float], before: Mapping[float, float], share: float) -> float | None:
    """A quantile of what a histogram counted between two looks, interpolated in its bucket as Prometheus does; None: nothing."""
    counts = sorted((bound, count - before.get(bound, 0.0)) for bound, count in now.items())
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= share * total:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (share * total - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low


def facts(
    now: GatewaySnapshot, before: GatewaySnapshot | None, decisions: Mapping[str, str]
) -> dict[str, Any]:
    """What is shown, as data; rates are over the time between the two looks, or since the start."""
    then = before or GatewaySnapshot(now.state.get("sent", now.taken), {})
    seconds = max(now.taken - then.taken, 1e-3) if before else None

    def rate(name: str, **labels: str) -> float | None:
        return None if seconds is None else (now.total(name, **labels) - then.total(name, **labels)) / seconds

    ttft = {
        f"p{round(100 * share)}": quantile(
            now.buckets("mmd_ttft_seconds"), then.buckets("mmd_ttft_seconds"), share
        )
        for share in (0.5, 0.95)
    }
    return {
        "requests": {
            "running": now.state["running"],
            "per_second": rate("mmd_requests_total"),
            "failed_per_second": _minus(rate("mmd_requests_total"), rate("mmd_requests_total", code="ok")),
            "output_tokens_per_second": rate("mmd_tokens_total", kind="output"),
            "ttft_seconds": ttft,
            "placed_again": now.total("mmd_retries_total"),
        },
        "encode_queue_jobs": {
            dict(labels)["modality"]: value
            for (name, labels), value in sorted(now.counters.items())
            if name == "mmd_encode_queue_jobs"
        },
        "held": {role: now.total("mmd_gateway_held_sequences", role=role) for role in ROLES},
        "pods": [_pod(pod) for pod in now.state["pods"]],
        "decisions": dict(decisions),
    }


def _minus(whole: float | None, part: float | None) -> float | None:
    return None if whole is None or part is None else whole - part


def _pod(pod: Mapping[str, Any]) -> dict[str, Any]:
    load = pod["load"]
    total = load["kv_blocks_total"]
    return {
        "pod": pod["pod"],
        "roles": pod["roles"],
        "state": pod["state"],
        "encode_waiting_work": sum(load["encode_queued_work"].values()),
        "encode_busy": load["encode_busy_fraction"] if "encode" in pod["roles"] else None,
        "prefill_waiting_tokens": load["prefill_waiting_tokens"],
        "running": load["decode_running"],
        "waiting": load["decode_waiting"],
        "places": load["decode_max_sequences"],
        "kv_used": (total - load["kv_blocks_free"]) / total if total else None,
        "step_seconds": load["itl_seconds"],
    }


def rendered(name: str, seen: Mapping[str, Any]) -> RenderableType:
    """The screen."""
    requests, held = seen["requests"], {role: n for role, n in seen["held"].items() if n}
    head = Text.assemble(
        (name, "bold"),
        f"   {requests['running']} in flight"
        f"   {_number(requests['per_second'], '.1f')} requests/s"
        f"   {_number(requests['failed_per_second'], '.1f')} failed/s"
        f"   {_number(requests['output_tokens_per_second'], '.0f')} tokens/s"
        f"   first token p50 {_time(requests['ttft_seconds']['p50'])}, p95 {_time(requests['ttft_seconds']['p95'])}"
        f"   placed again {requests['placed_again']:.0f}",
    )
    queue = ", ".join(f"{kind} {jobs:.0f}" for kind, jobs in seen["encode_queue_jobs"].items() if jobs)
    lines: list[RenderableType] = [head, Text(f"encode queue: {queue or 'empty'}", style="dim")]
    lines += [Text(f"requests waiting for a {role} pod: {n:.0f}", style="red") for role, n in held.items()]
    table = Table(box=None, pad_edge=False)
    for heading in ("pod", "roles", "state", "waiting", "running", "busy", "KV", "step"):
        table.add_column(heading, justify="left" if heading in ("pod", "roles", "state") else "right")
    for pod in seen["pods"]:
        waiting = [f"{pod['encode_waiting_work']} work"] if pod["encode_waiting_work"] else []
        waiting += [f"{pod['prefill_waiting_tokens']} tokens"] if pod["prefill_waiting_tokens"] else []
        waiting += [f"{pod['waiting']} sequences"] if pod["waiting"] else []
        table.add_row(
            pod["pod"],
            "+".join(pod["roles"]),
            Text(pod["state"], style="green" if pod["state"] == "ready" else "yellow"),
            ", ".join(waiting) or "0",
            f"{pod['running']}/{pod['places']}" if pod["places"] else "–",
            _bar(pod["encode_busy"]),
            _bar(pod["kv_used"]),
            _time(pod["step_seconds"] or None),
        )
    lines.append(table)
    lines += [Text(f"autoscaler: {words}", style="dim") for words in seen["decisions"].values()]
    return Group(*lines)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _bar(share: float | None) -> str:
    if share is None:
        return "–"
    full = round(8 * min(1.0, share))
    return f"{'█' * full}{'·' * (8 - full)} {share:4.0%}"
