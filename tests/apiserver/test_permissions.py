"""The operator under the very rights that it asks for: none is missing, and none is asked for in vain. The audit log is the witness."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from control_plane import ControlPlane
from deployments import ANOTHER_MODEL, SPEC
from fleet import Fleet
from kubernetes import client
from operator_process import OperatorProcess
from standin import Namespace, eventually
from test_lifecycle import is_gone
from test_ownership import counted
from test_scaling import afresh, asked

RULES = yaml.safe_load(files("mmd_operator").joinpath("rules.yaml").read_text())
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
    rbac = client.RbacAuthorizationV1Api(namespace.core.api_client)
    metadata = {"metadata": {"name": ACCOUNT}}
    namespace.core.create_namespaced_service_account(namespace.name, metadata)
    rbac.create_namespaced_role(namespace.name, {**metadata, "rules": rules})
    binding = {
        **metadata,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace.name}],
    }
    rbac.create_namespaced_role_binding(namespace.name, binding)
    answer = namespace.core.create_namespaced_service_account_token(
        ACCOUNT, namespace.name, {"spec": {"expirationSeconds": 3600}}
    )
    return str(answer.status.token)


@pytest.fixture
def start(control_plane: ControlPlane, tmp_path: Path, namespace: Namespace) -> Iterator:
    """Starts an operator with the given rights."""
    begun: list[OperatorProcess] = []

    def started(rules: list[dict]) -> OperatorProcess:
        kubeconfig = control_plane.kubeconfig(grant(namespace, rules))
        begun.append(OperatorProcess(kubeconfig, namespace.name, tmp_path))
        begun[-1].start()
        return begun[-1]

    yield started
    for process in begun:
        process.kill()


def test_the_rights_it_asks_for_are_those_it_uses(
    control_plane: ControlPlane, namespace: Namespace, start, monkeypatch: pytest.MonkeyPatch
):
    granted = [*RULES["rules"], *RULES["leaseRules"]]
    start(granted)
    exercise(namespace)
    used, denied = audited(control_plane, namespace)
    assert not denied, "rights that rules.yaml lacks"
    asked = rights(granted)
    assert not asked - used, "rights that nothing uses: take them out of rules.yaml"
    assert not used - asked


def exercise(namespace: Namespace) -> None:
    """Everything that makes an operator call: made, scaled, changed, rolled, drained, short of pods, deleted."""
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    namespace.change({"decode": {"replicas": 3}})
    namespace.settled(namespace.is_ready)
    namespace.change(ANOTHER_MODEL)
    namespace.settled(namespace.is_ready)
    drain_and_need_again(namespace)
    namespace.core.create_namespaced_resource_quota(
        namespace.name, {"metadata": {"name": "small"}, "spec": {"hard": {"count/services": "1"}}}
    )
    eventually(lambda: counted(namespace))
    namespace.change({"decode": {"replicas": 4}})
    eventually(lambda: short_of_pods(namespace))
    namespace.settled(namespace.is_ready)
    namespace.delete()
    namespace.settled(lambda: is_gone(namespace))


def drain_and_need_again(namespace: Namespace) -> None:
    fleet = Fleet(namespace)
    try:
        fleet.until(lambda: fleet.sized("decode", 3))
        second, last = fleet.of("decode")[1:]
        last.held = True
        namespace.change({"decode": {"replicas": 1}})
        fleet.until(lambda: asked(second, last))
        namespace.change({"decode": {"replicas": 3}})
        fleet.until(lambda: afresh(fleet, second))
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
    for line in plane.audit_log.read_text().splitlines():
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


def test_a_right_that_is_missing_is_told_in_a_condition(namespace: Namespace, start):
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
