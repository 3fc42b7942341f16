"""How long growth that the watch does not show counts against the GPU budget, and against whom."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from mmd_api.pipeline import pipeline_revision
from mmd_operator.autoscaling import ScaleActions
from mmd_operator.kube.cluster import BusyError, RefusedError
from mmd_operator.observed.observed import Child, Observed, PoolGrowth, child_of
from mmd_operator.rollout.next_step import next_step
from mmd_operator.scaling.scaling_limits import growth_within
from mmd_operator.sizes.gpu_budget import gpus_growing, gpus_held, grown, serving_budget
from mmd_operator.sizes.gpu_share import gpu_share
from mmd_operator.sizes.pending_growth import UNANSWERED_SECONDS, VERIFY_SECONDS, PendingGrowth
from support.cluster.deployments import deployment

from .bodies import NEW, OLD, UID, pod, workload


def stateful_set(pool: str = "prefill", revision: str = NEW, replicas: int = 2, uid: str = "u"):
    return child_of(
        "StatefulSet", workload("StatefulSet", pool, revision, replicas=replicas, gpus=2, uid=uid)
    )


PREFILL = stateful_set()
DECODE = stateful_set("decode")
SEEN = Observed({child.key: child for child in (PREFILL, DECODE)})
TO_FOUR = PoolGrowth(4, 2, NEW, PREFILL.uid)
CREATED = PoolGrowth(3, 2, NEW, None)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def written(growth: PendingGrowth, one: PoolGrowth = TO_FOUR, error: Exception | None = None) -> None:
    """Decided, and written, which ends with an error if there is one."""
    try:
        with growth.deciding({PREFILL.name: one}), growth.writing(PREFILL.name, one.replicas):
            if error is not None:
                raise error
    except (BusyError, RefusedError):
        pass


def test_growth_counts_from_the_decision_on():
    growth = PendingGrowth()
    with growth.deciding({PREFILL.name: TO_FOUR}):
        assert growth.unseen(SEEN) == {PREFILL.name: TO_FOUR}
    assert growth.unseen(SEEN) == {}, "it was never written"


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (None, True),
        (BusyError("no answer"), True),
        (BusyError("conflict", undone=True), False),
        (RefusedError("quota"), False),
    ],
)
def test_a_written_size_counts_unless_it_was_refused(error: Exception | None, counts: bool):
    growth = PendingGrowth()
    written(growth, error=error)
    assert growth.unseen(SEEN) == ({PREFILL.name: TO_FOUR} if counts else {})


def test_a_refused_size_leaves_the_one_that_was_written_before():
    growth = PendingGrowth()
    written(growth)
    written(growth, replace(TO_FOUR, replicas=5), RefusedError("quota"))
    assert growth.unseen(SEEN) == {PREFILL.name: TO_FOUR}


@pytest.mark.parametrize(
    ("shown", "counts"),
    [
        (stateful_set(replicas=3), True),
        (stateful_set(replicas=4), False),
        (stateful_set(replicas=5), False),
        (stateful_set(uid="another"), False),
        (None, False),
    ],
)
def test_a_written_size_counts_until_shown_or_its_pool_is_gone(shown, counts: bool):
    growth = PendingGrowth()
    written(growth)
    seen = Observed({shown.key: shown} if shown else {})
    assert bool(growth.unseen(seen)) == counts
    assert bool(growth.unseen(SEEN)) == counts, "it does not come back"


def test_a_pool_that_is_created_counts_until_the_watch_shows_it():
    growth = PendingGrowth()
    written(growth, CREATED)
    assert growth.unseen(Observed()) == {PREFILL.name: CREATED}
    assert growth.unseen(SEEN) == {}


def test_a_smaller_size_that_is_written_later_replaces_it():
    growth = PendingGrowth()
    written(growth)
    with growth.writing(PREFILL.name, 2):
        pass
    assert growth.unseen(SEEN) == {}


def test_a_size_without_growth_is_not_recorded_beside_a_decision():
    growth = PendingGrowth()
    with growth.deciding({PREFILL.name: TO_FOUR}), growth.writing(PREFILL.name, 2):
        pass
    with growth.deciding({DECODE.name: TO_FOUR}), growth.writing(PREFILL.name, 2):
        pass
    assert growth.unseen(SEEN) == {}


def test_a_smaller_size_written_concurrently_does_not_replace_a_larger_one():
    growth = PendingGrowth(Clock())
    with growth.writing(PREFILL.name, 2):
        written(growth)
    assert growth.unseen(SEEN) == {PREFILL.name: TO_FOUR}


def test_the_largest_of_several_counts():
    growth = PendingGrowth()
    written(growth)
    five = replace(TO_FOUR, replicas=5)
    with growth.deciding({PREFILL.name: five}), growth.deciding({PREFILL.name: replace(five, replicas=3)}):
        assert growth.unseen(SEEN) == {PREFILL.name: five}


class ApiServer:
    """Shows one StatefulSet, and counts how often it was asked."""

    def __init__(self, child: Child | None) -> None:
        self.child, self.calls = child, 0

    async def get(self, _name: str) -> Child | None:
        self.calls += 1
        return self.child


async def test_a_size_on_the_api_server_counts_despite_a_lagging_watch():
    growth = PendingGrowth(clock := Clock())
    server = ApiServer(stateful_set(replicas=4))
    written(growth)
    for _ in range(20):
        await growth.verify(SEEN, server.get)
        assert growth.unseen(SEEN) == {PREFILL.name: TO_FOUR}
        clock.now += VERIFY_SECONDS / 2
    assert server.calls == 9, "once in VERIFY_SECONDS"


@pytest.mark.parametrize("child", [stateful_set(replicas=3), stateful_set(replicas=9, uid="another"), None])
async def test_a_size_that_the_api_server_does_not_show_is_forgotten(child: Child | None):
    growth = PendingGrowth(clock := Clock())
    written(growth)
    clock.now += VERIFY_SECONDS
    await growth.verify(SEEN, ApiServer(child).get)
    assert not growth.unseen(SEEN)


async def test_an_unanswered_size_counts_until_it_can_no_longer_take_effect():
    growth = PendingGrowth(clock := Clock())
    written(growth, error=BusyError("no answer"))
    clock.now += UNANSWERED_SECONDS - 1
    await growth.verify(SEEN, ApiServer(PREFILL).get)
    assert growth.unseen(SEEN)
    clock.now += VERIFY_SECONDS
    await growth.verify(SEEN, ApiServer(PREFILL).get)
    assert not growth.unseen(SEEN)


async def test_a_size_that_is_written_during_the_look_up_counts():
    growth = PendingGrowth(clock := Clock())
    written(growth)
    clock.now += VERIFY_SECONDS
    five = replace(TO_FOUR, replicas=5)

    async def get(_name: str) -> Child | None:
        written(growth, five)
        return PREFILL

    await growth.verify(SEEN, get)
    assert growth.unseen(SEEN) == {PREFILL.name: five}


@pytest.mark.parametrize(("error", "size"), [(None, 3), (BusyError("no answer"), 4)])
def test_a_larger_size_that_was_not_answered_counts_beside_one_that_was(error, size: int):
    growth = PendingGrowth()
    written(growth, error=error)
    written(growth, replace(TO_FOUR, replicas=3))
    assert growth.unseen(SEEN)[PREFILL.name].replicas == size


def test_an_answered_larger_size_counts_beside_an_unanswered_smaller_one():
    growth = PendingGrowth()
    written(growth)
    written(growth, replace(TO_FOUR, replicas=3), BusyError("no answer"))
    assert growth.unseen(SEEN) == {PREFILL.name: TO_FOUR}


@pytest.mark.parametrize("error", [None, RefusedError("quota")])
def test_a_decision_stops_counting_once_it_is_shown_or_refused(error: Exception | None):
    growth = PendingGrowth()
    with growth.deciding({PREFILL.name: TO_FOUR}):
        with suppress(RefusedError), growth.writing(PREFILL.name, 4):
            if error is not None:
                raise error
        shown = stateful_set(replicas=2 if error else 4)
        assert growth.unseen(Observed({shown.key: shown})) == {}


def test_what_a_look_up_finds_counts_until_the_watch_shows_it():
    growth = PendingGrowth()
    growth.confirmed(found := stateful_set(replicas=4), PREFILL)
    assert growth.unseen(SEEN) == {PREFILL.name: TO_FOUR}
    assert growth.unseen(Observed({found.key: found})) == {}
    growth.confirmed(found, found)
    assert growth.unseen(SEEN) == {}, "the watch showed it before"


@pytest.mark.parametrize("shown", [None, PREFILL])
def test_a_recreated_pool_counts_before_the_watch_shows_the_deletion(shown):
    growth, again = PendingGrowth(), stateful_set(replicas=4, uid="another")
    growth.confirmed(again, shown)
    for seen in (SEEN, Observed()):
        assert growth.unseen(seen) == {PREFILL.name: replace(TO_FOUR, uid=again.uid)}
    smaller = stateful_set(replicas=3, uid="another")
    assert growth.unseen(Observed({smaller.key: smaller}))
    assert growth.unseen(Observed()) == {}, "it is gone"


def test_a_pool_that_is_deleted_is_forgotten():
    growth = PendingGrowth()
    written(growth, CREATED)
    growth.forget(PREFILL.name)
    assert not growth.unseen(Observed())


@pytest.mark.parametrize(("pods", "growing"), [(0, 4), (2, 4), (3, 2), (4, 0)])
def test_a_pod_that_the_watch_shows_before_the_size_counts_once(pods: int, growing: int):
    found = tuple(pod("prefill", NEW, name=f"{PREFILL.name}-{n}", gpus=2) for n in range(pods))
    seen = replace(SEEN, pods=found, growth={PREFILL.name: TO_FOUR})
    assert gpus_growing(seen, PREFILL.name) == growing
    assert gpus_held(seen) == 12
    assert gpus_held(seen, NEW) == 12
    assert gpus_held(seen, OLD) == 0


def test_growth_to_fewer_pods_than_there_are_holds_nothing():
    found = tuple(pod("prefill", NEW, name=f"{PREFILL.name}-{n}", gpus=2) for n in range(5))
    assert gpus_growing(replace(SEEN, pods=found, growth={PREFILL.name: TO_FOUR}), PREFILL.name) == 0


def test_growth_is_reserved_for_the_pool_that_has_it():
    seen = replace(SEEN, growth={PREFILL.name: TO_FOUR})
    assert grown(PREFILL, 4, seen, 0) == (4, 0)
    assert grown(PREFILL, 5, seen, 2) == (5, 0)
    assert grown(PREFILL, 3, seen, 1) == (3, 1)
    assert grown(DECODE, 3, seen, 1) == (2, 1)
    assert growth_within(0, ScaleActions(replicas=4), PREFILL, seen) == (ScaleActions(replicas=4), 0)
    assert growth_within(0, ScaleActions(replicas=4), DECODE, seen) == (ScaleActions(), 0)


SPEC = deployment(
    {
        "model": {"id": "builtin/demo", "dtype": "Float32"},
        "prefill": {"gpus": 1, "replicas": 2},
        "decode": {"gpus": 1, "replicas": 2},
        "gpuBudget": 16,
    }
).spec
SPEC = SPEC.model_copy(  # the sums tell GPUs from pods
    update={name: getattr(SPEC, name).model_copy(update={"gpus": 2}) for name in ("prefill", "decode")}
)


def test_a_new_revision_gets_what_growth_of_the_serving_one_leaves():
    assert not gpu_share(SPEC, "cccccccccc", NEW, SEEN, UID).sizes
    growing = replace(SEEN, growth={PREFILL.name: TO_FOUR})
    assert gpu_share(SPEC, "cccccccccc", NEW, growing, UID).sizes == {"prefill": 1, "decode": 1}
    own = replace(SEEN, growth={f"demo-prefill-{OLD}": replace(TO_FOUR, revision=OLD, uid=None)})
    assert not gpu_share(SPEC, OLD, NEW, own, UID).sizes, "its own growth is part of its share"


def test_the_autoscaler_may_want_what_a_new_revision_leaves():
    assert serving_budget(SPEC, SEEN, NEW) == 16
    other = PoolGrowth(3, 2, OLD, None)
    assert serving_budget(SPEC, replace(SEEN, growth={f"demo-prefill-{OLD}": other}), NEW) == 10
    assert serving_budget(SPEC, replace(SEEN, growth={PREFILL.name: TO_FOUR}), NEW) == 16
    older = stateful_set(revision=OLD)
    assert serving_budget(SPEC, replace(SEEN, children={**SEEN.children, older.key: older}), NEW) == 12


@pytest.mark.parametrize("size", [2, 4])
def test_the_only_pod_stays_until_growth_has_been_observed(size: int):
    spec = SPEC.model_copy(
        update={"gpu_budget": 6, "prefill": SPEC.prefill.model_copy(update={"replicas": 1})}
    )
    revision = pipeline_revision(spec)
    body = workload("StatefulSet", "prefill", revision, gpus=2, inputs="new")
    prefill, decode = child_of("StatefulSet", body), stateful_set("decode", revision, replicas=1)
    gateway = child_of("Deployment", workload("Deployment", "gateway", None, template=revision))
    old = pod("prefill", revision, name=f"{prefill.name}-0", ready=True, inputs="old", gpus=2)
    growing = {prefill.name: PoolGrowth(size, 2, revision, prefill.uid)}
    seen = Observed({c.key: c for c in (prefill, decode, gateway)}, (old,), growing)
    planned = [
        {"kind": "Deployment", "metadata": {"name": "demo-gateway", "labels": {}}, "spec": {"replicas": 1}}
    ]
    step = next_step(spec, revision, planned, seen, UID)
    assert step.replace[prefill.name].delete == ()
    assert step.replace[prefill.name].waiting == f"its growth to {size} pods has not been observed"
    assert step.sizes == {}, "no surge beside growth: it would make the pool smaller than that"


@pytest.mark.parametrize(("decided", "to"), [(3, 2), (2, 3), (3, 3)])
def test_no_size_below_one_that_was_given_may_be_written(decided: int, to: int):
    growth = PendingGrowth()
    assert not growth.forbids(PREFILL.name, 1)
    written(growth, replace(TO_FOUR, replicas=to))
    with growth.deciding({PREFILL.name: replace(TO_FOUR, replicas=decided)}):
        assert growth.forbids(PREFILL.name, 2)
        assert not growth.forbids(PREFILL.name, 3)
        assert not growth.forbids(DECODE.name, 2)


def test_no_size_may_be_written_while_another_is():
    growth = PendingGrowth()
    with growth.writing(PREFILL.name, 2):
        assert growth.forbids(PREFILL.name, 4)
        assert not growth.forbids(DECODE.name, 4)
    assert not growth.forbids(PREFILL.name, 4)
