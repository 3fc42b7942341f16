"""What people look at: the panels of every dashboard as data, with their questions to Prometheus. Knows no Grafana and no server.

The Grafana dashboards, the pictures in the docs and `mmd report` are all made from these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Unit = Literal["s", "bytes", "Bps", "percentunit", "reqps", "ops", "short"]
OURS = 'namespace="$namespace",deployment="$deployment"'
RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression with the variables `$namespace`, `$deployment` and `$__rate_interval`, and the name of its lines.

    `moves`: what it takes to get an answer: load; trouble, something that went wrong; operator, one that scales a deployment.
    """

    expr: str
    legend: str
    moves: Literal["load", "trouble", "operator"] = "load"


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `text` says what to read from it, and when to worry."""

    title: str
    text: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: Literal["lines", "stack", "number"] = "lines"
    warn_above: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that belong together."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. `name` is the end of its uid and the name of its file."""

    name: str
    title: str
    text: str
    rows: tuple[Row, ...]

    def panels(self) -> list[Panel]:
        """All panels, top to bottom."""
        return [panel for row in self.rows for panel in row.panels]


def _of(metric: str, *matchers: str) -> str:
    """A metric of the chosen deployment; a matcher is written without quotes: `state=free`, `state=~waiting|running`."""
    quoted = [re.sub(r"^(\w+)(=~|=)(.*)$", r'\1\2"\3"', matcher) for matcher in matchers]
    return f"{metric}{{{','.join((OURS, *quoted))}}}"


def _rate(metric: str, *matchers: str) -> str:
    return f"rate({_of(metric, *matchers)}[{RATE}])"


def _sum(metric: str, by: str, *matchers: str) -> Query:
    return Query(f"sum by ({by}) ({_rate(metric, *matchers)})", f"{{{{{by}}}}}")


def _level(metric: str, by: str, *matchers: str) -> Query:
    return Query(f"sum by ({by}) ({_of(metric, *matchers)})", f"{{{{{by}}}}}")


def _trouble(metric: str, by: str, *matchers: str) -> Query:
    return Query(f"sum by ({by}) ({_rate(metric, *matchers)})", f"{{{{{by}}}}}", "trouble")


def _operators(metric: str, by: str, *matchers: str) -> Query:
    """What an operator says of the chosen deployment; while one hands over to the next, both may say it."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return Query(f"max by ({by}) ({_of(metric, *matchers)})", legend, "operator")


def _operator(metric: str, by: str) -> Query:
    """A rate of the operators themselves, whatever deployment they work for."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return Query(f"sum by ({by}) (rate({metric}[{RATE}]))", legend, "operator")


def _operator_quantile(quantile: float, histogram: str, by: str) -> Query:
    expr = f"histogram_quantile({quantile:g}, sum by (le, {by}) (rate({histogram}_bucket[{RATE}])))"
    return Query(expr, f"p{quantile * 100:g} {{{{{by}}}}}", "operator")


def _quantile(quantile: float, histogram: str, by: str = "", *matchers: str, legend: str = "") -> Query:
    groups = f"le, {by}" if by else "le"
    expr = f"histogram_quantile({quantile:g}, sum by ({groups}) ({_rate(f'{histogram}_bucket', *matchers)}))"
    name = f"p{quantile * 100:g}"
    return Query(expr, legend or (f"{name} {{{{{by}}}}}" if by else name))


def _quantiles(histogram: str, *matchers: str) -> tuple[Query, ...]:
    return tuple(_quantile(q, histogram, "", *matchers) for q in (0.5, 0.95, 0.99))


def _promise(signal: str) -> Query:
    return Query(f"max({_of('mmd_slo_target_seconds', 'signal=' + signal)})", "promised")


def _share(metric: str, wanted: str, by: str) -> Query:
    part, whole = f"sum by ({by}) ({_rate(metric, wanted)})", f"sum by ({by}) ({_rate(metric)})"
    return Query(f"{part} / {whole}", f"{{{{{by}}}}}")


KV_USED = f"1 - sum by (pod) ({_of('mmd_kv_blocks', 'state=free')}) / sum by (pod) ({_of('mmd_kv_blocks')})"
BUSY = f"rate({_of('mmd_encode_busy_seconds_total')}[{RATE}])"

