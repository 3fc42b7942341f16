"""The next step of a rollout, as a table: what stands in, what to apply, size and remove out."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from mmd_api.pipeline import pipeline_revision
from mmd_operator.observed.observed import Observed, child_of, pod_of
from mmd_operator.resources.naming import REVISION_LABEL, Manifest
from mmd_operator.resources.plan import plan_objects
from mmd_operator.rollout.next_step import Step, next_step
from support.cluster.deployments import ANOTHER_MODEL, SPEC, deployment
from support.cluster.exposure import ROUTE

from .bodies import UID, labels, pod, workload

NEW_DEPLOYMENT = deployment({**SPEC, **ANOTHER_MODEL})
OLD = pipeline_revision(deployment(SPEC).spec)
NEW = pipeline_revision(NEW_DEPLOYMENT.spec)
POOLS = {"encoder": 1, "prefill": 1, "decode": 2}


def observed(*workloads, pods=()) -> Observed:
    children = [
        child_of("Deployment" if w["metadata"]["name"].endswith("gateway") else "StatefulSet", w)
        for w in workloads
    ]
    return Observed({c.key: c for c in children}, tuple(pods))


def pools(revision, **ready):
    return [
        workload("StatefulSet", pool, revision, replicas=n, ready=ready.get(pool, n))
        for pool, n in POOLS.items()
    ]


NATS = workload("StatefulSet", "nats", None)


def gateway(revision, **options):
    return workload("Deployment", "gateway", None, template=revision, **options)


def step(
    seen: Observed,
    spec=NEW_DEPLOYMENT,
    now: float = 0.0,
    last: str | None = None,
    spare: Manifest | None = None,
) -> Step:
    """`last`: the revision that served in the last pass; `spare`: its gateway's Deployment."""
    revision = pipeline_revision(spec.spec)
    return next_step(spec.spec, revision, plan_objects(spec, "default"), seen, UID, now, last, spare)


def kinds(found: Step) -> list[str]:
    return [m["kind"] for m in found.apply]


def removed(found: Step) -> set[str]:
    return {child.name for child in found.remove}


def names(revision) -> set[str]:
    return {f"demo-{pool}-{revision}" for pool in POOLS}


def test_the_first_revision_is_created_at_once_with_its_gateway():
    found = step(observed())
    assert found.stage == "Creating"
    assert kinds(found)[-6:] == ["Deployment", *["PodDisruptionBudget"] * 5]
    assert not found.remove


def test_the_gateway_is_held_until_the_new_revision_is_complete():
    found = step(observed(NATS, *pools(OLD), *pools(NEW, decode=1), gateway(OLD)))
    assert found.stage == "BringingUp"
    assert "Deployment" not in kinds(found)
    assert not found.remove


@pytest.mark.parametrize("late", ["unready", "behind", "absent"])
def test_complete_means_every_pod_and_an_up_to_date_controller(late):
    fresh = pools(NEW)
    if late == "unready":
        fresh[0]["status"]["readyReplicas"] = 0
    elif late == "behind":
        fresh[2]["status"]["observedGeneration"] = 1
    else:
        fresh.pop()
    assert step(observed(NATS, *pools(OLD), *fresh, gateway(OLD))).stage == "BringingUp"


def test_the_gateway_moves_when_the_new_revision_is_complete():
    seen = observed(NATS, *pools(OLD), *pools(NEW), gateway(OLD), pods=[pod("gateway", OLD, ready=True)])
    found = step(seen)
    assert found.stage == "SwitchingGateway"
    assert "Deployment" in kinds(found)
    assert not found.remove


@pytest.mark.parametrize("deleting", [True, False])
def test_the_old_pools_stay_while_a_gateway_pod_of_theirs_does(deleting):
    left = [pod("gateway", OLD, ready=True, deleting=deleting), pod("gateway", NEW, ready=True)]
    found = step(observed(NATS, *pools(OLD), *pools(NEW), gateway(NEW), pods=left))
    assert found.stage == "Draining"
    assert not found.remove


