"""Sizes of pools that scale, while a new revision comes up alongside the one that serves: within their bounds, and within the budget."""

from __future__ import annotations

import pytest

from mmd_api.pipeline import pipeline_revision
from mmd_operator.observed.observed import Observed, child_of
from mmd_operator.resources.plan import plan_objects
from mmd_operator.rollout.next_step import Step, next_step
from mmd_operator.sizes.pool_sizes import affordable, wanted_replicas
from support.cluster.deployments import deployment

from .bodies import UID, pod, workload

NO_NODE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
FIXED = {"gpus": 1, "replicas": 2}
MODEL = {"id": "builtin/demo", "dtype": "Float32"}


def scaled(low: int, high: int, gpus: int = 1) -> dict:
    return {"gpus": gpus, "autoscaling": {"minReplicas": low, "maxReplicas": high}}


def step(
    old: dict[str, int],
    new: dict[str, int] | None = None,
    *,
    dtype="BFloat16",
    budget=None,
    ready: dict[str, int] | None = None,
    waiting: int = 0,
    absent: int = 0,
    paused: bool = False,
    **pools,
) -> Step:
    """The step towards `dtype` while pods of Float32 serve: so many of each pool.

    `ready`: how many of the new ones are; `waiting`, `absent`: how many of the old prefill pods have no node, or do not exist.
    """
    pools = {"prefill": scaled(1, 5), "decode": FIXED, **pools}
    spec = {"model": MODEL, "engine": engine(pools), **pools}
    serving = pipeline_revision(deployment(spec).spec)
    rollout = {"rollout": {"paused": True}} if paused else {}
    wanted = deployment({**spec, **rollout, "model": {**MODEL, "dtype": dtype}, "gpuBudget": budget})
    revision = pipeline_revision(wanted.spec)
    sizes = [(serving, old), (revision, new or {})]
    bodies = [
        workload(
            "StatefulSet",
            pool,
            of,
            replicas=n,
            gpus=pools[pool]["gpus"],
            ready=(ready or {}).get(pool, n) if of == revision else n,
        )
        for of, found in sizes
        for pool, n in found.items()
    ]
    for body in bodies:
        if body["metadata"]["name"] == f"demo-prefill-{serving}":
            body["status"]["replicas"] -= absent
    children = [child_of("StatefulSet", body) for body in (*bodies, workload("StatefulSet", "nats", None))]
    children.append(child_of("Deployment", workload("Deployment", "gateway", None, template=serving)))
    prefill = f"demo-prefill-{serving}"
    seen = Observed(
        {c.key: c for c in children},
        tuple(
            pod(
                "prefill",
                serving,
                name=f"{prefill}-{n}",
                ready=n >= waiting,
                gpus=pools["prefill"]["gpus"],
                scheduling=NO_NODE if n < waiting else None,
            )
            for n in range(old.get("prefill", 0) - absent)
        ),
    )
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


def test_a_pool_that_scales_follows_the_serving_pool_until_the_switch():
    grown = step({"prefill": 4, "decode": 2}, {"prefill": 2, "decode": 2})
    assert (grown.stage, sized(grown)) == ("BringingUp", {"prefill": 4})
    starting = step({"prefill": 4, "decode": 2}, {"prefill": 4, "decode": 2}, ready={"prefill": 2})
    assert (starting.stage, sized(starting)) == ("BringingUp", {})
    assert step({"prefill": 4, "decode": 2}, {"prefill": 4, "decode": 2}).stage == "SwitchingGateway"


@pytest.mark.parametrize(("serving", "size"), [(5, 5), (9, 5), (1, 3)])
def test_the_followed_size_stays_within_the_bounds(serving, size):
    found = step({"prefill": serving, "decode": 2}, {"prefill": 2, "decode": 2}, prefill=scaled(3, 5))
    assert found.sizes[f"demo-prefill-{found.revision}"] == size


