"""`mmd top`: current pools, queues, KV and decisions of a deployment, as its gateways report them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmd_cli.gateways import GatewaySnapshot, Snapshot, buckets

ROLES = ("encode", "prefill", "decode")


def quantile(now: Mapping[float, float], before: Mapping[float, float], share: float) -> float | None:
    """A quantile of what a histogram counted between two samples; None if it counted nothing.

    It is interpolated in its bucket, as Prometheus does.
    """
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


def facts(now: Snapshot, before: Snapshot, decisions: Mapping[str, str]) -> dict[str, Any]:
    """The displayed facts as data.

    Rates are over the time between the two snapshots, of the gateways in both.
    """
    pairs = [
        (gateway, _earlier(gateway, before.gateways[pod]))
        for pod, gateway in now.gateways.items()
        if pod in before.gateways
    ]

    def rate(name: str, **labels: str) -> float | None:
        rates = [
            (gateway.total(name, **labels) - earlier.total(name, **labels))
            / max(gateway.taken - earlier.taken, 1e-3)
            for gateway, earlier in pairs
        ]
        return sum(rates) if rates else None

    counts = buckets((gateway for gateway, _ in pairs), "mmd_ttft_seconds")
    earlier_counts = buckets((earlier for _, earlier in pairs), "mmd_ttft_seconds")
    ttft = {f"p{round(100 * share)}": quantile(counts, earlier_counts, share) for share in (0.5, 0.95)}
    return {
        "gateways": sorted(now.gateways),
        "missing": list(now.missing),
        "requests": {
            "running": sum(gateway.state["running"] for gateway in now.gateways.values()),
            "per_second": rate("mmd_requests_total"),
            "failed_per_second": _minus(rate("mmd_requests_total"), rate("mmd_requests_total", code="ok")),
            "output_tokens_per_second": rate("mmd_tokens_total", kind="output"),
            "ttft_seconds": ttft,
            "placed_again": now.total("mmd_retries_total"),
        },
        "encode_queue_jobs": now.largest("mmd_encode_queue_jobs", "modality"),
        "held": {role: now.total("mmd_gateway_held_sequences", role=role) for role in ROLES},
        "pods": [_pod(pod) for pod in now.pods],
        "decisions": dict(decisions),
    }


def _earlier(now: GatewaySnapshot, before: GatewaySnapshot) -> GatewaySnapshot:
    """The snapshot that a gateway's counters began from: zeros if it has started again."""
    is_same = now.state["incarnation"] == before.state["incarnation"]
    return before if is_same else replace(before, counters={})


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
    """Render the screen."""
    requests, held_by_role = seen["requests"], {role: n for role, n in seen["held"].items() if n}
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
    lines += [Text(words, style="yellow") for words in seen["missing"]]
    lines += [
        Text(f"requests waiting for a {role} pod: {n:.0f}", style="red") for role, n in held_by_role.items()
    ]
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
