"""`mmd explain` prints every rule, step and condition that the code has, in its order, and the decision that holds now."""

from __future__ import annotations

import time
from typing import Any, get_args

import pytest

from mmd_api.pipeline import pipeline_revision
from mmd_api.spec.exposure import ParentRef
from mmd_api.status import ConditionType, ScalingDecision, WeightsStatus
from mmd_operator.autoscaling.coordinate import COUPLING, share_gpu_budget
from mmd_operator.autoscaling.decide import REPORTS, RULES
from mmd_operator.autoscaling.decision import LIMITS, AppliedRule
from mmd_operator.explain import CONDITIONS, lines
from mmd_operator.observed.observed import Observed, child_of
from mmd_operator.resources.plan import plan_objects
from mmd_operator.resources.sentences import sentence_of
from mmd_operator.rollout.next_step import STEPS, Step, next_step
from mmd_operator.status.conditions import current_conditions, dated
from mmd_operator.status.deployment_status import status_of
from mmd_operator.status.facts import Facts, Scaling
from support.cluster.deployments import ANOTHER_MODEL, SPEC, deployment
from support.cluster.exposure import ROUTE

from .answering_pods import Words, scaling, spec, status, tick
from .bodies import UID, pod, workload

ALL_RULES = (*RULES, *REPORTS, *COUPLING, share_gpu_budget)
POOLS = ("encoder", "prefill", "decode")
TARGET = deployment({**SPEC, **ANOTHER_MODEL})
BEFORE, AFTER = pipeline_revision(deployment(SPEC).spec), pipeline_revision(TARGET.spec)


SPARE = next(m for m in plan_objects(deployment(SPEC), "default") if m["kind"] == "Deployment")


def decision(effects: list[AppliedRule]) -> ScalingDecision:
    return ScalingDecision(
        time="2026-01-01T00:00:00Z", from_replicas=1, to_replicas=1, reason="Steady", message="encoder stays",
        effects=[effect.status() for effect in effects],
    )  # fmt: skip


def facts(step: Step | None = None, seen: Observed | None = None, **more: Any) -> Facts:
    return Facts("demo", "default", POOLS, True, seen or Observed({}), (), step, **more)


def printed(found: Facts) -> list[str]:
    conditions = dated(current_conditions(found), (), 1, NOW_AS_TIME) if found.step else []
    return lines(status_of(found, conditions, 1).model_dump(mode="json", by_alias=True, exclude_none=True))


NOW_AS_TIME = decision([]).time
HELD = "a pool at its minimum stays there; Schedule where a schedule sets it (1 replica instead of 0)"


def test_applied_rules_are_printed_in_order_with_limit_and_sentence() -> None:
    effects = [
        AppliedRule.of(rule, "1 replica", limit) for rule, limit in zip(ALL_RULES, LIMITS * 2, strict=False)
    ]
    text = printed(facts(scaling=Scaling(decisions={"encoder": decision(effects)})))
    rules = [line for line in text if line.startswith("    ")]
    assert rules == [
        f"    {rule.__name__} ({limit}): {sentence_of(rule)} (1 replica)"
        for rule, limit in zip(ALL_RULES, LIMITS * 2, strict=False)
    ]


