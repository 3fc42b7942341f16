"""Workers killed, stopped and drained under load, a message bus that dies, clients that leave: no request is lost, no answer differs
from `generate`, and nothing stays held afterwards.
"""

from __future__ import annotations

import base64
import io
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import openai
import oracle
import pytest
from local_deployment import Deployment, content, until, write
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from mmd_workers.local.pods import LocalPod
from mmd_workers.local.samples import KINDS, Sample, draw

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("faults"), pytest.mark.timeout(600)]

DEMO = Path(str(resources.files("mmd_workers.model") / "demo"))
MODEL = "builtin/demo"
TOKENS = 16
LONG_TOKENS = 600
RESTORE_SECONDS = 180.0
CPU = {"replicas": 2, "gpus": 0}
SPEC = {
    "model": {"id": MODEL, "dtype": "Float32"},
    "encoder": {**CPU, "cacheMebibytes": 16},
    "prefill": {**CPU, "kvCacheMebibytes": 64, "featureBudgetMebibytes": 64, "chunkTokens": 64},
    "decode": {**CPU, "kvCacheMebibytes": 64, "maxSequences": 32},
    "transfer": {"kv": {"backend": "Gloo"}},
    "gateway": {"maxRetries": 20},  # where a worker dies every second, one request may meet more than a few
}
WORKERS = ("encoder", "prefill", "decode")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two workers of each kind."""
    with Deployment(write(tmp_path_factory.mktemp("faults") / "faults.yaml", SPEC, name="faults")) as running:
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
        deployment.wait_ready(pod, RESTORE_SECONDS)


def workers(deployment: Deployment) -> list[LocalPod]:
    return [pod for component in WORKERS for pod in deployment.pods(component)]


# --- what is asked -------------------------------------------------------------------------------------------------------


def ask(deployment: Deployment, sample: Sample, tokens: int = TOKENS) -> str:
    answer = (
        deployment.client()
        .with_options(timeout=400)
        .chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": content(sample)}],  # type: ignore[typeddict-item]
            temperature=0,
            max_tokens=tokens,
            extra_body={"ignore_eos": tokens > TOKENS},
        )
    )
    return str(answer.choices[0].message.content)


def stream_long(deployment: Deployment, sample: Sample, **options: Any) -> Any:
    return (
        deployment.client()
        .with_options(timeout=400)
        .chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": content(sample)}],  # type: ignore[typeddict-item]
            max_tokens=LONG_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
            **options,
        )
    )


def text_of(chunk: Any) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)


def expected(sample: Sample, tokens: int = TOKENS) -> str:
    question: oracle.Question = [(sample.kind, sample.bytes), sample.question]
    return oracle.answer(DEMO, question, tokens, ignore_eos=tokens > TOKENS)


def samples(count: int, seed: int) -> list[Sample]:
    return [draw(KINDS[number % 3], 1000 * seed + number) for number in range(count)]


class Load:
    """Askers side by side, each with one question after the other until `enough`: workers are at work whenever one looks."""

    def __init__(self, deployment: Deployment, askers: int, seed: int, tokens: int) -> None:
        self._deployment, self._askers, self._seed, self._tokens = deployment, askers, seed, tokens
        self._over = threading.Event()
        self._asked: dict[int, tuple[Sample, str]] = {}
        self._threads = ThreadPoolExecutor(askers)
        self._askings = [self._threads.submit(self._ask, number) for number in range(askers)]

    def _ask(self, number: int) -> None:
        while True:
            sample = draw(KINDS[number % 3], 1000 * self._seed + number)
            self._asked[number] = sample, ask(self._deployment, sample, self._tokens)
            number += self._askers + 1  # another kind the next time
            if self._over.is_set():
                return

    @property
    def answered(self) -> bool:
        """Whether nothing is under way any more."""
        return all(asking.done() for asking in self._askings)

    def enough(self) -> None:
        """Ask nothing more."""
        self._over.set()

    def check(self) -> None:
        """Every question has the answer of `generate`."""
        self.enough()
        for asking in self._askings:
            asking.result()
        self._threads.shutdown()
        for sample, text in self._asked.values():
            assert text == expected(sample, self._tokens)


@contextmanager
def load(deployment: Deployment, askers: int, seed: int, tokens: int = TOKENS) -> Iterator[Load]:
    under_way = Load(deployment, askers, seed, tokens)
    try:
        yield under_way
    finally:
        under_way.enough()
    under_way.check()


# --- what is held --------------------------------------------------------------------------------------------------------


def load_of(deployment: Deployment, pod: LocalPod) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = deployment.state(pod)["load"]
    except httpx.HTTPError:
        return {}
    return facts


def scrape(url: str) -> dict[str, dict[str, float]]:
    """Metric name → sums by each value of each label; "" has the sum of all."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=10).text):
        for sample in family.samples:
            for value in ("", *sample.labels.values()):
                found[sample.name][value] += sample.value
    return found


