"""The official client against a gateway on real NATS, with workers that do as scripted."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from mmd_api.contract.sampling import LogitRules
from mmd_workers.features.references import layout_of
from mmd_workers.gateway.api import choices
from mmd_workers.gateway.content.parts import PART_TYPES
from mmd_workers.media import containers
from mmd_workers.media.choice import FoundFrames, SamplingChoice
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.wire.media import read_medium
from mmd_workers.wire.messages.gateway import TokenBatch, TokenItem
from mmd_workers.wire.messages.message_parts import FeatureRef, Phase
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.harness.waiting import DEADLINE_SECONDS
from tests.gateway.media import mp4, png, url, wav
from tests.gateway.running import Launch
from tests.gateway.scripted import ScriptedWorker, answer_well

HELLO = [{"role": "user", "content": "hello"}]
SCENES = Path(__file__).parents[2] / "media" / "files" / "scenes.mp4"
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


async def test_a_developer_is_the_system_to_the_model(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    for role in ("system", "developer"):
        turns = [{"role": role, "content": "Be brief."}, *HELLO]
        await gateway.openai.chat.completions.create(model=MODEL, messages=turns)
    await gateway.openai.chat.completions.create(model=MODEL, messages=HELLO)
    system, developer, neither = (request.token_ids for request in worker.requests)
    assert developer == system != neither


@pytest.mark.parametrize("detail", ["auto", "low", "high", "original"])
async def test_no_detail_changes_an_image_that_the_processor_gives_one_size(
    launch: Launch, detail: str
) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    picture = {"url": url("image/png", png())}
    for image in (picture, {**picture, "detail": detail}):
        part = {"type": "image_url", "image_url": image}
        answer = await gateway.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
        )
        assert answer.choices[0].message.content == "the red circle"
    plain, detailed = worker.requests
    assert detailed.token_ids == plain.token_ids
    (one,), (other,) = plain.features, detailed.features
    assert other.feature_id == one.feature_id


async def test_a_client_can_send_an_answer_back_as_the_next_turn(launch: Launch) -> None:
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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_each_chunk_has_the_usage_so_far_on_request(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    counted: list[int] = []
    details = choices.prompt_details

    def counting(layouts: Any) -> Any:
        counted.append(len(layouts))
        return details(layouts)

    monkeypatch.setattr(choices, "prompt_details", counting)
    gateway = await launch()
    worker = await gateway.worker("the red circle " * 8)
    asked = {"messages": HELLO} if "chat" in path else {"prompt": "hello"}
    for continuous in (True, False):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        body = {"model": MODEL, **asked, "max_tokens": 64, "stream": True, "stream_options": options}
        response = await gateway.http.post(path, json=body)
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        *chunks, last = [json.loads(line) for line in lines]
        prompt, tokens = len(worker.requests[-1].token_ids), len(worker.answer)
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (prompt, tokens)
        if continuous:
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert (counts[0] < tokens, counts[-1]) == (True, tokens)
            assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {prompt}
        else:
            assert all("usage" not in chunk for chunk in chunks)
    assert counted == [1, 1]  # the prompt of a stream is counted once


async def test_many_stop_strings_are_looked_for(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker("the red circle")
    stops = [*(f"never {number:02}" for number in range(63)), "circle"]
    answer = await gateway.openai.chat.completions.create(model=MODEL, messages=HELLO, stop=stops)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("the red ", "stop")


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
async def test_a_stop_string_across_tokens_ends_text_and_frees_the_worker(
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


@pytest.mark.parametrize("stream", [True, False])
async def test_bytes_of_log_probabilities_join_to_the_text(launch: Launch, stream: bool) -> None:
    """Also those of parts of a character, and the end token, which is no text, has none."""
    gateway = await launch()
    end = gateway.tokenizer.convert_tokens_to_ids("<|im_end|>")
    worker = await gateway.worker([*gateway.ids("the größer 😀 circle"), end])
    options = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 1}
    if stream:
        chunks = [c async for c in await gateway.openai.chat.completions.create(**options, stream=True)]
        entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    else:
        (choice,) = (await gateway.openai.chat.completions.create(**options)).choices
        entries, text = choice.logprobs.content, choice.message.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == text == "the größer 😀 circle"
    assert len(entries) == len(worker.answer)
    assert any("\ufffd" in entry.token for entry in entries), "a part of a character"
    assert (entries[-1].token, entries[-1].bytes) == ("<|im_end|>", [])
    assert all(entry.top_logprobs[0].bytes == entry.bytes for entry in entries)


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
            {"type": "file", "file": {"file_data": url("video/mp4", mp4()), "filename": "clip"}},
            {"type": "input_file", "file_data": base64.b64encode(wav()).decode()},
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
    modalities = ["image", "video", "audio", "audio", "image", "video", "audio"]
    assert [f.modality for f in request.features] == modalities
    for first, again in ((2, 3), (0, 4), (1, 5), (2, 6)):
        assert request.features[first].feature_id == request.features[again].feature_id
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


async def test_base64_is_read_as_encoders_write_it(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    plain = base64.b64encode(wav()).decode()
    texts = [
        plain,
        base64.encodebytes(wav()).decode(),
        base64.encodebytes(wav()).decode().replace("\n", "\r\n"),
        base64.urlsafe_b64encode(wav()).decode().rstrip("="),
        url("audio/wav", wav()),
    ]
    parts = [{"type": "input_audio", "input_audio": {"data": text, "format": "wav"}} for text in texts]
    parts += [{"type": "input_file", "file_data": text} for text in texts]
    await gateway.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    features = worker.requests[0].features
    assert len(features) == len(parts)
    assert len({feature.feature_id for feature in features}) == 1


def film(**choice: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url("video/mp4", mp4())}, **choice}


async def test_a_request_and_its_parts_choose_the_frames_of_videos(launch: Launch) -> None:
    gateway = await launch(media={"video": {"framesPerSecondMilli": 8000}})
    worker = await gateway.worker("the red circle")

    async def sent(*parts: dict[str, Any], **more: Any) -> list[FeatureRef]:
        messages = [{"role": "user", "content": list(parts)}]
        await gateway.openai.chat.completions.create(model=MODEL, messages=messages, extra_body=more)
        counted = await gateway.http.post("/tokenize", json={"messages": messages, **more})
        assert counted.json()["tokens"] == worker.requests[-1].token_ids
        return worker.requests[-1].features

    by_number, by_request, by_rate = features = await sent(
        film(num_frames=4), film(), film(fps=8), mm_processor_kwargs={"num_frames": 6}
    )
    assert [len(one.sampling["frame_indices"]) for one in features] == [4, 6, 8]
    assert by_number.num_tokens < by_request.num_tokens < by_rate.num_tokens
    assert len({one.feature_id for one in features}) == 3
    (at_most,) = await sent(film(max_frames=4))
    assert at_most.feature_id == by_number.feature_id, "the same frames are the same feature"
    (spelled,) = await sent(film(), mm_processor_kwargs={"fps": 8, "do_sample_frames": True})
    assert spelled.feature_id == (await sent(film()))[0].feature_id == by_rate.feature_id


def scenes(**choice: Any) -> dict[str, Any]:
    """Eight seconds of four scenes, with a key frame every 25 frames."""
    return {"type": "video_url", "video_url": {"url": url("video/mp4", SCENES.read_bytes())}, **choice}


async def test_frames_of_a_video_are_chosen_by_content_or_seconds(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")

    async def frames(*parts: dict[str, Any], **more: Any) -> list[list[int]]:
        messages = [{"role": "user", "content": list(parts)}]
        await gateway.openai.chat.completions.create(model=MODEL, messages=messages, extra_body=more)
        counted = await gateway.http.post("/tokenize", json={"messages": messages, **more})
        assert counted.json()["tokens"] == worker.requests[-1].token_ids
        return [one.sampling["frame_indices"] for one in worker.requests[-1].features]

    keys, changes, times = [0, 25, 50, 75], [0, 20, 40, 60], [19, 20, 79]
    ways = (
        {"sampling": "keyframes"},
        {"sampling": "scene_changes"},
        {"timestamps": [1.9, 2, 7.95]},
    )
    assert await frames(*(scenes(**way) for way in ways)) == [keys, changes, times]
    assert len({one.feature_id for one in worker.requests[-1].features}) == 3
    for one in worker.requests[-1].features:
        assert one.num_tokens == sum(length for _, length in one.ranges)
        assert "nominal_indices" not in one.sampling
    for_all = {"mm_processor_kwargs": {"sampling": "scene_changes"}}
    uniform = [(await frames(scenes()))[0], (await frames(scenes(fps=1)))[0]]
    assert changes != uniform[0] != keys
    chosen = scenes(), scenes(fps=1), scenes(timestamps=[1.9, 2, 7.95]), scenes(sampling="uniform")
    assert await frames(*chosen, **for_all) == [changes, uniform[1], times, uniform[0]]
    assert await frames(scenes(max_frames=2), **for_all) == [[0, 60]], "thinned evenly"
    by_time = scenes(timestamps=[0, 2.5, 5, 7.5])
    assert await frames(by_time, scenes(sampling="keyframes")) == [keys, keys]
    assert len({one.feature_id for one in worker.requests[-1].features}) == 1, "the same frames"


async def test_a_timestamp_after_the_end_of_a_video_is_refused(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker("the red circle")
    messages = [{"role": "user", "content": [scenes(), scenes(timestamps=[0, 8, 8.5])]}]
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.openai.chat.completions.create(model=MODEL, messages=messages)
    error = refused.value.body
    assert error["param"] == "messages[0].content[1].timestamps[2]"
    assert "8.5 s is beyond the end of the video, which lasts 8.000 s; request" in error["message"]


async def test_an_operator_chooses_how_frames_are_chosen_and_a_request_wins(launch: Launch) -> None:
    gateway = await launch(media={"video": {"sampling": "SceneChanges"}})
    worker = await gateway.worker("the red circle")

    async def frames(*parts: dict[str, Any]) -> list[list[int]]:
        messages = [{"role": "user", "content": list(parts)}]
        await gateway.openai.chat.completions.create(model=MODEL, messages=messages)
        return [one.sampling["frame_indices"] for one in worker.requests[-1].features]

    chosen = scenes(), scenes(sampling="keyframes"), scenes(num_frames=2), scenes(max_frames=2)
    assert await frames(*chosen) == [[0, 20, 40, 60], [0, 25, 50, 75], [0, 40], [0, 60]]


async def test_a_scene_search_is_made_once_for_the_turns_of_a_conversation(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = list[str]()
    search = DecodePool.find_frames

    async def counted(pool: DecodePool, data: bytes, info: MediumInfo, choice: SamplingChoice) -> FoundFrames:
        searched.append(str(choice.sampling))
        return await search(pool, data, info, choice)

    monkeypatch.setattr(DecodePool, "find_frames", counted)
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    turn = {"role": "user", "content": [scenes(sampling="scene_changes")]}
    more = [turn, {"role": "assistant", "content": "the red circle"}, {"role": "user", "content": "and?"}]
    for messages in ([turn], more):
        await gateway.openai.chat.completions.create(model=MODEL, messages=messages)
    assert searched == ["scene_changes"]
    first, second = (request.features[0] for request in worker.requests)
    assert first == second


@pytest.mark.parametrize(
    "way", [{"sampling": "keyframes"}, {"sampling": "scene_changes"}, {"timestamps": [0, 2, 4, 6]}], ids=str
)
async def test_found_frames_are_left_out_evenly_where_the_prompt_would_not_fit(
    launch: Launch, way: dict[str, Any]
) -> None:
    gateway = await launch(media={"video": {"tooLong": "FewerFrames"}})
    worker = await gateway.worker("the red circle", max_model_len=80)
    messages = [{"role": "user", "content": [scenes(**way), scenes(**way)]}]
    answer = await gateway.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=9)
    (request,) = worker.requests
    kept = [one.sampling["frame_indices"] for one in request.features]
    assert len(request.token_ids) <= 80 - 9
    assert kept[0] == kept[1]
    assert kept[0][0] == 0
    assert answer.usage.prompt_tokens_details.model_dump()["omitted_video_frames"] == 8 - 2 * len(kept[0]) > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_videos_lose_frames_to_fit_and_the_answer_reports_it(launch: Launch, stream: bool) -> None:
    gateway = await launch(media={"video": {"tooLong": "FewerFrames"}})
    worker = await gateway.worker("the red circle", max_model_len=120)
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [film(), film()]}],
        "max_tokens": 9,
        "stream": stream,
    }
    if stream:
        request["stream_options"] = {"include_usage": True}
    whole = (await gateway.http.post("/tokenize", json={"messages": request["messages"]})).json()["count"]
    answer = await gateway.http.post("/v1/chat/completions", json=request)
    assert answer.status_code == 200, answer.text
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    omitted = json.loads(events[-1] if stream else answer.text)["usage"]["prompt_tokens_details"]
    sent = worker.requests[0]
    frames = [len(one.sampling["frame_indices"]) for one in sent.features]
    assert frames[0] == frames[1] in (4, 6), "evenly, and no fewer than needed"
    assert len(sent.token_ids) <= 120 - 9 < whole
    assert omitted["omitted_video_frames"] == int(answer.headers["x-mmd-omitted-video-frames"])
    assert omitted["omitted_video_frames"] == 16 - sum(frames)

    same = [film(max_frames=frames[0]), film(max_frames=frames[0])]
    await gateway.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": same}], max_tokens=9
    )
    again = worker.requests[1]
    assert (again.token_ids, again.features) == (sent.token_ids, sent.features), "as exact as a choice"


@pytest.mark.parametrize(
    ("parts", "max_model_len", "named"),
    [
        ([{"type": "text", "text": "red " * 150}], 120, "the largest part is the text"),
        ([], 12, "the largest part is messages[0].content[0].video_url.url"),
    ],
    ids=["the text is too long", "the least frames and pixels are too many"],
)
async def test_a_prompt_too_long_with_fewest_frames_and_pixels_is_refused(
    launch: Launch, parts: list[dict[str, Any]], max_model_len: int, named: str
) -> None:
    gateway = await launch(media={"video": {"tooLong": "FewerFrames"}})
    await gateway.worker("the red circle", max_model_len=max_model_len)
    request = {"model": MODEL, "messages": [{"role": "user", "content": [film(), film(), *parts]}]}
    answer = await gateway.http.post("/v1/chat/completions", json=request)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert named in answer.json()["error"]["message"]


async def test_a_refusal_for_too_many_frames_names_the_setting_for_fewer(
    launch: Launch,
) -> None:
    gateway = await launch()
    await gateway.worker("the red circle", max_model_len=120)
    request = {"model": MODEL, "messages": [{"role": "user", "content": [film(), film()]}]}
    answer = await gateway.http.post("/v1/chat/completions", json=request)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "spec.gateway.media.video.tooLong to FewerFrames" in answer.json()["error"]["message"]


async def test_a_request_and_its_parts_choose_the_pixels_of_images(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    address = url("image/png", png())
    picture = {"type": "image_url", "image_url": {"url": address}}
    parts = [
        picture,
        {**picture, "max_pixels": 1024},
        {"type": "input_image", "image_url": address, "max_pixels": 1024},
        {**picture, "image_url": {"url": address, "detail": "low"}},
        {**picture, "max_pixels": 4096},
    ]
    messages = [{"role": "user", "content": parts}]
    kwargs = {"mm_processor_kwargs": {"max_pixels": 2304}}
    await gateway.openai.chat.completions.create(model=MODEL, messages=messages, extra_body=kwargs)
    by_request, small, input_image, low, whole = features = worker.requests[0].features
    assert [one.num_tokens for one in features] == [9, 4, 4, 9, 16]
    assert by_request.size == {"shortest_edge": 2304, "longest_edge": 2304}
    assert small.size == layout_of(small).sampling.size == {"shortest_edge": 1024, "longest_edge": 1024}
    assert low.size == by_request.size
    assert whole.size == {}
    names = {"frame_indices", "sample_rate_hz", "num_samples"}
    assert all(set(one.sampling) == names for one in features), "as pods of before read it"
    assert small.feature_id == input_image.feature_id
    assert low.feature_id == by_request.feature_id
    assert len({one.feature_id for one in features}) == 3


async def test_the_gateway_opens_no_medium_in_its_own_process(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await launch(with_decoders=True)
    worker = await gateway.worker("the red circle")

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("opened outside the sandbox")

    monkeypatch.setattr(containers, "open_image", opened)
    monkeypatch.setattr(containers, "open_av", opened)
    await gateway.openai.chat.completions.create(model=MODEL, messages=MIXED)
    modalities = ["image", "video", "audio", "audio", "image", "video", "audio"]
    assert [f.modality for f in worker.requests[0].features] == modalities
    assert await gateway.metric("mmd_sandbox_layer_state") >= 1


async def test_messages_and_tracing_are_warmed_up_before_the_gateway_is_ready(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    exposed = (await (await launch(with_decoders=True)).admin.get("/metrics")).text
    phases = re.findall(r'^mmd_startup_seconds\{phase="(\w+)"\}', exposed, re.MULTILINE)
    warm_ups = ["messages", "tracing", "audio", "image", "video"]
    assert phases == ["sandbox", *(f"warm_up_{name}" for name in warm_ups)]
    assert [line for line in caplog.messages if line.startswith("warm-up of ")] == []  # none failed


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
    phases = {p["name"]: p for p in timeline["phases"]}
    assert phases.keys() >= {"fetch", "layout", "queue", "encode", "prefill", "generate"}
    assert phases["generate"]["start"] == timeline["last_token"]
    assert timeline["phase"] == ""
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


async def test_a_sound_beyond_the_window_is_refused_unless_truncation_is_allowed(
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
