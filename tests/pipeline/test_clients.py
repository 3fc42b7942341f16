"""Clients that people already use, against a real deployment: the official one, LangChain and LiteLLM, with answers equal to `generate`."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest

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
