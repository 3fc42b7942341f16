"""The Helm chart and `kubectl apply -k`: what they render, and what they refuse.

A reviewer sees every change of a manifest in the golden files. To accept one: `python -m tests.chart.test_chart`.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from mmd_operator.resources.naming import ADMIN_PORT
from support.cluster.chart import CHART, REPOSITORY, helm, helm_folder, objects, render
from support.cluster.control_plane import binaries
from support.cluster.policies import Place, lets_through

CRDS = ("multimodaldeployments", "multimodalpools")
RULES = REPOSITORY / "operator" / "mmd_operator" / "rules.yaml"
CONFIG = REPOSITORY / "config"
GOLDEN: dict[Path, tuple[str, ...]] = {
    CONFIG / "operator.yaml": ("--set=crds.install=false",),
    Path(__file__).parent / "golden" / "everything.yaml": (
        f"--values={Path(__file__).parent / 'values-everything.yaml'}",
    ),
}


@pytest.fixture(scope="session")
def tools() -> Path:
    """A folder with helm and kubectl."""
    return helm_folder()


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_the_chart_renders_exactly_these_objects(tools: Path, golden: Path):
    assert render(tools, *GOLDEN[golden]) == golden.read_text()


def test_the_chart_passes_lint(tools: Path):
    result = helm(tools, "lint", str(CHART), "--strict")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("plural", CRDS)
def test_the_crd_is_the_generated_one_and_outlives_the_release(tools: Path, plural: str):
    rendered = objects(tools)[f"CustomResourceDefinition/{plural}.serving.multimodal.dev"]
    assert rendered["metadata"].pop("annotations")["helm.sh/resource-policy"] == "keep"
    generated = yaml.safe_load((REPOSITORY / "crds" / f"{plural}.yaml").read_text())
    generated["metadata"].pop("annotations", None)
    assert rendered == generated


def test_a_crd_that_need_not_be_kept_goes_with_the_release(tools: Path):
    rendered = objects(tools, "--set=crds.keep=false")
    metadata = rendered["CustomResourceDefinition/multimodaldeployments.serving.multimodal.dev"]["metadata"]
    assert "helm.sh/resource-policy" not in metadata.get("annotations", {})


def test_the_operator_gets_the_rights_it_asks_for_and_no_others(tools: Path):
    asked = yaml.safe_load(RULES.read_text())
    rendered = objects(tools, "--set=crds.install=false")
    assert rendered["ClusterRole/multimodal-operator"]["rules"] == asked["rules"]
    assert rendered["Role/multimodal-operator-lease"]["rules"] == asked["leaseRules"]
    assert {k for k in rendered if "Role/" in k} == {
        "ClusterRole/multimodal-operator",
        *(f"ClusterRole/multimodal-operator-{name}" for name in ("view", "edit", "admin")),
        "Role/multimodal-operator-lease",
    }


def test_roles_that_kubernetes_aggregates_can_be_left_out(tools: Path):
    rendered = objects(tools, "--set=crds.install=false", "--set=aggregateRoles=false")
    assert [k for k in rendered if k.startswith("ClusterRole/")] == ["ClusterRole/multimodal-operator"]


def test_the_operators_network_policy_lets_through_what_it_does_and_nothing_else(tools: Path):
    """Reports are at the same port of gateways and workers: the planner's `ADMIN_PORT`."""
    rendered = objects(tools, "--set=crds.install=false", "--set=networkPolicy.enabled=true")
    policies = [rendered["NetworkPolicy/multimodal-operator"]]
    labels = rendered["Deployment/multimodal-operator"]["spec"]["template"]["metadata"]["labels"]
    operator = Place(labels, namespace="multimodal-system")
    pod = Place({"serving.multimodal.dev/deployment": "demo"}, namespace="team")
    other = Place({"app": "other"}, namespace="team")
    api_server = Place(address="10.0.0.1")
    reached = [(p, port) for p in (pod, other, api_server) for port in (53, 443, 4222, 6443, ADMIN_PORT)
               if lets_through(policies, operator, p, port)]  # fmt: skip
    anywhere = [(p, port) for p in (pod, other, api_server) for port in (53, 443, 6443)]
    assert sorted(map(str, reached)) == sorted(map(str, [*anywhere, (pod, ADMIN_PORT)]))
    assert lets_through(policies, other, operator, 8080)
    assert not lets_through(policies, other, operator, 9090)


