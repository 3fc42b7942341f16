"""What a placed request tells the pod that takes it."""

from __future__ import annotations

import asyncio
import threading
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from mmd_api.contract.load import PodLoad
from mmd_api.tenants import new_key
from mmd_workers.engine.memory import blocks
from mmd_workers.engine.memory.blocks import LeadingIdentities, prompt_root
from mmd_workers.gateway.access.keys import KnownTenant
from mmd_workers.gateway.api import choices
from mmd_workers.gateway.placement.admission import Admission, FairAdmission
from mmd_workers.gateway.placement.work import Size
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.wire.messages.every_pod import CacheReport
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.harness.waiting import DEADLINE_SECONDS
from tests.gateway import tenancy
from tests.gateway.media import png, url
from tests.gateway.running import HASTY_MILLISECONDS, Launch, Running
from tests.gateway.scripted import Script, ScriptedWorker, answer_well, half_then, say_nothing

LONG = "What does an operator of a cluster do all day? " * 8
BLOCK = 16
IMAGE = {"type": "image_url", "image_url": {"url": url("image/png", png())}}
NO_GPUS = {"gpus": 0}


async def ask(gateway: Running, content: object) -> str:
    messages = [{"role": "user", "content": content}]
    answer = await gateway.openai.chat.completions.create(model="builtin/demo", messages=messages)
    return answer.choices[0].message.content


