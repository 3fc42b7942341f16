"""What one replica does, measured once: it stands in the status, and an operator that starts anew decides with it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from mmd_api.resource import API_VERSION, KIND, MultimodalDeployment
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.status import LARGEST_MILLI, PoolThroughput
from mmd_operator.conditions import Facts, status_of
from mmd_operator.explain import lines
from mmd_operator.metrics import OperatorMetrics
from mmd_operator.observed import Child, Observed, Workload
from mmd_operator.pod_client import ReportFetcher
from mmd_operator.scaling import PoolScaling

from .bodies import NEW, pod

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
        Child("StatefulSet", f"demo-{c}", "u", "1", None, c, NEW, "", False, Workload(1, 1, 1, 1, True, NEW, True, None))
        for c in components[:3]
    )  # fmt: skip
    return Observed({child.key: child for child in children}, tuple(pods))


def scaling(words: Words) -> PoolScaling:
    return PoolScaling(None, words, OperatorMetrics(), "default")  # type: ignore[arg-type]  # in Shadow mode nothing moves


def tick(made: PoolScaling, after: float, deployment: MultimodalDeploymentSpec) -> bool:
    _, changed = asyncio.run(made.tick(NOW + after, deployment, observed(), NEW))
    return changed


def status(made: PoolScaling) -> dict[str, Any]:
    facts = Facts(
        "demo", "default", ("encoder", "prefill", "decode"), True, observed(), (), None, scaling=made.report
    )
    return status_of(facts, [], 1).model_dump(mode="json", by_alias=True, exclude_none=True)


def test_measured_throughput_is_in_the_status_and_in_the_message():
    words = Words(
        encoder={"encode_work_per_second": {"video": 60000.0, "image": 1.5}, "encode_busy_fraction": 0.1},
        prefill={"prefill_tokens_per_second": 1200.0},
    )
    made = scaling(words)
    tick(made, 0, spec())
    found = status(made)
    kept = found["pools"]["encoder"]["throughput"]
    assert (kept["videoMilli"], kept["imageMilli"]) == (60_000_000, 1500)
    assert "audioMilli" not in kept
    assert found["pools"]["prefill"]["throughput"]["tokensMilli"] == 1_200_000
    assert "throughput" not in found["pools"]["decode"]
    said = "\n".join(lines(found))
    assert "one replica processes 2 image work/s, 60,000 video work/s" in said
    assert "one replica processes 1,200 tokens/s" in said


def test_a_restarted_operator_uses_it_until_a_fresh_load_arrives():
    deployment = spec()
    before = scaling(Words(encoder={"encode_work_per_second": {"video": 100.0}}))
    tick(before, 0, deployment)

    words = Words()  # pods that have measured nothing since
    words.queued = 700.0
    anew = scaling(words)
    anew.remember(status(before))
    tick(anew, 10, deployment)
    decision = anew.decisions["encoder"]
    assert decision.signal is not None
    assert decision.signal.seconds == pytest.approx(7.0)
    assert not any("throughput" in what for what in decision.missing)
    assert status(anew)["pools"]["encoder"]["throughput"] == status(before)["pools"]["encoder"]["throughput"]

    words.loads["encoder"] = {"encode_work_per_second": {"video": 350.0}}
    tick(anew, 12, deployment)
    signal = anew.decisions["encoder"].signal
    assert signal is not None
    assert signal.seconds == pytest.approx(2.0)
    assert status(anew)["pools"]["encoder"]["throughput"]["videoMilli"] == 350_000

    unknown = scaling(Words())
    unknown._report_fetcher.queued = 700.0  # type: ignore[attr-defined]
    tick(unknown, 10, deployment)
    assert "no throughput measured for video" in unknown.decisions["encoder"].missing


def test_small_changes_are_not_written_and_large_ones_are():
    words = Words(encoder={"encode_work_per_second": {"video": 100.0}})
    made, deployment = scaling(words), spec()
    tick(made, 0, deployment)
    first = made.report.throughput["encoder"]
    words.loads["encoder"] = {"encode_work_per_second": {"video": 109.0, "made up": 5.0}}
    assert not tick(made, 2, deployment)
    assert made.report.throughput["encoder"] == first
    words.loads["encoder"] = {"encode_work_per_second": {"video": 111.0}}
    assert tick(made, 4, deployment)
    assert made.report.throughput["encoder"].rates == {"video": 111.0}


def test_a_rate_that_cannot_be_written_is_cut_to_what_can():
    assert PoolThroughput.of({"video": 1e15, "tokens": 1e-5}, datetime.now(UTC)).rates == {
        "video": LARGEST_MILLI / 1000
    }
