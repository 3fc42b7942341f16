"""CoreDNS, and the services by which pods find it and the API server."""

from __future__ import annotations

from e2e.own_cluster.places import DNS_SERVICE, HOST, KUBECONFIG, RUN
from e2e.own_cluster.programs import Programs

DNS_PORT = 10053


def start(programs: Programs) -> None:
    """CoreDNS runs next to the control plane; pods reach it, and the API server, through services without a selector."""
    (RUN / "Corefile").write_text(
        f"""\
.:{DNS_PORT} {{
    errors
    health {HOST}:10054
    ready {HOST}:10055
    cache 5
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {KUBECONFIG}
        pods insecure
        ttl 5
    }}
}}
"""
    )
    programs.serve("coredns", "-conf", str(RUN / "Corefile"))
    ports = [{"name": p.lower(), "port": DNS_PORT, "protocol": p} for p in ("UDP", "TCP")]
    service_ports = [
        {"name": p["name"], "port": 53, "targetPort": DNS_PORT, "protocol": p["protocol"]} for p in ports
    ]
    dns = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system"},
        "spec": {"clusterIP": DNS_SERVICE, "ports": service_ports},
    }
    api = [{"name": "https", "port": 6443, "protocol": "TCP"}]
    programs.apply(dns)
    programs.apply(_endpoints("kube-dns", "kube-system", ports))
    programs.apply(_endpoints("kubernetes", "default", api))


def _endpoints(service: str, namespace: str, ports: list[dict[str, object]]) -> dict[str, object]:
    """Endpoints that direct a service to this machine."""
    labels = {"kubernetes.io/service-name": service}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"{service}-e2e", "namespace": namespace, "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [HOST], "conditions": {"ready": True}}],
        "ports": ports,
    }
