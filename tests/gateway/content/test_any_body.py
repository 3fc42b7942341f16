"""Whatever JSON a client sends, it gets a request or an error of the table that names a field, and in time that grows with its length."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.contract.errors import MmdError
from mmd_workers.gateway.api.messages.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    parse_count_tokens_request,
    parse_messages_request,
)
from mmd_workers.gateway.api.responses.responses_request import ResponsesRequest, parse_responses_request
from mmd_workers.gateway.api.tokenize import (
    DetokenizeRequest,
    TokenizeRequest,
    parse_detokenize_request,
    parse_tokenize_request,
)
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.content.chat_request import ChatRequest, parse_chat_request
from mmd_workers.gateway.content.completion_request import CompletionRequest, parse_completion_request
from mmd_workers.gateway.content.conversation import conversation

Parse = Callable[[object], object]


def read_chat(value: object) -> object:
    return conversation(parse_chat_request(value).messages)


def read_messages(value: object) -> object:
    return conversation(parse_messages_request(value).messages)


def read_count(value: object) -> object:
    return conversation(parse_count_tokens_request(value).messages)


def read_responses(value: object) -> object:
    return conversation(parse_responses_request(value).messages)


def read_completion(value: object) -> object:
    return parse_completion_request(value).prompts


def read_tokens(value: object) -> object:
    messages = parse_tokenize_request(value).messages
    return conversation(messages) if messages is not None else None


BODIES: dict[str, tuple[Parse, type, dict[str, Any]]] = {
    "chat": (read_chat, ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    "messages": (read_messages, MessagesRequest, {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}),
    "count": (read_count, CountTokensRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    "responses": (read_responses, ResponsesRequest, {"model": "m", "input": "x"}),
    "completion": (read_completion, CompletionRequest, {"model": "m", "prompt": "x"}),
    "tokenize": (read_tokens, TokenizeRequest, {"messages": [{"role": "user", "content": "x"}]}),
    "detokenize": (parse_detokenize_request, DetokenizeRequest, {"tokens": [1]}),
}  # fmt: skip
WORDS = st.sampled_from(
    ["system", "user", "assistant", "tool", "text", "image_url", "refusal", "function", "auto", "image", "base64", "url", "tool_use", "tool_result", "function_call", "function_call_output", "any", "none", "required", "custom", "output_text", "input_image", "message", "json_schema", "{}", '{"a": [1]}', "[]", "1", ""]
)  # fmt: skip
NAMES = st.sampled_from(
    ["role", "content", "type", "text", "tool_calls", "tool_call_id", "function", "arguments", "name", "id", "refusal", "url",
     "image_url", "prompt", "tokens", "include_usage", "source", "system", "media_type", "data",
     "status", "format", "schema", "input", "tool_use_id", "call_id", "output", "input_schema", "parameters", "strict", "tools", "tool_choice"]
)  # fmt: skip
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False)
    | WORDS
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)


def fault_of(read: Parse, value: object) -> ApiError | MmdError | None:
    try:
        read(value)
    except (ApiError, MmdError) as error:
        return error
    return None


def assert_read_or_refused(read: Parse, value: object) -> None:
    fault = fault_of(read, value)
    if fault is not None:
        assert fault.status is not None
        assert 400 <= fault.status < 500
        assert 0 < len(fault.message) <= 1200


@pytest.mark.parametrize("kind", BODIES)
@given(value=ANY)
@settings(max_examples=100, deadline=None)
def test_any_json_is_read_or_refused_by_an_error_of_the_table(kind: str, value: object) -> None:
    assert_read_or_refused(BODIES[kind][0], value)


@pytest.mark.parametrize("kind", BODIES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_field_values_are_read_or_refused_by_a_listed_error(kind: str, data: st.DataObject) -> None:
    read, model, good = BODIES[kind]
    names = st.sampled_from(sorted(model.model_fields)) | NAMES
    assert_read_or_refused(read, good | data.draw(st.dictionaries(names, ANY, min_size=1, max_size=3)))


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WELL_FORMED = st.fixed_dictionaries({"role": st.just("user"), "content": WORDS}) | st.fixed_dictionaries(
    {"role": st.just("assistant")},
    optional={
        "content": st.none() | WORDS | st.lists(st.fixed_dictionaries({"type": WORDS}, optional={"text": WORDS, "refusal": WORDS}), max_size=3),
        "tool_calls": st.none() | st.lists(st.just(CALL) | st.fixed_dictionaries({"id": WORDS, "function": st.fixed_dictionaries({"name": WORDS, "arguments": WORDS | st.text(max_size=8)})}), max_size=3),
        "refusal": st.none() | WORDS,
    },
) | st.fixed_dictionaries({"role": st.just("tool"), "content": WORDS, "tool_call_id": st.sampled_from(["1", "2"])})  # fmt: skip


@given(messages=st.lists(WELL_FORMED, max_size=6))
@settings(max_examples=100, deadline=None)
def test_any_history_is_read_or_refused_by_an_error_of_the_table(messages: list[dict]) -> None:
    assert_read_or_refused(read_chat, {"model": "m", "messages": messages})


BLOCKS = st.fixed_dictionaries(
    {"type": WORDS},
    optional={"text": WORDS, "id": WORDS, "name": WORDS, "input": ANY, "tool_use_id": WORDS, "content": ANY, "source": ANY | st.fixed_dictionaries({"type": WORDS}, optional={"url": WORDS, "data": WORDS, "media_type": st.just("image/png") | WORDS})},
)  # fmt: skip


ITEMS = st.fixed_dictionaries(
    {"role": WORDS, "content": WORDS | st.lists(BLOCKS | st.fixed_dictionaries({"type": WORDS, "image_url": WORDS}), max_size=3)},
    optional={"type": WORDS, "id": WORDS, "status": WORDS},
) | st.fixed_dictionaries(
    {"type": st.sampled_from(["function_call", "function_call_output"]), "call_id": WORDS},
    optional={"name": WORDS, "arguments": WORDS | ANY, "output": WORDS | ANY, "id": WORDS},
)  # fmt: skip


@given(items=st.lists(ITEMS | ANY, min_size=1, max_size=3), form=ANY | st.fixed_dictionaries({"type": WORDS}))
@settings(max_examples=100, deadline=None)
def test_any_items_are_read_or_refused_by_an_error_of_the_table(items: list[Any], form: object) -> None:
    assert_read_or_refused(read_responses, {"model": "m", "input": items})
    assert_read_or_refused(read_responses, {"model": "m", "input": "x", "text": {"format": form}})


@pytest.mark.parametrize("kind", ["messages", "count"])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_blocks_are_read_or_refused_by_an_error_of_the_table(kind: str, data: st.DataObject) -> None:
    read, _, good = BODIES[kind]
    content = WORDS | st.lists(BLOCKS, max_size=3)
    turns = st.lists(st.fixed_dictionaries({"role": WORDS, "content": content}), min_size=1, max_size=3)
    assert_read_or_refused(read, good | {"messages": data.draw(turns), "system": data.draw(content)})


def calls(count: int, arguments: str = "{}") -> list[dict]:
    return [{**CALL, "id": str(n), "function": {"name": "f", "arguments": arguments}} for n in range(count)]


def history(count: int) -> list[dict]:
    """Pairs of a call and its result."""
    return [
        message
        for n in range(count // 2)
        for message in (
            {"role": "assistant", "tool_calls": [{**CALL, "id": str(n)}]},
            {"role": "tool", "content": "x", "tool_call_id": str(n)},
        )
    ]


def uses(count: int) -> list[dict]:
    """Pairs of a call and its result, as Anthropic has them."""
    return [
        message
        for n in range(count)
        for message in (
            {"role": "assistant", "content": [{"type": "tool_use", "id": str(n), "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": str(n), "content": "x"}]},
        )
    ]


LONG: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "unknown fields": ("chat", lambda n: {f"x{i}": 0 for i in range(n)}),
    "a history": ("chat", lambda n: {"messages": history(n // 16)}),
    "arguments of brackets": (
        "chat",
        lambda n: {"messages": [{"role": "assistant", "tool_calls": calls(1, '{"a": [' + "[]," * n + "1]}")}]},
    ),
    "arguments of one number": (
        "chat",
        lambda n: {"messages": [{"role": "assistant", "tool_calls": calls(1, '{"a": ' + "1" * (n * 16) + "}")}]},
    ),
    "arguments that are open": (
        "chat",
        lambda n: {"messages": [{"role": "assistant", "tool_calls": calls(1, '{"a":' * n)}]},
    ),
    "wrong blocks": ("messages", lambda n: {"messages": [{"role": "user", "content": [{"type": "x"}] * (n // 8)}]}),
    "wrong sources": (
        "messages",
        lambda n: {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "x"}}]}] * (n // 16)},
    ),
    "blocks": (
        "messages",
        lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4}] * (n // 64)},
    ),
    "wrong items": ("responses", lambda n: {"input": [{"role": "user", "content": [{"type": "x"}]}] * (n // 16)}),
    "items": ("responses", lambda n: {"input": [{"role": "user", "content": "x"}] * (n // 16)}),
    "metadata": ("responses", lambda n: {"metadata": {str(i): i for i in range(n)}}),
    "uses and results": (
        "messages",
        lambda n: {"messages": uses(n // 64)},
    ),
    "one message of results": (
        "messages",
        lambda n: {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}] * (n // 8)}]},
    ),
    "wide inputs": (
        "messages",
        lambda n: {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1] * n}}]}, {"role": "user", "content": "x"}]},
    ),
    "calls and outputs": ("responses", lambda n: {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id": "1", "output": "x"}] * (n // 64)}),
    "calls alone": ("responses", lambda n: {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}] * (n // 16)}),
    "wrong tools": ("responses", lambda n: {"tools": [{"type": "function"}] * n}),
    "wrong tool calls": (
        "chat",
        lambda n: {"messages": [{"role": "assistant", "tool_calls": [0] * n}]},
    ),
    "token ids": ("completion", lambda n: {"prompt": [5] * n}),
    "wrong token ids": ("completion", lambda n: {"prompt": ["x"] + [5] * n}),
    "token lists": ("completion", lambda n: {"prompt": [[5] * (n // 64)] * 64}),
    "wrong token lists": ("completion", lambda n: {"prompt": [[-1]] * n}),
    "wrong tokens": ("detokenize", lambda n: {"tokens": [-1] * n}),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_a_body_of_many_elements_is_read_in_linear_time(name: str) -> None:
    """Eight times the elements may take thirty times as long on a busy machine; the square would be sixty-four times, and minutes."""
    kind, make = LONG[name]
    read, _, good = BODIES[kind]

    def seconds(count: int) -> float:
        body = good | make(count)
        assert json.dumps(body)
        times = []
        for _ in range(3):
            begun = time.process_time()
            assert_read_or_refused(read, body)
            times.append(time.process_time() - begun)
        return min(times)

    assert seconds(32_000) < 30 * max(seconds(4_000), 0.002)
