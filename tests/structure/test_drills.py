"""The table of drills names tests that exist, says why each is one, and lets no fragile test stay one for ever."""

from __future__ import annotations

import ast
import datetime
from pathlib import Path
from typing import Any

import pytest

from ci.legs import SUITES
from ci.run import legs_of
from tests.support.legs import drill_of, drills

ROOT = Path(__file__).parents[2]
GATE_MINUTES = 90


def functions(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("name", drills())
def test_every_test_of_a_drill_exists(name: str) -> None:
    row = drills()[name]
    for node_id in (*row.get("tests", ()), *row.get("keep", ())):
        file, _, function = node_id.partition("::")
        assert (ROOT / file).is_file(), f"{name}: there is no {file}"
        assert not function or function.partition("[")[0] in functions(ROOT / file), f"{name}: no {node_id}"


@pytest.mark.parametrize("name", drills())
def test_a_drill_has_a_reason_a_budget_and_a_date_that_has_not_passed(name: str) -> None:
    row: dict[str, Any] = drills()[name]
    assert row["why"]
    assert 0 < row["minutes"] <= 30
    assert ("tests" in row) != ("command" in row)
    assert row.get("until", datetime.date.max) >= datetime.datetime.now(datetime.UTC).date(), (
        f"{name}: repair its fragile tests, or give the row a new date with a reason"
    )


def test_a_test_belongs_to_the_drill_of_its_module_or_of_its_name_unless_it_is_kept() -> None:
    faults = "tests/pipeline/test_faults.py"
    assert drill_of(f"{faults}::test_pods_measure_what_they_do[Native]") == "faults"
    assert not drill_of(f"{faults}::test_an_encoder_killed_while_it_encodes_costs_no_request[Native]")
    assert drill_of(f"{faults}::test_an_encoder_killed_while_it_encodes_costs_no_request[VLLM]") == "faults"
    assert not drill_of("tests/structure/test_drills.py::test_every_test_of_a_drill_exists[faults]")


def test_the_budgets_of_the_gate_fit_into_the_time_of_ci() -> None:
    assert sum(leg.budget_minutes for leg in SUITES["gate"] if not leg.beside) < GATE_MINUTES


def test_drills_run_alone_and_by_name() -> None:
    assert [leg.name for leg in legs_of(["drills"])] == [f"drill-{name}" for name in drills()]
    assert not any(leg.beside for leg in legs_of(["drills"]))
    with pytest.raises(SystemExit, match="there is no leg 'drill-none'"):
        list(legs_of(["drill-none"]))
