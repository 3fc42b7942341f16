"""Pools that follow the load, against a real API server: grown, drained before they shrink, sent to zero and woken, never on a guess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster.deployments import SPEC
from support.cluster.operator_process import OperatorProcess
from support.cluster.shared_server import AnyOperator
from support.cluster.standin import Namespace, forget_the_dead

from .fleet import BUSY, IDLE, Fleet, assert_condition, assert_drain_requested, assert_replaced, scaled


@pytest.fixture
def fleet(namespace: Namespace, any_operator: AnyOperator) -> Iterator[Fleet]:
    made = Fleet(namespace)
    yield made
    made.stop()


def up(fleet: Fleet, **changes: Any) -> None:
    fleet.namespace.apply(scaled(**changes))
    fleet.until(fleet.namespace.is_ready)
    fleet.until(lambda: fleet.gateway)


def event(fleet: Fleet, reason: str, words: str) -> None:
    fleet.namespace.reported(reason, words)


def mmd(kubeconfig: Path, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "mmd_cli", *arguments],
        env={**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return result.stdout


def test_a_pool_grows_with_backlog_and_shrinks_by_empty_pods(kubeconfig: Path, fleet: Fleet):
    up(fleet)
    fleet.until(lambda: assert_condition(fleet, "MetricsFresh", "True", "AllReporting"))
    fleet.pods_of("encoder")[0].load = BUSY
    fleet.until(lambda: fleet.assert_size("encoder", 3))
    event(
        fleet, "Scaled", "from 1 to 3 pods; encoder scales from 1 to 3 replicas (LoadRose); backlog is 7.00 s"
    )
    decision = fleet.namespace.get()["status"]["pools"]["encoder"]["lastChange"]
    assert (decision["fromReplicas"], decision["toReplicas"], decision["metric"]) == (1, 3, "BacklogSeconds")
    assert (decision["observedMilli"], decision["targetMilli"]) == (7000, 1000)
    fleet.until(
        lambda: assert_condition(fleet, "ScalingLimited", "True", "MaxReplicas", "autoscaling.maxReplicas")
    )
    fleet.until(lambda: bounded_by(fleet, "Encoder"))
    fleet.until(lambda: decided_from(fleet, "encoder", 3))
    explained = mmd(kubeconfig, "explain", "demo", "-n", fleet.namespace.name)
    assert "encoder: 3 of 3 ready" in explained
    assert "encoder stays at 3 replicas (Steady); backlog is " in explained
    assert "    keep_within_bounds (MaxReplicas): between the minimum now" in explained
    assert "\nReady: True (Serving) " in explained
    assert "encoder scales from 1 to 3 replicas (LoadRose); backlog is 7.00 s, target 1.00 s" in explained
    assert "bottleneck: Encoder" in explained
    for_programs = json.loads(mmd(kubeconfig, "explain", "demo", "-n", fleet.namespace.name, "--json"))
    assert for_programs["status"]["pools"]["encoder"]["lastDecision"]["toReplicas"] == 3
    assert "bottleneck: Encoder" in for_programs["lines"]

    first, second, third = fleet.pods_of("encoder")
    second.holds_work = third.holds_work = True
    for pod in (first, second, third):
        pod.load = IDLE
    fleet.until(lambda: assert_drain_requested(second, third))
    assert not first.drain_requested
    end = time.monotonic() + 3
    while time.monotonic() < end:
        fleet.step()
        fleet.assert_size("encoder", 3)
    third.holds_work = False
    fleet.until(lambda: fleet.assert_size("encoder", 2))
    assert fleet.pods_of("encoder") == [first, second]
    second.holds_work = False
    fleet.until(lambda: fleet.assert_size("encoder", 1))
    event(fleet, "Draining", second.name)
    event(fleet, "Scaled", "LoadFell")


def test_a_pool_keeps_its_surge_if_its_load_needs_it(fleet: Fleet):
    up(fleet, maxReplicas=2)
    fleet.pods_of("encoder")[0].load = IDLE
    fleet.namespace.change({"encoder": {"batching": {"maxItems": 3}}})
    fleet.until(lambda: sized_by_a_surge(fleet, expected=True))

    def kept() -> None:
        for pod in fleet.pods_of("encoder"):
            pod.load = BUSY
        sized_by_a_surge(fleet, expected=False)

    fleet.until(kept)
    event(fleet, "Scaled", "keeps all 2 pods after the replacement")


def sized_by_a_surge(fleet: Fleet, *, expected: bool) -> None:
    workload = fleet.workload("encoder")
    assert (workload.replicas, workload.surged) == (2, expected)


def decided_from(fleet: Fleet, pool: str, replicas: int) -> None:
    assert fleet.namespace.get()["status"]["pools"][pool]["lastDecision"]["fromReplicas"] == replicas


def bounded_by(fleet: Fleet, pool: str) -> None:
    assert fleet.namespace.get()["status"]["bottleneck"] == pool


def test_a_pool_scales_to_zero_and_wakes_for_queued_work(fleet: Fleet):
    up(fleet, minReplicas=0)
    fleet.pods_of("encoder")[0].load = IDLE
    fleet.until(lambda: fleet.assert_size("encoder", 0))
    event(fleet, "Scaled", "(Idle)")
    fleet.until(fleet.namespace.is_ready)
    assert_condition(fleet, "EncoderReady", "True", "ScaledToZero")
    fleet.gateway.demand = {"queue": {"age_seconds": 0.2, "waiting_work": {"video": 40.0}}}
    fleet.until(lambda: fleet.assert_size("encoder", 1))
    event(fleet, "Scaled", "(Woken)")


def test_missing_pod_reports_prevent_scale_down_and_name_the_pods(fleet: Fleet):
    up(fleet)
    fleet.pods_of("encoder")[0].load = BUSY
    fleet.until(lambda: fleet.assert_size("encoder", 3))
    anothers, garbled, silent = fleet.pods_of("encoder")
    for pod in (anothers, garbled, silent):
        pod.load = IDLE
    anothers.answer = b'{"pod": "demo-encoder-9", "revision": "0", "state": "ready", "load": {}}'
    garbled.answer = b"<html>not found</html>"
    silent.stop()
    names = [pod.name for pod in (anothers, garbled, silent)]
    fleet.until(
        lambda: assert_reports_missing(
            fleet, *names, "identifies itself as pod demo-encoder-9", "invalid report"
        )
    )
    fleet.assert_size("encoder", 3)
    assert not any(pod.drain_requested for pod in fleet.pods_of("encoder"))


def assert_reports_missing(fleet: Fleet, *words: str) -> None:
    for word in words:
        assert_condition(fleet, "MetricsFresh", "False", "MetricsMissing", word)


def test_shadow_mode_reports_its_decisions_and_applies_none(fleet: Fleet):
    up(fleet, mode="Shadow")
    fleet.pods_of("encoder")[0].load = BUSY
    event(fleet, "WouldScale", "encoder would scale from 1 to 3 replicas")
    fleet.until(lambda: assert_condition(fleet, "ScalingActive", "False", "Shadow"))
    fleet.assert_size("encoder", 1)
    assert fleet.largest_size["encoder"] == 1


def asked_for(fleet: Fleet, pool: str, replicas: int) -> None:
    assert fleet.namespace.stateful_set(pool).spec.replicas == replicas


def test_unschedulable_pods_do_not_stop_growth_and_become_a_problem(fleet: Fleet):
    up(fleet, maxReplicas=8)
    name = fleet.pods_of("encoder")[0].name.rpartition("-")[0]
    fleet.unschedulable = {f"{name}-{n}" for n in range(1, 8)}
    fleet.pods_of("encoder")[0].load = {**BUSY, "encode_queued_work": {"video": 200}}
    fleet.until(lambda: asked_for(fleet, "encoder", 2))
    waits = "1 encoder pod is waiting for a node, for up to 900 s (0/3 nodes are available: 3 Insufficient nvidia.com/gpu.)"
    fleet.until(lambda: assert_condition(fleet, "Progressing", "True", "Updating", waits))
    fleet.pods_of("encoder")[0].load = BUSY
    fleet.until(lambda: asked_for(fleet, "encoder", 7))
    fleet.until(
        lambda: assert_condition(
            fleet, "Progressing", "True", "Updating", "6 encoder pods are waiting for a node"
        )
    )
    assert_condition(fleet, "Degraded", "False", "NoProblem")
    assert_condition(fleet, "ScalingLimited", "False", "NotLimited")
    fleet.namespace.change({"encoder": {"schedulingDeadlineSeconds": 0}})
    fleet.until(lambda: assert_condition(fleet, "Degraded", "True", "NoGpu", "encoder (6 pods)"))
    fleet.until(
        lambda: assert_condition(fleet, "ScalingLimited", "True", "Unschedulable", "7 (6 unschedulable)")
    )
    fleet.pods_of("encoder")[0].load = {**BUSY, "encode_queued_work": {"video": 800}}
    fleet.until(lambda: asked_for(fleet, "encoder", 8))

    fleet.unschedulable = set()
    fleet.until(lambda: fleet.assert_size("encoder", 8))
    fleet.until(lambda: assert_condition(fleet, "Degraded", "False", "NoProblem"))


def test_an_operator_killed_while_pods_drain_continues_where_it_stopped(
    fleet: Fleet, operator: OperatorProcess, namespace: Namespace
):
    up(fleet)
    fleet.pods_of("encoder")[0].load = BUSY
    fleet.until(lambda: fleet.assert_size("encoder", 3))
    for pod in fleet.pods_of("encoder")[1:]:
        pod.holds_work = True
    for pod in fleet.pods_of("encoder"):
        pod.load = IDLE
    leaving = fleet.pods_of("encoder")[1:]
    fleet.until(lambda: assert_drain_requested(*leaving))
    operator.kill()
    forget_the_dead(namespace)
    operator.start()
    for pod in leaving:
        pod.holds_work = False
    fleet.until(lambda: fleet.assert_size("encoder", 1))


def test_a_pod_that_has_drained_and_is_needed_again_starts_afresh(fleet: Fleet):
    up(fleet)
    fleet.pods_of("encoder")[0].load = BUSY
    fleet.until(lambda: fleet.assert_size("encoder", 3))
    first, second, third = fleet.pods_of("encoder")
    third.holds_work = True
    for pod in (first, second, third):
        pod.load = IDLE
    fleet.until(lambda: assert_drain_requested(second, third))
    first.load = BUSY
    fleet.until(lambda: assert_replaced(fleet, second))
    event(fleet, "Renewed", second.name)
    fleet.assert_size("encoder", 3)


def test_a_fixed_pool_that_is_made_smaller_drains_too(fleet: Fleet):
    fleet.namespace.apply({**SPEC, "decode": {"gpus": 0, "replicas": 2}})
    fleet.until(fleet.namespace.is_ready)
    fleet.until(lambda: fleet.assert_size("decode", 2))
    last = fleet.pods_of("decode")[1]
    last.holds_work = True
    fleet.namespace.change({"decode": {"replicas": 1}})
    fleet.until(lambda: assert_drain_requested(last))
    fleet.assert_size("decode", 2)
    last.holds_work = False
    fleet.until(lambda: fleet.assert_size("decode", 1))