def held(deployment: Deployment) -> list[str]:
    """What a pod or the gateway still keeps for a request."""
    found = []
    for pod in workers(deployment):
        facts = load_of(deployment, pod)
        free = facts["kv_blocks_free"] == facts["kv_blocks_total"]
        names = (
            "decode_running",
            "decode_waiting",
            "prefill_waiting_requests",
            "kv_blocks_reserved",
            "encode_running",
        )
        found += [f"{pod.name} {name}={facts[name]}" for name in names if facts[name]]
        found += (
            []
            if free
            else [f"{pod.name} {facts['kv_blocks_free']} of {facts['kv_blocks_total']} blocks free"]
        )
        states = scrape(pod.http_url)["mmd_feature_used_bytes"]
        found += [
            f"{pod.name} {states[state]:.0f} bytes {state}"
            for state in ("registered", "encoding", "encoded", "merged")
            if states[state]
        ]
    gateway = scrape(deployment.local.gateway_url)
    for name in ("mmd_gateway_sequences", "mmd_gateway_media_items", "mmd_media_held_bytes"):
        found += [f"gateway {name}={gateway[name]['']:.0f}"] if gateway[name][""] else []
    return found


def assert_nothing_held(deployment: Deployment) -> None:
    # Longer than a lease: a word that got lost with a message server costs its blocks until then.
    until(lambda: not held(deployment), 75, f"nothing is held: {held(deployment)}")


def at_work(deployment: Deployment, component: str, figure: str) -> list[LocalPod]:
    return [pod for pod in deployment.pods(component) if load_of(deployment, pod).get(figure)]


def busy(deployment: Deployment, component: str, figure: str, seconds: float = 30.0) -> LocalPod:
    """The first pod of a component that reports to be at work."""
    found: list[LocalPod] = []

    def look() -> bool:
        found[:] = at_work(deployment, component, figure)
        return bool(found)

    until(look, seconds, f"a pod of {component} has {figure}")
    return found[0]


def send(deployment: Deployment, pod: LocalPod, number: signal.Signals) -> None:
    pid = deployment.pid(pod)
    assert pid is not None
    os.kill(pid, number)


# --- killed --------------------------------------------------------------------------------------------------------------


def test_an_encoder_killed_while_it_encodes_costs_no_request(whole: Deployment) -> None:
    with load(whole, 18, 1):
        whole.kill(busy(whole, "encoder", "encode_running"))


def test_a_prefill_worker_killed_with_requests_in_hand_costs_none(whole: Deployment) -> None:
    with load(whole, 18, 2):
        whole.kill(busy(whole, "prefill", "prefill_waiting_requests"))


def test_requests_wait_for_the_restart_of_the_only_prefill_workers(whole: Deployment) -> None:
    with load(whole, 9, 3):
        busy(whole, "prefill", "prefill_waiting_requests")
        for pod in whole.pods("prefill"):
            whole.kill(pod)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.2, "seed": 7}], ids=["greedy", "seeded"]
)
def test_a_stream_goes_on_when_its_decode_worker_is_killed(
    whole: Deployment, sampling: dict[str, Any]
) -> None:
    sample = draw("image", 4001)
    undisturbed = "".join(text_of(chunk) for chunk in stream_long(whole, sample, **sampling))
    stream = iter(stream_long(whole, sample, **sampling))
    text = "".join(text_of(next(stream)) for _ in range(20))
    whole.kill(busy(whole, "decode", "decode_running"))
    assert len(text) < len(undisturbed)
    assert text + "".join(text_of(chunk) for chunk in stream) == undisturbed
    if sampling["temperature"] == 0:
        question: oracle.Question = [("image", sample.bytes), sample.question]
        assert undisturbed == oracle.answer(DEMO, question, LONG_TOKENS, ignore_eos=True)


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
        until(
            lambda: bool([1 for name, line in whole.lines if name == pod.name and "ended with code" in line]),
            60,
            "the pod has left",
        )
    assert [line for name, line in whole.lines if name == pod.name and "ended with code 0" in line]


