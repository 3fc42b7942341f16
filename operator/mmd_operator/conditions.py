"""From what was seen to the status: conditions, pools, summary. Pure: the same facts give the same words, and time is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from mmd_api.pools import POOL_NAMES, PoolName
from mmd_api.status import (
    Condition,
    ConditionType,
    MultimodalDeploymentStatus,
    PoolsStatus,
    PoolStatus,
    PoolThroughput,
    ScalingDecision,
)
from mmd_operator.observed import Observed, Workload
from mmd_operator.problems import Problem, told
from mmd_operator.resources.naming import GATEWAY_PORT
from mmd_operator.rollout import Step

Truth = Literal["True", "False", "Unknown"]
_POOL_CONDITIONS: dict[PoolName, ConditionType] = {
    "encoder": "EncoderReady",
    "prefill": "PrefillReady",
    "decode": "DecodeReady",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a condition says now; when it began to say so is added later."""

    type: ConditionType
    status: Truth
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the status says of it. `missing`: whose numbers are missing, so that nothing is lowered; `limited`: decisions cut hard."""

    decisions: Mapping[PoolName, ScalingDecision] = field(default_factory=dict)
    throughput: Mapping[PoolName, PoolThroughput] = field(default_factory=dict)
    pools: tuple[PoolName, ...] = ()
    shadow: tuple[PoolName, ...] = ()
    missing: tuple[str, ...] = ()
    limited: tuple[str, ...] = ()
    limit: str | None = None
    bottleneck: PoolName | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a pass found out. `problems` are gathered, the worst first; `step` is None where no plan could be made."""

    name: str
    namespace: str
    pools: tuple[PoolName, ...]
    managed_nats: bool
    observed: Observed
    problems: tuple[Problem, ...]
    step: Step | None
    paused: bool = False
    unknown_fields: tuple[str, ...] = ()
    scaling: Scaling = field(default_factory=Scaling)


def verdicts(facts: Facts) -> tuple[Verdict, ...]:
    """Every condition of a deployment that is not being deleted."""
    return (
        _ready(facts),
        _progressing(facts),
        _degraded(facts),
        *(_pool_ready(facts, pool) for pool in facts.pools),
        *(_scaling(facts) if facts.scaling.pools else ()),
    )


def removing(stage: str, message: str) -> tuple[Verdict, ...]:
    """Conditions of a deployment that is being deleted."""
    return (
        Verdict("Ready", "False", "Deleting", "the deployment is being deleted"),
        Verdict("Progressing", "True", stage, message),
    )


