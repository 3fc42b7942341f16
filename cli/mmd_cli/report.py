"""Writes one self-contained HTML file: questions, answers, and each request's path through the pools."""

from __future__ import annotations

import base64
import time
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from mmd_cli.demo import Asked

COLOURS = {
    "queue": "#b0b7c3",
    "encode": "#e07a3f",
    "embedding_transfer": "#e8b04a",
    "prefill": "#3f78c5",
    "kv_transfer": "#5fb3a8",
    "decode": "#4d9a57",
}


def write(path: Path, asked: list[Asked], title: str) -> None:
    """Render the report to `path`."""
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        resources.files(__package__).joinpath("report.html").read_text()
    )
    rows = [_row(item) for item in asked]
    path.write_text(
        template.render(title=title, rows=rows, colours=COLOURS, when=time.strftime("%Y-%m-%d %H:%M:%S"))
    )


def _row(item: Asked) -> dict[str, Any]:
    phases = [phase for phase in item.timeline["phases"] if phase["name"] in COLOURS]
    begin = float(item.timeline["arrived"])
    end = max([float(item.timeline["finished"]), *(phase["end"] for phase in phases)])
    span = max(end - begin, 1e-6)
    sample = item.sample
    return {
        "label": item.label,
        "kind": sample.kind,
        "source": f"data:{sample.mime};base64,{base64.b64encode(sample.bytes).decode()}",
        "question": sample.question,
        "answer": item.answer.text.strip(),
        "expected": sample.answer,
        "right": item.right,
        "total_ms": span * 1000,
        "bars": [
            {
                "name": phase["name"],
                "pod": phase.get("pod", ""),
                "left": 100 * (phase["start"] - begin) / span,
                "width": max(0.3, 100 * (phase["end"] - phase["start"]) / span),
                "ms": 1000 * (phase["end"] - phase["start"]),
            }
            for phase in sorted(phases, key=lambda phase: phase["start"])
        ],
    }
