"""The form of errors on each path: OpenAI's, and that of Anthropic's messages. Independent of HTTP and workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, Field

from mmd_api.contract.errors import MmdError
from mmd_workers.gateway.answers.block_shape import named_event
from mmd_workers.gateway.basics.api_errors import ApiError, ErrorShape

MESSAGES_PATH = "/v1/messages"
OVERLOADED_STATUS = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorFault(BaseModel):
    """What is wrong, and what to do. `param`: the field at fault. `retry_after_seconds`: only if a retry may help."""

    message: str
    type: Literal["invalid_request_error", "not_found_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str
    retry_after_seconds: int | None = Field(None, exclude_if=lambda seconds: seconds is None)


class Error(BaseModel):
    """An error, in the form of OpenAI's API."""

    error: ErrorFault


class MessagesFault(BaseModel):
    """What is wrong, and what to do. `retry_after_seconds`: only if a retry may help."""

    type: Literal[
        "api_error",
        "authentication_error",
        "invalid_request_error",
        "not_found_error",
        "overloaded_error",
        "permission_error",
        "rate_limit_error",
        "request_too_large",
        "timeout_error",
    ]
    message: str
    retry_after_seconds: int | None = Field(None, exclude_if=lambda seconds: seconds is None)


class MessagesError(BaseModel):
    """An error, in the form of Anthropic's API."""

    type: Literal["error"]
    error: MessagesFault
    request_id: str | None


class MessagesErrors(ErrorShape):
    """Errors in the form of Anthropic's API."""

    def status(self, error: ApiError) -> int:
        """The HTTP status; Anthropic's API uses a status of its own for overload."""
        return OVERLOADED_STATUS if error.status == 503 else error.status

    def body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        """The JSON body."""
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        fault: dict[str, Any] = {"type": kind, "message": error.message}
        if error.retry_after is not None:
            fault["retry_after_seconds"] = error.retry_after
        return {"type": "error", "error": fault, "request_id": request_id or None}

    def events(self, error: ApiError, request_id: str, _number: int) -> Iterable[str]:
        """The last event of a stream that has begun."""
        return (named_event(self.body(error, request_id)),)


def errors_at(path: str) -> ErrorShape:
    """The form of errors on a path, whether the path is served or not."""
    return MessagesErrors() if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/") else ErrorShape()


def error_body(path: str, error: MmdError) -> dict[str, Any]:
    """The JSON of an error that is answered before the request has an id."""
    return errors_at(path).body(ApiError(error), "")