def test_a_budget_of_an_earlier_release_over_all_revisions_is_replaced_when_the_rollout_is_over():
    """The API server evicts no pod that two budgets select, and pods that serve keep one."""
    metadata = workload("StatefulSet", "decode", None)["metadata"]
    shared = child_of(
        "PodDisruptionBudget",
        {"metadata": {**metadata, "name": "demo-decode", "uid": "of-the-budget"}, "spec": {}},
    )

    def found(*workloads, beside=True) -> tuple[set[str], set[str]]:
        seen = observed(NATS, *workloads)
        present = replace(seen, children={**seen.children, shared.key: shared}) if beside else seen
        next_one = step(present)
        budgets = {m["metadata"]["name"] for m in next_one.apply if m["kind"] == "PodDisruptionBudget"}
        return removed(next_one), {name for name in budgets if "decode" in name}

    assert found(*pools(OLD), gateway(OLD)) == (set(), set())
    assert found(*pools(NEW), gateway(NEW)) == ({"demo-decode"}, set())
    assert found(*pools(NEW), gateway(NEW), beside=False) == (set(), {f"demo-decode-{NEW}"})


def test_the_old_pools_are_removed_after_their_last_gateway_pod():
    seen = observed(NATS, *pools(OLD), *pools(NEW), gateway(NEW), pods=[pod("gateway", NEW, ready=True)])
    found = step(seen)
    assert removed(found) == names(OLD)
    assert step(observed(NATS, *pools(NEW), gateway(NEW))).stage == "Complete"


def test_a_revision_that_was_given_up_goes_at_once():
    back = step(observed(NATS, *pools(OLD), *pools(NEW, decode=0), gateway(OLD)), deployment(SPEC))
    assert removed(back) == names(NEW)
    assert back.serving == OLD


def test_going_back_waits_for_the_gateway_pods_that_use_the_revision():
    left = [pod("gateway", NEW, deleting=True), pod("gateway", OLD, ready=True)]
    back = step(observed(NATS, *pools(OLD), *pools(NEW), gateway(OLD), pods=left), deployment(SPEC))
    assert back.stage == "Draining"
    assert not back.remove


def test_objects_of_other_owners_are_not_removed_or_scaled():
    strange = [workload("StatefulSet", "decode", "cccccccccc", replicas=9, owner="somebody")]
    found = step(observed(NATS, *strange, *pools(NEW), gateway(NEW)))
    assert not found.remove
    assert not found.sizes


def test_a_fixed_pool_is_sized_in_the_revisions_that_serve_or_come():
    old, new = pools(OLD), pools(NEW)
    old[2]["spec"]["replicas"] = new[2]["spec"]["replicas"] = 1
    found = step(observed(NATS, *old, *new, gateway(OLD)))
    assert found.sizes == {f"demo-decode-{OLD}": 2, f"demo-decode-{NEW}": 2}


@pytest.mark.parametrize("template", [OLD, NEW])
def test_nats_and_the_gateway_get_their_sizes_back_at_any_stage(template: str):
    grown = [
        workload("StatefulSet", "nats", None, replicas=3),
        gateway(template, replicas=0),
    ]
    found = step(observed(*grown, *pools(NEW, decode=0)))
    assert found.restore == {("StatefulSet", "demo-nats"): 1, ("Deployment", "demo-gateway"): 1}
    assert found.stage != "Complete"
    assert not found.sizes
    assert not step(observed(NATS, *pools(NEW), gateway(template))).restore


def test_a_gateway_of_another_owner_keeps_its_size():
    strange = gateway(NEW, replicas=9, owner="somebody")
    assert not step(observed(NATS, *pools(NEW), strange)).restore


def test_a_rollout_is_not_complete_while_a_pool_has_the_wrong_size():
    small = pools(NEW)
    small[2]["spec"]["replicas"] = small[2]["status"]["replicas"] = small[2]["status"]["readyReplicas"] = 1
    small[2]["status"]["updatedReplicas"] = small[2]["status"]["availableReplicas"] = 1
    found = step(observed(NATS, *small, gateway(NEW)))
    assert found.sizes == {f"demo-decode-{NEW}": 2}
    assert found.stage == "Updating"


def test_a_pool_that_left_the_spec_stays_until_others_are_replaced():
    spec = deployment({**{k: v for k, v in SPEC.items() if k != "encoder"}, **ANOTHER_MODEL})
    assert pipeline_revision(spec.spec) == NEW
    old = pod("prefill", NEW, name=f"demo-prefill-{NEW}-0", ready=True, inputs="before")
    assert not step(observed(NATS, *pools(NEW), gateway(NEW), pods=[old]), spec).remove
    assert removed(step(observed(NATS, *pools(NEW), gateway(NEW)), spec)) == {f"demo-encoder-{NEW}"}


