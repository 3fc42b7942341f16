"""The route and the Ingress of a deployment, on a real API server with the Gateway API's definition; the test plays its controller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client

from mmd_operator.resources.exposure import INSTALL_GATEWAY_API, INSTALL_INFERENCE_EXTENSION
from support.cluster.definitions import HTTP_ROUTES, installed
from support.cluster.deployments import ANOTHER_MODEL, SPEC
from support.cluster.exposure import EXPOSED, ROUTE, report, route
from support.cluster.operator_process import OperatorProcess
from support.cluster.shared_server import AnyOperator
from support.cluster.standin import Namespace, eventually, exhaust, forget_the_dead, is_gone
from support.harness.waiting import DEADLINE_SECONDS

from .fleet import Fleet, assert_condition

GATEWAY = "demo-gateway"


@pytest.fixture
def gateway_api(api: client.ApiClient) -> Iterator[None]:
    with installed(api, HTTP_ROUTES):
        yield


@pytest.fixture
def exposed(any_operator: AnyOperator, namespace: Namespace) -> Namespace:
    """The deployment serves."""
    namespace.apply(EXPOSED)
    namespace.settled(namespace.is_ready)
    return namespace


def accepted(namespace: Namespace, status: str, reason: str, *words: str) -> None:
    found = namespace.condition("RouteAccepted")
    assert found[:2] == (status, reason), found
    for word in words:
        assert word in found[2]


def absent(find: Callable[[], Any]) -> None:
    try:
        found = find()
    except LookupError:
        return
    except client.ApiException as error:
        if error.status != 404:
            raise
        return
    raise AssertionError(found)


def ingress(namespace: Namespace) -> Any:
    return namespace.network.read_namespaced_ingress(GATEWAY, namespace.name)


def test_the_status_shows_what_the_gateway_reports_about_the_route(exposed: Namespace):
    made = route(exposed)
    assert made["metadata"]["ownerReferences"][0]["uid"] == exposed.get()["metadata"]["uid"]
    assert made["spec"]["parentRefs"][0].items() >= ROUTE["parentRefs"][0].items()
    (rule,) = made["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    assert rule["timeouts"] == {"request": "0s"}, "a stream is cut by nothing but the gateway's own deadline"
    (backend,) = rule["backendRefs"]
    service = exposed.core.read_namespaced_service(backend["name"], exposed.name)
    assert backend["port"] in [port.port for port in service.spec.ports]

    parent = "Gateway infra/shared (listener https)"
    exposed.settled(lambda: accepted(exposed, "Unknown", "Pending", parent))
    report(exposed, Accepted=("False", "NotAllowedByListeners", "namespaces: Same"))
    words = (parent, "Accepted is False", "NotAllowedByListeners: namespaces: Same")
    exposed.settled(lambda: accepted(exposed, "False", "NotAccepted", *words))
    report(exposed, ResolvedRefs=("False", "BackendNotFound", "no such Service"))
    exposed.settled(lambda: accepted(exposed, "False", "NotAccepted", "BackendNotFound: no such Service"))
    report(exposed)
    exposed.settled(lambda: accepted(exposed, "True", "Accepted", parent))
    assert exposed.condition("Degraded")[1] == "NoProblem"


def test_a_report_on_an_older_route_counts_no_more(exposed: Namespace):
    report(exposed)
    exposed.settled(lambda: accepted(exposed, "True", "Accepted"))
    exposed.change({"gateway": {"httpRoute": {"hostnames": ["other.example.com"]}}})
    exposed.settled(lambda: accepted(exposed, "Unknown", "Pending"))
    report(exposed)
    exposed.settled(lambda: accepted(exposed, "True", "Accepted"))
    assert route(exposed)["spec"]["hostnames"] == ["other.example.com"]


def test_both_go_with_their_fields_even_during_a_rollout(exposed: Namespace):
    uids = {pod.metadata.uid for pod in exposed.gateway_pods()}
    assert ingress(exposed).spec.tls[0].secret_name == "models-tls"
    exposed.change(ANOTHER_MODEL)  # nothing plays its pods from here on, so it does not end
    exposed.change({"gateway": {"httpRoute": None, "ingress": None}})

    def gone() -> None:
        absent(lambda: route(exposed))
        absent(lambda: ingress(exposed))
        assert exposed.condition("RouteAccepted") == ("", "", "")

    eventually(gone)
    assert exposed.condition("Progressing")[1] == "BringingUp"
    assert {pod.metadata.uid for pod in exposed.gateway_pods()} == uids


def test_both_go_with_their_fields_although_another_object_is_refused(exposed: Namespace):
    exhaust(exposed)
    exposed.change(ANOTHER_MODEL)

    def refused() -> None:
        assert exposed.condition("Degraded")[1] == "QuotaExceeded"

    eventually(refused)
    exposed.change({"gateway": {"httpRoute": None, "ingress": None}})

    def gone() -> None:
        absent(lambda: route(exposed))
        absent(lambda: ingress(exposed))

    eventually(gone)
    refused()


def test_both_go_with_the_deployment(exposed: Namespace):
    exposed.delete()
    exposed.settled(lambda: is_gone(exposed))
    absent(lambda: route(exposed))
    absent(lambda: ingress(exposed))


def test_a_missing_gateway_api_is_reported_and_rollouts_go_on(
    api: client.ApiClient, namespace: Namespace, operator: OperatorProcess
):
    namespace.apply(EXPOSED)

    def told() -> None:
        status, reason, message = namespace.condition("Degraded")
        assert (status, reason) == ("True", "GatewayApiMissing"), (reason, message)
        assert INSTALL_GATEWAY_API in message
        accepted(namespace, "False", "NotCreated")

    namespace.settled(told)
    namespace.settled(namespace.is_ready)
    before = namespace.gateway_revision()
    namespace.change(ANOTHER_MODEL)

    def switched() -> None:
        assert namespace.gateway_revision() != before
        assert namespace.revisions() == {namespace.gateway_revision()}
        namespace.is_ready()

    namespace.settled(switched)
    told()

    with installed(api, HTTP_ROUTES):
        assert operator.wait(DEADLINE_SECONDS) == 0, (
            "the operator ends, so that its successor watches the new kind"
        )
        forget_the_dead(namespace)
        operator.start()
        namespace.settled(lambda: accepted(namespace, "Unknown", "Pending"))
        report(namespace)
        namespace.settled(lambda: accepted(namespace, "True", "Accepted"))
        assert namespace.condition("Degraded")[1] == "NoProblem"
        namespace.delete()
        namespace.settled(lambda: is_gone(namespace))


def test_a_route_that_someone_else_changes_is_put_right(exposed: Namespace):
    found = route(exposed)
    exposed.custom.patch_namespaced_custom_object(
        "gateway.networking.k8s.io",
        "v1",
        exposed.name,
        "httproutes",
        GATEWAY,
        {"spec": {"rules": [{**found["spec"]["rules"][0], "timeouts": {"request": "5s"}}]}},
    )

    def restored() -> None:
        assert route(exposed)["spec"]["rules"][0]["timeouts"] == {"request": "0s"}

    exposed.settled(restored)


@pytest.mark.usefixtures("any_operator")
def test_a_deployment_without_either_has_neither(namespace: Namespace):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    absent(lambda: route(namespace))
    absent(lambda: ingress(namespace))
    assert namespace.condition("RouteAccepted") == ("", "", "")


POOLS = ("inference.networking.k8s.io", "v1")
POOL: dict[str, Any] = {**EXPOSED, "gateway": {**EXPOSED["gateway"], "inferencePool": {}}}


@pytest.mark.usefixtures("any_operator")
def test_a_pool_has_the_gateways_pods_and_the_route_leads_to_it(namespace: Namespace):
    namespace.apply(POOL)
    namespace.settled(namespace.is_ready)
    pool = namespace.custom.get_namespaced_custom_object(*POOLS, namespace.name, "inferencepools", GATEWAY)
    assert pool["metadata"]["ownerReferences"][0]["uid"] == namespace.get()["metadata"]["uid"]
    spec = pool["spec"]
    (gateway,) = namespace.gateway_pods()
    assert spec["selector"]["matchLabels"].items() <= gateway.metadata.labels.items()
    ports = {port.container_port for port in gateway.spec.containers[0].ports}
    assert spec["targetPorts"] == [{"number": 8000}]
    assert 8000 in ports
    picker = spec["endpointPickerRef"]
    assert (picker["kind"], picker["failureMode"]) == ("Service", "FailOpen")
    service = namespace.core.read_namespaced_service(picker["name"], namespace.name)
    (port,) = [port for port in service.spec.ports if port.port == picker["port"]["number"]]
    assert port.target_port == "picker"
    assert port.port in ports

    leads_to_the_service(namespace)
    make_ready(namespace)

    def led() -> None:
        (backend,) = route(namespace)["spec"]["rules"][0]["backendRefs"]
        assert (backend["group"], backend["kind"], backend["name"]) == (POOLS[0], "InferencePool", GATEWAY)

    namespace.settled(led)
    condition = {
        "type": "ResolvedRefs",
        "status": "False",
        "reason": "InvalidExtensionRef",
        "message": "no such Service",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    report(namespace)
    namespace.settled(lambda: accepted(namespace, "True", "Accepted"))
    parents = [{"parentRef": {"name": "shared", "namespace": "infra"}, "conditions": [condition]}]
    namespace.custom.patch_namespaced_custom_object_status(
        *POOLS, namespace.name, "inferencepools", GATEWAY, {"status": {"parents": parents}}
    )
    words = "the InferencePool at Gateway infra/shared: ResolvedRefs is False, InvalidExtensionRef: no such Service"
    namespace.settled(lambda: accepted(namespace, "False", "NotAccepted", words))

    namespace.change({"gateway": {"inferencePool": None}})

    def without() -> None:
        listed = namespace.custom.list_namespaced_custom_object(*POOLS, namespace.name, "inferencepools")
        assert not listed["items"]
        leads_to_the_service(namespace)

    namespace.settled(without)


@pytest.mark.usefixtures("any_operator")
def test_a_picker_that_has_failed_is_reported_until_the_spec_has_none(namespace: Namespace):
    namespace.core.create_namespaced_secret(
        namespace.name, {"metadata": {"name": "keys"}, "stringData": {"keys.yaml": "tenants: []"}}
    )
    fleet = Fleet(namespace)
    try:
        namespace.apply({**SPEC, "gateway": {"auth": {"keysSecret": "keys"}, "inferencePool": {}}})
        fleet.until(namespace.is_ready)
        fleet.gateway.demand = {"picker_fault": "it ended, exit status -9"}
        namespace.change({"gateway": {"inferencePool": {"pickerTls": False}}})  # looked at anew
        fleet.until(lambda: assert_condition(fleet, "Degraded", "True", "EndpointPickerFailed", "status -9"))
        generation = namespace.change({"gateway": {"inferencePool": None}})["metadata"]["generation"]
        reasons: list[str] = []

        def reported() -> None:
            status = namespace.get()["status"]
            assert status["observedGeneration"] == generation
            reasons.extend(c["reason"] for c in status["conditions"] if c["type"] == "Degraded")

        fleet.until(reported)
        assert "EndpointPickerFailed" not in reasons
    finally:
        fleet.stop()


def make_ready(namespace: Namespace) -> None:
    """The gateway's pod: a picker answers."""
    (gateway,) = namespace.gateway_pods()
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    namespace.core.patch_namespaced_pod_status(gateway.metadata.name, namespace.name, {"status": ready})


