"""Decode pods that compute short prompts themselves: no handover, the answers of `generate`, and nothing lost when such a pod dies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mmd_cli.samples import draw
from support.harness.promises import promise
from support.harness.waiting import wait_until
from support.oracles import oracle
from support.serving.engines import ENGINES
from support.serving.held import assert_nothing_held, scrape, workers
from support.serving.local_deployment import Deployment, write
from support.serving.local_deployment import content as content_of

from .redundant import DEMO, MODEL, SPEC, busy, text_of

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("local-prompts"), pytest.mark.timeout(600)]

LOCAL_TOKENS = 64
LONG = "Describe what an operator of a cluster does all day, in many words. " * 6
BEFORE = "This image was drawn by a program, which made many of them, with one shape or more, each in one colour, on a plain background."
"""Fills the block of KV in which an image ends, so that it is the same for every question."""
ANSWER_TOKENS = 24


@pytest.fixture(scope="module", params=ENGINES)
def deployment(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Deployment]:
    file = tmp_path_factory.mktemp("local") / "local.yaml"
    spec = {
        **SPEC,
        "engine": {"type": request.param},
        "encoder": {**SPEC["encoder"], "replicas": 1},
        "prefill": {**SPEC["prefill"], "replicas": 1},
        "decode": {**SPEC["decode"], "localPrefillTokens": LOCAL_TOKENS},
    }
    with Deployment(write(file, spec, name="local")) as running:
        yield running


@pytest.fixture
def whole(deployment: Deployment) -> Iterator[Deployment]:
    def restore() -> None:
        for pod in workers(deployment):
            deployment.wait_ready(pod)

    restore()
    yield deployment
    restore()
    assert_nothing_held(deployment)


def ask(deployment: Deployment, content: Any, **options: Any) -> Any:
    return (
        deployment.client()
        .with_options(timeout=400)
        .chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            **{"max_tokens": ANSWER_TOKENS, **options},
        )
    )


def counts(deployment: Deployment) -> dict[str, float]:
    """Prompts by what became of them: computed by decode pods, sent back by them, handed over."""
    scraped = [scrape(pod.http_url) for pod in deployment.pods("decode")]
    prompts = {
        outcome: sum(one["mmd_decode_prompts_total"][outcome] for one in scraped)
        for outcome in ("accepted", "refused", "returned")
    }
    return prompts | {"handed over": sum(one["mmd_kv_leases_total"]["committed"] for one in scraped)}


def since(deployment: Deployment, before: dict[str, float]) -> dict[str, float]:
    """What `counts` has grown by, without what has not."""
    return {name: value - before[name] for name, value in counts(deployment).items() if value > before[name]}


def test_a_short_prompt_is_computed_where_it_is_decoded(whole: Deployment) -> None:
    before = counts(whole)
    text = "What is an operator?"
    answer = ask(whole, text)
    assert answer.choices[0].message.content == oracle.answer(DEMO, [text], ANSWER_TOKENS)
    assert answer.usage.prompt_tokens <= LOCAL_TOKENS
    assert since(whole, before) == {"accepted": 1}


def test_a_long_prompt_is_handed_over(whole: Deployment) -> None:
    before = counts(whole)
    assert ask(whole, LONG).choices[0].message.content == oracle.answer(DEMO, [LONG], ANSWER_TOKENS)
    assert since(whole, before) == {"handed over": 1}


def test_another_question_goes_to_the_decode_pod_with_the_images_kv(whole: Deployment) -> None:
    sample = draw("image", 6001)
    image, _ = content_of(sample)
    before = counts(whole)

    def answered(question: str) -> None:
        text = f"{BEFORE} {question}"
        expected = oracle.answer(DEMO, [("image", sample.bytes), text], ANSWER_TOKENS)
        answer = ask(whole, [image, {"type": "text", "text": text}]).choices[0].message.content
        promise(answer == expected, f"{question!r} was answered {answer!r}, not {expected!r}")

    answered("What shape is it?")
    assert since(whole, before) == {"handed over": 1}
    questions = iter(f"Which colour is it, {number}?" for number in range(1000))

    def computed_there() -> bool:
        """The gateway learns of the blocks with the next heartbeat."""
        answered(next(questions))
        return "accepted" in since(whole, before)

    wait_until(computed_there, "a decode pod computed the rest of a prompt")
    assert "returned" not in since(whole, before)


def test_a_stream_survives_the_decode_pod_that_computed_its_prompt(whole: Deployment) -> None:
    text, before = "Say something long.", counts(whole)
    options = {"max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}
    undisturbed = "".join(text_of(chunk) for chunk in ask(whole, text, **options))
    assert since(whole, before) == {"accepted": 1}
    stream = iter(ask(whole, text, **options))
    begun = "".join(text_of(next(stream)) for _ in range(20))
    whole.kill(busy(whole, "decode", "decode_running"))
    assert begun + "".join(text_of(chunk) for chunk in stream) == undisturbed
    assert undisturbed == oracle.answer(DEMO, [text], 400, ignore_eos=True)
