"""Sends one request to a gateway as raw bytes, and finds what is wrong with its answer, whatever was sent."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx

HANG_SECONDS = 90.0  # a server that sends no byte for this long hangs
TIMEOUT = "45"  # seconds that a request asks for; with so few tokens, one that needs them all hangs in a pod
NEVER = (500, 502)
"""Statuses of defects. Others show a request at fault, or a limit."""
_ENDS = ("message_stop", "error", "response.completed", "response.incomplete", "response.failed")
_FAULTS = ("error", "response.failed")


@dataclass(frozen=True)
class Asked:
    """One request. `leaves_after`: seconds without an answer after which its client leaves; 0: it stays. `is_refused`: it has no valid API key."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes
    leaves_after: float = 0.0
    is_refused: bool = False


@dataclass(frozen=True)
class Answer:
    """What a client received. `status` 0: nothing. `wrong`: a defect of the answer."""

    status: int = 0
    code: str = ""
    wrong: str = ""
    body: bytes = b""
    headers: httpx.Headers = field(default_factory=httpx.Headers)

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def is_retained(self) -> bool:
        """Whether a gateway keeps it for clients that repeat the request: it is complete and has no error."""
        if self.status != HTTPStatus.OK or self.wrong:
            return False
        return not (self.is_stream and any(_is_fault(value) for value in _values(self.body)))


def ask(client: httpx.Client, asked: Asked, most_events: int | None = None) -> Answer:
    """Send a request, and read its answer.

    `most_events`: events of a stream after which the client hangs up.
    """
    request = client.build_request(
        asked.method,
        asked.path,
        headers=asked.headers,
        content=asked.content,
        timeout=asked.leaves_after or HANG_SECONDS,
    )
    body = b""
    try:
        response = client.send(request, stream=True)
        with contextlib.closing(response):
            for part in response.iter_bytes():
                body += part
                if most_events is not None and body.count(b"\n\n") >= most_events:
                    return Answer(response.status_code, body=body, headers=response.headers)
    except httpx.TimeoutException as error:
        if asked.leaves_after:
            return Answer()
        return Answer(wrong=f"no answer within {HANG_SECONDS:.0f} s ({type(error).__name__})")
    except httpx.HTTPError as error:
        return Answer(wrong=f"the connection failed ({type(error).__name__}: {error})", body=body)
    code, wrong = _judge(asked, response, body)
    return Answer(response.status_code, code, wrong, body, response.headers)


def _judge(asked: Asked, response: httpx.Response, body: bytes) -> tuple[str, str]:
    """The code of an error, and what is wrong."""
    status = response.status_code
    if status in NEVER:
        return "", f"status {status}"
    if (status == HTTPStatus.UNAUTHORIZED) != asked.is_refused:
        return "", f"status {status} of a request {'without' if asked.is_refused else 'with'} a valid key"
    try:
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return "", _wrong_stream(body)
        if status < 400 and not response.headers.get("content-type", "").startswith("application/json"):
            return "", ""
        if asked.method in ("HEAD", "OPTIONS"):  # the first has no body, the second is not judged
            return "", ""
        value = json.loads(body)
        if status < 400 or value.keys() == {"ready", "reason", "ready_pods"}:
            return "", ""
        error = value["error"]
        code = str(error.get("code", error["type"]))
        if status == HTTPStatus.GATEWAY_TIMEOUT and asked.headers.get("x-request-timeout") == TIMEOUT:
            return code, f"not ended within {TIMEOUT} s"
        return code, "" if error["message"] else "an error without a message"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return "", f"status {status} with a body in no known shape ({type(error).__name__}): {body[:200]!r}"


def _wrong_stream(body: bytes) -> str:
    values = _values(body)
    defects = [value for value in values if '"internal"' in json.dumps(value)]
    if defects:
        return f"a stream that ends with a defect: {defects[0]}"
    data = _data(body)
    ends = not data or data[-1] == "[DONE]" or values[-1].get("type", "") in _ENDS
    return "" if ends else f"a stream without its end: {data[-1][:200]}"


def _data(body: bytes) -> list[str]:
    lines = body.decode().split("\n")
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def _values(body: bytes) -> list[Any]:
    return [json.loads(data) for data in _data(body) if data != "[DONE]"]


def _is_fault(value: Any) -> bool:
    return value.get("type") in _FAULTS or ("error" in value and "type" not in value)
