"""Custom tools of the Responses API, and what tools of other servers have done, against a gateway with workers that do as scripted."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from mmd_workers.gateway.api.responses.custom_tools import CustomTool, InputReader, input_of
from mmd_workers.gateway.api.responses.server_items import ClientCallOutput
from tests.gateway.running import Launch, Running
from tests.gateway.scripted import HalfFirst

MODEL = "builtin/demo"
INPUT = 'the "red" circle\n\\ is left'
ARGUMENTS = json.dumps({"input": INPUT})
CALL = f'<tool_call>{{"name": "draw", "arguments": {ARGUMENTS}}}</tool_call>'
ADD_CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
DRAW: dict[str, Any] = {"type": "custom", "name": "draw", "description": "Draws what is written."}
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}  # fmt: skip
GROUP: dict[str, Any] = {"type": "namespace", "name": "art", "description": "Art.", "tools": [DRAW, ADD]}
PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
TEXT = "the red circle"


async def create(gateway: Running, **options: Any) -> Any:
    return await gateway.openai.responses.create(**{"model": MODEL, "input": "hello", **options})


async def prompt_of(gateway: Running, messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
    """The tokens of the same conversation as a chat."""
    response = await gateway.http.post("/tokenize", json={"messages": messages, "tools": tools})
    return response.json()["tokens"]


def called(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": text}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


async def test_the_model_reads_a_custom_tool_as_a_function_of_one_text(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    response = await create(gateway, tools=[DRAW])
    function = {"name": "draw", "description": DRAW["description"], "parameters": PARAMETERS}
    same = [{"type": "function", "function": function}]
    hello = [{"role": "user", "content": "hello"}]
    assert worker.requests[0].token_ids == await prompt_of(gateway, hello, same)
    assert response.to_dict()["tools"] == [{**DRAW, "format": {"type": "text"}}]


ANSWERS: dict[str, tuple[str, list[Any]]] = {
    "a call": (CALL, [("custom_tool_call", "draw", INPUT)]),
    "text and two calls": (
        f"I draw.{CALL}{ADD_CALL}{CALL}",
        [
            "I draw.",
            ("custom_tool_call", "draw", INPUT),
            ("function_call", "add", '{"a": 1}'),
            ("custom_tool_call", "draw", INPUT),
        ],
    ),
    "arguments of another form": (
        CALL.replace(ARGUMENTS, '{"text": "red"}'),
        [("custom_tool_call", "draw", '{"text": "red"}')],
    ),
    "no input": (CALL.replace(ARGUMENTS, '{"input": ""}'), [("custom_tool_call", "draw", "")]),
}


def seen(response: Any) -> list[Any]:
    return [
        item.content[0].text
        if item.type == "message"
        else (item.type, item.name, item.arguments if item.type == "function_call" else item.input)
        for item in response.output
    ]


@pytest.mark.parametrize("name", ANSWERS)
async def test_calls_of_custom_tools_are_items_with_their_input(launch: Launch, name: str) -> None:
    answer, expected = ANSWERS[name]
    gateway = await launch()
    await gateway.worker(answer)
    whole = await create(gateway, tools=[DRAW, ADD])
    assert seen(whole) == expected
    stream = await create(gateway, tools=[DRAW, ADD], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert seen(events[-1].response) == expected
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [one.type for one in added] == [one.type for one in whole.output]
    assert all(one.input == "" for one in added if one.type == "custom_tool_call")
    ended = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert [event.input for event in ended] == [one.input for one in whole.output if one.type == "custom_tool_call"]  # fmt: skip
    for event in ended:
        deltas = [
            one.delta
            for one in events
            if one.type == "response.custom_tool_call_input.delta" and one.item_id == event.item_id
        ]
        assert "".join(deltas) == event.input
        assert all(deltas)
    assert not any(event.type == "response.function_call_arguments.delta" and event.item_id.startswith("ctc_") for event in events)  # fmt: skip
    for response in (whole, events[-1].response):
        outputs = [
            {"type": f"{one.type}_output", "call_id": one.call_id, "output": "drawn"}
            for one in response.output
            if one.type != "message"
        ]
        await create(gateway, input=[*response.output, *outputs], tools=[DRAW, ADD])


async def test_the_input_of_a_custom_tool_streams_while_the_model_writes_it(launch: Launch) -> None:
    gateway = await launch()
    script = HalfFirst(len(gateway.ids(CALL)) - len(gateway.ids('is left"}}</tool_call>')))
    await gateway.worker(CALL, script)
    parts: list[str] = []
    async for event in await create(gateway, tools=[DRAW], stream=True):
        if event.type == "response.custom_tool_call_input.delta":
            parts.append(event.delta)
            if "circle" in "".join(parts):
                script.seen.set()
    assert "".join(parts) == INPUT


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_call_of_a_custom_tool_has_the_input_so_far(launch: Launch, stream: bool) -> None:
    gateway = await launch()
    worker = await gateway.worker(CALL)
    text = gateway.tokenizer.decode
    cut = next(n for n in range(len(worker.answer)) if "circle" in text(worker.answer[:n]))
    answer = await create(gateway, tools=[DRAW], max_output_tokens=cut, stream=stream)
    response = [event async for event in answer][-1].response if stream else answer
    (item,) = response.output
    assert response.status == item.to_dict()["status"] == "incomplete"
    assert item.input == 'the "red" circle'


async def test_a_custom_tool_of_a_group_is_called_with_its_namespace(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(CALL.replace('"draw"', '"art.draw"'))
    response = await create(gateway, tools=[GROUP])
    (item,) = response.output
    assert (item.type, item.namespace, item.name, item.input) == ("custom_tool_call", "art", "draw", INPUT)
    assert response.to_dict()["tools"][0]["tools"][0] == {**DRAW, "format": {"type": "text"}}
    output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "drawn"}
    await create(gateway, input=[item, output], tools=[GROUP])
    assert '<tool_call>{"name": "art.draw"' in gateway.tokenizer.decode(worker.requests[-1].token_ids)


async def test_a_custom_tool_can_be_forced_or_allowed(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(CALL)
    named = {"type": "custom", "name": "draw"}
    for choice in (named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        response = await create(gateway, tools=[ADD, DRAW], tool_choice=choice)
        assert response.to_dict()["tool_choice"] == choice
        assert response.output[0].input == INPUT
        assert '"input"' in worker.requests[-1].sampling.grammar.source


async def test_the_input_matches_the_expression_of_the_tool(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(CALL.replace(ARGUMENTS, '{"input": "red 7"}'))
    form = {"type": "grammar", "syntax": "regex", "definition": "^(red|blue) [0-9]+$"}
    response = await create(gateway, tools=[{**DRAW, "format": form}])
    assert response.output[0].input == "red 7"
    assert response.to_dict()["tools"][0]["format"] == form
    grammar = json.loads(worker.requests[0].sampling.grammar.source)
    properties = grammar["json_schema"]["tool0"]["properties"]
    assert properties["input"]["pattern"] == "^(?:(red|blue) [0-9]+)$"


@pytest.mark.parametrize(
    ("definition", "text", "other"),
    [("^a|b$", "b", "ab"), (r"a\$", "a$", "a"), (r"a\\$", "a\\", "a"), (r"[\"\n]+", '"\n', "x"), ("é+", "éé", "e")],
)  # fmt: skip
def test_an_expression_covers_the_whole_input(definition: str, text: str, other: str) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": definition}
    tool = CustomTool.model_validate({"type": "custom", "name": "f", "format": form})
    pattern = json.loads(tool.parameters)["properties"]["input"]["pattern"]
    assert re.search(pattern, text)
    assert not re.search(pattern, other)


INPUTS: dict[str, tuple[str, str]] = {
    "plain": ('{"input": "red"}', "red"),
    "escapes": (r'{"input":"\"\\\/\b\f\n\r\t\u00e9"}', '"\\/\b\f\n\r\té'),
    "a pair": (r'{"input": "\ud83d\ude00!"}', "😀!"),
    "half a pair": (r'{"input": "\ud83dx\ude00"}', "\ufffdx\ufffd"),
    "two halves": (r'{"input": "\ud83d\ud83d\ude00"}', "\ufffd😀"),
    "an escape that JSON does not have": (r'{"input": "\d+\u12x"}', r"\d+\u12x"),
    "line breaks as they are": ('{"input": "a\n\tb"}', "a\n\tb"),
    "spread": ('{ \n"input" \t: "a" , "more": 1}', "a"),
    "another field": ('{"patch": "a"}', '{"patch": "a"}'),
    "no text": ('{"input": 7}', '{"input": 7}'),
    "nothing": ("{}", "{}"),
    "cut before the input": ('{"inp', ""),
    "cut in the input": ('{"input": "ab', "ab"),
    "cut in an escape": (r'{"input": "ab\u00', "ab"),
    "cut in a pair": (r'{"input": "ab\ud83d\ude', "ab\ufffd"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_input_is_the_same_however_the_arguments_are_cut(name: str) -> None:
    arguments, expected = INPUTS[name]
    assert input_of(arguments) == expected
    for first in range(len(arguments) + 1):
        for second in range(first, len(arguments) + 1):
            reader = InputReader()
            pieces = (arguments[:first], arguments[first:second], arguments[second:])
            assert "".join(map(reader.push, pieces)) + reader.flush() == expected


FOUND = [
    {"file_id": "f", "filename": "a.txt", "score": 0.5, "text": "red", "attributes": {}},
    {"text": "blue"},
]
OF_SERVERS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a custom tool": (
        [
            {"type": "custom_tool_call", "id": "ctc_1", "call_id": "1", "name": "draw", "input": INPUT, "status": "completed"},
            {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "drawn"}]},
        ],
        [called("1", "draw", {"input": INPUT}), result("1", "drawn")],
    ),
    "a search on the web": (
        [{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "red", "sources": []}}],
        [],
    ),
    "a search in files": (
        [{"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["red", "blue"], "results": FOUND}],
        [called("fs_1", "file_search", {"queries": ["red", "blue"]}), result("fs_1", "a.txt\nred\n\nblue")],
    ),
    "a search in files without results": (
        [{"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["red"], "results": None}],
        [],
    ),
    "code": (
        [{"type": "code_interpreter_call", "id": "ci_1", "status": "completed", "container_id": "c", "code": "print(1)",
          "outputs": [{"type": "logs", "logs": "1"}, {"type": "image", "url": "https://x"}]}],
        [called("ci_1", "code_interpreter", {"code": "print(1)"}), result("ci_1", "1")],
    ),
    "code without outputs": (
        [{"type": "code_interpreter_call", "id": "ci_1", "status": "completed", "container_id": "c", "code": None, "outputs": None}],
        [called("ci_1", "code_interpreter", {"code": ""}), result("ci_1", "")],
    ),
    "a local shell": (
        [
            {"type": "local_shell_call", "id": "lsh_1", "call_id": "1", "status": "completed", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            {"type": "local_shell_call_output", "id": "lsh_1", "output": "a.txt"},
        ],
        [called("1", "local_shell", {"type": "exec", "command": ["ls"], "env": {}}), result("1", "a.txt")],
    ),
    "a local shell whose result is that of a function": (
        [
            {"type": "local_shell_call", "id": "lsh_1", "call_id": "1", "status": "completed", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            {"type": "function_call_output", "call_id": "1", "output": "a.txt"},
        ],
        [called("1", "local_shell", {"type": "exec", "command": ["ls"], "env": {}}), result("1", "a.txt")],
    ),
    "a shell": (
        [
            {"type": "shell_call", "id": "sh_1", "call_id": "1", "status": "completed", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "1", "output": [{"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 0}}]},
        ],
        [called("1", "shell", {"commands": ["ls"]}), result("1", "a\nb")],
    ),
    "a patch": (
        [
            {"type": "apply_patch_call", "call_id": "1", "status": "completed", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "1", "status": "completed"},
        ],
        [called("1", "apply_patch", {"type": "delete_file", "path": "a"}), result("1", "")],
    ),
    "an MCP server": (
        [
            {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "art", "tools": [{"name": "draw", "input_schema": {}}]},
            {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "art", "name": "draw", "arguments": "{}"},
            {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
            {"type": "mcp_call", "id": "mcp_1", "server_label": "art", "name": "draw", "arguments": '{"a": 1}', "output": "drawn", "error": None},
            {"type": "mcp_call", "id": "mcp_2", "server_label": "art", "name": "draw", "arguments": "", "output": None, "error": "no paint"},
        ],
        [
            called("mcp_1", "art.draw", {"a": 1}), result("mcp_1", "drawn"),
            called("mcp_2", "art.draw", {}), result("mcp_2", "no paint"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_SERVERS)
async def test_what_tools_of_other_servers_did_is_history(launch: Launch, name: str) -> None:
    items, same = OF_SERVERS[name]
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    question, more = {"role": "user", "content": "hello"}, {"role": "user", "content": "And?"}
    answer = {"role": "assistant", "content": TEXT}
    await create(gateway, input=[question, *items, answer, more])
    assert worker.requests[-1].token_ids == await prompt_of(gateway, [question, *same, answer, more], [])


async def test_reasoning_goes_on_over_a_search_that_is_left_out(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    thoughts = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        for text in ("one", "two")
    ]
    question, answer = {"role": "user", "content": "hello"}, {"role": "assistant", "content": TEXT}
    await create(gateway, input=[question, *thoughts, answer, question])
    await create(gateway, input=[question, thoughts[0], search, thoughts[1], answer, question])
    assert worker.requests[0].token_ids == worker.requests[1].token_ids


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "apply_patch_call_output", "status": "failed"}, "failed"),
        ({"type": "apply_patch_call_output", "status": "failed", "output": "no such file"}, "no such file"),
        ({"type": "shell_call_output", "output": [{"stdout": "", "outcome": {"type": "exit", "exit_code": 1}}]}, "exit code 1"),
        ({"type": "shell_call_output", "output": [{"stdout": "a", "outcome": {"type": "exit", "exit_code": 0}}]}, "a"),
        ({"type": "shell_call_output", "output": [{"stdout": "a", "outcome": {"type": "timeout"}}]}, "a\ntimeout"),
    ],
)  # fmt: skip
def test_a_call_that_failed_does_not_read_as_a_success(item: dict[str, Any], text: str) -> None:
    assert ClientCallOutput.model_validate({"call_id": "1", **item}).text == text