def downloading(failed: bool = False) -> Step:
    model = {"id": "org/model", "storage": {"type": "Hub", "cache": {"claimName": "shared"}}}
    wanted = deployment({**SPEC, "model": model})
    planned = plan_objects(wanted, "default")
    (job,) = (m for m in planned if m["kind"] == "Job")
    owner = {"uid": UID, "controller": True}
    metadata = {**job["metadata"], "uid": "job", "resourceVersion": "1", "ownerReferences": [owner]}
    condition = {"type": "Failed", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {"conditions": [condition] if failed else []}
    child = child_of("Job", {**job, "metadata": metadata, "status": status})
    seen = Observed({child.key: child})
    return next_step(wanted.spec, pipeline_revision(wanted.spec), planned, seen, UID, time.time())


def rollout(
    *bodies: dict[str, Any], pods: tuple[Any, ...] = (), wanted: Any = TARGET, spare: Any = None
) -> Step:
    kinds = {"gateway": "Deployment", "decode": "PodDisruptionBudget"}
    children = [
        child_of(kinds.get(b["metadata"]["name"].removeprefix("demo-"), "StatefulSet"), b) for b in bodies
    ]
    seen = Observed({c.key: c for c in children}, pods)
    planned = plan_objects(wanted, "default")
    last = BEFORE if spare is not None else None
    return next_step(wanted.spec, AFTER, planned, seen, UID, last_serving=last, serving_gateway=spare)


def gateway(revision: str, **more: Any) -> dict[str, Any]:
    return workload("Deployment", "gateway", None, template=revision, **more)


def pools(revision: str, **sizes: int) -> list[dict[str, Any]]:
    return [workload("StatefulSet", p, revision, replicas=sizes.get(p, 1), gpus=1) for p in POOLS]


def budgeted(gpus: int) -> Any:
    each = {"gpus": 1, "replicas": 1}
    return deployment({**SPEC, **ANOTHER_MODEL, "gpuBudget": gpus, **dict.fromkeys(POOLS, each)})


def autoscaled() -> Any:
    pool = {"autoscaling": {"minReplicas": 1, "maxReplicas": 4}}
    return deployment({**SPEC, **ANOTHER_MODEL, "prefill": pool})


ACTING = {
    "share_gpu_budget": lambda: rollout(gateway(BEFORE), *pools(BEFORE), wanted=budgeted(4)),
    "apply_planned_objects": lambda: rollout(),
    "keep_budgets_of_all_revisions": lambda: rollout(
        gateway(BEFORE), *pools(BEFORE), workload("Deployment", "decode", None)
    ),
    "route_to_service_without_picker": lambda: rollout(
        wanted=deployment({**SPEC, **ANOTHER_MODEL, "gateway": {"httpRoute": ROUTE, "inferencePool": {}}})
    ),
    "hold_gateway_until_pools_are_ready": lambda: rollout(gateway(BEFORE), *pools(BEFORE)),
    "hold_new_pools_without_gpus": lambda: rollout(gateway(BEFORE), *pools(BEFORE), wanted=budgeted(4)),
    "hold_pods_until_weights_are_cached": lambda: downloading(),
    "hold_paused_rollout": lambda: rollout(
        gateway(BEFORE), *pools(BEFORE), wanted=deployment({**SPEC, **ANOTHER_MODEL, "rollout": {"paused": True}})
    ),
    "restore_serving_gateway": lambda: rollout(*pools(BEFORE), spare=SPARE),
    "start_pools_at_present_size": lambda: rollout(
        gateway(BEFORE), *pools(BEFORE, prefill=3), wanted=autoscaled()
    ),
    "correct_pool_sizes": lambda: rollout(gateway(AFTER), *pools(AFTER, decode=5)),
    "replace_outdated_pods": lambda: rollout(
        gateway(AFTER), *pools(AFTER),
        pods=(pod("prefill", AFTER, name=f"demo-prefill-{AFTER}-0", ready=True, inputs="before"),),
    ),
    "restore_fixed_sizes": lambda: rollout(gateway(AFTER, replicas=3), *pools(AFTER)),
    "remove_unused_objects": lambda: rollout(gateway(AFTER), *pools(BEFORE), *pools(AFTER)),
    "retry_failed_downloads": lambda: downloading(failed=True),
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_step_that_acts_is_printed_with_its_sentence(step: Any) -> None:
    found = ACTING[step.__name__]()
    text = printed(facts(found))
    named = [line for line in text if line.startswith(f"    {step.__name__}: {sentence_of(step)} (")]
    assert len(named) == 1
    order = [step.__name__ for step in STEPS]
    names = [effect.step for effect in found.effects]
    assert sorted(names, key=order.index) == names
    assert [line.strip().partition(":")[0] for line in text if line.startswith("    ")] == names


def test_idle_and_paused_rollouts_print_no_step() -> None:
    children = [
        child_of("StatefulSet", b) for b in (workload("StatefulSet", "nats", None), *pools(AFTER, decode=2))
    ]
    children.append(child_of("Deployment", gateway(AFTER)))
    seen = Observed({c.key: c for c in children})
    objects = [m for m in plan_objects(TARGET, "default") if m["kind"] in ("StatefulSet", "Deployment")]
    done = next_step(TARGET.spec, AFTER, objects, seen, UID)
    assert done.effects == ()
    assert "rollout:" not in printed(facts(done))
    assert "rollout:" not in printed(facts(ACTING["apply_planned_objects"](), paused=True))


def test_all_conditions_are_printed_in_the_order_of_the_api() -> None:
    assert get_args(ConditionType) == CONDITIONS
    found = facts(
        ACTING["apply_planned_objects"](),
        scaling=Scaling(pools=("encoder",)),
        route_parents=(ParentRef(name="shared"),),
        weights=WeightsStatus(claim="shared", job="demo-weights-0", state="Pending"),
        overdue_seconds=1.0,
    )
    assert tuple(condition.type for condition in current_conditions(found)) == CONDITIONS
    types = [line.partition(":")[0] for line in printed(found)]
    assert tuple(name for name in types if name in CONDITIONS) == CONDITIONS


def test_a_held_pool_shows_the_decision_that_holds_it_once_steady() -> None:
    words = Words(encoder={"encode_work_per_second": {"video": 100.0}})
    words.queued = 700.0
    made = scaling(words)
    for second in range(0, 6, 2):
        tick(made, second, spec())
    grown = status(made)["pools"]["encoder"]
    assert (grown["lastDecision"]["toReplicas"], grown["lastChange"]["toReplicas"]) == (2, 2)
    words.queued = 0.0
    for second in range(6, 10, 2):
        assert not tick(made, second, spec()), "not steady yet"
    assert tick(made, 10, spec())
    found = status(made)["pools"]["encoder"]
    held = found["lastDecision"]
    assert (held["toReplicas"], held["reason"], held["limitedBy"]) == (1, "Steady", "MinReplicas")
    assert found["lastChange"] == grown["lastChange"]
    text = lines(status(made))
    assert any("encoder would stay at 1 replica (Steady)" in line for line in text)
    assert "    hold_at_minimum (MinReplicas): " + HELD in text
    assert any("last change: encoder would scale from 1 to" in line for line in text)


def test_numbers_that_wobble_and_rules_that_alternate_write_no_status() -> None:
    words = Words(encoder={"encode_work_per_second": {"video": 100.0}})
    words.queued = 10.0
    made = scaling(words)
    for second in range(0, 6, 2):
        tick(made, second, spec())
    before = status(made)["pools"]["encoder"]["lastDecision"]
    for second in range(6, 26, 2):
        words.queued = 10.0 + second
        assert not tick(made, second, spec())
    for second in range(26, 46, 4):
        words.queued = 0.0
        tick(made, second, spec())
        words.queued = 10.0
        tick(made, second + 2, spec())
    assert status(made)["pools"]["encoder"]["lastDecision"] == before


def test_a_restarted_operator_does_not_write_the_same_decision_again() -> None:
    words = Words(encoder={"encode_work_per_second": {"video": 100.0}})
    words.queued = 10.0
    made = scaling(words)
    for second in range(0, 6, 2):
        tick(made, second, spec())
    anew = scaling(words)
    anew.remember(status(made))
    for second in range(400, 900, 2):
        tick(anew, second, spec())
    assert (
        status(anew)["pools"]["encoder"]["lastDecision"] == status(made)["pools"]["encoder"]["lastDecision"]
    )
