"""Anthropic's official client against a gateway on real NATS, with workers that do as scripted."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from mmd_workers.gateway.api.messages import messages_request
from mmd_workers.wire.messages.message_parts import Phase
from mmd_workers.wire.messages.prefill import GenerateRequest
from tests.gateway.media import pdf, png, url
from tests.gateway.running import Launch, Running
from tests.gateway.scripted import HalfFirst, ScriptedWorker, answer_well

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


FORM: dict[str, Any] = {
    "type": "json_schema",
    "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
USED = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1, "b": 2}}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Any = {"name": "add", "description": "Adds.", "input_schema": NUMBERS}
NOW: Any = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2, "user_location": None}
DEFERRED: Any = {**NOW, "defer_loading": True}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
CALL_NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def turns(*said: Any) -> dict[str, Any]:
    """Messages: a role with content each, or a message."""
    return {
        "messages": [one if isinstance(one, dict) else {"role": one[0], "content": one[1]} for one in said]
    }


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


async def test_the_form_of_the_answer_may_be_in_the_field_of_earlier_clients(
    launch: Launch, clients: Any
) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    await create(clients(gateway), extra_body={"output_format": FORM})
    await create(clients(gateway), output_config={"format": FORM, "effort": "low"})
    assert worker.requests[0].sampling.grammar == worker.requests[1].sampling.grammar
    assert json.loads(worker.requests[0].sampling.grammar.source) == FORM["schema"]


async def test_the_answer_continues_the_last_message_of_the_assistant(launch: Launch, clients: Any) -> None:
    gateway = await launch()
    worker = await gateway.worker(" red circle")
    begun = {"role": "assistant", "content": "the big"}
    for content in ("the big", [{"type": "text", "text": "the big"}]):
        message = await create(clients(gateway), messages=[*HELLO, {**begun, "content": content}])
        assert message.content[0].text == " red circle"
        assert gateway.tokenizer.decode(worker.requests[-1].token_ids).endswith("assistant\nthe big")
    counted = await gateway.http.post(
        "/v1/messages/count_tokens", json={"model": MODEL, "messages": [*HELLO, begun]}
    )
    assert counted.json()["input_tokens"] == len(worker.requests[-1].token_ids)


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


def many(number: int, **more: Any) -> list[dict[str, Any]]:
    """So many tools."""
    return [{"name": f"f{n}", "input_schema": {}, **more} for n in range(number)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
    "too hot": ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
    "unknown": ({"seed": 3}, "unknown field seed; remove it"),
    "unknown in a source": (
        block(type="url", url="data:,", detail="low"),
        "unknown field messages.1.content.0.source.detail; remove it",
    ),
    "a file": (
        block(type="file", file_id="f"),
        "messages.1.content.0.source.file_id: this deployment stores no files",
    ),
    "no image": (
        {**block(type="base64", media_type="image/png", data="aGVsbG8="), "system": "x"},
        "messages.1.content.0.source: ",
    ),
    "another host": (
        {**block(type="url", url="http://127.0.0.1/x.png"), "system": [{"type": "text", "text": "x"}]},
        "messages.1.content.0.source: ",
    ),
    "a video": (block(type="base64", media_type="video/mp4", data="x"), "messages.1.content.0.source.media_type: "),
    "an unknown block": (
        {"messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
        "messages.0.content.0: unknown part type 'search_result'; use text, thinking, redacted_thinking, image, document, tool_use or tool_result",
    ),
    "the result of no call": (
        turns(HELLO[0], ("user", [{"type": "text", "text": "x"}]), ("user", [{"type": "tool_result", "tool_use_id": "1"}])),
        "messages.2.content.0.tool_use_id: no tool call before",
    ),
    "a late result": (
        turns(("user", [{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "1"}])),
        "messages.0.content.1: results of tools come first",
    ),
    "a result of the assistant": (
        turns(("assistant", [{"type": "tool_result", "tool_use_id": "1"}]), HELLO[0]),
        "messages.0.content.0: the result of a tool belongs to a message of the user",
    ),
    "a call of the user": (
        turns(("user", [USED])),
        "messages.0.content.0: the use of a tool belongs to a message of the assistant",
    ),
    "a result of no image": (
        turns(("assistant", [USED]), ("user", [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}, {"type": "image", "source": {**IMAGE, "data": "aGVsbG8="}}]}])),
        "messages.1.content.0.content.1.source: ",
    ),
    "a result of an unknown type": (
        turns(("assistant", [USED]), ("user", [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "picture"}]}])),
        "messages.1.content.0.content.0: unknown part type 'picture'; use text, tool_reference, image or document",
    ),
    "an input that is text": (turns(("assistant", [{**USED, "input": "{}"}])), "messages.0.content.0.input: "),
    "an input of no number": (
        turns(("assistant", [{"type": "text", "text": "x"}, {**USED, "input": {"a": ["," * 70_000]}}]), HELLO[0]),
        "messages.0.content.1.input: the arguments of all tool calls have more than 65536",
    ),
    "too many calls": (turns(("assistant", [USED] * 129), HELLO[0]), "messages.0.content.128: more than 128 calls"),
    "a tool of Anthropic's models": (
        {"tools": [ADD, {"type": "bash_20250124", "name": "bash"}]},
        "tools.1: type 'bash_20250124' is not supported; this server runs no tools",
    ),
    "a tool of Anthropic's servers with a typo": (
        {"tools": [ADD, {"type": "web_serach_20250305", "name": "web_search"}]},
        "tools.1: type 'web_serach_20250305' is not supported",
    ),
    "a forced tool of Anthropic's servers": (
        {"tools": [ADD, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
        "tools.1: web_search_20250305 runs on Anthropic's servers, and this server runs no tools; omit it",
    ),
    "any tool, one of Anthropic's servers": ({"tools": [SEARCH, ADD], "tool_choice": {"type": "any"}}, "tools.0: web_search_20250305 runs"),
    "a fault after a tool that is left out": ({"tools": [SEARCH, ADD, ADD]}, "tools.2.name: another tool has the name 'add'"),
    "any tool, all of them deferred": ({"tools": [DEFERRED], "tool_choice": {"type": "any"}}, "tool_choice: any needs tools; send some that are not deferred"),
    "the name of a deferred tool twice": ({"tools": [ADD, {**ADD, "defer_loading": True}]}, "tools.1.name: another tool has the name 'add'"),
    "too many tools": ({"tools": many(129)}, "tools: more than 128 tools in the prompt; send fewer, or defer some"),
    "too many tools that are found": (
        {"tools": [*many(1000, defer_loading=True), {"type": "tool_search_tool_bm25", "name": "search"}]}, "tools: more than 128 tools in the prompt"
    ),
    "too many deferred tools": ({"tools": many(1025, defer_loading=True)}, "tools: send at most 1024 entries"),
    "a deferral of another type": ({"tools": [{**ADD, "defer_loading": "yes"}]}, "tools.0.defer_loading: Input should be a valid boolean"),
    "a reference to a tool without name": (turns(("assistant", [USED]), ("user", [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "name": "add"}]}])), "unknown field messages.1.content.0.content.0.name"),
    "a tool without schema": ({"tools": [{"name": "f"}]}, "tools.0.input_schema is missing"),
    "two tools of one name": ({"tools": [ADD, ADD]}, "tools.1.name: another tool has the name 'add'"),
    "a schema with a large integer": (
        {"tools": [ADD, {"name": "f", "strict": True, "input_schema": {"enum": [2**53 + 1]}}]},
        "tools.1.input_schema: ",
    ),
    "a forced tool of none": ({"tool_choice": {"type": "any"}}, "tool_choice: any needs tools"),
    "an unknown tool": ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name: no tool has the name 'f'"),
    "a choice without name": ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice: type tool requires name"),
    "another kind of thinking": ({"thinking": {"type": "enable"}}, "thinking.type: Input should be 'enabled', 'disabled', 'adaptive' or 'between_tools'"),
    "thinking with a typo": ({"thinking": {"type": "adaptive", "budget": 1}}, "unknown field thinking.budget; remove it"),
    "a compaction": (
        {"context_management": {"edits": [{"type": "compact_20260112"}]}},
        "context_management.edits.0.type: Input should be 'clear_thinking_20251015' or 'clear_tool_uses_20250919'",
    ),
    "an edit with a typo": (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keeps": "all"}]}},
        "unknown field context_management.edits.0.keeps; remove it",
    ),
    "the first of two": ({"mcp_servers": [{}], "container": "x"}, "mcp_servers is not supported"),
    "the second of two": ({"container": "x", "mcp_servers": [{}]}, "container is not supported"),
    "a begun answer": (
        {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "I"}, USED]}]},
        "messages.1: the answer cannot go on after calls of tools",
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
    "a schema of earlier clients that cannot be enforced": (
        {"output_format": {"type": "json_schema", "schema": {"not": {}}}},
        "output_format.schema: ",
    ),
    "two forms": (
        {"output_format": FORM, "output_config": {"format": FORM}},
        "output_format: set output_config.format or output_format, not both",
    ),
    "a form of another API": (
        {"output_format": {"type": "json_object"}},
        "output_format.type: ",
    ),
    "a long prompt": (
        {"messages": [*HELLO, {"role": "user", "content": "red circle " * 2000}]},
        "prompt is too long: at least 1572 tokens > 1023 maximum. This model's maximum context length is 1024 tokens; the text has 22005 characters",
    ),
}  # fmt: skip


async def test_the_error_for_a_malformed_body_names_the_field_as_sent(launch: Launch, subtests: Any) -> None:
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
    for changes, expected in [REFUSED["no image"], REFUSED["the result of no call"]]:
        body = {"model": MODEL, **changes}
        body.setdefault("messages", HELLO)
        counted = await gateway.http.post("/v1/messages/count_tokens", json=body)
        assert (counted.status_code, counted.json()["type"]) == (400, "error")
        assert counted.json()["error"]["message"].startswith(expected)


def as_chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


async def test_tools_calls_and_results_are_the_prompt_of_a_chat_with_them(
    launch: Launch, clients: Any
) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    client = clients(gateway)
    text = {"type": "text", "text": "Look."}
    blocks = [text, USED, {**USED, "id": "2", "name": "now", "input": {}}]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "3"}]},
        {"type": "tool_result", "tool_use_id": "2", "is_error": False},
    ]
    asked = turns(HELLO[0], ("assistant", blocks), ("user", [*results, text]))
    await create(client, **asked, tools=[ADD, NOW], system="Be brief.")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    again = {"id": "2", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    chat = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": [text], "tool_calls": [call, again]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
        {"role": "user", "content": [text]},
    ]
    same = {"messages": chat, "tools": [as_chat_tool(ADD), as_chat_tool(NOW)]}
    expected = (await gateway.http.post("/tokenize", json=same)).json()["tokens"]
    assert worker.requests[0].token_ids == expected
    counted = await client.messages.count_tokens(model=MODEL, **asked, tools=[ADD, NOW], system="Be brief.")
    assert counted.input_tokens == len(expected)
    await create(client, tools=[ADD], tool_choice={"type": "none"})
    assert worker.requests[1].token_ids == await prompt_of(gateway, HELLO)


async def test_what_a_tool_has_read_reaches_the_model_as_in_a_chat(launch: Launch, clients: Any) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    text = {"type": "text", "text": "hello"}
    picture = {"type": "image_url", "image_url": {"url": url("image/png", png())}}
    page = {"type": "file", "file": {"file_data": url("application/pdf", pdf())}}
    image = {"type": "image", "source": IMAGE, "cache_control": {"type": "ephemeral"}}
    source = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(pdf()).decode()}
    document = {"type": "document", "source": source}
    for content, same in (
        ([image], [picture]),
        ([text, image], [text, picture]),
        ([document, image, text], [page, picture, text]),
        ([], []),
    ):
        read = {"type": "tool_result", "tool_use_id": "1", "content": content}
        await create(clients(gateway), **turns(HELLO[0], ("assistant", [USED]), ("user", [read, text])))
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
        chat = [
            *HELLO,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": same},
            {"role": "user", "content": [text]},
        ]
        assert worker.requests[-1].token_ids == await prompt_of(gateway, chat)
        assert len(worker.requests[-1].features) == sum(part is not text for part in same)


def found(*names: str) -> dict[str, Any]:
    """A conversation in which the client's search has found tools of these names."""
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    result = {"type": "tool_result", "tool_use_id": "1", "content": references}
    return turns(HELLO[0], ("assistant", [USED]), ("user", [result]))


