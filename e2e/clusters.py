"""Clusters that were there before, and those that `kind` makes. One of our own making is in own_cluster/cluster.py."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from e2e.images import Builder, Docker, Image
from e2e.shell import AlreadyEndedError, FailedError, run


class Cluster(Protocol):
    """Where the run happens. `kubeconfig` is set when it has started."""

    name: str
    kubeconfig: Path
    tools: Path | None
    """A folder with kubectl and helm; None: those on the PATH."""

    def start(self) -> str:
        """Make it ready; returns a note on what it is."""

    def load(self, images: Mapping[Image, str], builder: Builder) -> None:
        """Make images, given with their ids, available to its nodes."""

    def kill(self, container: str) -> bool:
        """SIGKILL a container by its id; False where that cannot be done from here.

        Raises:
            AlreadyEndedError: it does not run any more.
        """

    def stop(self) -> None:
        """Leave nothing behind of what `start` made."""

    def leftovers(self) -> list[str]:
        """What `stop` should have removed and did not."""


class Kind:
    """A cluster in docker, from kind.yaml."""

    name = "kind"
    tools = None
    _cluster = "multimodal-e2e"

    def __init__(self, cache: Path) -> None:
        self.kubeconfig = cache / "kind.kubeconfig"

    def start(self) -> str:
        config = Path(__file__).with_name("kind.yaml")
        command = ("kind", "create", "cluster", "--name", self._cluster, "--config", config)
        run(*command, "--kubeconfig", self.kubeconfig, "--wait", "120s", seconds=600)
        return run("kind", "version").split()[1]

    def load(self, images: Mapping[Image, str], builder: Builder) -> None:
        if not isinstance(builder, Docker):
            raise FailedError("kind takes images from docker; start it")
        names = [image.tagged for image in images]
        run("kind", "load", "docker-image", "--name", self._cluster, *names, seconds=600)

    def kill(self, container: str) -> bool:
        kill_task(("docker", "exec", f"{self._cluster}-control-plane", "ctr"), container)
        return True

    def stop(self) -> None:
        run("kind", "delete", "cluster", "--name", self._cluster, seconds=120)
        self.kubeconfig.unlink(missing_ok=True)

    def leftovers(self) -> list[str]:
        mark = f"label=io.x-k8s.kind.cluster={self._cluster}"
        return run("docker", "ps", "--all", "--quiet", "--filter", mark).split()


class Current:
    """The cluster that KUBECONFIG points to; its nodes pull from a registry."""

    name = "current"
    tools = None

    def __init__(self, registry: str) -> None:
        self._registry = registry
        self.kubeconfig = Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")

    def start(self) -> str:
        if not self._registry:
            raise FailedError("say where the cluster's nodes get images from: --registry HOST/PATH")
        return run("kubectl", "config", "current-context").strip()

    def load(self, images: Mapping[Image, str], builder: Builder) -> None:
        for image in images:
            builder.push(image, self._registry)

    def kill(self, container: str) -> bool:
        """Its nodes are not ours to touch."""
        return False

    def stop(self) -> None:
        """It was there before and stays."""

    def leftovers(self) -> list[str]:
        return []


def kill_task(ctr: Sequence[str | Path], container: str) -> None:
    """SIGKILL the process of a container. `ctr`: the command that reaches its containerd.

    Raises:
        AlreadyEndedError: it does not run any more.
        FailedError: containerd refused.
    """
    try:
        run(*ctr, "--namespace=k8s.io", "tasks", "kill", "--signal=SIGKILL", container)
    except FailedError as error:
        if "not found" in str(error):
            raise AlreadyEndedError(f"container {container} does not run any more") from error
        raise


def need(*programs: str) -> None:
    """Raises:
    FailedError: one is not on the PATH.
    """
    if missing := [name for name in programs if shutil.which(name) is None]:
        raise FailedError(f"install {', '.join(missing)}")
