"""The Secret with the API keys: gateways mount it, the operator never reads it, and conditions show what is wrong with it, and where
no key is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kubernetes import client

from mmd_api.contract.environment import KEYS_FILE
from mmd_api.tenants import hash_of, new_key
from support.cluster.deployments import SPEC
from support.cluster.operator_process import OperatorProcess
from support.cluster.shared_server import AnyOperator
from support.cluster.standin import Namespace

from .fleet import assert_gateway_fault_shown

pytestmark = pytest.mark.usefixtures("any_operator")

SECRET = "api-keys"
HASH = hash_of(new_key())
FILE = yaml.safe_dump({"tenants": [{"name": "search", "keys": [{"hash": HASH}]}]})
WITH_KEYS = {**SPEC, "gateway": {"auth": {"keysSecret": SECRET}}}


def degraded(namespace: Namespace, reason: str, words: str) -> None:
    status, found, message = namespace.condition("Degraded")
    assert (status, found) == ("True" if reason != "NoProblem" else "False", reason), message
    assert words in message


def gateway_pod(namespace: Namespace) -> client.V1PodSpec:
    gateway = namespace.apps.read_namespaced_deployment("demo-gateway", namespace.name)
    return gateway.spec.template.spec


def test_a_missing_secret_or_entry_is_reported_until_it_is_there(
    any_operator: AnyOperator, namespace: Namespace
):
    namespace.apply(WITH_KEYS)
    namespace.settled(lambda: degraded(namespace, "SecretMissing", f"Secret {SECRET}"))
    body = {"metadata": {"name": SECRET}, "stringData": {"keys": FILE}}
    namespace.core.create_namespaced_secret(namespace.name, body)
    namespace.settled(lambda: degraded(namespace, "SecretIncomplete", "lacks the entry keys.yaml"))
    namespace.core.patch_namespaced_secret(SECRET, namespace.name, {"stringData": {"keys.yaml": FILE}})
    written = namespace.core.read_namespaced_secret(SECRET, namespace.name)
    namespace.settled(lambda: degraded(namespace, "NoProblem", ""))
    namespace.settled(namespace.is_ready)
    present = namespace.core.read_namespaced_secret(SECRET, namespace.name)
    assert present.metadata.resource_version == written.metadata.resource_version, "it changes nothing"
    assert not present.metadata.owner_references
    assert HASH not in any_operator.log_text()


def test_gateways_alone_mount_the_secret_and_do_not_start_without_it(namespace: Namespace):
    namespace.core.create_namespaced_secret(
        namespace.name, {"metadata": {"name": SECRET}, "stringData": {"keys.yaml": FILE}}
    )
    namespace.apply(WITH_KEYS)
    namespace.settled(namespace.is_ready)
    pod = gateway_pod(namespace)
    (volume,) = [volume for volume in pod.volumes if volume.name == "keys"]
    assert (volume.secret.secret_name, volume.secret.optional) == (SECRET, None)
    (mount,) = [mount for mount in pod.containers[0].volume_mounts if mount.name == "keys"]
    (variable,) = [variable for variable in pod.containers[0].env if variable.name == KEYS_FILE]
    assert Path(variable.value) == Path(mount.mount_path) / volume.secret.items[0].path
    assert mount.sub_path is None, "a file mounted by its path alone is never updated"
    for pool in ("encoder", "prefill", "decode"):
        others = namespace.stateful_set(pool).spec.template.spec.volumes
        assert SECRET not in [volume.secret.secret_name for volume in others if volume.secret]


def test_turning_keys_on_replaces_gateways_and_no_other_pod(namespace: Namespace):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    before = {pool: namespace.stateful_set(pool).spec.template.to_dict() for pool in ("encoder", "decode")}
    open_to_all = gateway_pod(namespace)
    assert "keys" not in [volume.name for volume in open_to_all.volumes]
    namespace.core.create_namespaced_secret(
        namespace.name, {"metadata": {"name": SECRET}, "stringData": {"keys.yaml": FILE}}
    )
    namespace.change({"gateway": {"auth": {"keysSecret": SECRET}}})

    def mounted() -> None:
        assert "keys" in [volume.name for volume in gateway_pod(namespace).volumes]

    namespace.settled(mounted)
    namespace.settled(namespace.is_ready)
    after = {pool: namespace.stateful_set(pool).spec.template.to_dict() for pool in ("encoder", "decode")}
    assert after == before


def test_a_file_that_a_gateway_rejects_is_reported_in_its_words(namespace: Namespace):
    namespace.core.create_namespaced_secret(
        namespace.name, {"metadata": {"name": SECRET}, "stringData": {"keys.yaml": "tenants: ["}}
    )
    words = f"does not use keys.yaml of Secret {SECRET}"
    fault = {"keys_fault": "line 1: invalid YAML"}
    assert_gateway_fault_shown(namespace, WITH_KEYS["gateway"], fault, "ApiKeysInvalid", words)


def test_a_missing_default_tenant_is_reported_until_it_is_there(namespace: Namespace):
    namespace.core.create_namespaced_secret(
        namespace.name, {"metadata": {"name": SECRET}, "stringData": {"keys.yaml": FILE}}
    )
    oidc = {"issuer": "https://issuer.example.com", "audience": "mmd", "defaultTenant": "guests"}
    gateway = {"auth": {"keysSecret": SECRET, "oidc": oidc}}
    words = "has no tenant guests, which spec.gateway.auth.oidc.defaultTenant names"
    fault = {"missing_tenant": "guests"}
    assert_gateway_fault_shown(namespace, gateway, fault, "DefaultTenantMissing", words, f"Secret {SECRET}")


def authentication(namespace: Namespace, status: str, reason: str, *words: str) -> None:
    found = namespace.condition("AuthenticationRequired")
    assert found[:2] == (status, reason), found
    for word in words:
        assert word in found[2]


def since(namespace: Namespace) -> str:
    conditions = namespace.get()["status"]["conditions"]
    return next(c["lastTransitionTime"] for c in conditions if c["type"] == "AuthenticationRequired")


def explained(namespace: Namespace, kubeconfig: Path) -> str:
    """What `mmd explain` prints of the condition."""
    command = [sys.executable, "-m", "mmd_cli", "explain", "demo", "--namespace", namespace.name]
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONWARNINGS": "ignore"}
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("AuthenticationRequired: ")]
    return line


def test_authentication_is_reported_off_until_the_last_gateway_requires_keys(
    operator: OperatorProcess, namespace: Namespace, kubeconfig: Path
):
    namespace.apply({**SPEC, "gateway": {"ingress": {"host": "models.example.com"}}})
    namespace.settled(namespace.is_ready)
    words = (
        "anyone who can reach the gateway",
        "exposed outside the cluster (Ingress)",
        "set spec.gateway.auth.keysSecret",
    )
    authentication(namespace, "False", "AuthenticationOff", *words)
    degraded(namespace, "NoProblem", "")
    assert explained(namespace, kubeconfig).startswith(
        "AuthenticationRequired: False (AuthenticationOff) no key"
    )
    began = since(namespace)

    (before,) = namespace.gateway_pods()
    namespace.core.create_namespaced_secret(
        namespace.name, {"metadata": {"name": SECRET}, "stringData": {"keys.yaml": FILE}}
    )
    namespace.change({"gateway": {"auth": {"keysSecret": SECRET}}})
    namespace.settled(lambda: authentication(namespace, "False", "GatewaysWithoutKeys", before.metadata.name))
    assert since(namespace) == began
    namespace.core.delete_namespaced_pod(before.metadata.name, namespace.name, grace_period_seconds=0)
    namespace.settled(lambda: authentication(namespace, "True", "ApiKeys", f"Secret {SECRET}"))
    namespace.settled(namespace.is_ready)

    oidc = {"issuer": "https://issuer.example.com", "audience": "mmd"}
    namespace.change({"gateway": {"auth": {"oidc": oidc}}})
    namespace.settled(lambda: authentication(namespace, "True", "ApiKeysAndTokens", oidc["issuer"]))
    namespace.change({"gateway": {"auth": None, "ingress": None}})
    namespace.settled(lambda: authentication(namespace, "False", "AuthenticationOff"))
    assert "exposed" not in namespace.condition("AuthenticationRequired")[2]
    namespace.settled(namespace.is_ready)
    began = since(namespace)
    assert operator.stop() == 0
    operator.start()
    namespace.change({"gateway": {"webPage": False}})
    namespace.settled(namespace.is_ready)
    assert since(namespace) == began
    reasons = {event.reason for event in namespace.core.list_namespaced_event(namespace.name).items}
    assert not reasons & {"AuthenticationOff", "GatewaysWithoutKeys", "ApiKeys", "ApiKeysAndTokens"}
