"""The Secret with the API keys: gateways mount it, the operator never reads it, and a condition shows what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from kubernetes import client

from mmd_api.contract.environment import KEYS_FILE
from mmd_api.tenants import hash_of, new_key
from tests.support.deployments import SPEC
from tests.support.operator_process import OperatorProcess
from tests.support.standin import Namespace

from .fleet import Fleet, assert_condition

pytestmark = pytest.mark.usefixtures("operator")

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


def test_a_missing_secret_and_a_missing_entry_are_reported_until_they_are_there(
    operator: OperatorProcess, namespace: Namespace
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
    assert HASH not in operator.log_text()


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
    fleet = Fleet(namespace)
    try:
        namespace.apply(WITH_KEYS)

        def gateway_runs() -> None:
            assert any(pod.is_gateway for pod in fleet.pods.values())

        fleet.until(gateway_runs)
        fleet.gateway.demand = {"keys_fault": "line 1: invalid YAML"}
        namespace.change({"gateway": {"auth": {"keysSecret": "another"}}})  # looked at anew
        fleet.until(lambda: assert_condition(fleet, "Degraded", "True", "SecretMissing", "another"))
        namespace.change({"gateway": {"auth": {"keysSecret": SECRET}}})
        words = f"does not use keys.yaml of Secret {SECRET}"
        fleet.until(lambda: assert_condition(fleet, "Degraded", "True", "ApiKeysInvalid", words))
        assert "line 1: invalid YAML" in namespace.condition("Degraded")[2]
        for pod in fleet.pods.values():
            pod.demand = {}
        fleet.until(lambda: assert_condition(fleet, "Degraded", "False", "NoProblem"))
    finally:
        fleet.stop()
