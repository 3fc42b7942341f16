"""Clients that people already use, against a real deployment: the official ones, LangChain and LiteLLM, with answers equal to `generate`."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
from pydantic import BaseModel

from mmd_cli.client import media_part
from mmd_cli.samples import draw
from support.oracles import oracle
from support.serving.local_deployment import Deployment

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a list of prices when it is imported
os.environ["LANGSMITH_TRACING"] = "false"

import anthropic
import litellm
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("demo"), pytest.mark.timeout(600)]

DEMO = Path(str(resources.files("mmd_workers.model") / "demo"))
MODEL = "builtin/demo"
QUESTION = "What color is the shape?"
RENDERED = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_tokens": 24}
GREEDILY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 24,
    "extra_body": {"temperature": 0},
}  # of Anthropic's client
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
    tokens = httpx.post(f"{demo.gateway_url}/tokenize", json={"messages": HISTORY}, timeout=60).json()
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
    return {"base_url": f"{demo.gateway_url}/v1", "api_key": "none", "max_retries": 0, "timeout": 120}


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
        f"{demo.gateway_url}/tokenize",
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
    where = {"api_base": f"{demo.gateway_url}/v1", "api_key": "none", "num_retries": 0, "timeout": 120}
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
        deltas = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        answer = stream.get_final_completion().choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert "".join(deltas) == call.function.arguments
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
    prompt = httpx.post(f"{demo.gateway_url}/tokenize", json=tokens, timeout=60).json()["tokens"]
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
    where = {"api_base": f"{demo.gateway_url}/v1", "api_key": "none", "num_retries": 0, "timeout": 120}
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


@pytest.fixture
def claude(demo: Deployment) -> Iterator[anthropic.Anthropic]:
    where = {"base_url": demo.gateway_url, "api_key": "none", "max_retries": 0, "timeout": 120}
    with anthropic.Anthropic(**where) as client:
        yield client


def test_anthropics_client_gets_messages_whole_and_streamed(
    claude: anthropic.Anthropic, expected: str
) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    whole = claude.messages.create(messages=messages, **GREEDILY)
    assert whole.content[0].text == expected
    usage = whole.usage
    counted = claude.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    with claude.messages.stream(messages=messages, **GREEDILY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == final.content[0].text == expected
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, usage.output_tokens)


def test_anthropics_client_sends_pictures_with_instructions_and_turns(
    demo: Deployment, claude: anthropic.Anthropic
) -> None:
    picture = draw("image", 31)
    data = base64.b64encode(picture.bytes).decode()
    source = {"type": "base64", "media_type": picture.mime, "data": data}
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]}
    ]
    chat: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [media_part("image", picture.bytes, picture.mime), {"type": "text", "text": QUESTION}]},
    ]  # fmt: skip
    for _ in range(2):
        answer = claude.messages.create(messages=turns, system="Be brief.", **GREEDILY)
        same = demo.client().chat.completions.create(model=MODEL, messages=chat, **GREEDY)
        assert answer.content[0].text == same.choices[0].message.content
        turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And?"}]
        chat += [same.choices[0].message, {"role": "user", "content": "And?"}]


def test_a_picture_that_is_none_is_named_as_anthropics_client_sent_it(claude: anthropic.Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}
    content: list[Any] = [{"type": "text", "text": QUESTION}, {"type": "image", "source": source}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.1\.source: ") as caught:
        claude.messages.create(messages=[{"role": "user", "content": content}], **GREEDILY)
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_litellm_speaks_anthropics_messages(demo: Deployment, expected: str) -> None:
    chat = {
        "model": f"anthropic/{MODEL}",
        "api_base": demo.gateway_url,
        "api_key": "none",
        "num_retries": 0,
        "timeout": 120,
        "messages": [{"role": "user", "content": QUESTION}],
        **GREEDY,
    }
    assert litellm.completion(**chat).choices[0].message.content == expected
    chunks = list(litellm.completion(stream=True, **chat))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected


class Seen(pydantic.BaseModel):
    """A form that is not in the model's training data."""

    shape: Literal["circle", "square", "triangle"]
    count: Annotated[int, pydantic.Field(ge=0, le=9)]


GREEDY_RESPONSE: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}


def test_the_official_client_gets_responses_whole_and_streamed(demo: Deployment, expected: str) -> None:
    client = demo.client()
    whole = client.responses.create(input=QUESTION, **GREEDY_RESPONSE)
    assert whole.output_text == expected
    with client.responses.stream(input=QUESTION, **GREEDY_RESPONSE) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == expected
    assert (final.status, final.usage.output_tokens) == (whole.status, whole.usage.output_tokens)


def test_responses_with_pictures_instructions_and_turns_are_those_of_the_chat(demo: Deployment) -> None:
    client = demo.client()
    picture = draw("image", 31)
    part = media_part("image", picture.bytes, picture.mime)
    turns: list[Any] = [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"},
                {"type": "input_text", "text": QUESTION},
            ],
        }
    ]
    chat: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [part, {"type": "text", "text": QUESTION}]},
    ]
    for _ in range(2):
        answer = client.responses.create(input=turns, instructions="Be brief.", **GREEDY_RESPONSE)
        same = client.chat.completions.create(model=MODEL, messages=chat, **GREEDY)
        assert answer.output_text == same.choices[0].message.content
        turns += [*answer.output, {"role": "user", "content": "And?"}]
        chat += [same.choices[0].message, {"role": "user", "content": "And?"}]


