"""The names of the model in the API: those of the spec, or one that tells nothing of the server's folders."""

from __future__ import annotations

import json

import pytest

from mmd_api.spec.model import ModelSpec

from .running import Launch

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
