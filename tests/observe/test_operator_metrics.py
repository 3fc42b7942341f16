"""What the operator exposes of a deployment is what it last saw of it, and nothing once the deployment is gone."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from mmd_api.status import PoolStatus
from mmd_operator.kube.metrics import Counts, DeploymentSnapshot, OperatorMetrics
from mmd_operator.observed.condition_state import ConditionState
from mmd_operator.observed.problems import Problem

Labels = tuple[tuple[str, str], ...]
NO_GPU = Problem("NoGpu", "decode", "no GPU", "add one", pods=2, revision="a")


def exposed(metrics: OperatorMetrics) -> dict[str, dict[Labels, float]]:
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(metrics.expose()[0].decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("namespace", "deployment")}
            found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return found


def about(metrics: OperatorMetrics, name: str) -> list[str]:
    return [line for line in metrics.expose()[0].decode().splitlines() if f'deployment="{name}"' in line]


def test_conditions_sizes_and_problems_are_those_of_the_last_pass() -> None:
    metrics = OperatorMetrics()
    snapshot = DeploymentSnapshot(
        "n",
        "demo",
        conditions=(
            ConditionState("Ready", "True", "Serving", "all there"),
            ConditionState("Degraded", "False", "NoProblem", "fine"),
        ),
        pools={"decode": PoolStatus(desired=3, ready=1, draining=1)},
        problems=(NO_GPU, Problem("NoGpu", "decode", "no GPU", "add one", pods=1, revision="b")),
    )
    metrics.deployments = lambda: [snapshot]
    found = exposed(metrics)
    assert found["mmd_deployment_condition"] == {
        (("condition", "Ready"), ("reason", "Serving")): 1,
        (("condition", "Degraded"), ("reason", "NoProblem")): 0,
    }
    assert found["mmd_pool_replicas"] == {
        (("pool", "decode"), ("state", "desired")): 3,
        (("pool", "decode"), ("state", "ready")): 1,
        (("pool", "decode"), ("state", "draining")): 1,
    }
    assert found["mmd_deployment_problem_pods"] == {(("component", "decode"), ("reason", "NoGpu")): 3}


def test_a_condition_has_one_series_however_often_its_reason_changes() -> None:
    metrics = OperatorMetrics()
    for reason in ("Starting", "NoGpu", "CrashLoop"):
        condition = ConditionState("Ready", "False", reason, "")
        metrics.deployments = lambda condition=condition: [DeploymentSnapshot("n", "demo", (condition,))]
        assert list(exposed(metrics)["mmd_deployment_condition"]) == [
            (("condition", "Ready"), ("reason", reason))
        ]


def test_the_series_of_a_deployment_go_with_it() -> None:
    metrics = OperatorMetrics()
    counts = Counts()
    counts.decisions["encoder", "up", "LoadRose"] += 2
    counts.drains["encoder", "ended"] += 1
    kept = DeploymentSnapshot("n", "kept", problems=(NO_GPU,))
    metrics.deployments = lambda: [kept, DeploymentSnapshot("n", "gone", problems=(NO_GPU,), counts=counts)]
    assert exposed(metrics)["mmd_scaling_decisions_total"] == {
        (("direction", "up"), ("pool", "encoder"), ("reason", "LoadRose")): 2
    }
    assert len(about(metrics, "gone")) == 4
    metrics.deployments = lambda: [kept]
    assert about(metrics, "gone") == []
    assert len(about(metrics, "kept")) == 2
