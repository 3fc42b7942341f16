"""The operator as a separate process: started, stopped, killed, frozen.

Processes are forked from one that has already imported everything, so that a test may start dozens of them.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "mmd_operator.serve",
        "mmd_operator.operator_command",
        "mmd_cli.program",
        "kubernetes.aio.client.api",
    ]
)


def another_release() -> None:
    """An operator that builds every pod template differently from the same spec."""
    from mmd_operator.resources import pods

    pods.PROBE_TIMEOUT_SECONDS += 1


def _run(
    arguments: list[str], environment: dict[str, str], log: str, prepare: Callable[[], None] | None
) -> None:
    """What the `mmd` program does with a command line, in this process."""
    from mmd_cli.program import main

    if prepare is not None:
        prepare()

    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(environment)
    sys.argv = ["mmd", *arguments]
    main()


class OperatorProcess:
    """`mmd operator` against an API server. Its Lease is in `lease_namespace`, else in the first one it serves."""

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        folder: Path,
        health_port: int = 0,
        also: tuple[str, ...] = (),
        lease_namespace: str = "",
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._prepare = prepare
        self.log = folder / f"operator-{namespace}-{id(self)}.log"
        served = [f"--namespace={name}" for name in (namespace, *also)]
        lease = f"--lease-namespace={lease_namespace or namespace}"
        self._arguments = ["operator", *served, lease, f"--health-port={health_port}"]
        self._environment = {"KUBECONFIG": str(kubeconfig), "PYTHONWARNINGS": "ignore"}
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self) -> None:
        self.log.touch()
        self._process = _CONTEXT.Process(
            target=_run, args=(self._arguments, self._environment, str(self.log), self._prepare), daemon=True
        )
        self._process.start()

    @property
    def process(self) -> multiprocessing.process.BaseProcess:
        assert self._process is not None
        return self._process

    def kill(self) -> None:
        """SIGKILL: no cleanup."""
        self.process.kill()
        self.process.join(10)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def wait(self, seconds: float) -> int | None:
        """The exit status, or None while it still runs after this time."""
        self.process.join(seconds)
        return self.process.exitcode

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        if self._process is None or self._process.exitcode is not None:
            return -1 if self._process is None or self._process.exitcode is None else self._process.exitcode
        self.thaw()
        self._process.terminate()
        code = self.wait(20)
        if code is None:
            self.kill()
            raise TimeoutError("the operator did not end within 20 s of SIGTERM")
        return code

    def log_text(self) -> str:
        return self.log.read_text()

    def stacks(self) -> str:
        """What it does now, for the report of a test that waits in vain."""
        if self.process.exitcode is None:
            self._signal(signal.SIGUSR1)
            self.process.join(1)
        return f"exit code {self.process.exitcode}\n{self.log_text()[-4000:]}"

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
