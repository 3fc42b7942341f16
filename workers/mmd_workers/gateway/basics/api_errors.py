"""Faults in the shape that OpenAI's clients know, and typed errors in that shape. Independent of requests."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from typing import Any

from mmd_api.contract.errors import MmdError, OverloadedError, error_of

log = logging.getLogger(__name__)

INTERNAL = "internal error; check the gateway's log"
RETRY_AFTER_SECONDS = 2.0  # if there is no estimate


class ApiError(Exception):
    """An error of the table as the answer to a client, in OpenAI's shape: HTTP status, type, the field at fault and a stable code.

    `retry_after_seconds` is in the body as well as in the header, because a stream that has begun has no header left.
    """

    def __init__(self, error: MmdError, *, param: str | None = None) -> None:
        super().__init__(error.message)
        status = error.status
        assert status is not None, f"{error.code} is between pods alone"
        self.status = status
        self.message = error.message
        self.code = error.code
        self.param = param
        estimated = error.retry_after_seconds if isinstance(error, OverloadedError) else None
        self.retry_after_seconds = (estimated or RETRY_AFTER_SECONDS) if status in (429, 503) else None

    def rename(self, param: str) -> None:
        """Name the field at fault as the client spells it."""
        if self.param:
            self.message = self.message.replace(self.param, param, 1)
            self.args = (self.message,)
        self.param = param

    @property
    def recorded(self) -> str:
        """What a timeline keeps beside the code: of a fault of the request only the field, because the message may quote the request."""
        is_ours = self.status >= 500 or self.status == 429
        return self.message if is_ours else self.param or ""

    @property
    def retry_after(self) -> int | None:
        """Whole seconds after which the client should come back; None: coming back does not help."""
        return None if self.retry_after_seconds is None else max(1, math.ceil(self.retry_after_seconds))

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a response with it."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}

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
    """How clients of a path get errors: as OpenAI's do. Other surfaces override what differs."""

    def status(self, error: ApiError) -> int:
        """The HTTP status."""
        return error.status

    def body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        """The JSON body. `request_id`: empty where no request has begun."""
        del request_id
        return error.body()

    def events(self, error: ApiError, request_id: str, _number: int) -> Iterable[str]:
        """The last events of a stream that has begun. `number`: of the first of them, where events are numbered."""
        return (f"data: {json.dumps(self.body(error, request_id))}\n\n", "data: [DONE]\n\n")


def refused(error: MmdError, param: str) -> ApiError:
    """An error of the table that blames the input (400) names the part as well."""
    answer = api_error(error)
    if answer.status != 400:
        return answer
    message = error.message if error.message.startswith(param) else f"{param}: {error.message}"
    return ApiError(error_of(error.code, message), param=param)


def api_error(error: MmdError) -> ApiError:
    """Any typed error in the shape clients know; retryable ones include when to retry."""
    if error.status is None or error.code == MmdError.code:  # its message is for those who run the pods
        log.error("responded with an internal error: %s: %s", type(error).__name__, error.message)
        return ApiError(MmdError(INTERNAL))
    return ApiError(error)
