"""What docs/articles.md claims is done is claimed with a file and a test, and what is not with a reason. That both exist is for
`test_paths_in_docs` to check.
"""

from __future__ import annotations

from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "articles.md"
HEAD = ["mechanism", "state", "here", "file", "test"]


def faults(page: str) -> list[str]:
    """The mechanisms whose row does not say what its state has to say."""
    table: list[str] = []
    wrong = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells or not table:
            table = cells
        elif table == HEAD and set(cells[0]) != {"-"}:
            proved = len(cells) == len(HEAD) and ".py`" in cells[3] and "::test_" in cells[4]
            reasoned = len(cells) == len(HEAD) and cells[2] and not cells[3] and not cells[4]
            if not {"done": proved, "part": proved, "not done": reasoned, "wrong": reasoned}.get(cells[1]):
                wrong.append(cells[0])
    return wrong


def test_what_is_done_is_proved_and_what_is_not_has_a_reason() -> None:
    page = PAGE.read_text()
    assert page.count("| done |") > 20
    assert faults(page) == []


@pytest.mark.parametrize(
    ("row", "faulty"),
    [
        ("| it | done | | `a.py` | `tests/a.py::test_it` |", False),
        ("| it | done | well | `a.py` | |", True),
        ("| it | part | half | | `tests/a.py::test_it` |", True),
        ("| it | not done | too early | | |", False),
        ("| it | not done | | | |", True),
        ("| it | wrong | too large | `a.py` | |", True),
        ("| it | almost | | `a.py` | `tests/a.py::test_it` |", True),
        ("| it | done | a | b | `a.py` | `tests/a.py::test_it` |", True),
    ],
)
def test_the_rule_itself(row: str, faulty: bool) -> None:
    assert faults(f"| {' | '.join(HEAD)} |\n|---|---|---|---|---|\n{row}") == (["it"] if faulty else [])
