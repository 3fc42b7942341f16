"""The legs of `make test` and of the gate: their commands, budgets and cores. Nothing here knows how legs are run."""

from __future__ import annotations

import signal
from dataclasses import dataclass

PYTHON = ".venv/bin/python"
VLLM_PYTHON = ".cache/vllm/bin/python"
PYTEST = ("-m", "pytest", "--quiet", "--no-header", "--disable-warnings", "-p", "no:cacheprovider", "-rfEs")
KUBERNETES = 'test -x "$KUBEBUILDER_ASSETS/kube-apiserver" || test -x .cache/kubernetes/kube || sh e2e/kubernetes/build.sh .cache/kubernetes/kube'

CORES = 2
"""Of the machine that the gate is planned for."""


@dataclass(frozen=True)
class Leg:
    """One command with a log of its own.

    A leg over its budget is reported, one over twice its budget is ended with the stacks of its processes. `cores`: about how many it
    keeps busy; it runs beside others as long as they need no more than `CORES` together.
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
        """What ends it: tests print their stacks, other programs remove what they have made."""
        return signal.SIGABRT if self.is_pytest else signal.SIGTERM

    @property
    def end_seconds(self) -> float:
        """Its time to do so."""
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
"""Those that start no worker, gateway or operator as a process of its own."""

LINT = Leg("lint", ("make", "lint"), 3, cores=1)
VLLM = Leg("vllm", ("make", "vllm"), 5, cores=1)
DEMO = Leg("demo", ("make", "demo"), 3, cores=1)

#: What the words of the command line stand for.
SUITES: dict[str, tuple[Leg, ...]] = {
    "check": (LINT, KUBERNETES_BUILD, QUICK),
    "test": TEST,
    "gate": (LINT, VLLM, *TEST, DEMO),
}
