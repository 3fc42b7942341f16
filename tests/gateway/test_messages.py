"""Anthropic's official client against a gateway on real NATS, with workers that do as scripted."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from mmd_workers.wire.messages import GenerateRequest, Phase

from .media import png, url
from .running import Launch, Running
from .scripted import ScriptedWorker, answer_well

MODEL = "builtin/demo"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TEXT = "the red circle is left of the blue square"
IMAGE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}


@pytest.fixture
async def clients() -> AsyncIterator[Any]:
    opened: list[AsyncAnthropic] = []

    def client(gateway: Running) -> AsyncAnthropic:
        opened.append(AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=30))
        return opened[-1]

    yield client
    for one in opened:
        await one.close()


async def create(client: AsyncAnthropic, **options: Any) -> anthropic.types.Message:
    return await client.messages.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 64, **options})


async def prompt_of(gateway: Running, messages: list[dict[str, Any]]) -> list[int]:
    """The tokens of the same conversation as a chat."""
    return (await gateway.http.post("/tokenize", json={"messages": messages})).json()["tokens"]


async def test_a_message_is_answered_in_one_piece(launch: Launch, clients: Any) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    message = await create(clients(gateway))
    assert [(block.type, block.text) for block in message.content] == [("text", TEXT)]
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len(worker.answer)
    assert message.usage.input_tokens == len(worker.requests[0].token_ids)
    assert message.id == message._request_id
    assert (await gateway.admin.get(f"/debug/requests/{message.id}")).json()["usage"]["completion_tokens"]


async def test_a_streamed_message_has_the_events_of_the_api_in_their_order(
    launch: Launch, clients: Any
) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    stream = await create(clients(gateway), stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == TEXT
    assert events[0].message.usage.input_tokens == len(worker.requests[0].token_ids)
    assert (events[0].message.content, events[0].message.stop_reason) == ([], None)
    assert events[-2].delta.stop_reason == "end_turn"
    assert events[-2].usage.output_tokens == len(worker.answer)


async def test_the_clients_own_accumulation_of_a_stream_equals_the_whole_message(
    launch: Launch, clients: Any
) -> None:
    gateway = await launch()
    await gateway.worker(TEXT)
    client = clients(gateway)
    whole = await create(client, stop_sequences=["left"])
    options = {"model": MODEL, "messages": HELLO, "max_tokens": 64, "stop_sequences": ["left"]}
    async with client.messages.stream(**options) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
    assert text == whole.content[0].text == "the red circle is "
    assert message.to_dict() | {"id": ""} == whole.to_dict() | {"id": "", "stop_details": None}
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "left")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_answer_is_distinguished_from_a_full_context(
    launch: Launch, clients: Any, stream: bool
) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    for max_tokens, expected in [(3, "max_tokens"), (4, "model_context_window_exceeded")]:
        if max_tokens == 4:
            worker.max_model_len = len(worker.requests[0].token_ids) + 3
            await gateway.until_pod(worker.pod, lambda pod: pod["max_model_len"] == worker.max_model_len)
        answer = await create(clients(gateway), max_tokens=max_tokens, stream=stream)
        if stream:
            reasons = [event.delta.stop_reason async for event in answer if event.type == "message_delta"]
            assert reasons == [expected]
        else:
            assert (answer.stop_reason, answer.usage.output_tokens) == (expected, 3)


async def test_a_conversation_is_the_same_prompt_as_in_a_chat(launch: Launch, clients: Any) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    client = clients(gateway)
    answer = await create(client)
    image = {"type": "image_url", "image_url": {"url": url("image/png", png())}}
    text = {"type": "text", "text": "hello"}
    turns = [*HELLO, {"role": "assistant", "content": answer.content}]
    chat = [*HELLO, {"role": "assistant", "content": TEXT}]
    system = {"role": "system", "content": "Be brief."}
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    pairs: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        ({"messages": [*turns, *HELLO]}, [*chat, *HELLO]),
        ({"messages": HELLO, "system": "Be brief."}, [system, *HELLO]),
        ({"messages": HELLO, "system": [cached]}, [system, *HELLO]),
        ({"messages": [system, *HELLO]}, [system, *HELLO]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": IMAGE}, text]}]},
            [{"role": "user", "content": [image, text]}],
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            text,
                            {"type": "image", "source": {"type": "url", "url": url("image/png", png())}},
                        ],
                    }
                ]
            },
            [{"role": "user", "content": [text, image]}],
        ),
    ]
    for asked, same in pairs:
        expected = await prompt_of(gateway, same)
        message = await create(client, **asked)
        assert worker.requests[-1].token_ids == expected
        assert message.usage.input_tokens == len(expected)
        counted = await client.messages.count_tokens(model=MODEL, **asked)
        assert counted.input_tokens == len(expected)
    assert len(worker.requests[-1].features) == 1


async def test_how_to_sample_reaches_the_worker(launch: Launch, clients: Any) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await create(
        clients(gateway),
        extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 7},
        max_tokens=9,
        metadata={"user_id": "someone"},
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    sampling = worker.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.25, 7, 9)
    assert json.loads(sampling.grammar.source) == schema
    await create(clients(gateway))
    assert (worker.requests[1].sampling.temperature, worker.requests[1].sampling.grammar) == (1.0, None)


async def test_cached_tokens_are_not_input_tokens(launch: Launch, clients: Any) -> None:
    gateway = await launch()

    async def cached(worker: ScriptedWorker, request: GenerateRequest) -> None:
        now = time.time()
        await worker.phases(request, Phase("prefill", now, now, {"cached_tokens": 4}))
        await answer_well(worker, request)

    worker = await gateway.worker(TEXT, cached)
    message = await clients(gateway).messages.create(
        model=MODEL, messages=HELLO, max_tokens=64, extra_headers={"x-mmd-timings": "true"}
    )
    assert message.usage.cache_read_input_tokens == 4
    assert message.usage.input_tokens == len(worker.requests[0].token_ids) - 4
    assert message.to_dict()["timings"]["total"] > 0


def block(**source: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "user", "content": [{"type": "image", "source": source}]}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
    "too hot": ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
    "unknown": ({"seed": 3}, "unknown field seed; remove it"),
    "unknown in a source": (
        block(type="url", url="data:,", detail="low"),
        "unknown field messages.1.content.0.source.detail; remove it",
    ),
    "a file": (block(type="file", file_id="f"), "messages.1.content.0.source: unknown part type 'file'"),
    "no image": (
        {**block(type="base64", media_type="image/png", data="aGVsbG8="), "system": "x"},
        "messages.1.content.0.source: ",
    ),
    "another host": (
        {**block(type="url", url="http://127.0.0.1/x.png"), "system": [{"type": "text", "text": "x"}]},
        "messages.1.content.0.source: ",
    ),
    "a video": (block(type="base64", media_type="video/mp4", data="x"), "messages.1.content.0.source.media_type: "),
    "a document": (
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        "messages.0.content.0: unknown part type 'document'; use text or image",
    ),
    "a tool's result": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
        "messages.0.content.0: type 'tool_result' is not supported",
    ),
    "tools": ({"tools": [{"name": "f", "input_schema": {}}]}, "tools is not supported: describe"),
    "a forced tool": ({"tool_choice": {"type": "any"}}, "tool_choice is not supported"),
    "thinking": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not supported"),
    "a begun answer": (
        {"messages": [*HELLO, {"role": "assistant", "content": "I"}]},
        "messages.1: the answer cannot go on in a message of the assistant",
    ),
    "another role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: "),
    "an image as system": (
        {"system": [{"type": "image", "source": IMAGE}]},
        "unknown field system.0.source; remove it",
    ),
    "a schema that cannot be enforced": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format.schema: ",
    ),
    "a long prompt": (
        {"messages": [*HELLO, {"role": "user", "content": "red circle " * 2000}]},
        "the text has 22005 characters",
    ),
}  # fmt: skip


async def test_each_malformed_body_gets_an_error_that_names_the_field_as_it_was_sent(
    launch: Launch, subtests: Any
) -> None:
    gateway = await launch()
    await gateway.worker(TEXT, max_model_len=1024)
    for name, (changes, expected) in REFUSED.items():
        with subtests.test(name):
            body = {"model": MODEL, "messages": HELLO, "max_tokens": 8, **changes}
            response = await gateway.http.post("/v1/messages", json=body)
            answer = response.json()
            assert response.status_code == 400
            assert answer["type"] == "error"
            assert answer["error"]["type"] == "invalid_request_error"
            assert answer["error"]["message"].startswith(expected)
            assert answer["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    for changes, expected in [REFUSED["no image"], REFUSED["a tool's result"]]:
        body = {"model": MODEL, **changes}
        body.setdefault("messages", HELLO)
        counted = await gateway.http.post("/v1/messages/count_tokens", json=body)
        assert (counted.status_code, counted.json()["type"]) == (400, "error")
        assert counted.json()["error"]["message"].startswith(expected)


async def test_values_that_mean_off_are_taken(launch: Launch, clients: Any) -> None:
    gateway = await launch()
    await gateway.worker(TEXT)
    off: dict[str, Any] = {
        "tools": [],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "service_tier": "standard_only",
        "output_config": {"effort": "low"},
        "stop_sequences": [],
    }
    assert (await create(clients(gateway), **off)).content[0].text == TEXT
    nulls = dict.fromkeys([*off, "system", "temperature", "top_p", "top_k", "metadata", "cache_control"])
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 64, **nulls}
    assert (await gateway.http.post("/v1/messages", json=body)).status_code == 200


async def test_errors_have_the_statuses_and_types_that_the_client_knows(launch: Launch, clients: Any) -> None:
    gateway = await launch(requestTimeoutSeconds=1)
    client = clients(gateway)
    with pytest.raises(anthropic.NotFoundError, match="use 'builtin/demo'") as unknown:
        await create(client, model="claude")
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.APIStatusError, match="no Ready prefill pod") as held:
        await create(client)
    assert (held.value.status_code, held.value.body["error"]["type"]) == (529, "overloaded_error")
    assert held.value.response.headers["retry-after"]
    for path, method, status in [
        ("/v1/messages", "GET", 405),
        ("/v1/messages/batches", "POST", 404),
    ]:
        response = await gateway.http.request(method, path)
        assert (response.status_code, response.json()["type"]) == (status, "error")
        assert response.json()["error"]["type"] == "not_found_error"
    plain = await gateway.http.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"})
    assert (plain.status_code, plain.json()["error"]["type"]) == (415, "invalid_request_error")
