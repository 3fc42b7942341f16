"""Decides how many replicas each pool needs, from given numbers and a given time. Independent of the cluster and the clock."""

from mmd_operator.autoscaling.coordinate import Bottleneck, DeploymentDecision, coordinate
from mmd_operator.autoscaling.decide import decide
from mmd_operator.autoscaling.decision import HARD_LIMITS, LIMITS, Decision, Signal
from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import DeploymentPolicy, PoolPolicy, Window
from mmd_operator.autoscaling.reports import (
    MAX_REPORT_BYTES,
    ReportError,
    gateway_report,
    worker_report,
)
from mmd_operator.autoscaling.samples import Demand, Latency, PodSample, PodState, PoolSamples
from mmd_operator.autoscaling.scaler import PodFacts, PoolFacts, ScaleActions, Scaler
from mmd_operator.autoscaling.signals import SIGNAL_METRICS

__all__ = [
    "HARD_LIMITS",
    "LIMITS",
    "MAX_REPORT_BYTES",
    "SIGNAL_METRICS",
    "Bottleneck",
    "Decision",
    "Demand",
    "DeploymentDecision",
    "DeploymentPolicy",
    "History",
    "Latency",
    "PodFacts",
    "PodSample",
    "PodState",
    "PoolFacts",
    "PoolPolicy",
    "PoolSamples",
    "ReportError",
    "ScaleActions",
    "Scaler",
    "Signal",
    "Window",
    "coordinate",
    "decide",
    "gateway_report",
    "worker_report",
]
