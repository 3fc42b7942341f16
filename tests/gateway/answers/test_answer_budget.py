"""Answers take memory too: it is reserved before anything is placed, so no request can take more than there is, and text never waits."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from pathlib import Path

import pytest

from mmd_api.tenants import new_key
from mmd_workers.gateway.answers.answer_budget import AnswerShare, AnswerSize, answer_budget
from mmd_workers.gateway.answers.answer_part import AnswerPart
from mmd_workers.gateway.answers.choice_stream import ChoiceStream
from mmd_workers.gateway.answers.usage import prompt_details, usage_of
from mmd_workers.gateway.api.chat.chat_response import ChatCompletion
from mmd_workers.gateway.api.chat.chat_shape import CompleteChoice, chunk_choice, with_logprobs
from mmd_workers.gateway.basics import media_hold as hold_module
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.placement.dispatcher import ServedSequence
from mmd_workers.gateway.placement.router import RouteRequest
from mmd_workers.gateway.placement.sequence_state import RequestState, SequenceSpec
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.gateway.process import gateway_process
from mmd_workers.model.frontend import HfFrontend
from mmd_workers.model.prompt import PromptLayout
from mmd_workers.wire.codec import pack, unpack
from mmd_workers.wire.messages.gateway import TokenBatch, TokenItem
from mmd_workers.wire.messages.message_parts import Sampling, TokenLogprob
from support.harness.memory import peak_bytes
from tests.gateway.running import Launch
from tests.gateway.scripted import answer_well, say_nothing
from tests.gateway.tenancy import AUTH, bearer, tenant, write

MEBIBYTE = 1 << 20
CHAT = {"model": "builtin/demo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
LARGE = {**CHAT, "n": 4, "max_tokens": 500, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
TEXT = "the red circle"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_can_never_fit_is_refused_before_anything_is_placed(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(gateway_process, "host_bytes", lambda: 16 * MEBIBYTE, raising=False)
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    refused = await gateway.http.post("/v1/chat/completions", json={**LARGE, "n": 16, "stream": stream})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("too_large", "top_logprobs")
    assert "lower top_logprobs, n or max_tokens, or raise spec.gateway.resources.memory" in error["message"]
    assert "16 answers of up to 500 tokens with 20 top_logprobs" in error["message"]
    assert worker.requests == []


async def test_a_request_that_waits_for_memory_takes_no_room_in_the_pools(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Room for four of LARGE.
    monkeypatch.setattr(gateway_process, "host_bytes", lambda: 96 * MEBIBYTE)
    monkeypatch.setattr("mmd_workers.process.live.CHECK_SECONDS", 0.02)
    key, file, go = new_key(), tmp_path / "keys.yaml", asyncio.Event()
    write(file, tenant("search", key))
    gateway = await launch(keys_file=str(file), auth=AUTH)

    async def script(worker, request) -> None:
        await go.wait()
        await answer_well(worker, request)

    worker = await gateway.worker(TEXT, script=script)
    asked = [
        asyncio.create_task(gateway.http.post("/v1/chat/completions", json=LARGE, headers=bearer(key)))
        for _ in range(5)
    ]

    async def amount(line: str) -> float:
        text = (await gateway.admin.get("/metrics")).text
        return sum(float(one.split()[-1]) for one in text.splitlines() if one.startswith(line))

    await worker.until(lambda: len(worker.requests) >= 16)
    await gateway.until_metric("mmd_tenant_requests_running", lambda running: running >= 5)
    await asyncio.sleep(0.1)
    assert await amount("mmd_gateway_queue_seconds_count{") == 4
    go.set()
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


async def test_answers_share_a_budget_and_text_does_not_wait_for_it(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room for four of LARGE.
    monkeypatch.setattr(gateway_process, "host_bytes", lambda: 96 * MEBIBYTE)
    monkeypatch.setattr(hold_module, "WAIT_SECONDS", 0.1)
    gateway = await launch()
    go = asyncio.Event()

    async def answer_when_told(worker, request) -> None:
        await go.wait()
        await (say_nothing if request.sampling.max_tokens == 499 else answer_well)(worker, request)

    worker = await gateway.worker(TEXT, answer_when_told)
    tasks = [
        asyncio.create_task(gateway.http.post("/v1/chat/completions", json={**LARGE, "max_tokens": tokens}))
        for tokens in (500, 499, 499, 499, 499)
    ]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    refused = done.pop().result()
    assert refused.status_code == 503, refused.text
    assert refused.json()["error"]["code"] == "overloaded"
    assert "retry, lower top_logprobs, n or max_tokens" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"]
    budget = await gateway.metric("mmd_answer_budget_bytes")
    assert budget == 24 * MEBIBYTE
    assert budget / 2 < await gateway.metric("mmd_answer_reserved_bytes") <= budget
    assert await gateway.metric("mmd_answer_waiting_requests") == 0
    go.set()
    text = await gateway.http.post("/v1/chat/completions", json=CHAT)
    assert text.json()["choices"][0]["message"]["content"] == TEXT
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await gateway.until_metric("mmd_requests_running", 0)
    await gateway.until_metric("mmd_answer_reserved_bytes", 0)
    answered = await gateway.http.post("/v1/chat/completions", json=LARGE)
    assert answered.status_code == 200, answered.text
    assert [len(c["logprobs"]["content"]) for c in answered.json()["choices"]] == [len(worker.answer)] * 4


@pytest.mark.parametrize(
    ("mebibytes", "more", "warned"),
    [
        (1000, {}, "has only 900 MiB for them; raise spec.gateway.resources.memory"),
        (2000, {"inferencePool": {}}, "has only 1400 MiB for them beside its endpoint picker"),
        (1 << 20, {"inferencePool": {}}, ""),
    ],
    ids=["small", "with-a-picker", "large"],
)
async def test_bounds_that_exceed_the_memory_are_reported_at_the_start(
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mebibytes: int,
    more: dict,
    warned: str,
) -> None:
    monkeypatch.setattr(gateway_process, "host_bytes", lambda: mebibytes * MEBIBYTE)
    monkeypatch.setattr(gateway_process, "resident_bytes", lambda: 100 * MEBIBYTE)
    gateway = await launch(maxConcurrentRequests=512, **more)
    assert warned in caplog.text
    assert ("512 concurrent requests and the index of caches may need" in caplog.text) == bool(warned)
    own = mebibytes - {2000: 500, 1 << 20: 1024}.get(mebibytes, 0)  # the picker has the rest
    assert await gateway.metric("mmd_answer_budget_bytes") == own * MEBIBYTE // 4


async def test_one_request_cannot_take_the_memory_of_all_answers() -> None:
    budget = answer_budget(1 << 30)
    most = budget.budget_bytes // 4 + budget.allowance_bytes
    token_bytes = AnswerSize(1, 1, True, 20, False).num_bytes
    with pytest.raises(ApiError) as refused:
        await AnswerShare(budget).reserve(AnswerSize(1, most // token_bytes + 1, True, 20, False))
    assert (refused.value.status, refused.value.code) == (400, "too_large")
    assert f"one request may use {most} bytes;" in refused.value.message
    shares = [AnswerShare(budget) for _ in range(4)]
    for share in shares:
        await share.reserve(AnswerSize(1, most // token_bytes, True, 20, False))
    assert 0 < budget.used_bytes <= budget.budget_bytes


async def test_text_of_a_long_context_takes_nothing_of_the_budget() -> None:
    budget = answer_budget(4 << 30)
    share = AnswerShare(budget)
    await share.reserve(AnswerSize(1, 40_000, logprobs=False, top_logprobs=0, token_ids=False))
    assert budget.used_bytes == 0
    assert share.num_bytes > 0


@pytest.mark.parametrize("token_ids", [False, True])
async def test_streams_of_plain_text_take_little_of_the_budget(token_ids: bool) -> None:
    budget = answer_budget(1 << 30)
    for _ in range(1024):  # streams of a whole context of 128k tokens, as many as a gateway admits by default
        await AnswerShare(budget).reserve(AnswerSize(1, 131_072, False, 0, token_ids, stream=True))
    assert budget.waiting == 0


def test_a_stream_of_plain_text_takes_no_more_memory_than_was_reserved() -> None:
    num_tokens = 20_000
    spec = SequenceSpec("r.0", [1], [], Sampling(max_tokens=num_tokens), 0.0, 2.0**40)

    def stream() -> None:
        state = RequestState(spec)
        state.place("gateway-0", "decode-0", [])
        for index in range(num_tokens):  # of a client that does not read
            state.accept(TokenItem(spec.request_id, 0, index, 300 + index % 700, None), "decode-0", 1.0)
        assert state.pending_tokens == num_tokens

    assert peak_bytes(stream) <= AnswerSize(1, num_tokens, False, 0, False, stream=True).num_bytes + (
        64 << 10
    )


@pytest.mark.parametrize(
    ("size", "param", "remedy"),
    [
        (AnswerSize(1, 10**6, True, 0, False), "logprobs", "lower logprobs or max_tokens,"),
        (AnswerSize(2, 10**6, False, 0, True), "n", "lower n or max_tokens,"),
        (AnswerSize(1, 10**7, False, 0, False), "max_tokens", "lower max_tokens,"),
    ],
)
async def test_the_field_that_helps_most_is_named(size: AnswerSize, param: str, remedy: str) -> None:
    with pytest.raises(ApiError) as refused:
        await AnswerShare(answer_budget(16 * MEBIBYTE)).reserve(size)
    assert refused.value.param == param
    assert remedy in refused.value.message


def make_answer(frontend: HfFrontend, kind: str, top: int, num_tokens: int) -> None:
    """An answer of so many tokens, until it is whole, or until a client that does not read has its first part."""
    sampling = Sampling(max_tokens=num_tokens, logprobs=top)
    spec = SequenceSpec("chatcmpl-0123456789abcdef0123456789abcdef.0", [1], [], sampling, 0.0, 2.0**40)
    sequence = ServedSequence(spec, RouteRequest("r", 1, num_tokens), Timeline("r", 0.0), asyncio.Event())
    sequence.state.place("gateway-0", "decode-0", [])
    stream = ChoiceStream(0, sequence, frontend, [], num_logprobs=20, token_ids=True)
    whole = CompleteChoice(0, logprobs=True)
    ids = list(range(300, 1000))

    def arrive(index: int) -> None:
        likeliest = [TokenLogprob(ids[(index + i) % len(ids)], -0.123456789012345 * i) for i in range(top)]
        item = TokenItem(spec.request_id, 0, index, ids[index % len(ids)], None, -0.5, likeliest)
        batch = unpack(TokenBatch, pack(TokenBatch("decode-0", 0, [item])))
        sequence.state.accept(batch.items[0], "decode-0", 1.0)

    frontend.decode([300])
    for index in range(num_tokens):
        arrive(index)
        if kind == "whole" and (part := stream.advance()) is not None:
            whole.add(part)
    if kind == "whole":
        pieces = [json.dumps(whole.choice(token_ids=True).model_dump()).encode(), *whole.entries]
        assert sum(map(len, pieces)) > 50 * num_tokens
    else:
        part = stream.advance()
        assert part is not None
        chunk_choice(part, token_ids=True).model_dump_json()
        assert sequence.state.pending_tokens


@pytest.mark.parametrize("top", [0, 20])
@pytest.mark.parametrize("kind", ["whole", "stream of a client that does not read"])
def test_an_answer_takes_no_more_memory_than_was_reserved(frontend: HfFrontend, kind: str, top: int) -> None:
    size = AnswerSize(1, 1500, logprobs=True, top_logprobs=top, token_ids=True)
    peak = peak_bytes(lambda: make_answer(frontend, kind, top, size.max_tokens))
    assert peak <= size.num_bytes + MEBIBYTE


def test_every_token_is_taken_once_however_many_are_taken_at_once() -> None:
    sampling = Sampling(max_tokens=10, logprobs=0)
    sequence = ServedSequence(
        SequenceSpec("r.0", [1], [], sampling, 0.0, 2.0**40),
        RouteRequest("r", 1, 10),
        Timeline("r", 0.0),
        asyncio.Event(),
    )
    sequence.state.place("g", "p", [])
    for index in range(10):
        item = TokenItem("r.0", 0, index, 100 + index, "length" if index == 9 else None, -float(index))
        sequence.state.accept(item, "p", 1.0)
    taken = []
    for limit in count(1):
        if sequence.ended:
            break
        taken += sequence.state.take(limit)
    assert [(t.token_id, t.logprob) for t in taken] == [(100 + i, -float(i)) for i in range(10)]
    assert [t.finish_reason for t in taken] == [None] * 9 + ["length"]


def test_a_text_that_looks_like_log_probabilities_stays_text() -> None:
    text = '"logprobs":{"content":["choices"]}'
    wholes = [CompleteChoice(index, logprobs=True) for index in range(2)]
    for index, whole in enumerate(wholes):
        whole.add(AnswerPart(index, [text]))
    wholes[1].entries = [b'{"token":"x"}', b",", b'{"token":"y"}']
    completion = ChatCompletion(
        id="c",
        created=1,
        model="m",
        choices=[whole.choice(token_ids=False) for whole in wholes],
        usage=usage_of(prompt_details([PromptLayout(token_ids=[1], media=[])]), 2, 0),
    )
    answer = json.loads(b"".join(with_logprobs(completion.model_dump_json().encode(), wholes)))
    assert [choice["message"]["content"] for choice in answer["choices"]] == [text, text]
    assert [choice["logprobs"]["content"] for choice in answer["choices"]] == [
        [],
        [{"token": "x"}, {"token": "y"}],
    ]