async def test_a_deferred_tool_is_in_the_prompt_once_a_reference_names_it(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(CALL_NOW)

    async def asked(**more: Any) -> tuple[str, list[str]]:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 64, **more}
        response = await gateway.http.post("/v1/messages", json=body)
        assert response.status_code == 200, response.text
        prompt = gateway.tokenizer.decode(worker.requests[-1].token_ids)
        return prompt, [block["type"] for block in response.json()["content"]]

    tools = {"tools": [ADD, DEFERRED]}
    alone, _ = await asked(tools=[ADD])
    assert await asked(**tools) == (alone, ["text"])
    assert await asked(tools=[ADD, DEFERRED, *many(1000, defer_loading=True)]) == (alone, ["text"])
    prompt, blocks = await asked(**tools, **found("now"))
    assert '{"name": "now", "parameters"' in prompt
    assert "The tool now can be called now.\n<" in prompt
    assert blocks == ["tool_use"]
    prompt, _ = await asked(**tools, **found("later"))
    assert "The tool later is no longer there.\n<" in prompt
    for more in (
        {"tool_choice": {"type": "tool", "name": "now"}},
        {"tools": [ADD, DEFERRED, {"type": "tool_search_tool_regex_20251119", "name": "search"}]},
    ):
        prompt, blocks = await asked(**{**tools, **more})
        assert '{"name": "now", "parameters"' in prompt
        assert blocks == ["tool_use"]


