"""The operations of the API: what each takes, answers and refuses. `openapi` writes them down; nothing here handles a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from mmd_api.contract import paths
from mmd_workers.gateway.api import error_shapes, state_answers, tokenize
from mmd_workers.gateway.api.chat import chat_response
from mmd_workers.gateway.api.completions import text_response
from mmd_workers.gateway.api.files import files_answer
from mmd_workers.gateway.api.files.files_endpoint import MAX_LISTED
from mmd_workers.gateway.api.files.upload_form import PURPOSES
from mmd_workers.gateway.api.messages import messages_answer, messages_request
from mmd_workers.gateway.api.responses import responses_answer, responses_request
from mmd_workers.gateway.basics.strict import NotServed, Strict
from mmd_workers.gateway.content import chat_request, completion_request

ACCESS = (401, 403, 503)
"""Statuses of the layers that admit a request to any path which may need a key."""
ADMITTED = (400, *ACCESS, 429, 500, 504)
_BODY = (*ADMITTED, 404, 408, 413, 415)
_GENERATION = (*_BODY, 410, 422)


@dataclass(frozen=True, slots=True)
class Operation:
    """A path for JSON requests.

    `answer`: model of the answer. `events`: what the events of a stream are, if the answer may be one; `event`: their model, if they have
    one. `statuses`: those of errors. `error`: the model of errors.
    """

    path: str
    summary: str
    request: type[Strict]
    not_served: NotServed
    answer: type[BaseModel]
    events: str = ""
    event: type[BaseModel] | None = None
    statuses: tuple[int, ...] = _BODY
    error: type[BaseModel] = error_shapes.Error


@dataclass(frozen=True, slots=True)
class Read:
    """A path without a JSON body.

    `answer`: model of the answer; None: bytes of a file. `parameters`: JSON schemas in the query. `form`: JSON schema of a form in the body.
    `unready`: the model of the answer with 503, if that is no error. `admits`: False if it is outside the life of a request: no deadline, no request id.
    """

    method: Literal["get", "post", "delete"]
    path: str
    name: str
    summary: str
    answer: type[BaseModel] | None
    statuses: tuple[int, ...] = (*ADMITTED, 404)
    parameters: Mapping[str, dict[str, Any]] | None = None
    form: Mapping[str, Any] | None = None
    unready: type[BaseModel] | None = None
    admits: bool = True
    needs_key: bool = True


OPERATIONS = (
    Operation("/v1/chat/completions", "Continue a conversation, in the shape of OpenAI's chat completions", chat_request.ChatRequest, chat_request.NOT_SERVED, chat_response.ChatCompletion, "`data` is a ChatCompletionChunk, an error, or at the end [DONE].", chat_response.ChatCompletionChunk, _GENERATION),
    Operation("/v1/completions", "Continue texts, in the shape of OpenAI's completions", completion_request.CompletionRequest, completion_request.NOT_SERVED, text_response.TextCompletion, "`data` is a TextCompletion, an error, or at the end [DONE].", statuses=_GENERATION),
    Operation("/v1/responses", "Continue a conversation, in the shape of OpenAI's responses", responses_request.ResponsesRequest, responses_request.NOT_SERVED, responses_answer.ResponseObject, "Events of OpenAI's Responses API.", statuses=_GENERATION),
    Operation("/v1/messages", "Continue a conversation, in the shape of Anthropic's messages", messages_request.MessagesRequest, messages_request.NOT_SERVED, messages_answer.AnsweredMessage, "Events of Anthropic's API.", statuses=_GENERATION, error=error_shapes.MessagesError),
    Operation("/v1/messages/count_tokens", "Count the tokens of Anthropic's messages", messages_request.CountTokensRequest, messages_request.NOT_SERVED, messages_answer.TokenCount, error=error_shapes.MessagesError),
    Operation("/tokenize", "The tokens of a prompt", tokenize.TokenizeRequest, tokenize.TOKENIZE_NOT_SERVED, tokenize.Tokens),
    Operation("/detokenize", "The text of tokens", tokenize.DetokenizeRequest, tokenize.DETOKENIZE_NOT_SERVED, tokenize.TokenText),
)  # fmt: skip
"""The operations with a JSON body; `docs/api.md` has a table for each."""

_FORM: dict[str, Any] = {
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
_LIST: dict[str, dict[str, Any]] = {
    "after": {"type": "string", "description": "The id of the file before the first one of this page."},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": MAX_LISTED},
    "order": {"enum": ["asc", "desc"], "default": "desc", "description": "desc: the newest file first."},
    "purpose": {"enum": list(PURPOSES)},
}
FILE, MODEL = "/v1/files/{file_id}", "/v1/models/{name}"
READS = (
    Read("post", "/v1/files", "UploadFile", "Upload a file", files_answer.FileObject, (*ADMITTED, 404, 408, 413, 415), form=_FORM),
    Read("get", "/v1/files", "ListFiles", "The tenant's files", files_answer.FileList, parameters=_LIST),
    Read("get", FILE, "GetFile", "A file", files_answer.FileObject),
    Read("delete", FILE, "DeleteFile", "Delete a file", files_answer.DeletedFile),
    Read("get", f"{FILE}/content", "GetContent", "The bytes of a file", None),
    Read("get", "/v1/models", "ListModels", "The names of the model, and its adapters", state_answers.ModelList, ACCESS, admits=False),
    Read("get", MODEL, "GetModel", "The model under one of its names, or an adapter", state_answers.ServedModel, (*ACCESS, 404), admits=False),
    Read("get", "/openapi.json", "GetDocument", "This document", state_answers.AnyObject, ACCESS, admits=False),
    *(
        Read("get", path, name, "Whether the process makes progress", state_answers.Alive, (403,), admits=False, needs_key=False)
        for path, name in (("/health", "GetHealth"), (paths.LIVEZ, "GetLivez"))
    ),
    Read("get", "/ready", "GetReady", "Whether requests would be served now", state_answers.Readiness, (403,), unready=state_answers.Readiness, admits=False, needs_key=False),
    Read("get", paths.READYZ, "GetReadyz", "Whether this gateway accepts requests", state_answers.Readiness, (403,), unready=state_answers.Readiness, admits=False, needs_key=False),
)  # fmt: skip
"""The other operations."""
