"""The operator as a process of its own: started, stopped, killed, frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


class OperatorProcess:
    """`mmd operator` against an API server, for one namespace. Its log is kept for the failure report."""

    def __init__(self, kubeconfig: Path, namespace: str, folder: Path, health_port: int = 0) -> None:
        self.log = folder / f"operator-{namespace}-{id(self)}.log"
        self._command = [
            sys.executable,
            "-m",
            "mmd_api",
            "operator",
            f"--namespace={namespace}",
            f"--health-port={health_port}",
        ]
        self._environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONWARNINGS": "ignore"}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        self.process.kill()
        self.process.wait(timeout=10)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        if self._process is None or self._process.poll() is not None:
            return -1 if self._process is None else int(self._process.returncode)
        self.thaw()
        self._process.terminate()
        try:
            return self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)
            raise

    def said(self) -> str:
        return self.log.read_text()
