"""Workers killed, stopped and drained under load, a gateway killed, a message bus that dies, clients that leave: no request is lost but
those of the killed gateway, no answer differs from `generate`, and nothing stays held afterwards.
"""

from __future__ import annotations

import base64
import io
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from mmd_cli.local import supervisor
from mmd_cli.samples import Sample, draw
from support.harness.promises import promise, promised
from support.harness.waiting import wait_until
from support.oracles import oracle
from support.serving.engines import ENGINES
from support.serving.held import WORKERS, assert_nothing_held, held, load_of, scrape, workers
from support.serving.local_deployment import Deployment, content, write

from .redundant import (
    DEMO,
    LONG_TOKENS,
    MODEL,
    SPEC,
    TOKENS,
    ask,
    at_work,
    busy,
    expected,
    load,
    samples,
    send,
    stream_long,
    text_of,
)

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("faults"), pytest.mark.timeout(600)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """vLLM's pods take longer to start again: it meets one fault of each kind."""
    engines = ENGINES if hasattr(metafunc.function, "both_engines") else ENGINES[:1]
    metafunc.parametrize("engine", engines, scope="module", indirect=True)


def both_engines(test: Any) -> Any:
    """Run a test with each engine."""
    test.both_engines = True
    return test


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> str:
    """The engine of prefill and decode workers."""
    return str(request.param)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Iterator[Deployment]:
    """Two workers of each kind."""
    file = tmp_path_factory.mktemp("faults") / "faults.yaml"
    with Deployment(write(file, {"engine": {"type": engine}, **SPEC}, name="faults")) as running:
        yield running


@pytest.fixture
def whole(deployment: Deployment) -> Iterator[Deployment]:
    """Every pod is routable before the test, and afterwards nothing is held for a request that is over."""
    restore(deployment)
    deployment.lines.clear()
    yield deployment
    restore(deployment)
    assert_nothing_held(deployment)


def restore(deployment: Deployment) -> None:
    for pod in workers(deployment):
        deployment.wait_ready(pod)


# --- what is asked -------------------------------------------------------------------------------------------------------


# --- what is held --------------------------------------------------------------------------------------------------------


RULES = {"frequency_penalty": 0.6, "presence_penalty": 0.4, "logit_bias": {"352": -100}}

# --- killed --------------------------------------------------------------------------------------------------------------


@both_engines
def test_an_encoder_killed_while_it_encodes_costs_no_request(whole: Deployment) -> None:
    with load(whole, 18, 1):
        whole.kill(busy(whole, "encoder", "encode_running"))


@both_engines
def test_a_prefill_worker_killed_with_requests_in_flight_loses_none(whole: Deployment) -> None:
    with load(whole, 18, 2):
        whole.kill(busy(whole, "prefill", "prefill_waiting_requests"))


def test_requests_wait_for_the_restart_of_the_only_prefill_workers(whole: Deployment) -> None:
    with load(whole, 9, 3):
        busy(whole, "prefill", "prefill_waiting_requests")
        for pod in whole.pods("prefill"):
            whole.kill(pod)


@both_engines
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 1.2, "seed": 7}, {"temperature": 1.2, "seed": 7, **RULES}],
    ids=["greedy", "seeded", "ruled"],
)
def test_a_stream_continues_when_its_decode_worker_is_killed(
    whole: Deployment, sampling: dict[str, Any]
) -> None:
    sample = draw("image", 4001)
    undisturbed = "".join(text_of(chunk) for chunk in stream_long(whole, sample, **sampling))
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(busy, whole, "decode", "decode_running")
        pieces = map(text_of, stream_long(whole, sample, **sampling))
        text = next(filter(None, pieces))
        pod = found.result()
    send(whole, pod, signal.SIGSTOP)
    whole.kill(pod)
    assert len(text) < len(undisturbed)
    with promised("the stream goes on"):
        text += "".join(pieces)
    promise(text == undisturbed, f"a repeated, missing or wrong token: {text!r}, not {undisturbed!r}")
    if "logit_bias" in sampling:
        without = {name: value for name, value in sampling.items() if name not in RULES}
        assert undisturbed != "".join(text_of(chunk) for chunk in stream_long(whole, sample, **without))
    if sampling["temperature"] == 0:
        question: oracle.Question = [("image", sample.bytes), sample.question]
        assert undisturbed == oracle.answer(DEMO, question, LONG_TOKENS, ignore_eos=True)


