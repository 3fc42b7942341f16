"""The official client's Responses API against a gateway on real NATS, with workers that do as scripted."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from mmd_workers.gateway import answers

from .media import png, url, wav
from .running import Launch, Running

MODEL = "builtin/demo"
TEXT = "the red circle is left of the blue square"
PICTURE = url("image/png", png())


async def create(gateway: Running, **options: Any) -> Any:
    return await gateway.openai.responses.create(**{"model": MODEL, "input": "hello", **options})


async def prompt_of(gateway: Running, messages: list[dict[str, Any]]) -> list[int]:
    """The tokens of the same conversation as a chat."""
    return (await gateway.http.post("/tokenize", json={"messages": messages})).json()["tokens"]


async def test_a_response_is_answered_in_one_piece(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    response = await create(gateway, metadata={"run": "7"}, instructions="Be brief.", store=False)
    assert response.output_text == TEXT
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (response.metadata, response.instructions, response.store) == ({"run": "7"}, "Be brief.", False)
    assert (response.temperature, response.top_p, response.tools) == (1.0, 1.0, [])
    prompt, answer = len(worker.requests[0].token_ids), len(worker.answer)
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (prompt, answer, prompt + answer)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    assert (await gateway.admin.get(f"/debug/requests/{response.id}")).status_code == 200


async def test_a_streamed_response_has_the_events_of_the_api_numbered_in_their_order(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker(TEXT)
    events = [event async for event in await create(gateway, stream=True)]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == TEXT
    assert events[-3].part.text == events[-2].item.content[0].text == events[-1].response.output_text == TEXT
    assert events[0].response.status == events[1].response.status == "in_progress"
    assert {event.item_id for event in events[3:-2]} == {events[2].item.id, events[-1].response.output[0].id}
    assert events[-1].response.usage.output_tokens > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_response_is_incomplete(launch: Launch, stream: bool) -> None:
    gateway = await launch()
    await gateway.worker(TEXT)
    answer = await create(gateway, max_output_tokens=3, stream=stream)
    if stream:
        last = [event async for event in answer][-1]
        assert last.type == "response.incomplete"
        answer = last.response
    assert (answer.status, answer.output[0].status) == ("incomplete", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert TEXT.startswith(answer.output_text)
    assert answer.usage.output_tokens == answer.max_output_tokens == 3


async def test_the_clients_own_accumulation_of_a_stream_equals_the_whole_response(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker(TEXT)
    whole = (await create(gateway)).to_dict()
    async with gateway.openai.responses.stream(model=MODEL, input="hello") as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        final = (await stream.get_final_response()).to_dict()
    assert text == TEXT
    for response in (whole, final):
        for name in ("id", "created_at", "completed_at"):
            assert response.pop(name)
        assert response["output"][0].pop("id")
        response["output"][0]["content"][0].pop("parsed", None)
    assert final == whole


async def test_a_conversation_is_the_same_prompt_as_in_a_chat(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    answer = await create(gateway)
    hello = {"role": "user", "content": "hello"}
    system = {"role": "system", "content": "Be brief."}
    image = {"type": "image_url", "image_url": {"url": PICTURE}}
    text = {"type": "text", "text": "hello"}
    seen = {"type": "input_image", "image_url": PICTURE, "detail": "auto"}
    read = {"type": "input_text", "text": "hello"}
    turns = [hello, {"role": "assistant", "content": TEXT}, hello]
    pairs: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        ({"input": "hello"}, [hello]),
        ({"input": "hello", "instructions": "Be brief."}, [system, hello]),
        ({"input": [{**system, "role": "developer"}, {"type": "message", **hello}]}, [system, hello]),
        ({"input": [hello, *answer.output, hello]}, turns),
        ({"input": [hello, answer.output[0].model_dump(), hello]}, turns),
        ({"input": turns}, turns),
        (
            {"input": [{"role": "user", "content": [seen, read]}]},
            [{"role": "user", "content": [image, text]}],
        ),
    ]
    for asked, same in pairs:
        expected = await prompt_of(gateway, same)
        response = await create(gateway, **asked)
        assert worker.requests[-1].token_ids == expected
        assert response.usage.input_tokens == len(expected)
    assert len(worker.requests[-1].features) == 1


async def test_how_to_sample_reaches_the_worker(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "seen", "schema": schema, "strict": True}
    response = await create(
        gateway, temperature=0.5, top_p=0.25, max_output_tokens=9, text={"format": form, "verbosity": "low"}
    )
    sampling = worker.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 9)
    assert json.loads(sampling.grammar.source) == schema
    assert (response.temperature, response.top_p) == (0.5, 0.25)
    assert response.text.format.to_dict() == {**form, "description": None}
    await create(gateway, text={"format": {"type": "json_object"}})
    assert worker.requests[1].sampling.grammar.source == '{"type":"object"}'
    await create(gateway, text={"format": {"type": "text"}})
    assert worker.requests[2].sampling.grammar is None
    assert worker.requests[2].sampling.max_tokens > 64


def item(*content: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "x"}, {"role": "user", "content": list(content)}]}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "stored": ({"store": True}, "store", "responses are not stored; set it to false or omit it"),
    "previous": ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation in input"),
    "a conversation": ({"conversation": "conv_1"}, "conversation", "send the whole conversation in input"),
    "in the background": ({"background": True}, "background", "omit it, and stream long answers"),
    "tools": ({"tools": [{"type": "web_search"}]}, "tools", "tools is not supported: describe"),
    "a forced tool": ({"tool_choice": "required"}, "tool_choice", "omit it"),
    "a call": ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]", "type 'function_call' is not supported"),
    "a reference": ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0]", "type 'item_reference' is not supported"),
    "unknown": ({"n": 2}, "n", "unknown field n; remove it"),
    "a file": (item({"type": "input_file", "file_id": "1"}), "input[1].content[0]", "unknown part type 'input_file'"),
    "an image's id": (item({"type": "input_image", "file_id": "1"}), "input[1].content[0].file_id", "unknown field"),
    "no image": (
        {**item({"type": "input_image", "image_url": "data:image/png;base64,aGVsbG8="}), "instructions": "x"},
        "input[1].content[0].image_url",
        "input[1].content[0].image_url: ",
    ),
    "another modality": (
        {**item({"type": "input_text", "text": "x"}, {"type": "audio_url", "audio_url": {"url": url("audio/wav", wav()[:60])}})},
        "input[1].content[1].audio_url.url",
        "input[1].content[1].audio_url.url: ",
    ),
    "no answer": ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    "metadata": ({"metadata": {"a": 1}}, "metadata", "the value of 'a' must be a string"),
    "a schema without a name": ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format", "requires name and schema"),
    "a schema that cannot be enforced": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
        "text.format.schema",
        "text.format.schema: ",
    ),
    "a long prompt": ({"input": "red circle " * 2000}, "input", "the text has 22000 characters"),
}  # fmt: skip


async def test_each_malformed_body_gets_an_error_that_names_the_field_as_it_was_sent(
    launch: Launch, subtests: Any
) -> None:
    gateway = await launch()
    await gateway.worker(TEXT, max_model_len=1024)
    for name, (changes, param, expected) in REFUSED.items():
        with subtests.test(name):
            response = await gateway.http.post(
                "/v1/responses", json={"model": MODEL, "input": "x", **changes}
            )
            error = response.json()["error"]
            assert (response.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["param"] == param
            assert expected in error["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_room_is_reserved_for_the_text_and_for_what_the_response_repeats(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(answers, "BUDGET_DIVISOR", 1 << 60)
    monkeypatch.setattr(answers, "ALLOWANCE_BYTES", 64 * answers.TOKEN_BYTES)
    gateway = await launch()
    await gateway.worker(TEXT)
    await create(gateway, max_output_tokens=64, stream=stream)
    for more in ({"max_output_tokens": 65}, {"max_output_tokens": 64, "instructions": "x"}):
        with pytest.raises(openai.BadRequestError, match="; lower max_output_tokens, or raise") as caught:
            await create(gateway, **more, stream=stream)
        assert (caught.value.code, caught.value.param) == ("too_large", "max_output_tokens")


async def test_values_that_mean_off_are_taken(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker(TEXT)
    off: dict[str, Any] = {
        "tools": [],
        "tool_choice": "auto",
        "store": False,
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low"},
        "service_tier": "auto",
    }
    assert (await create(gateway, **off)).output_text == TEXT
    nulls = dict.fromkeys([*off, "previous_response_id", "instructions", "temperature", "metadata", "text"])
    body = {"model": MODEL, "input": "x", **nulls}
    assert (await gateway.http.post("/v1/responses", json=body)).status_code == 200
