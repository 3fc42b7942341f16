"""Additions for several managed NATS servers: routes to each other, a Service for each, and separate nodes.

Each server has a headless Service, so that its name stays when its pod moves and is known before it is Ready: servers find each other
while none of them is Ready, and clients have all their names. Routes have a password that no client has.
"""

from __future__ import annotations

from collections.abc import Mapping

from mmd_operator.resources.naming import NATS_ROUTE_PORT, Manifest, RevisionScope

ALIVE = "/healthz?js-server-only=true"
"""Whether the server itself works, with or without a majority of the others."""
ROUTES_KEY = "routes"
"""Key of the routes' password in the Secret. It is not rotated: two servers with different passwords would not form a cluster."""
SERVER_NAME = "MMD_SERVER_NAME"
_PASSWORD = "MMD_ROUTES_PASSWORD"  # noqa: S105 - the name of a variable
_ROUTE = "MMD_ROUTE_"


def services(scope: RevisionScope, ports: Mapping[str, int]) -> list[Manifest]:
    """One headless Service for each server, with its ports for clients, monitoring and routes."""
    all_ports = {**ports, "routes": NATS_ROUTE_PORT}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": scope.metadata(server, "nats", of_revision=False),
            "spec": {
                "type": "ClusterIP",
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {**scope.selector("nats"), "statefulset.kubernetes.io/pod-name": server},
                "ports": [
                    {"name": n, "port": p, "targetPort": n, "protocol": "TCP"} for n, p in all_ports.items()
                ],
            },
        }
        for server in scope.nats_servers
    ]


def environment(scope: RevisionScope) -> list[Manifest]:
    """Variables that `configuration` refers to. Kubernetes puts the password into each route, since nats-server does not."""
    secret = {"name": scope.nats, "key": ROUTES_KEY}
    return [
        {"name": SERVER_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": _PASSWORD, "valueFrom": {"secretKeyRef": secret}},
        *(
            {"name": f"{_ROUTE}{number}", "value": route(scope.nats_host(server), f"$({_PASSWORD})")}
            for number, server in enumerate(scope.nats_servers)
        ),
    ]


def route(host: str, password: str, port: int = NATS_ROUTE_PORT) -> str:
    """The address of one server for the others, as a value in nats-server's language."""
    return f'"nats://{ROUTES_KEY}:{password}@{host}:{port}"'


def configuration(scope: RevisionScope) -> str:
    """The part of nats-server's configuration that makes it part of a cluster.

    Servers advertise no addresses to clients, since the addresses of pods do not last.
    """
    routes = ", ".join(f"${_ROUTE}{number}" for number in range(scope.spec.nats.replicas))
    return f"""\
cluster {{
  name: {scope.nats}
  port: {NATS_ROUTE_PORT}
  no_advertise: true
  authorization {{
    user: {ROUTES_KEY}, password: ${_PASSWORD}
  }}
  routes: [{routes}]
}}
"""


def spread(scope: RevisionScope, pod: Manifest) -> None:
    """Prefer a separate node for each server, so that the loss of one leaves a majority. The pod's own affinity stays."""
    term = {"labelSelector": {"matchLabels": scope.selector("nats")}, "topologyKey": "kubernetes.io/hostname"}
    pod.setdefault("affinity", {}).setdefault(
        "podAntiAffinity",
        {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]},
    )
