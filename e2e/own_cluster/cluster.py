"""A real one-node Kubernetes on this machine without docker: etcd, control plane, kubelet, kube-proxy, CoreDNS, containerd.

Root is needed, and Debian's containerd, runc and network plugins; the Kubernetes programs come from kubernetes/build.sh. Everything
listens on loopback or on the bridge's address, lives in two folders, and is removed by `stop`, also after an earlier run that was
killed. Images stay in the cache, for the next run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from e2e.images import Builder, Image
from e2e.own_cluster import control_plane, credentials, dns, firewall, host, network, node
from e2e.own_cluster.containerd import Containerd
from e2e.own_cluster.places import BRIDGE, KEYS, KUBECONFIG, RUN, STATE
from e2e.own_cluster.programs import SERVERS, Programs
from e2e.shell import Processes, run


class OwnCluster:
    """See the module."""

    name = "own"

    def __init__(self, cache: Path) -> None:
        self.kubeconfig = KUBECONFIG
        self.tools: Path | None = cache.parent / "kubernetes"
        self._processes = Processes(RUN, STATE / "logs")
        self._programs = Programs(cache.parent / "kubernetes", self._processes)
        self._containerd = Containerd(cache / "containerd", self._processes)
        self._started = False

    def start(self) -> str:
        host.check()
        self.stop()
        self._programs.build()
        for folder in (KEYS, RUN / "cni", STATE / "logs", self._containerd.images):
            folder.mkdir(parents=True) if folder != self._containerd.images else folder.mkdir(
                parents=True, exist_ok=True
            )
        RUN.chmod(0o700)
        host.remember()
        network.make_bridge()
        credentials.make_keys()
        control_plane.start(self._programs)
        self._containerd.start()
        node.start(self._programs, self._containerd)
        dns.start(self._programs)
        node.wait_ready(self._programs)
        return "Kubernetes " + json.loads(self._programs.kubectl("get", "--raw=/version"))["gitVersion"]

    def load(self, images: Mapping[Image, str], builder: Builder) -> None:
        self._containerd.load(images, builder)

    def kill(self, container: str) -> bool:
        return self._containerd.kill(container)

    def stop(self) -> None:
        self._started = bool(host.before())
        for name in SERVERS:
            if name == "kubelet" and (RUN / "kubelet.pid").exists():
                node.delete_pods(self._programs)
            if name == "containerd":
                self._containerd.end_all()
            self._processes.stop(name, mark=RUN.name)
        network.remove_network(kube=self._started)
        for mount in sorted(host.mounts(self._containerd.images), reverse=True):
            run("umount", "--lazy", mount)
        host.remove_cgroups()
        host.restore()
        for folder in (RUN, STATE):
            shutil.rmtree(folder, ignore_errors=True)

    def leftovers(self) -> list[str]:
        found = [f"process {pid}: {words[:100]}" for pid, words in host.own_processes().items()]
        found += [f"mount {mount}" for mount in host.mounts(self._containerd.images)]
        found += [f"network link {BRIDGE}"] if Path(f"/sys/class/net/{BRIDGE}").exists() else []
        found += [f"network namespace {name}" for name in host.namespaces()]
        found += [f"iptables: {line}" for line in firewall.leftovers(kube=self._started)][:5]
        found += [f"cgroup {path}" for path in host.cgroups()]
        found += [f"folder {folder}" for folder in (RUN, STATE) if folder.exists()]
        return found
