"""Which pods may leave a pool that becomes smaller: while its pods are replaced, and where those that stay take no work."""

from __future__ import annotations

import pytest

from mmd_operator.autoscaling import ScaleActions
from mmd_operator.observed.observed import Observed, PodView, child_of
from mmd_operator.scaling.scaling_limits import without_loss
from mmd_operator.sizes.replacement import Replacement, replacement

from .bodies import NEW, pod, workload

CREATED = "2026-01-01T00:00:00Z"
DEADLINE = 900.0
LONG_AFTER = 1767225600.0 + DEADLINE + 1
SET = f"demo-decode-{NEW}"


def one(ordinal: int, inputs: str = "new", **more) -> PodView:
    return pod("decode", NEW, name=f"{SET}-{ordinal}", inputs=inputs, created=CREATED, **more)


def unplaced(
    ordinal: int, inputs: str = "new", words: str = "0/3 nodes: insufficient nvidia.com/gpu"
) -> PodView:
    return one(ordinal, inputs, scheduling=words)


def decided(
    wanted: ScaleActions,
    *pods: PodView,
    surged: bool = False,
    size: int | None = None,
    now: float = LONG_AFTER,
) -> tuple[ScaleActions, Replacement]:
    """What the autoscaler may do of what it wants, and what the rollout replaces meanwhile."""
    replicas = len(pods) if size is None else size
    body = workload("StatefulSet", "decode", NEW, replicas=replicas, inputs="new", gpus=1, surged=surged)
    child = child_of("StatefulSet", body)
    seen = Observed({child.key: child}, pods)
    allowed = without_loss(wanted, child, seen, list(pods), now, DEADLINE)
    return allowed, replacement(child, replicas - surged, seen, None, now, DEADLINE)


def test_an_unplaced_pod_leaves_before_the_others_are_replaced():
    old = [one(n, "old", ready=True) for n in range(4)]
    allowed, found = decided(ScaleActions(replicas=4), *old, unplaced(4))
    assert found.waiting == f"no node takes pod {SET}-4"
    assert allowed.replicas == 4
    _, found = decided(ScaleActions(), *old)
    assert [p.name for p in found.delete] == [f"{SET}-3"]


@pytest.mark.parametrize("last", [one(1, ready=True), one(1, "old", ready=True)], ids=["new", "old"])
def test_no_ready_pod_leaves_while_pods_are_replaced(last: PodView):
    wanted = ScaleActions(replicas=1, drain=(last.name,), overdue=(last.name,))
    allowed, _ = decided(wanted, one(0, "old", ready=True), last)
    assert allowed == ScaleActions()


@pytest.mark.parametrize("successor", [one(1), unplaced(1)], ids=["starting", "unplaced"])
def test_the_successor_of_the_only_pod_stays_until_the_replacement(successor: PodView):
    allowed, _ = decided(ScaleActions(replicas=1), one(0, "old", ready=True), successor, surged=True)
    assert allowed == ScaleActions()


def test_a_pool_grows_while_its_pods_are_replaced():
    allowed, _ = decided(ScaleActions(replicas=3), one(0, "old", ready=True), one(1, ready=True))
    assert allowed.replicas == 3


def test_the_last_ready_pod_leaves_for_pods_waiting_for_a_gpu():
    holds = one(1, ready=True)
    drains, empty = ScaleActions(drain=(holds.name,)), ScaleActions(replicas=1)
    for wanted in (drains, empty):
        assert decided(wanted, unplaced(0), holds)[0] == wanted
        assert decided(wanted, unplaced(0), holds, now=LONG_AFTER - 10)[0] == ScaleActions()
        assert decided(wanted, one(0), holds)[0] == ScaleActions(), "it starts"
        stray = unplaced(0, words="0/3 nodes: 3 node(s) didn't match Pod's node affinity/selector")
        assert decided(wanted, stray, holds)[0] == ScaleActions(), "its GPU would not help"


def test_a_pool_that_shrinks_to_zero_loses_its_last_ready_pod():
    wanted = ScaleActions(drain=(f"{SET}-0",))
    assert decided(wanted, one(0, ready=True))[0] == wanted


def test_no_ready_pod_leaves_beside_an_unready_one_during_a_replacement():
    old = one(0, "old", ready=True)
    allowed, _ = decided(ScaleActions(replicas=1), old, one(1, ready=True), unplaced(2))
    assert allowed == ScaleActions()


def test_the_last_ready_pod_does_not_leave_with_one_that_is_not():
    assert decided(ScaleActions(replicas=1), one(0), one(1, ready=True), one(2))[0] == ScaleActions()


@pytest.mark.parametrize("ready", [True, False])
def test_pods_leave_where_one_that_stays_is_ready_or_none_was(ready: bool):
    pods = one(0), one(1, ready=ready), one(2, ready=ready)
    wanted = ScaleActions(replicas=2)
    assert decided(wanted, *pods)[0] == wanted