_CLIENTS = Row(
    "What clients get",
    (
        Panel(
            "Requests a second",
            "By outcome: ok, or the code of the error. Anything but ok and the faults of clients deserves a look.",
            "reqps",
            (_sum("mmd_requests_total", "code"),),
            "stack",
        ),
        Panel(
            "Time to the first token",
            "From the arrival of the request, its upload included, to its first token. The promise is spec.slo.ttftMilliseconds.",
            "s",
            (*_quantiles("mmd_ttft_seconds"), _promise("ttft")),
        ),
        Panel(
            "Time between tokens",
            "As they reach the gateway. Rises with the number of sequences per decode pod, and when prompts share its steps.",
            "s",
            (*_quantiles("mmd_itl_seconds"), _promise("itl")),
        ),
        Panel(
            "Promises kept",
            "Share of requests that kept spec.slo. Below the objective, the error budget is being spent.",
            "percentunit",
            (
                _share("mmd_slo_requests_total", "outcome=kept", "signal"),
                Query(f"max({_of('mmd_slo_objective_ratio')})", "objective"),
            ),
        ),
        Panel(
            "Whole answer, by modality",
            "95th percentile from arrival to last token. Video costs more than images, images more than text.",
            "s",
            (_quantile(0.95, "mmd_e2e_seconds", "modality"),),
        ),
        Panel(
            "Tokens a second",
            "Prompt tokens by modality, and output. Cached ones were not computed again.",
            "ops",
            (_sum("mmd_tokens_total", "kind"),),
        ),
        Panel(
            "Requests in hand",
            "Accepted and not finished. A line that only grows means that something downstream is full: see the pools.",
            "short",
            (
                Query(f"sum({_of('mmd_requests_running')})", "requests"),
                _level("mmd_gateway_held_sequences", "role"),
            ),
        ),
        Panel(
            "Placed again",
            "Requests that lost their pod and were placed again; their clients saw a pause, not an error. Zero in quiet times.",
            "ops",
            (_trouble("mmd_retries_total", "reason"), _trouble("mmd_migrations_total", "reason")),
        ),
    ),
)
_POOLS = Row(
    "The pools side by side",
    (
        Panel(
            "Where the time goes",
            "Seconds spent in each phase, per second, over all requests. The tallest one is the bottleneck.",
            "short",
            (_sum("mmd_phase_seconds_sum", "phase"),),
            "stack",
        ),
        Panel(
            "Backlog",
            "How long the waiting work would take at the measured throughput. The autoscaler acts on this.",
            "s",
            (_level("mmd_backlog_seconds", "role"),),
        ),
        Panel(
            "How busy each pool is",
            "Encoders: share of the time that towers ran. Decoders: KV blocks in use, and places taken.",
            "percentunit",
            (
                Query(f"avg({BUSY})", "encode: busy"),
                Query(f"avg({KV_USED})", "KV in use"),
                Query(
                    f"sum({_of('mmd_sequences', 'state=running')}) / sum({_of('mmd_max_sequences')})",
                    "places taken",
                ),
            ),
            warn_above=0.9,
        ),
        Panel(
            "Pods that are ready",
            "By role, as the gateway hears them. A pod with two roles counts for both.",
            "short",
            (Query(f"max by (role) ({_of('mmd_gateway_pods', 'state=ready')})", "{{role}}"),),
        ),
    ),
)

