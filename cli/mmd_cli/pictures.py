"""Draws panels of the dashboards with matplotlib, from the same Prometheus queries, for reports and the docs."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from mmd_cli.errors import CommandError
from mmd_dashboards.panels import Panel
from mmd_dashboards.queries import filled

TIMEOUT_SECONDS = 30.0
MAX_LINES = 12
_UNITS = {
    "s": "seconds",
    "percentunit": "share",
    "Bps": "bytes/s",
    "reqps": "requests/s",
    "ops": "1/s",
    "short": "",
}


class PrometheusError(CommandError):
    """A Prometheus server could not be reached, or rejected the query."""


class PlottingError(CommandError):
    """No plotting library is installed."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a picture: Unix seconds and values of equal length."""

    name: str
    times: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A deployment, and a period in Unix seconds."""

    namespace: str
    deployment: str
    start: float
    end: float

    @property
    def step(self) -> float:
        """Seconds between two points: a window has about three hundred."""
        return max(1.0, (self.end - self.start) / 300)

    @property
    def rate_interval(self) -> str:
        """Interval for rates: wide enough for scrapes every fifteen seconds, or every five in short windows."""
        return f"{max(20 if self.end - self.start < 1800 else 60, math.ceil(4 * self.step))}s"


class Prometheus:
    """A Prometheus server to query."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def _ask(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        try:
            answer = httpx.post(f"{self._url}/api/v1/{path}", data=parameters, timeout=TIMEOUT_SECONDS).json()
        except (httpx.HTTPError, ValueError) as error:
            raise PrometheusError(
                f"no Prometheus server responded at {self._url} ({error}); check --prometheus"
            ) from error
        if answer.get("status") != "success":
            raise PrometheusError(f"Prometheus refused {parameters.get('query')}: {answer.get('error')}")
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def value(self, expr: str, window: TimeWindow) -> float | None:
        """One number at the end of the window; None if there is no data.

        Raises:
            PrometheusError: the server cannot be queried.
        """
        query = filled(expr, window.namespace, window.deployment, window.rate_interval)
        values = [float(series["value"][1]) for series in self._ask("query", query=query, time=window.end)]
        numbers = [value for value in values if not math.isnan(value)]
        return sum(numbers) if numbers else None

    def lines(self, panel: Panel, window: TimeWindow) -> list[Line]:
        """Every line of a panel over the window.

        Raises:
            PrometheusError: the server cannot be queried.
        """
        lines = []
        for query in panel.queries:
            expr = filled(query.expr, window.namespace, window.deployment, window.rate_interval)
            for series in self._ask(
                "query_range", query=expr, start=window.start, end=window.end, step=window.step
            ):
                name = query.legend
                for label, value in series["metric"].items():
                    name = name.replace(f"{{{{{label}}}}}", value)
                points = [(float(t), float(v)) for t, v in series["values"]]
                lines.append(Line(name, [t for t, _ in points], [v for _, v in points]))
        return lines


def draw(panels: Sequence[tuple[Panel, list[Line]]], columns: int = 2, form: str = "svg") -> bytes:
    """One picture of several panels, as SVG or PNG.

    Raises:
        PlottingError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlottingError("matplotlib is missing: pip install 'multimodal-operator[simulate]'") from error
    rows = math.ceil(len(panels) / columns)
    begin = min((t for _, lines in panels for line in lines for t in line.times), default=0.0)
    with mpl.rc_context({"font.size": 8, "svg.hashsalt": "mmd", "svg.fonttype": "none"}):
        figure = Figure(figsize=(5.2 * columns, 2.6 * rows), layout="constrained")
        for number, (panel, lines) in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, number)
            axes.set_title(panel.title, loc="left", fontweight="bold")
            axes.set_ylabel(_UNITS.get(panel.unit, panel.unit))
            visible = [line for line in lines if any(not math.isnan(value) for value in line.values)]
            for line in visible[:MAX_LINES]:
                minutes = [(t - begin) / 60 for t in line.times]
                promised = line.name in ("promised", "objective")
                axes.plot(
                    minutes, line.values, label=line.name, linewidth=1.2, linestyle="--" if promised else "-"
                )
            if panel.warn_above is not None:
                axes.axhline(panel.warn_above, color="tab:red", linewidth=0.8, linestyle=":")
            axes.set_ylim(bottom=0)
            axes.set_xlabel("minutes")
            axes.grid(alpha=0.25)
            if visible:
                axes.legend(
                    fontsize=6.5, ncols=2 if len(visible) > 4 else 1, loc="upper left", framealpha=0.6
                )
        buffer = io.BytesIO()
        figure.savefig(buffer, format=form, dpi=110, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()
