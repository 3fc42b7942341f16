"""`ci.run` runs all legs whatever fails, and its summary names every failure; what may have failed by chance runs once more."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ci import run as module
from ci.drills import Choice
from ci.legs import PYTEST, Leg
from ci.run import Run, finish, only_run, run_again, run_legs, summary
from support.harness.waiting import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.processes
REPOSITORY = Path(__file__).parents[2]
CASES = """
import os
import pathlib
import subprocess
import threading
import time
import pytest

def test_hangs():
    time.sleep(900)

def test_passes():
    pass

def test_pure():
    assert 1 == 2, "a defect"

@pytest.mark.processes
def test_by_chance():
    first = pathlib.Path("first")
    if not first.exists():
        first.touch()
        raise TimeoutError("the first time")

@pytest.mark.processes
def test_skips_then():
    second = pathlib.Path("second")
    if second.exists():
        pytest.skip("not now")
    second.touch()
    raise TimeoutError

@pytest.mark.processes
@pytest.mark.deployment
def test_wrong_answer():
    assert "red" == "blue"

@pytest.mark.processes
@pytest.mark.deployment
def test_slow_answer():
    third = pathlib.Path("third")
    if not third.exists():
        third.touch()
        raise TimeoutError

@pytest.mark.processes
def test_exits():
    os._exit(0)

@pytest.mark.processes
def test_promise():
    class BrokenPromiseError(AssertionError):
        pass
    raise BrokenPromiseError("a request was lost")

@pytest.mark.processes
def test_printed():
    print("promises.BrokenPromiseError: " + "a request was lost")
    once(TimeoutError())

def once(error):
    path = pathlib.Path(os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split()[0])
    if not path.exists():
        path.touch()
        raise error

@pytest.mark.processes
def test_late_group():
    once(ExceptionGroup("all", [TimeoutError(), subprocess.TimeoutExpired("any", 1)]))

@pytest.mark.processes
@pytest.mark.timeout(1)
def test_pytest_timeout():
    path = pathlib.Path("hung")
    if not path.exists():
        path.touch()
        time.sleep(60)

@pytest.fixture
def program():
    once(ConnectionRefusedError())

@pytest.mark.processes
def test_starting(program):
    pass

@pytest.mark.processes
def test_twice():
    once(TimeoutError("the first time"))
    raise AssertionError("the second time")

@pytest.mark.processes
def test_slow_program():
    once(subprocess.TimeoutExpired("any", 1))

@pytest.mark.processes
def test_wrong_state():
    once(AssertionError("a job was lost"))

@pytest.mark.processes
def test_wrong_group():
    once(ExceptionGroup("all", [TimeoutError(), AssertionError("a job was lost")]))

@pytest.mark.processes
def test_client_error():
    once(ValueError("no answer"))

@pytest.mark.processes
def test_connection_lost():
    once(ConnectionResetError())

@pytest.mark.processes
def test_did_not_raise():
    once(pytest.fail.Exception("DID NOT RAISE KeyError"))

@pytest.mark.processes
def test_late_cleanup():
    try:
        once(AssertionError("a job was lost"))
    except AssertionError as error:
        try:
            raise error
        finally:
            raise subprocess.TimeoutExpired("any", 1)

@pytest.mark.processes
@pytest.mark.promise
def test_marked():
    once(TimeoutError())

@pytest.mark.processes
def test_in_a_thread():
    thread = threading.Thread(target=once, args=[TimeoutError()])
    thread.start()
    thread.join()
