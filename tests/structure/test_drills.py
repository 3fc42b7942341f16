"""The table of drills names tests that exist, says why each is one, and lets no fragile test stay one for ever."""

from __future__ import annotations

import ast
import datetime
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ci.drills import (
    BASE,
    DRILLS,
    MINUTES,
    ROTATION,
    Choice,
    changed,
    choose,
    day,
    drill_of,
    drills_of_changes,
    git,
    head,
    own_paths,
    stale,
)
from ci.legs import CORES, DEMO, SUITES, Leg
from ci.run import MOST_MINUTES, legs_of

ROOT = Path(__file__).parents[2]
CI_MINUTES = 90
FLAKY_DAYS = 14
MAX_KNOWN_FLAKY = 5
TODAY = day()


def functions(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def assert_exists(node_id: str) -> None:
    file, _, function = node_id.partition("::")
    assert (ROOT / file).is_file(), f"there is no {file}"
    assert not function or function.partition("[")[0] in functions(ROOT / file), f"there is no {node_id}"


@pytest.mark.parametrize("name", DRILLS)
def test_every_test_and_file_of_a_drill_exists(name: str) -> None:
    row = DRILLS[name]
    for node_id in (*row.get("tests", ()), *row.get("keep", ())):
        assert_exists(node_id)
    assert all((ROOT / path).exists() for path in own_paths(name))


@pytest.mark.parametrize("name", DRILLS)
def test_a_drill_has_a_reason_a_budget_and_a_future_date(name: str) -> None:
    row: dict[str, Any] = DRILLS[name]
    assert row["why"]
    assert 0 < row["minutes"] <= 30
    assert ("tests" in row) != ("command" in row)
    assert row.get("until", datetime.date.max) >= TODAY, (
        f"{name}: repair its fragile tests, or give the row a new date with a reason"
    )


def test_known_flaky_tests_are_few_exist_and_are_repaired_within_two_weeks() -> None:
    known = tomllib.loads((ROOT / "ci" / "flaky.toml").read_text())
    assert len(known) <= MAX_KNOWN_FLAKY
    for node_id, row in known.items():
        assert_exists(node_id)
        assert row["suspicion"]
        age = TODAY - row["seen"]
        assert datetime.timedelta() <= age <= datetime.timedelta(FLAKY_DAYS), (
            f"repair {node_id}, then remove its row"
        )


@pytest.mark.parametrize("name", ROTATION)
def test_a_drill_of_the_rotation_is_short_steady_and_made_of_tests(name: str) -> None:
    assert DRILLS[name]["minutes"] <= 8
    assert "until" not in DRILLS[name]
    assert "tests" in DRILLS[name]


def test_the_commit_chooses_one_drill_and_each_has_its_turn() -> None:
    chosen = [choose(f"{number:08x}", []) for number in range(len(ROTATION))]
    assert [choice.run for choice in chosen] == [(name,) for name in ROTATION]
    assert choose("", []).run == (ROTATION[0],)


def test_a_change_of_a_drills_own_files_chooses_it_too() -> None:
    assert drills_of_changes(["e2e/storm.py", "README.md"]) == ["cluster"]
    assert drills_of_changes(["tests/pipeline/test_reasoning.py"]) == ["forms"]
    assert drills_of_changes(["e2e_other/storm.py"]) == []
    assert choose("00000000", ["tests/pipeline/test_reasoning.py"]).run == ("forms", ROTATION[0])
    assert choose("00000000", ["tests/pipeline/test_lost_messages.py"]).run == (ROTATION[0],)
    assert choose("00000000", ["tests/observe/test_alerts_fire.py"]) == Choice(
        (ROTATION[0],), ("NOT RUN: drill-alerts, whose files changed; run 'make drill-alerts'",)
    )


def test_drills_that_do_not_fit_into_the_gate_are_named() -> None:
    choice = choose("00000000", [path for name in DRILLS for path in own_paths(name)])
    left_out = [name for name in DRILLS if any(f"NOT RUN: drill-{name}," in note for note in choice.notes)]
    assert set(choice.run) | set(left_out) == set(DRILLS)
    assert sum(DRILLS[name]["minutes"] for name in choice.run) <= MINUTES
    assert "cluster" in left_out


def test_a_gate_that_cannot_tell_what_changed_says_so() -> None:
    choice = choose("00000000", None)
    assert choice.run == (ROTATION[0],)
    assert choice.notes == ("NOT RUN: drills whose files changed, for git does not say what changed",)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits; the second renames a file, and an edit is not committed."""
    monkeypatch.delenv(BASE, raising=False)
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "any")
        monkeypatch.setenv(f"{name}_EMAIL", "any@example.com")
    root = tmp_path / "repository"
    root.mkdir()
    (root / "old name.txt").write_text("content\n" * 9)
    (root / "edited").write_text("one")
    for command in (
        ("init", "--quiet"),
        ("add", "--all"),
        ("commit", "--quiet", "--message=one"),
        ("mv", "old name.txt", "new.txt"),
        ("commit", "--quiet", "--message=two"),
    ):
        assert git(*command, root=root) is not None
    (root / "edited").write_text("two")
    return root


def test_both_names_of_a_renamed_file_and_edits_have_changed(repository: Path) -> None:
    assert changed(repository) == ["edited", "new.txt", "old name.txt"]
    assert len(head(repository)) == 40


def test_the_commit_to_compare_with_can_be_named_and_must_be_there(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BASE, "HEAD")
    assert changed(repository) == ["edited"]
    monkeypatch.setenv(BASE, "no-such-branch")
    with pytest.raises(SystemExit, match="MMD_CI_BASE: git knows no commit 'no-such-branch'"):
        changed(repository)


def test_a_branch_is_compared_with_where_it_left_the_main_one(repository: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    commit = ("-c", "user.name=any", "-c", "user.email=any@example.com", "commit", "--quiet", "--message=any")
    assert git("branch", "--move", "main", root=repository) is not None
    assert git("clone", "--quiet", str(repository), str(clone), root=tmp_path) is not None
    assert changed(clone) == ["new.txt", "old name.txt"], "on the main branch: what its last commit changed"
    for name in ("first", "second"):
        (clone / name).touch()
        assert git("add", name, root=clone) is not None
        assert git(*commit, root=clone) is not None
    assert changed(clone) == ["first", "second"]


def test_the_day_of_a_commit_does_not_change(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2025-03-04T23:30:00-02:00")
    assert git("commit", "--quiet", "--all", "--message=three", root=repository) is not None
    assert day(repository) == datetime.date(2025, 3, 5)


def test_without_history_or_git_nothing_is_known(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shallow = tmp_path / "shallow"
    assert git("clone", "--quiet", "--depth=1", repository.as_uri(), str(shallow), root=tmp_path) is not None
    assert changed(shallow) is None
    assert head(shallow) == head(repository)
    monkeypatch.setenv("PATH", "/nowhere")
    assert changed(repository) is None
    assert head(repository) == ""


def test_a_test_belongs_to_its_drill_unless_it_is_kept() -> None:
    faults = "tests/pipeline/test_faults.py"
    assert drill_of(f"{faults}::test_pods_measure_what_they_do[Native]") == "faults"
    assert not drill_of(f"{faults}::test_an_encoder_killed_while_it_encodes_costs_no_request[Native]")
    assert (
        drill_of(f"{faults}::test_an_encoder_killed_while_it_encodes_costs_no_request[VLLM]") == "faults-vllm"
    )
    assert not drill_of("tests/structure/test_drills.py::test_every_test_and_file_of_a_drill_exists[faults]")


def test_drill_entries_without_a_test_in_their_module_are_found() -> None:
    page = "tests/gateway/api/test_page_with_tools.py"
    kept = f"{page}::test_a_visitor_with_a_key_asks_with_tools_and_sends_results"
    assert stale([kept, "tests/structure/test_drills.py::test_any"]) == []
    assert stale([f"{page}::test_another"]) == [kept]
    assert stale([]) == []


def minutes_of(legs: Sequence[Leg]) -> float:
    """How long legs take together that all use up their budgets, and start as `run_legs` starts them."""
    now, under_way = 0.0, list[tuple[float, Leg]]()
    for leg in legs:
        while sum(other.cores for _, other in under_way) + leg.cores > CORES:
            now = min(end for end, _ in under_way)
            under_way = [(end, other) for end, other in under_way if end > now]
        under_way.append((now + leg.budget_minutes, leg))
    return max(end for end, _ in under_way)


def test_legs_that_run_beside_others_add_what_lasts_longest() -> None:
    one, both = (lambda minutes: Leg("", (), minutes, cores=1)), (lambda minutes: Leg("", (), minutes))
    assert minutes_of([one(3), one(5), one(10), both(2), one(1)]) == 16


def test_the_budgets_of_the_gate_fit_into_the_time_of_ci() -> None:
    drills = Leg("drills", ("true",), MINUTES)
    assert minutes_of((*SUITES["gate"], drills)) <= MOST_MINUTES < CI_MINUTES


def test_no_leg_waits_for_more_cores_than_there_are() -> None:
    assert {leg.cores for leg in legs_of(["gate", "check", "test", "drills"])} == {1, CORES}


def test_the_gate_ends_with_the_drills_of_its_commit() -> None:
    names = [leg.name for leg in legs_of(["gate"])]
    assert names[: len(SUITES["gate"])] == [leg.name for leg in SUITES["gate"]]
    assert names[len(SUITES["gate"]) - 1] == DEMO.name
    assert set(names[len(SUITES["gate"]) :]) <= {f"drill-{name}" for name in DRILLS}
    assert len(names) > len(SUITES["gate"])


def test_drills_run_alone_and_by_name() -> None:
    assert [leg.name for leg in legs_of(["drills"])] == [f"drill-{name}" for name in DRILLS]
    assert all(leg.cores == CORES for leg in legs_of(["drills"]))
    with pytest.raises(SystemExit, match="there is no leg 'drill-none'"):
        list(legs_of(["drill-none"]))
