"""A storm of videos on this machine: encoders grow from one to two and go back, and every answer is that of `generate`."""

from __future__ import annotations

import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mmd_cli.samples import as_another_file
from support.harness.promises import promised
from support.harness.waiting import wait_until
from support.oracles import oracle
from support.serving.local_deployment import Deployment, write

from .random_media import KV, TOKENS, content, mp4

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("storm"), pytest.mark.timeout(600)]

ENCODER = {
    "gpus": 0,
    "autoscaling": {
        "minReplicas": 1,
        "maxReplicas": 2,
        "targetBacklogMilliseconds": 5,
        "scaleDownStabilizationSeconds": 25,
        "scaleDownCooldownSeconds": 0,
        "maxScaleDownPercent": 100,
        "panicWindowSeconds": 0,
    },
}
AT_ONCE = 6
DISTINCT = 8


def test_encoders_follow_a_storm_of_videos_and_no_answer_suffers(checkpoint: Path, tmp_path: Path):
    spec = {
        "model": {"id": str(checkpoint), "dtype": "Float32"},
        "encoder": ENCODER,
        "decode": {"replicas": 1, **KV},
    }
    with Deployment(write(tmp_path / "storm.yaml", spec, name="storm")) as deployment:
        answers: dict[int, str] = {}
        enough = threading.Event()
        client = deployment.client()

        def ask(number: int) -> str:
            answer = client.chat.completions.create(
                model=deployment.local.model,
                messages=[{"role": "user", "content": content(question(number, number))}],  # type: ignore[typeddict-item]
                max_tokens=TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            return str(answer.choices[0].message.content)

        def log() -> str:
            return "\n".join(f"{pod} {line}" for pod, line in list(deployment.lines))

        def storm(first: int) -> None:
            for number in itertools.count(first, AT_ONCE):
                if enough.is_set():
                    return
                answers[number] = ask(number)

        with ThreadPoolExecutor(AT_ONCE) as threads:
            asked = [threads.submit(storm, first) for first in range(AT_ONCE)]
            try:
                wait_until(
                    lambda: works(deployment, 1) or any(a.done() for a in asked),
                    lambda: f"a second encoder works:\n{log()}",
                )
                grown = works(deployment, 1)
            finally:
                enough.set()
            with promised("every question has an answer"):
                for future in asked:
                    future.result(60)
        assert grown, said(deployment)
        wait_until(lambda: len(deployment.pods("encoder")) == 1, lambda: f"one encoder is left:\n{log()}")
        answers[-1] = ask(-1)
        lines = said(deployment)
        assert any("encoder scales from 1 to 2 replicas (LoadRose)" in line for line in lines), lines
        assert any("finishes its requests" in line for line in lines), lines
        assert not any("Traceback" in line for _, line in deployment.lines)
    assert len(answers) > DISTINCT
    for number, answer in answers.items():
        assert answer == expected(checkpoint, number % DISTINCT), number


@functools.cache
def expected(folder: Path, seed: int) -> str:
    return oracle.answer(folder, question(seed), TOKENS, ignore_eos=True)


def question(number: int, nonce: int | None = None) -> oracle.Question:
    """One of a few videos. With a nonce it is another file with the same frames: to be encoded anew."""
    video = mp4(1000 + number % DISTINCT)
    if nonce is not None:
        video = as_another_file(video, nonce)
    return ["What moves?", ("video", video)]


def works(deployment: Deployment, ordinal: int) -> bool:
    """Whether this encoder has been given something to do."""
    encoders = deployment.pods("encoder")
    if len(encoders) <= ordinal:
        return False
    try:
        load = deployment.state(encoders[ordinal])["load"]
    except httpx.HTTPError:
        return False
    return bool(load["encode_work_per_second"])


def said(deployment: Deployment) -> list[str]:
    return [line for pod, line in deployment.lines if pod == "autoscaler"]
