"""The official client's Responses API against a gateway on real NATS, with workers that do as scripted."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from mmd_workers.gateway.answers import answer_budget
from tests.gateway.media import mp4, png, url, wav
from tests.gateway.running import Launch, Running
from tests.gateway.scripted import HalfFirst

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


async def test_a_streamed_response_has_the_apis_events_numbered_in_order(launch: Launch) -> None:
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
    film = {"type": "video_url", "video_url": {"url": url("video/mp4", mp4())}}
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
        (
            {
                "input": [{"role": "user", "content": [film, read]}],
                "extra_body": {"mm_processor_kwargs": {"num_frames": 4}},
            },
            [{"role": "user", "content": [{**film, "num_frames": 4}, text]}],
        ),
        (
            {"input": [{"role": "user", "content": [{**film, "timestamps": [0.2, 0.9]}, read]}]},
            [{"role": "user", "content": [{**film, "timestamps": [0.2, 0.9]}, text]}],
        ),
        (
            {
                "input": [{"role": "user", "content": [film, read]}],
                "extra_body": {"mm_processor_kwargs": {"sampling": "scene_changes"}},
            },
            [{"role": "user", "content": [{**film, "sampling": "scene_changes"}, text]}],
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


NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": NUMBERS}
NOW: Any = {"type": "function", "name": "now"}
GROUP: Any = {"type": "namespace", "name": "math", "description": "Sums.", "tools": [ADD]}
SEARCH: Any = {"type": "web_search", "external_web_access": True}
CALLED = {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1, "b": 2}'}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
CALL_NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
ONCE = ("add", '{"a": 1, "b": 2}')


def as_chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: tool[name] for name in tool.keys() - {"type"}}}


async def test_calls_and_their_outputs_are_the_prompt_of_a_chat_with_them(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    second = {**CALLED, "call_id": "2", "name": "now", "arguments": "{}"}
    items = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Look."},
        CALLED,
        second,
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "4"}]},
        CALLED,
        {"type": "function_call_output", "call_id": "1", "output": ""},
        {"role": "user", "content": "And?"},
    ]
    await create(gateway, input=items, tools=[ADD, NOW], instructions="Be brief.")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    again = {"id": "2", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Look.", "tool_calls": [call, again]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "tool", "tool_call_id": "2", "content": "4"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "user", "content": "And?"},
    ]
    same = {"messages": chat, "tools": [as_chat_tool(ADD), as_chat_tool(NOW)]}
    expected = (await gateway.http.post("/tokenize", json=same)).json()["tokens"]
    assert worker.requests[0].token_ids == expected


ANSWERS: dict[str, tuple[str, list[Any]]] = {
    "a call": (CALL, [ONCE]),
    "text before a call": (f"I add.{CALL}", ["I add.", ONCE]),
    "two calls": (CALL + CALL_NOW, [ONCE, ("now", "{}")]),
    "text after a call": (f"{CALL}done{CALL_NOW}", [ONCE, "done", ("now", "{}")]),
    "the call of no tool": (CALL.replace("add", "sub"), [CALL.replace("add", "sub")]),
}


def seen(response: Any) -> list[Any]:
    return [
        item.content[0].text if item.type == "message" else (item.name, item.arguments)
        for item in response.output
    ]


@pytest.mark.parametrize("name", ANSWERS)
async def test_calls_are_items_whole_and_as_the_client_accumulates_them(launch: Launch, name: str) -> None:
    answer, expected = ANSWERS[name]
    gateway = await launch()
    await gateway.worker(answer)
    whole = await create(gateway, tools=[ADD, NOW])
    assert seen(whole) == expected
    assert whole.status == "completed"
    assert {item.status for item in whole.output} == {"completed"}
    assert len({item.id for item in whole.output}) == len(expected)
    options: Any = {"model": MODEL, "input": "hello", "tools": [ADD, NOW]}
    async with gateway.openai.responses.stream(**options) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert seen(final) == expected
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == list(range(len(expected)))
    assert [event.item.id for event in added] == [event.item.id for event in done]
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    ended = [event for event in events if event.type == "response.function_call_arguments.done"]
    for event in ended:
        parts = [delta.delta for delta in deltas if delta.item_id == event.item_id]
        assert "".join(parts) == event.arguments
    calls = [item for item in whole.output if item.type == "function_call"]
    assert len(ended) == len(calls)
    for response in (whole, final):
        called = [item.call_id for item in response.output if item.type == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": one, "output": "3"} for one in called]
        await create(gateway, input=[*response.output, *outputs], tools=[ADD, NOW])


async def test_arguments_are_sent_while_the_rest_of_them_is_generated(launch: Launch) -> None:
    gateway = await launch()
    script = HalfFirst(len(gateway.ids(CALL)) - len(gateway.ids("2}}</tool_call>")))
    await gateway.worker(CALL, script)
    options: Any = {"model": MODEL, "input": "hello", "tools": [ADD]}
    async with gateway.openai.responses.stream(**options) as stream:
        parts = []
        async for event in stream:
            if event.type == "response.function_call_arguments.delta":
                parts.append(event.delta)
                if '"a": 1' in "".join(parts):
                    script.seen.set()
    assert "".join(parts) == '{"a": 1, "b": 2}'


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_is_cut_is_incomplete(launch: Launch, stream: bool) -> None:
    gateway = await launch()
    worker = await gateway.worker(f"I add.{CALL}")
    text = gateway.tokenizer.decode
    cut = next(n for n in range(len(worker.answer)) if '"a": 1, "b"' in text(worker.answer[:n]))
    asked: Any = {"tools": [ADD], "max_output_tokens": cut}
    if stream:
        events = [event async for event in await create(gateway, **asked, stream=True)]
        response = events[-1].response
        assert events[-1].type == "response.incomplete"
    else:
        response = await create(gateway, **asked)
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    assert response.output[1].arguments.startswith('{"a": 1, "b"')
    assert not response.output[1].arguments.endswith("}")


async def test_the_choice_of_a_tool_reaches_the_worker_and_is_repeated(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(CALL)
    named = {"type": "function", "name": "add"}
    choices: list[dict[str, Any]] = [
        {"tool_choice": named},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [named]}},
        {"tools": [{**ADD, "strict": True}]},
        {},
    ]
    for choice in choices:
        response = await create(gateway, **{"tools": [ADD, NOW], **choice})
        repeated = response.to_dict()
        assert repeated["tool_choice"] == choice.get("tool_choice", "auto")
        assert repeated["parallel_tool_calls"] is choice.get("parallel_tool_calls", True)
        none = {"description": None, "parameters": None, "strict": None}
        assert repeated["tools"] == [{**none, **tool} for tool in choice.get("tools", [ADD, NOW])]
    chosen = {"type": "function", "function": {"name": "add"}}
    chat: list[dict[str, Any]] = [
        {"tool_choice": chosen},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [chosen]}}},
        {"tools": [as_chat_tool({**ADD, "strict": True})]},
        {},
    ]
    for choice in chat:
        tools = {"tools": [as_chat_tool(ADD), as_chat_tool(NOW)], **choice}
        hello: Any = [{"role": "user", "content": "hello"}]
        await gateway.openai.chat.completions.create(model=MODEL, messages=hello, **tools)
    grammars = [request.sampling.grammar for request in worker.requests]
    assert grammars[:5] == grammars[5:]
    assert len({str(grammar) for grammar in grammars[:5]}) == 5


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "stored": ({"store": True}, "store", "responses are not stored; set it to false or omit it"),
    "previous": ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation in input"),
    "a conversation": ({"conversation": "conv_1"}, "conversation", "send the whole conversation in input"),
    "in the background": ({"background": True}, "background", "omit it, and stream long answers"),
    "a tool of OpenAI's models": ({"tools": [ADD, {"type": "computer"}]}, "tools[1]", "type 'computer' is not supported; send tools of type function"),
    "a tool of OpenAI's servers with a typo": ({"tools": [{"type": "web-search"}]}, "tools[0]", "type 'web-search' is not supported"),
    "a forced tool, one of OpenAI's servers": (
        {"tools": [ADD, SEARCH], "tool_choice": "required"},
        "tools[1]",
        "web_search runs on OpenAI's servers, and this server runs no tools; omit it, or set tool_choice to 'auto'",
    ),
    "a fault after a tool that is left out": ({"tools": [SEARCH, ADD, ADD]}, "tools[2].name", "another tool has the name 'add'"),
    "two members of one name": ({"tools": [ADD, {**GROUP, "tools": [NOW, ADD, ADD]}]}, "tools[1].tools[2].name", "another tool has the name 'math.add'"),
    "a group in a group": ({"tools": [{**GROUP, "tools": [GROUP]}]}, "tools[0].tools[0]", "type 'namespace' is not supported; send tools of type function"),
    "a group with a typo": ({"tools": [{**GROUP, "strict": True}]}, "tools[0].strict", "unknown field tools[0].strict; remove it"),
    "a member with a schema of no object": (
        {"tools": [{**GROUP, "tools": [{**ADD, "parameters": {"type": "string"}}]}]}, "tools[0].tools[0].parameters", "must be 'object'"
    ),
    "too many members": (
        {"tools": [{**GROUP, "tools": [{"type": "function", "name": f"f{n}"} for n in range(128)]}, ADD]}, "tools", "more than 128 functions"
    ),
    "two tools of one name": ({"tools": [ADD, ADD]}, "tools[1].name", "another tool has the name 'add'"),
    "a schema with a large integer": ({"tools": [ADD, {**NOW, "strict": True, "parameters": {"enum": [2**53 + 1]}}]}, "tools[1].parameters", "beyond"),
    "a forced tool of none": ({"tool_choice": "required"}, "tool_choice", "required needs tools"),
    "an unknown tool": ({"tools": [ADD], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "no tool has the name 'f'"),
    "other allowed tools": (
        {"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
        "tool_choice.tools[0].name",
        "no tool has the name 'f'",
    ),
    "a choice of OpenAI's": ({"tools": [ADD], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice", "type 'mcp' is not supported; choose a function"),
    "an allowed tool of OpenAI's": (
        {"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]}},
        "tool_choice.tools[0]",
        "type 'mcp' is not supported; choose functions",
    ),
    "a choice without its group": ({"tools": [GROUP], "tool_choice": {"type": "function", "name": "add"}}, "tool_choice.name", "no tool has the name 'add'"),
    "a choice of another group": (
        {"tools": [ADD, GROUP], "tool_choice": {"type": "function", "name": "add", "namespace": "maths"}}, "tool_choice.name", "no tool has the name 'maths.add'"
    ),
    "a search of the client": (
        {"tools": [ADD, {"type": "tool_search", "execution": "client", "description": "x", "parameters": {}}]},
        "tools[1]",
        "tool_search of the client is not supported; omit it, and send the tools that it finds",
    ),
    "an MCP server alone": (
        {"tools": [SEARCH, {"type": "mcp", "server_label": "x", "server_url": "https://x"}]},
        "tools[1]",
        "mcp runs on OpenAI's servers, and this server runs no tools; send the tools of the MCP server as functions",
    ),
    "encrypted reasoning alone": ({"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]}, "input", "has only reasoning and calls that cannot be read here"),
    "a search alone": ({"input": [{"type": "web_search_call", "id": "1", "status": "completed"}]}, "input", "has only reasoning and calls that cannot be read here"),
    "a custom tool in Lark": (
        {"tools": [ADD, {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}]},
        "tools[1].format.syntax",
        "grammars in Lark's syntax are not supported; use regex, or omit the format",
    ),
    "a custom tool in no syntax": (
        {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "ebnf", "definition": "a"}}]}, "tools[0].format.syntax", "'regex'"
    ),
    "an expression that is none": (
        {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "regex", "definition": "("}}]}, "tools", "cannot be compiled"
    ),
    "a custom tool with parameters": ({"tools": [{**ADD, "type": "custom"}]}, "tools[0].parameters", "unknown field tools[0].parameters; remove it"),
    "a custom tool with the name of a function": ({"tools": [ADD, {"type": "custom", "name": "add"}]}, "tools[1].name", "another tool has the name 'add'"),
    "an unknown custom tool": ({"tools": [ADD], "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice.name", "no tool has the name 'f'"),
    "the output of no custom call": ({"input": [{"type": "custom_tool_call_output", "call_id": "1", "output": "x"}]}, "input[0].call_id", "no tool call before"),
    "half a call of another server": ({"input": [{"type": "mcp_call", "id": "1", "name": "f", "arguments": "{}"}]}, "input[0].server_label", "missing"),
    "arguments of another server that are no JSON": (
        {"input": [{"type": "mcp_call", "id": "1", "name": "f", "server_label": "x", "arguments": "a"}]}, "input[0].arguments", "no valid JSON"
    ),
    "a shell without a command": ({"input": [{"type": "local_shell_call", "call_id": "1"}]}, "input[0]", "local_shell_call requires action"),
    "the output of no shell": ({"input": [{"type": "local_shell_call_output", "id": "1", "output": "x"}]}, "input[0].id", "no tool call before"),
    "half a call": ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "missing"),
    "arguments that are no JSON": ({"input": ["x", {**CALLED, "arguments": "a"}][1:]}, "input[0].arguments", "no valid JSON"),
    "the second arguments": ({"instructions": "x", "input": [CALLED, {**CALLED, "arguments": "[]"}]}, "input[1].arguments", "must be an object"),
    "the output of no call": ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input[0].call_id", "no tool call before"),
    "no image as output": (
        {"input": [CALLED, {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:image/png;base64,aGVsbG8="}]}]},
        "input[1].output[1].image_url",
        "input[1].output[1].image_url: ",
    ),
    "an output of an unknown type": (
        {"input": [CALLED, {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_picture"}]}]},
        "input[1].output[0]",
        "unknown part type 'input_picture'; use text, input_text, image_url",
    ),
    "too many calls": ({"input": [CALLED] * 129}, "input[128]", "more than 128 calls"),
    "a reference": ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0]", "type 'item_reference' is not supported"),
    "a typo of a hint": ({"client_meta_data": {}}, "client_meta_data", "unknown field client_meta_data; remove it"),
    "a hint of another type": ({"client_metadata": "x"}, "client_metadata", "should be a valid dictionary"),
    "unknown": ({"n": 2}, "n", "unknown field n; remove it"),
    "a file": (item({"type": "input_file", "file_id": "1"}), "input[1].content[0].file_id", "stores no files"),
    "an image's id": (item({"type": "input_image", "file_id": "1"}), "input[1].content[0].file_id", "stores no files"),
    "two images in one": (
        item({"type": "input_image", "file_id": "1", "image_url": "data:,"}), "input[1].content[0]", "send one of image_url, file_id"
    ),
    "an unknown part": (item({"type": "input_video"}), "input[1].content[0]", "unknown part type 'input_video'"),
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
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}, "strict": True}}},
        "text.format.schema",
        "text.format.schema: ",
    ),
    "a long prompt": ({"input": "red circle " * 2000}, "input", "prompt is too long: at least 1572 tokens > 1023 maximum. This model's maximum context length is 1024 tokens; the text has 22000 characters"),
}  # fmt: skip


async def test_the_error_for_a_malformed_body_names_the_field_as_sent(launch: Launch, subtests: Any) -> None:
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


async def test_what_a_function_has_read_reaches_the_model_as_in_a_chat(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    text = {"type": "text", "text": "hello"}
    picture = {"type": "image_url", "image_url": {"url": PICTURE}}
    image = {"type": "input_image", "image_url": PICTURE, "detail": "high"}
    for output, same in (
        ([image], [picture]),
        ([{**text, "type": "input_text"}, image], [text, picture]),
        ([], ""),
    ):
        read = {"type": "function_call_output", "call_id": "1", "output": output}
        await create(gateway, input=[CALLED, read])
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": CALLED["arguments"]}}
        chat = [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": same},
        ]
        assert worker.requests[-1].token_ids == await prompt_of(gateway, chat)
        assert len(worker.requests[-1].features) == (picture in same if output else 0)


async def test_a_function_of_a_group_is_called_with_its_namespace(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(CALL.replace('"add"', '"math.add"'))
    whole = await create(gateway, tools=[ADD, GROUP])
    (call,) = whole.output
    assert (call.type, call.namespace, call.name) == ("function_call", "math", "add")
    assert whole.to_dict()["tools"][1]["tools"][0]["name"] == "add"
    prompt = gateway.tokenizer.decode(worker.requests[-1].token_ids)
    assert prompt.count('{"name": "add"') == prompt.count('{"name": "math.add"') == 1
    async with gateway.openai.responses.stream(model=MODEL, input="hello", tools=[ADD, GROUP]) as stream:
        events = [event async for event in stream]
    items = [event.item for event in events if event.type.startswith("response.output_item.")]
    assert [(item.namespace, item.name) for item in items] == [("math", "add")] * 2
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert done.name == "add"
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    await create(gateway, input=[call, *outputs], tools=[GROUP])
    assert '<tool_call>{"name": "math.add"' in gateway.tokenizer.decode(worker.requests[-1].token_ids)


async def test_a_function_of_a_group_can_be_forced_or_allowed(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(CALL.replace('"add"', '"math.add"'))
    named = {"type": "function", "name": "add", "namespace": "math"}
    for choice in (named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        response = await create(gateway, tools=[ADD, GROUP], tool_choice=choice)
        assert response.to_dict()["tool_choice"] == choice
        (call,) = response.output
        assert (call.namespace, call.name) == ("math", "add")
        rules = worker.requests[-1].sampling.grammar.source
        assert "math.add" in rules
        assert "tool0" not in rules


async def test_the_description_of_a_group_precedes_its_first_functions(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    group = {**GROUP, "tools": [ADD, {**ADD, "name": "sub"}, NOW]}
    response = await create(gateway, tools=[group])
    prompt = gateway.tokenizer.decode(worker.requests[-1].token_ids)
    assert '{"name": "math.add", "description": "Sums.\\n\\nAdds."' in prompt
    assert '{"name": "math.sub", "description": "Adds."' in prompt
    assert '{"name": "math.now", "parameters"' in prompt
    assert response.to_dict()["tools"][0]["description"] == "Sums."


async def test_tools_of_servers_are_left_out_where_the_choice_is_free(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(CALL)
    others: list[Any] = [
        SEARCH,
        {"type": "tool_search"},
        {"type": "mcp", "server_label": "x", "server_url": "https://x"},
    ]
    for choice in ("auto", "none", {"type": "function", "name": "add"}):
        alone = await create(gateway, tools=[ADD], tool_choice=choice)
        beside = await create(gateway, tools=[*others, ADD], tool_choice=choice)
        assert worker.requests[-1].token_ids == worker.requests[-2].token_ids
        assert beside.tools == alone.tools


async def test_ids_of_the_client_change_nothing(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker(TEXT)
    response = await create(gateway, extra_body={"client_metadata": {"session_id": "1", "turn": {"n": 2}}})
    assert response.output_text == TEXT
    assert "client_metadata" not in response.to_dict()


async def test_the_end_of_sequence_is_ignored_on_request(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    await create(gateway, extra_body={"ignore_eos": True})
    assert worker.requests[0].sampling.ignore_eos


@pytest.mark.parametrize("stream", [True, False])
async def test_room_is_reserved_for_the_text_and_for_what_the_response_repeats(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(answer_budget, "BUDGET_DIVISOR", 1 << 60)
    monkeypatch.setattr(answer_budget, "ALLOWANCE_BYTES", 64 * answer_budget.TOKEN_BYTES)
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
