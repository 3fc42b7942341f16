"""A deployment with two workers of each kind: askers side by side, what its pods hold for a request, and signals to them."""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from mmd_api.contract.pools import MODALITIES, Modality
from mmd_cli.local.pods import LocalPod
from mmd_cli.samples import Sample, draw
from tests.support import oracle
from tests.support.local_deployment import Deployment, content, until

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


def workers(deployment: Deployment) -> list[LocalPod]:
    return [pod for component in WORKERS for pod in deployment.pods(component)]


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


def kinds(deployment: Deployment) -> tuple[Modality, ...]:
    """What is asked about. vLLM counts positions after a video differently from `generate` (docs/vllm-architectures.md)."""
    return tuple(kind for kind in MODALITIES if kind != "video" or deployment.engine == "Native")


def samples(count: int, seed: int) -> list[Sample]:
    return [draw(MODALITIES[number % 3], 1000 * seed + number) for number in range(count)]


class Load:
    """Askers side by side, each with one question after the other until `enough`: workers are at work whenever one looks."""

    def __init__(self, deployment: Deployment, askers: int, seed: int, tokens: int) -> None:
        self._deployment, self._askers, self._seed, self._tokens = deployment, askers, seed, tokens
        self._kinds = kinds(deployment)
        self._over = threading.Event()
        self._asked: dict[int, tuple[Sample, str]] = {}
        self._threads = ThreadPoolExecutor(askers)
        self._askings = [self._threads.submit(self._ask, number) for number in range(askers)]

    def _ask(self, number: int) -> None:
        while True:
            sample = draw(self._kinds[number % len(self._kinds)], 1000 * self._seed + number)
            self._asked[number] = sample, ask(self._deployment, sample, self._tokens)
            number += self._askers + 1  # another kind the next time
            if self._over.is_set():
                return

    @property
    def answered(self) -> bool:
        """Whether nothing is in flight any more."""
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
    gateway = scrape(deployment.local.admin_url)
    for name in ("mmd_gateway_sequences", "mmd_gateway_media_items", "mmd_media_held_bytes"):
        found += [f"gateway {name}={gateway[name]['']:.0f}"] if gateway[name][""] else []
    return found


def assert_nothing_held(deployment: Deployment) -> None:
    found: list[str] = []

    def nothing() -> bool:
        found[:] = held(deployment)
        return not found

    # Longer than a lease: a word that got lost with a message server costs its blocks until then.
    with suppress(AssertionError):
        until(nothing, 75, "nothing is held")
    assert not found, found


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
