"""`mmd top`, `mmd report`, `mmd prometheus`: what they show is what the deployment did."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mmd_cli import slo_report, top
from mmd_cli.program import build
from mmd_cli.samples import draw
from tests.support.local_deployment import Deployment, until
from tests.support.observed_fixture import ask, content, load
from tests.support.prometheus_server import RULES, Prometheus, program

served = [pytest.mark.processes, pytest.mark.xdist_group("observed"), pytest.mark.timeout(600)]


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


def test_a_report_of_remembered_requests_counts_promises_failures_and_bottleneck() -> None:
    requests = [remembered(float(n), 100.0 if n < 9 else 900.0) for n in range(10)]
    requests += [remembered(10.0, 100.0, "peer_lost", attempts=3), {**remembered(11.0, 1.0), "finished": 0.0}]
    report = slo_report.from_requests("demo", requests, 0.5, {"encode": "encode: 1 to 2, 12 s of backlog"})
    assert report.figures["requests"] == "11"
    assert report.figures["ended with peer_lost"] == "1"
    assert report.figures["placed again"] == "2"
    assert report.figures["ttft within 500 ms"] == "90.9%"
    assert report.notes[0].startswith("Largest phase: encode, 89%")
    assert "12 s of backlog" in report.html()
    assert report.html().count("<svg") == 1


def test_a_report_without_requests_is_an_error() -> None:
    with pytest.raises(slo_report.NothingToReportError, match="send a request first"):
        slo_report.from_requests("demo", [], None, {})


def test_an_unreachable_gateway_is_reported_in_one_sentence() -> None:
    ran = CliRunner().invoke(build().app, ["top", "--url", "http://127.0.0.1:9", "--json"])
    assert ran.exit_code == 1
    assert "no gateway responded" in ran.output


def test_a_name_from_a_deployment_cannot_bring_markup_into_the_report() -> None:
    report = slo_report.from_requests("<script>alert(1)</script>", [remembered(1.0, 2.0)], None, {})
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
        stream = ask(observed, "A story?", stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
        next(iter(stream))

        def told() -> bool:  # pods tell their load a few times a second
            seen = json.loads(mmd("top", "--json", "--url", observed.local.admin_url, "--seconds", "0.3"))
            assert seen["requests"]["running"] == 1, "the stream ended before its pod was seen at work"
            return sum(pod["running"] for pod in seen["pods"]) == 1

        until(told, 60, "top shows the sequence in its pod")
        stream.response.close()
        screen = mmd("top", "--once", "--url", observed.local.admin_url, "--seconds", "0.3")
        assert all(name[:40] in screen for name in shown)
        assert "requests/s" in screen

    def test_the_timeline_of_a_request_is_shown_phase_by_phase(self, observed: Deployment) -> None:
        request = ask(observed, content(draw("video", 94_000))).id
        url = observed.local.admin_url
        timeline = json.loads(mmd("trace", request, "--json", "--url", url))
        phases = {phase["name"].replace("_", " ") for phase in timeline["phases"]}
        assert {"encode", "prefill", "decode"} <= phases
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

    def test_the_printed_configuration_finds_every_pod_and_the_report_is_written_from_it(
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
            until(
                lambda: server.value('sum(increase(mmd_requests_total{code="ok"}[1m]))') > 5,
                20,
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
            assert page.read_text().count("<svg") == 4
