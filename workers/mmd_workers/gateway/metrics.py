"""What the gateway counts. Names carry units; labels come from small closed sets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class GatewayMetrics:
    """Instruments of one gateway on its own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter("mmd_gateway_requests", "Finished requests", ["status"], registry=registry)
        self.ttft = Histogram(
            "mmd_gateway_ttft_seconds",
            "Arrival to first token",
            ["modality"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.itl = Histogram(
            "mmd_gateway_itl_seconds",
            "Mean time between a sequence's tokens",
            buckets=_ITL,
            registry=registry,
        )
        self.total = Histogram(
            "mmd_gateway_request_seconds", "Arrival to end", buckets=_SECONDS, registry=registry
        )
        self.prompt_tokens = Counter(
            "mmd_gateway_prompt_tokens", "Prompt tokens", ["modality"], registry=registry
        )
        self.output_tokens = Counter("mmd_gateway_output_tokens", "Tokens sent to clients", registry=registry)
        self.running = Gauge("mmd_gateway_requests_running", "Requests in hand", registry=registry)
        self.sequences = Gauge(
            "mmd_gateway_sequences", "Sequences placed or waiting for a pod", registry=registry
        )
        self.held = Gauge(
            "mmd_gateway_requests_held",
            "Sequences that wait for a pod, by the role that is missing",
            ["role"],
            registry=registry,
        )
        self.retries = Gauge(
            "mmd_gateway_retries_total", "Placements after a worker was lost or gave up", registry=registry
        )
        self.duplicates = Gauge(
            "mmd_gateway_duplicate_tokens_total", "Tokens that arrived twice", registry=registry
        )
        self.media_bytes = Gauge(
            "mmd_gateway_media_bytes", "Bytes reserved for bodies and media", registry=registry
        )
        self.media_budget = Gauge(
            "mmd_gateway_media_budget_bytes", "Bound of mmd_gateway_media_bytes", registry=registry
        )
        self.media_items = Gauge("mmd_gateway_media_items", "Distinct media held", registry=registry)
        self.media_waiting = Gauge(
            "mmd_gateway_media_waiting", "Requests that wait for media memory", registry=registry
        )
