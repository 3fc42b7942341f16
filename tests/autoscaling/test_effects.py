"""Each rule says what it did: its name, its limit, and the sentence of the documentation with the numbers of the case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mmd_operator.autoscaling import History
from mmd_operator.autoscaling.decide import REPORTS, RULES
from mmd_operator.autoscaling.history import Extremes
from mmd_operator.autoscaling.policy import Window
from mmd_operator.autoscaling.signals import Observation
from mmd_operator.autoscaling.sizing import State
from mmd_operator.resources.sentences import sentence_of

from .autoscaling_timeline import ENCODER, START, Pool, encode_load

LONG_AGO = START - 9000.0


def state(
    current: int = 4, wanted: int = 4, floor: int = 1, policy: dict[str, Any] | None = None, **more: Any
) -> State:
    """A pool of `current` pods, all Ready unless `stuck` or `unplaced`, whose load needs `wanted`."""
    history = History(
        last_tick=START - 1,
        observed_since=more.pop("since", LONG_AGO),
        wanted_high=Extremes(1, ((START, more.pop("high", wanted)),)),
        wanted_low=Extremes(-1, ((START, more.pop("low", wanted)),)),
        wanted_burst=Extremes(-1, ((START, more.pop("burst", wanted)),)),
        size_high=Extremes(1, ((START, current),)),
        size_low=Extremes(-1, ((START, current),)),
        panic_until=more.pop("panic_until", None),
        last_up=more.pop("last_up", None),
    )
    missing = ("no load report from pod demo-encoder-x-0",) if more.pop("missing", False) else ()
    stuck, unplaced = more.pop("stuck", 0), more.pop("unplaced", 0)
    observation = Observation(
        (), missing, more.pop("ready", current - stuck - unplaced), stuck, unplaced, history,
        more.pop("absent", ()),
    )  # fmt: skip
    rules = replace(ENCODER, **(policy or {}))
    return State(START, rules, observation, history, current, floor, wanted, wanted, wanted, **more)


CASES: dict[str, tuple[State, str | None, str]] = {
    "replace_pods_that_do_not_start": (state(stuck=1), None, "5 replicas instead of 4"),
    "remember_tick": (state(wanted=2, missing=True), None, "4 replicas instead of 2"),
    "enter_or_leave_panic": (state(wanted=9), None, "the pool is in panic"),
    "follow_requested_size": (
        state(policy={"external": True}, requested=30), "MaxReplicas", "20 replicas of 30 requested",
    ),
    "keep_fixed_size": (state(policy={"min_replicas": 3, "max_replicas": 3}), None, "3 replicas"),
    "raise_to_minimum": (state(current=1, floor=2, policy={"min_replicas": 2}), None, "2 replicas"),
    "lower_to_maximum": (state(policy={"max_replicas": 3}), "MaxReplicas", "3 replicas"),
    "hold_growth_until_a_pod_starts": (
        state(current=1, stuck=1), "PodsNotStarting", "1 replica instead of 4",
    ),
    "hold_at_minimum": (state(wanted=1, floor=4), "Schedule", "4 replicas instead of 1"),
    "hold_on_missing_reports": (state(wanted=1, missing=True), "MetricsMissing", "4 replicas instead of 1"),
    "hold_during_panic": (state(wanted=1, panic_until=START + 1), "PanicHold", "4 replicas instead of 1"),
    "hold_until_window_is_seen": (state(wanted=1, since=START), "WindowNotSeen", "4 replicas instead of 1"),
    "stabilize": (state(wanted=1, high=3), "Stabilization", "3 replicas instead of 1"),
    "cool_down": (state(wanted=1, last_up=START - 1), "Cooldown", "4 replicas instead of 1"),
    "limit_rate": (state(current=4, wanted=20), "RateLimit", "8 replicas instead of 20"),
    "keep_within_bounds": (state(wanted=30), "MaxReplicas", "20 replicas instead of 30"),
    "keep_pods_beside_absent_ones": (
        state(wanted=3, absent=(0,)), "Unschedulable", "4 replicas instead of 3",
    ),
    "settle_size": (state(wanted=6), None, "6 replicas, LoadRose"),
    "report_pods_that_do_not_start": (state(wanted=4, stuck=3), "PodsNotStarting", "3 of 4 pods"),
    "report_unschedulable_pods": (state(wanted=4, unplaced=1), "Unschedulable", "1 of 4 pods"),
}  # fmt: skip


@pytest.mark.parametrize("rule", [*RULES, *REPORTS], ids=lambda rule: rule.__name__)
def test_a_rule_that_acts_names_itself_its_limit_and_its_numbers(rule: Callable[..., Any]) -> None:
    before, limit, numbers = CASES[rule.__name__]
    _, effect = rule(before)
    assert effect is not None
    assert (effect.rule, effect.limit) == (rule.__name__, limit)
    assert effect.message == f"{sentence_of(rule)} ({numbers})"


@pytest.mark.parametrize("rule", [*RULES, *REPORTS], ids=lambda rule: rule.__name__)
def test_a_rule_that_does_nothing_leaves_no_trace(rule: Callable[..., Any]) -> None:
    after, effect = rule(state(current=4, wanted=4))
    assert effect is None
    assert after.replicas == 4


def test_the_end_of_a_panic_is_an_effect_too() -> None:
    rule = next(rule for rule in RULES if rule.__name__ == "enter_or_leave_panic")
    _, effect = rule(state(panic_until=START - 1))
    assert effect is not None
    assert effect.message.endswith("(the panic has ended)")


def test_the_reason_of_a_decision_is_the_work_of_a_rule() -> None:
    for before, reason in [
        (state(wanted=6), "LoadRose"),
        (state(wanted=6, panic_until=START + 1), "Panic"),
        (state(current=0, wanted=1), "Woken"),
        (state(wanted=2), "LoadFell"),
        (state(wanted=0), "Idle"),
        (state(missing=True), "MetricsMissing"),
        (state(), "Steady"),
    ]:
        after, _ = RULES[-1](before)
        assert (after.reason, after.is_settled) == (reason, True)


def test_a_decision_keeps_the_effects_in_the_order_of_the_rules() -> None:
    policy = replace(ENCODER, max_replicas=4, max_scale_up=1.0)
    decision = Pool(policy, lambda now, ready: encode_load(queued=12_400.0 / ready), replicas=3).tick()
    names = [effect.rule for effect in decision.effects]
    assert names == ["limit_rate", "keep_within_bounds", "settle_size"]
    status = decision.status()
    assert [(e.rule, e.limit) for e in status.effects] == [
        ("limit_rate", "RateLimit"), ("keep_within_bounds", "MaxReplicas"), ("settle_size", None),
    ]  # fmt: skip
    order = [rule.__name__ for rule in RULES]
    assert sorted(names, key=order.index) == names


def test_a_schedule_is_named_where_it_raises_the_pool() -> None:
    window = Window("* * * * *", 3600.0, 3)
    decision = Pool(replace(ENCODER, schedules=(window,)), lambda now, ready: encode_load()).tick()
    (effect,) = [e for e in decision.effects if e.rule == "raise_to_minimum"]
    assert effect.message.endswith("(3 replicas, by a schedule)")
