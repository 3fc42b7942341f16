"""/openapi.json is a valid document, made from what the gateway takes."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from mmd_workers.gateway.api import openapi
from tests.gateway.running import Launch
from tests.gateway.scripted import ScriptedWorker

DOCUMENT: dict[str, Any] = json.loads(openapi.document())
MESSAGES = [{"role": "user", "content": "x"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "builtin/demo", "messages": MESSAGES},
    "/v1/completions": {"model": "builtin/demo", "prompt": "x"},
    "/v1/responses": {"model": "builtin/demo", "input": "x"},
    "/v1/messages": {"model": "builtin/demo", "max_tokens": 1, "messages": MESSAGES},
    "/v1/messages/count_tokens": {"model": "builtin/demo", "messages": MESSAGES},
    "/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [1]},
}


def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def request_schema(path: str) -> dict[str, Any]:
    schema: dict[str, Any] = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    return schema


def references(value: object) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


async def test_the_gateway_serves_the_document(launch: Launch) -> None:
    gateway = await launch()
    response = await gateway.http.get("/openapi.json")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == DOCUMENT


def test_all_that_it_refers_to_is_there() -> None:
    for reference in references(DOCUMENT):
        found: Any = DOCUMENT
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]


@pytest.mark.parametrize("path", GOOD)
def test_it_has_every_field_of_a_request_and_no_other(path: str) -> None:
    good = GOOD[path]
    one = next(operation for operation in openapi.OPERATIONS if operation.path == path)
    schema = validator(request_schema(path))
    (reference,) = references(request_schema(path))
    own = DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]]
    names = {field.alias or name for name, field in one.request.model_fields.items()}
    assert own["properties"].keys() == names | one.not_served.keys()
    schema.validate(good)
    assert not schema.is_valid({**good, "unknown": 1})
    for name, (off, _) in one.not_served.items():
        assert not schema.is_valid({**good, name: "something else"})
        for value in off:
            schema.validate({**good, name: value})


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "/v1/messages": [
        {"name": "f", "input_schema": {}, "defer_loading": True},
        {"type": "custom", "name": "f", "input_schema": {}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 2},
        {"type": "tool_search_tool_bm25", "name": "search"},
    ],
    "/v1/responses": [
        {"type": "function", **FUNCTION},
        {"type": "custom", "name": "f", "format": {"type": "text"}},
        {
            "type": "namespace",
            "name": "g",
            "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "f"}],
        },
        {"type": "web_search", "external_web_access": True},
        {"type": "tool_search", "execution": "server"},
    ],
}
MISSPELT: dict[str, list[dict[str, Any]]] = {
    "/v1/messages": [
        {"name": "f", "input_schema": {}, "defer_load": True},
        {"type": "function", "name": "f", "input_schema": {}},
        {"type": "web_serch_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "custom", "name": "f"},
    ],
    "/v1/responses": [
        {"type": "web-search", "name": "f"},
        {"type": "web_serch"},
        {"type": "custom", **FUNCTION},
        {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "regex"}},
        {"type": "function", **FUNCTION, "defer_load": True},
        {"type": "namespace", "name": "g"},
        {"type": "namespace", "name": "g", "tools": [{"type": "web_search"}]},
        {"name": "f"},
    ],
}


@pytest.mark.parametrize("path", TOOLS)
def test_a_tool_is_of_one_kind(path: str) -> None:
    schema = validator(request_schema(path))
    for tool in TOOLS[path]:
        schema.validate({**GOOD[path], "tools": [tool]})
    taken = [tool for tool in MISSPELT[path] if schema.is_valid({**GOOD[path], "tools": [tool]})]
    assert taken == []


async def test_an_answer_is_as_the_document_has_it(launch: Launch) -> None:
    gateway = await launch()
    worker: ScriptedWorker = await gateway.worker("the red circle")
    assert worker.answer
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        good = GOOD[path]
        answer = await gateway.http.post(path, json=good)
        assert answer.status_code == 200, answer.text
        responses = DOCUMENT["paths"][path]["post"]["responses"]
        validator(responses["200"]["content"]["application/json"]["schema"]).validate(answer.json())
        wrong = await gateway.http.post(path, json={**good, "unknown": 1})
        validator(responses["default"]["content"]["application/json"]["schema"]).validate(wrong.json())


async def test_embeddings_are_refused_with_what_is_served(launch: Launch) -> None:
    gateway = await launch()
    response = await gateway.http.post("/v1/embeddings", json={"model": "builtin/demo", "input": "hello"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "not_found"
    assert "'builtin/demo' generates text and makes no embeddings" in error["message"]
    assert "/v1/chat/completions" in error["message"]
