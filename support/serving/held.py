"""What the pods of a deployment hold for requests, as their states and metrics have it: nothing once the last one has ended."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from mmd_cli.local.pods import LocalPod
from support.harness.promises import promise
from support.harness.waiting import wait_until
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
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=10).text):
        for sample in family.samples:
            for value in ("", *sample.labels.values()):
                found[sample.name][value] += sample.value
    return found


def _metrics_of(url: str) -> dict[str, dict[str, float]] | None:
    try:
        return scrape(url)
    except httpx.HTTPError:
        return None


def held(deployment: Deployment) -> list[str]:
    """What a pod still keeps for a request."""
    found = []
    for pod in workers(deployment):
        facts, metrics = load_of(deployment, pod), _metrics_of(pod.http_url)
        if not facts or metrics is None:
            found.append(f"{pod.name} does not answer")
            continue
        free = facts["kv_blocks_free"] == facts["kv_blocks_total"]
        names = (
            "decode_running",
            "decode_waiting",
            "prefill_waiting_requests",
            "kv_blocks_reserved",
            "encode_running",
        )
        found += [f"{pod.name} {name}={facts[name]}" for name in names if facts[name]]
        found += (
            []
            if free
            else [f"{pod.name} {facts['kv_blocks_free']} of {facts['kv_blocks_total']} blocks free"]
        )
        states = metrics["mmd_feature_used_bytes"]
        found += [
            f"{pod.name} {states[state]:.0f} bytes {state}"
            for state in ("registered", "encoding", "encoded", "merged")
            if states[state]
        ]
    for pod in deployment.pods("gateway"):
        its = _metrics_of(pod.admin_url)
        if its is None:
            found.append(f"{pod.name} does not answer")
            continue
        found += [f"{pod.name} {name}={its[name]['']:.0f}" for name in GATEWAY_FIGURES if its[name][""]]
    return found


def assert_nothing_held(deployment: Deployment) -> None:
    found: list[str] = []

    def nothing() -> bool:
        found[:] = held(deployment)
        return not found

    # Longer than a lease: a word that got lost with a message server costs its blocks until then.
    with suppress(AssertionError):
        wait_until(nothing, "nothing is held", seconds=75)
    promise(not found, f"still held: {found}")