def test_references_to_one_tool_share_their_text() -> None:
    body = {"model": MODEL, "max_tokens": 64, "tools": [ADD, DEFERRED], **found(*["now", "later"] * 100)}
    chat = messages_request.parse_messages_request(body)
    texts: Any = chat.messages[-1].content
    assert len(texts) == 200
    assert len({id(text) for text in texts}) == 2


async def test_tools_of_servers_are_left_out_where_the_choice_is_free(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(CALL)
    for choice in (None, {"type": "auto"}, {"type": "none"}, {"type": "tool", "name": "add"}):
        prompts = []
        for tools in ([ADD], [SEARCH, ADD, {"type": "code_execution_20250825", "name": "code_execution"}]):
            body = {
                "model": MODEL,
                "messages": HELLO,
                "max_tokens": 64,
                "tools": tools,
                "tool_choice": choice,
            }
            response = await gateway.http.post("/v1/messages", json=body)
            assert response.status_code == 200, response.text
            prompts.append(worker.requests[-1].token_ids)
        assert prompts[0] == prompts[1]


ANSWERS = {
    "a call": (CALL, [("add", {"a": 1, "b": 2})]),
    "text before a call": (f"I add.{CALL}", ["I add.", ("add", {"a": 1, "b": 2})]),
    "two calls": (CALL + CALL_NOW, [("add", {"a": 1, "b": 2}), ("now", {})]),
    "text after a call": (f"{CALL}done{CALL_NOW}", [("add", {"a": 1, "b": 2}), "done", ("now", {})]),
    "the call of no tool": (CALL.replace("add", "sub"), [CALL.replace("add", "sub")]),
}


def seen(message: Any) -> list[Any]:
    return [block.text if block.type == "text" else (block.name, block.input) for block in message.content]


@pytest.mark.parametrize("name", ANSWERS)
async def test_calls_are_blocks_whole_and_as_the_client_accumulates_them(
    launch: Launch, clients: Any, name: str
) -> None:
    answer, expected = ANSWERS[name]
    gateway = await launch()
    await gateway.worker(answer)
    client = clients(gateway)
    whole = await create(client, tools=[ADD, NOW], max_tokens=256)
    assert seen(whole) == expected
    is_call = isinstance(expected[-1], tuple)
    assert whole.stop_reason == ("tool_use" if is_call else "end_turn")
    options: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 256, "tools": [ADD, NOW]}
    async with client.messages.stream(**options) as stream:
        events = [event async for event in stream]
        streamed = await stream.get_final_message()
    assert seen(streamed) == expected
    assert streamed.stop_reason == whole.stop_reason
    starts = [event.index for event in events if event.type == "content_block_start"]
    stops = [event.index for event in events if event.type == "content_block_stop"]
    assert starts == stops == list(range(len(expected)))
    open_block = None
    for event in events:
        if event.type == "content_block_start":
            assert open_block is None
            open_block = event.index
        elif event.type == "content_block_delta":
            assert event.index == open_block
        elif event.type == "content_block_stop":
            open_block = None
    if is_call:
        again: Any = [*HELLO, {"role": "assistant", "content": whole.content}]
        ids = [block.id for block in whole.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": one, "content": "3"} for one in ids]
        await create(client, messages=[*again, {"role": "user", "content": results}], tools=[ADD, NOW])


async def test_a_calls_input_is_sent_while_the_rest_is_generated(launch: Launch, clients: Any) -> None:
    gateway = await launch()
    script = HalfFirst(len(gateway.ids(CALL)) - len(gateway.ids("2}}</tool_call>")))
    await gateway.worker(CALL, script)
    options: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 256, "tools": [ADD]}
    async with clients(gateway).messages.stream(**options) as stream:
        parts = []
        async for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                parts.append(event.delta.partial_json)
                if '"a": 1' in "".join(parts):
                    script.seen.set()
    assert json.loads("".join(parts)) == {"a": 1, "b": 2}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_is_cut_has_the_complete_part_of_its_input(
    launch: Launch, clients: Any, stream: bool
) -> None:
    gateway = await launch()
    worker = await gateway.worker(CALL)
    text = gateway.tokenizer.decode
    cut = next(n for n in range(len(worker.answer)) if '"a": 1, "b"' in text(worker.answer[:n]))
    client = clients(gateway)
    options: Any = {"model": MODEL, "messages": HELLO, "max_tokens": cut, "tools": [ADD]}
    if stream:
        async with client.messages.stream(**options) as events:
            message = await events.get_final_message()
    else:
        message = await client.messages.create(**options)
    assert (message.stop_reason, seen(message)) == ("max_tokens", [("add", {"a": 1})])


