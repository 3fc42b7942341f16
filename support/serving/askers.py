"""Clients that keep asking a deployment, one question each, while something happens to it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import openai

from mmd_cli.samples import Sample
from support.harness.promises import promised
from support.harness.waiting import wait_until
from support.oracles import oracle
from support.serving.local_deployment import ROOT, Deployment, content

CPU = {"replicas": 1, "gpus": 0}
SPEC = {
    "model": {"id": "builtin/demo", "dtype": "Float32"},
    "encoder": CPU,
    "prefill": {**CPU, "kvCacheMebibytes": 64},
    "decode": {**CPU, "kvCacheMebibytes": 64},
    "transfer": {"kv": {"backend": "Gloo"}},
}
"""One pod of each pool, with the demo model."""
DEMO = ROOT / "workers" / "mmd_workers" / "model" / "demo"
TOKENS = 16
REPEAT_SECONDS = 0.2  # pause before a question that failed is repeated


class Askers:
    """Clients that ask from entry to exit.

    Each answer may be right or wrong, or an error with a status. Anything else fails the test.
    """

    def __init__(self, deployment: Deployment, samples: Sequence[Sample]) -> None:
        self.answers: list[list[str]] = [[] for _ in samples]
        self.errors: list[openai.APIStatusError] = []
        self._deployment, self._samples = deployment, samples
        self._enough = threading.Event()
        self._threads = ThreadPoolExecutor(len(samples))
        self._tasks: list[Future[None]] = []

    def __enter__(self) -> Askers:
        self._tasks = [self._threads.submit(self._run, number) for number in range(len(self._samples))]
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        try:
            with promised("every client has an answer"):
                for task in self._tasks:
                    task.result(120)
        finally:
            self._threads.shutdown(wait=False)

    def all_are_answered_twice(self) -> None:
        """Wait until every client has had two more answers."""
        goals = [len(answers) + 2 for answers in self.answers]
        with promised("everybody is answered twice more"):
            wait_until(
                lambda: (
                    all(len(a) >= goal for a, goal in zip(self.answers, goals, strict=True))
                    or any(task.done() for task in self._tasks)
                ),
                lambda: f"answers: {[len(a) for a in self.answers]}, {self.errors}",
            )

    def check(self) -> None:
        """Check that every answer is that of `generate`."""
        for sample, answers in zip(self._samples, self.answers, strict=True):
            assert set(answers) == {
                oracle.answer(DEMO, [(sample.kind, sample.bytes), sample.question], TOKENS)
            }

    def _run(self, number: int) -> None:
        client, sample = self._deployment.client(), self._samples[number]
        while not self._enough.is_set():
            try:
                answer = client.chat.completions.create(
                    model="builtin/demo",
                    messages=[{"role": "user", "content": content(sample)}],  # type: ignore[typeddict-item]
                    max_tokens=TOKENS,
                    temperature=0,
                )
            except openai.APIStatusError as error:
                self.errors.append(error)
                self._enough.wait(REPEAT_SECONDS)
            else:
                self.answers[number].append(str(answer.choices[0].message.content))
