"""A rollout keeps to the GPU budget: the new revision starts with what the serving one leaves it, or waits and says for what."""

from __future__ import annotations

import pytest

from mmd_api.pipeline import pipeline_revision
from mmd_operator.observed.observed import Observed, child_of
from mmd_operator.resources.plan import plan_objects
from mmd_operator.rollout.next_step import Step, next_step
from support.cluster.deployments import deployment

from .bodies import UID, pod, workload

BASE = {
    "model": {"id": "builtin/demo", "dtype": "Float32"},
    "encoder": {"gpus": 1, "replicas": 2},
    "decode": {"gpus": 2, "replicas": 4},
    "engine": {"type": "VLLM", "decode": {"tensorParallelSize": 2}},
}
OLD = pipeline_revision(deployment(BASE).spec)
GPUS = {"encoder": 1, "decode": 2}


def step(
    budget: int | None,
    old: dict[str, int],
    new: dict[str, int] | None = None,
    serving: str = OLD,
    ending: dict[str, int] | None = None,
) -> Step:
    """The step towards another dtype while `old` pods of each pool serve; the old revision's GPUs are 1 and 2 a pod."""
    wanted = deployment({**BASE, "model": {"id": "builtin/demo", "dtype": "BFloat16"}, "gpuBudget": budget})
    revision = pipeline_revision(wanted.spec)
    made = {OLD: old, revision: new or {}}
    bodies = [
        workload("StatefulSet", pool, r, replicas=n, gpus=GPUS[pool])
        for r, sizes in made.items()
        for pool, n in sizes.items()
    ]
    bodies.append(workload("StatefulSet", "nats", None))
    children = [child_of("StatefulSet", body) for body in bodies]
    template = revision if serving == "new" else serving
    children.append(child_of("Deployment", workload("Deployment", "gateway", None, template=template)))
    pods = tuple(
        pod(pool, OLD, name=f"demo-{pool}-{OLD}-{n}", deleting=True, gpus=GPUS[pool])
        for pool, count in (ending or {}).items()
        for n in range(count)
    )
    seen = Observed({c.key: c for c in children}, pods)
    return next_step(wanted.spec, revision, plan_objects(wanted, "default"), seen, UID)


def sizes(found: Step) -> dict[str, int]:
    return {
        m["metadata"]["labels"]["app.kubernetes.io/component"]: m["spec"]["replicas"]
        for m in found.apply
        if m["kind"] == "StatefulSet" and "nats" not in m["metadata"]["name"]
    }


def test_a_new_revision_has_its_full_size_where_the_budget_allows():
    found = step(20, {"encoder": 2, "decode": 4})
    assert sizes(found) == {"encoder": 2, "decode": 4}
    assert not found.waits_for
    assert sizes(step(None, {"encoder": 2, "decode": 4})) == {"encoder": 2, "decode": 4}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(13, {"encoder": 1, "decode": 1}), (15, {"encoder": 1, "decode": 2}), (18, {"encoder": 2, "decode": 3})],
)
def test_a_new_revision_starts_with_what_the_budget_leaves_it(budget: int, expected: dict[str, int]):
    found = step(budget, {"encoder": 2, "decode": 4})
    assert sizes(found) == expected
    assert sum(n * GPUS[pool] for pool, n in expected.items()) + 10 <= budget
    assert f"{expected['decode']} of 4 decode pods" in found.waits_for
    assert f"holds 10 of the {budget} GPUs of spec.gpuBudget" in found.waits_for


def test_a_rollout_without_room_for_one_pod_per_pool_waits():
    found = step(12, {"encoder": 2, "decode": 4})
    assert found.blocked
    assert not sizes(found)
    assert [m["metadata"]["name"] for m in found.apply if m["kind"] == "StatefulSet"] == ["demo-nats"]
    assert "needs 3 GPUs" in found.waits_for
    assert "raise spec.gpuBudget to 13" in found.waits_for


def test_pools_grow_once_the_old_revision_is_removed():
    beside = step(15, {"encoder": 2, "decode": 4}, {"encoder": 1, "decode": 2})
    assert not beside.sizes
    alone = step(15, {}, {"encoder": 1, "decode": 2}, serving="new")
    assert {name.split("-")[1]: n for name, n in alone.sizes.items()} == {"encoder": 2, "decode": 4}


def test_pools_grow_by_what_pods_that_are_ending_no_longer_hold():
    started = {"encoder": 1, "decode": 2}
    held = step(15, {}, started, serving="new", ending={"encoder": 2, "decode": 4})
    assert not held.sizes
    assert held.stage != "Complete"
    assert "stays at 2 of 4 pods until GPUs of spec.gpuBudget 15 are free" in held.waits_for
    fewer = step(15, {}, started, serving="new", ending={"decode": 3})
    assert {name.split("-")[1]: n for name, n in fewer.sizes.items()} == {"encoder": 2, "decode": 3}


def test_pods_that_are_ending_are_counted_before_a_new_revision_starts():
    beside = step(15, {"encoder": 1, "decode": 1}, ending={"decode": 4, "encoder": 2})
    assert sizes(beside) == {"encoder": 1, "decode": 2}


@pytest.mark.parametrize(("budget", "grown"), [(12, {"decode": 4}), (11, {})])
def test_a_pool_grows_by_what_pools_that_are_created_now_leave(budget: int, grown: dict[str, int]):
    found = step(budget, {}, {"decode": 3}, serving="new", ending={"decode": 1})
    assert {name.split("-")[1]: n for name, n in found.sizes.items()} == grown
