"""The passwords of NATS are rotated twice while clients keep asking: no request is lost, no answer is wrong, no pod starts again."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mmd_cli.samples import Sample, draw
from tests.support import oracle
from tests.support.local_deployment import ROOT, Deployment, content, until, write

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("rotation"), pytest.mark.timeout(600)]

CPU = {"replicas": 1, "gpus": 0}
SPEC = {
    "model": {"id": "builtin/demo", "dtype": "Float32"},
    "encoder": CPU,
    "prefill": {**CPU, "kvCacheMebibytes": 64},
    "decode": {**CPU, "kvCacheMebibytes": 64},
    "transfer": {"kv": {"backend": "Gloo"}},
}
DEMO = ROOT / "workers" / "mmd_workers" / "model" / "demo"
TOKENS = 24
SAMPLES = [draw(kind, seed) for kind, seed in (("image", 1), ("audio", 2), ("image", 3), ("video", 4))]
"""One for each asker."""


def ask(deployment: Deployment, sample: Sample) -> str:
    answer = deployment.client().chat.completions.create(
        model="builtin/demo",
        messages=[{"role": "user", "content": content(sample)}],  # type: ignore[typeddict-item]
        max_tokens=TOKENS,
        temperature=0,
    )
    return str(answer.choices[0].message.content)


def test_passwords_are_rotated_under_load_and_no_request_is_lost(tmp_path: Path) -> None:
    answers: list[list[str]] = [[] for _ in SAMPLES]
    enough = threading.Event()

    def keep_asking(deployment: Deployment, number: int) -> None:
        while not enough.is_set():
            answers[number].append(ask(deployment, SAMPLES[number]))

    with (
        Deployment(write(tmp_path / "rotation.yaml", SPEC, name="rotation")) as deployment,
        ThreadPoolExecutor(len(SAMPLES)) as threads,
    ):
        asked = [threads.submit(keep_asking, deployment, number) for number in range(len(SAMPLES))]

        def everybody_is_answered_twice_more() -> None:
            goals = [len(of) + 2 for of in answers]
            until(
                lambda: (
                    all(len(of) >= goal for of, goal in zip(answers, goals, strict=True))
                    or any(one.done() for one in asked)
                ),
                120,
                f"everybody is answered twice more; so far {[len(of) for of in answers]}",
            )

        try:
            everybody_is_answered_twice_more()
            pids = {pod.name: deployment.pid(pod) for pod in deployment.local.pods}
            for change in itertools.chain(
                *[(deployment.rotate_passwords, deployment.show_passwords)] * 2, [deployment.restart_nats]
            ):
                change()
                everybody_is_answered_twice_more()
        finally:
            enough.set()
        for one in asked:
            one.result(120)
        assert {pod.name: deployment.pid(pod) for pod in deployment.local.pods} == pids
    for sample, given in zip(SAMPLES, answers, strict=True):
        assert set(given) == {oracle.answer(DEMO, [(sample.kind, sample.bytes), sample.question], TOKENS)}
