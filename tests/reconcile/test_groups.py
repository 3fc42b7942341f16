"""Replicas that are groups of pods: what they hold, which of their pods count, and why they started over. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mmd_api.pipeline import pipeline_revision
from mmd_operator.autoscaling import DeploymentPolicy, PoolFacts, ScaleActions
from mmd_operator.kube.cluster import Cluster
from mmd_operator.kube.metrics import Counts, OperatorMetrics
from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.observed.observed import Child, Observed, PodView, child_of, pod_of
from mmd_operator.observed.problems import Deadlines
from mmd_operator.passes.reconcile_pass import _pod_problems
from mmd_operator.resources.plan import plan_objects
from mmd_operator.resources.workload_kinds import WORKER_INDEX_LABEL
from mmd_operator.rollout.next_step import Step, next_step
from mmd_operator.scaling.pool_actions import PoolActions
from mmd_operator.scaling.scaling_facts import pod_facts, pods_in
from mmd_operator.scaling.scaling_limits import growth_within, without_loss
from mmd_operator.sizes.gpu_budget import gpus_held, grown
from mmd_operator.sizes.groups import next_size
from mmd_operator.sizes.pending_growth import PendingGrowth
from mmd_operator.sizes.replacement import pods_of, short_groups
from mmd_operator.status.group_crashes import GroupCrashes
from mmd_operator.status.silent_controllers import SilentControllers
from support.cluster.deployments import deployment
from support.cluster.groups import GROUPS, ONE_POD

from .bodies import NEW, UID, crashed, pod, workload

SET = f"demo-decode-{NEW}"


def group_set(replicas: int, gpus: int = 2, size: int = 2, status: Mapping[str, Any] | None = None) -> Child:
    body = workload("LeaderWorkerSet", "decode", NEW, replicas=replicas, gpus=gpus)
    template = body["spec"].pop("template")
    del body["spec"]["updateStrategy"]
    body["spec"]["leaderWorkerTemplate"] = {
        "size": size,
        "leaderTemplate": template,
        "workerTemplate": template,
    }
    if status is not None:
        body["status"] = status
    return child_of("LeaderWorkerSet", body)


def member(group: int, rank: int, **facts: Any) -> PodView:
    name = f"{SET}-{group}" + (f"-{rank}" if rank else "")
    return replace(pod(name=name, **{"gpus": 2, "ready": True, **facts}), group_rank=rank)


def observed(child: Child, *pods: PodView) -> Observed:
    return Observed({child.key: child}, pods)


@pytest.mark.parametrize(
    ("pods", "held"),
    [
        ((), 8),
        ((member(0, 0),), 8),
        ((member(0, 0), member(0, 1), member(1, 0)), 8),
        ((member(0, 0), member(0, 1), member(1, 0), member(1, 1)), 8),
        ((member(0, 0), member(0, 1), member(1, 0), member(1, 1), member(2, 0), member(2, 1)), 12),
    ],
    ids=["nothing is there yet", "one leader", "a follower is missing", "all", "one that ends"],
)
def test_a_group_holds_the_gpus_of_all_its_pods_once_decided(pods, held: int):
    assert gpus_held(observed(group_set(2), *pods)) == held


@pytest.mark.parametrize(("free", "size"), [(3, 2), (4, 3), (11, 4), (None, 5)])
def test_a_pool_of_groups_grows_by_whole_groups(free: int | None, size: int):
    child = group_set(2)
    assert grown(child, 5, observed(child), free)[0] == size


def test_only_leaders_count_as_replicas():
    child = group_set(2)
    seen = observed(child, member(1, 1), member(1, 0), member(0, 1), member(0, 0))
    leaders = [f"{SET}-0", f"{SET}-1"]
    assert [found.name for found in pods_of(child, seen)] == leaders
    assert sorted(found.name for found in pods_in(child, "decode", seen)) == leaders
    assert sorted(found.name for found in seen.pods_of("decode")) == leaders


@pytest.mark.parametrize(
    ("generation", "rolled"),
    [({"observedGeneration": 2}, True), ({"observedGeneration": 1}, False), ({}, True)],
)
def test_a_status_without_a_generation_counts_as_current(generation, rolled: bool):
    status = {"replicas": 2, "readyReplicas": 2, "updatedReplicas": 2, **generation}
    workload = group_set(2, status=status).workload
    assert workload is not None
    assert workload.rolled == rolled


def test_a_controller_that_has_reported_nothing_has_seen_nothing():
    workload = group_set(0, status={}).workload
    assert workload is not None
    assert not workload.seen


def test_a_controller_silent_about_a_group_for_a_minute_is_a_problem():
    silent, waits = SilentControllers(), observed(group_set(2, status={}))
    assert silent.problems(waits, 0) == []
    assert silent.problems(waits, 59) == []
    (problem,) = silent.problems(waits, 60)
    assert (problem.reason, problem.component) == ("ControllerSilent", "decode")
    assert f"LeaderWorkerSet {SET} for 60 s" in problem.seen
    assert silent.problems(observed(group_set(2)), 61) == []
    assert silent.problems(waits, 62) == [], "the minute begins again"


def test_a_group_without_all_of_its_followers_is_short():
    child = group_set(3)
    seen = observed(child, member(0, 0), member(0, 1), member(1, 0))
    assert short_groups(child, seen) == (f"{SET}-1",)


def test_a_decision_counts_a_replica_as_all_of_its_pods():
    spec = deployment({**GROUPS, "gpuBudget": 12}).spec
    assert DeploymentPolicy.of(spec).pools["decode"].gpus == 4


def test_a_rollout_creates_groups_within_what_the_serving_revision_leaves():
    serving, wanted = deployment({**ONE_POD, "gpuBudget": 8}), deployment({**GROUPS, "gpuBudget": 8})
    old, new = pipeline_revision(serving.spec), pipeline_revision(wanted.spec)
    children = [
        child_of("StatefulSet", workload("StatefulSet", "encoder", old)),
        child_of("StatefulSet", workload("StatefulSet", "decode", old, replicas=2, gpus=2)),
        child_of("Deployment", workload("Deployment", "gateway", None, template=old)),
    ]
    seen = Observed({child.key: child for child in children}, ())
    objects = [one for one in plan_objects(wanted, "default") if one["kind"] != "Secret"]
    step = next_step(wanted.spec, new, objects, seen, UID)
    assert "1 of 2 decode pods" in step.waits_for
    growth = step.growth[f"demo-decode-{new}"]
    assert (growth.replicas, growth.gpus) == (1, 4)


def placed(groups: int) -> list[PodView]:
    return [replace(member(group, rank), scheduled=True) for group in range(groups) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("replicas", "complete", "wanted", "size"),
    [(1, 0, 4, 1), (1, 1, 4, 2), (3, 2, 4, 3), (3, 3, 4, 4), (3, 1, 2, 2), (4, 0, 4, 4)],
    ids=["none has nodes", "one has", "the last has none", "all have", "fewer", "no growth"],
)
def test_a_pool_grows_by_one_group_while_the_last_has_no_nodes(
    replicas: int, complete: int, wanted: int, size: int
):
    child = group_set(replicas)
    pods = placed(complete) + [replace(member(complete, 0), scheduled=True)] * (complete < replicas)
    seen = observed(child, *pods)
    assert next_size(child, wanted, seen) == size
    actions, _ = growth_within(None, ScaleActions(replicas=wanted), child, seen)
    assert actions.replicas == (None if size == replicas else size)


def rollout(replicas: int, complete: int, *, ready: bool = False) -> Step:
    """To a revision of three groups of two pods, next to one of single pods that serves."""
    serving, wanted = deployment(ONE_POD), deployment({**GROUPS, "decode": {"gpus": 2, "replicas": 3}})
    old, new = pipeline_revision(serving.spec), pipeline_revision(wanted.spec)
    status = {"replicas": replicas, "readyReplicas": replicas if ready else 0, "updatedReplicas": replicas}
    made = [replace(group_set(replicas, status=status), name=f"demo-decode-{new}", revision=new)] * (
        replicas > 0
    )
    children = [
        child_of("StatefulSet", workload("StatefulSet", "encoder", old)),
        child_of("StatefulSet", workload("StatefulSet", "decode", old, replicas=3, gpus=2)),
        child_of("StatefulSet", workload("StatefulSet", "encoder", new)),
        child_of("StatefulSet", workload("StatefulSet", "nats", None)),
        child_of("Deployment", workload("Deployment", "gateway", None, template=old)),
        *made,
    ]
    pods = [replace(pod, name=pod.name.replace(NEW, new), revision=new) for pod in placed(complete)]
    objects = [one for one in plan_objects(wanted, "default") if one["kind"] != "Secret"]
    seen = Observed({child.key: child for child in children}, tuple(pods))
    return next_step(wanted.spec, new, objects, seen, UID)


def test_a_new_pool_of_groups_grows_as_its_groups_get_nodes():
    step = rollout(0, 0)
    (made,) = [one for one in step.apply if one["kind"] == "LeaderWorkerSet"]
    assert made["spec"]["replicas"] == 1
    name = made["metadata"]["name"]
    step = rollout(1, 0)
    assert step.sizes == {}
    assert "stays at 1 of 3 groups of 2 pods until all pods of its groups have nodes" in step.waits_for
    assert rollout(1, 1).sizes == {name: 2}
    assert rollout(2, 2).sizes == {name: 3}
    assert rollout(3, 2).waits_for == ""


def test_the_gateway_waits_until_a_pool_of_groups_has_its_size():
    assert rollout(2, 2, ready=True).stage == "BringingUp"
    assert rollout(3, 3, ready=True).stage == "SwitchingGateway"


def test_the_reason_of_a_group_outlives_its_pods_until_all_are_ready():
    crashes, child = GroupCrashes(), group_set(1)
    ended = member(0, 1, ready=False, container=crashed("no such weights", restarts=1))
    consequence = member(0, 0, ready=False, container=crashed("the follower ended", restarts=1))
    assert crashes.problems(observed(child, member(0, 0), ended)) == [], "the pod reports it itself"
    assert crashes.problems(observed(child, ended, consequence)) == []
    going = [replace(one, deleting=True) for one in (ended, consequence)]
    (first,) = crashes.problems(observed(child, *going))
    assert (first.reason, first.component) == ("CrashLoop", "decode")
    assert "no such weights" in first.seen, "the other one ended because of it"
    assert f"its group {SET}-0 has been recreated once" in first.seen
    anew = [replace(member(0, rank, ready=False), uid=f"new-{rank}") for rank in (0, 1)]
    assert crashes.problems(observed(child, *anew)) == [first]
    crashes.problems(observed(child, anew[0], replace(ended, uid="new-1")))
    assert "recreated 2 times" in crashes.problems(observed(child, *anew))[0].seen
    assert crashes.problems(observed(child, member(0, 0), member(0, 1))) == []
    assert crashes.problems(observed(child, member(0, 0))) == []


NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
CREATED = "2026-01-01T00:00:00Z"
CREATED_SECONDS = 1767225600.0


def waiting_group(group: int) -> tuple[PodView, PodView]:
    """A leader that runs, and a follower that no node takes."""
    leader = member(group, 0, ready=False, created=CREATED)
    return leader, member(group, 1, ready=False, created=CREATED, scheduling=NO_GPU)


def test_a_group_whose_follower_has_no_node_is_unschedulable():
    leader, follower = waiting_group(0)
    child = group_set(1)
    (seen,) = pods_in(child, "decode", observed(child, leader, follower))
    facts = pod_facts(seen, 0.0)
    assert (facts.name, facts.unschedulable, facts.waiting_since) == (leader.name, True, CREATED_SECONDS)
    placed = replace(follower, unschedulable=None, unschedulable_since=None, starting_since=5e9)
    (seen,) = pods_in(child, "decode", observed(child, leader, placed))
    assert (pod_facts(seen, 0.0).unschedulable, pod_facts(seen, 0.0).waiting_since) == (False, 5e9)
    (seen,) = pods_in(child, "decode", observed(child, leader, replace(placed, failing=True)))
    assert pod_facts(seen, 0.0).failing
    (seen,) = pods_in(child, "decode", observed(child, replace(leader, ready=True), follower))
    assert not pod_facts(seen, 0.0).unschedulable, "it serves"


@pytest.mark.parametrize(("waited", "leaves"), [(299, False), (301, True)])
def test_the_last_ready_group_leaves_only_for_groups_needing_its_gpus(waited: float, leaves: bool):
    child = group_set(2)
    seen = observed(child, *waiting_group(0), member(1, 0), member(1, 1))
    actions = ScaleActions(drain=(f"{SET}-1",), replicas=1)
    now = CREATED_SECONDS + waited
    found = without_loss(actions, child, seen, pods_in(child, "decode", seen), now, 300)
    assert (found == actions) == leaves


def test_a_follower_without_a_node_is_reported_and_not_its_leader():
    seen = observed(group_set(1), *waiting_group(0))
    found = _pod_problems(seen, CREATED_SECONDS + 901, {"decode": Deadlines(900, 60)})
    assert [(problem.reason, f"{SET}-0-1" in problem.seen) for problem in found] == [("NoGpu", True)]


def test_a_leader_is_late_from_when_the_last_follower_has_a_node():
    leader, follower = waiting_group(0)
    leader = replace(leader, starting_since=CREATED_SECONDS, has_run=True)
    placed = replace(follower, ready=True, unschedulable=None, unschedulable_since=None)
    seen = observed(group_set(1), leader, replace(placed, starting_since=CREATED_SECONDS + 500))
    deadlines = {"decode": Deadlines(900, 60)}
    assert _pod_problems(seen, CREATED_SECONDS + 559, deadlines) == []
    (problem,) = _pod_problems(seen, CREATED_SECONDS + 561, deadlines)
    assert problem.reason == "NotStarting"


class RecordingCluster(Cluster):
    """Keeps the bodies of requests, and sends none."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    async def _request(self, *_: Any, **options: Any) -> None:
        self.sent.append(options["body"])


