"""A pod is asked to drain again where the request was removed, at growing intervals while another client keeps removing it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from mmd_operator.autoscaling import PoolFacts, ScaleActions
from mmd_operator.kube.contests import FREE_REPAIRS
from mmd_operator.kube.events import Events
from mmd_operator.kube.metrics import Counts, OperatorMetrics
from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.observed.observed import child_of
from mmd_operator.rollout.applier import UNSEEN_SECONDS
from mmd_operator.scaling.pool_actions import PoolActions
from mmd_operator.sizes.pending_growth import PendingGrowth

from .bodies import NEW, pod, workload

TICK_SECONDS = 2.0
SLOW_TICK_SECONDS = UNSEEN_SECONDS
DECODE = child_of("StatefulSet", workload("StatefulSet", "decode", NEW, replicas=2))


class Cluster:
    """Counts requests to drain; the annotation of each is gone by the next tick."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask_to_drain(self, _namespace: str, name: str, *_: object) -> None:
        self.asked.append(name)


async def after(
    ticks: int, *names: str, every_seconds: float = SLOW_TICK_SECONDS
) -> tuple[list[str], Events]:
    """Requests and Events when pods should drain in so many ticks."""
    cluster, events = Cluster(), cast(Events, [])
    actions = PoolActions(
        cast(Any, cluster), OperatorMetrics(), "default", PendingGrowth(), Counts(), PRODUCTION
    )
    pods = [pod(name=name, ready=True) for name in names]
    for tick in range(ticks):
        decision = SimpleNamespace(pool="decode", replicas=1, current=2, at=1000 + tick * every_seconds)
        await actions.carry_out(
            ScaleActions(drain=names), DECODE, PoolFacts(2), pods, cast(Any, decision), events
        )
    return cluster.asked, events


async def test_a_request_removed_repeatedly_is_renewed_at_growing_intervals() -> None:
    assert (await after(FREE_REPAIRS, "demo-decode-1"))[0] == ["demo-decode-1"] * FREE_REPAIRS
    asked, events = await after(150, "demo-decode-1")
    assert FREE_REPAIRS < len(asked) < 15
    (reason, words), *_ = [event for event in events if event[0] != "Draining"]
    assert reason == "FieldsContested"
    assert "another client keeps changing the annotation" in words
    assert "of pod demo-decode-1" in words


async def test_a_contest_about_one_pod_delays_no_request_to_another() -> None:
    asked, _ = await after(1, "demo-decode-1", "demo-decode-2")
    assert asked == ["demo-decode-1", "demo-decode-2"]


async def test_a_request_that_the_watch_does_not_show_yet_is_not_repeated() -> None:
    asked, events = await after(3, "demo-decode-1", every_seconds=TICK_SECONDS)
    assert asked == ["demo-decode-1"]
    assert [reason for reason, _ in events] == ["Draining"]