async def test_a_call_whose_input_is_no_json_shows_what_the_model_wrote(launch: Launch, clients: Any) -> None:
    gateway = await launch()
    await gateway.worker('<tool_call>{"name": "add", "arguments": {"a": one}}</tool_call>')
    message = await create(clients(gateway), tools=[ADD])
    assert seen(message) == [("add", {"INVALID_JSON": '{"a": one}'})]


async def test_the_choice_of_a_tool_reaches_the_worker_as_a_grammar(launch: Launch, clients: Any) -> None:
    gateway = await launch()
    worker = await gateway.worker(CALL)
    client = clients(gateway)
    choices: list[dict[str, Any]] = [
        {"tool_choice": {"type": "tool", "name": "add"}},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tools": [{**ADD, "strict": True}]},
        {},
    ]
    for choice in choices:
        await create(client, **{"tools": [ADD, NOW], **choice})
    chat: list[dict[str, Any]] = [
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"parallel_tool_calls": False},
        {"tools": [{"type": "function", "function": {**as_chat_tool(ADD)["function"], "strict": True}}]},
        {},
    ]
    for choice in chat:
        tools = {"tools": [as_chat_tool(ADD), as_chat_tool(NOW)], **choice}
        await gateway.openai.chat.completions.create(model=MODEL, messages=HELLO, **tools)
    grammars = [request.sampling.grammar for request in worker.requests]
    assert grammars[:6] == grammars[6:]
    assert len({str(grammar) for grammar in grammars[:6]}) == 6


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