def dated(
    found: Iterable[Verdict], previous: Sequence[Mapping[str, Any]], generation: int, now: datetime
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


def status_of(facts: Facts, conditions: list[Condition], generation: int) -> MultimodalDeploymentStatus:
    """The whole status."""
    serving = facts.step.serving if facts.step else _serving(facts)
    pools = PoolsStatus(**{pool: _pool_status(facts, pool, serving) for pool in facts.pools})
    return MultimodalDeploymentStatus(
        observed_generation=generation,
        pipeline_revision=serving,
        conditions=conditions,
        pools=pools,
        pools_summary=pools.summary,
        bottleneck=_bottleneck(facts),
        endpoint=f"http://{facts.name}-gateway.{facts.namespace}.svc:{GATEWAY_PORT}",
    )


def pools_of(status: MultimodalDeploymentStatus) -> dict[PoolName, PoolStatus]:
    """The pools that a status tells of."""
    found = {name: getattr(status.pools, name) for name in POOL_NAMES}
    return {name: pool for name, pool in found.items() if pool is not None}


def _bottleneck(facts: Facts) -> Literal["Encoder", "Prefill", "Decode", "None"] | None:
    if not facts.scaling.pools:
        return None
    names: dict[PoolName, Literal["Encoder", "Prefill", "Decode"]] = {
        "encoder": "Encoder",
        "prefill": "Prefill",
        "decode": "Decode",
    }
    return names[facts.scaling.bottleneck] if facts.scaling.bottleneck else "None"


def _serving(facts: Facts) -> str | None:
    gateway = _gateway(facts)
    return gateway.template_revision if gateway else None


def _gateway(facts: Facts) -> Workload | None:
    child = facts.observed.children.get(("Deployment", f"{facts.name}-gateway"))
    return child.workload if child else None


def _workloads(facts: Facts, pool: PoolName) -> dict[str | None, Workload]:
    """StatefulSets of a pool by revision."""
    return {
        child.revision: child.workload
        for child in facts.observed.children.values()
        if child.kind == "StatefulSet" and child.component == pool and child.workload and not child.deleting
    }


def _pool_status(facts: Facts, pool: PoolName, serving: str | None) -> PoolStatus:
    sets = _workloads(facts, pool)
    return PoolStatus(
        desired=sum(w.replicas for w in sets.values()),
        ready=sum(w.ready for w in sets.values()),
        draining=sum(
            1 for pod in facts.observed.pods_of(pool) if pod.deleting or pod.drain_asked is not None
        ),
        revision=serving if serving in sets else None,
        last_decision=facts.scaling.decisions.get(pool),
        throughput=facts.scaling.throughput.get(pool),
    )


def _counts(facts: Facts, revision: str | None) -> str:
    """`encoder 1/2, prefill 1/1, decode 4/4` of one revision."""
    parts = []
    for pool in facts.pools:
        workload = _workloads(facts, pool).get(revision)
        parts.append(f"{pool} {workload.ready}/{workload.replicas}" if workload else f"{pool} not made yet")
    return ", ".join(parts)


def _ready(facts: Facts) -> Verdict:
    """Whether a request would be answered: by the revision that serves, whatever else is going on."""
    serving = facts.step.serving if facts.step else _serving(facts)
    gateway = _gateway(facts)
    missing = []
    if gateway is None or gateway.ready == 0:
        missing.append("no gateway pod is ready")
    if facts.managed_nats:
        nats = facts.observed.stateful_set(f"{facts.name}-nats")
        if nats is None or nats.workload is None or nats.workload.ready == 0:
            missing.append("the NATS server is not ready")
    for pool in facts.pools:
        workload = _workloads(facts, pool).get(serving)
        if workload is None or (workload.ready == 0 and workload.replicas > 0):
            missing.append(f"no {pool} pod is ready")
    if not missing:
        counts = f"gateway {gateway.ready}/{gateway.replicas}, " if gateway else ""
        return Verdict("Ready", "True", "Serving", f"{counts}{_counts(facts, serving)}; revision {serving}")
    worst = facts.problems[0].reason if facts.problems else "Starting"
    why = f"; {told(facts.problems[:2])}" if facts.problems else "; see the pods' conditions and logs"
    return Verdict("Ready", "False", worst, ", ".join(missing) + why)


def _progressing(facts: Facts) -> Verdict:
    if facts.paused:
        return Verdict("Progressing", "False", "Paused", "spec.paused is true; set it to false to go on")
    step = facts.step
    if step is None:
        return Verdict("Progressing", "False", facts.problems[0].reason, told(facts.problems))
    if step.stage == "Complete":
        return Verdict("Progressing", "False", "Complete", f"revision {step.revision} is whole")
    counts = _counts(facts, step.revision)
    stuck = [p for p in facts.problems if p.revision in (None, step.revision)]
    if step.stage == "BringingUp" and stuck:
        message = (
            f"revision {step.revision} does not become whole ({counts}): {told(stuck[:2])}; revision {step.serving} "
            "keeps serving; mend the spec, or set it back"
        )
        return Verdict("Progressing", "False", "RolloutStuck", message)
    if stuck:
        return Verdict("Progressing", "False", stuck[0].reason, f"{counts}: {told(stuck[:2])}")
    words = {
        "Creating": f"revision {step.revision} starts: {counts}",
        "BringingUp": f"revision {step.revision} comes up beside {step.serving}: {counts}",
        "SwitchingGateway": f"revision {step.revision} is whole; the gateway moves to it from {step.serving}",
        "Draining": f"gateway pods of older revisions finish what they hold; {step.revision} takes new requests",
        "Updating": f"pods of revision {step.revision} are replaced or added: {counts}",
    }
    return Verdict("Progressing", "True", step.stage, words[step.stage])


def _degraded(facts: Facts) -> Verdict:
    if facts.problems:
        return Verdict("Degraded", "True", facts.problems[0].reason, told(facts.problems))
    if facts.unknown_fields:
        fields = ", ".join(facts.unknown_fields)
        message = f"this operator is older than its CRD and leaves out {fields}; upgrade the operator"
        return Verdict("Degraded", "True", "UnknownFields", message)
    return Verdict("Degraded", "False", "NoProblem", "nothing is known to be wrong")


def _scaling(facts: Facts) -> tuple[Verdict, ...]:
    """Whether the autoscaler acts, is held back by something that waiting does not lift, and has its numbers."""
    scaling = facts.scaling
    shadow = ", ".join(scaling.shadow)
    if facts.paused:
        active = Verdict("ScalingActive", "False", "Paused", "spec.paused is true; set it to false to go on")
    elif len(scaling.shadow) == len(scaling.pools):
        active = Verdict(
            "ScalingActive", "False", "Shadow", f"{shadow}: decides and reports, and acts on nothing"
        )
    else:
        acting = ", ".join(p for p in scaling.pools if p not in scaling.shadow)
        active = Verdict(
            "ScalingActive",
            "True",
            "Active",
            f"sizes {acting}" + (f"; only reports {shadow}" if shadow else ""),
        )
    limited = Verdict("ScalingLimited", "False", "NotLimited", "no pool needs more than it may have")
    if scaling.limit is not None:
        message = f"{', '.join(scaling.limited)} needs more; {_REMEDIES[scaling.limit]}"
        limited = Verdict("ScalingLimited", "True", scaling.limit, message)
    fresh = Verdict("MetricsFresh", "True", "AllHeard", "every pod says how it is")
    if scaling.missing:
        shown = "; ".join(scaling.missing[:3])
        more = f" and {len(scaling.missing) - 3} more" if len(scaling.missing) > 3 else ""
        message = f"no pool is made smaller without {shown}{more}; see these pods' logs, and whether the operator may reach them"
        fresh = Verdict("MetricsFresh", "False", "MetricsMissing", message)
    return active, limited, fresh


_REMEDIES = {
    "MaxReplicas": "raise autoscaling.maxReplicas of the pool",
    "GpuBudget": "raise gpuBudget, or lower what other pools hold",
    "Unschedulable": "a pod of the pool fits on no node: add nodes, or lower what it asks for",
    "PodsNotStarting": "its pods do not become ready: see the pool's condition",
    "DownstreamSaturated": "the pool after it is used up entirely: give that one more first",
}


def _pool_ready(facts: Facts, pool: PoolName) -> Verdict:
    serving = facts.step.serving if facts.step else _serving(facts)
    condition = _POOL_CONDITIONS[pool]
    workload = _workloads(facts, pool).get(serving)
    problems = [p for p in facts.problems if p.component == pool and p.revision in (None, serving)]
    if workload is None:
        return Verdict(
            condition,
            "False",
            problems[0].reason if problems else "Starting",
            told(problems) or "not made yet",
        )
    counts = f"{workload.ready} of {workload.replicas} pods ready"
    if workload.rolled:
        return Verdict(condition, "True", "ScaledToZero" if workload.replicas == 0 else "AllReady", counts)
    if problems:
        return Verdict(condition, "False", problems[0].reason, f"{counts}; {told(problems)}")
    return Verdict(condition, "False", "Starting", f"{counts}; {workload.updated} of the newest template")


def pool_of_component(component: str | None) -> PoolName | None:
    """The pool that a component label names, if it names one."""
    return next((pool for pool in POOL_NAMES if pool == component), None)
