"""Who may do what with deployments: users with Kubernetes' own roles, and an operator that is installed for some namespaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kubernetes import client

from mmd_api.pool_resource import POOL_PLURAL
from mmd_api.resource import API_VERSION, GROUP, KIND, PLURAL, VERSION
from support.cluster.chart import RELEASE, RELEASE_NAMESPACE, helm_folder, objects
from support.cluster.control_plane import TOKEN, ControlPlane
from support.cluster.deployments import SPEC
from support.cluster.standin import Namespace, eventually

pytestmark = pytest.mark.xdist_group("cluster-wide")
READ, WRITE = ("get", "list", "watch"), ("create", "patch", "update", "delete", "deletecollection")
CHANGE = ("patch", "update")
SCALE = f"{POOL_PLURAL}/scale"
VIEW = {PLURAL: READ, f"{PLURAL}/status": READ, POOL_PLURAL: READ, SCALE: READ}
EDIT = {**VIEW, PLURAL: (*READ, *WRITE), SCALE: (*READ, *CHANGE)}
MAY = {"view": VIEW, "edit": EDIT, "admin": {**EDIT, f"{PLURAL}/status": (*READ, *CHANGE)}}
"""By role of Kubernetes: verbs by resource. There are no others."""


def may(api: client.ApiClient, user: str, namespace: str, group: str, resource: str, verb: str) -> bool:
    name, _, subresource = resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": subresource}  # fmt: skip
    body = {"spec": {"user": user, "resourceAttributes": attributes}}
    return bool(client.AuthorizationV1Api(api).create_subject_access_review(body).status.allowed)


@pytest.fixture
def users(api: client.ApiClient, control_plane: ControlPlane, namespace: Namespace) -> Iterator[None]:
    """One user for each role, who is called as it and has it in the test's namespace; the chart's ClusterRoles are there."""
    rbac = client.RbacAuthorizationV1Api(api)
    rendered = objects(helm_folder(), "--set=crds.install=false")
    roles = [rendered[f"ClusterRole/{RELEASE}-{role}"] for role in MAY]
    control_plane.start_controllers()
    for role in roles:
        rbac.create_cluster_role(role)
    for role in MAY:
        binding = {
            "metadata": {"name": role},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": role}],
        }
        rbac.create_namespaced_role_binding(namespace.name, binding)
    yield
    for role in roles:
        rbac.delete_cluster_role(role["metadata"]["name"])


def as_user(control_plane: ControlPlane, user: str) -> client.CustomObjectsApi:
    """A client that impersonates a user."""
    configuration = client.Configuration(host=control_plane.url)
    configuration.verify_ssl = False
    configuration.api_key = {"authorization": f"Bearer {TOKEN}"}
    made = client.ApiClient(configuration)
    made.set_default_header("Impersonate-User", user)
    return client.CustomObjectsApi(made)


def test_users_have_the_rights_of_their_role_on_deployments_and_no_others(
    api: client.ApiClient, control_plane: ControlPlane, namespace: Namespace, users: None
) -> None:
    def as_written() -> None:
        for user, wanted in MAY.items():
            for resource, verbs in wanted.items():
                for verb in (*READ, *WRITE):
                    found = may(api, user, namespace.name, GROUP, resource, verb)
                    assert found is (verb in verbs), (user, resource, verb)
                    assert not may(api, user, "default", GROUP, resource, verb)

    eventually(as_written)
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "theirs"}, "spec": SPEC}
    where = (GROUP, VERSION, namespace.name, PLURAL)
    viewer, editor, admin = (as_user(control_plane, user) for user in MAY)
    with pytest.raises(client.ApiException, match="cannot create resource"):
        viewer.create_namespaced_custom_object(*where, body)
    editor.create_namespaced_custom_object(*where, body)
    assert viewer.get_namespaced_custom_object(*where, "theirs")["spec"]["decode"]
    status = {"status": {"endpoint": "http://rival"}}
    with pytest.raises(client.ApiException, match="cannot patch resource"):
        editor.patch_namespaced_custom_object_status(*where, "theirs", status)
    admin.patch_namespaced_custom_object_status(*where, "theirs", status)
    editor.delete_namespaced_custom_object(*where, "theirs")


def test_an_operator_installed_for_a_namespace_has_rights_only_there(
    api: client.ApiClient, namespace: Namespace
) -> None:
    rendered = objects(helm_folder(), "--set=crds.install=false", f"--set=namespaces={{{namespace.name}}}")
    assert not [key for key in rendered if key.startswith(("Cluster", "CustomResourceDefinition"))]
    rbac = client.RbacAuthorizationV1Api(api)
    role = rendered[f"Role/{namespace.name}/{RELEASE}"]
    rbac.create_namespaced_role(namespace.name, role)
    rbac.create_namespaced_role_binding(namespace.name, rendered[f"RoleBinding/{namespace.name}/{RELEASE}"])
    account = f"system:serviceaccount:{RELEASE_NAMESPACE}:{RELEASE}"
    rights = [
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]

    def as_written() -> None:
        assert [right for right in rights if not may(api, account, namespace.name, *right)] == []

    eventually(as_written)
    assert [right for right in rights if may(api, account, "default", *right)] == []
    assert not may(api, account, namespace.name, "", "secrets", "get")
