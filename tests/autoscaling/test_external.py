"""A pool that others size: it has the size that they ask for, within its bounds and the GPU budget, whatever its load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmd_operator.autoscaling import DeploymentPolicy
from mmd_operator.autoscaling.coordinate import coordinate
from mmd_operator.autoscaling.decide import decide
from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import Window
from mmd_operator.autoscaling.samples import PoolSamples

from .autoscaling_timeline import ENCODER, START

OPEN = Window("* * * * *", 3600.0, 3)
EXTERNAL = replace(ENCODER, external=True, min_replicas=1, max_replicas=6, panic_window_seconds=0.0)


@pytest.mark.parametrize(
    ("requested", "current", "policy", "expected"),
    [
        (4, 2, EXTERNAL, (4, "External", None)),
        (2, 4, EXTERNAL, (2, "External", None)),
        (3, 3, EXTERNAL, (3, "Steady", None)),
        (9, 2, EXTERNAL, (6, "External", "MaxReplicas")),
        (0, 2, EXTERNAL, (1, "External", "MinReplicas")),
        (0, 2, replace(EXTERNAL, min_replicas=0), (0, "External", None)),
        (1, 2, replace(EXTERNAL, schedules=(OPEN,)), (3, "External", "Schedule")),
        (None, 2, EXTERNAL, (2, "Steady", None)),  # its MultimodalPool does not exist yet
        (None, 9, EXTERNAL, (6, "External", "MaxReplicas")),
        (5, 2, ENCODER, (2, "MetricsMissing", "MetricsMissing")),  # the load sizes this one
    ],
)
def test_a_pool_has_the_requested_size_within_its_bounds(requested, current, policy, expected):
    decision = decide(START, policy, PoolSamples(current, requested=requested), History())
    assert (decision.replicas, decision.reason, decision.limited_by) == expected


@given(st.none() | st.integers(0, 1000), st.integers(0, 20), st.integers(0, 5), st.integers(1, 20))
def test_no_requested_size_leaves_the_bounds(requested, current, low, more):
    policy = replace(EXTERNAL, min_replicas=low, max_replicas=low + more)
    decision = decide(START, policy, PoolSamples(current, requested=requested), History())
    assert low <= decision.replicas <= low + more


def test_the_decision_names_what_asks_for_the_size():
    decision = decide(START, EXTERNAL, PoolSamples(2, requested=9), History())
    assert str(decision).startswith(
        "encoder scales from 2 to 6 replicas (External); its MultimodalPool asks for 9 replicas; limited by MaxReplicas"
    )


def test_the_gpu_budget_bounds_the_requested_size():
    policy = DeploymentPolicy({"encoder": replace(EXTERNAL, gpus=1)}, gpu_budget=3)
    decided = coordinate(START, policy, {"encoder": PoolSamples(2, requested=5)}, {})
    decision = decided.decisions["encoder"]
    assert (decision.replicas, decision.limited_by) == (3, "GpuBudget")
