"""Runs the operator as a separate process, which tests start, stop, kill and freeze.

Processes are forked from one that has already imported everything, so that a test may start dozens of them.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from mmd_operator.kube.pauses import Pauses
from support.harness.waiting import DEADLINE_SECONDS

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
    """Turn this process into another release, which builds every pod template differently from the same spec."""
    from mmd_operator.resources import pods

    pods.PROBE_TIMEOUT_SECONDS += 1


def release_with_one_lease_for_all() -> None:
    """Turn this process into a release from before Leases were named after releases of the chart."""
    from mmd_operator.kube import leadership

    leadership.Leadership.__init__ = _with_one_lease(leadership.Leadership.__init__)  # type: ignore[method-assign]


def _with_one_lease(constructor: Callable[..., None]) -> Callable[..., None]:
    def construct(self: Any, api: Any, namespace: str, name: str, *others: Any) -> None:
        constructor(self, api, namespace, "multimodal-operator", *others)
        self.identity = self.identity.rpartition("_")[0]

    return construct


@dataclass(frozen=True)
class LeasePlace:
    """Where an operator's Lease is. `name`: that of the chart's usual release."""

    namespace: str
    name: str = "multimodal-operator"


@dataclass(frozen=True)
class _Launch:
    """How an operator runs. `pauses`: None for those of the command line, which are those of production."""

    namespaces: tuple[str, ...]
    lease: LeasePlace
    health_port: int
    environment: dict[str, str]
    log: str
    prepare: Callable[[], None] | None
    pauses: Pauses | None

    @property
    def arguments(self) -> list[str]:
        served = [f"--namespace={name}" for name in self.namespaces] or ["--all-namespaces"]
        lease = [f"--lease-namespace={self.lease.namespace}", f"--lease-name={self.lease.name}"]
        return ["operator", *served, *lease, f"--health-port={self.health_port}"]


def _run(launch: _Launch) -> None:
    """Run an operator in this process."""
    if launch.prepare is not None:
        launch.prepare()
    out = os.open(launch.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(launch.environment)
    if launch.pauses is None:
        _run_program(launch)
    else:
        _run_with(launch, launch.pauses)


def _run_program(launch: _Launch) -> None:
    from mmd_cli.program import main

    sys.argv = ["mmd", *launch.arguments]
    main()


def _run_with(launch: _Launch, pauses: Pauses) -> None:
    from mmd_operator.operator_command import run
    from mmd_operator.serve import Options

    try:
        options = Options(
            launch.namespaces, launch.lease.namespace, launch.health_port, pauses, launch.lease.name
        )
        run(options)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)


class OperatorProcess:
    """`mmd operator` against an API server.

    `namespace`: the namespace that it serves; empty: all of them. `lease`: by default in the first one it serves.
    """

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        folder: Path,
        health_port: int = 0,
        also: tuple[str, ...] = (),
        lease: LeasePlace | None = None,
        prepare: Callable[[], None] | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        self.log = folder / f"operator-{namespace}-{id(self)}.log"
        self._launch = _Launch(
            namespaces=(namespace, *also) if namespace else (),
            lease=lease or LeasePlace(namespace),
            health_port=health_port,
            environment={"KUBECONFIG": str(kubeconfig), "PYTHONWARNINGS": "ignore"},
            log=str(self.log),
            prepare=prepare,
            pauses=pauses,
        )
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self) -> None:
        self.log.touch()
        self._process = _CONTEXT.Process(target=_run, args=(self._launch,), daemon=True)
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
        code = self.wait(DEADLINE_SECONDS)
        if code is None:
            self.kill()
            raise TimeoutError(f"the operator did not end within {DEADLINE_SECONDS:g} s of SIGTERM")
        return code

    def log_text(self) -> str:
        return self.log.read_text()

    def stacks(self) -> str:
        """The stacks and log of the process, for the report of a test that waits in vain."""
        if self.process.exitcode is None:
            self._signal(signal.SIGUSR1)
            self.process.join(1)
        return f"exit code {self.process.exitcode}\n{self.log_text()[-4000:]}"

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