OVERVIEW = Board(
    "overview",
    "Overview",
    "Are clients served as promised, and if not, which pool is to blame?",
    (_CLIENTS, _POOLS),
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
                    (_sum("mmd_media_fetched_bytes_total", "modality"),),
                    "stack",
                ),
                Panel(
                    "Media held by gateways",
                    "Until their encode jobs are done. At the bound, new requests wait.",
                    "bytes",
                    (
                        Query(f"sum({_of('mmd_media_held_bytes')})", "held"),
                        Query(f"sum({_of('mmd_media_budget_bytes')})", "bound"),
                    ),
                ),
                Panel(
                    "Requests waiting for media memory",
                    "Above zero: uploads come faster than encoders work them off.",
                    "short",
                    (Query(f"sum({_of('mmd_media_waiting_requests')})", "requests"),),
                ),
                Panel(
                    "Media that broke decoding",
                    "By reason, on pods that encode. Usually a client's fault; many at once deserve a look at who sends them.",
                    "ops",
                    (_trouble("mmd_media_decode_failures_total", "reason"),),
                ),
            ),
        ),
        Row(
            "The queue and the towers",
            (
                Panel(
                    "Encode jobs not done",
                    "In the queue or in an encoder's hands, by modality.",
                    "short",
                    (Query(f"max by (modality) ({_of('mmd_encode_queue_jobs')})", "{{modality}}"),),
                    "stack",
                ),
                Panel(
                    "Seconds of backlog, by pod",
                    "Work that a pod has taken, over its throughput.",
                    "s",
                    (Query(_of("mmd_backlog_seconds", "role=encode"), "{{pod}}"),),
                ),
                Panel(
                    "Jobs finished a second",
                    "By outcome.",
                    "ops",
                    (_sum("mmd_encode_jobs_total", "code"),),
                    "stack",
                ),
                Panel(
                    "Jobs that came again",
                    "An encoder died or was silent for too long with the job in its hands.",
                    "ops",
                    (_trouble("mmd_encode_redeliveries_total", "modality"),),
                ),
                Panel(
                    "Towers busy",
                    "Share of the time, by pod. Near one: more encoders, or larger batches.",
                    "percentunit",
                    (Query(BUSY, "{{pod}}"),),
                    warn_above=0.9,
                ),
                Panel(
                    "Throughput while they run",
                    "Work units (patches, frames) a second, measured.",
                    "short",
                    (Query(f"avg by (modality) ({_of('mmd_encode_work_per_second')})", "{{modality}}"),),
                ),
                Panel(
                    "Length of an encode",
                    "95th percentile: read, decode, process, wait for the batch, tower.",
                    "s",
                    (_quantile(0.95, "mmd_phase_seconds", "modality", "phase=encode"),),
                ),
                Panel(
                    "Found instead of encoded",
                    "Share of lookups that hit: the encoder's cache of features, and the store of the pod that prefills.",
                    "percentunit",
                    (_share("mmd_cache_lookups_total", "outcome=hit", "cache"),),
                ),
                Panel(
                    "Bytes of features",
                    "On pods that prefill, by state, and their budget. At the budget, admissions wait.",
                    "bytes",
                    (
                        _level("mmd_feature_used_bytes", "state"),
                        Query(f"sum({_of('mmd_feature_budget_bytes')})", "budget"),
                    ),
                ),
                Panel(
                    "Bytes in the encoder's cache",
                    "Kept features, and how many had to make room.",
                    "bytes",
                    (
                        Query(f"sum by (pod) ({_of('mmd_cache_used_bytes')})", "{{pod}}"),
                        _trouble("mmd_cache_evictions_total", "pod"),
                    ),
                ),
            ),
        ),
    ),
)
ENGINE = Board(
    "engine",
    "Prefill, decode and KV",
    "The language model's pools: prompts in, tokens out, and the KV between.",
    (
        Row(
            "Prefill",
            (
                Panel(
                    "Prompt tokens waiting",
                    "By pod, and by what they wait for: prefill, or media that is not encoded yet.",
                    "short",
                    (
                        Query(
                            _of("mmd_prefill_waiting_tokens", "pod=~.*-prefill-.*|.*-decode-.*"),
                            "{{pod}} for {{role}}",
                        ),
                    ),
                ),
                Panel(
                    "Prompt tokens computed a second",
                    "And the throughput that was measured while prompts ran.",
                    "ops",
                    (
                        _sum("mmd_prefill_tokens_total", "pod"),
                        Query(_of("mmd_prefill_tokens_per_second"), "{{pod}} at most"),
                    ),
                ),
                Panel(
                    "Length of a prefill",
                    "From the engine's queue to the first token.",
                    "s",
                    _quantiles("mmd_phase_seconds", "phase=prefill"),
                ),
                Panel(
                    "Prompt tokens found in the prefix cache",
                    "Share of admitted prompts whose KV was there.",
                    "percentunit",
                    (
                        Query(
                            f"sum({_rate('mmd_prefix_cache_tokens_total', 'outcome=hit')}) / sum({_rate('mmd_prefix_cache_tokens_total')})",
                            "hit",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Decode",
            (
                Panel(
                    "Sequences",
                    "Of all engines, by state. Waiting ones have no place or no blocks.",
                    "short",
                    (_level("mmd_sequences", "state"),),
                    "stack",
                ),
                Panel("Length of a step", "Of all engines.", "s", _quantiles("mmd_step_seconds")),
                Panel(
                    "Sequences in a step",
                    "How well steps are filled: the mean, by pod.",
                    "short",
                    (
                        Query(
                            f"sum by (pod) ({_rate('mmd_step_sequences_sum')}) / sum by (pod) ({_rate('mmd_step_sequences_count')})",
                            "{{pod}}",
                        ),
                    ),
                ),
                Panel(
                    "Length of a decode",
                    "From hand-over to last token.",
                    "s",
                    _quantiles("mmd_phase_seconds", "phase=decode"),
                ),
            ),
        ),
        Row(
            "KV blocks",
            (
                Panel(
                    "KV in use",
                    "Share of blocks that are used or reserved, by pod. At one, new sequences wait.",
                    "percentunit",
                    (Query(KV_USED, "{{pod}}"),),
                    warn_above=0.9,
                ),
                Panel(
                    "Blocks by state",
                    "Of all pods. Free includes what the prefix cache holds and nobody uses.",
                    "short",
                    (_level("mmd_kv_blocks", "state"),),
                    "stack",
                ),
                Panel(
                    "Leases a second",
                    "On blocks of decode pods, by what became of them. Expired and lost ones cost a second attempt.",
                    "ops",
                    (_sum("mmd_kv_leases_total", "outcome"),),
                ),
                Panel(
                    "Sequences that gave their KV up",
                    "So that others could go on; their prompts are computed again. Above zero: more KV, or fewer places.",
                    "ops",
                    (_sum("mmd_preemptions_total", "pod"),),
                ),
            ),
        ),
    ),
)
TRANSFERS = Board(
    "transfers",
    "Transfers and NATS",
    "What travels between pods: embeddings, KV, messages.",
    (
        Row(
            "Payload",
            (
                Panel(
                    "Bytes a second",
                    "Embeddings over NATS, KV over its own links.",
                    "Bps",
                    (
                        Query(
                            f"sum by (link) ({_rate('mmd_transfer_bytes_total', 'direction=received')})",
                            "{{link}}",
                        ),
                    ),
                ),
                Panel(
                    "Length of a transfer",
                    "95th percentile, first byte to last.",
                    "s",
                    (_quantile(0.95, "mmd_transfer_seconds", "link"),),
                ),
                Panel(
                    "Offers of features",
                    "sent: it travelled; have: it was there already; refused: nobody wanted it any more.",
                    "ops",
                    (_sum("mmd_embedding_offers_total", "outcome"),),
                ),
                Panel(
                    "Credit granted",
                    "Room that receivers keep for transfers under way, and sequences that wait for their KV.",
                    "bytes",
                    (
                        Query(f"sum({_of('mmd_embedding_credit_bytes')})", "embeddings"),
                        Query(f"sum({_of('mmd_kv_inbound_sequences')})", "sequences"),
                    ),
                ),
                Panel(
                    "Transfers that failed",
                    "By link and reason. Each is tried again; a steady rate means a broken pair or network.",
                    "ops",
                    (
                        Query(
                            f"sum by (link, reason) ({_rate('mmd_transfer_failures_total')})",
                            "{{link}} {{reason}}",
                            "trouble",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "NATS",
            (
                Panel(
                    "Round trip",
                    "To the message server and back, over all pods.",
                    "s",
                    _quantiles("mmd_nats_round_trip_seconds"),
                ),
                Panel(
                    "Pods without a connection",
                    "Above zero, those pods neither get work nor deliver any.",
                    "short",
                    (
                        Query(
                            f"count({_of('mmd_nats_connected')}) - sum({_of('mmd_nats_connected')})", "pods"
                        ),
                    ),
                    "number",
                    warn_above=0.5,
                ),
                Panel(
                    "Connections made anew",
                    "By pod.",
                    "ops",
                    (_sum("mmd_nats_reconnects_total", "pod"),),
                ),
                Panel(
                    "Messages without effect",
                    "Malformed, dropped, or their handler failed. Zero, always.",
                    "ops",
                    (_sum("mmd_nats_messages_lost_total", "reason"),),
                ),
                Panel(
                    "Errors by code",
                    "Typed errors of all pods; what each means stands in docs/operations.md.",
                    "ops",
                    (_trouble("mmd_errors_total", "code"),),
                ),
            ),
        ),
    ),
)
SCALING = Board(
    "scaling",
    "Autoscaling",
    "What the autoscaler looks at, what it decides and why, and the pools as they are.",
    (
        Row(
            "Decisions (of the operator)",
            (
                Panel(
                    "Load of a replica, by signal",
                    "As a share of its target. The signal that is highest above one decides; below one, the pool may shrink.",
                    "percentunit",
                    (
                        Query(
                            f"max by (pool, signal) ({_of('mmd_scaling_signal')}) / max by (pool, signal) ({_of('mmd_scaling_signal_target')})",
                            "{{pool}} {{signal}}",
                            "operator",
                        ),
                    ),
                    warn_above=1,
                ),
                Panel(
                    "Replicas wanted and decided",
                    "What the load asks for, what was decided, and the bounds of the spec. Wanted above decided: see what holds it back.",
                    "short",
                    (_operators("mmd_scaling_replicas", "pool, size"),),
                ),
                Panel(
                    "Pods desired, ready and draining",
                    "Over all revisions. Desired above ready for long: pods that find no place, or do not start.",
                    "short",
                    (_operators("mmd_pool_replicas", "pool, state"),),
                ),
                Panel(
                    "Why sizes changed",
                    "Decisions that were carried out, by direction and reason.",
                    "short",
                    (
                        Query(
                            f"sum by (pool, direction, reason) (increase({_of('mmd_scaling_decisions_total')}[{RATE}]))",
                            "{{pool}} {{direction}}: {{reason}}",
                            "operator",
                        ),
                    ),
                ),
                Panel(
                    "What holds a decision back",
                    "MaxReplicas, GpuBudget, Unschedulable, PodsNotStarting and DownstreamSaturated do not go away by waiting.",
                    "short",
                    (_operators("mmd_scaling_limited", "pool, limit"),),
                ),
                Panel(
                    "Numbers that are missing",
                    "Pods and gateways that were not heard. Above zero, the pool is not made smaller.",
                    "short",
                    (_operators("mmd_scaling_missing_samples", "pool"),),
                    warn_above=0.5,
                ),
            ),
        ),
        Row(
            "Signals",
            (
                Panel(
                    "Encoder: seconds of backlog",
                    "Queued work over the pool's measured throughput, and what encoders have taken.",
                    "s",
                    (
                        Query(
                            f"max by (modality) ({_of('mmd_encode_queue_work')}) / on (modality) sum by (modality) ({_of('mmd_encode_work_per_second')})",
                            "queue: {{modality}}",
                        ),
                        Query(f"sum({_of('mmd_backlog_seconds', 'role=encode')})", "taken"),
                    ),
                ),
                Panel(
                    "Prefill: seconds of backlog",
                    "Waiting tokens over measured throughput.",
                    "s",
                    (Query(_of("mmd_backlog_seconds", "role=prefill"), "{{pod}}"),),
                ),
                Panel(
                    "Decode: KV in use",
                    "Share of blocks, by pod.",
                    "percentunit",
                    (Query(KV_USED, "{{pod}}"),),
                    warn_above=0.85,
                ),
                Panel(
                    "Decode: sequences waiting and running",
                    "Over the places there are.",
                    "percentunit",
                    (
                        Query(
                            f"sum by (pod) ({_of('mmd_sequences', 'state=~waiting|running')}) / sum by (pod) ({_of('mmd_max_sequences')})",
                            "{{pod}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Pools",
            (
                Panel(
                    "Pods by role and state",
                    "Loading pods count as capacity that is on its way; draining ones finish what they hold.",
                    "short",
                    (Query(f"max by (role, state) ({_of('mmd_gateway_pods')})", "{{role}} {{state}}"),),
                ),
                Panel(
                    "Sequences that wait for a pod",
                    "By the role that is missing: scaled to zero, not schedulable, or still loading.",
                    "short",
                    (_level("mmd_gateway_held_sequences", "role"),),
                ),
                Panel(
                    "Revisions",
                    "Processes by pipeline revision: two lines during a rollout.",
                    "short",
                    (Query(f"count by (revision) ({_of('mmd_build_info')})", "{{revision}}"),),
                    "stack",
                ),
                Panel(
                    "CPU of each pod",
                    "Seconds a second.",
                    "short",
                    (_sum("process_cpu_seconds_total", "pod"),),
                ),
                Panel(
                    "Memory of each pod",
                    "Resident bytes.",
                    "bytes",
                    (Query(_of("process_resident_memory_bytes"), "{{pod}}"),),
                ),
            ),
        ),
    ),
)
_IT = "mmd_operator_leading"
OPERATOR = Board(
    "operator",
    "Operator",
    "Does the operator do its work, and what does it see of this deployment?",
    (
        Row(
            "This deployment",
            (
                Panel(
                    "Conditions",
                    "As in the resource's status, with their reasons: one is True. Degraded and ScalingLimited should not be.",
                    "short",
                    (_operators("mmd_deployment_condition", "condition, reason"),),
                ),
                Panel(
                    "Pods with a problem",
                    "By what keeps them from working. NoGpu: no node has the GPUs that they ask for.",
                    "short",
                    (_operators("mmd_deployment_problem_pods", "component, reason"),),
                ),
                Panel(
                    "Drains",
                    "Pods that were asked to finish and go. Overdue ones were removed with work in their hands.",
                    "short",
                    (
                        Query(
                            f"sum by (pool, outcome) (increase({_of('mmd_drains_total')}[{RATE}]))",
                            "{{pool}} {{outcome}}",
                            "operator",
                        ),
                    ),
                ),
                Panel(
                    "Length of a drain",
                    "95th percentile over all deployments, from the request until the pod was gone.",
                    "s",
                    (_operator_quantile(0.95, "mmd_operator_drain_seconds", "pool"),),
                ),
            ),
        ),
        Row(
            "The operator itself",
            (
                Panel(
                    "Leading, and waiting to lead",
                    "One leads, always. None: nothing is healed and nothing is scaled; requests are served all the same.",
                    "short",
                    (
                        Query(f"sum({_IT})", "leading", "operator"),
                        Query(f"count({_IT}) - sum({_IT})", "waiting", "operator"),
                    ),
                ),
                Panel(
                    "Longest wait of a deployment",
                    "Since it was last brought up to date. Each is looked at once a minute at least.",
                    "s",
                    (Query("max(mmd_operator_oldest_pass_seconds)", "wait", "operator"),),
                    warn_above=180,
                ),
                Panel(
                    "Passes a second",
                    "Over single deployments, by how they ended. Busy ones are tried again; failed ones are bugs: see the log.",
                    "ops",
                    (_operator("mmd_operator_passes_total", "loop, outcome"),),
                ),
                Panel(
                    "Length of a pass",
                    "Without the wait for its turn. Most of it is the API server's.",
                    "s",
                    tuple(
                        Query(
                            f"histogram_quantile({q:g}, sum by (le) (rate(mmd_operator_pass_seconds_bucket[{RATE}])))",
                            f"p{q * 100:g}",
                            "operator",
                        )
                        for q in (0.5, 0.95, 0.99)
                    ),
                ),
                Panel(
                    "Calls of the API server",
                    "By result. Throttled (429) ones mean that the API server defends itself; the operator waits as long as it says.",
                    "ops",
                    (_operator("mmd_operator_api_calls_total", "result"),),
                    "stack",
                ),
                Panel(
                    "Length of a call",
                    "95th percentile, by verb.",
                    "s",
                    (_operator_quantile(0.95, "mmd_operator_api_seconds", "verb"),),
                ),
                Panel(
                    "Objects written",
                    "Repaired ones had been changed or deleted by somebody else: a steady rate is a fight with another controller.",
                    "ops",
                    (_operator("mmd_operator_objects_total", "outcome"),),
                ),
                Panel(
                    "Pods asked how they are",
                    "Silent and unbelievable ones count as missing numbers.",
                    "ops",
                    (_operator("mmd_operator_asked_pods_total", "outcome"),),
                ),
                Panel(
                    "CPU of the operator",
                    "Seconds a second, by pod.",
                    "short",
                    (
                        Query(
                            f"rate(process_cpu_seconds_total[{RATE}]) and on (instance) {_IT}",
                            "{{pod}}",
                            "operator",
                        ),
                    ),
                ),
                Panel(
                    "Memory of the operator",
                    "Resident bytes, by pod.",
                    "bytes",
                    (Query(f"process_resident_memory_bytes and on (instance) {_IT}", "{{pod}}", "operator"),),
                ),
            ),
        ),
    ),
)
BOARDS = (OVERVIEW, ENCODER, ENGINE, TRANSFERS, SCALING, OPERATOR)

# What happened, as marks on every picture: a pod that was not there two minutes ago (scaling, a restart), a second revision, a
# decision of the autoscaler.
STARTED = f"{_of('mmd_build_info')} unless {_of('mmd_build_info')} offset 2m"
SCALED = f"sum by (pool, direction, reason) (increase({_of('mmd_scaling_decisions_total')}[{RATE}])) > 0"
ROLLOUT = f"count(count by (revision) ({_of('mmd_build_info')})) > 1"


def filled(expr: str, namespace: str, deployment: str, rate_interval: str) -> str:
    """An expression for a server that knows no variables."""
    for name, value in (("$namespace", namespace), ("$deployment", deployment), (RATE, rate_interval)):
        expr = expr.replace(name, value)
    return expr
