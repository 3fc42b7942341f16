"""The one node: kubelet and kube-proxy, until it is Ready, and its pods until they are gone."""

from __future__ import annotations

from e2e.own_cluster.containerd import Containerd
from e2e.own_cluster.places import DNS_SERVICE, HOST, KEYS, KUBECONFIG, NODE, PODS, RUN, STATE
from e2e.own_cluster.programs import Programs
from e2e.shell import FailedError, until

CONTAINERD_STARTS = "server is not initialized yet"
"""The error with which kubelet ends while containerd is up but still loads its images before serving Kubernetes."""


def start(programs: Programs, containerd: Containerd) -> None:
    programs.configured(
        "kubelet",
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": HOST,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(KEYS / "ca.crt")},
            },
            "tlsCertFile": str(KEYS / "kubelet.crt"),
            "tlsPrivateKeyFile": str(KEYS / "kubelet.key"),
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": False,
            "containerRuntimeEndpoint": f"unix://{containerd.socket}",
            "volumePluginDir": str(STATE / "volume-plugins"),
            "podLogsDir": str(STATE / "logs" / "pods"),
            "clusterDNS": [DNS_SERVICE],
            "clusterDomain": "cluster.local",
            "evictionHard": {"memory.available": "50Mi"},
            "imageGCHighThresholdPercent": 100,
            "oomScoreAdj": 0,
        },
        f"--kubeconfig={RUN / 'kubelet.kubeconfig'}",
        f"--hostname-override={NODE}",
        f"--node-ip={HOST}",
        f"--root-dir={STATE / 'kubelet'}",
    )
    programs.configured(
        "kube-proxy",
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(KUBECONFIG)},
            "mode": "iptables",
            "clusterCIDR": PODS,
            "hostnameOverride": NODE,
            "healthzBindAddress": f"{HOST}:10256",
            "conntrack": {"maxPerCore": 0},
            "oomScoreAdj": 0,
        },
    )


def wait_ready(programs: Programs) -> None:
    def ready() -> bool:
        programs.processes.revive("kubelet", CONTAINERD_STARTS)
        programs.processes.must_run()
        condition = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        return programs.kubectl("get", "node", NODE, "-o", condition) == "True"

    until("the node is ready", 90, ready)


def delete_pods(programs: Programs) -> None:
    """Delete all pods, so that kubelet ends them and the network plugins clean up after them."""
    try:
        programs.kubectl(
            "delete", "pods", "--all", "--all-namespaces", "--grace-period=1", "--timeout=60s", seconds=70
        )
    except FailedError:
        return  # the cluster is half dead; its containers are ended later
