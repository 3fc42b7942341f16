"""Envoy's external processing protocol, as used by the Gateway API Inference Extension to choose a pod for a request.

Each HTTP request has one stream. The picker answers its headers at once: with a pod, without one, or with the response for the client. It
changes nothing else: pieces of bodies go back as they came, one at a time. When the whole request has passed, the stream ends, and the proxy
forwards the response without asking, so no part of an answer depends on the picker. Before that, a stream must not end without an error: a
proxy sends each piece without waiting for the previous one and keeps no copy, so it would forward a truncated body as complete. Independent
of gRPC; `picks` makes the choice.
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
"""The most entries in the metadata, and in the subset hint within it."""
MAX_KEY_CHARACTERS = 1024
LAST_PIECE_BYTES = 1024
"""The last piece of a body is this small so that it and the end of the stream are one segment: the proxy then sees the end before a response."""


class ProxyExchange:
    """Processes one HTTP request: takes messages from the proxy and returns answers.

    `picks`: chooses the gateway; None leaves the choice to the proxy. `max_body_bytes`: limit for the request's body. `outcome`: result for
    its headers, or for a body that is too large; None until then.
    """

    def __init__(self, picks: Picks | None, max_body_bytes: int) -> None:
        self._picks, self._max_body_bytes = picks, max_body_bytes
        self.outcome: PickOutcome | None = None
        self._modes = {"request": FULL_DUPLEX_STREAMED, "response": FULL_DUPLEX_STREAMED}
        self._begun_sides: set[str] = set()
        self._ended_sides: set[str] = set()
        self._request_bytes = 0
        self._is_refused = False

    @property
    def is_over(self) -> bool:
        """True if the proxy needs no further answer.

        If the response began before the request had passed, its body may be on its way here and would be lost, so the stream then lasts until
        the response has passed.
        """
        last_side = "response" if "response" in self._begun_sides else "request"
        return self._is_refused or last_side in self._ended_sides

    def answers(self, data: bytes, piece_bytes: int) -> Iterator[Any]:
        """The answers to one message, each a `ProcessingResponse` with at most `piece_bytes` of a body.

        Raises:
            InvalidMessageError: the bytes are not a message, or the message is out of order.
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
        if side not in self._begun_sides:
            raise InvalidMessageError(f"{kind} came before {side}_headers")
        if part == "body":
            return self._on_body(side, getattr(message, kind), piece_bytes)
        self._ended_sides.add(side)
        return iter([ProcessingResponse(**{kind: {}})])

    def _on_headers(self, side: str, message: Any) -> Any:
        if side in self._begun_sides:
            raise InvalidMessageError(f"{side}_headers came twice")
        if side == "response":
            if "request" not in self._begun_sides:
                raise InvalidMessageError("response_headers came before request_headers")
            self._begin(side, message.response_headers)
            return ProcessingResponse(response_headers={})
        if message.HasField("protocol_config"):
            modes = message.protocol_config
            self._modes = {"request": modes.request_body_mode, "response": modes.response_body_mode}
        self._begin(side, message.request_headers)
        if self._modes["request"] == NONE:
            self._ended_sides.add(side)
        if self._picks is None:
            self.outcome = "passed"
            return ProcessingResponse(request_headers={})
        request = PickRequest(
            _header(message.request_headers.headers.headers, STICKY_HEADER)[:MAX_KEY_CHARACTERS],
            _subset(message.metadata_context),
        )
        try:
            picked_endpoints = self._picks.pick(request)
        except MmdError as error:
            self.outcome, self._is_refused = "no_gateway", True
            return refusal(error)
        self.outcome, endpoint_list = "picked", ",".join(picked_endpoints)
        entry = {"key": ENDPOINT_KEY, "value": {"string_value": endpoint_list}}
        metadata = {"key": ENDPOINT_NAMESPACE, "value": {"struct_value": {"fields": [entry]}}}
        mutation = {"set_headers": [_set_header(ENDPOINT_KEY, endpoint_list)]}
        return ProcessingResponse(
            request_headers={"response": {"clear_route_cache": True, "header_mutation": mutation}},
            dynamic_metadata={"fields": [metadata]},
        )

    def _begin(self, side: str, headers: Any) -> None:
        self._begun_sides.add(side)
        if headers.end_of_stream:
            self._ended_sides.add(side)

    def _on_body(self, side: str, piece: Any, piece_bytes: int) -> Iterator[Any]:
        """Answer a piece of a body. In full duplex the proxy forwards only what comes back; in other modes it has kept the piece.

        Since 1.35 Envoy may send the last piece of a large body twice (envoyproxy/envoy#46237).
        """
        if side in self._ended_sides:
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
            self._ended_sides.add(side)
        if self._modes[side] != FULL_DUPLEX_STREAMED:
            yield ProcessingResponse(**{f"{side}_body": {}})
            return
        content, is_end = piece.body, piece.end_of_stream
        del piece  # otherwise it is in memory twice while the peer reads nothing
        for part, is_last in _pieces(content, is_end, piece_bytes):
            unchanged = {"body": part, "end_of_stream": is_last}
            yield ProcessingResponse(
                **{f"{side}_body": {"response": {"body_mutation": {"streamed_response": unchanged}}}}
            )


def _pieces(content: bytes, is_last: bool, piece_bytes: int) -> Iterator[tuple[bytes, bool]]:
    """Split a piece of a body. Yields each part, and True if it ends the body; the last part is small."""
    last_begin = max(0, len(content) - LAST_PIECE_BYTES) if is_last else len(content)
    for begin in range(0, last_begin, piece_bytes):
        yield content[begin : min(begin + piece_bytes, last_begin)], False
    if is_last or not content:
        yield content[last_begin:], is_last


def _header(headers: Any, name: str) -> str:
    """The value of the first header with this name; empty if there is none."""
    if len(headers) > MAX_HEADERS:
        raise InvalidMessageError(f"a request has at most {MAX_HEADERS} headers")
    for header in headers:
        if header.key.lower() == name:
            return str(header.raw_value.decode("latin-1") or header.value)
    return ""


def _subset(metadata: Any) -> frozenset[str] | None:
    """The endpoints that the proxy allows; None if it lists none. A hint in an invalid form allows no endpoint."""
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
    """The value of a key in a map, given as a list of its entries; None if the key is missing."""
    if len(entries) > MAX_ENTRIES:
        raise InvalidMessageError(f"metadata has at most {MAX_ENTRIES} entries")
    return next((entry.value for entry in entries if entry.key == key), None)


def refusal(error: MmdError) -> Any:
    """The error response for the client, in the shape of the API."""
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
