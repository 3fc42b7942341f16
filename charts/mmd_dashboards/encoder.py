"""The dashboard Encoder and media: from the bytes of a medium to its embeddings."""

from __future__ import annotations

from mmd_dashboards.panels import Board, Panel, Query, Row
from mmd_dashboards.queries import (
    BUSY,
    level_by,
    of,
    quantile,
    rate_by,
    share,
    trouble_by,
)

ENCODER = Board(
    "encoder",
    "Encoder and media",
    "From the bytes of a medium to its embeddings.",
    (
        Row(
            "Media",
            (
                Panel(
                    "Media received",
                    "Bytes from clients and from URLs.",
                    "Bps",
                    (rate_by("mmd_media_fetched_bytes_total", "modality"),),
                    "stack",
                ),
                Panel(
                    "Media held by gateways",
                    "Until their encode jobs are done. At the maximum, new requests wait.",
                    "bytes",
                    (
                        Query(f"sum({of('mmd_media_held_bytes')})", "held"),
                        Query(f"sum({of('mmd_media_budget_bytes')})", "bound"),
                    ),
                ),
                Panel(
                    "Requests waiting for media memory",
                    "Above zero: uploads arrive faster than they are encoded.",
                    "short",
                    (Query(f"sum({of('mmd_media_waiting_requests')})", "requests"),),
                ),
                Panel(
                    "Memory reserved for answers",
                    "At their full length, until they are sent. At the maximum, new requests wait.",
                    "bytes",
                    (
                        Query(f"sum({of('mmd_answer_reserved_bytes')})", "reserved"),
                        Query(f"sum({of('mmd_answer_budget_bytes')})", "bound"),
                    ),
                ),
                Panel(
                    "Requests waiting for answer memory",
                    "Above zero: lower max_tokens, n or top_logprobs, or raise spec.gateway.resources.memory.",
                    "short",
                    (Query(f"sum({of('mmd_answer_waiting_requests')})", "requests"),),
                ),
                Panel(
                    "Media that failed to decode",
                    "By reason, on pods that encode. Usually caused by a client; if there are many, find out who sends them.",
                    "ops",
                    (trouble_by("mmd_media_decode_failures_total", "reason"),),
                ),
                Panel(
                    "Media by quality tier",
                    "Where spec.gateway.media.underLoad is set; 0 is full quality. If higher tiers last, add replicas.",
                    "ops",
                    (trouble_by("mmd_media_by_quality_tier_total", "tier"),),
                    "stack",
                ),
                Panel(
                    "Media that no encoder could encode",
                    "By what spec.gateway.media.failurePolicy did about them.",
                    "ops",
                    (trouble_by("mmd_media_fallbacks_total", "outcome"),),
                ),
                Panel(
                    "Uploaded files",
                    "Of all tenants, with spec.gateway.files. At the maximum, uploads are refused.",
                    "bytes",
                    (
                        Query(f"max({of('mmd_file_stored_bytes')})", "stored"),
                        Query(f"max({of('mmd_file_budget_bytes')})", "bound"),
                    ),
                ),
                Panel(
                    "Number of uploaded files",
                    "Recent deletions included. At spec.gateway.files.maxFiles, uploads are refused.",
                    "short",
                    (Query(f"max({of('mmd_file_stored_items')})", "files"),),
                ),
                Panel(
                    "Refused uploads",
                    "By the code of their error. With file_quota_exceeded, raise the limit of spec.gateway.files that the error names.",
                    "ops",
                    (trouble_by("mmd_file_refused_uploads_total", "code"),),
                    "stack",
                ),
            ),
        ),
        Row(
            "The queue and the towers",
            (
                Panel(
                    "Encode jobs not finished",
                    "Queued or in progress, by modality.",
                    "short",
                    (Query(f"max by (modality) ({of('mmd_encode_queue_jobs')})", "{{modality}}"),),
                    "stack",
                ),
                Panel(
                    "Seconds of backlog, by pod",
                    "Work that a pod has accepted, divided by its throughput.",
                    "s",
                    (Query(of("mmd_backlog_seconds", "role=encode"), "{{pod}}"),),
                ),
                Panel(
                    "Jobs finished per second",
                    "By outcome.",
                    "ops",
                    (rate_by("mmd_encode_jobs_total", "code"),),
                    "stack",
                ),
                Panel(
                    "Redelivered jobs",
                    "An encoder crashed or did not respond in time while it had the job.",
                    "ops",
                    (trouble_by("mmd_encode_redeliveries_total", "modality"),),
                ),
                Panel(
                    "Busy stages",
                    "Share of time that the servers of a stage are busy, averaged over the pods. The busiest stage limits the pool; "
                    "near one, add encoders.",
                    "percentunit",
                    (Query(f"avg by (stage) ({BUSY})", "{{stage}}"),),
                    warn_above=0.9,
                ),
                Panel(
                    "Throughput by stage",
                    "Measured work units (patches, frames) per second of each stage of a pod. The slowest stage limits the pod.",
                    "short",
                    (
                        Query(
                            f"avg by (modality, stage) ({of('mmd_encode_stage_work_per_second')})",
                            "{{modality}} {{stage}}",
                        ),
                    ),
                ),
                Panel(
                    "Duration of encode",
                    "95th percentile: read, decode, process, wait for the batch, tower.",
                    "s",
                    (quantile(0.95, "mmd_phase_seconds", "modality", "phase=encode"),),
                ),
                Panel(
                    "Cache hits",
                    "Share of lookups that hit: the encoder's cache of features, the feature store of the prefill pod, and media whose KV is in the prefix cache.",
                    "percentunit",
                    (share("mmd_cache_lookups_total", "outcome=hit", "cache"),),
                ),
                Panel(
                    "Size of features",
                    "On pods that prefill, by state, and their budget. At the budget, new requests wait.",
                    "bytes",
                    (
                        level_by("mmd_feature_used_bytes", "state"),
                        Query(f"sum({of('mmd_feature_budget_bytes')})", "budget"),
                    ),
                ),
                Panel(
                    "Size of the encoder's cache",
                    "Cached features, and evictions.",
                    "bytes",
                    (
                        Query(f"sum by (pod, cache) ({of('mmd_cache_used_bytes')})", "{{pod}} {{cache}}"),
                        trouble_by("mmd_cache_evictions_total", "pod"),
                    ),
                ),
            ),
        ),
    ),
)
