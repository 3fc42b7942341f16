"""A deployment with two workers of each kind: askers side by side, what its pods hold for a request, and signals to them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from mmd_api.contract.pools import MODALITIES, Modality
from mmd_cli.local.pods import LocalPod
from mmd_cli.samples import Sample, draw
from support.harness.promises import promise, promised
from support.harness.waiting import wait_until
from support.oracles import oracle
from support.serving.held import load_of
from support.serving.local_deployment import Deployment, content

DEMO = Path(str(resources.files("mmd_workers.model") / "demo"))
MODEL = "builtin/demo"
TOKENS = 16
LONG_TOKENS = 600
CPU = {"replicas": 2, "gpus": 0}
SPEC = {
    "model": {"id": MODEL, "dtype": "Float32"},
    "encoder": {**CPU, "cacheMebibytes": 16},
    "prefill": {**CPU, "kvCacheMebibytes": 64, "featureBudgetMebibytes": 64, "chunkTokens": 64},
    "decode": {**CPU, "kvCacheMebibytes": 64, "maxSequences": 32},
    "transfer": {"kv": {"backend": "Gloo"}},
    "gateway": {"maxRetries": 20},  # where a worker dies every second, one request may meet more than a few
}


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


def assert_answered(deployment: Deployment, *samples: Sample) -> None:
    """All are asked side by side; each answer comes, and is that of `generate`, which models in this process compute one after the other."""
    with promised("every question has an answer"), ThreadPoolExecutor(len(samples)) as threads:
        texts = list(threads.map(lambda sample: ask(deployment, sample), samples))
    for sample, text in zip(samples, texts, strict=True):
        asked = f"the {sample.kind} question {sample.question!r}"
        promise(text == expected(sample), f"{asked} was answered {text!r}")


def stream_long(
    deployment: Deployment, sample: Sample, gateway: LocalPod | None = None, **options: Any
) -> Any:
    return (
        deployment.client(gateway=gateway)
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
    """Modalities of the questions. vLLM counts positions after a video differently from `generate`.

    See docs/measurements/vllm-architectures.md.
    """
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
        with promised("every asker has an answer"):
            lost = [error for asking in self._askings if (error := asking.exception()) is not None]
        self._threads.shutdown()
        promise(
            not lost, f"{len(lost)} of {self._askers} askers had a request without an answer: {lost[:1]!r}"
        )
        for sample, text in self._asked.values():
            answered = f"the {sample.kind} question {sample.question!r} was answered {text!r}"
            promise(text == expected(sample, self._tokens), answered)


@contextmanager
def load(deployment: Deployment, askers: int, seed: int, tokens: int = TOKENS) -> Iterator[Load]:
    under_way = Load(deployment, askers, seed, tokens)
    try:
        yield under_way
    finally:
        under_way.check()  # also where the test has failed already: what was lost or wrong then counts


def at_work(deployment: Deployment, component: str, figure: str) -> list[LocalPod]:
    return [pod for pod in deployment.pods(component) if load_of(deployment, pod).get(figure)]


def busy(deployment: Deployment, component: str, figure: str) -> LocalPod:
    """The first pod of a component that reports to be at work."""
    return wait_until(lambda: at_work(deployment, component, figure), f"a pod of {component} has {figure}")[0]


def send(deployment: Deployment, pod: LocalPod, number: signal.Signals) -> None:
    pid = deployment.pid(pod)
    assert pid is not None
    os.kill(pid, number)
