"""The operator under the very rights that it asks for: none is missing, and none is asked for in vain. The audit log is the witness."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kubernetes import client

from mmd_api.resource import GROUP, PLURAL, VERSION
from mmd_operator.kube.pauses import Pauses
from support.cluster.control_plane import ControlPlane
from support.cluster.definitions import OF_USERS, installed
from support.cluster.deployments import ANOTHER_MODEL, SPEC
from support.cluster.exposure import EXPOSED
from support.cluster.groups import GROUPS, GroupController
from support.cluster.operator_process import OperatorProcess
from support.cluster.standin import Namespace, counted, eventually, is_gone

from .fleet import Fleet, assert_drain_requested, assert_replaced
from .rights import RULES, bind, token_of

pytestmark = pytest.mark.xdist_group("cluster-wide")
ACCOUNT = "multimodal-operator"
Right = tuple[str, str, str]
"""Group, resource with subresource, verb."""


def rights(rules: list[dict]) -> set[Right]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def grant(namespace: Namespace, rules: list[dict]) -> str:
    """Give the operator's account these rights in the namespace; returns a token of it."""
    namespace.core.create_namespaced_service_account(namespace.name, {"metadata": {"name": ACCOUNT}})
    bind(namespace, namespace.name, rules, (namespace.name, ACCOUNT))
    return token_of(namespace, namespace.name, ACCOUNT)


@pytest.fixture
def start(control_plane: ControlPlane, tmp_path: Path, namespace: Namespace, pauses: Pauses) -> Iterator:
    """Starts an operator with the given rights."""
    begun: list[OperatorProcess] = []

    def started(rules: list[dict]) -> OperatorProcess:
        kubeconfig = control_plane.kubeconfig(grant(namespace, rules))
        begun.append(OperatorProcess(kubeconfig, namespace.name, tmp_path, pauses=pauses))
        begun[-1].start()
        return begun[-1]

    yield started
    for process in begun:
        process.kill()


def test_the_rights_it_asks_for_are_those_it_uses(
    api: client.ApiClient, control_plane: ControlPlane, namespace: Namespace, start
):
    granted = [*RULES["rules"], *RULES["leaseRules"]]
    with ExitStack() as definitions:
        for definition in OF_USERS.values():
            definitions.enter_context(installed(api, definition))
        operator = start(granted)
        exercise_groups(namespace)
        exercise_cache(namespace)
        exercise(control_plane, namespace)
        operator.kill()

    def all_used() -> None:
        used, denied = audited(control_plane, namespace)
        asked, unused = rights(granted), sorted(rights(granted) - used)
        assert not denied, f"rights that rules.yaml lacks: {sorted(denied)}"
        assert not unused, f"rights that nothing uses, to take out of rules.yaml: {unused}"
        assert not used - asked

    eventually(all_used)  # Events are written after the fact


def exercise_groups(namespace: Namespace) -> None:
    """The same of a pool whose replicas are groups of pods."""
    groups = GroupController(namespace)

    def until(check: Callable[[], None]) -> None:
        def step() -> None:
            groups.step()
            groups.run_all()
            namespace.end_pods("groups")
            check()

        namespace.settled(step)

    namespace.apply(GROUPS, "groups")
    until(lambda: namespace.is_ready("groups"))
    namespace.change({"decode": {"replicas": 3}}, "groups")
    until(lambda: namespace.is_ready("groups"))
    namespace.delete("groups")

    def gone() -> None:
        assert not namespace.exists("groups")

    until(gone)


def exercise_cache(namespace: Namespace) -> None:
    """A claim with weights, and the Job that fills it."""
    cache = {"type": "Hub", "cache": {"sizeGibibytes": 5}}
    namespace.apply({**SPEC, "model": {"id": "org/model", "storage": cache}}, "cached")
    eventually(namespace.job)
    namespace.delete("cached")

    def gone() -> None:
        namespace.release_claims()
        assert not namespace.exists("cached")

    namespace.settled(gone)


def exercise(plane: ControlPlane, namespace: Namespace) -> None:
    """Everything that makes an operator call: made, scaled, changed, rolled, drained, short of pods, deleted."""
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    namespace.change(
        {
            "decode": {"replicas": 3},
            "nats": {"passwordGeneration": 2},
            "rollout": {"revisionHistoryLimit": 0},
            "gateway": {**EXPOSED["gateway"], "inferencePool": {}},
        }
    )
    namespace.settled(namespace.is_ready)
    namespace.apps.patch_namespaced_deployment_scale(
        "demo-gateway", namespace.name, {"spec": {"replicas": 4}}
    )
    namespace.reported("Scaled", "Deployment demo-gateway from 4 to 1 pods")
    namespace.change(ANOTHER_MODEL)
    namespace.settled(namespace.is_ready)
    overwrite_the_status(namespace)
    drain_and_need_again(namespace)
    namespace.core.create_namespaced_resource_quota(
        namespace.name, {"metadata": {"name": "small"}, "spec": {"hard": {"count/services": "1"}}}
    )
    eventually(lambda: counted(namespace))
    namespace.change({"decode": {"replicas": 4}})
    eventually(lambda: short_of_pods(namespace))
    namespace.settled(namespace.is_ready)
    see_a_pod_leave(plane, namespace)
    namespace.delete()
    namespace.settled(lambda: is_gone(namespace))


