"""Faults in the form that OpenAI's clients know, and typed errors in that form. Independent of requests."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from typing import Any

from mmd_api.contract.errors import MmdError, OverloadedError, error_of

log = logging.getLogger(__name__)

INTERNAL = "internal error; check the gateway's log"
RETRY_AFTER_SECONDS = 2.0  # without an estimate
SHOULD_RETRY = "x-should-retry"
"""The official clients obey this header. Without it, they retry every status from 500 on."""


class ApiError(Exception):
    """An error from the table as a response to a client, in OpenAI's form: HTTP status, type, field at fault and a stable code.

    `retry_after_seconds` is in the body as well as in the header, because a stream that has begun can send no more headers.
    """

    def __init__(self, error: MmdError, *, param: str | None = None) -> None:
        super().__init__(error.message)
        status = error.status
        assert status is not None, f"{error.code} is between pods alone"
        self.status = status
        self.message = error.message
        self.code = error.code
        self.param = param
        self._is_retryable = error.retryable
        estimated = error.retry_after_seconds if isinstance(error, OverloadedError) else None
        self.retry_after_seconds = (estimated or RETRY_AFTER_SECONDS) if status in (429, 503) else None

    def rename(self, param: str) -> None:
        """Rename the field at fault to the client's name for it."""
        if self.param:
            self.message = self.message.replace(self.param, param, 1)
            self.args = (self.message,)
        self.param = param

    @property
    def recorded(self) -> str:
        """The text that a timeline keeps beside the code. For a fault of the request only the field, because the message may quote the request."""
        is_ours = self.status >= 500 or self.status == 429
        return self.message if is_ours else self.param or ""

    @property
    def retry_after(self) -> int | None:
        """Whole seconds after which the client should retry; None if retrying does not help."""
        return None if self.retry_after_seconds is None else max(1, math.ceil(self.retry_after_seconds))

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a response with this error."""
        if self.retry_after is not None:
            return {"retry-after": str(self.retry_after)}
        return {SHOULD_RETRY: "false"} if self.status >= 500 and not self._is_retryable else {}

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = {404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        error: dict[str, Any] = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        if self.retry_after is not None:
            error["retry_after_seconds"] = self.retry_after
        return {"error": error}


class ErrorShape:
    """The form of errors for clients of a path: that of OpenAI. Other APIs override their differences."""

    def status(self, error: ApiError) -> int:
        """The HTTP status."""
        return error.status

    def body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        """The JSON body. `request_id`: empty if no request has begun."""
        del request_id
        return error.body()

    def events(self, error: ApiError, request_id: str, _number: int) -> Iterable[str]:
        """The last events of a stream that has begun. `number`: of the first of these events, if events are numbered."""
        return (f"data: {json.dumps(self.body(error, request_id))}\n\n", "data: [DONE]\n\n")


def refused(error: MmdError, param: str) -> ApiError:
    """Convert an error, and if it blames the input (400), name the part as well."""
    answer = api_error(error)
    if answer.status != 400:
        return answer
    message = error.message if error.message.startswith(param) else f"{param}: {error.message}"
    return ApiError(error_of(error.code, message), param=param)


def api_error(error: MmdError) -> ApiError:
    """Convert a typed error to the form that clients know; retryable errors say when to retry."""
    if error.status is None or error.code == MmdError.code:  # the message is for operators of the pods
        log.error("responded with an internal error: %s: %s", type(error).__name__, error.message)
        return ApiError(MmdError(INTERNAL))
    return ApiError(error)
