"""A prompt that was asked before goes to the pod that has its KV, however long it is and whatever came since, and no longer once that is evicted."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from mmd_cli.local.pods import LocalPod
from support.harness.waiting import wait_until
from support.serving.engines import ENGINES
from support.serving.held import scrape
from support.serving.local_deployment import Deployment, write

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("demo"), pytest.mark.timeout(600)]

BLOCK_TOKENS = 16
FORMER_SAMPLE = 64  # blocks that a heartbeat could name
KV_MEBIBYTES = 16  # 273 blocks of the demo model
WORDS = ("red", "green", "blue", "circle", "square", "triangle", "left", "right", "up", "down")
SETTLED_SECONDS = 1.0


@pytest.fixture(scope="module", params=ENGINES)
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Two prefill pods with small KV pools; the decode pod, which has every prompt too, computes none."""
    kv = {"gpus": 0, "kvCacheMebibytes": KV_MEBIBYTES}
    spec = {
        "model": {"id": "builtin/demo", "dtype": "Float32"},
        "engine": {"type": request.param},
        "prefill": {**kv, "replicas": 2},
        "decode": {**kv, "replicas": 1, "localPrefillTokens": 0},
        "transfer": {"kv": {"backend": "Gloo"}},
    }
    with Deployment(write(tmp_path_factory.mktemp("routing") / "routing.yaml", spec, "routing")) as running:
        yield running


def prompt(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def ask(
    deployment: Deployment, text: str, gateway: LocalPod | None = None
) -> tuple[dict[str, Any], int, int]:
    """The attempt that answered, the tokens of the prompt, and how many of them the pod had cached."""
    answer = deployment.client(gateway=gateway).chat.completions.create(
        model="builtin/demo",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=2,
        extra_body={"ignore_eos": True, "timings": True},
    )
    (attempt,) = deployment.timeline(answer.id)["attempts"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return attempt, answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


def index_blocks(deployment: Deployment) -> list[float]:
    """Blocks in the index of each gateway."""
    return [scrape(pod.admin_url)["mmd_router_index_blocks"]["blocks"] for pod in deployment.pods("gateway")]


def settle(deployment: Deployment, least: float = 0) -> None:
    """Until the index of each gateway has so many blocks, and has not changed for a while: pods report what has changed several times a
    second, and later on a busy machine.
    """
    seen, since = list[float](), time.monotonic()

    def settled() -> bool:
        nonlocal seen, since
        now = index_blocks(deployment)
        if now != seen or min(now) < least:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > SETTLED_SECONDS

    wait_until(settled, "the indexes of prefixes have settled")


def test_a_long_prompt_goes_where_it_is_cached_until_evicted(deployment: Deployment) -> None:
    text = prompt(0, 1300)
    first, tokens, cached = ask(deployment, text)
    assert tokens > (FORMER_SAMPLE + 8) * BLOCK_TOKENS
    assert cached == first["cached_tokens"] == 0
    for seed in range(1, 6):  # on whichever pod: more blocks than a sample of the newest could name
        ask(deployment, prompt(seed, 280))
    both = 2 * (tokens // BLOCK_TOKENS)  # the pods that computed it and decoded it
    settle(deployment, both + 5 * 280 // BLOCK_TOKENS)
    for _ in range(4):
        attempt, _, cached = ask(deployment, text)
        assert attempt["prefill_pod"] == first["prefill_pod"], attempt
        assert attempt["cached_tokens"] > FORMER_SAMPLE * BLOCK_TOKENS
        assert 0 <= attempt["cached_tokens"] - cached <= 2 * BLOCK_TOKENS, "the index has what the pod has"
    filled = Counter[str]()
    for seed in range(100, 160):
        if len(filled) == 2 and min(filled.values()) >= 4:
            break
        attempt, _, _ = ask(deployment, prompt(seed, 2000))
        filled[attempt["prefill_pod"]] += 1
    settle(deployment)
    again, _, cached = ask(deployment, text)
    assert again["cached_tokens"] == cached == 0


def test_a_gateway_that_starts_again_asks_the_pods_for_what_they_have(deployment: Deployment) -> None:
    text = prompt(1000, 1300)
    first, _, _ = ask(deployment, text)
    settle(deployment)
    known = min(index_blocks(deployment))
    gateway = deployment.pods("gateway")[0]
    deployment.crash_gateway(gateway)
    settle(deployment, 0.9 * known)
    attempt, _, cached = ask(deployment, text, gateway)
    assert attempt["prefill_pod"] == first["prefill_pod"], attempt
    assert cached > FORMER_SAMPLE * BLOCK_TOKENS
