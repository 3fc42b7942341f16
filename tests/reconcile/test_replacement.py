"""Which pods of a pool are replaced, and when: one at a time, and the only one after its successor is Ready."""

from __future__ import annotations

import pytest

from mmd_operator.observed.observed import Child, Observed, PodView, child_of
from mmd_operator.sizes.replacement import Replacement, replacement, waiting_words

from .bodies import NEW, pod, workload

CREATED = "2026-01-01T00:00:00Z"
DEADLINE = 900.0
LONG_AFTER = 1767225600.0 + DEADLINE + 1
SET = f"demo-decode-{NEW}"


def one(ordinal: int, inputs: str = "old", *, ready: bool = True, **more) -> PodView:
    return pod("decode", NEW, name=f"{SET}-{ordinal}", inputs=inputs, ready=ready, created=CREATED, **more)


def next_of(
    *pods: PodView,
    wanted: int,
    replicas: int | None = None,
    gpus: int = 1,
    free: int | None = None,
    now: float = 0.0,
    surged: bool = False,
    refused: bool = False,
) -> Replacement:
    size = len(pods) if replicas is None else replicas
    body = workload("StatefulSet", "decode", NEW, replicas=size, inputs="new", gpus=gpus, surged=surged)
    child: Child = child_of("StatefulSet", body)
    refusals = frozenset({child.name} if refused else ())
    seen = Observed({child.key: child}, pods, refused=refusals)
    return replacement(child, wanted, seen, free, now, DEADLINE)


def names(found: Replacement) -> list[str]:
    return [p.name.removeprefix(f"{SET}-") for p in found.delete]


def test_pods_created_from_the_current_template_stay():
    found = next_of(one(0, "new"), one(1, "new"), wanted=2)
    assert found == Replacement()


def test_the_highest_ordinal_goes_first_while_all_are_ready():
    assert names(next_of(one(0), one(1), one(2), wanted=3)) == ["2"]


@pytest.mark.parametrize(
    "away",
    [one(2, "new", ready=False), one(2, deleting=True), one(2, "new", deleting=True)],
    ids=["starting", "draining", "deleted"],
)
def test_no_second_pod_goes_while_one_is_away(away: PodView):
    found = next_of(one(0), one(1), away, wanted=3)
    assert not found.delete
    assert found.replicas is None
    assert "Ready" in found.waiting


def test_no_pod_goes_before_the_one_that_was_replaced_is_seen_again():
    found = next_of(one(0), one(1), wanted=3, replicas=3)
    assert not found.delete
    assert found.waiting == "2 of 3 pods are Ready"


def test_pods_that_take_no_work_go_first_and_one_at_a_time():
    assert names(next_of(one(0, ready=False), one(1, ready=False), one(2), wanted=3)) == ["1"]


def test_the_only_pod_is_joined_by_its_successor_before_it_goes():
    assert next_of(one(0), wanted=1).replicas == 2
    joined = next_of(one(0), one(1, "new", ready=False), wanted=1)
    assert (joined.delete, joined.replicas) == ((), None)
    assert names(next_of(one(0), one(1, "new"), wanted=1)) == ["0"]


def test_the_only_pod_goes_at_once_without_budget_for_another():
    found = next_of(one(0), wanted=1, gpus=2, free=1)
    assert found.replicas is None
    assert names(found) == ["0"]
    assert next_of(one(0), wanted=1, gpus=2, free=2).replicas == 2


def test_a_successor_that_no_node_takes_holds_nothing_up_for_good():
    successor = one(1, "new", ready=False, scheduling="0/3 nodes: insufficient nvidia.com/gpu")
    assert not next_of(one(0), successor, wanted=1, now=LONG_AFTER - 10).delete
    assert names(next_of(one(0), successor, wanted=1, now=LONG_AFTER)) == ["0"]


def test_the_only_pod_goes_if_its_successor_may_not_be_created():
    """A quota may be exact, or an admission policy against one more."""
    alone = {"wanted": 1, "replicas": 2, "surged": True}
    assert names(next_of(one(0), **alone, refused=True)) == ["0"]
    assert not next_of(one(0), **alone).delete
    assert not next_of(one(0, deleting=True), **alone, refused=True).delete
    assert not next_of(one(0), wanted=2, replicas=2, refused=True).delete, (
        "no surge: a pod of the pool is away"
    )


def test_unplaced_pods_count_as_away_unless_they_are_a_surge():
    lost = [one(n, "new", ready=False, scheduling="0/3 nodes: insufficient nvidia.com/gpu") for n in range(3)]
    for pods in ((one(0), one(1), lost[2]), (one(0), lost[1], lost[2])):
        found = next_of(*pods, wanted=3, now=LONG_AFTER)
        assert not found.delete
        assert found.waiting.startswith("no node takes pod")
    assert not next_of(one(0), lost[1], lost[2], wanted=2, now=LONG_AFTER).delete
    assert names(next_of(one(0), one(1), lost[2], wanted=2, now=LONG_AFTER)) == ["1"]


def test_a_shrinking_pool_is_not_replaced_before_its_last_pods_end():
    found = next_of(one(0), one(1, "new"), wanted=1, replicas=1)
    assert not found.delete
    assert found.waiting == "pods beyond the pool's size that have not ended: 1"


@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_pool_is_fully_replaced_with_at_most_one_pod_away(size: int):
    pods = [one(n) for n in range(size)]
    for _ in range(size):
        found = next_of(*pods, wanted=size)
        (gone,) = found.delete
        at = pods.index(gone)
        pods[at] = one(at, "new", ready=False)
        assert not next_of(*pods, wanted=size).delete
        assert sum(p.ready for p in pods) == size - 1
        pods[at] = one(at, "new")
    assert next_of(*pods, wanted=size) == Replacement()


def test_what_replacements_wait_for_is_named_with_each_pool():
    pools = {
        "prefill": Replacement(outdated=("a", "b"), waiting="no node takes pod c"),
        "decode": Replacement(outdated=("d",)),
        "encoder": Replacement(),
    }
    assert (
        waiting_words(pools) == "prefill pods to replace: 2 (no node takes pod c), decode pods to replace: 1"
    )
