"""The parts of a dashboard as data: boards, rows, panels, queries. Independent of Grafana and servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["s", "bytes", "Bps", "percentunit", "reqps", "ops", "short"]


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression with the variables `$namespace`, `$deployment` and `$__rate_interval`, and the name
    of its lines.

    `moves`: the condition under which the query returns data. load: requests. trouble: something went wrong.
    operator: an operator scales the deployment. tenants: they send more requests than the pools have room
    for. picker: a platform's Gateway asks which pod takes a request.
    """

    expr: str
    legend: str
    moves: Literal["load", "trouble", "operator", "tenants", "picker"] = "load"


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `text` describes how to read it, and when to act."""

    title: str
    text: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: Literal["lines", "stack", "number"] = "lines"
    warn_above: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that belong together."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. `name` is the end of its uid and the name of its file."""

    name: str
    title: str
    text: str
    rows: tuple[Row, ...]

    def panels(self) -> list[Panel]:
        """All panels, top to bottom."""
        return [panel for row in self.rows for panel in row.panels]
