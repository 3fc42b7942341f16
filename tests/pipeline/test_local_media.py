"""Prefill pods with a tower beside a pool of encoders: small media are encoded where they are prefilled, without an encoder pod, and the rest
is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mmd_cli.local.pods import LocalPod
from mmd_cli.samples import Sample, draw
from support.harness.waiting import wait_until
from support.oracles import oracle
from support.serving.engines import ENGINES
from support.serving.held import assert_nothing_held, load_of, scrape
from support.serving.local_deployment import Deployment, write
from support.serving.local_deployment import content as content_of
from support.serving.under_load import hung

from .redundant import DEMO, MODEL, SPEC, TOKENS

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("local-media"), pytest.mark.timeout(600)]

LOCAL_TOKENS = 20  # an image of the samples has 12 or 16, sound 25 or more


@pytest.fixture(scope="module", params=ENGINES)
def deployment(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Deployment]:
    file = tmp_path_factory.mktemp("media") / "media.yaml"
    spec = {
        **SPEC,
        "engine": {"type": request.param},
        "encoder": {**SPEC["encoder"], "replicas": 1},
        "prefill": {**SPEC["prefill"], "replicas": 1, "localEncodeTokens": LOCAL_TOKENS},
        "decode": {**SPEC["decode"], "replicas": 1},
    }
    with Deployment(write(file, spec, name="media")) as running:
        yield running


def answered(deployment: Deployment, *samples: Sample) -> None:
    """Ask about these media at once, and compare with `generate`."""
    asked = deployment.client().with_options(timeout=400)
    media: list[Any] = [content_of(sample)[0] for sample in samples]
    question = samples[0].question
    answer = asked.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [*media, {"type": "text", "text": question}]}],
        temperature=0,
        max_tokens=TOKENS,
    )
    parts: oracle.Question = [*((sample.kind, sample.bytes) for sample in samples), question]
    assert answer.choices[0].message.content == oracle.answer(DEMO, parts, TOKENS)


def encoded(pod: LocalPod) -> float:
    """How many media this pod has encoded."""
    return scrape(pod.http_url)["mmd_phase_seconds_count"]["encode"]


def test_small_media_need_no_encoder_pod_and_others_wait_for_one(deployment: Deployment) -> None:
    (prefill,), (encoder,) = deployment.pods("prefill"), deployment.pods("encoder")
    with ThreadPoolExecutor(1) as thread:
        with hung(deployment.pid(encoder)):
            wait_until(
                lambda: (deployment.ready_pods() or {}).get("encode") == 0, "the encoder pod is missed"
            )
            answered(deployment, draw("image", 7001))
            small = encoded(prefill)
            assert small > 0
            large = thread.submit(answered, deployment, draw("audio", 7002))
            wait_until(
                lambda: load_of(deployment, prefill)["prefill_blocked_tokens"] > 0,
                "sound waits for an encoder",
            )
        large.result(timeout=120)
    assert encoded(prefill) == small
    assert encoded(encoder) > 0


def test_two_images_that_are_too_much_together_go_to_encoder_pods(deployment: Deployment) -> None:
    answered(deployment, draw("audio", 7003))
    (prefill,), (encoder,) = deployment.pods("prefill"), deployment.pods("encoder")
    there, here = encoded(encoder), encoded(prefill)
    answered(deployment, draw("image", 7004), draw("image", 7005))
    assert encoded(encoder) > there
    assert encoded(prefill) == here
    assert_nothing_held(deployment)
