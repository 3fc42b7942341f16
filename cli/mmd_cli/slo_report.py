"""`mmd report`: SLO attainment, bottlenecks, sizes and cost of a period, as one self-contained HTML file.

Its source is a Prometheus server, or without one the requests that gateways still remember.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import jinja2

from mmd_cli.errors import CommandError
from mmd_cli.gateways import Snapshot
from mmd_cli.pictures import Line, Prometheus, TimeWindow, draw
from mmd_dashboards.overview import OVERVIEW
from mmd_dashboards.panels import Panel
from mmd_dashboards.queries import OURS
from mmd_dashboards.scaling import SCALING

BINS = 60
LOST = "internal|peer_lost|link_failed|lease_ended|feature_lost|drained"
PHASES = ("queue", "encode", "embedding_transfer", "prefill", "kv_transfer", "decode")


class NothingToReportError(CommandError):
    """No request was served in the period."""


@dataclass(slots=True)
class SloReport:
    """The content of the page. `figures`: name → words; `pictures`: heading → SVG; `notes`: sentences."""

    title: str
    start: float
    end: float
    source: str
    figures: dict[str, str] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def html(self) -> str:
        """The page as HTML."""
        template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
            resources.files(__package__).joinpath("slo_report.html").read_text()
        )
        day = "%Y-%m-%d %H:%M:%S"
        return template.render(
            report=self,
            start=time.strftime(day, time.gmtime(self.start)),
            end=time.strftime(day, time.gmtime(self.end)),
        )


def from_prometheus(server: Prometheus, window: TimeWindow, decisions: Mapping[str, str]) -> SloReport:
    """Make the report from a Prometheus server.

    Raises:
        PrometheusError: the server cannot be queried.
        NothingToReportError: it has no request of this period.
    """
    report = SloReport(
        f"{window.namespace}/{window.deployment}",
        window.start,
        window.end,
        "Prometheus",
        notes=list(decisions.values()),
    )
    span = f"{max(1, math.ceil(window.end - window.start))}s"

    def grown(metric: str, *matchers: str) -> float:
        inside = ",".join((OURS, *matchers))
        return server.value(f"sum(increase({metric}{{{inside}}}[{span}]))", window) or 0.0

    requests = grown("mmd_requests_total")
    if requests < 0.5:
        raise NothingToReportError(
            f"Prometheus has no requests to {report.title} in this period; check that it scrapes the gateway, or raise --hours"
        )
    lost = grown("mmd_requests_total", f'code=~"{LOST}"')
    served = grown("mmd_requests_total", 'code="ok"')
    report.figures |= {
        "requests": f"{requests:.0f}",
        "lost": f"{lost:.0f}",
        "other failures": f"{requests - lost - served:.0f}",
        "placed again": f"{grown('mmd_retries_total'):.0f}",
    }
    for signal, histogram in (("ttft", "mmd_ttft_seconds"), ("itl", "mmd_itl_seconds")):
        for share in (0.5, 0.95):
            expr = (
                f"histogram_quantile({share}, sum by (le) (increase({histogram}_bucket{{{OURS}}}[{span}])))"
            )
            if (value := server.value(expr, window)) is not None:
                report.figures[f"{signal} p{share * 100:g}"] = _seconds(value)
        promised = server.value(f'max(mmd_slo_target_seconds{{{OURS},signal="{signal}"}})', window)
        of_signal = f'signal="{signal}"'
        measured = grown("mmd_slo_requests_total", of_signal)
        if promised is not None and measured:
            attained = grown("mmd_slo_requests_total", of_signal, 'outcome="kept"') / measured
            report.figures[f"{signal} within {_seconds(promised)}"] = f"{attained:.1%}"
    for role in ("encode", "prefill", "decode"):
        pods = server.value(
            f'avg_over_time(max(mmd_gateway_pods{{{OURS},role="{role}",state="ready"}})[{span}:15s])', window
        )
        if pods is not None:
            report.figures[f"{role} pod hours"] = f"{pods * (window.end - window.start) / 3600:.2f}"
    for board in (OVERVIEW, SCALING):
        for row in board.rows:
            drawn = [(panel, server.lines(panel, window)) for panel in row.panels]
            if any(lines for _, lines in drawn):  # without an operator there are no decisions
                report.pictures[f"{board.title}: {row.title}"] = _svg(drawn)
    return report


def from_gateways(name: str, seen: Snapshot, decisions: Mapping[str, str]) -> SloReport:
    """Make the report from the summaries of the gateways' newest requests (`/debug/requests`).

    Raises:
        NothingToReportError: no request has finished.
    """
    done = sorted(
        (request for request in seen.requests if request["finished"]),
        key=lambda request: float(request["arrived"]),
    )
    if not done:
        missing = "".join(f"\n{words}" for words in seen.missing)
        raise NothingToReportError(f"the gateways have no finished requests; send a request first{missing}")
    promised = (gateway.total("mmd_slo_target_seconds", signal="ttft") for gateway in seen.gateways.values())
    ttft_seconds = max(promised) or None
    start, end = float(done[0]["arrived"]), max(float(request["finished"]) for request in done)
    report = SloReport(
        name,
        start,
        end,
        f"the gateways' newest {len(done)} requests",
        notes=[*seen.missing, *decisions.values()],
    )
    codes = Counter(str(request["code"]) for request in done)
    first = sorted(request["timings"]["ttft"] / 1000 for request in done if "ttft" in request["timings"])
    report.figures["requests"] = str(len(done))
    report.figures |= {
        f"ended with {code}": str(count) for code, count in codes.most_common() if code != "ok"
    }
    report.figures["placed again"] = str(sum(max(0, request["attempts"] - 1) for request in done))
    if first:
        report.figures["ttft p50"] = _seconds(statistics.median(first))
        report.figures["ttft p95"] = _seconds(first[min(len(first) - 1, math.ceil(0.95 * len(first)) - 1)])
        if ttft_seconds is not None:
            attained = sum(value <= ttft_seconds for value in first) / len(done)
            report.figures[f"ttft within {_seconds(ttft_seconds)}"] = f"{attained:.1%}"
    spent = Counter(
        {phase: sum(request["timings"].get(phase, 0.0) for request in done) / 1000 for phase in PHASES}
    )
    phase, seconds = spent.most_common(1)[0]
    total = sum(spent.values())
    if total:
        report.notes.insert(
            0, f"Largest phase: {phase}, {seconds / total:.0%} of the time that requests spent in pods."
        )
    report.pictures["Over time"] = _svg(_over_time(done, start, end, ttft_seconds))
    return report


def _over_time(
    done: Sequence[Mapping[str, Any]], start: float, end: float, ttft_seconds: float | None
) -> list[tuple[Panel, list[Line]]]:
    width = max((end - start) / BINS, 1e-3)
    middles = [start + (number + 0.5) * width for number in range(BINS)]
    counts: dict[str, list[float]] = defaultdict(lambda: [0.0] * BINS)
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0] * BINS)
    for request in done:
        bin_number = min(BINS - 1, int((float(request["arrived"]) - start) / width))
        counts[str(request["code"])][bin_number] += 1 / width
        for phase in PHASES:
            spent[phase][bin_number] += request["timings"].get(phase, 0.0) / 1000 / width
    first = [
        (request["arrived"], request["timings"]["ttft"] / 1000)
        for request in done
        if "ttft" in request["timings"]
    ]
    lines = [Line("per request", [t for t, _ in first], [v for _, v in first])]
    if ttft_seconds is not None:
        lines.append(Line("promised", [start, end], [ttft_seconds] * 2))
    return [
        (
            _panel("Requests per second", "reqps"),
            [Line(code, middles, rates) for code, rates in counts.items()],
        ),
        (_panel("Time to first token", "s"), lines),
        (_panel("Time by phase", "short"), [Line(p, middles, s) for p, s in spent.items() if any(s)]),
    ]


def _panel(title: str, unit: Any) -> Panel:
    return Panel(title, "", unit, ())


def _svg(panels: list[tuple[Panel, list[Line]]]) -> str:
    text = draw(panels).decode()
    return text[text.index("<svg") :]


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 10 else f"{value:.1f} s"
