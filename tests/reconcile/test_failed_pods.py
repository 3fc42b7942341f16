"""Pods that fail as a whole, one after the other under the same name, are remembered and named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmd_operator.observed.observed import Observed, PodView, pod_of
from mmd_operator.status.failed_pods import WINDOW_SECONDS, FailedPods

from .bodies import NEW, labels, pod

REFUSED = "UnexpectedAdmissionError on node gpu-7: Allocate failed: no healthy devices present"
NOW = 10_000.0


def failed(number: int, failure: str = REFUSED, component: str = "decode") -> PodView:
    return replace(
        pod(component, name=f"demo-{component}-0"), uid=f"uid-{number}", finished=True, failure=failure
    )


def seen(*pods: PodView) -> Observed:
    return Observed(pods=pods)


def test_the_third_failure_is_a_problem_with_the_kubelets_words_and_the_node() -> None:
    failures = FailedPods()
    for number in range(3):
        assert failures.problems(seen(), NOW) == []
        failures.note(failed(number), NOW + number)
        failures.note(failed(number), NOW + number)  # a watch shows it again when it is deleted
    (problem,) = failures.problems(seen(pod(name="demo-decode-0")), NOW + 3)
    assert (problem.reason, problem.component, problem.revision) == ("PodsFail", "decode", NEW)
    assert problem.seen == f"3 pods named demo-decode-0 failed within 15 min, the last one with {REFUSED}"
    assert "kubectl describe node" in problem.remedy
    assert problem.stops_pods


def test_an_eviction_has_a_remedy_of_its_own() -> None:
    failures = FailedPods()
    for number in range(3):
        failures.note(failed(number, "Evicted: The node was low on resource: ephemeral-storage."), NOW)
    (problem,) = failures.problems(seen(), NOW)
    assert "spec.model.storage" in problem.remedy


def test_failures_are_no_problem_while_the_pod_is_ready_nor_after_a_while() -> None:
    failures = FailedPods()
    for number in range(3):
        failures.note(failed(number), NOW)
    assert failures.problems(seen(pod(name="demo-decode-0", ready=True)), NOW) == []
    assert len(failures.problems(seen(), NOW + WINDOW_SECONDS)) == 1
    assert failures.problems(seen(), NOW + WINDOW_SECONDS + 1) == []
    assert failures._failures == {}


def test_what_is_remembered_of_a_name_is_bounded() -> None:
    failures = FailedPods()
    for number in range(1000):
        failures.note(failed(number), NOW)
    assert len(failures._failures["demo-decode-0"].times) < 100


@pytest.mark.parametrize("component", ["gateway", "weights"])
def test_pods_of_deployments_and_jobs_are_reported_elsewhere(component: str) -> None:
    failures = FailedPods()
    for number in range(3):
        failures.note(failed(number, component=component), NOW)
    assert failures.problems(seen(), NOW) == []


def test_a_failed_pod_is_not_ready_and_says_why() -> None:
    body = {
        "metadata": {"name": "demo-decode-0", "uid": "u", "labels": labels("decode", NEW)},
        "spec": {"nodeName": "gpu-7", "containers": [{}]},
        "status": {
            "phase": "Failed",
            "reason": "UnexpectedAdmissionError",
            "message": "Allocate failed: no healthy devices present",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    view = pod_of(body)
    assert (view.ready, view.finished, view.failure) == (False, True, REFUSED)
    ended = pod_of({**body, "status": {"phase": "Failed", "containerStatuses": []}})
    assert ended.failure == "", "its containers ended by themselves, and have a reason of their own"
