"""How many replicas each pool needs, decided from numbers and the time that are passed in. Knows no cluster and no clock."""

from mmd_operator.autoscaling.coordinate import Bottleneck, Verdict, coordinate
from mmd_operator.autoscaling.decide import decide
from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import DeploymentPolicy, PoolPolicy, Window
from mmd_operator.autoscaling.types import (
    HARD_LIMITS,
    Decision,
    Demand,
    Latency,
    PodLoad,
    PodSample,
    PodState,
    PoolSamples,
    Signal,
)

__all__ = [
    "HARD_LIMITS",
    "Bottleneck",
    "Decision",
    "Demand",
    "DeploymentPolicy",
    "History",
    "Latency",
    "PodLoad",
    "PodSample",
    "PodState",
    "PoolPolicy",
    "PoolSamples",
    "Signal",
    "Verdict",
    "Window",
    "coordinate",
    "decide",
]