def test_a_response_in_a_form_is_parsed_by_openais_client(demo: Deployment) -> None:
    parse = demo.client().responses.parse
    response = parse(input=QUESTION, text_format=Seen, model=MODEL, temperature=0, max_output_tokens=200)
    assert response.status == "completed"
    assert isinstance(response.output_parsed, Seen)
    form = {"type": "json_schema", "name": "seen", "schema": Seen.model_json_schema()}
    cut = demo.client().responses.create(
        input=QUESTION, model=MODEL, temperature=0, max_output_tokens=3, text={"format": form}
    )
    assert cut.status == "incomplete"
    assert cut.output_text.startswith("{")


def test_what_would_be_stored_is_refused_by_name(demo: Deployment) -> None:
    refused: list[dict[str, Any]] = [
        {"store": True},
        {"background": True},
        {"previous_response_id": "resp_1"},
    ]
    for one in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            demo.client().responses.create(input=QUESTION, **GREEDY_RESPONSE, **one)
        assert [caught.value.param] == list(one)
        assert caught.value.code == "unsupported_parameter"


def test_langchain_and_litellm_speak_responses(demo: Deployment, expected: str) -> None:
    chat = ChatOpenAI(model=MODEL, use_responses_api=True, **v1(demo), **GREEDY)
    assert chat.invoke(QUESTION).text == expected
    chunks = list(chat.stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == expected
    again = [HumanMessage(QUESTION), chat.invoke(QUESTION), HumanMessage("And?")]
    assert chat.invoke(again).usage_metadata["input_tokens"] > 0
    where = {"api_base": f"{demo.gateway_url}/v1", "api_key": "none", "num_retries": 0, "timeout": 120}
    asked = {"input": QUESTION, **where, **GREEDY_RESPONSE, "model": f"openai/{MODEL}"}
    assert litellm.responses(**asked).output[0].content[0].text == expected
    events = list(litellm.responses(stream=True, **asked))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected


def test_the_tool_loop_of_anthropics_client(
    demo: Deployment, claude: anthropic.Anthropic, drawn: dict[str, Any]
) -> None:
    tool = {"name": "draw", "description": "Draws a shape.", "input_schema": COLOR}
    asked = {**GREEDILY, "tools": [tool], "max_tokens": 160}
    forced = {**asked, "tool_choice": {"type": "tool", "name": "draw"}}
    messages: list[Any] = [*ASKED]
    answer = claude.messages.create(messages=messages, **forced)
    assert answer.stop_reason == "tool_use"
    (used,) = answer.content
    assert (used.type, used.name, used.input) == ("tool_use", "draw", drawn)
    with claude.messages.stream(messages=messages, **forced) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    assert json.loads("".join(pieces)) == streamed.content[0].input == drawn
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "done"}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = claude.messages.create(messages=messages, **asked)
    call = {"id": used.id, "type": "function", "function": {"name": "draw", "arguments": json.dumps(drawn)}}
    chat: list[Any] = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": used.id, "content": "done"},
    ]
    same = demo.client().chat.completions.create(
        model=MODEL, messages=chat, tools=[TOOL], temperature=0, max_tokens=160
    )
    assert last.content[0].text == same.choices[0].message.content
    counted = claude.messages.count_tokens(model=MODEL, messages=messages, tools=[tool])
    assert counted.input_tokens == same.usage.prompt_tokens


def test_the_tool_loop_of_openais_responses(demo: Deployment, drawn: dict[str, Any]) -> None:
    client = demo.client()
    tool: Any = {"type": "function", **TOOL["function"], "strict": True}
    asked = {**GREEDY_RESPONSE, "tools": [tool], "max_output_tokens": 160}
    forced = {**asked, "tool_choice": {"type": "function", "name": "draw"}}
    items: list[Any] = [*ASKED]
    answer = client.responses.create(input=items, **forced)
    (call,) = answer.output
    assert (answer.status, call.type) == ("completed", "function_call")
    assert check_call(call.name, call.arguments) == drawn
    with client.responses.stream(input=items, **forced) as stream:
        kind = "response.function_call_arguments.delta"
        pieces = [event.delta for event in stream if event.type == kind]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output[0].arguments == call.arguments
    items += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    last = client.responses.create(input=items, **{**asked, "tools": [{**tool, "strict": False}]})
    chat: list[Any] = [
        *ASKED,
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": "draw", "arguments": call.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "done"},
    ]
    same = client.chat.completions.create(
        model=MODEL, messages=chat, tools=[TOOL], temperature=0, max_tokens=160
    )
    assert last.output_text == same.choices[0].message.content
    assert last.usage.input_tokens == same.usage.prompt_tokens
