"""What only a gateway counts, beside the catalogue that every process shares; on the same registry."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from mmd_workers.observe.metrics import Metrics


class GatewayMetrics:
    """`shared` is the catalogue. Gauges are set when they are scraped. `role`: encode, prefill, decode."""

    def __init__(self, shared: Metrics) -> None:
        self.shared = shared
        registry = shared.registry
        self.sequences = Gauge(
            "mmd_gateway_sequences", "Sequences placed or waiting for a pod", registry=registry
        )
        self.held = Gauge(
            "mmd_gateway_sequences_held",
            "Sequences that wait for a pod, by the role that is missing",
            ["role"],
            registry=registry,
        )
        self.duplicates = Counter(
            "mmd_gateway_duplicate_tokens", "Tokens that arrived more than once", registry=registry
        )
        self.media_budget = Gauge(
            "mmd_gateway_media_budget_bytes", "Bound of mmd_media_held_bytes", registry=registry
        )
        self.media_items = Gauge("mmd_gateway_media_items", "Distinct media held", registry=registry)
        self.media_waiting = Gauge(
            "mmd_gateway_media_waiting_requests", "Requests that wait for media memory", registry=registry
        )
