"""Writes the boards as JSON for Grafana: `python -m mmd_dashboards.grafana`.

Needs grafana-foundation-sdk, a development dependency.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import GraphTresholdsStyleMode, StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

from mmd_dashboards.boards import BOARDS
from mmd_dashboards.panels import Board, Panel
from mmd_dashboards.queries import ROLLOUT, SCALED, STARTED

FOLDER = Path(__file__).resolve().parents[1] / "multimodal-operator" / "dashboards"
TAG = "multimodal-operator"
_SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")


def grafana(board: Board) -> str:
    """The JSON that Grafana imports. The same board always gives the same text."""
    builder = (
        dashboard.Dashboard(f"Multimodal · {board.title}")
        .uid(f"mmd-{board.name}")
        .description(board.text)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Multimodal")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("namespace", "label_values(mmd_build_info, namespace)"))
        .with_variable(
            _variable("deployment", 'label_values(mmd_build_info{namespace="$namespace"}, deployment)')
        )
        .annotation(_annotation("Pod starts", STARTED, "blue"))
        .annotation(_annotation("Rollout", ROLLOUT, "purple"))
        .annotation(_annotation("Scaled", SCALED, "orange"))
    )
    for row in board.rows:
        builder = builder.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            builder = builder.with_panel(_panel(panel))
    plain = _without_nulls(json.loads(json.dumps(builder.build(), cls=JSONEncoder)))
    for number, panel in enumerate(plain["panels"], 1):
        panel["id"] = number
    return json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    )


def _annotation(name: str, expr: str, color: str) -> dashboard.AnnotationQuery:
    return (
        dashboard.AnnotationQuery().name(name).datasource(_SOURCE).expr(expr).icon_color(color).enable(True)
    )


def _panel(panel: Panel) -> Any:
    kind: Any = stat.Panel() if panel.kind == "number" else timeseries.Panel()
    builder = kind.title(panel.title).description(panel.text).unit(panel.unit).datasource(_SOURCE)
    builder = builder.span(6).height(7)
    if panel.kind != "number":
        builder = builder.min(0).line_width(1).fill_opacity(10)
    if panel.kind == "stack":
        builder = builder.fill_opacity(40).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if panel.warn_above is not None:
        steps = [Threshold(None, "green"), Threshold(panel.warn_above, "red")]
        builder = builder.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        if panel.kind != "number":
            builder = builder.thresholds_style(
                common.GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.LINE)
            )
    for number, query in enumerate(panel.queries):
        target = (
            prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(query.expr).legend_format(query.legend)
        )
        builder = builder.with_target(target.range().exemplar("_bucket" in query.expr))
    return builder


def main() -> None:
    """Write every dashboard."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(grafana(board))


if __name__ == "__main__":
    main()
