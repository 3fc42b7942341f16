"""The conditions of a deployment, from what a pass found out. Pure: the same facts give the same words, and time is an argument.

Each condition has a list of rules in the order of evaluation, at the end of this file; the first that gives a state decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from mmd_api.contract.pools import PoolName
from mmd_api.status import (
    Condition,
    ConditionType,
)
from mmd_operator.facts import Facts
from mmd_operator.observed import Workload
from mmd_operator.problems import Problem, format_problems
from mmd_operator.replacement import waiting_words

Truth = Literal["True", "False", "Unknown"]
_POOL_CONDITIONS: dict[PoolName, ConditionType] = {
    "encoder": "EncoderReady",
    "prefill": "PrefillReady",
    "decode": "DecodeReady",
}


@dataclass(frozen=True, slots=True)
class ConditionState:
    """A condition as it is now; the time of its last transition is added later (`dated`)."""

    type: ConditionType
    status: Truth
    reason: str
    message: str


ConditionRule = Callable[[Facts], ConditionState | None]
PoolRule = Callable[[Facts, PoolName], ConditionState | None]


def current_conditions(facts: Facts) -> tuple[ConditionState, ...]:
    """Every condition of a deployment that is not being deleted."""
    return (
        *(_first(rules, facts) for rules in (READY, PROGRESSING, DEGRADED)),
        *(_first_of_pool(POOL_READY, facts, pool) for pool in facts.pools),
        *(
            _first(rules, facts)
            for rules in (SCALING_ACTIVE, SCALING_LIMITED, METRICS_FRESH)
            if facts.scaling.pools
        ),
    )


def _first(rules: Sequence[ConditionRule], facts: Facts) -> ConditionState:
    return next(state for rule in rules if (state := rule(facts)) is not None)


def _first_of_pool(rules: Sequence[PoolRule], facts: Facts, pool: PoolName) -> ConditionState:
    return next(state for rule in rules if (state := rule(facts, pool)) is not None)


def removing(stage: str, message: str) -> tuple[ConditionState, ...]:
    """Conditions of a deployment that is being deleted."""
    return (
        ConditionState("Ready", "False", "Deleting", "the deployment is being deleted"),
        ConditionState("Progressing", "True", stage, message),
    )


def dated(
    found: Iterable[ConditionState], previous: Sequence[Mapping[str, Any]], generation: int, now: datetime
) -> list[Condition]:
    """Conditions with the time of their last change of status, taken from `previous` where it did not change."""
    before = {c.get("type"): c for c in previous}
    return [
        Condition(
            type=v.type,
            status=v.status,
            observed_generation=generation,
            last_transition_time=(
                before[v.type]["lastTransitionTime"]
                if v.type in before and before[v.type].get("status") == v.status
                else now
            ),
            reason=v.reason,
            message=v.message[:1024],
        )
        for v in found
    ]


def _counts(facts: Facts, revision: str | None) -> str:
    """`encoder 1/2, prefill 1/1, decode 4/4` of one revision."""
    parts = []
    for pool in facts.pools:
        workload = facts.workloads(pool).get(revision)
        parts.append(
            f"{pool} {workload.ready}/{workload.replicas}" if workload else f"{pool} not created yet"
        )
    return ", ".join(parts)


def serving(facts: Facts) -> ConditionState | None:
    """A request would be answered by the revision that serves, whatever else is in progress."""
    if _missing(facts):
        return None
    gateway, revision = facts.gateway, facts.serving
    counts = f"gateway {gateway.ready}/{gateway.replicas}, " if gateway else ""
    return ConditionState(
        "Ready", "True", "Serving", f"{counts}{_counts(facts, revision)}; revision {revision}"
    )


def not_serving(facts: Facts) -> ConditionState | None:
    """A component has no Ready pod."""
    worst = facts.problems[0].reason if facts.problems else "Starting"
    why = format_problems(facts.problems[:2]) or facts.waiting or "check the pods' conditions and logs"
    return ConditionState("Ready", "False", worst, f"{', '.join(_missing(facts))}; {why}")


def _missing(facts: Facts) -> list[str]:
    """Components that have no Ready pod where a request needs one."""
    gateway = facts.gateway
    missing = []
    if gateway is None or gateway.ready == 0:
        missing.append("no gateway pod is Ready")
    if facts.managed_nats:
        nats = facts.observed.sized(f"{facts.name}-nats")
        if nats is None or nats.workload is None or nats.workload.ready == 0:
            missing.append("the NATS server is not Ready")
    for pool in facts.pools:
        workload = facts.serving_workload(pool)
        if workload is None or (workload.ready == 0 and workload.replicas > 0):
            missing.append(f"no {pool} pod is Ready")
    return missing


def rollout_paused(facts: Facts) -> ConditionState | None:
    """The operator does nothing."""
    if not facts.paused:
        return None
    return ConditionState("Progressing", "False", "Paused", "spec.paused is true; set it to false to resume")


def plan_failed(facts: Facts) -> ConditionState | None:
    """There is no plan; the worst problem is the reason."""
    if facts.step is not None:
        return None
    return ConditionState("Progressing", "False", facts.problems[0].reason, format_problems(facts.problems))


def rollout_complete(facts: Facts) -> ConditionState | None:
    """Nothing is left to do."""
    step = facts.step
    if step is None or step.stage != "Complete":
        return None
    return ConditionState("Progressing", "False", "Complete", f"revision {step.revision} is complete")


def waiting_for_gpu_budget(facts: Facts) -> ConditionState | None:
    """The GPU budget leaves the new revision too little to begin with."""
    step = facts.step
    if step is None or not step.blocked:
        return None
    return ConditionState("Progressing", "True", "WaitingForGpuBudget", step.waits_for)


def rollout_stuck(facts: Facts) -> ConditionState | None:
    """Problems keep the new revision from being Ready, while another serves."""
    step, problems = facts.step, _problems_in_the_way(facts)
    if step is None or step.stage != "BringingUp" or not problems:
        return None
    counts = _counts(facts, step.revision)
    return ConditionState(
        "Progressing",
        "False",
        "RolloutStuck",
        f"rollout stuck: revision {step.revision} is not Ready ({counts}): {format_problems(problems[:2])}; "
        f"revision {step.serving} keeps serving; fix the spec or revert it",
    )


def held_up_by_problems(facts: Facts) -> ConditionState | None:
    """Problems of the revision in any other stage."""
    step, problems = facts.step, _problems_in_the_way(facts)
    if step is None or not problems:
        return None
    message = f"{_counts(facts, step.revision)}: {format_problems(problems[:2])}"
    return ConditionState("Progressing", "False", problems[0].reason, message)


def in_progress(facts: Facts) -> ConditionState | None:
    """The stage of the rollout, and what it waits for."""
    step = facts.step
    if step is None:
        return None
    counts = _counts(facts, step.revision)
    words = {
        "Creating": f"starting revision {step.revision}: {counts}",
        "BringingUp": f"starting revision {step.revision} next to {step.serving}: {counts}",
        "SwitchingGateway": f"revision {step.revision} is Ready; the gateway is switching to it from {step.serving}",
        "Draining": f"revision {step.revision} receives new requests; gateway pods of older revisions are finishing theirs",
        "Updating": f"updating pods of revision {step.revision}: {counts}",
    }
    more = "; ".join(part for part in (step.waits_for, waiting_words(step.replace), facts.waiting) if part)
    return ConditionState(
        "Progressing", "True", step.stage, words[step.stage] + (f"; {more}" if more else "")
    )


def _problems_in_the_way(facts: Facts) -> list[Problem]:
    """Problems of the revision that is to serve, or of what all revisions share."""
    step = facts.step
    return [p for p in facts.problems if step is not None and p.revision in (None, step.revision)]


def problems_exist(facts: Facts) -> ConditionState | None:
    """Something is wrong: the worst first."""
    if not facts.problems:
        return None
    return ConditionState("Degraded", "True", facts.problems[0].reason, format_problems(facts.problems))


def fields_unknown(facts: Facts) -> ConditionState | None:
    """The resource has fields that this operator does not know."""
    if not facts.unknown_fields:
        return None
    fields = ", ".join(facts.unknown_fields)
    return ConditionState(
        "Degraded",
        "True",
        "UnknownFields",
        f"the operator and the CRD are from different releases, and the operator ignores {fields}; install both from the same release",
    )


def no_problem(facts: Facts) -> ConditionState | None:
    """Nothing is wrong."""
    del facts
    return ConditionState("Degraded", "False", "NoProblem", "no problem detected")


def pool_not_created(facts: Facts, pool: PoolName) -> ConditionState | None:
    """The revision that serves has no such pool yet."""
    if facts.serving_workload(pool) is not None:
        return None
    problems = _problems_of_pool(facts, pool)
    reason = problems[0].reason if problems else "Starting"
    return ConditionState(
        _POOL_CONDITIONS[pool], "False", reason, format_problems(problems) or "not created yet"
    )


def pool_complete(facts: Facts, pool: PoolName) -> ConditionState | None:
    """All pods are Ready and up to date, or none is wanted."""
    workload = facts.serving_workload(pool)
    if workload is None or not workload.rolled:
        return None
    reason = "ScaledToZero" if workload.replicas == 0 else "AllReady"
    return ConditionState(_POOL_CONDITIONS[pool], "True", reason, _pods_ready(workload))


def pool_has_problems(facts: Facts, pool: PoolName) -> ConditionState | None:
    """Problems keep pods from being Ready."""
    workload, problems = facts.serving_workload(pool), _problems_of_pool(facts, pool)
    if workload is None or not problems:
        return None
    message = f"{_pods_ready(workload)}; {format_problems(problems)}"
    return ConditionState(_POOL_CONDITIONS[pool], "False", problems[0].reason, message)


def pool_starting(facts: Facts, pool: PoolName) -> ConditionState | None:
    """Pods start."""
    workload = facts.serving_workload(pool)
    if workload is None:
        return None
    return ConditionState(
        _POOL_CONDITIONS[pool], "False", "Starting", f"{_pods_ready(workload)}; {workload.updated} updated"
    )


def _pods_ready(workload: Workload) -> str:
    return f"{workload.ready} of {workload.replicas} {workload.unit} Ready"


def _problems_of_pool(facts: Facts, pool: PoolName) -> list[Problem]:
    revisions = (None, facts.serving)
    return [p for p in facts.problems if p.component == pool and p.revision in revisions]


def scaling_paused(facts: Facts) -> ConditionState | None:
    """The operator does nothing."""
    if not facts.paused:
        return None
    return ConditionState(
        "ScalingActive", "False", "Paused", "spec.paused is true; set it to false to resume"
    )


def scaling_in_shadow(facts: Facts) -> ConditionState | None:
    """Every pool that scales only reports its decisions."""
    shadow = facts.scaling.shadow
    if len(shadow) != len(facts.scaling.pools):
        return None
    return ConditionState(
        "ScalingActive", "False", "Shadow", f"{', '.join(shadow)}: decisions are reported but not applied"
    )


def scaling_active(facts: Facts) -> ConditionState | None:
    """The autoscaler sizes some pools."""
    shadow = ", ".join(facts.scaling.shadow)
    acting = ", ".join(p for p in facts.scaling.pools if p not in facts.scaling.shadow)
    more = f"; shadow mode: {shadow}" if shadow else ""
    return ConditionState("ScalingActive", "True", "Active", f"scaling {acting}{more}")


def limit_reached(facts: Facts) -> ConditionState | None:
    """A limit that waiting does not lift keeps pools from what the load needs."""
    scaling = facts.scaling
    if scaling.limit is None:
        return None
    return ConditionState(
        "ScalingLimited",
        "True",
        scaling.limit,
        f"more replicas needed: {', '.join(scaling.limited)}; {_REMEDIES[scaling.limit]}",
    )


def not_limited(facts: Facts) -> ConditionState | None:
    """No pool is at such a limit."""
    del facts
    return ConditionState("ScalingLimited", "False", "NotLimited", "no pool is limited")


def reports_missing(facts: Facts) -> ConditionState | None:
    """Reports are missing without which nothing is lowered."""
    missing = facts.scaling.missing
    if not missing:
        return None
    shown = "; ".join(missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return ConditionState(
        "MetricsFresh",
        "False",
        "MetricsMissing",
        f"scale-down is on hold: {shown}{more}; check the logs of these pods, and that the operator can reach them",
    )


def all_reporting(facts: Facts) -> ConditionState | None:
    """Every pod reports."""
    del facts
    return ConditionState("MetricsFresh", "True", "AllReporting", "all pods report their load")


_REMEDIES = {
    "MaxReplicas": "raise the pool's autoscaling.maxReplicas",
    "GpuBudget": "raise spec.gpuBudget or reduce other pools",
    "Unschedulable": "the pool's pods cannot be scheduled; add nodes or reduce their resource requests",
    "PodsNotStarting": "the pool's pods do not become Ready; check the pool's condition",
    "DownstreamSaturated": "the next pool downstream is saturated; scale that pool first",
}


READY: tuple[ConditionRule, ...] = (serving, not_serving)
PROGRESSING: tuple[ConditionRule, ...] = (
    rollout_paused,
    plan_failed,
    rollout_complete,
    waiting_for_gpu_budget,
    rollout_stuck,
    held_up_by_problems,
    in_progress,
)
DEGRADED: tuple[ConditionRule, ...] = (problems_exist, fields_unknown, no_problem)
POOL_READY: tuple[PoolRule, ...] = (pool_not_created, pool_complete, pool_has_problems, pool_starting)
SCALING_ACTIVE: tuple[ConditionRule, ...] = (scaling_paused, scaling_in_shadow, scaling_active)
SCALING_LIMITED: tuple[ConditionRule, ...] = (limit_reached, not_limited)
METRICS_FRESH: tuple[ConditionRule, ...] = (reports_missing, all_reporting)
"""One list for each condition: the first rule that gives a state decides."""
