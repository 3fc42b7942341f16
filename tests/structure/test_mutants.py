"""The reasons of `bench/mutants.yaml` are about lines that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_every_line_with_a_reason_is_in_its_file() -> None:
    reasons = yaml.safe_load((ROOT / "bench/mutants.yaml").read_text())
    for path, entries in reasons.items():
        text = re.sub(r"\s+", " ", (ROOT / path).read_text())
        for entry in entries:
            assert entry["was"] in text, f"{path} has no line {entry['was']!r}"
