"""Envoy's protocol for external processing, as the Gateway API Inference Extension uses it to ask which pod takes a request.

One stream for each HTTP request. Its headers are answered at once, with a pod, without one, or with the answer for the client; nothing else is
changed: pieces of bodies go back as they came, one at a time. When the whole request has passed, the stream is over, and the proxy sends the
response on without asking: so nothing of an answer depends on the picker. Before that a stream must not end without an error: a proxy sends a
piece without waiting for the one before it, keeps no copy, and would send the rest on as if there had been no more. Independent of gRPC;
what the choice rests on is in `picks`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mmd_api.contract.errors import MmdError, RequestTooLargeError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.picker.ext_proc_messages import (
    FULL_DUPLEX_STREAMED,
    NONE,
    OVERWRITE_IF_EXISTS_OR_ADD,
    InvalidMessageError,
    ProcessingResponse,
    parse,
)
from mmd_workers.gateway.picker.pick_messages import PickOutcome
from mmd_workers.gateway.picker.picks import STICKY_HEADER, PickRequest, Picks

ENDPOINT_KEY, ENDPOINT_NAMESPACE = "x-gateway-destination-endpoint", "envoy.lb"
SUBSET_KEY, SUBSET_NAMESPACE = "x-gateway-destination-endpoint-subset", "envoy.lb.subset_hint"
MAX_HEADERS = 1024
MAX_ENTRIES = 4096
"""Of the metadata, and of the subset in it."""
MAX_KEY_CHARACTERS = 1024
LAST_PIECE_BYTES = 1024
"""Of a body: with the end of the stream it is one segment, so that the proxy knows of that end before it can have a response."""


class ProxyExchange:
    """One HTTP request: messages of the proxy in, answers out. `picks`: None: the proxy is to choose. `max_body_bytes`: of the request.

    `outcome`: what came of its headers, or of a body that is too large; None before.
    """

    def __init__(self, picks: Picks | None, max_body_bytes: int) -> None:
        self._picks, self._max_body_bytes = picks, max_body_bytes
        self.outcome: PickOutcome | None = None
        self._modes = {"request": FULL_DUPLEX_STREAMED, "response": FULL_DUPLEX_STREAMED}
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        self._request_bytes = 0
        self._is_refused = False

    @property
    def is_over(self) -> bool:
        """Whether the proxy needs no further answer. If the response began before the request had passed, its body may be on the way here, and
        would be lost: then the stream lasts until the response has passed.
        """
        passed = "response" if "response" in self._begun else "request"
        return self._is_refused or passed in self._ended

    def answers(self, data: bytes, piece_bytes: int) -> Iterator[Any]:
        """Each `ProcessingResponse` to one message, with at most so much of a body.

        Raises:
            InvalidMessageError: it is no message, or may not come here.
        """
        message = parse(data)
        kind = message.WhichOneof("kind")
        if kind is None:
            raise InvalidMessageError(
                "a message has headers, a body or trailers, and only one with a body may be large"
            )
        side, _, part = kind.partition("_")
        if part == "headers":
            return iter([self._on_headers(side, message)])
        if side not in self._begun:
            raise InvalidMessageError(f"{kind} came before {side}_headers")
        if part == "body":
            return self._on_body(side, getattr(message, kind), piece_bytes)
        self._ended.add(side)
        return iter([ProcessingResponse(**{kind: {}})])

    def _on_headers(self, side: str, message: Any) -> Any:
        if side in self._begun:
            raise InvalidMessageError(f"{side}_headers came twice")
        if side == "response":
            if "request" not in self._begun:
                raise InvalidMessageError("response_headers came before request_headers")
            self._begin(side, message.response_headers)
            return ProcessingResponse(response_headers={})
        if message.HasField("protocol_config"):
            modes = message.protocol_config
            self._modes = {"request": modes.request_body_mode, "response": modes.response_body_mode}
        self._begin(side, message.request_headers)
        if self._modes["request"] == NONE:
            self._ended.add(side)
        if self._picks is None:
            self.outcome = "passed"
            return ProcessingResponse(request_headers={})
        wanted = PickRequest(
            _header(message.request_headers.headers.headers, STICKY_HEADER)[:MAX_KEY_CHARACTERS],
            _subset(message.metadata_context),
        )
        try:
            picked = self._picks.pick(wanted)
        except MmdError as error:
            self.outcome, self._is_refused = "no_gateway", True
            return refusal(error)
        self.outcome, endpoints = "picked", ",".join(picked)
        entry = {"key": ENDPOINT_KEY, "value": {"string_value": endpoints}}
        metadata = {"key": ENDPOINT_NAMESPACE, "value": {"struct_value": {"fields": [entry]}}}
        mutation = {"set_headers": [_set_header(ENDPOINT_KEY, endpoints)]}
        return ProcessingResponse(
            request_headers={"response": {"clear_route_cache": True, "header_mutation": mutation}},
            dynamic_metadata={"fields": [metadata]},
        )

    def _begin(self, side: str, headers: Any) -> None:
        self._begun.add(side)
        if headers.end_of_stream:
            self._ended.add(side)

    def _on_body(self, side: str, piece: Any, piece_bytes: int) -> Iterator[Any]:
        """In full duplex the proxy forwards what comes back, and nothing else; in other modes it has kept the piece.

        Envoy since 1.35 may send the last piece of a large body twice (envoyproxy/envoy#46237).
        """
        if side in self._ended:
            return
        if side == "request":
            self._request_bytes += len(piece.body)
            if self._request_bytes > self._max_body_bytes:
                self.outcome, self._is_refused = "too_large", True
                yield refusal(
                    RequestTooLargeError(
                        f"the body is larger than {self._max_body_bytes} bytes; send media by URL, or raise spec.gateway.maxBodyMebibytes"
                    )
                )
                return
        if piece.end_of_stream:
            self._ended.add(side)
        if self._modes[side] != FULL_DUPLEX_STREAMED:
            yield ProcessingResponse(**{f"{side}_body": {}})
            return
        content, ends = piece.body, piece.end_of_stream
        del piece  # it is in memory twice otherwise while the peer reads nothing
        for part, is_last in _pieces(content, ends, piece_bytes):
            unchanged = {"body": part, "end_of_stream": is_last}
            yield ProcessingResponse(
                **{f"{side}_body": {"response": {"body_mutation": {"streamed_response": unchanged}}}}
            )


def _pieces(content: bytes, ends: bool, piece_bytes: int) -> Iterator[tuple[bytes, bool]]:
    """Of a piece of a body, with whether one ends the body: that is a small one."""
    rest = max(0, len(content) - LAST_PIECE_BYTES) if ends else len(content)
    for begin in range(0, rest, piece_bytes):
        yield content[begin : min(begin + piece_bytes, rest)], False
    if ends or not content:
        yield content[rest:], ends


def _header(headers: Any, name: str) -> str:
    """The value of the first header with this name; empty: there is none."""
    if len(headers) > MAX_HEADERS:
        raise InvalidMessageError(f"a request has at most {MAX_HEADERS} headers")
    for header in headers:
        if header.key.lower() == name:
            return str(header.raw_value.decode("latin-1") or header.value)
    return ""


def _subset(metadata: Any) -> frozenset[str] | None:
    """The endpoints that the proxy allows; None: it names none. What it names in another form allows none."""
    hint = _entry(metadata.filter_metadata, SUBSET_NAMESPACE)
    value = None if hint is None else _entry(hint.fields, SUBSET_KEY)
    if value is None:
        return None
    if value.WhichOneof("kind") != "list_value":
        return frozenset(part.strip() for part in value.string_value.split(",") if part.strip())
    values = value.list_value.values
    if len(values) > MAX_ENTRIES:
        raise InvalidMessageError(f"a subset has at most {MAX_ENTRIES} endpoints")
    return frozenset(v.string_value for v in values if v.string_value)


def _entry(entries: Any, key: str) -> Any:
    """The value of a map, which is a list of its entries; None: it has no such key."""
    if len(entries) > MAX_ENTRIES:
        raise InvalidMessageError(f"metadata has at most {MAX_ENTRIES} entries")
    return next((entry.value for entry in entries if entry.key == key), None)


def refusal(error: MmdError) -> Any:
    """The answer for the client, in the shape of the API."""
    fault = ApiError(error)
    headers = [_set_header("content-type", "application/json")]
    if fault.retry_after is not None:
        headers.append(_set_header("retry-after", str(fault.retry_after)))
    return ProcessingResponse(
        immediate_response={
            "status": {"code": fault.status},
            "headers": {"set_headers": headers},
            "body": json.dumps(fault.body()).encode(),
            "details": fault.code,
        }
    )


def _set_header(name: str, value: str) -> dict[str, Any]:
    header = {"key": name, "raw_value": value.encode()}
    return {"header": header, "append_action": OVERWRITE_IF_EXISTS_OR_ADD}