@pytest.mark.parametrize(
    ("renewed", "policy"), [(member(1, 0), "Foreground"), (pod(name=f"{SET}-1"), None)], ids=["group", "pod"]
)
async def test_a_leader_that_is_renewed_goes_after_its_followers(renewed: PodView, policy: str | None):
    """Else older releases of LeaderWorkerSet recreate its group twice."""
    cluster, decision = RecordingCluster(), SimpleNamespace(pool="decode", replicas=2, current=2, at=1000.0)
    actions = PoolActions(cluster, OperatorMetrics(), "default", PendingGrowth(), Counts(), PRODUCTION)
    renew = ScaleActions(renew=(renewed.name,))
    await actions.carry_out(renew, group_set(2), PoolFacts(2), [renewed], cast(Any, decision), [])
    (body,) = cluster.sent
    assert body.get("propagationPolicy") == policy


@pytest.mark.parametrize("code", [143, 137])
def test_a_pod_that_ends_because_it_is_deleted_has_not_crashed(code: int):
    """As in a rollout, where a container may also end before it handles the signal."""
    crashes = GroupCrashes()
    ended = member(0, 1, ready=False, deleting=True, container=crashed(None, code=code, restarts=1))
    assert crashes.problems(observed(group_set(1), member(0, 0), ended)) == []


