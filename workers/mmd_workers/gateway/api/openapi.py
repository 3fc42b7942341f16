"""The gateway's OpenAPI document, generated from the models of requests and answers. Independent of individual requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from pydantic_core import to_json

from mmd_workers.gateway.api import tokenize
from mmd_workers.gateway.api.chat import chat_response
from mmd_workers.gateway.api.completions import text_response
from mmd_workers.gateway.api.files.upload_form import PURPOSES
from mmd_workers.gateway.api.messages import messages_request
from mmd_workers.gateway.api.responses import responses_request
from mmd_workers.gateway.basics.strict import NotServed, Strict
from mmd_workers.gateway.content import chat_request, completion_request

PATH = "/openapi.json"
_REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    """A path for JSON requests. `answer`: model of the answer, if there is one. `streams`: the answer may be a stream of events."""

    path: str
    summary: str
    request: type[Strict]
    not_served: NotServed
    answer: type[BaseModel] | None = None
    streams: bool = False


OPERATIONS = (
    Operation("/v1/chat/completions", "Continue a conversation, in the shape of OpenAI's chat completions", chat_request.ChatRequest, chat_request.NOT_SERVED, chat_response.ChatCompletion, streams=True),
    Operation("/v1/completions", "Continue texts, in the shape of OpenAI's completions", completion_request.CompletionRequest, completion_request.NOT_SERVED, text_response.TextCompletion, streams=True),
    Operation("/v1/responses", "Continue a conversation, in the shape of OpenAI's responses", responses_request.ResponsesRequest, responses_request.NOT_SERVED, streams=True),
    Operation("/v1/messages", "Continue a conversation, in the shape of Anthropic's messages", messages_request.MessagesRequest, messages_request.NOT_SERVED, streams=True),
    Operation("/v1/messages/count_tokens", "Count the tokens of Anthropic's messages", messages_request.CountTokensRequest, messages_request.NOT_SERVED),
    Operation("/tokenize", "The tokens of a prompt", tokenize.TokenizeRequest, tokenize.TOKENIZE_NOT_SERVED, tokenize.Tokens),
    Operation("/detokenize", "The text of tokens", tokenize.DetokenizeRequest, tokenize.DETOKENIZE_NOT_SERVED, tokenize.TokenText),
)  # fmt: skip
"""All operations, with their fields; `docs/api.md` has a table for each."""

_GENERATION_HEADERS = {
    "idempotency-key": ({"type": "string", "pattern": "^[!-~]{1,255}$"}, "A repeat gets the same answer."),
    "last-event-id": (
        {"type": "string", "pattern": "^[0-9a-f]{8}-[0-9]{1,9}$"},
        "Resume the stream of the key after this event.",
    ),
}
_HEADERS = {
    "x-request-timeout": (
        {"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,9})?$"},
        "Seconds after which the request ends, if the deployment allows so many.",
    ),
    "x-client-request-id": ({"type": "string"}, "An id of the client's own."),
}
_ERROR = {
    "type": "object",
    "description": "What is wrong, and what to do. Anthropic's paths have Anthropic's shape.",
    "properties": {"error": {"type": "object", "properties": {"message": {"type": "string"}}}},
    "required": ["error"],
}


@cache
def document() -> bytes:
    """The OpenAPI document as JSON."""
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = []
    for operation in OPERATIONS:
        modes.append((operation.request, "validation"))
        if operation.answer is not None:
            modes.append((operation.answer, "serialization"))
    by_model, definitions = models_json_schema(modes, ref_template=_REFERENCE)
    schemas: dict[str, Any] = definitions["$defs"]
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        request = by_model[operation.request, "validation"]
        _add_not_served(schemas[_name(request)], operation.not_served)
        answer = by_model[operation.answer, "serialization"] if operation.answer else {"type": "object"}
        paths[operation.path] = {"post": _post(operation, request, answer)}
    for path in ("/v1/models", "/v1/models/{name}"):
        paths[path] = {"get": _get("Models that are served", named="{" in path)}
    paths |= _files()
    for path in ("/health", "/ready"):
        paths[path] = {"get": _get("Whether the gateway is alive, and would serve requests now")}
    return to_json(
        {
            "openapi": "3.1.0",
            "info": {"title": "multimodal-operator gateway", "version": version("multimodal-operator")},
            "paths": paths,
            "components": {
                "schemas": {**schemas, "Error": _ERROR},
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


def _post(operation: Operation, request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    headers = _HEADERS | (_GENERATION_HEADERS if operation.streams else {})
    return {
        "summary": operation.summary,
        "operationId": operation.request.__name__.removesuffix("Request"),
        "parameters": [
            {"name": name, "in": "header", "required": False, "schema": schema, "description": text}
            for name, (schema, text) in headers.items()
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": {"200": {"description": "The answer.", "content": content}, "default": _failed()},
    }


def _get(summary: str, *, named: bool = False) -> dict[str, Any]:
    answer = {"description": "The answer.", "content": {"application/json": {"schema": {"type": "object"}}}}
    parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "summary": summary,
        "parameters": [parameter] if named else [],
        "responses": {"200": answer, "default": _failed()},
    }


def _files() -> dict[str, Any]:
    """The paths of uploaded files. An upload is a form, not JSON."""
    form = {
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"enum": list(PURPOSES)},
            "expires_after[anchor]": {"enum": ["created_at"]},
            "expires_after[seconds]": {"type": "integer", "minimum": 1},
        },
        "required": ["file", "purpose"],
        "additionalProperties": False,
    }
    upload = _get("Upload a file")
    upload["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    file_path, content_path = "/v1/files/{file_id}", "/v1/files/{file_id}/content"
    operations = {
        "/v1/files": {"post": upload, "get": _get("The tenant's files")},
        file_path: {"get": _get("A file"), "delete": _get("Delete a file")},
        content_path: {"get": _get("The bytes of a file")},
    }
    for path in (file_path, content_path):
        for operation in operations[path].values():
            operation["parameters"] = [
                {"name": "file_id", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
    binary = {"schema": {"type": "string", "format": "binary"}}
    operations[content_path]["get"]["responses"]["200"]["content"] = {"application/octet-stream": binary}
    return operations


def _failed() -> dict[str, Any]:
    schema = {"$ref": _REFERENCE.format(model="Error")}
    return {"description": "An error.", "content": {"application/json": {"schema": schema}}}
