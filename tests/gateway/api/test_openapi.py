"""/openapi.json is a valid document, made from what the gateway takes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import pytest
import schemathesis
from starlette.routing import Route

from mmd_workers.gateway.api import app, openapi
from mmd_workers.gateway.api.operations import OPERATIONS
from support.serving.documented import Documented
from tests.gateway.running import Launch
from tests.gateway.scripted import ScriptedWorker

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
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


def operations() -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}


def test_a_validator_of_openapi_accepts_it() -> None:
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    ids = [
        operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()
    ]
    assert len(ids) == len(set(ids))
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_route_is_in_it_and_nothing_else() -> None:
    gateway: Any = SimpleNamespace(settings=SimpleNamespace(web_page=True), access=None)
    routes = [cast(Route, route) for route in app.build_app(gateway).routes]
    methods = {
        (method, route.path.replace(":path}", "}"))
        for route in routes
        if route.include_in_schema
        for method in route.methods or ()
    }
    assert operations() == {one for one in methods if one[0] != "HEAD"}
    assert {route.path for route in routes if not route.include_in_schema} == {
        "/", "/page/page.css", "/page/page.js", "/page/icon.svg"
    }  # fmt: skip


def test_the_page_of_the_api_has_its_operations_and_fields() -> None:
    text = PAGE.read_text()
    listed = set()
    for line in text.split("\n## ")[0].splitlines():
        if line.startswith("| `"):
            names = line.split("|")[1].replace("`", "").split(", ")
            method = names[0].split()[0]
            listed |= {(method, name.split()[-1]) for name in names}
    assert {(method, path.strip()) for method, path in listed} == operations()
    for one in OPERATIONS:
        table = text.split(f"### `POST {one.path}`\n")[1].split("\n### ")[0]
        rows = {line.split("|")[1].strip(" `") for line in table.splitlines() if line.startswith("| `")}
        (reference,) = references(request_schema(one.path))
        properties = DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
        assert properties.keys() == {name for name in rows if "." not in name}


def test_it_says_which_paths_need_a_key_and_which_do_not() -> None:
    open_paths = {
        path
        for path, methods in DOCUMENT["paths"].items()
        if any(one.get("security") == [] for one in methods.values())
    }
    assert open_paths == {"/health", "/livez", "/ready", "/readyz"}
    for path in DOCUMENT["paths"].keys() - open_paths:
        for operation in DOCUMENT["paths"][path].values():
            assert "401" in operation["responses"]


def test_all_that_it_refers_to_is_there() -> None:
    for reference in references(DOCUMENT):
        found: Any = DOCUMENT
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]


@pytest.mark.parametrize("path", GOOD)
def test_it_has_every_field_of_a_request_and_no_other(path: str) -> None:
    good = GOOD[path]
    one = next(operation for operation in OPERATIONS if operation.path == path)
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
    documented = Documented(DOCUMENT)
    for path, good in GOOD.items():
        answer = await gateway.http.post(path, json=good)
        assert answer.status_code == 200, answer.text
        assert documented.wrong("POST", path, 200, answer.headers["content-type"], answer.content) == ""
        wrong = await gateway.http.post(path, json={**good, "unknown": 1})
        assert wrong.status_code == 400
        assert documented.wrong("POST", path, 400, wrong.headers["content-type"], wrong.content) == ""


async def test_embeddings_are_refused_with_what_is_served(launch: Launch) -> None:
    gateway = await launch()
    response = await gateway.http.post("/v1/embeddings", json={"model": "builtin/demo", "input": "hello"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "not_found"
    assert "'builtin/demo' generates text and makes no embeddings" in error["message"]
    assert "/v1/chat/completions" in error["message"]