def test_a_deleted_pod_that_ran_out_of_memory_is_reported():
    crashes, killed = GroupCrashes(), crashed(None, code=137, reason="OOMKilled", restarts=1)
    ended = member(0, 1, ready=False, deleting=True, container=killed)
    (problem,) = crashes.problems(observed(group_set(1), member(0, 0), ended))
    assert problem.reason == "OutOfMemory"


def test_a_group_keeps_the_reason_of_the_pod_that_failed():
    words = "follower 1 of the group ended: no such weights"
    leader = member(0, 0, ready=False, container=crashed(words, restarts=1))
    follower = member(0, 1, ready=False, container=crashed("no such weights", restarts=1))
    seen = observed(group_set(1), leader, follower)
    first, _ = _pod_problems(seen, 0, {})
    assert follower.name in first.seen
    crashes = GroupCrashes()
    crashes.problems(seen)
    gone = [replace(one, deleting=True) for one in (leader, follower)]
    (problem,) = crashes.problems(observed(group_set(1), *gone))
    assert follower.name in problem.seen


def test_a_group_beyond_the_size_gives_no_reason():
    crashes = GroupCrashes()
    ended = member(1, 0, ready=False, container=crashed("killed", restarts=1))
    assert crashes.problems(observed(group_set(1), ended)) == []


@pytest.mark.parametrize("rank", ["a", "", "-1", "1.5"])
def test_a_pod_with_a_label_that_is_no_rank_is_a_pod_of_its_own(rank: str):
    """Anybody may label pods; one that cannot be read would be missing from every view."""
    labelled = {"name": "demo-decode-0", "uid": "1", "labels": {WORKER_INDEX_LABEL: rank}}
    seen = pod_of({"metadata": labelled, "spec": {}, "status": {}})
    assert (seen.group_rank, seen.leads, seen.group) == (None, True, None)
