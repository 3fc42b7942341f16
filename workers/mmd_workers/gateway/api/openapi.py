"""The gateway's OpenAPI document, generated from the models of requests and answers. Independent of individual requests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from pydantic_core import to_json

from mmd_workers.gateway.api import error_shapes
from mmd_workers.gateway.api.operations import OPERATIONS, READS, Operation, Read
from mmd_workers.gateway.basics.api_errors import SHOULD_RETRY
from mmd_workers.gateway.basics.strict import NotServed
from mmd_workers.gateway.idempotency.repeats import EVENT_HEADER, KEY_HEADER, REPEATED_HEADER
from mmd_workers.gateway.intake.omissions import HEADERS as OMISSIONS

PATH = "/openapi.json"
_REFERENCE = "#/components/schemas/{model}"
_JSON, _EVENTS = "application/json", "text/event-stream"

_DESCRIPTION = (
    "The gateway's API. Keys are needed where spec.gateway.auth is set, and ignored elsewhere; a token of an issuer may stand in place of a "
    "bearer key. A slash at the end of a path makes no difference."
)
_REQUEST_HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "x-request-timeout": (
        {"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,9})?$"},
        "Seconds above 0 after which the request ends, if the deployment allows so many.",
    ),
    "x-client-request-id": ({"type": "string"}, "An id of the client's own; 128 characters are kept."),
    "traceparent": ({"type": "string"}, "The trace that the request's spans join."),
}
_GENERATION_HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    KEY_HEADER: ({"type": "string", "pattern": "^[!-~]{1,255}$"}, "A repeat gets the same answer."),
    EVENT_HEADER: (
        {"type": "string", "pattern": "^[0-9a-f]{8}-[0-9]{1,9}$"},
        "Resume the stream of the key after this event.",
    ),
    "x-mmd-timings": (
        {"type": "string"},
        "`true` adds `timings` to the answer; other values have no effect.",
    ),
}
_ANSWER_HEADERS = {
    "x-request-id": "The request's id.",
    "x-mmd-gateway": "The gateway pod that answers.",
}
_OMISSIONS = {name: "What the model did not get of the media; absent if nothing." for name in OMISSIONS}
_ERROR_HEADERS: dict[int, dict[str, str]] = {
    401: {"www-authenticate": "The scheme to authenticate with."},
    429: {"retry-after": "Whole seconds after which to retry."},
    503: {"retry-after": "Whole seconds after which to retry."},
    500: {SHOULD_RETRY: "`false`: another attempt does not help."},
    504: {SHOULD_RETRY: "`false`: another attempt does not help."},
}


@cache
def document() -> bytes:
    """The OpenAPI document as JSON."""
    reads = [model for read in READS for model in (read.answer, read.unready) if model is not None]
    answers = [
        model
        for operation in OPERATIONS
        for model in (operation.answer, operation.event)
        if model is not None
    ]
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        *((operation.request, "validation") for operation in OPERATIONS),
        *((model, "serialization") for model in (*answers, *reads)),
        *((model, "serialization") for model in (error_shapes.Error, error_shapes.MessagesError)),
    ]
    by_model, definitions = models_json_schema(modes, ref_template=_REFERENCE)
    schemas: dict[str, Any] = definitions["$defs"]

    def of_answer(model: type[BaseModel]) -> dict[str, Any]:
        return by_model[model, "serialization"]

    found: dict[str, Any] = {}
    for operation in OPERATIONS:
        request = by_model[operation.request, "validation"]
        _add_not_served(schemas[_name(request)], operation.not_served)
        error = of_answer(operation.error)
        found[operation.path] = {"post": _post(operation, request, of_answer(operation.answer), error)}
    for read in READS:
        answer = of_answer(read.answer) if read.answer else None
        unready = of_answer(read.unready) if read.unready else None
        one = _read(read, answer, unready, of_answer(error_shapes.Error))
        found.setdefault(read.path, {})[read.method] = one
    return to_json(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "multimodal-operator gateway",
                "version": version("multimodal-operator"),
                "description": _DESCRIPTION,
            },
            "servers": [{"url": "/"}],
            "paths": found,
            "components": {
                "schemas": schemas,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{}, {"bearer": []}, {"key": []}],
        }
    )


def _name(reference: dict[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _add_not_served(schema: dict[str, Any], not_served: NotServed) -> None:
    """Add the fields that are refused unless they have a value that means "off"."""
    for name, (off, remedy) in not_served.items():
        schema["properties"][name] = {"enum": [None, *off], "description": f"Not served: {remedy}."}


def _post(
    operation: Operation, request: dict[str, Any], answer: dict[str, Any], error: dict[str, Any]
) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": answer}}
    asked, answered = _REQUEST_HEADERS, _ANSWER_HEADERS
    if operation.events:
        content[_EVENTS] = {"schema": {"type": "string", "description": operation.events}}
        asked = asked | _GENERATION_HEADERS
        answered = (
            answered | {REPEATED_HEADER: "`true`: this is the answer of an earlier request."} | _OMISSIONS
        )
    if operation.error is error_shapes.MessagesError:
        answered = answered | {"request-id": "The request's id."}
    return {
        "summary": operation.summary,
        "operationId": operation.request.__name__.removesuffix("Request"),
        "parameters": _in_header(asked),
        "requestBody": {"required": True, "content": {_JSON: {"schema": request}}},
        "responses": {
            "200": {"description": "The answer.", "headers": _shown(answered), "content": content},
            **_errors(operation.statuses, error, is_anthropic=operation.error is error_shapes.MessagesError),
        },
    }


def _read(
    read: Read, answer: dict[str, Any] | None, unready: dict[str, Any] | None, error: dict[str, Any]
) -> dict[str, Any]:
    content = (
        {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        if answer is None
        else {_JSON: {"schema": answer}}
    )
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", read.path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in (read.parameters or {}).items()
    ]
    responses = {"200": {"description": "The answer.", "content": content}, **_errors(read.statuses, error)}
    if read.admits:
        parameters += _in_header(_REQUEST_HEADERS)
        responses["200"]["headers"] = _shown(_ANSWER_HEADERS)
    if unready is not None:
        responses["503"] = {"description": "Not ready.", "content": {_JSON: {"schema": unready}}}
    operation: dict[str, Any] = {
        "summary": read.summary,
        "operationId": read.name,
        "parameters": parameters,
        "responses": responses,
    }
    if read.form is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": read.form}},
        }
    return operation if read.needs_key else {**operation, "security": []}


def _in_header(headers: dict[str, tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "required": False, "schema": schema, "description": text}
        for name, (schema, text) in headers.items()
    ]


def _shown(headers: dict[str, str]) -> dict[str, Any]:
    return {name: {"schema": {"type": "string"}, "description": text} for name, text in headers.items()}


def _errors(statuses: Iterable[int], error: dict[str, Any], *, is_anthropic: bool = False) -> dict[str, Any]:
    """The responses with errors, by status. Anthropic's API has a status of its own for overload."""
    responses: dict[str, Any] = {}
    for status in sorted(set(statuses)):
        is_overload = is_anthropic and status == HTTPStatus.SERVICE_UNAVAILABLE
        shown_status = error_shapes.OVERLOADED_STATUS if is_overload else status
        response = {"description": f"{HTTPStatus(status).phrase}.", "content": {_JSON: {"schema": error}}}
        if headers := _ERROR_HEADERS.get(status):
            response["headers"] = _shown(headers)
        responses[str(shown_status)] = response
    return responses
