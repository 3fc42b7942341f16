"""One trace a request, over every pod that worked on it; and no request that suffers from its own trace."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

from mmd_cli.samples import draw
from mmd_workers.observe.tracing import Tracing
from mmd_workers.wire.messages.message_parts import Phase
from support.harness.waiting import DEADLINE_SECONDS, wait_until
from support.servers.otlp_collector import Collector, Span
from support.serving.local_deployment import Deployment
from support.serving.observed_fixture import ask, content, load

served = [pytest.mark.processes, pytest.mark.xdist_group("observed"), pytest.mark.timeout(600)]
WORK = {"fetch", "layout", "queue", "encode", "embedding_transfer", "prefill", "kv_transfer", "decode"}


def spans_of(collector: Collector, trace_id: str, names: set[str]) -> dict[str, Span]:
    wait_until(
        lambda: names <= {span.name for span in collector.of(trace_id)}, f"spans {names} were exported"
    )
    return {span.name: span for span in collector.of(trace_id)}


def trace_of(observed: Deployment, request_id: str) -> str:
    return str(timeline_of(observed, request_id)["trace_id"])


def timeline_of(observed: Deployment, request_id: str) -> Any:
    url = f"{observed.local.admin_url}/debug/requests/{request_id}"
    return httpx.get(url, timeout=DEADLINE_SECONDS).json()


@pytest.mark.usefixtures("observed")
class TestServed:
    pytestmark = served

    def test_one_request_is_one_trace_over_all_its_pods(
        self, observed: Deployment, collector: Collector
    ) -> None:
        mine, parent = "1234567890abcdef" * 2, "fedcba0987654321"
        answer = ask(
            observed, content(draw("video", 90_001)), extra_headers={"traceparent": f"00-{mine}-{parent}-01"}
        )
        assert trace_of(observed, answer.id) == mine
        spans = spans_of(collector, mine, WORK | {"chat.completions"})
        root = spans.pop("chat.completions")
        assert root.parent_id == parent
        assert root.attributes["mmd.request_id"] == answer.id
        assert root.attributes["mmd.completion_tokens"] == answer.usage.completion_tokens
        for span in spans.values():
            assert span.parent_id == root.span_id
            assert root.start - 0.05 <= span.start <= min(span.end, root.end)
        pods = {name: span.pod.rpartition("-")[0] for name, span in spans.items()}
        for name, pool in {
            "encode": "encoder",
            "prefill": "prefill",
            "decode": "decode",
            "fetch": "gateway",
        }.items():
            assert f"-{pool}" in pods[name]
        assert spans["encode"].attributes["mmd.modality"] == "video"
        assert spans["encode"].attributes["mmd.tower_ms"] > 0
        assert spans["kv_transfer"].attributes["mmd.bytes"] > 0

    def test_without_a_client_trace_logs_and_timeline_share_a_new_one(
        self, observed: Deployment, collector: Collector
    ) -> None:
        answer = ask(observed, "What is 5?")
        trace_id = trace_of(observed, answer.id)
        root = spans_of(collector, trace_id, {"chat.completions", "decode"})["chat.completions"]
        assert root.parent_id == ""

    def test_the_routers_estimate_and_what_the_request_took_are_in_its_trace(
        self, observed: Deployment, collector: Collector
    ) -> None:
        answer = ask(observed, content(draw("image", 90_002)))
        trace_id = trace_of(observed, answer.id)
        root = spans_of(collector, trace_id, {"chat.completions", "prefill"})["chat.completions"]
        timeline = timeline_of(observed, answer.id)
        placed = [event for event in root.events if event.name == "placed"]
        assert len(placed) == len(timeline["attempts"]) > 0
        for event, attempt in zip(placed, timeline["attempts"], strict=True):
            assert event.at == pytest.approx(attempt["placed"], abs=1e-3)
            assert event.attributes == {
                "pod": attempt["prefill_pod"],
                "attempt": attempt["number"],
                "ttft_seconds": pytest.approx(attempt["ttft_seconds"]),
                **{
                    f"estimated_{term}_seconds": pytest.approx(seconds)
                    for term, seconds in attempt["estimated"].items()
                },
            }
        assert placed[-1].attributes["estimated_ttft_seconds"] > 0
        assert placed[-1].attributes["ttft_seconds"] > 0
        (first,) = [event for event in root.events if event.name == "first token"]
        assert root.start <= placed[0].at <= first.at <= root.end
        assert first.at == pytest.approx(timeline["first_token"], abs=1e-3)

    @pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{'0' * 16}-01", "ff-" + "a" * 5000])
    def test_a_context_that_makes_no_sense_is_ignored(self, observed: Deployment, header: str) -> None:
        answer = ask(observed, "What is 6?", extra_headers={"traceparent": header})
        assert len(trace_of(observed, answer.id)) == 32

    def test_a_collector_that_breaks_changes_nothing_for_requests(
        self, observed: Deployment, collector: Collector
    ) -> None:
        collector.broken = True
        try:
            load(observed, 8, 91_000)
            wait_until(lambda: collector.refused > 0, "exports were refused")
            load(observed, 8, 92_000)
        finally:
            collector.broken = False
        answer = ask(observed, "What is 7?")
        spans_of(collector, trace_of(observed, answer.id), {"chat.completions", "decode"})


def test_a_dead_collector_does_not_keep_a_process_from_ending() -> None:
    tracing = Tracing("pod", "name", "namespace", "http://127.0.0.1:9")
    root = tracing.begin({}, time.time(), "r")
    tracing.record(root.carrier, [Phase("encode", time.time() - 1, time.time())] * 5000)
    root.end(time.time())
    closing = threading.Thread(target=tracing.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


def test_without_a_collector_there_are_ids_and_nothing_is_kept() -> None:
    tracing = Tracing("pod", "name", "namespace", None)
    root = tracing.begin({}, 1.0, "r")
    assert len(root.trace_id) == 32
    tracing.record(root.carrier, [Phase("encode", 1.0, 2.0)])
    assert not tracing.exports
    tracing.close()


def test_a_worker_that_receives_no_trace_creates_no_span() -> None:
    tracing = Tracing("pod", "name", "namespace", "http://127.0.0.1:9")
    tracing.record({}, [Phase("encode", 1.0, 2.0)])
    tracing.record({"traceparent": "broken"}, [Phase("encode", 1.0, 2.0)])
    tracing.close()
