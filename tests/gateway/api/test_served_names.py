"""The names of the model in the API: those of the spec, or one that tells nothing of the server's folders."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mmd_api.spec.model import ModelSpec
from mmd_workers.caches.index import CacheIndex
from mmd_workers.engine.memory.blocks import leading_identities, root_of
from mmd_workers.prefill.kv_sender import prefix_of
from mmd_workers.wire.messages.every_pod import CacheReport
from mmd_workers.wire.messages.message_parts import Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest
from tests.gateway.running import Launch
from tests.gateway.scripted import ScriptedWorker, answer_well

HELLO = [{"role": "user", "content": "hello"}]
TEXT = "the red circle"


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ({"id": "org/model"}, ("org/model",)),
        ({"id": "builtin/demo"}, ("builtin/demo",)),
        ({"id": "/models/llava-1.5"}, ("llava-1.5",)),
        ({"id": "/models/llava/"}, ("llava",)),
        ({"id": "/models"}, ("models",)),
        ({"id": "./folder/own"}, ("own",)),
        ({"id": "/models/llava", "servedName": ["chat", "org/chat:v2"]}, ("chat", "org/chat:v2")),
        ({"id": "org/model", "servedName": ["a"]}, ("a",)),
    ],
)
def test_a_model_is_served_as(model: dict, names: tuple[str, ...]) -> None:
    assert ModelSpec.model_validate(model).names == names


@pytest.mark.parametrize("name", ["", "/etc/passwd", "two words", "a\nb", "x" * 257, "-x"])
def test_a_name_that_clients_could_not_use_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="servedName"):
        ModelSpec.model_validate({"id": "org/model", "servedName": [name]})


async def test_every_served_name_is_listed_accepted_and_returned_as_requested(launch: Launch) -> None:
    gateway = await launch(model={"servedName": ["chat", "org/chat"]})
    await gateway.worker(TEXT)
    listed = (await gateway.http.get("/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == ["chat", "org/chat"]
    for name in ("chat", "org/chat"):
        assert (await gateway.http.get(f"/v1/models/{name}")).json()["id"] == name
        body = {"model": name, "messages": HELLO}
        answer = (await gateway.http.post("/v1/chat/completions", json=body)).json()
        assert (answer["model"], answer["choices"][0]["message"]["content"]) == (name, TEXT)
        stream = await gateway.http.post("/v1/chat/completions", json={**body, "stream": True})
        chunks = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
        assert {chunk["model"] for chunk in chunks} == {name}


async def test_an_unknown_model_is_not_found_and_the_served_names_are_given(launch: Launch) -> None:
    gateway = await launch(model={"servedName": ["chat", "org/chat"]})
    for name in ("builtin/demo", "Chat", "x" * 500):
        asked = await gateway.http.post("/v1/chat/completions", json={"model": name, "messages": HELLO})
        looked = await gateway.http.get(f"/v1/models/{name}")
        for response in (asked, looked):
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert "use 'chat' or 'org/chat'" in error["message"]
            assert len(error["message"]) < 400
    text = (await gateway.admin.get("/metrics")).text
    assert "Chat" not in text


async def test_adapters_are_listed_as_models_and_travel_with_the_requests_for_them(launch: Launch) -> None:
    adapters = [{"name": "sql", "id": "org/sql"}, {"name": "org/poems:v2", "id": "/models/poems"}]
    gateway = await launch(model={"servedName": ["chat"]}, engine={"type": "VLLM", "adapters": adapters})
    worker = await gateway.worker(TEXT)
    listed = (await gateway.http.get("/v1/models")).json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [
        ("chat", None),
        ("sql", "chat"),
        ("org/poems:v2", "chat"),
    ]
    for name, adapter in (("chat", ""), ("sql", "sql"), ("org/poems:v2", "org/poems:v2")):
        assert (await gateway.http.get(f"/v1/models/{name}")).json()["id"] == name
        answer = await gateway.http.post("/v1/chat/completions", json={"model": name, "messages": HELLO})
        assert answer.json()["model"] == name
        assert worker.requests[-1].adapter == adapter
    unknown = await gateway.http.post("/v1/chat/completions", json={"model": "poems", "messages": HELLO})
    assert "use 'chat' or 'sql' or 'org/poems:v2'" in unknown.json()["error"]["message"]


async def test_a_request_that_is_placed_again_keeps_its_adapter(launch: Launch) -> None:
    gateway = await launch(engine={"type": "VLLM", "adapters": [{"name": "sql", "id": "org/sql"}]})

    async def begin_and_give_up(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if request.attempt == 0:
            await worker.tokens(request, [0])
            await worker.fail(request, "link_failed", "the KV link broke", retryable=True)
        else:
            await answer_well(worker, request)

    worker = await gateway.worker(TEXT, begin_and_give_up)
    answer = await gateway.http.post("/v1/chat/completions", json={"model": "sql", "messages": HELLO})
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    assert [(r.attempt, r.adapter, len(r.output_token_ids)) for r in worker.requests] == [
        (0, "sql", 0),
        (1, "sql", 1),
    ]


def test_prompt_blocks_have_different_identities_for_each_adapter_and_salt() -> None:
    index = CacheIndex()
    index.take(CacheReport("p", "i", 1, 16, [b"any"], []))
    tokens = list(range(64))
    roots = [root_of(adapter, salt) for adapter in ("", "sql", "poems") for salt in ("", "one", "two")]
    blocks = [list(index.prefix_of(tokens, [], root)[16]) for root in roots]
    assert [len(found) for found in blocks] == [4] * 9
    assert len({block for found in blocks for block in found}) == 36


def test_a_decode_pod_is_offered_identities_for_adapter_and_salt() -> None:
    tokens = list(range(64))
    plain = GenerateRequest("r", 0, "g", tokens, [], Sampling(1), [], 0.0, 0.0)
    for adapter in ("", "sql"):
        for salt in ("", "one"):
            offered = prefix_of(replace(plain, adapter=adapter, cache_salt=salt), 16)
            assert offered == leading_identities(tokens, [], root_of(adapter, salt), 16)
