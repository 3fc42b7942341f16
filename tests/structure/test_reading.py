"""docs/reading.md names files that exist, 5,000 lines at most, and how long each of them is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 5_000
TOLERANCE = 0.1
ROW = re.compile(r"^\| `([^`]+)` \| ([\d,]+) \|", re.MULTILINE)
PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)+)`")
TOTAL = re.compile(r"([\d,]+) lines together")


def number(text: str) -> int:
    return int(text.replace(",", ""))


def length(path: Path) -> int:
    return len(path.read_text().splitlines())


def is_off(written: int, counted: int) -> bool:
    return abs(written - counted) > TOLERANCE * counted


def faults(page: str, root: Path) -> Iterator[str]:
    """What is wrong with a page that lists files below `root`, as `path | lines | what to look for`."""
    rows = [(path, number(lines)) for path, lines in ROW.findall(page)]
    paths = [path for path, _ in rows]
    yield from (f"{path} is listed twice" for path in sorted({p for p in paths if paths.count(p) > 1}))
    yield from (f"{path} has no row" for path in PATH.findall(page) if path not in paths)
    yield from (f"{path} does not exist" for path in paths if not (root / path).is_file())
    counted = {path: length(root / path) for path in paths if (root / path).is_file()}
    for path, written in rows:
        if path in counted and is_off(written, counted[path]):
            yield f"{path} has {counted[path]} lines, not {written}"
    together = sum(counted.values())
    if together > MOST_LINES:
        yield f"the files have {together} lines together, more than {MOST_LINES}; leave one out"
    totals = [number(text) for text in TOTAL.findall(page)]
    if not totals or any(is_off(total, together) for total in totals):
        yield f"the files have {together} lines together, and the page says {totals or 'nothing'}"


def test_the_core_to_read_exists_and_is_short() -> None:
    page = (ROOT / "docs" / "reading.md").read_text()
    assert len(ROW.findall(page)) > 10
    assert list(faults(page, ROOT)) == []


A, B = "| `a/one.py` | 100 | x |\n", "| `a/two.py` | 4,000 | x |\n"


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (f"4,100 lines together\n{A}{B}", []),
        (f"4,100 lines together\n{A.replace('100', '91')}{B}", []),
        (f"4,100 lines together\n{A.replace('100', '89')}{B}", ["a/one.py has 100 lines, not 89"]),
        (f"100 lines together\n{A}{A}", ["a/one.py is listed twice"]),
        (f"100 lines together, see `a/two.py`\n{A}", ["a/two.py has no row"]),
        (f"100 lines together\n{A}| `a/gone.py` | 5 | x |\n", ["a/gone.py does not exist"]),
        (f"{A}", ["the files have 100 lines together, and the page says nothing"]),
        (f"200 lines together\n{A}", ["the files have 100 lines together, and the page says [200]"]),
        (
            f"5,101 lines together\n{A}{B}| `a/three.py` | 1,001 | x |\n",
            ["the files have 5101 lines together, more than 5000; leave one out"],
        ),
    ],
)
def test_the_check_itself(page: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name, lines in {"one": 100, "two": 4_000, "three": 1_001}.items():
        (tmp_path / "a" / f"{name}.py").write_text("x\n" * lines)
    assert list(faults(page, tmp_path)) == found
