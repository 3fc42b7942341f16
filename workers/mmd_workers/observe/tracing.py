"""One OpenTelemetry trace per request, over all its pods. Nothing leaves the process unless the resource names a collector.

The context travels in the `trace` field of messages, as W3C trace context. Spans are made when phases have ended, from the times that were
measured for the timeline anyway. A collector that is slow, dead or missing costs a bounded queue and a line in the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mmd_workers.observe.logs import RepeatedWarning
from mmd_workers.wire.messages.message_parts import Phase

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

log = logging.getLogger(__name__)

QUEUED_SPANS = 4096
EXPORT_SECONDS = 3.0
CLOSE_SECONDS = 2.0
_TRACEPARENT = "traceparent"


class Root:
    """The span of a whole request, open until `end`."""

    def __init__(self, span: Any, carrier: dict[str, str]) -> None:
        self._span = span
        self.carrier = carrier
        self.trace_id = carrier[_TRACEPARENT].split("-")[1]

    def event(self, name: str, when: float, **facts: str | float) -> None:
        """Add an event that happened at a moment (Unix seconds)."""
        self._span.add_event(name, facts, int(when * 1e9))

    def end(self, when: float, error: str = "", **facts: str | float) -> None:
        """End the span; `error` is the code of an error."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes({f"mmd.{name}": value for name, value in facts.items()})
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(int(when * 1e9))


class Tracing:
    """The spans of one process. `endpoint`: an OTLP collector over HTTP, `http://collector:4318`; None: none."""

    def __init__(self, pod: str, deployment: str, namespace: str, endpoint: str | None) -> None:
        self.exports = endpoint is not None
        self._provider = _provider(pod, deployment, namespace, endpoint) if endpoint is not None else None
        self._facts = (pod, deployment, namespace)

    def warm_up(self) -> None:
        """Import and make all that the first request would wait for: a tenth of a second. Blocks; nothing is recorded."""
        self.begin({}, time.time(), "")  # a span that never ends is never sent

    def begin(self, headers: Mapping[str, str], when: float, request_id: str) -> Root:
        """The root of a request; it continues the client's own trace if `headers` carry one."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if self._provider is None:  # ids are made anyway: logs and exemplars carry them
            self._provider = _provider(*self._facts, None)
        propagator = TraceContextTextMapPropagator()
        parent = propagator.extract({_TRACEPARENT: headers.get(_TRACEPARENT, "")})
        span = self._provider.get_tracer("mmd").start_span(
            "chat.completions",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=int(when * 1e9),
            attributes={"mmd.request_id": request_id},
        )
        carrier: dict[str, str] = {}
        propagator.inject(carrier, set_span_in_context(span, parent))
        return Root(span, {_TRACEPARENT: carrier[_TRACEPARENT]})

    def record(self, carrier: Mapping[str, str], phases: Iterable[Phase], error: str = "") -> None:
        """Record spans of phases that have ended, below the span that `carrier` names."""
        if not self.exports or self._provider is None or _TRACEPARENT not in carrier:
            return
        from opentelemetry.trace import Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(carrier)
        tracer = self._provider.get_tracer("mmd")
        ended = list(phases)
        if error:
            ended.append(Phase("failed", time.time(), time.time()))
        for phase in ended:
            facts = {f"mmd.{n}": v for n, v in phase.detail.items() if isinstance(v, (str, int, float))}
            span = tracer.start_span(
                phase.name, context=context, start_time=int(phase.start * 1e9), attributes=facts
            )
            if error and phase.name == "failed":
                span.set_status(Status(StatusCode.ERROR, error))
            span.end(int(max(phase.start, phase.end) * 1e9))

    def close(self) -> None:
        """Send the remaining spans, for two seconds at most."""
        if self._provider is not None and self.exports:
            closing = threading.Thread(target=self._provider.shutdown, daemon=True, name="close-tracing")
            closing.start()
            closing.join(CLOSE_SECONDS)


def _provider(pod: str, deployment: str, namespace: str, endpoint: str | None) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    resource = Resource.create(
        {
            "service.name": f"mmd-{deployment}",
            "service.namespace": namespace,
            "service.instance.id": pod,
            "k8s.pod.name": pod,
        }
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if endpoint is not None:
        provider.add_span_processor(_processor(endpoint))
    return provider


def _processor(endpoint: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    for chatty in (
        "opentelemetry.exporter",
        "opentelemetry.sdk.trace.export",
        "opentelemetry.sdk._shared_internal",
    ):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)  # logged below, once a minute
    warn = RepeatedWarning(log, interval_seconds=60.0)

    class Exporter(SpanExporter):
        """Wraps the OTLP exporter: failures are logged once a minute and never propagate."""

        def __init__(self) -> None:
            url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
            self._inner = OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECONDS)

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                result = self._inner.export(spans)
            except Exception as error:  # noqa: BLE001 - whatever a collector does must not end the exporting thread
                warn("export", "failed to export %d spans to %s: %s", len(spans), endpoint, error)
                return SpanExportResult.FAILURE
            if result is not SpanExportResult.SUCCESS:
                warn(
                    "export",
                    "failed to export %d spans to %s; check that the collector is running",
                    len(spans),
                    endpoint,
                )
            return result

        def shutdown(self) -> None:
            self._inner.shutdown()  # type: ignore[no-untyped-call]

    return BatchSpanProcessor(Exporter(), max_queue_size=QUEUED_SPANS, schedule_delay_millis=1000)
