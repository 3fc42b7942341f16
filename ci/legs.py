"""Defines the legs of `make test` and of the gate: their commands, budgets and cores.

Independent of how they run.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

PYTHON = ".venv/bin/python"
VLLM_PYTHON = ".cache/vllm/bin/python"
PYTEST = ("-m", "pytest", "--quiet", "--no-header", "--disable-warnings", "-p", "no:cacheprovider", "-rfEs")
KUBERNETES = 'test -x "$KUBEBUILDER_ASSETS/kube-apiserver" || test -x .cache/kubernetes/kube || sh e2e/kubernetes/build.sh .cache/kubernetes/kube'

CORES = 2
"""Number of cores of the machine that the gate is planned for."""


@dataclass(frozen=True)
class Leg:
    """One command with its own log.

    A leg over its budget is reported. One far over it is ended, with the stacks of its processes.
    `cores`: roughly how many it keeps busy; legs run side by side as long as they need at most `CORES`
    together.
    """

    name: str
    command: tuple[str, ...]
    budget_minutes: float
    cores: int = CORES

    @property
    def is_pytest(self) -> bool:
        return "pytest" in self.command

    @property
    def end_signal(self) -> signal.Signals:
        """Signal that ends the leg. Tests then print their stacks; other programs clean up."""
        return signal.SIGABRT if self.is_pytest else signal.SIGTERM

    @property
    def end_seconds(self) -> float:
        """Time that the leg has to end after `end_signal`."""
        return 20.0 if self.is_pytest else 60.0


def pytest_leg(
    name: str, budget_minutes: float, *arguments: str, python: str = PYTHON, cores: int = CORES
) -> Leg:
    return Leg(name, (python, *PYTEST, *arguments), budget_minutes, cores)


def units(name: str, budget_minutes: float, which: str) -> Leg:
    return pytest_leg(name, budget_minutes, "-n", "3", "--dist", "loadgroup", "-m", which, *UNITS)


UNITS = ("tests", "--ignore=tests/apiserver", "--ignore=tests/pipeline", "--ignore=tests/page")
DEPLOYMENTS = ("tests/pipeline", "tests/page", "tests/observe")

KUBERNETES_BUILD = Leg("kubernetes", ("sh", "-c", KUBERNETES), 10, cores=1)
TEST = (
    KUBERNETES_BUILD,
    units("unit", 22, "not drill and not deployment"),
    pytest_leg(
        "apiserver", 10, "-n", "3", "--dist", "loadgroup", "-m", "not drill", "tests/apiserver", cores=1
    ),
    pytest_leg("deployments", 10, "-m", "deployment and not drill", *DEPLOYMENTS, cores=1),
    pytest_leg(
        "vllm-engine",
        8,
        *("-m", "not drill", "tests/vllm_engine", "tests/wire/test_errors.py"),
        python=VLLM_PYTHON,
        cores=1,
    ),
)
QUICK = units("quick", 20, "not drill and not deployment and not processes")
"""Unit tests that start no worker, gateway or operator as a separate process."""

LINT = Leg("lint", ("make", "lint"), 3, cores=1)
VLLM = Leg("vllm", ("make", "vllm"), 5, cores=1)
DEMO = Leg("demo", ("make", "demo"), 3, cores=1)

#: Legs by the word that names them on the command line.
SUITES: dict[str, tuple[Leg, ...]] = {
    "check": (LINT, KUBERNETES_BUILD, QUICK),
    "test": TEST,
    "gate": (LINT, VLLM, *TEST, DEMO),
}
