"""The Kubernetes programs: built, run as servers of this machine, and queried with kubectl."""

from __future__ import annotations

from pathlib import Path

import yaml

from e2e.own_cluster.places import KUBECONFIG, RUN
from e2e.shell import Processes, run

SERVERS = (
    *("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "coredns", "kube-apiserver"),
    *("etcd", "containerd"),
)
"""In the order in which they stop. Pods are deleted when nobody makes new ones and while kubelet still runs."""


class Programs:
    """All of them are links to one binary in `folder`."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.processes = processes
        self._folder = folder

    def build(self) -> None:
        binary = self._folder / "kube"
        if not binary.exists():
            run("sh", Path(__file__).parents[1] / "kubernetes" / "build.sh", binary, seconds=1500)
        for name in (*SERVERS[:-1], "kubectl", "helm"):
            link = self._folder / name
            if not link.exists():
                link.symlink_to(binary.name)

    def serve(self, name: str, *arguments: str) -> None:
        self.processes.start(name, self._program(name), *arguments)

    def configured(self, name: str, config: dict[str, object], *arguments: str) -> None:
        path = RUN / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        self.serve(name, f"--config={path}", *arguments)

    def kubectl(self, *arguments: str, stdin: str | None = None, seconds: float = 30) -> str:
        command = (self._program("kubectl"), f"--kubeconfig={KUBECONFIG}", *arguments)
        return run(*command, stdin=stdin, seconds=seconds)

    def answers(self, *arguments: str) -> bool:
        self.processes.must_run()
        self.kubectl(*arguments)
        return True

    def apply(self, manifest: dict[str, object]) -> None:
        self.kubectl("apply", "--filename=-", stdin=yaml.safe_dump(manifest))

    def _program(self, name: str) -> Path:
        return self._folder / name