def test_an_install_for_some_namespaces_has_no_right_elsewhere(tools: Path):
    rendered = objects(tools, "--set=crds.install=false", "--set=namespaces={a,b}")
    assert not [key for key in rendered if key.startswith("Cluster")]
    roles = {k: r["rules"] for k, r in rendered.items() if k.startswith("Role/")}
    rules = yaml.safe_load(RULES.read_text())
    assert roles == {
        "Role/multimodal-operator-lease": rules["leaseRules"],
        "Role/a/multimodal-operator": rules["rules"],
        "Role/b/multimodal-operator": rules["rules"],
    }
    container = rendered["Deployment/multimodal-operator"]["spec"]["template"]["spec"]["containers"][0]
    assert [a for a in container["args"] if "namespace" in a] == ["--namespace=a", "--namespace=b"]


@pytest.mark.parametrize("values", [(), ("--set=leaseName=shared",)], ids=["by-default", "by-value"])
def test_releases_share_a_lease_only_if_they_are_told_to(tools: Path, values: tuple[str, ...]):
    """Two in one namespace would else wait for each other for ever."""
    leases = []
    for release in ("team-a", "team-b"):
        result = helm(tools, "template", release, str(CHART), "--set=crds.install=false", *values)
        leases += re.findall(r"--lease-name=(\S+)", result.stdout)
    assert leases == (["shared", "shared"] if values else ["team-a", "team-b"])


def test_every_dashboard_is_a_config_map_that_grafana_finds(tools: Path):
    rendered = objects(tools, "--set=dashboards.enabled=true")
    maps = [item for key, item in rendered.items() if key.startswith("ConfigMap/")]
    assert all(item["metadata"]["labels"]["grafana_dashboard"] == "1" for item in maps)
    shown = [json.loads(text) for item in maps for text in item["data"].values()]
    written = [json.loads(path.read_text()) for path in sorted((CHART / "dashboards").glob("*.json"))]
    assert sorted(d["uid"] for d in shown) == sorted(d["uid"] for d in written)
    assert len(written) > 0


PROMETHEUS_OPERATOR = "--api-versions=monitoring.coreos.com/v1"


@pytest.mark.parametrize("wanted", ["alerts", "podMonitors"])
def test_what_only_the_prometheus_operator_reads_is_refused_without_it(tools: Path, wanted: str):
    result = helm(tools, "template", "multimodal-operator", str(CHART), f"--set={wanted}.enabled=true")
    assert result.returncode != 0
    assert "Prometheus operator" in result.stderr