def test_an_effect_is_as_long_as_the_status_allows():
    older = [workload("StatefulSet", "decode", f"{n:010d}") for n in range(60)]
    found = step(observed(NATS, *pools(NEW), *older, gateway(NEW)))
    (effect,) = [e for e in found.effects if e.step == "remove_unused_objects"]
    assert len(effect.message) == 1024


POOLED = deployment({**SPEC, **ANOTHER_MODEL, "gateway": {"httpRoute": ROUTE, "inferencePool": {}}})
READY = replace(pod("gateway", NEW, ready=True), has_picker=True)


@pytest.mark.parametrize("spec", [POOLED, NEW_DEPLOYMENT], ids=["pool", "none"])
def test_a_gateway_pod_has_a_picker_where_the_spec_has_a_pool(spec):
    (template,) = [m["spec"]["template"] for m in plan_objects(spec, "default") if m["kind"] == "Deployment"]
    metadata = {**template["metadata"], "name": "g", "uid": "u"}
    assert pod_of({"metadata": metadata, "spec": template["spec"]}).has_picker == (spec is POOLED)


@pytest.mark.parametrize(
    ("owner", "gateways", "kind"),
    [
        (UID, [READY], "InferencePool"),
        (UID, [pod("gateway", OLD, ready=True), READY], "InferencePool"),
        (UID, [pod("gateway", OLD, ready=True), replace(READY, ready=False)], "Service"),
        (UID, [replace(READY, deleting=True)], "Service"),
        (UID, [], "Service"),
        ("another", [READY], "Service"),
        (None, [READY], "Service"),
    ],
    ids=["ready", "one-of-two", "none-yet", "leaving", "no-pods", "of-another", "no-pool"],
)
def test_the_route_leads_to_an_existing_pool_with_a_ready_picker(owner, gateways, kind):
    seen = observed(NATS, *pools(NEW), gateway(NEW), pods=gateways)
    if owner is not None:
        body = workload("Deployment", "gateway", None, owner=owner)
        body["spec"] = {}
        child = child_of("InferencePool", body)
        seen = replace(seen, children={**seen.children, child.key: child})
    (route,) = [m for m in step(seen, POOLED).apply if m["kind"] == "HTTPRoute"]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert backend.get("kind", "Service") == kind


PAUSED = deployment({**SPEC, **ANOTHER_MODEL, "rollout": {"paused": True}})


def test_a_paused_rollout_creates_no_pool_and_keeps_the_gateway():
    begun = step(observed(NATS, *pools(OLD), pools(NEW)[0], gateway(OLD)), PAUSED)
    applied = {m["metadata"]["name"] for m in begun.apply if m["kind"] == "StatefulSet"}
    assert f"demo-encoder-{NEW}" in applied
    assert not applied & {f"demo-prefill-{NEW}", f"demo-decode-{NEW}"}
    ready = step(observed(NATS, *pools(OLD), *pools(NEW), gateway(OLD)), PAUSED)
    assert "Deployment" not in kinds(ready)
    assert not begun.remove
    assert not ready.remove


def test_pods_are_not_replaced_while_the_rollout_is_paused():
    old = pod("prefill", NEW, name=f"demo-prefill-{NEW}-0", ready=True, inputs="before")
    seen = observed(NATS, *pools(NEW), gateway(NEW), pods=[old])
    assert step(seen).replace
    held = step(seen, PAUSED)
    assert not held.replace
    assert held.stage == "Updating"


def test_a_first_revision_is_created_even_if_rollouts_are_paused():
    assert kinds(step(observed(), PAUSED)) == kinds(step(observed()))


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_gateway_pod_that_has_ended_keeps_no_pools(phase):
    body = {"metadata": {"name": "g-0", "uid": "u", "labels": labels("gateway", OLD)}}
    body |= {"spec": {"containers": [{}]}, "status": {"phase": phase, "reason": "Evicted"}}
    serves = pod("gateway", NEW, name="g-1", ready=True)
    found = step(observed(NATS, *pools(OLD), *pools(NEW), gateway(NEW), pods=[pod_of(body), serves]))
    assert removed(found) == names(OLD)


