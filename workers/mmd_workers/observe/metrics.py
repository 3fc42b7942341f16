"""Every metric of every process, as one table: name (its ending is the unit), meaning, labels. Independent of what it counts.

Labels take values from small fixed sets, and names of tenants from their file: never a request, a URL, a digest or a message.
`docs/metrics.md` is generated from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from mmd_api.contract.metric_table import (
    LONG_SECONDS,
    SHORT_SECONDS,
    MetricTable,
    counter,
    gauge,
    histogram,
    info,
    section,
)

LABELS: dict[str, str] = {
    "modality": "text, image, video, audio: of a request, its heaviest",
    "code": "`MmdError.code`, or ok",
    "phase": "queue, encode, embedding_transfer, prefill, kv_transfer, decode",
    "link": "embedding, kv",
    "direction": "sent, received",
    "role": "encode, prefill, decode",
    "cache": "feature (encoded media, on the pod that encodes), disk (those evicted there), store (embeddings, on the pod that prefills)",
    "kind": "prompt_text, prompt_image, prompt_video, prompt_audio, prompt_cached, output",
    "signal": "ttft, itl",
}
INDEXED = "of: blocks, features"
ERROR_RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
STEP_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics(MetricTable):
    """The catalogue; one object per process, on a separate registry.

    `roles`: some of gateway, encode, prefill, decode, follower; metrics of other roles can be fed and are not exposed. Empty: all are exposed.
    """

    LABELS: ClassVar[Mapping[str, str]] = LABELS

    _requests = section("Requests, as seen by clients (gateway)", "gateway")
    requests = counter("mmd_requests_total", "Finished requests, by result", "modality", "code")
    requests_running = gauge("mmd_requests_running", "Requests accepted and not yet finished")
    ttft = histogram("mmd_ttft_seconds", "Time from arrival to first token", LONG_SECONDS, "modality")
    itl = histogram(
        "mmd_itl_seconds",
        "Time between two tokens of a stream, as they reach the gateway",
        SHORT_SECONDS,
        "modality",
    )
    e2e = histogram("mmd_e2e_seconds", "Time from arrival to last token", LONG_SECONDS, "modality")
    tokens = counter("mmd_tokens_total", "Prompt and output tokens of finished requests", "kind")
    slo = counter(
        "mmd_slo_requests_total",
        "Requests measured against spec.slo; a request that fails for a reason other than a client error counts as missed",
        "signal",
        "outcome: kept, missed",
    )
    slo_target = gauge("mmd_slo_target_seconds", "Target in spec.slo; absent if there is none", "signal")
    slo_objective = gauge(
        "mmd_slo_objective_ratio",
        "Share of requests that must meet the target in spec.slo; absent if there is none",
        "signal",
    )
    retries = counter(
        "mmd_retries_total",
        "Requests placed again after a placement was lost",
        "reason: pod_lost, preempted, gave_up, gap, silent, forgotten, unencodable",
        moved_by="trouble",
    )
    migrations = counter(
        "mmd_migrations_total",
        "Of those, requests that continued on another pod with the tokens they already had",
        "reason: pod_lost, preempted, gave_up, gap, silent, forgotten",
        moved_by="trouble",
    )
    gateway_sequences = gauge("mmd_gateway_sequences", "Sequences placed or waiting for a pod")
    gateway_held = gauge(
        "mmd_gateway_held_sequences", "Sequences waiting for a pod, by the missing role", "role",
        moved_by="trouble",
    )  # fmt: skip
    duplicates = counter(
        "mmd_gateway_duplicate_tokens_total", "Tokens that arrived more than once", moved_by="trouble"
    )
    gateway_pods = gauge(
        "mmd_gateway_pods",
        "Pods whose heartbeats this gateway receives, by role; a pod with two roles counts twice",
        "role",
        "state: loading, ready, draining, drained",
    )

    _router = section("Router (gateway)", "gateway")
    prefix_index_blocks = gauge(
        "mmd_router_index_blocks",
        "Entries in the router's index of the pods' caches; each counts once for every pod that has it",
        INDEXED,
    )
    prefix_index_limit = gauge(
        "mmd_router_index_limit_blocks",
        "Maximum of mmd_router_index_blocks, by the gateway's memory; all pods have the same share of it",
        INDEXED,
    )
    prefix_index_cut = gauge(
        "mmd_router_index_cut_pods",
        "Pods of which the router's index leaves entries out, for lack of room",
        INDEXED,
        moved_by="trouble",
    )
    prefix_snapshots = counter(
        "mmd_router_index_snapshots_total",
        "Requests to a pod to report all that it has cached, because reports were missed or there is room for more",
        INDEXED,
        moved_by="trouble",
    )

    router_error = histogram(
        "mmd_router_error_ratio",
        "Difference between the estimated and the actual time from placement to first token ÷ the actual time",
        ERROR_RATIOS,
        "modality",
    )
    router_factor = gauge(
        "mmd_router_factor_ratio",
        "Factor of a term of the router's estimate, fitted to what requests took; 1 before the first",
        "term: queue, encode, transfer, prefill",
    )
    router_overhead = gauge(
        "mmd_router_overhead_seconds",
        "Part of the router's estimate that no term explains, fitted in the same way",
    )

    _tenants = section("Tenants (gateway, with spec.gateway.auth)", "gateway")
    tenant_requests = counter(
        "mmd_tenant_requests_total",
        "Finished requests of each tenant, by HTTP status",
        "tenant: `name` in keys.yaml, or (removed)",
        "status: `200`, `429` and other HTTP statuses",
        moved_by="tenants",
    )
    tenant_running = gauge(
        "mmd_tenant_requests_running",
        "Requests of each tenant that are in flight",
        "tenant: `name` in keys.yaml",
        moved_by="tenants",
    )
    tenant_work = counter(
        "mmd_tenant_work_seconds_total",
        "Estimated work of the requests of each tenant that have started, in seconds of the whole deployment",
        "tenant: `name` in keys.yaml, or (removed)",
        moved_by="tenants",
    )
    tenant_queued = gauge(
        "mmd_tenant_queued_requests",
        "Requests of each tenant that wait for their turn; absent where none does",
        "tenant: `name` in keys.yaml",
        moved_by="tenants",
    )
    tenant_queued_work = gauge(
        "mmd_tenant_queued_seconds",
        "Estimated work of these requests, in seconds of the whole deployment",
        "tenant: `name` in keys.yaml",
        moved_by="tenants",
    )
    queue_seconds = histogram(
        "mmd_gateway_queue_seconds",
        "Time that requests waited for their turn before they were placed",
        LONG_SECONDS,
        "priority: High, Normal, Low",
        moved_by="tenants",
    )
    refused_waiting = counter(
        "mmd_gateway_refused_waiting_total",
        "Requests refused while they waited, because the queue was full: of their tenant's share, or of the deployment",
        "full: tenant, deployment",
        moved_by="trouble",
    )
    refused_keys = counter(
        "mmd_gateway_unauthorized_total",
        "Requests that were not let in, by what was wrong with their API key or token",
        "reason: missing, malformed, unknown, expired, token, tenant",
        moved_by="trouble",
    )
    keys_rejected = gauge(
        "mmd_gateway_keys_rejected_state",
        "1 while the file of API keys is missing or invalid; the last valid one is in effect, if there was one",
        moved_by="trouble",
    )

    issuer_unreachable = gauge(
        "mmd_gateway_issuer_unreachable_state",
        "1 while the signing keys of spec.gateway.auth.oidc.issuer cannot be fetched; those fetched before are in effect for an hour",
        moved_by="trouble",
    )

    _picker = section("Endpoint picker (gateway, with spec.gateway.inferencePool)", "gateway")
    picks = counter(
        "mmd_gateway_picks_total",
        "Requests that proxies asked about: picked has a pod; passed has none, while NATS cannot be reached, and the proxy chooses; the others were refused, some after they had counted as picked or passed. late: its client sent it too slowly; unread: its proxy took no answer in time",
        "outcome: picked, passed, no_gateway, too_large, invalid, late, too_many, unread, failed",
        moved_by="deployment",
    )
    pick_seconds = histogram(
        "mmd_gateway_pick_seconds",
        "Time from the headers of such a request to the answer; at most 2048 are observed in a second",
        SHORT_SECONDS,
        moved_by="deployment",
    )
    picker_streams = gauge(
        "mmd_gateway_picker_requests",
        "Requests that arrive through the endpoint picker now; answers do not pass through it",
        moved_by="deployment",
    )
    picker_restarts = counter(
        "mmd_gateway_picker_restarts_total",
        "Times that the process of the endpoint picker ended unexpectedly and was started again",
        moved_by="trouble",
    )
    picker_down = gauge(
        "mmd_gateway_picker_down_state",
        "1 while the process of the endpoint picker does not answer; proxies that ask it then choose a gateway for requests without a body, and Envoy answers 500 to others",
        moved_by="trouble",
    )

    _audit = section("Audit log (gateway, with spec.gateway.auditLog)", "gateway")
    audit_dropped = counter(
        "mmd_gateway_audit_dropped_total",
        "Lines of the audit log that could not be written, or that too many others waited before",
        moved_by="trouble",
    )

    _tls = section("TLS (gateway, with spec.gateway.tls)", "gateway")
    certificate_expiry = gauge(
        "mmd_gateway_certificate_expiry_timestamp_seconds",
        "When the TLS certificate in force expires, in Unix seconds; 0 while there is none",
        moved_by="trouble",
    )
    certificate_rejected = gauge(
        "mmd_gateway_certificate_rejected_state",
        "1 while the TLS certificate or its key is missing or invalid; the last valid pair is in effect, if there was one",
        moved_by="trouble",
    )

    _media = section("Media (gateway)", "gateway")
    fetch_bytes = counter("mmd_media_fetched_bytes_total", "Media received from clients and URLs", "modality")
    held_bytes = gauge(
        "mmd_media_held_bytes",
        "Shared memory budget used by bodies and media, beyond the allowance of each request",
        moved_by="trouble",
    )
    media_budget = gauge("mmd_media_budget_bytes", "Maximum of mmd_media_held_bytes")
    media_items = gauge("mmd_gateway_media_items", "Distinct media held")
    media_waiting = gauge(
        "mmd_media_waiting_requests", "Requests waiting for media memory", moved_by="trouble"
    )
    media_tier = gauge(
        "mmd_media_quality_tier_state",
        "Tier of spec.gateway.media.underLoad that new requests get; 0: full quality",
        moved_by="trouble",
    )
    tiered_media = counter(
        "mmd_media_by_quality_tier_total",
        "Media of requests, where spec.gateway.media.underLoad is set",
        "modality",
        "tier: number of the tier, 0 for full quality",
        moved_by="trouble",
    )
    fallbacks = counter(
        "mmd_media_fallbacks_total",
        "Requests with a medium that could not be encoded, where spec.gateway.media.failurePolicy is not Fail",
        "policy: TextOnly, DegradeFrames, DegradeResolution",
        "outcome: placed, failed",
        moved_by="trouble",
    )
    answer_bytes = gauge(
        "mmd_answer_reserved_bytes",
        "Memory reserved for answers at their full length, beyond the allowance of each request",
        moved_by="trouble",
    )
    answer_budget = gauge("mmd_answer_budget_bytes", "Maximum of mmd_answer_reserved_bytes")
    answers_waiting = gauge(
        "mmd_answer_waiting_requests", "Requests waiting for answer memory", moved_by="trouble"
    )

    _files = section("Uploaded files (gateway, with spec.gateway.files)", "gateway")
    file_bytes = gauge(
        "mmd_file_stored_bytes",
        "Files of all tenants and uploads in progress, as this gateway last read them; every gateway has the same",
        moved_by="trouble",
    )
    file_budget = gauge("mmd_file_budget_bytes", "Maximum of mmd_file_stored_bytes", moved_by="trouble")
    file_items = gauge(
        "mmd_file_stored_items",
        "Files, uploads in progress and recent deletions, which count against spec.gateway.files.maxFiles",
        moved_by="trouble",
    )
    refused_uploads = counter(
        "mmd_file_refused_uploads_total",
        "Uploads that did not become a file, by error",
        "code",
        moved_by="trouble",
    )

    _queue = section(
        "Queue of encode jobs (gateway, read from the stream; absent while the stream cannot be read)",
        "gateway",
    )
    queue_jobs = gauge("mmd_encode_queue_jobs", "Encode jobs published and not finished", "modality")
    queue_work = gauge(
        "mmd_encode_queue_work",
        "Work of these jobs (patches, frames), to two significant digits",
        "modality",
    )

    _phases = section(
        "Time by phase (reported by the pod that ends the phase)", "encode", "prefill", "decode"
    )
    phase = histogram("mmd_phase_seconds", "Duration of a phase", LONG_SECONDS, "phase", "modality")
    backlog = gauge(
        "mmd_backlog_seconds",
        "Work waiting on this pod ÷ its measured throughput",
        "role: encode, prefill",
    )

    _encode = section("Encode role", "encode")
    encode_queued = gauge(
        "mmd_encode_queued_work",
        "Work accepted by this pod and not yet encoded (patches, frames)",
        "modality",
    )
    encode_work = counter("mmd_encode_work_total", "Work encoded (patches, frames)", "modality")
    encode_rate = gauge("mmd_encode_work_per_second", "Measured throughput of the slowest stage", "modality")
    encode_stage_rate = gauge(
        "mmd_encode_stage_work_per_second",
        "Measured throughput of each stage",
        "stage: fetch, decode, process, tower, send",
        "modality",
    )
    encode_busy = counter(
        "mmd_encode_busy_seconds_total",
        "Time that a stage was busy, averaged over its servers (processes, threads, connections)",
        "stage: fetch, decode, process, tower, send",
    )
    encode_jobs = counter("mmd_encode_jobs_total", "Finished encode jobs, by result", "modality", "code")
    redeliveries = counter(
        "mmd_encode_redeliveries_total",
        "Encode jobs run again after a run that failed or ended its encoder",
        "modality",
        moved_by="trouble",
    )
    decode_failures = counter(
        "mmd_media_decode_failures_total",
        "Media that failed to decode",
        "modality",
        "reason: bad_media, unsupported_input, count_mismatch, overloaded, internal",
        moved_by="trouble",
    )

    _features = section("Features and caches", "encode", "prefill")
    feature_transitions = counter(
        "mmd_feature_transitions_total",
        "Features that entered a state",
        "state: registered, encoding, encoded, merged, prefilled, discarded",
    )
    feature_bytes = gauge(
        "mmd_feature_used_bytes",
        "Size of the features currently reserved or held",
        "state: registered … discarded",
    )
    feature_budget = gauge("mmd_feature_budget_bytes", "Maximum size of the features held")
    late_features = counter(
        "mmd_late_features_total",
        "Features that prompts in the engine needed again, because KV was preempted or evicted from the prefix cache",
        moved_by="trouble",
    )
    cache = counter("mmd_cache_lookups_total", "Lookups, by outcome", "cache", "outcome: hit, miss")
    cache_evictions = counter(
        "mmd_cache_evictions_total",
        "Entries evicted to make room",
        "cache: feature, disk",
        moved_by="trouble",
    )
    cache_bytes = gauge("mmd_cache_used_bytes", "Bytes held by a cache", "cache: feature, disk")
    disk_features = counter(
        "mmd_cache_disk_features_total",
        "Features that were to go to or come from the disk tier of an encoder's cache, by what became of them",
        "outcome: written, dropped (too much waited to be written), too_large (for the disk's budget), damaged (and removed), failed (the disk turned off)",
        moved_by="deployment",
    )
    disk_off = gauge(
        "mmd_cache_disk_off_state",
        "1 while the disk tier of an encoder's cache is off because of an error",
        moved_by="trouble",
    )
    handed_over = counter(
        "mmd_cache_handed_over_total",
        "Features in the cache of an encoder that drained, by what became of them",
        "outcome: sent, held (by an encoder that remains), refused (no room), failed, late",
        moved_by="scaling",
    )
    prefix_tokens = counter(
        "mmd_prefix_cache_tokens_total",
        "Tokens of prompts at their first admission, by whether their KV was in the prefix cache",
        "outcome: hit, miss",
    )

    _transfers = section("Transfers between pods", "encode", "prefill", "decode")
    transfer_bytes = counter(
        "mmd_transfer_bytes_total", "Payload transferred between pods", "link", "direction"
    )
    transfer = histogram(
        "mmd_transfer_seconds",
        "Time from the first byte to the last, of one feature or one sequence",
        SHORT_SECONDS,
        "link",
    )
    kv_cached_tokens = counter(
        "mmd_kv_cached_tokens_total",
        "Tokens of handed over sequences whose KV was not sent, because the decoder had it",
    )
    transfer_failures = counter(
        "mmd_transfer_failures_total",
        "Failed transfers",
        "link",
        "reason: link_failed, peer_lost, overloaded, too_large, lease_expired, lease_ended, deadline_exceeded",
        moved_by="trouble",
    )
    offers = counter(
        "mmd_embedding_offers_total",
        "Features offered to a receiver, by its answer",
        "outcome: sent, have, refused",
    )
    credit = gauge(
        "mmd_embedding_credit_bytes",
        "Credit that this receiver has granted to transfers in progress; above zero when they are slow",
        moved_by="trouble",
    )
    local_prompts = counter(
        "mmd_decode_prompts_total",
        "Prompts placed on this decode pod itself, without a prefill pod, by outcome",
        "outcome: accepted, refused, returned (accepted, then given back because a medium was not in the prefix cache)",
    )
    leases = counter(
        "mmd_kv_leases_total",
        "Leases on KV blocks, by outcome",
        "outcome: granted, refused, committed, released, expired, lost",
    )
    inbound = gauge(
        "mmd_kv_inbound_sequences",
        "Sequences with granted blocks, not yet committed; above zero when handovers are slow",
        moved_by="trouble",
    )

    _engine = section("Prefill and decode roles", "prefill", "decode")
    kv_blocks = gauge(
        "mmd_kv_blocks",
        "Blocks of the KV pool; the native engine allocates those of a prompt when it admits it, vLLM chunk by chunk",
        "state: free, reserved, used",
    )
    sequence_tokens = gauge(
        "mmd_sequence_tokens",
        "Tokens of the sequences that the pod works on, waiting ones included, by what they stand for; each takes KV here, which those of a shared prefix share",
        "modality: text, image, video, audio",
    )
    prefill_waiting = gauge(
        "mmd_prefill_waiting_tokens",
        "Prompt tokens not yet prefilled, by the pool they wait for: this one, or encoders first",
        "role: prefill, encode",
    )
    prefill_tokens = counter("mmd_prefill_tokens_total", "Prompt tokens computed")
    prefill_rate = gauge("mmd_prefill_tokens_per_second", "Measured throughput while prompts are running")
    sequences = gauge("mmd_sequences", "Sequences of the engine", "state: waiting, running, held, reserved")
    max_sequences = gauge("mmd_max_sequences", "Maximum number of sequences that the engine runs at once")
    step = histogram("mmd_step_seconds", "Duration of one engine step", SHORT_SECONDS)
    media_step_tokens = gauge(
        "mmd_media_step_tokens",
        "Prompt tokens that a step with media may have by the speed of the steps before; 0 with vLLM",
    )
    draft_tokens = counter(
        "mmd_draft_tokens_total",
        "Tokens that prompt lookup drafted and a step computed; 0 without spec.engine.promptLookupTokens, and with vLLM",
        moved_by="deployment",
    )
    accepted_draft_tokens = counter(
        "mmd_accepted_draft_tokens_total",
        "Drafted tokens that the model sampled too, each of which saved a step",
        moved_by="deployment",
    )
    step_sequences = histogram(
        "mmd_step_sequences", "Sequences computed in an engine step, prefills included", STEP_SEQUENCES
    )
    resent_tokens = counter(
        "mmd_resent_tokens_total",
        "Tokens sent again because a report showed that the gateway had not received them",
        moved_by="trouble",
    )
    freed_sequences = counter(
        "mmd_freed_sequences_total",
        "Sequences freed without a cancellation: unknown to their gateway, gateway lost, or deadline exceeded",
        "reason: unwanted, gateway_gone, deadline",
        moved_by="trouble",
    )
    preemptions = counter(
        "mmd_preemptions_total", "Sequences preempted to free KV for others", moved_by="trouble"
    )

    _sandbox = section("Decode sandbox", "gateway", "encode")
    sandbox_layers = gauge(
        "mmd_sandbox_layer_state",
        "1 for each confinement layer that is active on decode processes, 0 where the kernel or the pod does not allow it",
        "layer: namespaces, root, user, landlock, seccomp",
    )

    _nats = section(
        "State and NATS (every pod but the followers of a group)",
        "gateway",
        "encode",
        "prefill",
        "decode",
    )
    pod_state = gauge(
        "mmd_pod_state", "1 for the state that the pod is in", "state: loading, ready, draining, drained"
    )
    nats_connected = gauge("mmd_nats_connected", "1 while connected to NATS")
    nats_round_trip = histogram(
        "mmd_nats_round_trip_seconds",
        "Round trip to the NATS server, measured once per second",
        SHORT_SECONDS,
    )
    nats_reconnects = counter("mmd_nats_reconnects_total", "Reconnections to NATS", moved_by="trouble")
    nats_lost = counter(
        "mmd_nats_messages_lost_total",
        "Received messages that had no effect",
        "reason: malformed, dropped, handler: arrived faster than they were read, or their handler failed",
        moved_by="trouble",
    )

    _process = section("The process (every pod)")
    startup = gauge(
        "mmd_startup_seconds",
        "Duration of each start-up phase; the process accepts requests after the last. With vLLM, engine includes load_language and memory, "
        "which are absent",
        "phase: connect, load_encoder, load_language, sandbox, memory_encoder, memory, engine, services, warm_up_messages, warm_up_tracing, "
        "warm_up_image, warm_up_video, warm_up_audio, warm_up_engine, warm_up_links",
    )
    loaded_bytes = gauge(
        "mmd_model_loaded_bytes", "Weights loaded by this process and the ranks that it started"
    )
    config_reloads = counter(
        "mmd_config_reloads_total",
        "Changed configuration files, by result",
        "result: applied, rejected",
        moved_by="trouble",
    )
    config_rejected = gauge(
        "mmd_config_rejected_state",
        "1 while the configuration file is rejected and the previous settings are in effect",
        moved_by="trouble",
    )
    errors = counter("mmd_errors_total", "Typed errors raised, by code", "code", moved_by="trouble")
    build = info(
        "mmd_build_info",
        "Version, revision and roles of this process",
        "version: of the software",
        "revision: of the pipeline",
        "roles: joined by +",
    )


def exemplar(trace_id: str) -> dict[str, str] | None:
    """The exemplar that ties an observation to a trace, for `Histogram.observe`."""
    return {"trace_id": trace_id} if trace_id else None
