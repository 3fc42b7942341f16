"""The conditions of a deployment, from the facts of a pass. Pure: the same facts give the same words, and time is an argument.

Each condition has a list of rules in the order of evaluation, at the end of this file; the first rule to return a state decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from mmd_api.contract.pools import PoolName
from mmd_api.spec.exposure import ParentRef
from mmd_api.status import (
    Condition,
    ConditionType,
)
from mmd_operator.observed.condition_state import ConditionState, Truth
from mmd_operator.observed.observed import ParentReport, Workload
from mmd_operator.observed.problems import Problem, format_problems
from mmd_operator.resources.naming import WEIGHTS
from mmd_operator.sizes.replacement import waiting_words
from mmd_operator.status.facts import Facts
from mmd_operator.status.weights_download import weights_words

_POOL_CONDITIONS: dict[PoolName, ConditionType] = {
    "encoder": "EncoderReady",
    "prefill": "PrefillReady",
    "decode": "DecodeReady",
}


ConditionRule = Callable[[Facts], ConditionState | None]
PoolRule = Callable[[Facts, PoolName], ConditionState | None]


def current_conditions(facts: Facts) -> tuple[ConditionState, ...]:
    """All conditions of a deployment, unless it is being deleted."""
    return (
        *(_first(rules, facts) for rules in (READY, PROGRESSING, DEGRADED)),
        *(state for rule in STALLED if (state := rule(facts)) is not None),
        *(_first_of_pool(POOL_READY, facts, pool) for pool in facts.pools),
        *(
            _first(rules, facts)
            for rules in (SCALING_ACTIVE, SCALING_LIMITED, METRICS_FRESH)
            if facts.scaling.pools
        ),
        *(_first(rules, facts) for rules in (ROUTE_ACCEPTED,) if facts.route_parents),
        _first(AUTHENTICATION_REQUIRED, facts),
        *(_first(rules, facts) for rules in (WEIGHTS_CACHED,) if facts.weights is not None),
    )


def _first(rules: Sequence[ConditionRule], facts: Facts) -> ConditionState:
    return next(state for rule in rules if (state := rule(facts)) is not None)


def _first_of_pool(rules: Sequence[PoolRule], facts: Facts, pool: PoolName) -> ConditionState:
    return next(state for rule in rules if (state := rule(facts, pool)) is not None)


def removing(stage: str, message: str) -> tuple[ConditionState, ...]:
    """The conditions of a deployment during its deletion."""
    return (
        ConditionState("Ready", "False", "Deleting", "the deployment is being deleted"),
        ConditionState("Progressing", "True", stage, message),
    )


def dated(
    found: Iterable[ConditionState], previous: Sequence[Mapping[str, Any]], generation: int, now: datetime
) -> list[Condition]:
    """Conditions with their last transition times, taken from `previous` where the status did not change."""
    before = {condition.get("type"): condition for condition in previous}
    return [
        Condition(
            type=state.type,
            status=state.status,
            observed_generation=generation,
            last_transition_time=(
                before[state.type]["lastTransitionTime"]
                if state.type in before and before[state.type].get("status") == state.status
                else now
            ),
            reason=state.reason,
            message=state.message[:1024],
        )
        for state in found
    ]


def _counts(facts: Facts, revision: str | None) -> str:
    """Ready and desired replicas of one revision: `encoder 1/2, prefill 1/1, decode 4/4`."""
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
    problems = [p for p in facts.problems if p.stops_pods]
    worst = problems[0].reason if problems else "Starting"
    why = format_problems(problems[:2]) or facts.waiting or "check the pods' conditions and logs"
    return ConditionState("Ready", "False", worst, f"{', '.join(_missing(facts))}; {why}")


def _missing(facts: Facts) -> list[str]:
    """The components without the Ready pods needed by a request, in words."""
    gateway = facts.gateway
    missing = []
    if gateway is None or gateway.ready == 0:
        missing.append("no gateway pod is Ready")
    if facts.managed_nats:
        nats = facts.observed.sized(f"{facts.name}-nats")
        if nats is None or nats.workload is None or nats.workload.ready == 0:
            missing.append("the NATS server is not Ready")
        elif (lacking := nats.workload.replicas // 2 + 1 - nats.workload.ready) > 0:
            missing.append(
                f"NATS has no majority: {nats.workload.ready} of {nats.workload.replicas} servers are Ready, {lacking} more needed"
            )
    for pool in facts.pools:
        workload = facts.serving_workload(pool)
        if workload is None or (workload.ready == 0 and workload.replicas > 0):
            missing.append(f"no {pool} pod is Ready")
    return missing


def deployment_paused(facts: Facts) -> ConditionState | None:
    """The operator does nothing."""
    if not facts.paused:
        return None
    return ConditionState("Progressing", "False", "Paused", "spec.paused is true; set it to false to resume")


def plan_failed(facts: Facts) -> ConditionState | None:
    """There is no plan; the worst problem is the reason."""
    if facts.step is not None:
        return None
    return ConditionState("Progressing", "False", facts.problems[0].reason, format_problems(facts.problems))


def rollout_paused(facts: Facts) -> ConditionState | None:
    """Changes of the spec wait."""
    if not facts.changes_paused or facts.serving is None:
        return None
    return ConditionState(
        "Progressing",
        "False",
        "RolloutPaused",
        f"spec.rollout.paused is true: changes wait, except of sizes and of other fields that no pod reads; revision {facts.serving} "
        f"serves; resume with `mmd rollout resume {facts.name}`",
    )


def deadline_exceeded(facts: Facts) -> ConditionState | None:
    """The rollout has failed: no further pod of it was scheduled or Ready in time."""
    return _failed_rollout("Progressing", "False", facts)


def rollout_stalled(facts: Facts) -> ConditionState | None:
    """The same failure, in the condition that tools with kstatus look for."""
    return _failed_rollout("Stalled", "True", facts)


def _failed_rollout(condition: ConditionType, status: Truth, facts: Facts) -> ConditionState | None:
    step = facts.step
    if step is None or facts.paused or facts.changes_paused:
        return None
    if facts.rolled_back is not None:
        return ConditionState(condition, status, facts.rolled_back.reason, facts.rolled_back.message)
    if facts.overdue_seconds is None:
        return None
    why = format_problems(_problems_in_the_way(facts)[:2])
    serving = f"; revision {step.serving} keeps serving" if step.serving not in (None, step.revision) else ""
    kept = f"; not rolled back: {facts.not_rolled_back}" if facts.not_rolled_back else ""
    return ConditionState(
        condition,
        status,
        "ProgressDeadlineExceeded",
        f"revision {step.revision} has made no progress for {facts.overdue_seconds:.0f} s ({_counts(facts, step.revision)})"
        f"{f': {why}' if why else ''}{serving}{kept}; fix the spec, raise spec.rollout.progressDeadlineSeconds, or return with `mmd rollout undo {facts.name}`",
    )


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
    """Problems stopping pods of the target revision, or of components shared by all revisions."""
    step = facts.step
    return [
        p for p in facts.problems if step is not None and p.stops_pods and p.revision in (None, step.revision)
    ]


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


def route_not_created(facts: Facts) -> ConditionState | None:
    """The HTTPRoute does not exist."""
    if facts.route is not None:
        return None
    name = f"{facts.name}-gateway"
    return ConditionState(
        "RouteAccepted",
        "False",
        "NotCreated",
        f"HTTPRoute {name} does not exist yet; see the condition Degraded if it stays so",
    )


def route_rejected(facts: Facts) -> ConditionState | None:
    """A Gateway does not take the route, or cannot follow it to its backend."""
    rejected = [
        f"{_named(parent, facts)}: {kind} is {status}, {words}"
        for parent in facts.route_parents
        for report in _reports(parent, facts)
        for kind, (status, words) in report.verdicts.items()
        if kind in _VERDICTS and status == "False"
    ]
    rejected += [
        f"the InferencePool at Gateway {report.namespace}/{report.name}: {kind} is {status}, {words}"
        for report in (facts.pool.parents if facts.pool else ())
        for kind, (status, words) in report.verdicts.items()
        if kind in _VERDICTS and status == "False"
    ]
    if not rejected:
        return None
    remedy = "change the Gateway, spec.gateway.httpRoute or spec.gateway.inferencePool"
    return ConditionState("RouteAccepted", "False", "NotAccepted", f"{' | '.join(rejected)[:900]}; {remedy}")


def route_pending(facts: Facts) -> ConditionState | None:
    """No controller has decided on the route as it is now."""
    silent = [
        _named(parent, facts)
        for parent in facts.route_parents
        if not any(
            all(report.verdicts.get(kind, ("",))[0] == "True" for kind in _VERDICTS)
            for report in _reports(parent, facts)
        )
    ]
    if not silent:
        return None
    message = f"no controller has decided on the route for {', '.join(silent)}; check that each exists, and that the controller of its class runs"
    return ConditionState("RouteAccepted", "Unknown", "Pending", message)


def route_accepted(facts: Facts) -> ConditionState | None:
    """Every Gateway takes the route."""
    named = ", ".join(_named(parent, facts) for parent in facts.route_parents)
    return ConditionState("RouteAccepted", "True", "Accepted", f"accepted by {named}")


_VERDICTS = ("Accepted", "ResolvedRefs")
"""Conditions required of controllers by the Gateway API, for every parent of a route."""


def _reports(parent: ParentRef, facts: Facts) -> list[ParentReport]:
    """The reports of controllers on the route for one parent."""
    parent_key = (parent.namespace or facts.namespace, parent.name, parent.section_name)
    reports = facts.route.parents if facts.route else ()
    return [report for report in reports if (report.namespace, report.name, report.section) == parent_key]


def _named(parent: ParentRef, facts: Facts) -> str:
    listener = f" (listener {parent.section_name})" if parent.section_name else ""
    return f"Gateway {parent.namespace or facts.namespace}/{parent.name}{listener}"


def authentication_unknown(facts: Facts) -> ConditionState | None:
    """There is no plan: gateways keep the settings that they have."""
    if facts.step is not None:
        return None
    return ConditionState(
        "AuthenticationRequired",
        "Unknown",
        "InvalidSpec",
        "the spec is invalid, and gateways keep the settings that they have; see the condition Degraded",
    )


def authentication_off(facts: Facts) -> ConditionState | None:
    """The spec lets in everyone who can reach the gateway."""
    if facts.auth is not None:
        return None
    kinds = ", ".join(facts.exposed_by)
    exposed = f", and it is exposed outside the cluster ({kinds})" if kinds else ""
    return ConditionState(
        "AuthenticationRequired",
        "False",
        "AuthenticationOff",
        f"no key is needed, so anyone who can reach the gateway can use it{exposed}; "
        "set spec.gateway.auth.keysSecret to the name of a Secret with API keys",
    )


def gateways_without_keys(facts: Facts) -> ConditionState | None:
    """Gateway pods from before the field was set are left."""
    pods = facts.gateways_without_keys
    if not pods:
        return None
    more = f" and {len(pods) - 3} more" if len(pods) > 3 else ""
    return ConditionState(
        "AuthenticationRequired",
        "False",
        "GatewaysWithoutKeys",
        f"gateway pods from before spec.gateway.auth was set still need no key: {', '.join(pods[:3])}{more}; "
        "they are replaced one at a time; see the conditions Progressing and Degraded if they stay",
    )


def authentication_required(facts: Facts) -> ConditionState | None:
    """Every gateway needs a key or a token."""
    auth = facts.auth
    if auth is None:
        return None
    needed = f"requests need an API key of Secret {auth.keys_secret}"
    if auth.oidc is None:
        return ConditionState("AuthenticationRequired", "True", "ApiKeys", needed)
    return ConditionState(
        "AuthenticationRequired", "True", "ApiKeysAndTokens", f"{needed} or a token of {auth.oidc.issuer}"
    )


def weights_complete(facts: Facts) -> ConditionState | None:
    """The cache has everything."""
    weights = facts.weights
    if weights is None or weights.state != "Complete":
        return None
    return ConditionState(
        "WeightsCached", "True", "Complete", f"Job {weights.job} has filled claim {weights.claim}"
    )


def weights_failing(facts: Facts) -> ConditionState | None:
    """The download has a problem, which may be over by itself."""
    problems = [p for p in facts.problems if p.component == WEIGHTS]
    if not problems:
        return None
    return ConditionState("WeightsCached", "False", problems[0].reason, format_problems(problems))


def weights_downloading(facts: Facts) -> ConditionState:
    """The download goes on."""
    state = facts.weights.state if facts.weights is not None else "Pending"
    return ConditionState("WeightsCached", "False", state, weights_words(facts.weights))


_REMEDIES = {
    "MaxReplicas": "raise the pool's autoscaling.maxReplicas",
    "GpuBudget": "raise spec.gpuBudget or reduce other pools",
    "Unschedulable": "the pool's pods cannot be scheduled; add nodes or reduce their resource requests",
    "PodsNotStarting": "the pool's pods do not become Ready; check the pool's condition",
    "DownstreamSaturated": "the next pool downstream is saturated; scale that pool first",
}


READY: tuple[ConditionRule, ...] = (serving, not_serving)
PROGRESSING: tuple[ConditionRule, ...] = (
    deployment_paused,
    plan_failed,
    rollout_paused,
    deadline_exceeded,
    rollout_complete,
    waiting_for_gpu_budget,
    rollout_stuck,
    held_up_by_problems,
    in_progress,
)
DEGRADED: tuple[ConditionRule, ...] = (problems_exist, fields_unknown, no_problem)
STALLED: tuple[ConditionRule, ...] = (rollout_stalled,)
POOL_READY: tuple[PoolRule, ...] = (pool_not_created, pool_complete, pool_has_problems, pool_starting)
SCALING_ACTIVE: tuple[ConditionRule, ...] = (scaling_paused, scaling_in_shadow, scaling_active)
SCALING_LIMITED: tuple[ConditionRule, ...] = (limit_reached, not_limited)
METRICS_FRESH: tuple[ConditionRule, ...] = (reports_missing, all_reporting)
WEIGHTS_CACHED: tuple[ConditionRule, ...] = (weights_complete, weights_failing, weights_downloading)
ROUTE_ACCEPTED: tuple[ConditionRule, ...] = (route_not_created, route_rejected, route_pending, route_accepted)
AUTHENTICATION_REQUIRED: tuple[ConditionRule, ...] = (
    authentication_unknown,
    authentication_off,
    gateways_without_keys,
    authentication_required,
)
"""One list for each condition: the first rule to return a state decides."""