@pytest.mark.parametrize(("late_seconds", "keeps"), [(-1, True), (59, True), (61, False)])
def test_a_gateway_pod_keeps_its_pools_until_a_minute_after_its_grace_period(late_seconds, keeps):
    leaving = pod("gateway", OLD, name="g-0", deleting=True)
    serves = pod("gateway", NEW, name="g-1", ready=True)
    seen = observed(NATS, *pools(OLD), *pools(NEW), gateway(NEW), pods=[leaving, serves])
    ends_at = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    found = step(seen, now=ends_at + late_seconds)
    assert removed(found) == (set() if keeps else names(OLD))
    assert (found.stage == "Draining") == keeps


OLD_GATEWAY = next(m for m in plan_objects(deployment(SPEC), "default") if m["kind"] == "Deployment")


def switched_to(found: Step) -> list[str]:
    """Revisions in the templates of the gateways that a step applies."""
    gateways = [m for m in found.apply if m["kind"] == "Deployment"]
    return [m["spec"]["template"]["metadata"]["labels"][REVISION_LABEL] for m in gateways]


@pytest.mark.parametrize(
    ("named", "left"),
    [(None, []), ("cccccccccc", []), (NEW, []), (NEW, [pod("gateway", NEW, ready=True)])],
    ids=["deleted", "set back to one without pools", "switched too early", "and rolled out"],
)
@pytest.mark.parametrize("spec", [NEW_DEPLOYMENT, PAUSED], ids=["", "paused"])
def test_a_gateway_that_others_changed_in_a_rollout_is_made_again_for_the_pools_that_serve(named, left, spec):
    gateways = [gateway(named)] if named else []
    seen = observed(NATS, *pools(OLD), *pools(NEW, decode=0), *gateways, pods=left)
    found = step(seen, spec, last=OLD, spare=OLD_GATEWAY)
    assert (found.stage, found.serving) == ("BringingUp", OLD)
    assert switched_to(found) == [OLD]
    assert not found.remove
    assert not found.lacks_gateway
    assert "restore_serving_gateway" in [effect.step for effect in found.effects]


def test_pools_that_serve_stay_where_no_recorded_spec_makes_their_gateway():
    seen = observed(NATS, *pools(OLD), *pools(NEW, decode=0))
    found = step(seen, last=OLD)
    assert (found.stage, found.serving, found.lacks_gateway) == ("BringingUp", OLD, True)
    assert not switched_to(found)
    assert not found.remove


def test_a_deleted_gateway_is_made_for_the_new_revision_once_that_is_ready():
    found = step(observed(NATS, *pools(OLD), *pools(NEW)), last=OLD, spare=OLD_GATEWAY)
    assert found.stage == "SwitchingGateway"
    assert switched_to(found) == [NEW]
    assert not found.remove


def test_a_gateway_set_back_to_pools_that_are_gone_is_set_forward_at_once():
    left = [pod("gateway", OLD, name="g-0", ready=True), pod("gateway", NEW, name="g-1", ready=True)]
    seen = observed(NATS, *pools(NEW, decode=1), gateway(OLD), pods=left)
    found = step(seen, last=NEW)
    assert (found.serving, found.stage) == (NEW, "Draining")
    assert switched_to(found) == [NEW]


def test_a_gateway_set_back_while_the_old_pools_stand_serves_them():
    seen = observed(NATS, *pools(OLD), *pools(NEW, decode=1), gateway(OLD))
    found = step(seen, last=NEW)
    assert (found.serving, found.stage, switched_to(found)) == (OLD, "BringingUp", [])


def test_a_gateway_that_the_operator_has_just_switched_keeps_its_revision():
    seen = observed(NATS, *pools(OLD), *pools(NEW, decode=1), gateway(NEW))
    assert step(seen, last=NEW, spare=OLD_GATEWAY).serving == NEW
    ready = step(observed(NATS, *pools(OLD), *pools(NEW), gateway(NEW)), last=OLD, spare=OLD_GATEWAY)
    assert (ready.serving, switched_to(ready)) == (NEW, [NEW])


def test_a_first_revision_that_lost_its_pools_is_created_again():
    found = step(observed(NATS, gateway(NEW)), last=OLD, spare=OLD_GATEWAY)
    assert (found.serving, switched_to(found)) == (NEW, [NEW])