def overwrite_the_status(namespace: Namespace) -> None:
    endpoint = namespace.get()["status"]["endpoint"]
    namespace.custom.patch_namespaced_custom_object_status(
        GROUP, VERSION, namespace.name, PLURAL, "demo", {"status": {"endpoint": "http://rival"}}
    )

    def restored() -> None:
        assert namespace.get()["status"]["endpoint"] == endpoint

    eventually(restored)


def see_a_pod_leave(plane: ControlPlane, namespace: Namespace) -> None:
    """One that takes its time, so that the operator looks whether the whole namespace goes."""
    labels = namespace.stateful_set("decode").spec.template.metadata.labels
    namespace.pod("leaves", labels, node="somewhere")
    namespace.core.delete_namespaced_pod("leaves", namespace.name)

    def asked_about_the_namespace() -> None:
        assert ("", "namespaces", "get") in audited(plane, namespace)[0]

    eventually(asked_about_the_namespace)
    namespace._end_pod("leaves")


def drain_and_need_again(namespace: Namespace) -> None:
    fleet = Fleet(namespace)
    try:
        fleet.until(lambda: fleet.assert_size("decode", 3))
        second, last = fleet.pods_of("decode")[1:]
        last.holds_work = True
        namespace.change({"decode": {"replicas": 1}})
        fleet.until(lambda: assert_drain_requested(second, last))
        namespace.change({"decode": {"replicas": 3}})
        fleet.until(lambda: assert_replaced(fleet, second))
    finally:
        fleet.stop()


def short_of_pods(namespace: Namespace) -> None:
    """A StatefulSet controller that is refused pods says so in an Event; here it is the test."""
    name = namespace.stateful_set("decode").metadata.name
    seen = namespace.stateful_set("decode").metadata.generation
    assert namespace.stateful_set("decode").spec.replicas == 4
    namespace.apps.patch_namespaced_stateful_set_status(
        name, namespace.name, {"status": {"observedGeneration": seen, "replicas": 3, "readyReplicas": 3}}
    )
    if not namespace.core.list_namespaced_event(namespace.name, field_selector="reason=FailedCreate").items:
        about = {"kind": "StatefulSet", "name": name, "namespace": namespace.name, "apiVersion": "apps/v1"}
        namespace.core.create_namespaced_event(
            namespace.name,
            {
                "metadata": {"generateName": "short-"},
                "involvedObject": about,
                "reason": "FailedCreate",
                "message": "create Pod failed: exceeded quota: pods",
                "type": "Warning",
            },
        )
    assert namespace.condition("Degraded")[1] == "QuotaExceeded", namespace.condition("Degraded")


def audited(plane: ControlPlane, namespace: Namespace) -> tuple[set[Right], set[Right]]:
    """Rights that the operator's account used, and those it was denied."""
    used, denied = set(), set()
    complete = plane.audit_log.read_text().rpartition("\n")[0]  # the API server may be writing the last line
    for line in complete.splitlines():
        entry = json.loads(line)
        if entry["user"]["username"] != f"system:serviceaccount:{namespace.name}:{ACCOUNT}":
            continue
        about = entry.get("objectRef")
        if about is None or "resource" not in about:
            continue  # discovery
        resource = "/".join(p for p in (about["resource"], about.get("subresource")) if p)
        right = (about.get("apiGroup", ""), resource, entry["verb"])
        code = entry.get("responseStatus", {}).get("code")
        (denied if code == 403 else used).add(right)
        if entry["verb"] == "patch" and code == 201:
            used.add((*right[:2], "create"))  # an apply that creates needs both
    return used, denied


def test_a_missing_permission_is_reported_in_a_condition(namespace: Namespace, start):
    rules = [r for r in RULES["rules"] if "poddisruptionbudgets" not in r["resources"]]
    reading = {
        "apiGroups": ["policy"],
        "resources": ["poddisruptionbudgets"],
        "verbs": ["get", "list", "watch"],
    }
    start([*rules, reading, *RULES["leaseRules"]])
    namespace.apply(SPEC)

    def told() -> None:
        status, reason, message = namespace.condition("Degraded")
        assert (status, reason) == ("True", "PermissionMissing"), (reason, message)
        assert "poddisruptionbudgets" in message
        assert "chart" in message

    eventually(told)