def test_alerts_are_a_prometheus_rule_that_leads_to_published_runbooks(tools: Path):
    written = (CHART / "alerts" / "rules.yaml").read_text()
    plain = objects(tools, "--set=alerts.enabled=true", PROMETHEUS_OPERATOR)
    assert plain["PrometheusRule/multimodal-operator"]["spec"] == yaml.safe_load(written)
    address = "https://wiki.example/mmd"
    moved = objects(
        tools, "--set=alerts.enabled=true", f"--set=alerts.runbooks={address}", PROMETHEUS_OPERATOR
    )
    urls = [
        rule["annotations"]["runbook_url"]
        for group in moved["PrometheusRule/multimodal-operator"]["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert urls
    assert all(re.fullmatch(rf"{address}#[a-z]+", url) for url in urls)


def test_pod_monitors_find_the_pods_of_operator_and_deployments(tools: Path):
    """Selectors and ports are those of the pods that chart and planner make."""
    rendered = objects(tools, "--set=podMonitors.enabled=true", PROMETHEUS_OPERATOR)
    operator = rendered["PodMonitor/multimodal-operator"]["spec"]
    assert operator["podMetricsEndpoints"] == [{"port": "health", "honorLabels": True}]
    template = rendered["Deployment/multimodal-operator"]["spec"]["template"]
    assert operator["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert {p["name"]: p["containerPort"] for p in template["spec"]["containers"][0]["ports"]} == {
        "health": 8080
    }
    assert template["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "8080",
    }
    pods = rendered["PodMonitor/multimodal-operator-deployments"]["spec"]
    of_workers, of_gateways = pods["podMetricsEndpoints"]
    assert (of_workers["port"], of_gateways["port"]) == ("http", "admin")
    assert of_workers["relabelings"][0] == {
        "sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_component"],
        "regex": "gateway",
        "action": "drop",
    }
    assert of_workers["relabelings"][1:] == of_gateways["relabelings"]
    assert pods["namespaceSelector"] == {"any": True}
    (within,) = pods["selector"]["matchExpressions"]
    planned = yaml.safe_load_all((REPOSITORY / "tests" / "plan" / "golden" / "demo.out.yaml").read_text())
    found = set()
    for template in (item["spec"]["template"] for item in planned if "template" in item.get("spec", {})):
        labels = template["metadata"]["labels"]
        ports = [p["name"] for c in template["spec"]["containers"] for p in c.get("ports", ())]
        chosen = pods["selector"]["matchLabels"].items() <= labels.items()
        if chosen and labels[within["key"]] in within["values"]:
            assert ("admin" if labels[within["key"]] == "gateway" else "http") in ports
            found.add(labels[within["key"]])
    assert found == {"gateway", "encoder", "prefill", "decode"}
    some = objects(tools, "--set=podMonitors.enabled=true", "--set=namespaces={a,b}", PROMETHEUS_OPERATOR)
    assert some["PodMonitor/multimodal-operator-deployments"]["spec"]["namespaceSelector"] == {
        "matchNames": ["a", "b"]
    }


BAD_VALUES = {
    "--set=replica=3": "replica",
    "--set=replicas=0": "replicas",
    "--set=replicas=two": "replicas",
    "--set=image.name=x": "image",
    "--set=image.repository=": "repository",
    "--set=image.pullPolicy=Sometimes": "pullPolicy",
    "--set=namespaces={Team_A}": "namespaces",
    "--set=namespaces={a,a}": "namespaces",
    "--set=crds.install=perhaps": "install",
    "--set=aggregateRoles=some": "aggregateRoles",
    "--set=networkPolicy.apiServerPorts={0}": "apiServerPorts",
    "--set=networkPolicy=true": "networkPolicy",
    "--set=logLevel=Loud": "logLevel",
    "--set=resources.claims=1": "resources",
    "--set=nodeSelector.gpu=1": "nodeSelector",
    "--set=dashboards=true": "dashboards",
    "--set=alerts.enable=true": "alerts",
    "--set=podMonitors=true": "podMonitors",
}


@pytest.mark.parametrize("value", BAD_VALUES)
def test_a_value_that_means_nothing_is_refused_by_name(tools: Path, value: str):
    result = helm(tools, "template", "multimodal-operator", str(CHART), value)
    assert result.returncode != 0
    assert BAD_VALUES[value] in result.stderr


def test_kustomize_makes_the_namespace_the_crd_and_the_operator(tools: Path):
    result = subprocess.run(
        [tools / "kubectl", "kustomize", CONFIG], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    made = [(item["kind"], item["metadata"].get("namespace")) for item in yaml.safe_load_all(result.stdout)]
    assert ("CustomResourceDefinition", None) in made
    assert ("Namespace", None) in made
    assert {place for _, place in made} == {None, "multimodal-system"}
    assert ("Deployment", "multimodal-system") in made


def accept() -> None:
    """Write the golden files anew."""
    for path, arguments in GOLDEN.items():
        path.write_text(render(binaries(), *arguments))


if __name__ == "__main__":
    accept()
