"""The official client against a gateway on real NATS, with workers that do as scripted."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import wave
from dataclasses import replace

import openai
import pytest

from mmd_api.contract.sampling import LogitRules
from mmd_workers.gateway.parts import PART_TYPES
from mmd_workers.media import containers
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.wire.media import read_medium
from mmd_workers.wire.messages import GenerateRequest, Phase, TokenBatch, TokenItem
from tests.support.waiting import DEADLINE_SECONDS

from .media import mp4, png, url, wav
from .running import Launch
from .scripted import ScriptedWorker, answer_well

HELLO = [{"role": "user", "content": "hello"}]
MODEL = "builtin/demo"


async def test_a_text_request_is_answered_in_one_piece(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    answer = await gateway.openai.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
    assert answer.choices[0].message.content == "the red circle"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(worker.answer)
    assert answer.usage.prompt_tokens == len(worker.requests[0].token_ids)
    assert worker.requests[0].decode_pods == []


async def test_a_streamed_answer_comes_in_pieces_that_join_to_the_text(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker("the red circle")
    stream = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == "the red circle"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0


async def test_an_answer_can_be_sent_back_as_the_next_turn_as_the_client_keeps_it(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    create = gateway.openai.chat.completions.create
    message = (await create(model=MODEL, messages=HELLO)).choices[0].message
    for turn in (
        message,
        message.model_dump(),
        {**message.model_dump(), "tool_calls": [], "annotations": []},
    ):
        answer = await create(model=MODEL, messages=[*HELLO, turn, *HELLO])
        assert answer.choices[0].message.content == "the red circle"
    assert len({tuple(request.token_ids) for request in worker.requests[1:]}) == 1


async def test_stream_options_that_are_null_mean_their_defaults(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker("the red circle")
    options = {"include_usage": None, "include_obfuscation": None}
    stream = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "the red circle"
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [True, False])
async def test_token_ids_of_the_answer_are_returned_on_request(launch: Launch, stream: bool) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle and the blue square")
    options = {"model": MODEL, "messages": HELLO, "n": 2, "extra_body": {"return_token_ids": True}}
    if stream:
        parts = [
            choice
            async for chunk in await gateway.openai.chat.completions.create(**options, stream=True)
            for choice in chunk.choices
        ]
    else:
        parts = (await gateway.openai.chat.completions.create(**options)).choices
    for index in range(2):
        token_ids = [token for part in parts if part.index == index for token in part.token_ids]
        assert token_ids == worker.answer


async def test_token_ids_are_not_returned_unless_requested(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker("the red circle")
    answer = await gateway.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert "token_ids" not in answer.choices[0].to_dict()
    chunks = [
        c
        async for c in await gateway.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    ]
    assert all("token_ids" not in choice.to_dict() for chunk in chunks for choice in chunk.choices)


async def test_chunks_have_the_fields_of_the_api_alone(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker("the red circle")
    stream = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stop=["circle"]
    )
    choices = [choice.to_dict() async for chunk in stream for choice in chunk.choices]
    assert choices[-1]["finish_reason"] == "stop"
    assert {frozenset(choice) for choice in choices} == {
        frozenset({"index", "delta", "logprobs", "finish_reason"})
    }


async def test_the_synchronous_client_works_as_well(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker("the red circle")

    def ask() -> str:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            assert [m.id for m in client.models.list()] == [MODEL]
            chunks = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            return "".join(c.choices[0].delta.content or "" for c in chunks)

    assert await asyncio.to_thread(ask) == "the red circle"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_across_tokens_ends_the_text_before_it_and_frees_the_worker(
    launch: Launch, stream: bool
) -> None:
    gateway = await launch()
    stopped = asyncio.Event()

    async def go_on(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.tokens(request, list(range(len(worker.answer))), finish=False)
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()

    worker = await gateway.worker("the red circle and the blue square", go_on)
    options = {"model": MODEL, "messages": HELLO, "stop": ["d cir", "never"], "max_tokens": 100}
    if stream:
        chunks = [c async for c in await gateway.openai.chat.completions.create(**options, stream=True)]
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = await gateway.openai.chat.completions.create(**options)
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == ("the re", "stop")
    await asyncio.wait_for(stopped.wait(), DEADLINE_SECONDS)
    assert worker.cancels[0].request_id == worker.requests[0].request_id


async def test_n_answers_are_separate_sequences_with_seeds_of_their_own(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    stream = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HELLO, n=3, seed=7, stream=True, stream_options={"include_usage": True}
    )
    texts = {0: "", 1: "", 2: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        if chunk.usage:
            assert chunk.usage.completion_tokens == 3 * len(worker.answer)
            assert chunk.usage.prompt_tokens == len(worker.requests[0].token_ids)
    assert set(texts.values()) == {"the red circle"}
    assert sorted(r.sampling.seed for r in worker.requests) == [7, 8, 9]
    assert len({r.request_id for r in worker.requests}) == 3


async def test_an_answer_that_ends_first_leaves_the_others_their_time(launch: Launch) -> None:
    gateway = await launch()
    first_is_over = asyncio.Event()

    async def script(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if request.sampling.seed != 7:
            await first_is_over.wait()
        await worker.tokens(request, list(range(len(worker.answer))))

    await gateway.worker("the red circle", script)
    texts = {0: "", 1: ""}
    stream = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HELLO, n=2, seed=7, stream=True
    )
    async with asyncio.timeout(20):
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    first_is_over.set()
    assert set(texts.values()) == {"the red circle"}


@pytest.mark.parametrize("stream", [True, False])
async def test_log_probabilities_come_token_by_token(launch: Launch, stream: bool) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    options = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = [c async for c in await gateway.openai.chat.completions.create(**options, stream=True)]
        entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    else:
        answer = await gateway.openai.chat.completions.create(**options)
        entries = answer.choices[0].logprobs.content
    assert len(entries) == len(worker.answer)
    assert "".join(e.token for e in entries).replace(" ", "") == "theredcircle"
    assert all(e.logprob == -0.25 and len(e.top_logprobs) == 2 for e in entries)
    assert all(bytes(e.bytes).decode() == e.token for e in entries)


async def test_the_limit_of_tokens_is_named_as_the_reason(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker("the red circle")
    answer = await gateway.openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2


async def test_sampling_reaches_the_worker_and_a_seed_is_always_chosen(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    await gateway.openai.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0.5, top_p=0.9, max_completion_tokens=9,
        extra_body={"top_k": 4, "ignore_eos": True},
    )  # fmt: skip
    await gateway.openai.chat.completions.create(model=MODEL, messages=HELLO)
    first, second = (r.sampling for r in worker.requests)
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.5, 0.9, 4, 9)
    assert first.ignore_eos
    assert second.temperature == 1.0
    assert first.seed != second.seed


async def test_rules_reach_the_worker_and_are_the_same_for_every_choice(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    await gateway.openai.chat.completions.create(
        model=MODEL, messages=HELLO, n=2, frequency_penalty=0.5, presence_penalty=-1, logit_bias={"7": 3},
        extra_body={"repetition_penalty": 1.2, "min_p": 0.1, "bad_words": ["red"], "allowed_token_ids": [7, 9], "min_tokens": 2, "stop_token_ids": [9]},
    )  # fmt: skip
    first, second = (r.sampling for r in worker.requests)
    assert first.rules == LogitRules(
        [7, 9], [gateway.ids("red"), gateway.ids(" red")], [(7, 3.0)], 1.2, 0.5, -1.0
    )
    assert (first.min_p, first.min_tokens, first.stop_token_ids) == (0.1, 2, [9])
    assert replace(second, seed=first.seed) == first


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_token_is_counted_and_no_text(launch: Launch, stream: bool) -> None:
    gateway = await launch()
    ids = gateway.ids("the red circle")
    await gateway.worker("the red circle")
    answer = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=stream, extra_body={"stop_token_ids": [ids[-1]], "return_token_ids": True}
    )  # fmt: skip
    if stream:
        choices = [chunk.choices[0] async for chunk in answer if chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        token_ids = [token for choice in choices for token in choice.token_ids]
    else:
        choices = answer.choices
        text, token_ids = choices[0].message.content, choices[0].token_ids
    assert (text, choices[-1].finish_reason) == ("the red", "stop")
    assert token_ids == ids
    other = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=len(ids) - 1, extra_body={"stop_token_ids": [ids[-1]]}
    )
    assert (other.choices[0].message.content, other.choices[0].finish_reason) == ("the red", "length")


async def test_a_stop_string_within_the_least_tokens_does_not_end_the_answer(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker("the red circle and the red square")
    red = len(gateway.ids("the red"))

    async def text(least: int) -> str:
        answer = await gateway.openai.chat.completions.create(
            model=MODEL, messages=HELLO, stop="red", extra_body={"min_tokens": least}
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content

    assert [await text(least) for least in (0, red - 1)] == ["the "] * 2
    assert await text(red) == "the red circle and the "
    assert await text(len(gateway.ids("the red circle and the red"))) == "the red circle and the red square"


MIXED = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": url("image/png", png())}},
            {"type": "text", "text": "what colour?"},
            {"type": "video_url", "video_url": {"url": url("video/mp4", mp4())}},
            {
                "type": "input_audio",
                "input_audio": {"data": base64.b64encode(wav()).decode(), "format": "wav"},
            },
            {"type": "audio_url", "audio_url": {"url": url("audio/wav", wav())}},
            {"type": "input_text", "text": "and here?"},
            {"type": "input_image", "image_url": url("image/png", png())},
        ],
    }
]


async def test_media_are_counted_identified_held_for_encoders_and_let_go(launch: Launch) -> None:
    assert {part["type"] for part in MIXED[0]["content"]} == set(PART_TYPES), "every type of part is sent"
    gateway = await launch()
    read: dict[str, bytes] = {}

    async def encode_then_answer(worker: ScriptedWorker, request: GenerateRequest) -> None:
        for feature in request.features:
            read[feature.digest] = await read_medium(
                worker.bus, request.gateway, feature.digest, feature.num_bytes, request.deadline
            )
        await answer_well(worker, request)

    worker = await gateway.worker("the red circle", encode_then_answer)
    answer = await gateway.openai.chat.completions.create(model=MODEL, messages=MIXED)
    request = worker.requests[0]
    assert [f.modality for f in request.features] == ["image", "video", "audio", "audio", "image"]
    assert request.features[2].feature_id == request.features[3].feature_id
    assert request.features[0].feature_id == request.features[4].feature_id
    assert {png(), wav()} < set(read.values())
    assert len(read) == 3
    for feature in request.features:
        assert sum(length for _, length in feature.ranges) == feature.num_tokens
        assert feature.work > 0
    details = answer.usage.prompt_tokens_details.model_dump()
    for modality in ("image", "video", "audio"):
        assert details[f"{modality}_tokens"] == sum(
            f.num_tokens for f in request.features if f.modality == modality
        )
    parts = sum(details[f"{kind}_tokens"] for kind in ("text", "image", "video", "audio"))
    assert parts == answer.usage.prompt_tokens == len(request.token_ids)
    await gateway.until_metric("mmd_media_held_bytes", 0)
    await gateway.until_metric("mmd_gateway_media_items", 0)


async def test_the_gateway_opens_no_medium_in_its_own_process(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("opened outside the sandbox")

    monkeypatch.setattr(containers, "open_image", opened)
    monkeypatch.setattr(containers, "open_av", opened)
    await gateway.openai.chat.completions.create(model=MODEL, messages=MIXED)
    assert [f.modality for f in worker.requests[0].features] == ["image", "video", "audio", "audio", "image"]
    assert await gateway.metric("mmd_sandbox_layer_state") >= 1


async def test_the_gateway_has_made_its_messages_and_its_tracing_before_it_is_ready(launch: Launch) -> None:
    exposed = (await (await launch()).admin.get("/metrics")).text
    phases = re.findall(r'^mmd_startup_seconds\{phase="(\w+)"\}', exposed, re.MULTILINE)
    warm_ups = ["messages", "tracing", "audio", "image", "video"]
    assert phases == ["sandbox", *(f"warm_up_{name}" for name in warm_ups)]


async def test_timings_and_the_timeline_join_what_every_pod_reported(launch: Launch) -> None:
    gateway = await launch()

    async def report(worker: ScriptedWorker, request: GenerateRequest) -> None:
        at = request.arrived
        await worker.phases(
            request,
            Phase("queue", at, at + 0.010),
            Phase("encode", at, at + 0.020),
            Phase("encode", at + 0.010, at + 0.030),
            Phase("prefill", at + 0.030, at + 0.050, {"cached_tokens": 3}),
        )
        await answer_well(worker, request)

    await gateway.worker("the red circle", report)
    response = await gateway.http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": HELLO}, headers={"x-mmd-timings": "true"}
    )
    timings = response.json()["timings"]
    assert timings["queue"] == pytest.approx(10, abs=0.1)
    assert timings["encode"] == pytest.approx(30, abs=0.1), "overlapping intervals count once"
    assert timings["prefill"] == pytest.approx(20, abs=0.1)
    assert 0 < timings["ttft"] <= timings["total"]
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    request_id = response.headers["x-request-id"]
    assert request_id == response.json()["id"]
    assert response.headers["x-mmd-gateway"] == "gateway-0"
    timeline = (await gateway.admin.get(f"/debug/requests/{request_id}")).json()
    assert {p["name"] for p in timeline["phases"]} >= {"fetch", "layout", "queue", "encode", "prefill"}
    assert timeline["attempts"][0]["prefill_pod"] == "decode-0"
    assert timeline["finished"] >= timeline["first_token"] > timeline["arrived"]
    newest = (await gateway.admin.get("/debug/requests?limit=1")).json()["requests"]
    assert [r["request_id"] for r in newest] == [request_id]
    stream = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, extra_body={"timings": True}
    )
    last = [chunk async for chunk in stream][-1]
    assert last.model_extra["timings"]["prefill"] == pytest.approx(20, abs=0.1)


async def test_a_hundred_at_once_all_get_their_own_answer(launch: Launch) -> None:
    gateway = await launch()

    async def echo(worker: ScriptedWorker, request: GenerateRequest) -> None:
        worker_answer = [*worker.answer[: 1 + request.sampling.top_k % len(worker.answer)]]
        for index, token_id in enumerate(worker_answer):
            last = index == len(worker_answer) - 1
            item = TokenItem(request.request_id, request.attempt, index, token_id, "stop" if last else None)
            await worker.bus.publish(
                worker.bus.subjects.tokens(request.gateway), TokenBatch(worker.pod, 0, [item])
            )

    workers = [await gateway.worker("the red circle is left of the blue square", echo) for _ in range(3)]
    answer = workers[0].answer

    async def ask(number: int) -> bool:
        stream = await gateway.openai.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, extra_body={"top_k": number}
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
        return text == gateway.tokenizer.decode(answer[: 1 + number % len(answer)])

    assert all(await asyncio.gather(*(ask(number) for number in range(100))))
    counts = [len(w.requests) for w in workers]
    assert sum(counts) == 100
    assert min(counts) >= 15, f"the load is spread: {counts}"
    await gateway.until_metric("mmd_gateway_sequences", 0)
    await gateway.until_metric("mmd_requests_running", 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_about_truncated_audio_reports_how_much_is_missing(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(
        Adapter, "max_audio_samples", lambda *_: 4000
    )  # the demo model's tower has no such limit
    gateway = await launch(media={"audio": {"tooLong": "Truncate"}})
    worker = await gateway.worker("a beep")
    sound = {"type": "audio_url", "audio_url": {"url": url("audio/wav", wav())}}
    request = {"model": MODEL, "messages": [{"role": "user", "content": [sound]}], "stream": stream}
    if stream:
        request["stream_options"] = {"include_usage": True}
    answer = await gateway.http.post("/v1/chat/completions", json=request)
    assert answer.status_code == 200, answer.text
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    usage = json.loads(events[-1] if stream else answer.text)["usage"]
    missing = usage["prompt_tokens_details"]["truncated_audio_seconds"]
    (sent,) = worker.requests[0].features
    assert sent.sampling["num_samples"] == 4000
    with wave.open(io.BytesIO(wav())) as file:
        assert missing == pytest.approx(file.getnframes() / file.getframerate() - 0.25, abs=0.001)
    assert float(answer.headers["x-mmd-truncated-audio-seconds"]) == missing


async def test_a_sound_beyond_the_window_is_refused_unless_the_resource_allows_to_truncate_it(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adapter, "max_audio_samples", lambda *_: 4000)
    gateway = await launch()
    sound = {"type": "audio_url", "audio_url": {"url": url("audio/wav", wav())}}
    request = {"model": MODEL, "messages": [{"role": "user", "content": [sound]}]}
    answer = await gateway.http.post("/v1/chat/completions", json=request)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "unsupported_input"
    assert "this model accepts at most 0.2 s" in error["message"]
