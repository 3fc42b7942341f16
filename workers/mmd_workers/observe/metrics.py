"""Every metric of every process, as one table: name (its ending is the unit), help, labels. Knows nothing of what it counts.

Labels take values from small fixed sets only (`LABELS`): never a request, a URL, a digest or a message.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

LABELS: dict[str, str] = {
    "modality": "text, image, video, audio",
    "code": "`MmdError.code`, or ok",
    "phase": "names of wire.messages.Phase",
    "link": "embedding, kv",
    "direction": "sent, received",
    "reason": "short fixed words in the code that counts",
    "state": "states of the thing in the metric's name",
    "outcome": "hit, miss",
    "cache": "feature",
    "kind": "token kinds: prompt_text, prompt_image, prompt_video, prompt_audio, prompt_cached, output",
}
SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LONG_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STEP_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The catalogue; one object per process, on a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge, histogram = self._counter, self._gauge, self._histogram

        # What clients see (gateway). `modality` is the heaviest one of the request.
        self.requests = counter("mmd_requests_total", "Requests finished, by how", "modality", "code")
        self.requests_running = gauge("mmd_requests_running", "Requests accepted and not finished")
        self.ttft = histogram("mmd_ttft_seconds", "Arrival to first token", LONG_SECONDS, "modality")
        self.itl = histogram("mmd_itl_seconds", "Between two tokens of a stream", SHORT_SECONDS, "modality")
        self.e2e = histogram("mmd_e2e_seconds", "Arrival to last token", LONG_SECONDS, "modality")
        self.tokens = counter("mmd_tokens_total", "Tokens in and out of finished requests", "kind")
        self.retries = counter("mmd_retries_total", "Requests placed again after a worker failed", "reason")
        self.fetch_bytes = counter(
            "mmd_media_fetched_bytes_total", "Media received from clients and URLs", "modality"
        )
        self.held_bytes = gauge("mmd_media_held_bytes", "Media held until their encode jobs are done")

        # Where the time goes (every pod): queue, encode, embedding_transfer, prefill, kv_transfer, decode.
        self.phase = histogram("mmd_phase_seconds", "Length of a phase", LONG_SECONDS, "phase", "modality")

        # Encode role.
        self.encode_queued = gauge(
            "mmd_encode_queued_work", "Work units waiting (patches, frames)", "modality"
        )
        self.encode_work = counter(
            "mmd_encode_work_total", "Work units encoded (patches, frames)", "modality"
        )
        self.encode_busy = counter("mmd_encode_busy_seconds_total", "Time the towers were running")
        self.encode_jobs = counter(
            "mmd_encode_jobs_total", "Encode jobs finished, by how", "modality", "code"
        )
        self.redeliveries = counter(
            "mmd_encode_redeliveries_total", "Encode jobs that came again", "modality"
        )
        self.decode_failures = counter(
            "mmd_media_decode_failures_total", "Media that broke decoding", "modality", "reason"
        )

        # Features and caches.
        self.feature_transitions = counter(
            "mmd_feature_transitions_total", "Features that entered a state", "state"
        )
        self.feature_bytes = gauge("mmd_feature_used_bytes", "Features held now", "state")
        self.feature_budget = gauge("mmd_feature_budget_bytes", "Features that may be held")
        self.cache = counter("mmd_cache_lookups_total", "Lookups, by outcome", "cache", "outcome")
        self.cache_evictions = counter("mmd_cache_evictions_total", "Entries dropped for room", "cache")
        self.cache_bytes = gauge("mmd_cache_used_bytes", "Bytes held by a cache", "cache")

        # Transfers.
        self.transfer_bytes = counter(
            "mmd_transfer_bytes_total", "Payload moved between pods", "link", "direction"
        )
        self.transfer = histogram(
            "mmd_transfer_seconds", "First byte to acknowledgement", SHORT_SECONDS, "link"
        )
        self.transfer_failures = counter(
            "mmd_transfer_failures_total", "Transfers that failed", "link", "reason"
        )

        # Prefill and decode roles.
        self.kv_blocks = gauge("mmd_kv_blocks", "Blocks of the KV pool", "state")
        self.prefill_waiting = gauge("mmd_prefill_waiting_tokens", "Prompt tokens not yet prefilled")
        self.prefill_tokens = counter("mmd_prefill_tokens_total", "Prompt tokens computed")
        self.sequences = gauge("mmd_sequences", "Sequences of the engine", "state")
        self.step = histogram("mmd_step_seconds", "One engine step", SHORT_SECONDS)
        self.step_sequences = histogram("mmd_step_sequences", "Sequences in an engine step", STEP_SEQUENCES)

        # The process.
        self.nats_reconnects = counter("mmd_nats_reconnects_total", "Times the bus connection was made anew")
        self.loaded_bytes = gauge("mmd_model_loaded_bytes", "Weights loaded by this process")
        self.errors = counter("mmd_errors_total", "Typed errors raised, by code", "code")
        self.build = Info("mmd_build", "Version, revision and roles of this process", registry=self.registry)

    def expose(self) -> bytes:
        """The text that a Prometheus server scrapes."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)
