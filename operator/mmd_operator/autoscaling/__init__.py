"""How many replicas each pool needs, decided from numbers and the time that are passed in. Knows no cluster and no clock."""

from mmd_operator.autoscaling.coordinate import Bottleneck, Verdict, coordinate
from mmd_operator.autoscaling.decide import decide
from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import DeploymentPolicy, PoolPolicy, Window
from mmd_operator.autoscaling.reports import (
    GATEWAY_PATH,
    MAX_REPORT_BYTES,
    WORKER_PATH,
    GatewayReport,
    ReportError,
    WorkerReport,
    gateway_report,
    worker_report,
)
from mmd_operator.autoscaling.scaler import Moves, PodFacts, PoolFacts, Scaler
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
    "GATEWAY_PATH",
    "HARD_LIMITS",
    "MAX_REPORT_BYTES",
    "WORKER_PATH",
    "Bottleneck",
    "Decision",
    "Demand",
    "DeploymentPolicy",
    "GatewayReport",
    "History",
    "Latency",
    "Moves",
    "PodFacts",
    "PodLoad",
    "PodSample",
    "PodState",
    "PoolFacts",
    "PoolPolicy",
    "PoolSamples",
    "ReportError",
    "Scaler",
    "Signal",
    "Verdict",
    "Window",
    "WorkerReport",
    "coordinate",
    "decide",
    "gateway_report",
    "worker_report",
]
