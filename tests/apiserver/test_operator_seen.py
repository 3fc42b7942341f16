"""What a real Prometheus sees of a real operator that scales a deployment: every panel that asks it has an answer, alerts fire, and
what is said of a deployment ends with it. Pods are found by the rules that docs/observe.md shows.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kubernetes import client

from mmd_cli.local.pods import free_port
from mmd_dashboards.boards import BOARDS
from mmd_dashboards.queries import SCALED, filled
from mmd_operator.kube.metrics import OperatorMetrics
from support.cluster.control_plane import ControlPlane
from support.cluster.operator_process import OperatorProcess
from support.cluster.standin import Namespace, is_gone
from support.servers.prometheus_server import Prometheus, hurried

from .discovery import HOME, Discovery, configuration
from .fleet import BUSY, IDLE, Fleet, assert_condition, assert_drain_requested, scaled

pytestmark = [pytest.mark.xdist_group("operator-seen"), pytest.mark.timeout(600)]


class Seen:
    """A deployment that has grown, shrunk and grown again until no GPU was left, and the Prometheus that watched."""

    def __init__(
        self, fleet: Fleet, prometheus: Prometheus, operator: OperatorProcess, discovery: Discovery
    ) -> None:
        self.fleet, self.prometheus, self.operator = fleet, prometheus, operator
        self._discovery = discovery

    def until(self, check: Any) -> None:
        """Controllers, kubelet, pods and discovery go on meanwhile."""

        def step() -> None:
            self._discovery.write()
            check()

        self.fleet.until(step)

    def here(self, expr: str) -> str:
        return filled(expr, self.fleet.namespace.name, "demo", "2m")


@pytest.fixture(scope="module")
def seen(
    control_plane: ControlPlane, api: client.ApiClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("seen")
    namespace, port = Namespace.create(api, "operator-seen"), free_port()
    operator = OperatorProcess(control_plane.kubeconfig(), namespace.name, folder, health_port=port)
    rules = hurried(folder / "rules.yaml", windows=10, waits=300)
    discovery = Discovery(namespace, folder / "pods.json")
    config = configuration(port, rules, discovery.file)
    operator.start()
    fleet = Fleet(namespace)
    try:
        with Prometheus(folder, config) as prometheus:
            made = Seen(fleet, prometheus, operator, discovery)
            grow_shrink_and_run_out_of_gpus(made)
            yield made
    finally:
        fleet.stop()
        operator.kill()


def grow_shrink_and_run_out_of_gpus(seen: Seen) -> None:
    fleet = seen.fleet
    spec = scaled()
    spec["encoder"]["schedulingDeadlineSeconds"] = 0
    fleet.namespace.apply(spec)
    fleet.until(fleet.namespace.is_ready)
    fleet.until(lambda: assert_condition(fleet, "MetricsFresh", "True", "AllReporting"))
    first = fleet.pods_of("encoder")[0]
    first.load = BUSY
    fleet.until(lambda: fleet.assert_size("encoder", 3))
    third = fleet.pods_of("encoder")[2]
    third.holds_work = True
    for pod in fleet.pods_of("encoder"):
        pod.load = IDLE
    fleet.until(lambda: assert_drain_requested(third))
    third.holds_work = False
    fleet.until(lambda: fleet.assert_size("encoder", 1))
    name = first.name.rpartition("-")[0]
    fleet.unschedulable = {f"{name}-{n}" for n in range(1, 8)}
    first.load = BUSY
    fleet.until(lambda: assert_condition(fleet, "ScalingLimited", "True", "Unschedulable"))
    fleet.gateway.answer = b"<html>"
    fleet.until(lambda: assert_condition(fleet, "MetricsFresh", "False", "MetricsMissing"))
    scraped_until = time.time()
    fleet.until(lambda: newer(seen.prometheus, scraped_until))


def newer(prometheus: Prometheus, than: float) -> None:
    assert prometheus.value("max(timestamp(mmd_operator_leading))") > than + 1


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_panel_that_asks_an_operator_has_an_answer(seen: Seen, board: Any) -> None:
    silent = [
        f"{panel.title}: {query.expr}"
        for panel in board.panels()
        for query in panel.queries
        if query.moves == "operator" and not seen.prometheus.answers(seen.here(query.expr))
    ]
    assert silent == []


OF_TROUBLE = {"mmd_deployment_reconcile_failing_seconds", "mmd_operator_unread_seconds"}
"""Nothing fails and nothing is refused here: see test_isolation and test_namespaces_apart."""


def test_a_deployment_that_is_scaled_touches_every_metric_of_the_operator(seen: Seen) -> None:
    counted = {"histogram": "_count"}
    untouched = [
        entry.name
        for entry in OperatorMetrics().catalogue
        if entry.name not in OF_TROUBLE
        and not seen.prometheus.value(
            f"max(max_over_time({entry.name}{counted.get(entry.kind, '')}[10m])) > 0"
        )
    ]
    assert untouched == []


def test_every_series_of_the_operator_is_in_the_catalogue(seen: Seen) -> None:
    known = {entry.name for entry in OperatorMetrics().catalogue}
    found = seen.prometheus.query('count by (__name__) ({job="operator",__name__=~"mmd_.*"})')
    names = {re.sub("_(bucket|count|sum)$", "", one["metric"]["__name__"]) for one in found}
    assert names == known


def test_decisions_and_drains_are_counted_once_each(seen: Seen) -> None:
    ours = f'namespace="{seen.fleet.namespace.name}",deployment="demo",pool="encoder"'

    def count(metric: str, **labels: str) -> float:
        more = "".join(f',{name}="{value}"' for name, value in labels.items())
        return seen.prometheus.value(f"sum({metric}{{{ours}{more}}})")

    assert count("mmd_scaling_decisions_total", direction="up") == 2
    assert count("mmd_scaling_decisions_total", direction="down") == 1
    assert count("mmd_drains_total", outcome="begun") == 2
    assert count("mmd_drains_total", outcome="ended") == 2
    assert count("mmd_drains_total", outcome="overdue") == 0
    assert count("mmd_deployment_problem_pods") == 0, "problems tell of a component"
    sizes = {
        one["metric"]["size"]: float(one["value"][1])
        for one in seen.prometheus.query(f"mmd_scaling_replicas{{{ours}}}")
    }
    assert (sizes["minimum"], sizes["maximum"]) == (1, 3)


def test_the_annotation_of_a_decision_can_be_queried(seen: Seen) -> None:
    assert seen.prometheus.answers(seen.here(SCALED))


def test_pods_without_a_gpu_are_an_alert(seen: Seen) -> None:
    def fires() -> None:
        assert seen.prometheus.firing("MmdNoGpu", since=time.time() - 60)

    seen.until(fires)
    (alert,) = seen.prometheus.firing("MmdNoGpu", since=time.time() - 60)
    assert (alert["namespace"], alert["deployment"], alert["component"]) == (
        seen.fleet.namespace.name,
        "demo",
        "encoder",
    )


def test_the_documented_configuration_finds_every_pod_and_names_it(seen: Seen) -> None:
    def found() -> None:
        targets = httpx.get(f"{seen.prometheus.url}/api/v1/targets", timeout=5).json()["data"]
        labels = {
            one["labels"]["pod"]: (one["labels"]["namespace"], one["labels"]["deployment"])
            for one in targets["activeTargets"]
            if one["labels"]["job"] == "mmd"
        }
        assert labels == {pod: (seen.fleet.namespace.name, "demo") for pod in seen.fleet.pods}
        addresses = {one["scrapeUrl"] for one in targets["activeTargets"]}
        assert addresses >= {f"http://{pod.address}:{pod.port}/metrics" for pod in seen.fleet.pods.values()}

    seen.until(found)


def test_series_end_with_their_deployment_and_a_hanging_operator_raises_an_alert(seen: Seen) -> None:
    """Last: it takes the deployment and the operator away."""
    namespace = seen.fleet.namespace
    namespace.delete()
    seen.fleet.stop()
    namespace.settled(lambda: is_gone(namespace))

    def silent() -> None:
        assert seen.prometheus.query(f'{{job="operator",namespace="{namespace.name}",deployment!=""}}') == []

    namespace.settled(silent)
    assert seen.prometheus.value("sum(mmd_operator_leading)") == 1
    begun = time.time()
    seen.operator.freeze()

    def fires() -> None:
        assert [one["namespace"] for one in seen.prometheus.firing("MmdOperatorStuck", begun)] == [HOME]

    namespace.settled(fires)
    seen.operator.thaw()
