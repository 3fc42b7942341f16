"""A collector of traces on loopback: takes OTLP over HTTP, keeps the newest spans, and can be told to break."""

from __future__ import annotations

import gzip
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True)
class Event:
    """An event of a span, at a moment in Unix seconds."""

    name: str
    at: float
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Span:
    """One span, and the pod that sent it. Times are Unix seconds."""

    name: str
    pod: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: dict[str, Any]
    events: list[Event]
    error: str


class Collector:
    """Serves while the block lasts. `broken`: every export is answered with 503."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=20_000)
        self.broken = False
        self.refused = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, trace_id: str) -> list[Span]:
        """Spans of one trace."""
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def _handler(collector) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if collector.broken:
                    collector.refused += 1
                    self.send_response(503)
                else:
                    if self.headers.get("content-encoding") == "gzip":
                        body = gzip.decompress(body)
                    assert self.path == "/v1/traces"
                    collector.spans.extend(_spans(body))
                    self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def _spans(body: bytes) -> list[Span]:
    spans = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        facts = {item.key: item.value.string_value for item in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                events = [
                    Event(event.name, event.time_unix_nano / 1e9, _values(event.attributes))
                    for event in span.events
                ]
                spans.append(
                    Span(
                        *(span.name, facts["k8s.pod.name"], span.trace_id.hex(), span.span_id.hex()),
                        *(span.parent_span_id.hex(), span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9),
                        *(_values(span.attributes), events, span.status.message if span.status.code == 2 else ""),
                    )
                )  # fmt: skip
    return spans


def _values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value") for a in attributes}
