"""A spec or a fault that stops the autoscaler: a problem of the deployment names it, and all else goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mmd_api.faults import Fault, InvalidDeploymentError
from mmd_api.resource import API_VERSION, KIND
from mmd_operator.autoscaling import DeploymentPolicy
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.observed.observed import Observed
from mmd_operator.observed.stored_spec import read
from mmd_operator.passes.reconciler import Reconciler
from support.cluster.deployments import SPEC

from .bodies import UID


def body(**spec: Any) -> dict[str, Any]:
    metadata = {"name": "demo", "namespace": "default", "uid": UID, "generation": 1}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": {**SPEC, **spec}}


def scheduled(*crons: str, min_replicas: int = 2) -> dict[str, Any]:
    schedules = [{"cron": cron, "durationMinutes": 60, "minReplicas": min_replicas} for cron in crons]
    return {"gpus": 1, "autoscaling": {"minReplicas": 1, "maxReplicas": 8, "schedules": schedules}}


def faults_of(**spec: Any) -> tuple[Fault, ...]:
    """What the autoscaler cannot follow of a spec that a pass can."""
    reading = read(body(**spec))
    assert reading.deployment is not None, reading.faults
    try:
        DeploymentPolicy.of(reading.deployment.spec)
    except InvalidDeploymentError as error:
        return error.faults
    return ()


@pytest.mark.parametrize("cron", ["0 24 * * *", "0 8 31 2 *", "60 * * * *", "*/0 * * * *"])
def test_a_schedule_that_no_clock_can_follow_is_named(cron: str):
    (fault,) = faults_of(decode=scheduled("0 8 * * *", cron))
    assert fault.field == "spec.decode.autoscaling.schedules[1].cron"
    assert repr(cron) in fault.message
    assert "set minute, hour, day of month, month and day of week" in fault.message


def test_schedules_that_need_more_gpus_than_the_budget_are_named():
    pool = {"gpus": 1, "replicas": 1}
    decode = scheduled("0 8 * * *", min_replicas=7)
    (fault,) = faults_of(gpuBudget=8, encoder=pool, prefill=pool, decode=decode)
    assert fault.field == "spec.gpuBudget"
    assert "may need 9 GPUs at once, but the budget is 8; raise gpuBudget" in fault.message


def test_every_pool_with_an_invalid_schedule_is_named():
    faults = faults_of(prefill=scheduled("0 24 * * *"), decode=scheduled("0 25 * * *"))
    fields = {fault.field for fault in faults}
    assert fields == {f"spec.{pool}.autoscaling.schedules[0].cron" for pool in ("prefill", "decode")}


def test_schedules_that_can_be_followed_are_valid():
    assert faults_of(decode=scheduled("0 8 * * 1-5", "*/15 22 29 2 *")) == ()


async def test_a_tick_that_raises_is_a_problem_until_a_tick_succeeds(monkeypatch: pytest.MonkeyPatch):
    """The first report wakes the pass that publishes it; equal ones do not."""
    pauses = replace(PRODUCTION, tick_seconds=0.001, last_tick_seconds=0.001)
    reconciler = Reconciler(
        cast(Any, SimpleNamespace()),
        cast(Any, SimpleNamespace()),
        cast(Any, SimpleNamespace()),
        OperatorMetrics(),
        "default",
        "demo",
        Observed,
        body(),
        pauses,
    )
    invalid = InvalidDeploymentError([Fault("spec.gpuBudget", "9 GPUs are needed")])
    zero = ZeroDivisionError("no rate")
    outcomes: list[Exception | None] = [zero, zero, invalid, None]
    seen: list[tuple[str | None, bool]] = []
    ended = asyncio.Event()

    async def scale() -> None:
        problem = reconciler._pass.not_scaled
        seen.append((problem.seen if problem else None, reconciler.wake.is_set()))
        reconciler.wake.clear()
        if not outcomes:
            ended.set()
            await asyncio.Event().wait()
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    monkeypatch.setattr(reconciler, "_scale", scale)
    ticks = asyncio.create_task(reconciler._keep_scaling())
    await ended.wait()
    ticks.cancel()
    failure = "the autoscaler failed, and no pool is resized: ZeroDivisionError('no rate')"
    named = "no pool is resized: spec.gpuBudget: 9 GPUs are needed"
    assert seen == [(None, False), (failure, True), (failure, False), (named, True), (None, True)]