def test_a_serving_pool_that_shrinks_and_grows_again_delays_no_switch():
    """The new pool keeps the largest size, and needs only as many Ready pods as serve."""
    small = step({"prefill": 2, "decode": 2}, {"prefill": 4, "decode": 2}, ready={"prefill": 2})
    assert (small.stage, sized(small)) == ("SwitchingGateway", {})


@pytest.mark.parametrize("missing", ["waiting", "absent"])
def test_serving_pods_without_a_node_delay_no_switch(missing: str):
    new = {"prefill": 5, "decode": 2}
    short = step({"prefill": 5, "decode": 2}, new, ready={"prefill": 2}, **{missing: 2})
    assert short.stage == "BringingUp"
    enough = step({"prefill": 5, "decode": 2}, new, ready={"prefill": 3}, **{missing: 2})
    assert (enough.stage, sized(enough)) == ("SwitchingGateway", {})


@pytest.mark.parametrize(("budget", "size"), [(10, 2), (11, 3), (12, 4), (20, 4)])
def test_a_pool_follows_as_far_as_the_budget_goes_and_then_switches(budget: int, size: int):
    found = step(
        {"prefill": 4, "decode": 2}, {"prefill": 2, "decode": 2}, budget=budget,
        decode={"gpus": 1, "replicas": 2},
    )  # fmt: skip
    # Ten GPUs are in use.
    follows = {"prefill": size} if size > 2 else {}
    assert sized(found) == follows
    assert found.stage == ("BringingUp" if follows else "SwitchingGateway")


def test_a_fixed_pool_takes_what_the_budget_has_come_to_leave_before_the_switch():
    old, new = {"prefill": 1, "decode": 4}, {"prefill": 1, "decode": 1}
    pools = {"decode": {"gpus": 1, "replicas": 4}, "prefill": {"gpus": 1, "replicas": 1}}
    assert step(old, new, budget=7, **pools).stage == "SwitchingGateway"
    more = step(old, new, budget=9, **pools)
    assert (more.stage, sized(more)) == ("BringingUp", {"decode": 3})


def test_a_paused_rollout_keeps_its_size():
    assert sized(step({"prefill": 4, "decode": 2}, {"prefill": 2, "decode": 2}, paused=True)) == {}


def test_a_pool_that_follows_holds_the_gpus_of_its_growth():
    found = step({"prefill": 4, "decode": 2}, {"prefill": 2, "decode": 2}, budget=20)
    (growth,) = found.growth.values()
    assert (growth.replicas, growth.gpus) == (4, 1)


def test_a_failed_switch_is_taken_back_without_outgrowing_the_revision_that_failed() -> None:
    """The gateway names the new revision and is not Ready; the old one is in effect again, and its gateways and pools are."""
    pools = {"prefill": scaled(1, 5), "decode": FIXED}
    spec = {"model": MODEL, "engine": engine(pools), **pools}
    back = deployment(spec)
    old = pipeline_revision(back.spec)
    failed = pipeline_revision(deployment({**spec, "model": {**MODEL, "dtype": "BFloat16"}}).spec)
    sizes = {(old, "prefill"): 2, (failed, "prefill"): 5, (old, "decode"): 2, (failed, "decode"): 2}
    bodies = [workload("StatefulSet", pool, of, replicas=n, gpus=1) for (of, pool), n in sizes.items()]
    children = [child_of("StatefulSet", body) for body in (*bodies, workload("StatefulSet", "nats", None))]
    children.append(child_of("Deployment", workload("Deployment", "gateway", None, template=failed, ready=0)))
    pods = [
        pod(pool, of, name=f"demo-{pool}-{of}-{number}", ready=True, gpus=1)
        for (of, pool), n in sizes.items()
        for number in range(n)
    ]
    pods += [pod("gateway", old, name="old", ready=True), pod("gateway", failed, name="new")]
    seen = Observed({child.key: child for child in children}, tuple(pods))
    found = next_step(back.spec, old, plan_objects(back, "default"), seen, UID, 0.0, failed, None)
    assert found.stage == "SwitchingGateway"
