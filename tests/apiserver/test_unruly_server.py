"""An API server that restarts, ends watches, loses history and refuses: nothing of it is seen in the end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mmd_operator.kube.pauses import PRODUCTION, Pauses
from support.cluster.control_plane import ControlPlane, answers
from support.cluster.deployments import ANOTHER_MODEL, SPEC
from support.cluster.operator_process import OperatorProcess
from support.cluster.standin import Namespace, eventually
from support.cluster.unruly_server import UnrulyServer


@pytest.fixture
def kubeconfig(unruly: UnrulyServer) -> Path:
    return unruly.kubeconfig


@pytest.fixture
def pauses() -> Pauses:
    """Those of production: calls are counted."""
    return PRODUCTION


def test_refused_calls_are_retried_later_and_not_at_once(
    unruly: UnrulyServer, namespace: Namespace, operator: OperatorProcess
):
    patience = {"Retry-After": "2"}
    faults = [
        unruly.refuse("PATCH", r"/multimodaldeployments/demo$", 409),
        unruly.refuse("PATCH", r"/statefulsets/demo-decode", 429, **patience),
        unruly.refuse("PATCH", r"/services/", 500, times=2),
        unruly.refuse("PATCH", r"/multimodaldeployments/demo/status$", 503),
        unruly.refuse("POST", r"/events$", 429, **patience),
    ]
    begun = time.monotonic()
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    for fault in faults:
        eventually(lambda fault=fault: met(fault.met, fault.times))
    assert [fault.met for fault in faults] == [fault.times for fault in faults]
    assert time.monotonic() - begun >= 2, "Retry-After was not kept"
    finalizer = namespace.get()["metadata"]["finalizers"]
    assert finalizer == ["serving.multimodal.dev/drain"]


def test_refusals_that_last_cost_few_calls(
    unruly: UnrulyServer, namespace: Namespace, operator: OperatorProcess
):
    fault = unruly.refuse("PATCH", r"/configmaps/", 503, times=10_000)
    namespace.apply(SPEC)
    eventually(lambda: met(fault.met, 3))
    seen, begun = fault.met, time.monotonic()
    eventually(lambda: met(fault.met, seen + 2))
    assert time.monotonic() - begun > 0.7, "it should ask ever more rarely"
    fault.times = 0
    namespace.settled(namespace.is_ready)


def met(count: int, wanted: int) -> None:
    assert count >= wanted


@pytest.mark.parametrize("expired", [False, True], ids=["ended", "ended-and-too-old-to-resume"])
def test_what_happens_while_watches_are_away_is_seen_afterwards(
    unruly: UnrulyServer, namespace: Namespace, operator: OperatorProcess, expired: bool
):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    unruly.refuse("GET", r"/(services|statefulsets|configmaps)$", 503, times=3)
    unruly.cut_watches(expired=expired)
    namespace.core.delete_namespaced_service("demo-gateway", namespace.name)
    namespace.change({"decode": {"replicas": 3}})

    def restored() -> None:
        names = [s.metadata.name for s in namespace.core.list_namespaced_service(namespace.name).items]
        assert "demo-gateway" in names
        assert namespace.stateful_set("decode").spec.replicas == 3

    eventually(restored)
    namespace.settled(namespace.is_ready)


def test_a_conflict_does_not_prevent_the_deletion_of_a_deployment(
    unruly: UnrulyServer, namespace: Namespace, operator: OperatorProcess
):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    conflicts = unruly.refuse("PATCH", r"/multimodaldeployments/demo$", 409, times=2)
    refused = unruly.refuse("DELETE", r"/statefulsets/", 429, times=2)
    namespace.delete()
    namespace.settled(lambda: gone(namespace))
    assert (conflicts.met, refused.met) == (2, 2)
    assert not namespace.objects()


def gone(namespace: Namespace) -> None:
    assert not namespace.exists()


def test_a_rollout_waits_for_an_api_server_that_restarts(
    control_plane: ControlPlane, namespace: Namespace, tmp_path: Path
):
    """Longer than its lease lasts, so that the operator may end; then its kubelet starts it again."""
    process = OperatorProcess(control_plane.kubeconfig(), namespace.name, tmp_path)
    process.start()

    def ready() -> None:
        if process.wait(0) is not None:
            assert "lease multimodal-operator was lost" in process.log_text()
            process.start()
        namespace.is_ready()

    try:
        namespace.apply(SPEC)
        namespace.settled(namespace.is_ready)
        old = namespace.gateway_revision()
        namespace.change(ANOTHER_MODEL)
        control_plane.kill_api_server()
        assert not answers(f"{control_plane.url}/readyz")
        control_plane.start_api_server()
        namespace.settled(ready)
        assert namespace.gateway_revision() != old
        assert namespace.revisions() == {namespace.gateway_revision()}
    finally:
        process.kill()


def test_an_operator_that_starts_while_the_api_server_is_away_waits_for_it(
    control_plane: ControlPlane, namespace: Namespace, tmp_path: Path
):
    process = OperatorProcess(control_plane.kubeconfig(), namespace.name, tmp_path)

    def waits() -> None:
        assert process.log_text().count("failed to write the lease") >= 2

    namespace.apply(SPEC)
    control_plane.kill_api_server()
    try:
        process.start()
        eventually(waits)
        assert process.wait(0) is None
        control_plane.start_api_server()
        namespace.settled(namespace.is_ready)
        assert process.wait(0) is None
    finally:
        process.kill()
        if not answers(f"{control_plane.url}/readyz"):
            control_plane.start_api_server()
