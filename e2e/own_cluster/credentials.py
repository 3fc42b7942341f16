"""Who may do what in the cluster: certificates of its programs, and the kubeconfigs that name them."""

from __future__ import annotations

import yaml

from e2e.own_cluster.keys import Authority
from e2e.own_cluster.places import API_SERVICE, HOST, KEYS, NODE, RUN


def make_keys() -> None:
    authority = Authority(KEYS)
    authority.issue("api", "kube-apiserver", addresses=(HOST, API_SERVICE, "kubernetes.default.svc"))
    authority.issue("service-accounts", "service-accounts")
    authority.issue("admin", "admin", "system:masters")
    authority.issue("kube-controller-manager", "system:kube-controller-manager")
    authority.issue("kube-scheduler", "system:kube-scheduler")
    authority.issue("kubelet", f"system:node:{NODE}", "system:nodes", addresses=(HOST, NODE))
    for user in ("admin", "kube-controller-manager", "kube-scheduler", "kubelet"):
        cluster = {"server": f"https://{HOST}:6443", "certificate-authority": str(authority.certificate)}
        key = {"client-certificate": str(KEYS / f"{user}.crt"), "client-key": str(KEYS / f"{user}.key")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "e2e",
            "clusters": [{"name": "e2e", "cluster": cluster}],
            "users": [{"name": user, "user": key}],
            "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": user}}],
        }
        (RUN / f"{user}.kubeconfig").write_text(yaml.safe_dump(config))