HINTS: list[dict[str, Any]] = [
    {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"}},
    {"thinking": {"type": "adaptive", "display": "updates"}},
    {"thinking": {"type": "between_tools"}},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {
        "context_management": {
            "edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 9}}]
        }
    },
    {"context_management": {}},
]


async def test_hints_change_nothing(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    for hint in [{}, *HINTS]:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 64, **hint}
        response = await gateway.http.post("/v1/messages", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["content"] == [{"type": "text", "text": TEXT}]
        del body["max_tokens"]
        counted = await gateway.http.post("/v1/messages/count_tokens", json=body)
        assert counted.json() == {"input_tokens": len(worker.requests[0].token_ids)}
    assert [request.token_ids for request in worker.requests] == [worker.requests[0].token_ids] * 7
    assert worker.requests[-1].sampling == replace(
        worker.requests[0].sampling, seed=worker.requests[-1].sampling.seed
    )


async def test_the_end_of_sequence_is_ignored_on_request(launch: Launch, clients: Any) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    await create(clients(gateway), extra_body={"ignore_eos": True})
    assert worker.requests[0].sampling.ignore_eos


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


async def test_a_page_of_another_site_gets_an_error_in_the_form_of_the_path(launch: Launch) -> None:
    gateway = await launch()
    elsewhere = {"origin": "https://elsewhere.example"}
    for path, top in (("/v1/messages", {"type", "error", "request_id"}), ("/v1/responses", {"error"})):
        answer = await gateway.http.post(path, json={}, headers=elsewhere)
        assert answer.status_code == 403
        body = answer.json()
        assert body.keys() == top
        assert "not for pages of 'https://elsewhere.example'" in body["error"]["message"]
    assert (await gateway.http.post("/v1/messages", json={}, headers=elsewhere)).json()["error"]["type"] == (
        "permission_error"
    )
