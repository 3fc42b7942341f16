"""Clients that people already use, against a real deployment: the official one, LangChain and LiteLLM, with answers equal to `generate`."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import pytest
from pydantic import BaseModel

from tests.support import oracle
from tests.support.local_deployment import Deployment

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a list of prices when it is imported
os.environ["LANGSMITH_TRACING"] = "false"

import litellm
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("demo"), pytest.mark.timeout(600)]

DEMO = Path(str(resources.files("mmd_workers.model") / "demo"))
MODEL = "builtin/demo"
QUESTION = "What color is the shape?"
RENDERED = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_tokens": 24}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "shape"}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "a red circle"},
]


@pytest.fixture(scope="module")
def expected() -> str:
    """What the whole model answers to `QUESTION`."""
    return oracle.answer(DEMO, [QUESTION], 24)


@pytest.fixture(scope="module")
def after_the_tool(demo: Deployment) -> str:
    """The answer to `HISTORY`, asked for by the tokens of its prompt."""
    tokens = httpx.post(f"{demo.local.gateway_url}/tokenize", json={"messages": HISTORY}, timeout=60).json()
    answer = demo.client().completions.create(model=MODEL, prompt=tokens["tokens"], **GREEDY)
    return answer.choices[0].text


COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}, "sides": {"enum": [3, 4]}},
    "required": ["color", "sides"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "draw", "description": "Draws a shape.", "parameters": COLOR},
}
ONE: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "draw"}},
    "temperature": 0,
    "max_tokens": 160,
}
ASKED = [{"role": "user", "content": "Draw something."}]


class Shape(BaseModel):
    """A shape."""

    color: Literal["red", "green", "blue"]
    sides: Literal[3, 4]


def check_call(name: str, arguments: str) -> dict[str, Any]:
    assert name == "draw"
    found: dict[str, Any] = json.loads(arguments)
    jsonschema.validate(found, COLOR)
    return found


@pytest.fixture(scope="module")
def drawn(demo: Deployment) -> dict[str, Any]:
    """The arguments of the one call that the model can make to `ASKED`."""
    (choice,) = demo.client().chat.completions.create(model=MODEL, messages=ASKED, **ONE).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    return check_call(call.function.name, call.function.arguments)


def v1(demo: Deployment) -> dict[str, Any]:
    return {"base_url": f"{demo.local.gateway_url}/v1", "api_key": "none", "max_retries": 0, "timeout": 120}


def test_a_completion_of_the_rendered_prompt_equals_generate(demo: Deployment, expected: str) -> None:
    client = demo.client()
    whole = client.completions.create(model=MODEL, prompt=RENDERED, **GREEDY, logprobs=1)
    assert whole.choices[0].text == expected
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens
    chunks = client.completions.create(model=MODEL, prompt=RENDERED, **GREEDY, stream=True)
    assert "".join(part.text for chunk in chunks for part in chunk.choices) == expected


def test_a_prompt_among_others_has_the_answer_that_it_has_alone(demo: Deployment, expected: str) -> None:
    client = demo.client()
    tokens = httpx.post(
        f"{demo.local.gateway_url}/tokenize",
        json={"messages": [{"role": "user", "content": QUESTION}]},
        timeout=60,
    ).json()["tokens"]
    prompts = [tokens, tokens[:-3], tokens]
    answer = client.completions.create(model=MODEL, prompt=prompts, **GREEDY)
    assert [choice.text for choice in answer.choices][::2] == [expected] * 2
    alone = client.completions.create(model=MODEL, prompt=tokens[:-3], **GREEDY)
    assert answer.choices[1].text == alone.choices[0].text
    sampled = {"temperature": 1.2, "seed": 5, "max_tokens": 24}
    beside = client.completions.create(model=MODEL, prompt=prompts, **sampled)
    one = client.completions.create(model=MODEL, prompt=tokens, **sampled)
    assert beside.choices[0].text == beside.choices[2].text == one.choices[0].text


def test_a_history_with_tool_calls_is_answered(demo: Deployment, after_the_tool: str) -> None:
    answer = demo.client().chat.completions.create(model=MODEL, messages=HISTORY, **GREEDY)
    assert answer.choices[0].message.content == after_the_tool
    again = [*HISTORY, answer.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
    assert (
        demo.client().chat.completions.create(model=MODEL, messages=again, **GREEDY).choices[0].finish_reason
    )


def test_langchain_chats_and_streams_and_sends_back_tool_calls(
    demo: Deployment, expected: str, after_the_tool: str
) -> None:
    chat = ChatOpenAI(model=MODEL, **v1(demo), **GREEDY)
    assert chat.invoke(QUESTION).content == expected
    chunks = list(chat.stream(QUESTION))
    assert "".join(str(chunk.content) for chunk in chunks) == expected
    assert len(chunks) > 2
    call = {"id": "call_1", "name": "look", "args": {"at": "shape"}, "type": "tool_call"}
    history = [
        SystemMessage("Use the tool."),
        HumanMessage(QUESTION),
        AIMessage(content="", tool_calls=[call]),
        ToolMessage("a red circle", tool_call_id="call_1"),
    ]
    answer = chat.invoke(history)
    assert answer.content == after_the_tool
    assert answer.usage_metadata["input_tokens"] > 0


def test_langchain_completes_text(demo: Deployment, expected: str) -> None:
    model = OpenAI(model=MODEL, **v1(demo), **GREEDY)
    assert model.invoke(RENDERED) == expected
    assert "".join(model.stream(RENDERED)) == expected
    assert model.batch([RENDERED, RENDERED]) == [expected] * 2


def test_litellm_chats_streams_and_completes(demo: Deployment, expected: str, after_the_tool: str) -> None:
    where = {"api_base": f"{demo.local.gateway_url}/v1", "api_key": "none", "num_retries": 0, "timeout": 120}
    messages = [{"role": "user", "content": QUESTION}]
    chat = {"model": f"openai/{MODEL}", **where, **GREEDY}
    answer = litellm.completion(messages=messages, **chat)
    assert answer.choices[0].message.content == expected
    chunks = list(litellm.completion(messages=messages, stream=True, **chat))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected
    assert litellm.completion(messages=HISTORY, **chat).choices[0].message.content == after_the_tool
    again = [*messages, answer.choices[0].message, *messages]
    assert litellm.completion(messages=again, **chat).choices[0].finish_reason
    text = {"model": f"text-completion-openai/{MODEL}", "prompt": RENDERED, **where, **GREEDY}
    assert litellm.text_completion(**text).choices[0].text == expected
    streamed = litellm.text_completion(stream=True, **text)
    assert "".join(c.choices[0].text or "" for c in streamed) == expected


def test_the_tool_loop_of_the_official_client(demo: Deployment, drawn: dict[str, Any]) -> None:
    client, messages = demo.client(), [*ASKED]
    with client.chat.completions.stream(model=MODEL, messages=messages, **ONE) as stream:
        deltas = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
        answer = stream.get_final_completion().choices[0]
    assert len(deltas) > 1
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert check_call(call.function.name, call.function.arguments) == drawn
    messages += [
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    last = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], **GREEDY)
    assert last.choices[0].finish_reason in ("stop", "length")
    parts = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], stream=True, **GREEDY
    )
    assert "".join(p.choices[0].delta.content or "" for p in parts) == last.choices[0].message.content
    tokens = {"messages": messages, "tools": [TOOL]}
    prompt = httpx.post(f"{demo.local.gateway_url}/tokenize", json=tokens, timeout=60).json()["tokens"]
    assert last.usage.prompt_tokens == len(prompt)


def test_forced_calls_match_their_schemas_however_they_are_drawn(demo: Deployment) -> None:
    wild = {**ONE, "temperature": 2.0, "n": 8, "seed": 3}
    for more in ({}, {"tool_choice": "required", "parallel_tool_calls": False}):
        answer = demo.client().chat.completions.create(model=MODEL, messages=ASKED, **{**wild, **more})
        found = [
            check_call(c.message.tool_calls[0].function.name, c.message.tool_calls[0].function.arguments)
            for c in answer.choices
        ]
        assert len({json.dumps(arguments) for arguments in found}) > 1
        assert {len(c.message.tool_calls) for c in answer.choices} == {1}
        assert {c.finish_reason for c in answer.choices} == {"tool_calls"}


def test_langchain_binds_tools_and_gets_structured_output(demo: Deployment, drawn: dict[str, Any]) -> None:
    chat = ChatOpenAI(model=MODEL, **v1(demo), temperature=0, max_tokens=160)
    bound = chat.bind_tools([TOOL], tool_choice="draw")
    answer = bound.invoke(ASKED)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("draw", drawn)]
    chunks = list(bound.stream(ASKED))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("draw", drawn)]
    call = answer.tool_calls[0]
    history = [HumanMessage("Draw something."), answer, ToolMessage("done", tool_call_id=call["id"])]
    assert isinstance(chat.bind_tools([TOOL]).invoke(history), AIMessage)
    for method in ("function_calling", "json_schema"):
        shape = chat.with_structured_output(Shape, method=method).invoke("Draw something.")
        assert isinstance(shape, Shape)
    strict = chat.bind_tools([TOOL], strict=True, parallel_tool_calls=False).invoke(ASKED)
    assert len(strict.tool_calls) <= 1


def test_litellm_calls_tools(demo: Deployment, drawn: dict[str, Any]) -> None:
    where = {"api_base": f"{demo.local.gateway_url}/v1", "api_key": "none", "num_retries": 0, "timeout": 120}
    chat = {"model": f"openai/{MODEL}", "messages": ASKED, **where, **ONE}
    message = litellm.completion(**chat).choices[0].message
    (call,) = message.tool_calls
    assert check_call(call.function.name, call.function.arguments) == drawn
    whole = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **chat)))
    (streamed,) = whole.choices[0].message.tool_calls
    assert check_call(streamed.function.name, streamed.function.arguments) == drawn
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    again = {**chat, "messages": [*ASKED, message, result], "tool_choice": "auto"}
    assert litellm.completion(**again).choices[0].finish_reason