def test_a_killed_gateway_costs_only_its_own_requests(whole: Deployment) -> None:
    killed, other = whole.pods("gateway")
    sample = draw("image", 4002)
    lost = iter(stream_long(whole, sample, gateway=killed, temperature=0))
    kept = iter(stream_long(whole, sample, gateway=other, temperature=0))
    for stream in (lost, kept):
        next(stream)
    whole.crash_gateway(killed)
    with pytest.raises((openai.APIConnectionError, httpx.TransportError)):
        list(lost)
    with promised("the stream of the other gateway goes on"):
        text = "".join(text_of(chunk) for chunk in kept)
    again = "".join(text_of(chunk) for chunk in stream_long(whole, sample, gateway=killed, temperature=0))
    question: oracle.Question = [("image", sample.bytes), sample.question]
    assert again == oracle.answer(DEMO, question, LONG_TOKENS, ignore_eos=True)
    assert text
    assert again.endswith(text)


# --- drained -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("component", "figure", "seed", "tokens"),
    [
        ("encoder", "encode_running", 5, TOKENS),
        ("prefill", "prefill_waiting_requests", 6, TOKENS),
        ("decode", "decode_running", 7, LONG_TOKENS // 3),
    ],
)
def test_a_drained_worker_finishes_or_hands_over_what_it_has(
    whole: Deployment, component: str, figure: str, seed: int, tokens: int
) -> None:
    with load(whole, 15, seed, tokens) as under_way:
        pod = busy(whole, component, figure)
        whole.terminate(pod)
        under_way.enough()
        wait_until(
            lambda: bool(
                [1 for name, line in whole.lines if name == pod.name and "exited with code" in line]
            ),
            "the pod has left",
        )
    assert [line for name, line in whole.lines if name == pod.name and "exited with code 0" in line]


# --- the bus -------------------------------------------------------------------------------------------------------------


@both_engines
def test_requests_finish_although_the_message_server_is_killed(whole: Deployment) -> None:
    with load(whole, 15, 8) as under_way:
        busy(whole, "prefill", "prefill_waiting_requests")
        whole.restart_nats()  # while every asker goes on
        under_way.enough()


# --- clients -------------------------------------------------------------------------------------------------------------


@both_engines
def test_clients_that_leave_at_any_moment_leave_nothing_behind(whole: Deployment) -> None:
    def leave_after(sample: Sample, seconds: float) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content(sample)}],
            "max_tokens": LONG_TOKENS,
            "ignore_eos": True,
        }
        with suppress(httpx.TimeoutException):
            httpx.post(
                f"{whole.gateway_url}/v1/chat/completions",
                json=body,
                timeout=httpx.Timeout(30, read=seconds),
            )

    leaving = samples(24, 9)
    with load(whole, 4, 10), ThreadPoolExecutor(len(leaving)) as threads:
        list(
            threads.map(
                lambda numbered: leave_after(numbered[1], 0.05 + 0.05 * numbered[0]), enumerate(leaving)
            )
        )
    # Sooner than a lease would end.
    wait_until(
        lambda: not held(whole),
        lambda: f"nothing is held for clients that are gone: {held(whole)}",
        seconds=30,
    )


# --- poison --------------------------------------------------------------------------------------------------------------


