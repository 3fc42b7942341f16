"""docs/models.md, the architectures under test and the recipes of their random checkpoints name the same architectures.

The table of docs/measurements/models.md is that of its report.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

from mmd_workers.model.adapters import ADAPTERS
from support.oracles import model_zoo as zoo

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()
CHECKED = (ROOT / "docs" / "measurements" / "models.md").read_text()


def documented() -> dict[str, tuple[str, ...]]:
    """Architecture -> modalities, of the first table."""
    found: dict[str, tuple[str, ...]] = {}
    lines = [line for line in PAGE.split("\n## ")[1].splitlines() if line.startswith("|")]
    modalities = [cell.strip() for cell in lines[0].strip("|").split("|")][1:]
    for line in lines[2:]:
        names, *ticks = [cell.strip() for cell in line.strip("|").split("|")]
        takes = tuple(m for m, tick in zip(modalities, ticks, strict=True) if tick)
        words = [name.split(" (")[0] for name in names.split(", ")]
        found |= dict.fromkeys([word for word in words if re.fullmatch(r"[a-z0-9_]+", word)], takes)
    return found


def test_the_page_lists_the_architectures_under_test_with_their_modalities() -> None:
    assert documented() == zoo.MODALITIES


def test_architectures_under_test_and_random_checkpoints_are_the_same() -> None:
    recipes = runpy.run_path(str(ROOT / "support" / "oracles" / "random_model.py"))["ARCHITECTURES"]
    assert recipes.keys() == zoo.MODALITIES.keys()


def test_the_table_of_checked_models_is_that_of_the_report() -> None:
    bench = runpy.run_path(str(ROOT / "bench" / "check_models.py"))
    rows = json.loads((ROOT / "bench" / "reports" / "models.json").read_text())
    assert [row["architecture"] for row in rows] == list(bench["BUILDERS"])
    assert "\n\n" + "\n".join(bench["table_of"](rows)) + "\n\n" in CHECKED


def test_the_page_lists_each_checked_model_under_its_verdict() -> None:
    listed = dict(re.findall(r"^- \*\*(.+?):\*\* ([^.]+)\.", PAGE, re.MULTILINE))
    labels = {"agrees": "Agree", "incomplete": "Agree as far as transformers works", "refused": "Refused"}
    rows = json.loads((ROOT / "bench" / "reports" / "models.json").read_text())
    for verdict, label in labels.items():
        names = [row["architecture"] for row in rows if row["verdict"] == verdict]
        assert listed[label].replace("\n ", "").split(", ") == names
    assert {row["verdict"] for row in rows} <= labels.keys()


def test_the_report_has_the_verdict_that_its_cases_give() -> None:
    for row in json.loads((ROOT / "bench" / "reports" / "models.json").read_text()):
        if cases := row.get("cases"):
            assert (row["verdict"] == "agrees") == (
                {case["verdict"] for case in cases.values()} == {"agrees"}
            ), row


def test_every_adapter_is_of_an_architecture_that_is_tested_or_checked() -> None:
    checked = runpy.run_path(str(ROOT / "bench" / "check_models.py"))["BUILDERS"]
    assert {name.removesuffix("_thinker") for name in ADAPTERS} <= zoo.MODALITIES.keys() | checked.keys()
