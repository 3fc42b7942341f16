"""Pools that scale, with pods that answer what a test says; in Shadow mode, so that nothing moves."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from mmd_api.resource import API_VERSION, KIND, MultimodalDeployment
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.kube.pod_client import ReportFetcher
from mmd_operator.observed.observed import Child, Observed, Workload
from mmd_operator.scaling.pool_scaling import PoolScaling, ScalingView
from mmd_operator.sizes.pending_growth import PendingGrowth
from mmd_operator.status.deployment_status import status_of
from mmd_operator.status.facts import Facts

from .bodies import NEW, UID, pod

NOW = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


class Words(ReportFetcher):
    """Pods that answer what a test says, by their address."""

    def __init__(self, **loads: dict[str, Any]) -> None:
        self.loads, self.queued = loads, 0.0

    async def get(self, address: str, port: int, path: str, max_bytes: int) -> bytes:
        said: dict[str, Any] = {"pod": f"demo-{address}-0", "revision": NEW}
        if address == "gateway":
            ttft = {"window_seconds": 30.0, "requests": 0, "seconds": 0.0}
            said |= {"queue": {"age_seconds": 0.0, "waiting_work": {"video": self.queued}}, "ttft": ttft}
        else:
            said |= {"state": "ready", "load": self.loads.get(address, {})}
        return json.dumps(said).encode()


def spec() -> MultimodalDeploymentSpec:
    scaled = {"gpus": 0, "autoscaling": {"minReplicas": 1, "maxReplicas": 4, "mode": "Shadow"}}
    body = {
        "model": {"id": "builtin/demo"},
        "encoder": scaled,
        "prefill": {"gpus": 0},
        "decode": {"gpus": 0},
        "transfer": {"kv": {"backend": "Gloo"}},
    }
    resource = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "demo"}, "spec": body}
    return MultimodalDeployment.parse(resource).spec


def observed() -> Observed:
    components = ("encoder", "prefill", "decode", "gateway")
    pods = (replace(pod(c, name=f"demo-{c}-0", ready=True), address=c) for c in components)
    children = (
        Child("StatefulSet", f"demo-{c}", "u", "1", UID, c, NEW, "", False, Workload(1, 1, 1, 1, True, NEW, True, None))
        for c in components[:3]
    )  # fmt: skip
    return Observed({child.key: child for child in children}, tuple(pods))


def scaling(words: Words) -> PoolScaling:
    return PoolScaling(None, words, OperatorMetrics(), "default", PendingGrowth(), PRODUCTION)  # type: ignore[arg-type]  # in Shadow mode nothing moves


def tick(made: PoolScaling, after: float, deployment: MultimodalDeploymentSpec) -> bool:
    _, changed = asyncio.run(made.tick(NOW + after, lambda: ScalingView(deployment, NEW, observed(), UID)))
    return changed


def status(made: PoolScaling) -> dict[str, Any]:
    facts = Facts(
        "demo", "default", ("encoder", "prefill", "decode"), True, observed(), (), None, scaling=made.report
    )
    return status_of(facts, [], 1).model_dump(mode="json", by_alias=True, exclude_none=True)
