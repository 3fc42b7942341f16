"""The dashboard Autoscaling: the autoscaler's signals and decisions, and the current pools."""

from __future__ import annotations

from mmd_dashboards.panels import Board, Panel, Query, Row
from mmd_dashboards.queries import (
    KV_USED,
    RATE,
    level_by,
    of,
    operator_level_by,
    rate_by,
)

SCALING = Board(
    "scaling",
    "Autoscaling",
    "What the autoscaler observes, what it decides and why, and the current pools.",
    (
        Row(
            "Decisions (of the operator)",
            (
                Panel(
                    "Load per replica, by signal",
                    "As a share of its target. The highest signal above 1 decides; below 1, the pool may shrink.",
                    "percentunit",
                    (
                        Query(
                            f"max by (pool, signal) ({of('mmd_scaling_signal')}) / max by (pool, signal) ({of('mmd_scaling_signal_target')})",
                            "{{pool}} {{signal}}",
                            "operator",
                        ),
                    ),
                    warn_above=1,
                ),
                Panel(
                    "Replicas wanted and decided",
                    "Replicas wanted by load, decided, and the bounds of the spec. If wanted exceeds decided, see the limits.",
                    "short",
                    (operator_level_by("mmd_scaling_replicas", "pool, size"),),
                ),
                Panel(
                    "Pods desired, ready and draining",
                    "Over all revisions. Desired above ready for long means pods that cannot be scheduled or do not start.",
                    "short",
                    (operator_level_by("mmd_pool_replicas", "pool, state"),),
                ),
                Panel(
                    "Reasons for scaling",
                    "Applied decisions, by direction and reason.",
                    "short",
                    (
                        Query(
                            f"sum by (pool, direction, reason) (increase({of('mmd_scaling_decisions_total')}[{RATE}]))",
                            "{{pool}} {{direction}}: {{reason}}",
                            "operator",
                        ),
                    ),
                ),
                Panel(
                    "Limits on decisions",
                    "Limits that condition ScalingLimited reports do not resolve on their own.",
                    "short",
                    (operator_level_by("mmd_scaling_limited", "pool, limit"),),
                ),
                Panel(
                    "Missing load reports",
                    "Pods and gateways without a load report. Above zero, scale-down is on hold.",
                    "short",
                    (operator_level_by("mmd_scaling_missing_samples", "pool"),),
                    warn_above=0.5,
                ),
            ),
        ),
        Row(
            "Signals",
            (
                Panel(
                    "Encoder: seconds of backlog",
                    "Queued work divided by the pool's measured throughput, and work accepted by encoders.",
                    "s",
                    (
                        Query(
                            f"max by (modality) ({of('mmd_encode_queue_work')}) / on (modality) sum by (modality) ({of('mmd_encode_work_per_second')})",
                            "queue: {{modality}}",
                        ),
                        Query(f"sum({of('mmd_backlog_seconds', 'role=encode')})", "taken"),
                    ),
                ),
                Panel(
                    "Prefill: seconds of backlog",
                    "Waiting tokens divided by measured throughput.",
                    "s",
                    (Query(of("mmd_backlog_seconds", "role=prefill"), "{{pod}}"),),
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
                    "Against the available slots.",
                    "percentunit",
                    (
                        Query(
                            f"sum by (pod) ({of('mmd_sequences', 'state=~waiting|running')}) / sum by (pod) ({of('mmd_max_sequences')})",
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
                    "Loading pods count as capacity in flight; draining ones finish their requests.",
                    "short",
                    (Query(f"max by (role, state) ({of('mmd_gateway_pods')})", "{{role}} {{state}}"),),
                ),
                Panel(
                    "Sequences waiting for a pod",
                    "By the missing role: scaled to zero, unschedulable, or still loading.",
                    "short",
                    (level_by("mmd_gateway_held_sequences", "role"),),
                ),
                Panel(
                    "Revisions",
                    "Processes by pipeline revision: two lines during a rollout.",
                    "short",
                    (Query(f"count by (revision) ({of('mmd_build_info')})", "{{revision}}"),),
                    "stack",
                ),
                Panel(
                    "CPU of each pod",
                    "CPU seconds per second.",
                    "short",
                    (rate_by("process_cpu_seconds_total", "pod"),),
                ),
                Panel(
                    "Memory of each pod",
                    "Resident bytes.",
                    "bytes",
                    (Query(of("process_resident_memory_bytes"), "{{pod}}"),),
                ),
            ),
        ),
    ),
)
