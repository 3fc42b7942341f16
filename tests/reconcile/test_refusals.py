"""What the API server or a quota refuses stops only itself."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mmd_operator.kube.cluster import RefusedError
from mmd_operator.kube.context import PassContext
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.observed.observed import Observed, child_of
from mmd_operator.resources.naming import REVISION_LABEL, Manifest
from mmd_operator.rollout.execution import Execution
from mmd_operator.rollout.next_step import Step
from mmd_operator.sizes.pending_growth import PendingGrowth
from mmd_operator.sizes.replacement import Replacement
from mmd_operator.status import shortage
from mmd_operator.status.shortage import REFUSED_SECONDS, Shortage

from .bodies import NEW, OLD, UID, pod, workload

QUOTA = "pods is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1"
WEBHOOK_AWAY = (
    'Internal error occurred: failed calling webhook "validate.example.com": connect: connection refused'
)
POLICY = 'admission webhook "validate.example.com" denied the request: image signature is missing'


def context(cluster: Any) -> PassContext:
    events = SimpleNamespace(report=lambda *_, **__: None)
    return PassContext(cluster, cast(Any, events), OperatorMetrics(), "default", "demo", PRODUCTION)


async def test_a_pod_that_may_not_be_deleted_stops_no_other_step() -> None:
    asked: list[str] = []

    class Cluster:
        async def delete_pod(self, _namespace: str, name: str, _uid: str) -> None:
            asked.append(name)
            if name == "a-0":
                raise RefusedError('admission webhook "pods.example.com" denied the request')

        async def delete(self, _kind: str, _namespace: str, name: str, _uid: str) -> None:
            asked.append(name)

    unused = child_of("StatefulSet", workload("StatefulSet", "decode", OLD))
    replaced = {n: Replacement((n,), (pod(name=f"{n}-0"),)) for n in ("a", "b")}
    step = Step("Updating", NEW, NEW, (), {}, (unused,), replace=replaced)
    execution = Execution(context(Cluster()), UID, PendingGrowth())
    (problem,), settled = await execution.carry_out({}, step, [], Observed())
    assert (problem.reason, problem.component, problem.revision) == ("AdmissionRefused", "decode", NEW)
    assert asked == ["a-0", "b-0", unused.name]
    assert settled


@pytest.mark.parametrize(
    ("words", "reason", "seen_seconds_ago", "refused"),
    [
        (QUOTA, "QuotaExceeded", 0, True),
        (QUOTA, "QuotaExceeded", 3600, False),
        (WEBHOOK_AWAY, "WebhookFailed", 0, False),
        (POLICY, "AdmissionRefused", 0, False),
    ],
)
async def test_a_pod_is_refused_once_a_quota_has_had_no_room_for_it_for_a_minute(
    words: str, reason: str, seen_seconds_ago: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Event from before the pod was missing says nothing about it. A webhook would refuse it also in place of one that is gone."""
    clock = SimpleNamespace(now=1000.0, before=time.time() - 1000.0)
    monkeypatch.setattr(
        shortage, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.before + clock.now)
    )
    body = workload("StatefulSet", "decode", NEW, replicas=2, surged=True)
    body["status"]["replicas"] = 1
    child = child_of("StatefulSet", body)

    class Cluster:
        async def warnings_about(self, *_: object) -> list[dict[str, Any]]:
            at = datetime.fromtimestamp(clock.before + clock.now - seen_seconds_ago, UTC)
            return [{"reason": "FailedCreate", "message": words, "lastTimestamp": at.isoformat()}]

    found = Shortage(context(Cluster()))
    for _ in range(5):
        await found.problems(Observed({child.key: child}))
        assert not found.refused
        clock.now += REFUSED_SECONDS / 6
    (problem,) = await found.problems(Observed({child.key: child}))
    assert problem.reason == reason
    clock.now += REFUSED_SECONDS
    await found.problems(Observed({child.key: child}))
    assert found.refused == ({child.name} if refused else set())
    await found.problems(Observed())
    assert not found.refused


@pytest.mark.parametrize(("exists", "applied"), [(False, True), (True, False)])
async def test_a_gateway_that_is_gone_waits_for_no_object_that_is_refused(
    exists: bool, applied: bool
) -> None:
    """One that serves is switched only when all others have settled."""
    asked: list[str] = []

    class Applier:
        async def apply(self, manifest: Manifest, *_: object) -> tuple[str, None]:
            asked.append(manifest["kind"])
            return "Refused" if manifest["kind"] == "NetworkPolicy" else "Unchanged", None

    template = {"metadata": {"labels": {REVISION_LABEL: NEW}}}
    objects = [
        {"kind": kind, "metadata": {"name": "demo-gateway"}, "spec": {"template": template}}
        for kind in ("NetworkPolicy", "Deployment")
    ]
    execution = Execution(context(None), UID, PendingGrowth())
    execution._applier = cast(Any, Applier())
    gateway = child_of("Deployment", workload("Deployment", "gateway", None, template=OLD))
    seen = Observed({gateway.key: gateway} if exists else {})
    step = Step("SwitchingGateway", NEW, OLD, tuple(objects), {}, ())
    await execution.carry_out({}, step, [], seen)
    assert ("Deployment" in asked) is applied
