"""What an operator may do: the rules that it ships, bound to a ServiceAccount whose token a test uses."""

from __future__ import annotations

from importlib.resources import files

import yaml
from kubernetes import client

from support.cluster.standin import Namespace

RULES = yaml.safe_load(files("mmd_operator").joinpath("rules.yaml").read_text())


def bind(namespace: Namespace, where: str, rules: list[dict], account: tuple[str, str]) -> None:
    """A Role and its binding to an account (its namespace and name); `where` they are."""
    rbac = client.RbacAuthorizationV1Api(namespace.core.api_client)
    metadata = {"metadata": {"name": account[1]}}
    rbac.create_namespaced_role(where, {**metadata, "rules": rules})
    binding = {
        **metadata,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account[1]},
        "subjects": [{"kind": "ServiceAccount", "name": account[1], "namespace": account[0]}],
    }
    rbac.create_namespaced_role_binding(where, binding)


def token_of(namespace: Namespace, home: str, account: str) -> str:
    answer = namespace.core.create_namespaced_service_account_token(
        account, home, {"spec": {"expirationSeconds": 3600}}
    )
    return str(answer.status.token)
