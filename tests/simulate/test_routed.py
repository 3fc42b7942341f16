"""`mmd simulate` places requests with the gateway's own router: conservation, bounds, and what a router must gain over none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.routing import LeastLoaded, RoundRobin
from mmd_api.resource import API_VERSION, KIND, MultimodalDeployment
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_cli.program import build
from mmd_cli.simulated_router import SimulatedPrompt, SimulatedRouter
from mmd_operator.simulate.calibration import Calibration
from mmd_operator.simulate.runs import Planner
from mmd_operator.simulate.traces import GENERATORS, Trace
from mmd_workers.gateway.placement.router import Router
from support.serving.cached import held_by

GPU = {"gpus": 1}
SIZED = {"autoscaling": {"minReplicas": 1, "maxReplicas": 6, "scaleDownStabilizationSeconds": 60}, **GPU}
LAYOUTS: dict[str, dict[str, Any]] = {
    "E-P-D": {"encoder": SIZED, "prefill": SIZED, "decode": SIZED},
    "E-P-D, small media at P": {
        "encoder": SIZED,
        "prefill": {**SIZED, "localEncodeTokens": 10_000},
        "decode": SIZED,
    },
    "EP-D": {"prefill": SIZED, "decode": SIZED},
    "E-PD": {"encoder": SIZED, "decode": SIZED},
    "monolithic": {"decode": SIZED},
}


def spec(**parts: Any) -> MultimodalDeploymentSpec:
    body = {"model": {"id": "builtin/demo"}, "decode": GPU, **parts}
    return MultimodalDeployment.parse(
        {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "m"}, "spec": body}
    ).spec


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GENERATORS)
def test_every_request_is_answered_while_pools_change_size(layout: str, name: str) -> None:
    trace = GENERATORS[name](2.0, 400.0, 3)
    deployment = spec(**LAYOUTS[layout], slo={"ttftMilliseconds": 2000})
    run = Planner(deployment, trace, Calibration.load(None), placing=SimulatedRouter).autoscaler()
    answered = int((~np.isnan(run.result.ttft_seconds)).sum())
    assert answered + sum(run.result.lost.values()) == len(trace)
    assert not run.result.lost
    if name != "diurnal":
        assert run.changes, "pods come and go meanwhile"


def test_the_same_trace_gives_the_same_run() -> None:
    trace = GENERATORS["bursty"](2.0, 200.0, 1)
    runs = [
        Planner(spec(**LAYOUTS["E-P-D"]), trace, Calibration.load(None), placing=SimulatedRouter).autoscaler()
        for _ in range(2)
    ]
    assert np.array_equal(runs[0].result.ttft_seconds, runs[1].result.ttft_seconds, equal_nan=True)


def texts(count: int, tokens: int, every: float) -> Trace:
    none, ones = np.zeros(count, np.int64), np.ones(count, np.int64)
    return Trace(
        "texts",
        np.arange(count) * every,
        dict.fromkeys(("image", "video", "audio"), none),
        ones * tokens,
        ones * 8,
    )


def mean_ttft(
    router: type[Router], trace: Trace, prompts: Any, **sizes: int
) -> tuple[float, SimulatedRouter]:
    made: list[SimulatedRouter] = []

    def placing(*parts: Any) -> SimulatedRouter:
        made.append(SimulatedRouter(*parts, prompts=prompts, router=router))
        return made[-1]

    run = Planner(spec(prefill=GPU), trace, Calibration.load(None), placing=placing).static(sizes)
    assert not run.result.lost
    return float(run.result.ttft_seconds[len(trace) // 2 :].mean()), made[0]


def test_prompts_follow_their_prefix_and_are_answered_sooner() -> None:
    """One pod has room for 80 of them."""
    groups = [[f"{group} {block}".encode() for block in range(250)] for group in range(200)]
    chosen = np.random.default_rng(1).integers(0, len(groups), 1600).tolist()

    def prompts(request: int) -> SimulatedPrompt:
        return SimulatedPrompt(groups[chosen[request]])

    trace = texts(len(chosen), 4096, 0.04)
    sizes = {"prefill": 8, "decode": 4}
    routed, made = mean_ttft(Router, trace, prompts, **sizes)
    in_turns, _ = mean_ttft(RoundRobin, trace, prompts, **sizes)
    assert routed < 0.6 * in_turns
    holders = [
        sum(bool(held_by(made.router.index, f"prefill-{n}", blocks[:1])) for n in range(8))
        for blocks in groups
    ]
    assert max(holders) < 8, "a prefix is not everywhere"


def test_departed_pods_leave_neither_index_entries_nor_caches() -> None:
    """A second half without requests lets the pools shrink again."""
    trace = texts(600, 4096, 0.05)
    last = texts(20, 64, 60.0)
    at = np.concatenate([trace.arrivals, trace.arrivals[-1] + 60.0 + last.arrivals])
    joined = Trace(
        "texts",
        at,
        {kind: np.concatenate([trace.media[kind], last.media[kind]]) for kind in trace.media},
        np.concatenate([trace.context_tokens, last.context_tokens]),
        np.concatenate([trace.output_tokens, last.output_tokens]),
    )
    made: list[SimulatedRouter] = []
    most = 0

    class Watched(SimulatedRouter):
        def place(self, now: float, request: int, telemetry: Any) -> Any:
            nonlocal most
            placed = super().place(now, request, telemetry)
            most = max(most, len(self.router.index.pods))
            return placed

    def placing(*parts: Any) -> SimulatedRouter:
        made.append(Watched(*parts, prompts=lambda n: SimulatedPrompt([b"%d %d" % (n, b) for b in range(4)])))
        return made[-1]

    deployment = spec(prefill=SIZED, slo={"ttftMilliseconds": 2000})
    run = Planner(deployment, joined, Calibration.load(None), placing=placing).autoscaler()
    assert not run.result.lost
    ready = {beat.pod for beat in made[0].beats}
    assert most > len(ready & set(made[0].router.index.pods)) > 0, "pools have grown and shrunk"
    assert set(made[0].router.index.pods) <= ready
    assert made[0]._caches.keys() <= ready


def test_the_router_learns_what_a_request_takes_besides_what_pods_report() -> None:
    """Calibration has an overhead for each request, which no load shows."""
    trace = texts(600, 1024, 0.2)
    overhead = Calibration.load(None).prefill.model_copy(update={"overhead_seconds": 0.05})
    made: list[SimulatedRouter] = []

    def placing(*parts: Any) -> SimulatedRouter:
        made.append(SimulatedRouter(*parts))
        return made[-1]

    calibration = Calibration.load(None).model_copy(update={"prefill": overhead})
    Planner(spec(prefill=GPU), trace, calibration, placing=placing).static({"prefill": 2, "decode": 2})
    factors = made[0].router.model.factors
    estimate = factors.overhead + factors.prefill * 1024 / calibration.prefill.tokens_per_second
    assert estimate == pytest.approx(0.05 + 1024 / calibration.prefill.tokens_per_second, rel=0.1)


def test_pods_that_are_as_loaded_as_others_get_as_many_requests() -> None:
    trace = texts(400, 2048, 0.05)
    routed, _ = mean_ttft(Router, trace, lambda _: SimulatedPrompt(), prefill=4, decode=4)
    least, _ = mean_ttft(LeastLoaded, trace, lambda _: SimulatedPrompt(), prefill=4, decode=4)
    assert routed <= 1.1 * least


def test_prefill_pods_encode_small_media_when_encoders_are_overloaded() -> None:
    count = 400
    none, one = np.zeros(count, np.int64), np.ones(count, np.int64)
    media = {"image": one, "video": none, "audio": none}
    trace = Trace("images", np.arange(count) * 0.05, media, 600 * one, 8 * one)
    slow = Calibration.load(None).encoder.model_copy(
        update={"work_per_second": {"image": 16_000.0, "video": 1.0, "audio": 1.0}}
    )
    calibration = Calibration.load(None).model_copy(update={"encoder": slow})

    def mean(limit: int) -> float:
        deployment = spec(encoder=GPU, prefill={**GPU, "localEncodeTokens": limit})
        planner = Planner(deployment, trace, calibration, placing=SimulatedRouter)
        return float(planner.static({"encoder": 1, "prefill": 4, "decode": 4}).result.ttft_seconds.mean())

    sent, shared = mean(0), mean(10_000)
    assert shared < 0.5 * sent


def test_the_command_places_every_request_with_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[int] = []
    place = SimulatedRouter.place

    def counted(self: SimulatedRouter, now: float, request: int, telemetry: Any) -> Any:
        placed.append(request)
        return place(self, now, request, telemetry)

    monkeypatch.setattr(SimulatedRouter, "place", counted)
    file = str(Path(__file__).parents[2] / "examples" / "gpu.yaml")
    options = ["--generate", "bursty", "--rate", "1", "--seconds", "120", "--json"]
    result = CliRunner().invoke(build().app, ["simulate", "-f", file, *options])
    assert sorted(placed) == list(range(json.loads(result.stdout)["runs"][0]["requests"]))