def losing_the_first(code: str) -> Script:
    async def lose_the_first(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if len(worker.requests) == 1:
            await worker.fail(request, code, "the tower is gone", retryable=True)
        else:
            await answer_well(worker, request)

    return lose_the_first


@pytest.mark.parametrize("bidirectional", [False, True])
async def test_it_names_how_many_tokens_the_pod_is_known_to_have_cached(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, bidirectional: bool
) -> None:
    """Where all tokens of a prompt see one another, only those of the same prompt count."""
    if bidirectional:
        monkeypatch.setattr(Adapter, "bidirectional", "prompt")
    gateway = await launch()
    worker = await gateway.worker()
    await ask(gateway, LONG)
    (first,) = worker.requests
    assert first.cached_tokens == 0
    root = prompt_root(b"", first.token_ids, [], bidirectional=bidirectional)
    identities = list(LeadingIdentities(first.token_ids, [], root, BLOCK))[:3]
    worker.prefix_number = 1
    await worker.bus.publish(
        gateway.subjects.prefix_report(worker.pod),
        CacheReport(worker.pod, worker.incarnation, 1, BLOCK, identities, []),
    )
    async with asyncio.timeout(DEADLINE_SECONDS):
        while worker.requests[-1].cached_tokens == 0:
            await ask(gateway, LONG)
    assert worker.requests[-1].cached_tokens == 3 * BLOCK
    await ask(gateway, f"{LONG} Why?")
    assert worker.requests[-1].token_ids[: 3 * BLOCK] == first.token_ids[: 3 * BLOCK]
    assert worker.requests[-1].cached_tokens == (0 if bidirectional else 3 * BLOCK)


async def test_choices_of_a_long_prompt_share_identities_that_a_thread_hashed(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "LONG_PROMPT_TOKENS", BLOCK)
    gateway = await launch()
    worker = await gateway.worker()
    await ask(gateway, LONG)
    tokens = worker.requests[0].token_ids
    identities = blocks.leading_identities(tokens, [], b"", BLOCK)
    worker.prefix_number = 1
    await worker.bus.publish(
        gateway.subjects.prefix_report(worker.pod),
        CacheReport(worker.pod, worker.incarnation, 1, BLOCK, identities, []),
    )
    async with asyncio.timeout(DEADLINE_SECONDS):
        while worker.requests[-1].cached_tokens == 0:
            await ask(gateway, LONG)
    threads: list[int] = []

    def noted(*given: Any, **more: Any) -> Any:
        threads.append(threading.get_ident())
        return blake2b(*given, **more)

    monkeypatch.setattr(blocks, "blake2b", noted)
    messages: Any = [{"role": "user", "content": LONG}]
    await gateway.openai.chat.completions.create(model="builtin/demo", messages=messages, n=3)
    assert [request.cached_tokens for request in worker.requests[-3:]] == [len(identities) * BLOCK] * 3
    assert len(threads) == len(identities), "once for all three"
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(("limit", "here"), [(1000, True), (1, False), (0, False)])
async def test_a_pod_with_a_tower_encodes_small_media_itself(launch: Launch, limit: int, here: bool) -> None:
    gateway = await launch(encoder=NO_GPUS, prefill={**NO_GPUS, "localEncodeTokens": limit})
    worker = await gateway.worker(roles=["prefill", "decode"], encodes_small_media=True)
    assert await ask(gateway, [IMAGE, {"type": "text", "text": "Which colour?"}]) == "the red circle"
    assert [request.encode_here for request in worker.requests] == [here]


@pytest.mark.parametrize(
    ("code", "again"),
    [("unprocessable_medium", False), ("drained", True), ("overloaded", True), ("media_gone", True)],
)
async def test_a_medium_suspected_of_ending_a_pod_goes_to_encoder_pods(
    launch: Launch, code: str, again: bool
) -> None:
    """It would end pod after pod that hold prompts. A pod that drains or has no room says nothing about the medium, nor does a client that left."""
    gateway = await launch(encoder=NO_GPUS, prefill={**NO_GPUS, "localEncodeTokens": 1000})

    worker = await gateway.worker(
        script=losing_the_first(code), roles=["prefill", "decode"], encodes_small_media=True
    )
    question = [IMAGE, {"type": "text", "text": "Which colour?"}]
    assert await ask(gateway, question) == "the red circle"
    assert await ask(gateway, question) == "the red circle"
    assert [request.encode_here for request in worker.requests] == [True, again, again]


async def test_a_suspected_medium_starts_only_where_encoder_pods_have_room(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[Size] = []
    original = FairAdmission.ask

    def ask_for(self: FairAdmission, known: KnownTenant, size: Size, *rest: Any) -> Admission:
        sizes.append(size)
        return original(self, known, size, *rest)

    monkeypatch.setattr(FairAdmission, "ask", ask_for)
    file, key = tmp_path / "keys.yaml", new_key()
    tenancy.write(file, tenancy.tenant("one", key))
    gateway = await launch(
        encoder=NO_GPUS,
        prefill={**NO_GPUS, "localEncodeTokens": 1000},
        keys_file=str(file),
        auth=tenancy.AUTH,
    )
    gateway.openai.api_key = key

    script = losing_the_first("unprocessable_medium")
    await gateway.worker(script=script, roles=["prefill", "decode"], encodes_small_media=True)
    question = [IMAGE, {"type": "text", "text": "Which colour?"}]
    assert await ask(gateway, question) == await ask(gateway, question) == "the red circle"
    assert await ask(gateway, "Which colour?") == "the red circle"
    assert [size.encoders_only for size in sizes] == [False, True, False]


async def test_a_medium_of_a_stream_that_has_begun_is_not_suspected(launch: Launch) -> None:
    gateway = await launch(encoder=NO_GPUS, prefill={**NO_GPUS, "localEncodeTokens": 1000})

    async def fail(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.fail(request, "peer_lost", "gone", retryable=True)

    worker = await gateway.worker(
        script=half_then(fail), roles=["prefill", "decode"], encodes_small_media=True
    )
    assert await ask(gateway, [IMAGE, {"type": "text", "text": "Which colour?"}]) == "the red circle"
    assert [request.encode_here for request in worker.requests] == [True, True]


async def test_only_one_of_several_answers_brings_a_medium_to_prefill(launch: Launch) -> None:
    gateway = await launch(encoder=NO_GPUS, prefill={**NO_GPUS, "localEncodeTokens": 1000})
    worker = await gateway.worker(roles=["prefill", "decode"], encodes_small_media=True)
    busy = PodLoad(encode_queued_work={"image": 10**6}, encode_work_per_second={"image": 1.0})
    await gateway.worker(roles=["encode"], pod="encoder-0", load=busy)
    messages = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "Which colour?"}]}]
    await gateway.openai.chat.completions.create(model="builtin/demo", messages=messages, n=4)
    assert sorted(request.encode_here for request in worker.requests) == [False, False, False, True]


async def test_a_medium_is_suspected_when_its_pod_is_lost(launch: Launch) -> None:
    gateway = await launch(
        encoder=NO_GPUS,
        prefill={**NO_GPUS, "localEncodeTokens": 1000},
        heartbeat_timeout_milliseconds=HASTY_MILLISECONDS,
    )
    first = await gateway.worker(script=say_nothing, roles=["prefill", "decode"], encodes_small_media=True)
    question = [IMAGE, {"type": "text", "text": "Which colour?"}]
    asking = asyncio.create_task(ask(gateway, question))
    await first.until(lambda: bool(first.requests))
    await first.die()
    second = await gateway.worker(roles=["prefill", "decode"], encodes_small_media=True)
    await asking
    await ask(gateway, question)
    assert [request.encode_here for request in (*first.requests, *second.requests)] == [True, False, False]
