"""Every metric of every process, as one table: name (its ending is the unit), meaning, labels. Knows nothing of what it counts.

Labels take values from small fixed sets only: never a request, a URL, a digest or a message. `docs/metrics.md` is made from
this table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from prometheus_client import Info

from mmd_api.metric_table import LONG_SECONDS, SHORT_SECONDS, MetricTable

LABELS: dict[str, str] = {
    "modality": "text, image, video, audio: of a request, its heaviest",
    "code": "`MmdError.code`, or ok",
    "phase": "queue, encode, embedding_transfer, prefill, kv_transfer, decode",
    "link": "embedding, kv",
    "direction": "sent, received",
    "role": "encode, prefill, decode",
    "cache": "feature (encoded media, on the pod that encodes), store (embeddings, on the pod that prefills)",
    "kind": "prompt_text, prompt_image, prompt_video, prompt_audio, prompt_cached, output",
    "signal": "ttft, itl",
}
STEP_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics(MetricTable):
    """The catalogue; one object per process, on a registry of its own.

    `roles`: of gateway, encode, prefill, decode; what belongs to others can be fed and is not exposed. Empty: everything is.
    """

    LABELS: ClassVar[Mapping[str, str]] = LABELS

    def __init__(self, roles: Collection[str] = ()) -> None:
        super().__init__()
        self._roles = set(roles)
        counter, gauge, histogram = self._counter, self._gauge, self._histogram

        self._begin("Requests, as clients see them (gateway)", "gateway")
        self.requests = counter("mmd_requests_total", "Requests finished, by how", "modality", "code")
        self.requests_running = gauge("mmd_requests_running", "Requests accepted and not finished")
        self.ttft = histogram("mmd_ttft_seconds", "Arrival to first token", LONG_SECONDS, "modality")
        self.itl = histogram(
            "mmd_itl_seconds",
            "Between two tokens of a stream, as they reach the gateway",
            SHORT_SECONDS,
            "modality",
        )
        self.e2e = histogram("mmd_e2e_seconds", "Arrival to last token", LONG_SECONDS, "modality")
        self.tokens = counter("mmd_tokens_total", "Tokens in and out of finished requests", "kind")
        self.slo = counter(
            "mmd_slo_requests_total",
            "Requests measured against spec.slo; one that fails through no fault of its client has missed it",
            "signal",
            "outcome: kept, missed",
        )
        self.slo_target = gauge(
            "mmd_slo_target_seconds", "What spec.slo promises; absent without one", "signal"
        )
        self.slo_objective = gauge(
            "mmd_slo_objective_ratio",
            "Share of requests that spec.slo promises it to; absent without one",
            "signal",
        )
        self.retries = counter(
            "mmd_retries_total",
            "Requests placed again after a placement was lost",
            "reason: pod_lost, gave_up, gap, silent, forgotten",
            moves="trouble",
        )
        self.migrations = counter(
            "mmd_migrations_total",
            "Of those, requests that went on elsewhere with the tokens they already had",
            "reason: pod_lost, gave_up, gap, silent, forgotten",
            moves="trouble",
        )
        self.gateway_sequences = gauge("mmd_gateway_sequences", "Sequences placed or waiting for a pod")
        self.gateway_held = gauge(
            "mmd_gateway_held_sequences", "Sequences that wait for a pod, by the role that is missing", "role",
            moves="trouble",
        )  # fmt: skip
        self.duplicates = counter(
            "mmd_gateway_duplicate_tokens_total", "Tokens that arrived more than once", moves="trouble"
        )
        self.gateway_pods = gauge(
            "mmd_gateway_pods",
            "Pods that this gateway hears of, by role; one with two roles counts twice",
            "role",
            "state: loading, ready, draining, drained",
        )

        self._begin("Media (gateway)", "gateway")
        self.fetch_bytes = counter(
            "mmd_media_fetched_bytes_total", "Media received from clients and URLs", "modality"
        )
        self.held_bytes = gauge("mmd_media_held_bytes", "Media held until their encode jobs are done")
        self.media_budget = gauge("mmd_media_budget_bytes", "Bound of mmd_media_held_bytes")
        self.media_items = gauge("mmd_gateway_media_items", "Distinct media held")
        self.media_waiting = gauge(
            "mmd_media_waiting_requests", "Requests that wait for media memory", moves="trouble"
        )

        self._begin(
            "The queue of encode jobs (gateway, read off the stream; absent while it cannot be read)",
            "gateway",
        )
        self.queue_jobs = gauge("mmd_encode_queue_jobs", "Encode jobs published and not done", "modality")
        self.queue_work = gauge(
            "mmd_encode_queue_work", "Work in them (patches, frames), to two digits", "modality"
        )

        self._begin("Where the time goes (the pod that ends the phase)", "encode", "prefill", "decode")
        self.phase = histogram("mmd_phase_seconds", "Length of a phase", LONG_SECONDS, "phase", "modality")
        self.backlog = gauge(
            "mmd_backlog_seconds",
            "Work waiting on this pod ÷ its measured throughput",
            "role: encode, prefill",
        )

        self._begin("Encode role", "encode")
        self.encode_queued = gauge(
            "mmd_encode_queued_work", "Work taken by this pod and not encoded (patches, frames)", "modality"
        )
        self.encode_work = counter("mmd_encode_work_total", "Work encoded (patches, frames)", "modality")
        self.encode_rate = gauge(
            "mmd_encode_work_per_second", "Measured throughput while the tower runs", "modality"
        )
        self.encode_busy = counter("mmd_encode_busy_seconds_total", "Time the towers were running")
        self.encode_jobs = counter(
            "mmd_encode_jobs_total", "Encode jobs finished, by how", "modality", "code"
        )
        self.redeliveries = counter(
            "mmd_encode_redeliveries_total", "Encode jobs that came again", "modality", moves="trouble"
        )
        self.decode_failures = counter(
            "mmd_media_decode_failures_total",
            "Media that broke decoding",
            "modality",
            "reason: bad_media, unsupported_input, count_mismatch, overloaded, internal",
            moves="trouble",
        )

        self._begin("Features and caches", "encode", "prefill")
        self.feature_transitions = counter(
            "mmd_feature_transitions_total",
            "Features that entered a state",
            "state: registered, encoding, encoded, merged, prefilled, discarded",
        )
        self.feature_bytes = gauge(
            "mmd_feature_used_bytes", "Features reserved or held now", "state: registered … discarded"
        )
        self.feature_budget = gauge("mmd_feature_budget_bytes", "Features that may be held")
        self.cache = counter("mmd_cache_lookups_total", "Lookups, by outcome", "cache", "outcome: hit, miss")
        self.cache_evictions = counter(
            "mmd_cache_evictions_total", "Entries dropped for room", "cache: feature", moves="trouble"
        )
        self.cache_bytes = gauge("mmd_cache_used_bytes", "Bytes held by a cache", "cache: feature")
        self.prefix_tokens = counter(
            "mmd_prefix_cache_tokens_total",
            "Tokens of admitted prompts, by whether their KV was in the prefix cache",
            "outcome: hit, miss",
        )

        self._begin("Transfers between pods", "encode", "prefill", "decode")
        self.transfer_bytes = counter(
            "mmd_transfer_bytes_total", "Payload moved between pods", "link", "direction"
        )
        self.transfer = histogram(
            "mmd_transfer_seconds",
            "First byte to last, of one feature or one sequence",
            SHORT_SECONDS,
            "link",
        )
        self.transfer_failures = counter(
            "mmd_transfer_failures_total",
            "Transfers that failed",
            "link",
            "reason: link_failed, peer_lost, overloaded, too_large, lease_expired, lease_ended, deadline_exceeded",
            moves="trouble",
        )
        self.offers = counter(
            "mmd_embedding_offers_total",
            "Features offered to a receiver, by its verdict",
            "outcome: sent, have, refused",
        )
        self.credit = gauge(
            "mmd_embedding_credit_bytes",
            "Room that this receiver has granted to transfers under way; seen above zero when they are slow",
            moves="trouble",
        )
        self.leases = counter(
            "mmd_kv_leases_total",
            "Leases on KV blocks, by what became of them",
            "outcome: granted, refused, committed, released, expired, lost",
        )
        self.inbound = gauge(
            "mmd_kv_inbound_sequences",
            "Sequences granted blocks and not yet committed; seen above zero when hand-overs are slow",
            moves="trouble",
        )

        self._begin("Prefill and decode roles", "prefill", "decode")
        self.kv_blocks = gauge("mmd_kv_blocks", "Blocks of the KV pool", "state: free, reserved, used")
        self.prefill_waiting = gauge(
            "mmd_prefill_waiting_tokens",
            "Prompt tokens not yet prefilled, by the pool they wait for: this one, or encoders first",
            "role: prefill, encode",
        )
        self.prefill_tokens = counter("mmd_prefill_tokens_total", "Prompt tokens computed")
        self.prefill_rate = gauge("mmd_prefill_tokens_per_second", "Measured throughput while prompts run")
        self.sequences = gauge(
            "mmd_sequences", "Sequences of the engine", "state: waiting, running, held, reserved"
        )
        self.max_sequences = gauge("mmd_max_sequences", "Sequences that the engine runs at once")
        self.step = histogram("mmd_step_seconds", "One engine step", SHORT_SECONDS)
        self.step_sequences = histogram("mmd_step_sequences", "Sequences in an engine step", STEP_SEQUENCES)
        self.preemptions = counter(
            "mmd_preemptions_total", "Sequences that gave their KV up to others", moves="trouble"
        )

        self._begin("The process (every pod)")
        self.pod_state = gauge(
            "mmd_pod_state", "1 for the state that the pod is in", "state: loading, ready, draining, drained"
        )
        self.nats_connected = gauge("mmd_nats_connected", "1 while the bus connection stands")
        self.nats_round_trip = histogram(
            "mmd_nats_round_trip_seconds", "To the message server and back, once a second", SHORT_SECONDS
        )
        self.nats_reconnects = counter(
            "mmd_nats_reconnects_total", "Times the bus connection was made anew", moves="trouble"
        )
        self.nats_lost = counter(
            "mmd_nats_messages_lost_total",
            "Messages that did not do their work here",
            "reason: malformed, dropped, handler: came faster than they were read, or the code that took them failed",
            moves="trouble",
        )
        self.loaded_bytes = gauge("mmd_model_loaded_bytes", "Weights loaded by this process")
        self.errors = counter("mmd_errors_total", "Typed errors raised, by code", "code", moves="trouble")
        self.build = Info("mmd_build", "Version, revision and roles of this process", registry=self.registry)
        labels = (("version", "of this software"), ("revision", "of the pipeline"), ("roles", "joined by +"))
        self._enter("mmd_build_info", "info", "Version, revision and roles of this process", labels, "load")
        self._process()

    def _begin(self, section: str, *roles: str) -> None:
        """What follows belongs to `section`, and to pods with one of `roles` (none: to all)."""
        self._open(section, exposed=not (roles and self._roles) or not self._roles.isdisjoint(roles))


def exemplar(trace_id: str) -> dict[str, str] | None:
    """What ties an observation to a trace, for `Histogram.observe`."""
    return {"trace_id": trace_id} if trace_id else None
