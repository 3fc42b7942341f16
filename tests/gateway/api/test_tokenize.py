"""POST /tokenize and /detokenize, in the shape of vLLM's server: the tokens are those that the model gets."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from mmd_workers.gateway.api import tokenize
from tests.gateway.running import Launch, Running

MODEL = "builtin/demo"
HELLO = [{"role": "user", "content": "what is red"}]


async def post(gateway: Running, path: str, body: dict, status: int = 200) -> dict:
    response = await gateway.http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


async def test_a_text_is_tokenized_as_a_completion_is(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(max_model_len=300)
    text = "<|im_start|>what is red? Grüße, 世界"
    found = await post(gateway, "/tokenize", {"model": MODEL, "prompt": text})
    await gateway.openai.completions.create(model=MODEL, prompt=text)
    assert found == {
        "count": len(worker.requests[0].token_ids),
        "max_model_len": 300,
        "tokens": worker.requests[0].token_ids,
        "token_strs": None,
    }
    back = await post(gateway, "/detokenize", {"model": MODEL, "tokens": found["tokens"]})
    assert back == {"prompt": text}


async def test_messages_are_tokenized_as_a_chat_is_with_their_media(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker()
    out = io.BytesIO()
    Image.new("RGB", (90, 60)).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    seen = [*HELLO, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    for messages in (HELLO, seen):
        found = await post(gateway, "/tokenize", {"messages": messages})
        await gateway.openai.chat.completions.create(model=MODEL, messages=messages)
        assert found["tokens"] == worker.requests[-1].token_ids
    await gateway.until_metric("mmd_media_held_bytes", 0)


async def test_the_vocabularys_spelling_is_returned_on_request(launch: Launch) -> None:
    gateway = await launch()
    found = await post(gateway, "/tokenize", {"prompt": "<|im_end|> red", "return_token_strs": True})
    assert found["token_strs"] == gateway.tokenizer.convert_ids_to_tokens(found["tokens"])
    assert found["token_strs"][0] == "<|im_end|>"


async def test_a_text_longer_than_the_context_is_counted(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await launch()
    monkeypatch.setattr(tokenize, "IN_THREAD_TOKENS", 1)
    found = await post(gateway, "/tokenize", {"prompt": "red " * 6000, "return_token_strs": True})
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > found["max_model_len"] == 4096
    text = (await post(gateway, "/detokenize", {"tokens": found["tokens"][:9000]}))["prompt"]
    assert text == gateway.tokenizer.decode(found["tokens"][:9000])


CASES: list[tuple[str, str, dict, str, str]] = [
    ("nothing", "/tokenize", {}, "prompt", "send prompt or messages"),
    ("both", "/tokenize", {"prompt": "x", "messages": HELLO}, "messages", "not both"),
    ("a prompt that is a list", "/tokenize", {"prompt": ["x"]}, "prompt", "string"),
    ("an unknown role", "/tokenize", {"messages": [{"role": "x", "content": ""}]}, "messages[0].role", "unknown role"),
    ("special tokens of messages", "/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens", "omit it"),
    ("a template", "/tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template", "not supported"),
    ("a text that is too long", "/tokenize", {"prompt": "r" * 200_000}, "prompt", "200000 tokens > 131072 maximum"),
    ("a text of megabytes", "/tokenize", {"prompt": "x" * 20_000_000}, "prompt", "tokens > 131072 maximum; the text has 20000000 characters; send less text at once"),
    ("no tokens", "/detokenize", {}, "tokens", "missing"),
    ("a token that is none", "/detokenize", {"tokens": [1, 99999]}, "tokens[1]", "has no token 99999"),
    ("a negative token", "/detokenize", {"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
    ("a token that is text", "/detokenize", {"tokens": ["x"]}, "tokens[0]", "integer"),
]  # fmt: skip


async def test_each_malformed_body_gets_an_error_that_names_the_field(launch: Launch, subtests: Any) -> None:
    gateway = await launch()
    for name, path, body, param, says in CASES:
        with subtests.test(name):
            error = (await post(gateway, path, body, 400))["error"]
            assert error["param"] == param
            assert says in error["message"]
    unknown = (await post(gateway, "/tokenize", {"model": "x", "prompt": "red"}, 404))["error"]
    assert unknown["param"] == "model"
    assert (await post(gateway, "/detokenize", {"tokens": []})) == {"prompt": ""}
    assert (await post(gateway, "/tokenize", {"prompt": ""}))["count"] == 0


async def test_tokenizing_is_not_counted_among_the_answers(launch: Launch) -> None:
    gateway = await launch()
    await post(gateway, "/tokenize", {"prompt": "red"})
    await post(gateway, "/detokenize", {"tokens": [5]})
    assert (await gateway.admin.get("/debug/requests")).json() == {"requests": []}
    text = (await gateway.admin.get("/metrics")).text
    assert not [line for line in text.splitlines() if line.startswith("mmd_requests_total{")]
