"""containerd: started with its configuration, loaded with images, and cleared of containers left by kubelet."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from e2e.clusters import kill_task
from e2e.images import PAUSE, Buildah, Builder, Image
from e2e.own_cluster.host import own_processes
from e2e.own_cluster.places import PLUGINS, RUN, STATE
from e2e.shell import FailedError, Processes, command_line, pipe, run, until


class Containerd:
    """Keeps its images in the folder `images`, for the next run."""

    def __init__(self, images: Path, processes: Processes) -> None:
        self.images = images
        self.socket = RUN / "containerd.sock"
        self._processes = processes

    def start(self) -> None:
        (RUN / "containerd.toml").write_text(
            f"""\
version = 2
root = "{self.images}"
state = "{RUN / "containerd"}"
[grpc]
  address = "{self.socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{STATE / "opt"}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE.tagged}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{PLUGINS}"
    conf_dir = "{RUN / "cni"}"
"""
        )
        self._processes.start("containerd", "containerd", f"--config={RUN / 'containerd.toml'}")
        until("containerd answers", 30, self.answers)

    def answers(self) -> bool:
        try:
            run(*self._ctr("version"), seconds=5)
        except FailedError:
            return False
        return True

    def load(self, images: Mapping[Image, str], builder: Builder) -> None:
        """Import those that the last run did not leave in the cache."""
        if not isinstance(builder, Buildah):
            raise FailedError("this cluster takes images from buildah; stop docker, or install kind")
        for image, identity in {**images, PAUSE: builder.build(PAUSE)}.items():
            stamp = self.images / f"{image.name}.id"
            if stamp.exists() and stamp.read_text() == identity:
                continue
            command = self._ctr("images", "import", "-")
            pipe(builder.archive(image), command, seconds=600, env=builder.env)
            stamp.write_text(identity)

    def kill(self, container: str) -> bool:
        kill_task(("ctr", f"--address={self.socket}"), container)
        return True

    def end_all(self) -> None:
        """End the containers that kubelet left."""
        if self.answers():
            for task in self._list("tasks"):
                remove = self._ctr("tasks", "rm", "--force", task)
                subprocess.run(remove, check=False, timeout=60, capture_output=True)  # or it ended by itself
            for container in self._list("containers"):
                run(*self._ctr("containers", "rm", container))
        shims = [pid for pid, words in own_processes().items() if "containerd-shim" in words]
        for pid in shims:
            os.kill(pid, signal.SIGKILL)
        until("containers have ended", 10, lambda: not any(command_line(pid) for pid in shims))

    def _list(self, what: str) -> list[str]:
        return run(*self._ctr(what, "ls", "--quiet")).split()

    def _ctr(self, *arguments: str) -> list[str | Path]:
        return ["ctr", f"--address={self.socket}", "--namespace=k8s.io", *arguments]
