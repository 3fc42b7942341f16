"""`mmd top`, `mmd report`, `mmd prometheus`: what they show is what the deployment did."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mmd_cli import slo_report, top
from mmd_cli.gateways import GatewaySnapshot, Snapshot
from mmd_cli.program import build
from mmd_cli.samples import draw
from mmd_workers.gateway.placement.timeline import KEPT_REQUESTS
from support.harness.waiting import wait_until
from support.servers.prometheus_server import RULES, Prometheus, program
from support.serving.local_deployment import Deployment
from support.serving.observed_fixture import ask, content, load

served = [pytest.mark.processes, pytest.mark.xdist_group("observed"), pytest.mark.timeout(600)]

PHASES = {"fetch", "layout", "queue", "encode", "embedding transfer", "prefill", "kv transfer", "decode"}
"""Of a request with a file."""


def mmd(*arguments: str) -> str:
    ran = CliRunner().invoke(build().app, list(arguments))
    assert ran.exit_code == 0, ran.output
    return ran.output


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ({0.1: 0, 0.2: 10, float("inf"): 10}, 0.5, 0.15),
        ({0.1: 5, 0.2: 10, float("inf"): 10}, 0.5, 0.1),
        ({0.1: 5, 0.2: 5, float("inf"): 10}, 0.95, 0.2),
        ({0.1: 0, float("inf"): 0}, 0.5, None),
        ({}, 0.5, None),
    ],
)
def test_a_quantile_is_read_off_a_histogram_as_prometheus_does(
    counts: Any, share: float, expected: Any
) -> None:
    assert top.quantile(counts, {}, share) == pytest.approx(expected)


def test_a_quantile_is_of_what_came_since_the_last_look() -> None:
    before = {0.1: 100.0, 0.2: 100.0, float("inf"): 100.0}
    now = {0.1: 100.0, 0.2: 110.0, float("inf"): 110.0}
    assert top.quantile(now, before, 0.5) == pytest.approx(0.15)


def remembered(arrived: float, ttft_ms: float, code: str = "ok", attempts: int = 1) -> dict[str, Any]:
    timings = {"ttft": ttft_ms, "encode": 400.0, "prefill": 50.0, "total": ttft_ms + 100}
    return {
        "arrived": arrived,
        "finished": arrived + 1,
        "code": code,
        "attempts": attempts,
        "timings": timings,
    }


def gateway(
    taken: float = 0.0,
    incarnation: str = "one",
    running: int = 0,
    pods: Sequence[dict[str, Any]] = (),
    requests: Sequence[dict[str, Any]] = (),
    **counters: float,
) -> GatewaySnapshot:
    """What one returned; the label of a counter is behind two underscores."""
    series = {}
    for name, value in counters.items():
        metric, _, label = name.partition("__")
        labels = (("signal" if metric.startswith("mmd_slo") else "role", label),) if label else ()
        series[metric, labels] = value
    state = {"incarnation": incarnation, "running": running, "pods": list(pods)}
    return GatewaySnapshot(taken, state, series, requests)


def test_figures_are_of_all_gateways() -> None:
    before = Snapshot(
        {
            "a": gateway(0.0, mmd_requests_total=100.0),
            "b": gateway(1.0, mmd_requests_total=40.0),
            "c": gateway(0.0, mmd_requests_total=1000.0),
        }
    )
    now = Snapshot(
        {
            "a": gateway(10.0, running=3, mmd_requests_total=150.0, mmd_gateway_held_sequences__decode=2.0),
            "b": gateway(11.0, running=4, mmd_requests_total=60.0, mmd_gateway_held_sequences__decode=5.0),
            "c": gateway(10.0, "again", mmd_requests_total=10.0, mmd_retries_total=1.0),
            "d": gateway(10.0, mmd_requests_total=5000.0, mmd_retries_total=6.0),
        },
        ("not counted: gateway e",),
    )
    seen = top.facts(now, before, {})
    assert seen["requests"]["per_second"] == pytest.approx(5 + 2 + 1), "c has started again, d is new"
    assert seen["requests"]["running"] == 7
    assert seen["requests"]["placed_again"] == 7
    assert seen["held"]["decode"] == 7
    assert (seen["gateways"], seen["missing"]) == (["a", "b", "c", "d"], ["not counted: gateway e"])


def test_a_worker_is_shown_once_as_it_reported_last() -> None:
    older, newer = ({"pod": "decode-0", "sent": sent, "state": str(sent)} for sent in (1.0, 2.0))
    other = {"pod": "decode-1", "sent": 1.0}
    for order in ((older, newer), (newer, older)):
        gateways = {str(n): gateway(pods=[pod]) for n, pod in enumerate((*order, other))}
        assert Snapshot(gateways).pods == [newer, other]


def test_a_report_begins_when_no_gateway_has_forgotten_a_request() -> None:
    def kept(count: int, begin: float) -> GatewaySnapshot:
        return gateway(requests=[remembered(begin + number, 1.0) for number in range(count)])

    seen = Snapshot({"full": kept(KEPT_REQUESTS, 1000.0), "quiet": kept(20, 990.0)})
    assert len(seen.requests) == KEPT_REQUESTS + 10
    assert min(request["arrived"] for request in seen.requests) == 1000.0
    assert len(Snapshot({"one": kept(5, 10.0), "two": kept(6, 20.0)}).requests) == 11


def report_of(
    name: str, requests: Sequence[dict[str, Any]], decisions: dict[str, str] | None = None
) -> slo_report.SloReport:
    half = len(requests) // 2
    parts = (requests[:half], requests[half:])
    gateways = {
        str(n): gateway(requests=part, mmd_slo_target_seconds__ttft=0.5) for n, part in enumerate(parts)
    }
    return slo_report.from_gateways(name, Snapshot(gateways, ("not counted: gateway e",)), decisions or {})


def test_a_report_of_remembered_requests_counts_promises_failures_and_bottleneck() -> None:
    requests = [remembered(float(n), 100.0 if n < 9 else 900.0) for n in range(10)]
    requests += [remembered(10.0, 100.0, "peer_lost", attempts=3), {**remembered(11.0, 1.0), "finished": 0.0}]
    report = report_of("demo", requests, {"encode": "encode: 1 to 2, 12 s of backlog"})
    assert report.figures["requests"] == "11"
    assert report.figures["ended with peer_lost"] == "1"
    assert report.figures["placed again"] == "2"
    assert report.figures["ttft within 500 ms"] == "90.9%"
    assert report.notes[0].startswith("Largest phase: encode, 89%")
    assert "12 s of backlog" in report.html()
    assert "not counted: gateway e" in report.html()
    assert report.html().count("<svg") == 1


def test_a_report_without_requests_is_an_error() -> None:
    with pytest.raises(slo_report.NothingToReportError, match="send a request first\nnot counted: gateway e"):
        report_of("demo", [])


def test_an_unreachable_gateway_is_reported_in_one_sentence() -> None:
    ran = CliRunner().invoke(build().app, ["top", "--url", "http://127.0.0.1:9", "--json"])
    assert ran.exit_code == 1
    assert "no gateway responded" in ran.output


@pytest.mark.parametrize("body", ['{"status": "ok"}', "[]", "1", '{"pod": "g", "pods": []}'])
def test_what_is_no_gateway_is_reported_in_one_sentence(body: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        ran = CliRunner().invoke(build().app, ["top", "--url", url, "--json"])
    finally:
        server.shutdown()
        server.server_close()
    assert ran.exit_code == 1
    assert "admin port" in ran.output
    assert "Traceback" not in ran.output


def test_a_name_from_a_deployment_cannot_bring_markup_into_the_report() -> None:
    report = report_of("<script>alert(1)</script>", [remembered(1.0, 2.0)])
    assert "<script>alert" not in report.html()


@pytest.mark.usefixtures("observed")
class TestServed:
    pytestmark = served

    def test_top_shows_every_pod_and_what_is_in_flight(self, observed: Deployment) -> None:
        load(observed, 8, 95_000)
        seen = json.loads(mmd("top", "--json", "--url", observed.local.admin_url, "--seconds", "0.3"))
        shown = {pod["pod"] for pod in seen["pods"]}
        assert shown == {pod.name for pod in observed.local.pods if pod.component != "gateway"}
        assert all(0 <= pod["kv_used"] <= 1 for pod in seen["pods"] if "decode" in pod["roles"])

        def long() -> Any:
            stream = ask(observed, "A story?", stream=True, max_tokens=3000, extra_body={"ignore_eos": True})
            next(iter(stream))
            return stream

        def told() -> bool:  # pods tell their load a few times a second
            nonlocal stream
            seen = json.loads(mmd("top", "--json", "--url", observed.local.admin_url, "--seconds", "0.3"))
            if seen["requests"]["running"] == 0:  # it ended before its pod was seen at work
                stream = long()
            return bool(seen["requests"]["running"] == sum(pod["running"] for pod in seen["pods"]) == 1)

        stream = long()
        wait_until(told, "top shows the sequence in its pod")
        stream.response.close()
        screen = mmd("top", "--once", "--url", observed.local.admin_url, "--seconds", "0.3")
        assert all(name[:40] in screen for name in shown)
        assert "requests/s" in screen

    def test_the_timeline_of_a_request_is_shown_phase_by_phase(self, observed: Deployment) -> None:
        request = ask(observed, content(draw("video", 94_000))).id
        url = observed.local.admin_url

        def reported() -> set[str]:
            timeline = json.loads(mmd("trace", request, "--json", "--url", url))
            phases = {phase["name"].replace("_", " ") for phase in timeline["phases"]}
            assert phases >= PHASES, phases
            return phases

        phases = wait_until(reported, "every pod has reported its phases")
        shown = mmd("trace", request, "--url", url)
        assert request in shown
        rows = [
            [cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line
        ]
        assert {row[0] for row in rows if row[0]} == phases
        begins = [float(row[2]) for row in rows if row[0]]
        assert begins == sorted(begins)
        encoder = next(row[1] for row in rows if row[0] == "encode")
        assert encoder.startswith(observed.pods("encoder")[0].name[:8])

    def test_an_unknown_request_is_reported_as_such(self, observed: Deployment) -> None:
        ran = CliRunner().invoke(build().app, ["trace", "nobody", "--url", observed.local.admin_url])
        assert ran.exit_code == 1
        assert "nobody" in ran.output

    def test_a_report_is_written_from_what_the_gateway_remembers(
        self, observed: Deployment, tmp_path: Path
    ) -> None:
        load(observed, 8, 96_000)
        page = tmp_path / "report.html"
        said = mmd("report", "--url", observed.local.admin_url, "-o", str(page), "--json")
        figures = json.loads(said)["figures"]
        assert int(figures["requests"]) >= 8
        assert "ttft within 2000 ms" in figures
        assert "Time to first token" in page.read_text()

    def test_the_printed_configuration_finds_every_pod_and_feeds_a_report(
        self, observed: Deployment, tmp_path: Path
    ) -> None:
        printed = mmd(
            "prometheus", "--url", observed.local.admin_url, "--rules", str(RULES), "--seconds", "1"
        )
        (tmp_path / "printed.yml").write_text(printed)
        subprocess.run(
            [program("promtool"), "check", "config", tmp_path / "printed.yml"], check=True, timeout=30
        )
        with Prometheus.of_gateway(tmp_path, observed.local.admin_url) as server:
            server.until_scraped(len(observed.local.pods))
            load(observed, 12, 97_000)
            wait_until(
                lambda: server.value('sum(increase(mmd_requests_total{code="ok"}[1m]))') > 5,
                "requests are seen",
            )
            page = tmp_path / "report.html"
            said = mmd(
                *("report", "--prometheus", server.url, "--deployment", "observed"),
                *("--hours", "0.02", "-o", str(page), "--json"),
            )
            figures = json.loads(said)["figures"]
            assert float(figures["requests"]) >= 5  # rounded
            assert figures["lost"] == "0"
            assert page.read_text().count("<svg") == 5