def test_poison_is_rejected_with_its_reason_and_affects_no_other_request(whole: Deployment) -> None:
    video = draw("video", 11_000)
    bomb = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(bomb, "PNG")
    poison = [
        ("video", "video/mp4", video.bytes[: len(video.bytes) * 2 // 3]),
        ("image", "image/png", bomb.getvalue()),
        ("image", "image/png", draw("image", 11_001, "image/png").bytes[:-40]),
    ]

    def refused(kind: str, mime: str, data: bytes) -> openai.APIStatusError:
        url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
        parts: Any = [
            {"type": f"{kind}_url", f"{kind}_url": {"url": url}},
            {"type": "text", "text": "What is it?"},
        ]
        with pytest.raises(openai.APIStatusError) as error:
            whole.client().chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=4
            )
        return error.value

    with load(whole, 6, 11):
        errors = [refused(*one) for one in poison]
    assert [400 <= error.status_code < 500 for error in errors] == [True] * 3, errors
    assert all(len(error.message) > 20 for error in errors)


# --- stopped -------------------------------------------------------------------------------------------------------------


def test_the_jobs_of_a_hung_encoder_go_to_another(whole: Deployment) -> None:
    with load(whole, 12, 12) as under_way:
        pod = busy(whole, "encoder", "encode_running")
        send(whole, pod, signal.SIGSTOP)
        try:
            under_way.enough()
            with promised("the other encoder has done it all"):
                wait_until(lambda: under_way.answered)
        finally:
            send(whole, pod, signal.SIGCONT)


@both_engines
def test_decoders_free_the_leases_of_a_hung_prefill_worker(whole: Deployment) -> None:
    def reserved() -> bool:
        return any(load_of(whole, pod).get("kv_blocks_reserved") for pod in whole.pods("decode"))

    with load(whole, 18, 13) as under_way:
        # Requests reach prefill one after another, so the moment for both is looked for, not waited for in turn.
        wait_until(
            lambda: reserved() and bool(at_work(whole, "prefill", "prefill_waiting_requests")),
            "a prefill worker is busy while blocks are reserved for a handover",
        )
        pod = (at_work(whole, "prefill", "prefill_waiting_requests") or whole.pods("prefill"))[0]
        send(whole, pod, signal.SIGSTOP)
        try:
            under_way.enough()
            with promised("the other prefill worker has done it all"):
                wait_until(lambda: under_way.answered)
            # Sooner than a lease would end.
            wait_until(lambda: not reserved(), "no lease outlives its owner's heartbeats", seconds=30)
        finally:
            send(whole, pod, signal.SIGCONT)


# --- everything at once --------------------------------------------------------------------------------------------------


def test_a_hundred_requests_outlive_a_worker_killed_every_second(
    whole: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STABLE_SECONDS", 0.0)  # else they would be restarted ever later
    rng = random.Random(20)
    asked: list[Sample] = []
    texts: list[str] = []
    over = threading.Event()
    kills: list[str] = []
    # Kills in a row before the pod was Ready: after a few of them the supervisor gives it up.
    early: Counter[str] = Counter()

    def kill_at_random() -> None:
        end = time.monotonic() + 40
        while time.monotonic() < end and not over.wait(1.0):
            for pod in workers(whole):
                if whole.local.supervisor.children[pod.name].ready:
                    early[pod.name] = 0
            running = [pod for pod in workers(whole) if whole.pid(pod) is not None and early[pod.name] < 2]
            if running and whole.kill_if_running(pod := rng.choice(running)):
                early[pod.name] += 1
                kills.append(pod.name)

    with ThreadPoolExecutor(12) as threads, ThreadPoolExecutor(1) as killer:
        killing = killer.submit(kill_at_random)
        try:
            # A fast machine answers many between two kills.
            while len(asked) < 100 or not (len(kills) >= 10 or killing.done()):
                wave = samples(50, 20 + len(asked))
                with promised("every question has an answer"):
                    texts += threads.map(lambda sample: ask(whole, sample), wave)
                asked += wave
        finally:
            over.set()
            killing.result()
    assert len(kills) >= 10
    assert texts == [expected(sample) for sample in asked]


# --- what is measured ----------------------------------------------------------------------------------------------------


def test_pods_measure_what_they_do(whole: Deployment) -> None:
    with load(whole, 6, 30):
        pass
    pods = {component: [scrape(pod.admin_url) for pod in whole.pods(component)] for component in WORKERS}

    def total(component: str, name: str, label: str = "") -> float:
        return sum(metrics[name][label] for metrics in pods[component])

    for component in WORKERS:
        assert total(component, "mmd_model_loaded_bytes") > 0
        assert all("mmd_build_info" in metrics for metrics in pods[component])
    assert total("encoder", "mmd_encode_jobs_total", "ok") > 0
    assert total("encoder", "mmd_encode_busy_seconds_total") > 0
    assert total("encoder", "mmd_cache_used_bytes") > 0
    assert total("encoder", "mmd_transfer_bytes_total", "sent") > 0
    assert total("prefill", "mmd_transfer_bytes_total", "received") > 0
    assert total("prefill", "mmd_transfer_seconds_count", "embedding") > 0
    assert total("prefill", "mmd_feature_budget_bytes") > 0
    assert total("prefill", "mmd_feature_used_bytes", "prefilled") > 0
    assert total("prefill", "mmd_prefill_tokens_total") > 0
    assert total("prefill", "mmd_phase_seconds_count", "video") > 0
    assert total("decode", "mmd_phase_seconds_count", "video") > 0
    assert total("decode", "mmd_transfer_seconds_count", "kv") > 0
    for component in ("prefill", "decode"):
        assert total(component, "mmd_step_seconds_count") > 0
        assert total(component, "mmd_step_sequences_count") > 0
        assert {"free", "used", "reserved"} <= set(pods[component][0]["mmd_kv_blocks"])
        assert {"waiting", "running", "held", "reserved"} <= set(pods[component][0]["mmd_sequences"])