"""


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "logs")
    monkeypatch.setattr(module, "TEST_MINUTES", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x")
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "test_cases.py").write_text(CASES)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["support.harness.legs"]\n')
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  processes\n  system\n  deployment\n  drill\n  promise\n"
    )
    return tmp_path


def leg_of(expression: str) -> Leg:
    return Leg("cases", (sys.executable, *PYTEST, "-k", expression, "cases"), 5)


def test_every_leg_runs_and_the_summary_names_what_failed_with_its_output(cases: Path) -> None:
    legs = (
        leg_of("passes or pure"),
        Leg("broken", ("sh", "-c", "echo no such disk; exit 3"), 1),
        Leg("good", ("true",), 1),
    )
    runs = run_legs(legs)
    text = summary(runs, [])
    assert [run.status for run in runs] == [1, 3, 0]
    assert "FAILED cases/test_cases.py::test_pure" in text
    assert "a defect" in text
    assert "no such disk" in text
    assert text.splitlines()[-1] == "2 passed, 2 failed, 0 skipped"


def test_a_test_that_passes_alone_is_flaky_and_fails_no_leg(cases: Path) -> None:
    (run,) = run_legs([leg_of("passes or chance")])
    assert not run.passed
    flaky = run_again(run)
    assert flaky == ["cases/test_cases.py::test_by_chance"]
    assert run.passed
    assert "FLAKY (passed alone) cases/test_cases.py::test_by_chance" in summary([run], flaky)


def test_a_deployment_that_was_too_slow_has_a_second_chance(cases: Path) -> None:
    (run,) = run_legs([leg_of("slow_answer")])
    assert run_again(run) == ["cases/test_cases.py::test_slow_answer"]


@pytest.mark.parametrize("expression", ["late_group", "pytest_timeout", "starting", "slow_program"])
def test_only_what_came_too_late_has_a_second_chance(cases: Path, expression: str) -> None:
    (run,) = run_legs([leg_of(expression)])
    assert len(run_again(run)) == 1


@pytest.mark.parametrize(
    "expression",
    [
        *("chance or pure", "pure", "promise", "chance or promise", "wrong_answer", "printed"),
        *("wrong_state", "wrong_group", "client_error", "connection_lost", "did_not_raise", "in_a_thread"),
        *("late_cleanup", "marked"),
    ],
)
def test_neither_pure_tests_nor_findings_nor_broken_promises_run_again(cases: Path, expression: str) -> None:
    (run,) = run_legs([leg_of(expression)])
    assert run_again(run) == []
    assert not run.passed


def test_the_summary_shows_how_a_test_failed_the_second_time(cases: Path) -> None:
    (run,) = run_legs([leg_of("twice")])
    assert run_again(run) == []
    assert not run.passed
    assert "AssertionError: the second time" in summary([run], []).partition("   alone:\n")[2]


def test_a_second_run_in_the_same_checkout_is_refused(cases: Path) -> None:
    with (
        only_run(),
        pytest.raises(SystemExit, match=r"another run uses .*logs; wait until it has ended"),
        only_run(),
    ):
        pytest.fail("both run")
    with only_run():
        pass


def test_no_leg_outlives_a_run_that_is_killed(cases: Path) -> None:
    leg = f"Leg('any', ({sys.executable!r}, '-c', 'import time; print(1, flush=True); time.sleep(900)'), 5)"
    program = f"from ci.legs import Leg; from ci import run; from pathlib import Path; run.FOLDER = Path('logs'); run.run_legs([{leg}])"
    killed = subprocess.Popen([sys.executable, "-c", program], cwd=cases)
    log = cases / "logs" / "any.log"
    try:
        wait_until(lambda: log.exists() and log.read_text(), "the leg runs")
        (child,) = psutil.Process(killed.pid).children()
    finally:
        killed.kill()
        killed.wait(DEADLINE_SECONDS)
    psutil.wait_procs([child], DEADLINE_SECONDS)
    assert not child.is_running()


def test_a_leg_far_beyond_its_budget_ends_with_process_stacks(cases: Path) -> None:
    hangs = leg_of("passes or hangs")
    (run,) = run_legs([replace(hangs, budget_minutes=0.25)])
    assert run.ended_late
    assert not run.passed
    assert "in test_hangs" in run.log.read_text()
    text = summary([run], [])
    assert "ended after 0.5 min, with a budget of 0.25 min" in text
    assert "-- FAILED cases/test_cases.py::test_hangs: it had begun when cases ended" in text
    assert "test_passes" not in text.partition("-- FAILED")[2]


def test_a_program_that_is_ended_may_remove_what_it_has_made(cases: Path) -> None:
    program = "trap 'echo removed; exit 1' TERM; while :; do sleep 0.1; done"
    (run,) = run_legs([Leg("made", ("sh", "-c", program), 0.01)])
    assert run.log.read_text().endswith("removed\n")


def test_a_leg_that_outlasts_the_total_limit_is_ended(cases: Path) -> None:
    begun = time.monotonic() - 60 * module.MOST_MINUTES
    (run,) = run_legs([Leg("late", ("sleep", "900"), 5)], begun)
    assert not run.passed
    assert "ended after 80 min of all legs together" in summary([run], [])


def test_legs_start_in_order_as_soon_as_their_cores_are_free(cases: Path) -> None:
    """The first leg ends only once the third has run beside it; the fourth needs all cores and waits for both."""
    opened = "until test -e {}; do sleep 0.05; done"
    legs = [
        Leg("until-c", ("sh", "-c", f"touch a; {opened.format('c')}"), 1, cores=1),
        Leg("short", ("sh", "-c", opened.format("a")), 1, cores=1),
        Leg("c", ("touch", "c"), 1, cores=1),
        Leg("all-cores", ("sh", "-c", "test -e c && touch d"), 1),
        Leg("after", ("test", "-e", "d"), 1, cores=1),
    ]
    runs = run_legs(legs)
    assert [run.status for run in runs] == [0, 0, 0, 0, 0]
    ends = [run.begun + run.seconds for run in runs]
    assert runs[3].begun >= max(ends[:3])
    assert runs[4].begun >= ends[3]


def test_the_leg_beside_one_that_does_not_end_is_watched_meanwhile(
    cases: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Leg, "end_seconds", 10.0)
    stubborn = Leg("stubborn", ("sh", "-c", "trap '' TERM; while :; do sleep 1; done"), 0.01, cores=1)
    run_legs([stubborn, Leg("other", ("sleep", "3"), 5, cores=1)])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["other", "stubborn"]


def test_the_summary_says_what_a_leg_and_its_processes_have_computed(cases: Path) -> None:
    computes = f"{sys.executable} -c 'sum(range(10**8))'"
    (run,) = run_legs([Leg("computes", ("sh", "-c", f"{computes}; {computes}"), 5)])
    assert run.cpu_seconds > 0
    assert f"CPU {run.cpu_seconds:.0f} s" in summary([run], [])


def test_processes_of_a_leg_keep_what_they_compile(cases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (run,) = run_legs(
        [Leg("any", (sys.executable, "-c", "import sys; sys.exit(sys.dont_write_bytecode)"), 5)]
    )
    assert run.passed


def test_flaky_tests_that_are_known_are_shown_and_do_not_count(
    cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"test_{number}" for number in range(module.MAX_FLAKY + 1)]
    monkeypatch.setattr(module, "KNOWN_FLAKY", frozenset(names[:1]))
    run = Run(Leg("any", ("true",), 1), status=0)
    run.outcomes = [{"test": names[0], "outcome": "failed", "seconds": 0.1, "system": True, "output": ""}]
    text = summary([run], names)
    assert f"FLAKY (passed alone) (known) {names[0]}" in text
    assert "are allowed" not in text


def test_more_flaky_tests_than_are_allowed_fail_the_run(cases: Path) -> None:
    names = [f"test_{number}" for number in range(module.MAX_FLAKY + 1)]
    assert "3 flaky tests that ci/flaky.toml does not name, 2 are allowed" in summary(
        [Run(Leg("any", ("true",), 1), status=0)], names
    )


def test_skipped_tests_are_counted_by_their_reasons(cases: Path) -> None:
    (cases / "second").touch()
    (run,) = run_legs([leg_of("skips")])
    assert "-- skipped\n        1    not now\n" in summary([run], [])


def test_a_test_that_is_skipped_the_second_time_has_not_passed(cases: Path) -> None:
    (run,) = run_legs([leg_of("skips")])
    assert run_again(run) == []
    assert not run.passed


def test_a_pytest_that_ends_in_the_middle_has_not_passed(cases: Path) -> None:
    (run,) = run_legs([leg_of("passes or exits")])
    assert run.status == 0
    assert not run.passed
    assert summary([run], []).splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


def test_a_leg_without_its_program_fails_and_the_others_run(cases: Path) -> None:
    missing, good = run_legs([Leg("missing", ("no-such-program",), 1, cores=1), Leg("good", ("true",), 1)])
    assert (missing.status, good.status) == (127, 0)
    assert "no-such-program cannot be run" in summary([missing, good], [])


def test_an_outcome_that_was_cut_off_is_none(cases: Path) -> None:
    run = Run(leg_of("any"), status=0)
    run.outcome_file.parent.mkdir()
    run.outcome_file.write_text(
        '{"test": "a", "outcome": "passed", "seconds": 0.1, "system": false, "output": ""}\n{"tes'
    )
    finish(run)
    assert [line["test"] for line in run.outcomes] == ["a"]
    assert not run.passed


def test_what_is_not_run_is_the_last_thing_said_before_the_failures(cases: Path) -> None:
    (run,) = run_legs([leg_of("passes")])
    text = summary([run], [], ["NOT RUN: drill-x, whose files changed"])
    assert "\n-- NOT RUN: drill-x, whose files changed\n" in text


@pytest.mark.parametrize(("second", "status"), [("true", 0), ("false", 1)])
def test_a_run_fails_with_any_leg_and_only_gates_are_limited(
    cases: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], second: str, status: int
) -> None:
    legs = [Leg("first", ("true",), 1), Leg("second", (second,), 1)]
    limited: list[bool] = []

    def recorded(legs: list[Leg], gate_begun: float | None = None) -> list[Run]:
        limited.append(gate_begun is not None)
        return run_legs(legs, gate_begun)

    monkeypatch.setattr(module, "run_legs", recorded)
    monkeypatch.setattr(module, "legs_of", lambda _: legs)
    monkeypatch.setattr(module, "chosen", lambda: Choice((), ("NOT RUN: drill-x",)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert module.main(["drills"]) == status
    assert limited == [False]
    assert "NOT RUN" not in capsys.readouterr().out
    assert module.main(["gate"]) == status
    assert limited == [False, True]
    assert capsys.readouterr().out.count("NOT RUN: drill-x") == 2