def leads_to_the_service(namespace: Namespace) -> None:
    (backend,) = route(namespace)["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"], backend["port"]) == ("Service", GATEWAY, 8000)


@pytest.mark.usefixtures("gateway_api", "operator")
def test_without_the_inference_extension_the_route_leads_to_the_service(namespace: Namespace):
    namespace.apply(POOL)

    def told() -> None:
        status, reason, message = namespace.condition("Degraded")
        assert (status, reason) == ("True", "InferenceExtensionMissing"), (reason, message)
        assert INSTALL_INFERENCE_EXTENSION in message
        leads_to_the_service(namespace)

    namespace.settled(told)
    namespace.settled(namespace.is_ready)
    leads_to_the_service(namespace)


@pytest.mark.usefixtures("any_operator")
def test_no_route_leads_to_a_pool_of_someone_else(namespace: Namespace):
    theirs = {
        "apiVersion": "/".join(POOLS),
        "kind": "InferencePool",
        "metadata": {"name": GATEWAY},
        "spec": {
            "selector": {"matchLabels": {"app": "theirs"}},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": "theirs", "port": {"number": 9002}},
        },
    }
    namespace.custom.create_namespaced_custom_object(*POOLS, namespace.name, "inferencepools", theirs)
    namespace.apply(POOL)

    def refused() -> None:
        status, reason, message = namespace.condition("Degraded")
        assert (status, reason) == ("True", "NameTaken"), (reason, message)
        leads_to_the_service(namespace)

    namespace.settled(refused)
    namespace.settled(namespace.is_ready)
    make_ready(namespace)
    refused()
    namespace.custom.delete_namespaced_custom_object(*POOLS, namespace.name, "inferencepools", GATEWAY)
    namespace.change({"gateway": {"webPage": False}})  # what is not ours is not watched

    def led() -> None:
        (backend,) = route(namespace)["spec"]["rules"][0]["backendRefs"]
        assert backend["kind"] == "InferencePool"

    namespace.settled(led)
