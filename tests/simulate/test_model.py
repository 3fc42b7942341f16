"""The model of the pipeline against what is known without it: queueing theory, conservation, bounds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmd_api.contract.steps import StepBound
from mmd_api.resource import API_VERSION, KIND, MultimodalDeployment
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.simulate.calibration import Calibration
from mmd_operator.simulate.model import Pipeline
from mmd_operator.simulate.policies import Static
from mmd_operator.simulate.results import RunResult
from mmd_operator.simulate.runs import Planner
from mmd_operator.simulate.traces import GENERATORS, Trace

GPU = {"gpus": 1}
SIZED = {"autoscaling": {"minReplicas": 1, "maxReplicas": 6, "scaleDownStabilizationSeconds": 60}, **GPU}


def spec(**parts: Any) -> MultimodalDeploymentSpec:
    body = {"model": {"id": "builtin/demo"}, "decode": GPU, **parts}
    return MultimodalDeployment.parse(
        {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "m"}, "spec": body}
    ).spec


def numbers(**changes: Any) -> Calibration:
    """Media and decoding cost next to nothing unless a test says otherwise."""
    return Calibration.load(None).model_copy(update=changes)


def one_video_each(arrivals: np.ndarray) -> Trace:
    count = len(arrivals)
    none, ones = np.zeros(count, np.int64), np.ones(count, np.int64)
    return Trace("videos", arrivals, {"image": none, "video": ones, "audio": none}, ones * 16, ones)


def static(
    deployment: MultimodalDeploymentSpec, trace: Trace, calibration: Calibration, **sizes: int
) -> RunResult:
    return Pipeline(deployment, trace, calibration, Static(), 2.0, sizes).run()  # type: ignore[arg-type]


def test_waiting_before_one_encoder_is_that_of_an_md1_queue():
    """Poisson arrivals, a fixed service time: the mean wait is rho * s / (2 * (1 - rho)) (Pollaczek and Khinchine)."""
    rng = np.random.default_rng(1)
    service, load, count = 0.1, 0.7, 40_000
    arrivals = np.cumsum(rng.exponential(service / load, count))
    arrivals -= arrivals[0]
    calibration = Calibration.load(None)
    encoder = calibration.encoder.model_copy(
        update={
            "overhead_seconds": {"image": 0.0, "video": 0.0, "audio": 0.0},
            "work_per_second": {"image": 1.0, "video": 10.0, "audio": 1.0},
        }
    )
    calibration = numbers(encoder=encoder, media={"image": 1.0, "video": 1.0, "audio": 1.0})
    result = static(
        spec(encoder=GPU, prefill=GPU), one_video_each(arrivals), calibration, encoder=1, prefill=8, decode=8
    )
    waited = result.waited_seconds["encoder"] / count
    assert waited == pytest.approx(load * service / (2 * (1 - load)), rel=0.1)


def test_a_request_alone_takes_the_sum_of_its_phases():
    calibration = Calibration.load(None)
    result = static(spec(encoder=GPU, prefill=GPU), one_video_each(np.array([0.0])), calibration)
    encode = (
        calibration.encoder.overhead_seconds["video"]
        + calibration.media["video"] / calibration.encoder.work_per_second["video"]
    )
    prefill = calibration.prefill.overhead_seconds + 16 / calibration.prefill.tokens_per_second
    least = encode + prefill
    assert least <= result.ttft_seconds[0] <= least + 0.1


@pytest.mark.parametrize(
    ("images", "milliseconds", "step_seconds"),
    [
        pytest.param(1, 200, 0.2, id="the bound"),
        pytest.param(1, 5_000, 1.0, id="a chunk is shorter"),
        pytest.param(1, 5, 0.125, id="an eighth of a chunk"),
        pytest.param(0, 200, 1.0, id="text"),
    ],
)
def test_decoding_goes_on_beside_long_prompts_in_chunks_or_bounded_steps(
    images: int, milliseconds: int, step_seconds: float
):
    calibration = Calibration.load(None)
    prefill = calibration.prefill.model_copy(update={"tokens_per_second": 512.0})
    none = np.zeros(2, np.int64)
    media = {"image": np.array([0, images]), "video": none, "audio": none}
    trace = Trace("texts", np.array([0.0, 0.06]), media, np.array([16, 25_600]), np.array([40, 1]))
    result = static(
        spec(engine={"stepMilliseconds": milliseconds}), trace, numbers(prefill=prefill), decode=1
    )
    assert result.itl_seconds[0] == pytest.approx(step_seconds, rel=0.3)


def test_a_media_prompt_pays_the_fixed_cost_of_each_bounded_step():
    calibration = Calibration.load(None)
    prefill = calibration.prefill.model_copy(update={"tokens_per_second": 512.0})
    decode = calibration.decode.model_copy(
        update={"step_seconds": 0.04, "step_seconds_per_sequence": 0.01, "kv_blocks": 100_000}
    )
    none = np.zeros(2, np.int64)
    seconds = []
    for images in (0, 1):
        media = {"image": np.array([0, images]), "video": none, "audio": none}
        trace = Trace("texts", np.array([0.0, 0.06]), media, np.array([16, 25_600]), np.array([999, 1]))
        deployment = spec(engine={"stepMilliseconds": 200})
        result = static(deployment, trace, numbers(prefill=prefill, decode=decode), decode=1)
        seconds.append(result.ttft_seconds[1])
    tokens = StepBound.of_chunks(0.2, 512).tokens(0.05, 1 / 512)
    assert tokens == 128
    assert seconds[1] - seconds[0] == pytest.approx((25_600 / tokens - 25_600 / 512) * 0.05, abs=0.2)


@pytest.mark.parametrize(("percent", "of_text"), [(None, 1.0), (80, 0.8), (50, 0.5), (20, 0.2)])
def test_texts_and_media_that_wait_for_prefill_have_their_share_of_it(percent: int | None, of_text: float):
    """All texts come before all images: without a share they are served so."""
    count, tokens = 400, 100
    with_media = np.arange(count) >= count // 2
    none = np.zeros(count, np.int64)
    media = {"image": with_media.astype(np.int64), "video": none, "audio": none}
    trace = Trace("mixed", np.arange(count) * 1e-5, media, none + tokens, none + 1)
    prefill = Calibration.load(None).prefill.model_copy(
        update={"tokens_per_second": 1000.0, "overhead_seconds": 0.0}
    )
    engine = {} if percent is None else {"textSharePercent": percent}
    deployment = spec(encoder=GPU, prefill=GPU, engine=engine)
    encoder = Calibration.load(None).encoder.model_copy(
        update={"overhead_seconds": dict.fromkeys(("image", "video", "audio"), 0.0)}
    )
    calibration = numbers(
        prefill=prefill, encoder=encoder, media=dict.fromkeys(("image", "video", "audio"), 1e-9)
    )
    result = static(deployment, trace, calibration, encoder=1, prefill=1, decode=8)
    ends = trace.arrivals + result.ttft_seconds
    early = np.argsort(ends)[2 : count // 2]  # while both wait
    assert not np.isnan(ends).any()
    assert (~with_media[early]).mean() == pytest.approx(of_text, abs=0.02)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_request_is_answered_or_lost_and_bounds_and_budget_hold(name: str):
    deployment = spec(encoder=SIZED, prefill=SIZED, decode=SIZED, gpuBudget=9, slo={"ttftMilliseconds": 2000})
    trace = GENERATORS[name](2.0, 900.0, 3)
    result = Planner(deployment, trace, Calibration.load(None)).autoscaler().result
    answered = int((~np.isnan(result.ttft_seconds)).sum())
    assert answered + sum(result.lost.values()) == len(trace)
    assert not result.lost
    assert (result.ttft_seconds[~np.isnan(result.ttft_seconds)] > 0).all()
    for sizes in result.replicas.values():
        assert sizes.min() >= 1
        assert sizes.max() <= 6
    assert sum(result.replicas.values()).max() <= 9


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    deployment = spec(encoder=SIZED, prefill=SIZED)

    def run(seed: int) -> np.ndarray:
        trace = GENERATORS["bursty"](2.0, 300.0, seed)
        return Planner(deployment, trace, Calibration.load(None)).autoscaler().result.ttft_seconds

    assert np.array_equal(run(1), run(1), equal_nan=True)
    assert not np.array_equal(run(1)[:50], run(2)[:50], equal_nan=True)


def test_encoders_follow_a_video_storm_and_explain_their_decisions():
    deployment = spec(encoder=SIZED, prefill=SIZED, decode=GPU, slo={"ttftMilliseconds": 2000})
    run = Planner(deployment, GENERATORS["video-storm"](2.0, 1800.0, 5), Calibration.load(None)).autoscaler()
    ticks, sizes = run.result.ticks, run.result.replicas["encoder"]
    storm = (ticks > 600) & (ticks < 1200)
    assert sizes[storm].max() >= 2
    assert sizes[storm].mean() > sizes[ticks < 600].mean()
    assert sizes[-1] == 1
    assert any("encoder scales from" in change and "backlog is" in change for change in run.changes)


def test_more_replicas_never_make_the_waiting_longer():
    deployment, trace = spec(encoder=GPU, prefill=GPU), GENERATORS["bursty"](1.0, 600.0, 2)
    waits = [
        static(deployment, trace, Calibration.load(None), encoder=n, prefill=4, decode=4).waited_seconds[
            "encoder"
        ]
        for n in (1, 2, 4)
    ]
    assert waits[0] > waits[1] >= waits[2]


def test_a_recommended_split_keeps_the_slo_and_one_replica_less_does_not():
    deployment = spec(encoder=GPU, prefill=GPU, decode=GPU, slo={"ttftMilliseconds": 1500})
    trace = GENERATORS["diurnal"](1.5, 900.0, 4)
    planner = Planner(deployment, trace, Calibration.load(None))
    best = planner.static_split(0.95)
    assert best.attainment >= 0.95
    assert best.sizes is not None
    for pool, size in best.sizes.items():
        if size > 1:
            assert planner.static({**best.sizes, pool: size - 1}).attainment < 0.95


def test_requests_wait_for_an_encoder_that_wakes_from_zero():
    zero = {"gpus": 1, "autoscaling": {"minReplicas": 0, "maxReplicas": 2, "scaleToZeroAfterSeconds": 30}}
    calibration = Calibration.load(None)
    trace = one_video_each(np.array([0.0, 400.0]))
    result = Planner(spec(encoder=zero, prefill=GPU), trace, calibration).autoscaler().result
    assert not result.lost
    assert result.replicas["encoder"].min() == 0
    wake = calibration.encoder.start_seconds
    assert wake < result.ttft_seconds[1] < wake + 10
    assert math.isfinite(result.ttft_seconds[0])


def test_a_calibration_file_with_faults_names_each(tmp_path: Path):
    from mmd_api.faults import InvalidDeploymentError

    file = tmp_path / "bad.yaml"
    file.write_text("encoder: {startSeconds: -1}\n")
    with pytest.raises(InvalidDeploymentError) as refused:
        Calibration.load(file)
    assert {"encoder.startSeconds", "prefill"} <= {fault.field for fault in refused.value.faults}


def test_requests_on_shared_cores_slow_one_another_and_vary():
    trace = one_video_each(np.array([0.0, 0.001]))
    alone, shared = (
        static(
            spec(encoder=GPU, prefill=GPU), trace, numbers(contention=c), encoder=2, prefill=2
        ).ttft_seconds
        for c in (0.0, 0.5)
    )
    assert shared[0] == pytest.approx(alone[0])
    assert shared[1] == pytest.approx(1.5 * alone[1], rel=0.01)
    many = one_video_each(np.arange(400) * 100.0)
    spread = static(
        spec(encoder=GPU, prefill=GPU), many, numbers(spread={"video": [0.5, 2.0], "text": [9.0]})
    )
    factors = spread.ttft_seconds / alone[0]
    assert set(factors.round(2)) == {0.5, 2.0}
    assert np.mean(factors > 1) == pytest.approx(0.5, abs=0.1)


def test_an_encoder_reads_media_in_parallel_and_encodes_them_serially():
    """Four videos at once: read together in one second, then a second each in the tower."""
    read, tower = {"image": 0.0, "video": 1.0, "audio": 0.0}, {"image": 1.0, "video": 1.0, "audio": 1.0}
    base = Calibration.load(None)
    encoder = base.encoder.model_copy(
        update={"overhead_seconds": read, "work_per_second": tower, "media_at_once": 4}
    )
    one_each = numbers(encoder=encoder, media=tower)
    result = static(spec(encoder=GPU, prefill=GPU), one_video_each(np.zeros(4)), one_each, prefill=4)
    assert np.diff(result.ttft_seconds) == pytest.approx([1.0, 1.0, 1.0], abs=0.01)
    assert result.ttft_seconds[0] == pytest.approx(2.0, abs=0.1)
