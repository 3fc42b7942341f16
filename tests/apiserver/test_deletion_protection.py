"""The chart's policy in a real API server: who may delete a deployment with `spec.deletionProtection`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from kubernetes import client

from mmd_api.resource import API_VERSION, GROUP, KIND, PLURAL, VERSION
from support.cluster.chart import helm_folder, objects
from support.cluster.control_plane import ControlPlane
from support.cluster.deployments import SPEC
from support.cluster.standin import Namespace, eventually

pytestmark = pytest.mark.xdist_group("cluster-wide")
REFUSAL = "spec.deletionProtection is true: set it to false"


@pytest.fixture
def protected(api: client.ApiClient, namespace: Namespace) -> Iterator[Namespace]:
    """A namespace with a protected deployment, when the policy is in force."""
    admission = client.AdmissionregistrationV1Api(api)
    rendered = objects(helm_folder(), "--set=crds.install=false")
    (policy,) = (o for o in rendered.values() if o["kind"] == "ValidatingAdmissionPolicy")
    (binding,) = (o for o in rendered.values() if o["kind"] == "ValidatingAdmissionPolicyBinding")
    admission.create_validating_admission_policy(policy)
    admission.create_validating_admission_policy_binding(binding)
    body = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "demo"},
        "spec": {**SPEC, "deletionProtection": True},
    }
    custom = client.CustomObjectsApi(api)
    custom.create_namespaced_custom_object(GROUP, VERSION, namespace.name, PLURAL, body)

    def in_force() -> None:
        assert REFUSAL in refusal(api, namespace, dry_run="All")

    eventually(in_force)
    yield namespace
    admission.delete_validating_admission_policy_binding(binding["metadata"]["name"])
    admission.delete_validating_admission_policy(policy["metadata"]["name"])


def refusal(api: client.ApiClient, namespace: Namespace, **options: str) -> str:
    """What the API server answers to the deletion; empty if it deletes."""
    try:
        client.CustomObjectsApi(api).delete_namespaced_custom_object(
            GROUP, VERSION, namespace.name, PLURAL, "demo", **options
        )
    except client.ApiException as error:
        if error.status != 403:
            raise
        return str(json.loads(error.body)["message"])
    return ""


def test_a_protected_deployment_is_deleted_only_when_it_no_longer_is(
    api: client.ApiClient, protected: Namespace
) -> None:
    custom = client.CustomObjectsApi(api)
    assert REFUSAL in refusal(api, protected)
    with pytest.raises(client.ApiException, match=REFUSAL):
        custom.delete_collection_namespaced_custom_object(GROUP, VERSION, protected.name, PLURAL)
    patch = {"spec": {"deletionProtection": False}}
    custom.patch_namespaced_custom_object(GROUP, VERSION, protected.name, PLURAL, "demo", patch)
    assert refusal(api, protected) == ""


def test_a_protected_deployment_does_not_hold_up_the_deletion_of_its_namespace(
    control_plane: ControlPlane, protected: Namespace
) -> None:
    control_plane.start_controllers()
    protected.core.delete_namespace(protected.name)

    def gone() -> None:
        names = [item.metadata.name for item in protected.core.list_namespace().items]
        assert protected.name not in names

    eventually(gone)
