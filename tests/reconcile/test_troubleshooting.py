"""Every reason that a condition can give stands in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmd_operator.autoscaling import HARD_LIMITS
from mmd_operator.observed.problems import _SEVERITY
from mmd_operator.status.conditions import _REMEDIES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text()
RUNBOOKS = (DOCS / "runbooks.md").read_text()


@pytest.mark.parametrize("reason", _SEVERITY)
def test_every_problem_has_a_row_with_what_to_do(reason: str):
    row = next((line for line in PAGE.splitlines() if line.startswith(f"| `{reason}` |")), "")
    assert len(row.split("|")) == 5, f"docs/troubleshooting.md has no row for {reason}"


def test_every_limit_that_waiting_does_not_lift_has_a_remedy():
    assert _REMEDIES.keys() == HARD_LIMITS


@pytest.mark.parametrize("limit", sorted(HARD_LIMITS))
def test_the_runbook_has_a_remedy_for_every_lasting_limit(limit: str):
    section = RUNBOOKS.split("\n## MmdBacklogGrowsLimited\n")[1].split("\n## ")[0]
    assert f"{limit}:" in section, f"docs/runbooks.md has no remedy for {limit}"
