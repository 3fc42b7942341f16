"""Finds what the pods of a deployment hold for requests, by their states and metrics.

It is nothing once the last request has ended.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from mmd_cli.local.pods import LocalPod
from support.harness.promises import promise
from support.harness.waiting import DEADLINE_SECONDS, wait_until
from support.serving.local_deployment import Deployment

WORKERS = ("encoder", "prefill", "decode")
GATEWAY_FIGURES = (
    "mmd_requests_running",
    "mmd_gateway_sequences",
    "mmd_gateway_media_items",
    "mmd_media_held_bytes",
)


def workers(deployment: Deployment) -> list[LocalPod]:
    return [pod for component in WORKERS for pod in deployment.pods(component)]


def load_of(deployment: Deployment, pod: LocalPod) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = deployment.state(pod)["load"]
    except httpx.HTTPError:
        return {}
    return facts


def scrape(url: str) -> dict[str, dict[str, float]]:
    """Metric name → sums by each value of each label; "" has the sum of all."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=DEADLINE_SECONDS).text):
        for sample in family.samples:
            for value in ("", *sample.labels.values()):
                sums[sample.name][value] += sample.value
    return sums


def _metrics_of(url: str) -> dict[str, dict[str, float]] | None:
    try:
        return scrape(url)
    except httpx.HTTPError:
        return None


def held(deployment: Deployment) -> list[str]:
    """Everything that pods still keep for requests."""
    leftovers = []
    for pod in workers(deployment):
        facts, metrics = load_of(deployment, pod), _metrics_of(pod.http_url)
        if not facts or metrics is None:
            leftovers.append(f"{pod.name} does not answer")
            continue
        free = facts["kv_blocks_free"] == facts["kv_blocks_total"]
        names = (
            "decode_running",
            "decode_waiting",
            "prefill_waiting_requests",
            "kv_blocks_reserved",
            "encode_running",
        )
        leftovers += [f"{pod.name} {name}={facts[name]}" for name in names if facts[name]]
        leftovers += (
            []
            if free
            else [f"{pod.name} {facts['kv_blocks_free']} of {facts['kv_blocks_total']} blocks free"]
        )
        states = metrics["mmd_feature_used_bytes"]
        leftovers += [
            f"{pod.name} {states[state]:.0f} bytes {state}"
            for state in ("registered", "encoding", "encoded", "merged")
            if states[state]
        ]
    for pod in deployment.pods("gateway"):
        gateway_metrics = _metrics_of(pod.admin_url)
        if gateway_metrics is None:
            leftovers.append(f"{pod.name} does not answer")
            continue
        leftovers += [
            f"{pod.name} {name}={gateway_metrics[name]['']:.0f}"
            for name in GATEWAY_FIGURES
            if gateway_metrics[name][""]
        ]
    return leftovers


def assert_nothing_held(deployment: Deployment) -> None:
    leftovers: list[str] = []

    def nothing() -> bool:
        leftovers[:] = held(deployment)
        return not leftovers

    # Longer than a lease: until it ends, a message lost with a message server keeps blocks held.
    with suppress(AssertionError):
        wait_until(nothing, "nothing is held", seconds=75)
    promise(not leftovers, f"still held: {leftovers}")
