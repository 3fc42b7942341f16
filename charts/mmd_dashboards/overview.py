"""The dashboard Overview: what clients get, and a comparison of the pools."""

from __future__ import annotations

from mmd_dashboards.panels import Board, Panel, Query, Row
from mmd_dashboards.queries import (
    BUSY,
    KV_USED,
    level_by,
    of,
    promise,
    quantile,
    quantiles,
    rate_by,
    share,
    trouble_by,
)

_CLIENTS = Row(
    "Service to clients",
    (
        Panel(
            "Requests per second",
            "By outcome: ok, or the code of the error. Investigate anything other than ok and client errors.",
            "reqps",
            (rate_by("mmd_requests_total", "code"),),
            "stack",
        ),
        Panel(
            "Time to first token",
            "From the arrival of the request, including its upload, to the first token. The target is spec.slo.ttftMilliseconds.",
            "s",
            (*quantiles("mmd_ttft_seconds"), promise("ttft")),
        ),
        Panel(
            "Inter-token latency",
            "As they reach the gateway. Rises with the number of sequences per decode pod, and when prompts share its steps.",
            "s",
            (*quantiles("mmd_itl_seconds"), promise("itl")),
        ),
        Panel(
            "SLO attainment",
            "Share of requests that met spec.slo. Below the objective, the error budget is being spent.",
            "percentunit",
            (
                share("mmd_slo_requests_total", "outcome=kept", "signal"),
                Query(f"max({of('mmd_slo_objective_ratio')})", "objective"),
            ),
        ),
        Panel(
            "End-to-end latency, by modality",
            "95th percentile from arrival to last token. Video costs more than images, images more than text.",
            "s",
            (quantile(0.95, "mmd_e2e_seconds", "modality"),),
        ),
        Panel(
            "Tokens per second",
            "Prompt tokens by modality, and output. Cached prompt tokens are not computed again.",
            "ops",
            (rate_by("mmd_tokens_total", "kind"),),
        ),
        Panel(
            "Requests in flight",
            "Accepted and not finished. A steady increase means that a pool downstream is full.",
            "short",
            (
                Query(f"sum({of('mmd_requests_running')})", "requests"),
                level_by("mmd_gateway_held_sequences", "role"),
            ),
        ),
        Panel(
            "Tenants that wait",
            "Estimated work of each tenant that waits for its turn, in seconds of the whole deployment. Normally zero: pools have room.",
            "s",
            (Query(f"sum by (tenant) ({of('mmd_tenant_queued_seconds')})", "{{tenant}}", "tenants"),),
            "stack",
        ),
        Panel(
            "Placed again",
            "Requests that lost their pod and were placed again; their clients saw a pause, not an error. Normally zero.",
            "ops",
            (trouble_by("mmd_retries_total", "reason"), trouble_by("mmd_migrations_total", "reason")),
        ),
    ),
)
_POOLS = Row(
    "Comparison of the pools",
    (
        Panel(
            "Time by phase",
            "Seconds spent in each phase, per second, over all requests. The largest is the bottleneck.",
            "short",
            (rate_by("mmd_phase_seconds_sum", "phase"),),
            "stack",
        ),
        Panel(
            "Backlog",
            "Time to process the waiting work at the measured throughput. The autoscaler acts on this.",
            "s",
            (level_by("mmd_backlog_seconds", "role"),),
        ),
        Panel(
            "Pool utilization",
            "Encoders: share of the time that towers ran. Decoders: KV blocks and sequence slots in use.",
            "percentunit",
            (
                Query(f"avg(max by (pod) ({BUSY}))", "encode: busy"),
                Query(f"avg({KV_USED})", "KV in use"),
                Query(
                    f"sum({of('mmd_sequences', 'state=running')}) / sum({of('mmd_max_sequences')})",
                    "sequence slots in use",
                ),
            ),
            warn_above=0.9,
        ),
        Panel(
            "Ready pods",
            "By role, from heartbeats at the gateway. A pod with two roles counts for both.",
            "short",
            (Query(f"max by (role) ({of('mmd_gateway_pods', 'state=ready')})", "{{role}}"),),
        ),
    ),
)

_ROUTER = Row(
    "Router",
    (
        Panel(
            "Error of the estimate",
            "Difference between the estimated and the actual time to first token, by the actual one. Above 1, the router chooses by wrong figures.",
            "percentunit",
            quantiles("mmd_router_error_ratio"),
        ),
        Panel(
            "Fitted factors",
            "What each term of the estimate is multiplied by. Far from 1, pods report figures that requests do not meet.",
            "short",
            (Query(f"avg by (term) ({of('mmd_router_factor_ratio')})", "{{term}}"),),
        ),
        Panel(
            "Fitted overhead",
            "Seconds that no term explains.",
            "s",
            (Query(f"avg({of('mmd_router_overhead_seconds')})", "overhead"),),
        ),
        Panel(
            "Index of caches",
            "KV blocks and features that the router knows to be cached, of all pods, and how many it has room for; the fullest of all gateways.",
            "short",
            (
                Query(f"max by (of) ({of('mmd_router_index_blocks')})", "{{of}}"),
                Query(f"min by (of) ({of('mmd_router_index_limit_blocks')})", "limit of {{of}}"),
            ),
        ),
    ),
)

OVERVIEW = Board(
    "overview",
    "Overview",
    "Whether the deployment meets its SLO, and if not, which pool is the cause.",
    (_CLIENTS, _POOLS, _ROUTER),
)
