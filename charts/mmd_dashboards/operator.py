"""The dashboard Operator: the operator itself, and what it reports about a deployment."""

from __future__ import annotations

from mmd_dashboards.panels import Board, Panel, Query, Row
from mmd_dashboards.queries import (
    RATE,
    of,
    operator_level_by,
    operator_quantile,
    operator_rate_by,
)

_LEADING = "mmd_operator_leading"
OPERATOR = Board(
    "operator",
    "Operator",
    "Whether the operator works, and what it reports about this deployment.",
    (
        Row(
            "This deployment",
            (
                Panel(
                    "Conditions",
                    "From the resource's status, with their reasons; 1 is True. Degraded and ScalingLimited should be 0. AuthenticationRequired is 0 where anyone can use the gateway.",
                    "short",
                    (operator_level_by("mmd_deployment_condition", "condition, reason"),),
                ),
                Panel(
                    "Pods with a problem",
                    "By problem. NoGpu: no node has the requested GPUs.",
                    "short",
                    (operator_level_by("mmd_deployment_problem_pods", "component, reason"),),
                ),
                Panel(
                    "Drains",
                    "Pods requested to drain. Overdue pods were removed with requests in flight.",
                    "short",
                    (
                        Query(
                            f"sum by (pool, outcome) (increase({of('mmd_drains_total')}[{RATE}]))",
                            "{{pool}} {{outcome}}",
                            "operator",
                        ),
                    ),
                ),
                Panel(
                    "Duration of a drain",
                    "95th percentile over all deployments, from the request until the pod was removed.",
                    "s",
                    (operator_quantile(0.95, "mmd_operator_drain_seconds", "pool"),),
                ),
            ),
        ),
        Row(
            "The operator itself",
            (
                Panel(
                    "Leader and standbys",
                    "There should always be one leader. Without one, nothing is repaired or scaled; requests are still served.",
                    "short",
                    (
                        Query(f"sum({_LEADING})", "leading", "operator"),
                        Query(f"count({_LEADING}) - sum({_LEADING})", "waiting", "operator"),
                    ),
                ),
                Panel(
                    "Longest time since a pass",
                    "Of any deployment, whether the pass succeeded or not. Each deployment has at least one pass per minute.",
                    "s",
                    (Query("max(mmd_operator_oldest_pass_seconds)", "wait", "operator"),),
                    warn_above=180,
                ),
                Panel(
                    "Reconcile failing for",
                    "Time without a successful pass; for the reason, see condition Degraded and the log.",
                    "s",
                    (
                        Query(
                            "max(" + of("mmd_deployment_reconcile_failing_seconds") + ")",
                            "failing",
                            "operator",
                        ),
                    ),
                    warn_above=300,
                ),
                Panel(
                    "Namespaces not read for",
                    "Time for which the API server has refused to let the leader read a namespace. Its deployments are not reconciled.",
                    "s",
                    (Query("max by (namespace) (mmd_operator_unread_seconds)", "{{namespace}}", "operator"),),
                    warn_above=300,
                ),
                Panel(
                    "Passes per second",
                    "Of all deployments, by outcome. Busy passes are retried; failed passes are bugs: see the log.",
                    "ops",
                    (operator_rate_by("mmd_operator_passes_total", "loop, outcome"),),
                ),
                Panel(
                    "Duration of a pass",
                    "Without queueing. Most of it is spent in the API server.",
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
                    "API server calls",
                    "By result. Throttled means status 429; the operator waits for the time given in Retry-After.",
                    "ops",
                    (operator_rate_by("mmd_operator_api_calls_total", "result"),),
                    "stack",
                ),
                Panel(
                    "Duration of a call",
                    "95th percentile, by verb.",
                    "s",
                    (operator_quantile(0.95, "mmd_operator_api_seconds", "verb"),),
                ),
                Panel(
                    "Objects written",
                    "Repaired objects had been changed or deleted by another client; a steady rate means a conflict with another controller.",
                    "ops",
                    (operator_rate_by("mmd_operator_objects_total", "outcome"),),
                ),
                Panel(
                    "Events reported",
                    "Dropped Events exceeded the limit or were rejected by the API server; the log names them.",
                    "ops",
                    (operator_rate_by("mmd_operator_events_total", "outcome"),),
                ),
                Panel(
                    "Load reports",
                    "Silent and invalid ones count as missing.",
                    "ops",
                    (operator_rate_by("mmd_operator_load_reports_total", "outcome"),),
                ),
                Panel(
                    "CPU of the operator",
                    "CPU seconds per second, by pod.",
                    "short",
                    (
                        Query(
                            f"rate(process_cpu_seconds_total[{RATE}]) and on (instance) {_LEADING}",
                            "{{pod}}",
                            "operator",
                        ),
                    ),
                ),
                Panel(
                    "Memory of the operator",
                    "Resident bytes, by pod.",
                    "bytes",
                    (
                        Query(
                            f"process_resident_memory_bytes and on (instance) {_LEADING}",
                            "{{pod}}",
                            "operator",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