# --- the bus -------------------------------------------------------------------------------------------------------------


def test_requests_finish_although_the_message_server_is_killed(whole: Deployment) -> None:
    with load(whole, 15, 8) as under_way:
        busy(whole, "prefill", "prefill_waiting_requests")
        under_way.enough()
        whole.restart_nats()
        assert not under_way.answered, "the server was killed too late to matter"


# --- clients -------------------------------------------------------------------------------------------------------------


def test_clients_that_leave_at_any_moment_leave_nothing_behind(whole: Deployment) -> None:
    def leave_after(sample: Sample, seconds: float) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content(sample)}],
            "max_tokens": LONG_TOKENS,
            "ignore_eos": True,
        }
        with pytest.raises(httpx.TimeoutException):
            httpx.post(
                f"{whole.local.gateway_url}/v1/chat/completions",
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
    until(lambda: not held(whole), 30, "nothing is held for clients that are gone")


# --- poison --------------------------------------------------------------------------------------------------------------


def test_poison_is_refused_with_its_reason_and_costs_nobody_else(whole: Deployment) -> None:
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


def test_the_jobs_of_an_encoder_that_stands_still_go_to_another(whole: Deployment) -> None:
    with load(whole, 12, 12) as under_way:
        pod = busy(whole, "encoder", "encode_running")
        send(whole, pod, signal.SIGSTOP)
        try:
            under_way.enough()
            until(lambda: under_way.answered, 60, "the other encoder has done it all")
        finally:
            send(whole, pod, signal.SIGCONT)


def test_decoders_free_the_leases_of_a_prefill_worker_that_stands_still(whole: Deployment) -> None:
    def reserved() -> bool:
        return any(load_of(whole, pod)["kv_blocks_reserved"] for pod in whole.pods("decode"))

    with load(whole, 18, 13) as under_way:
        # Requests reach prefill one after another, so the moment for both is looked for, not waited for in turn.
        until(
            lambda: reserved() and bool(at_work(whole, "prefill", "prefill_waiting_requests")),
            30,
            "a prefill worker is busy while blocks are reserved for a hand-over",
        )
        pod = (at_work(whole, "prefill", "prefill_waiting_requests") or whole.pods("prefill"))[0]
        send(whole, pod, signal.SIGSTOP)
        try:
            under_way.enough()
            until(lambda: under_way.answered, 90, "the other prefill worker has done it all")
            until(lambda: not reserved(), 10, "no lease outlives its owner's heartbeats")
        finally:
            send(whole, pod, signal.SIGCONT)


# --- everything at once --------------------------------------------------------------------------------------------------


def test_a_hundred_requests_outlive_a_worker_killed_every_second(whole: Deployment) -> None:
    rng = random.Random(20)
    asked: list[Sample] = []
    texts: list[str] = []
    over = threading.Event()
    kills: list[str] = []

    def kill_at_random() -> None:
        end = time.monotonic() + 40
        while time.monotonic() < end and not over.wait(1.0):
            running = [pod for pod in workers(whole) if whole.pid(pod) is not None]
            if running:
                pod = rng.choice(running)
                whole.kill(pod)
                kills.append(pod.name)

    with ThreadPoolExecutor(12) as threads:
        killer = threading.Thread(target=kill_at_random)
        killer.start()
        try:
            while len(asked) < 100 or len(kills) < 10:  # a fast machine answers many between two kills
                wave = samples(50, 20 + len(asked))
                texts += threads.map(lambda sample: ask(whole, sample), wave)
                asked += wave
        finally:
            over.set()
            killer.join()
    assert texts == [expected(sample) for sample in asked]


# --- what is measured ----------------------------------------------------------------------------------------------------


def test_pods_measure_what_they_do(whole: Deployment) -> None:
    with load(whole, 6, 30):
        pass
    pods = {component: [scrape(pod.http_url) for pod in whole.pods(component)] for component in WORKERS}

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
