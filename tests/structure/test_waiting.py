"""A wait ends with the test's timeout, and pytest's report says what it waited for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.harness import waiting
from support.harness.promises import promise
from support.harness.waiting import eventually, until, wait_until

REPOSITORY = Path(__file__).parents[2]
CASES = """
import asyncio
import signal
import threading
import pytest
from support.harness.waiting import until, wait_until

@pytest.fixture(autouse=True)
def first():
    global is_first
    is_first = True

def complains():
    global is_first
    if is_first:
        is_first = False
        # pytest's timeout comes when something has been waited for, however slow the machine.
        _, again = signal.getitimer(signal.ITIMER_REAL)
        signal.setitimer(signal.ITIMER_REAL, 1.0, again)
    assert False, "two of three pods"

def never():
    assert False, "two of three pods"

def test_slowly():
    wait_until(complains, "all pods are ready")

def test_blocking():
    wait_until(complains, "all pods are ready")

async def test_asyncio():
    await until(complains, lambda: "all pods " + "are ready")

async def test_event():
    await until(complains, "all pods are ready", changed=asyncio.Event())

async def test_coroutine():
    async def asks():
        await asyncio.sleep(0.01)
        complains()
    await until(asks, "all pods are ready")

async def test_thread():
    await asyncio.to_thread(wait_until, complains, "all pods are ready")

@pytest.fixture
def started():
    wait_until(complains, "all pods are ready")

def test_fixture(started):
    pass

async def test_shorter():
    async with asyncio.timeout(0.2):
        await until(never, "all pods are ready")

async def test_callback():
    def busy():
        while True:
            pass
    complained = []
    async def asks():
        if not complained:
            complained.append(True)
            complains()
        asyncio.get_running_loop().call_soon(busy)  # asyncio logs whatever a callback raises
        await asyncio.Event().wait()
    await until(asks, "all pods are ready")

async def test_passes():
    await until(lambda: True)
"""


SLOW_REPORTS = """
import time
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    if call.excinfo is not None and item.name == "test_slowly":
        time.sleep(1.5)  # the timeout is repeated meanwhile
"""


@pytest.fixture
def report(tmp_path: Path):
    """What pytest prints of one of the cases, and the output that `ci.run` gets."""
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "conftest.py").write_text(
        'import support.harness.legs, support.harness.waiting\npytest_plugins = ["support.harness.legs"]\n'
        "support.harness.waiting.UNTIMED_SECONDS = 1.0\n"
        "support.harness.legs.TIMEOUT_AGAIN_SECONDS = 0.5\n" + SLOW_REPORTS
    )
    markers = "\n".join(f"  {name}" for name in ("processes", "system", "deployment", "drill"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nasyncio_mode = auto\nmarkers =\n{markers}\n")

    def run(case: str) -> str:
        outcomes = tmp_path / "outcomes"
        command = [sys.executable, "-m", "pytest", "--timeout=60", "-p", "no:cacheprovider", "-k", case]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={"PYTHONPATH": str(REPOSITORY), "PATH": "", "MMD_TEST_OUTCOMES": str(outcomes)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=waiting.DEADLINE_SECONDS,
        )
        assert done.returncode == 1, done.stdout
        assert "waited " in outcomes.read_text()
        return done.stdout

    return run


@pytest.mark.processes
@pytest.mark.parametrize(
    "case",
    ["slowly", "blocking", "asyncio", "event", "coroutine", "callback", "thread", "fixture", "shorter"],
)
def test_what_a_test_waited_for_in_vain_is_in_its_report(report, case: str) -> None:
    text = report(case)
    assert " s for: all pods are ready" in text
    assert "last complaint: AssertionError: two of three pods" in text
    assert 'assert False, "two of three pods"' in text
    assert "load average: " in text
    assert ("Timeout (>60.0s)" in text) is (case != "shorter")


async def test_the_value_of_the_condition_is_returned() -> None:
    answers = iter([None, 0, "", [7]])
    assert wait_until(lambda: next(answers), pause_seconds=0) == [7]
    answers = iter([None, 0, "", [7]])
    assert await until(lambda: next(answers), pause_seconds=0) == [7]


async def test_a_check_that_asserts_is_repeated() -> None:
    numbers = iter(range(5))

    def check() -> int:
        number = next(numbers)
        assert number == 3
        return number

    assert wait_until(check, pause_seconds=0) == 3
    numbers = iter(range(5))
    assert await until(check, pause_seconds=0) == 3


def test_the_value_of_a_check_that_asserts_may_be_false() -> None:
    found: dict[str, None] = {}

    def check() -> None:
        if len(found) < 2:
            found[str(len(found))] = None
            raise LookupError("not there yet")

    assert eventually(check) is None


@pytest.mark.parametrize("error", [KeyError("no such pod"), ConnectionError("refused")])
async def test_a_broken_condition_is_raised_at_once_with_what_was_waited_for(error: Exception) -> None:
    def broken() -> bool:
        raise error

    with pytest.raises(type(error)) as raised:
        wait_until(broken, "all pods are ready")
    assert "all pods are ready" in raised.value.__notes__[0]
    with pytest.raises(type(error)):
        await until(broken)


async def test_a_broken_promise_is_raised_at_once() -> None:
    with pytest.raises(AssertionError, match="a request was lost"):
        wait_until(lambda: promise(False, "a request was lost"))
    with pytest.raises(AssertionError, match="a request was lost"):
        await until(lambda: promise(False, "a request was lost"))


async def test_a_process_that_still_starts_may_refuse_connections() -> None:
    def answers() -> bool:
        if next(numbers) < 2:
            raise ConnectionRefusedError
        return True

    numbers = iter(range(5))
    wait_until(answers, retried=(ConnectionError,), pause_seconds=0)
    numbers = iter(range(5))
    await until(answers, retried=(ConnectionError,), pause_seconds=0)


async def test_a_condition_that_is_not_described_is_quoted(capfd: pytest.CaptureFixture[str]) -> None:
    pods: list[str] = []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await until(lambda: len(pods) == 3)
    assert "await until(lambda: len(pods) == 3)" in capfd.readouterr().err


def test_a_deadline_of_its_own_is_for_programs() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: all pods are ready"):
        wait_until(lambda: False, "all pods are ready", seconds=0.01)


def test_a_wait_that_no_timeout_of_pytest_will_end_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "UNTIMED_SECONDS", 0.05)
    monkeypatch.setattr(waiting.signal, "getitimer", lambda _: (0.0, 0.0))
    with pytest.raises(AssertionError, match="without a timeout of pytest"):
        wait_until(lambda: False)


def test_a_description_that_fails_does_not_hide_the_failure() -> None:
    with pytest.raises(AssertionError, match="its description failed: KeyError"):
        wait_until(lambda: False, lambda: {}["pods"], seconds=0.01)


async def test_an_event_ends_the_pause() -> None:
    changed, holds = asyncio.Event(), threading.Event()
    waits = asyncio.create_task(until(holds.is_set, changed=changed))
    await asyncio.sleep(0)
    holds.set()
    changed.set()
    await asyncio.sleep(0)
    assert await waits
