"""Sizes of pools that scale, while a new revision comes up alongside the one that serves: within their bounds, and within the budget."""

from __future__ import annotations

import pytest

from mmd_api.pipeline import pipeline_revision
from mmd_operator.observed.observed import Observed, child_of
from mmd_operator.resources.plan import plan_objects
from mmd_operator.rollout.next_step import Step, next_step
from mmd_operator.sizes.pool_sizes import affordable, wanted_replicas
from support.cluster.deployments import deployment

from .bodies import UID, workload

FIXED = {"gpus": 1, "replicas": 2}
MODEL = {"id": "builtin/demo", "dtype": "Float32"}


def scaled(low: int, high: int, gpus: int = 1) -> dict:
    return {"gpus": gpus, "autoscaling": {"minReplicas": low, "maxReplicas": high}}


def step(
    old: dict[str, int], new: dict[str, int] | None = None, *, dtype="BFloat16", budget=None, **pools
) -> Step:
    """The step towards `dtype` while pods of Float32 serve: so many of each pool."""
    pools = {"prefill": scaled(1, 5), "decode": FIXED, **pools}
    spec = {"model": MODEL, "engine": engine(pools), **pools}
    serving = pipeline_revision(deployment(spec).spec)
    wanted = deployment({**spec, "model": {**MODEL, "dtype": dtype}, "gpuBudget": budget})
    revision = pipeline_revision(wanted.spec)
    sizes = [(serving, old), (revision, new or {})]
    bodies = [
        workload("StatefulSet", pool, of, replicas=n, gpus=pools[pool]["gpus"])
        for of, found in sizes
        for pool, n in found.items()
    ]
    children = [child_of("StatefulSet", body) for body in (*bodies, workload("StatefulSet", "nats", None))]
    children.append(child_of("Deployment", workload("Deployment", "gateway", None, template=serving)))
    seen = Observed({c.key: c for c in children})
    return next_step(wanted.spec, revision, plan_objects(wanted, "default"), seen, UID)


def engine(pools: dict[str, dict | None]) -> dict:
    """That uses all GPUs of a pod."""
    split = {
        n: {"tensorParallelSize": pool["gpus"]} for n, pool in pools.items() if pool and pool["gpus"] > 1
    }
    return {"type": "VLLM", **split} if split else {}


def started(found: Step) -> dict[str, int | None]:
    return {
        m["metadata"]["labels"]["app.kubernetes.io/component"]: m["spec"].get("replicas")
        for m in found.apply
        if m["kind"] == "StatefulSet" and "nats" not in m["metadata"]["name"]
    }


def sized(found: Step) -> dict[str, int]:
    return {name.split("-")[1]: size for name, size in found.sizes.items()}


@pytest.mark.parametrize(
    ("pool", "present", "size"),
    [
        (FIXED, 7, 2),
        ({"gpus": 1}, 7, 1),
        (scaled(2, 5), 1, 2),
        (scaled(2, 5), 2, 2),
        (scaled(2, 5), 4, 4),
        (scaled(2, 5), 5, 5),
        (scaled(2, 5), 6, 5),
        (scaled(0, 5), 0, 0),
    ],
)
def test_a_pool_that_scales_keeps_its_size_within_its_bounds(pool, present, size):
    assert (
        wanted_replicas(deployment({"model": MODEL, "prefill": pool, "decode": FIXED}).spec.prefill, present)
        == size
    )


@pytest.mark.parametrize(("present", "size"), [(0, 1), (1, 1), (3, 3), (5, 5), (9, 5)])
def test_an_autoscaled_pool_starts_a_new_revision_at_its_present_size(present, size):
    found = step({"prefill": present, "decode": 2}, prefill=scaled(0, 5))
    assert started(found)["prefill"] == size
    assert started(found)["decode"] == 2


def test_only_a_size_beyond_the_bounds_is_set_again():
    assert sized(step({"prefill": 3, "decode": 2}, dtype="Float32")) == {}
    assert sized(step({"prefill": 7, "decode": 1}, dtype="Float32")) == {"prefill": 5, "decode": 2}


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        (10, {"prefill": 3, "decode": 2}),  # 5 are held, 5 left: the whole of both
        (9, {"prefill": 2, "decode": 2}),
        (8, {"prefill": 2, "decode": 1}),  # a third of prefill is less than half of decode
        (7, {"prefill": 1, "decode": 1}),
    ],
)
def test_the_pool_that_is_furthest_from_its_size_gets_the_next_gpu(budget, sizes):
    found = step({"prefill": 3, "decode": 2}, budget=budget, decode={"gpus": 1, "replicas": 2})
    assert started(found) == sizes
    assert not found.blocked


def test_a_rollout_waits_when_one_gpu_is_missing_and_starts_with_it():
    pools = {"decode": scaled(1, 5, gpus=2), "encoder": {"gpus": 1, "replicas": 1}, "prefill": None}
    assert step({"encoder": 1, "decode": 1}, budget=5, **pools).blocked
    assert not step({"encoder": 1, "decode": 1}, budget=6, **pools).blocked


def test_a_large_pod_without_room_leaves_the_budget_to_smaller_ones():
    pools = {"decode": scaled(1, 5, gpus=4), "encoder": {"gpus": 1, "replicas": 3}, "prefill": None}
    found = step({"encoder": 3, "decode": 2}, budget=11 + 7, **pools)
    assert started(found) == {"encoder": 3, "decode": 1}


@pytest.mark.parametrize(
    ("present", "wanted", "gpus", "free", "size"),
    [
        (1, 3, 1, 1, 2),
        (1, 3, 1, -1, 1),
        (1, 3, 2, 3, 2),
        (1, 3, 1, None, 3),
        (1, 3, 0, 0, 3),
        (3, 2, 1, 0, 2),
        (3, 3, 1, 0, 3),
    ],
)
def test_a_pool_grows_by_free_gpus_and_shrinks_without_any(present, wanted, gpus, free, size):
    assert affordable(present, wanted, gpus, free) == size


def test_two_autoscaled_pools_each_get_their_own_present_size():
    both = {"prefill": scaled(1, 8), "decode": scaled(1, 8)}
    found = step({"prefill": 2, "decode": 4}, budget=12, **both)
    assert (started(found), found.waits_for) == ({"prefill": 2, "decode": 4}, "")
    assert "of 4 decode pods" in step({"prefill": 2, "decode": 4}, budget=11, **both).waits_for


@pytest.mark.parametrize(("pool", "words"), [({"gpus": 1}, ": 1 pod)"), (FIXED, ": 2 pods)")])
def test_a_corrected_size_is_reported_in_pods(pool, words):
    found = step({"prefill": 7, "decode": 2}, dtype="Float32", prefill=pool)
    (effect,) = [e for e in found.effects if e.step == "correct_pool_sizes"]
    assert effect.message.endswith(words)
