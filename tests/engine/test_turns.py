"""Turns of processes that compute with the same cores, with real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mmd_workers.engine.pacing import cpu_turns
from mmd_workers.engine.pacing.cpu_turns import Turns
from mmd_workers.engine.runner import EngineRunner
from support.oracles.engine_oracle import TextModel, generate, llama, make_engine, prompt_of, text_input

OTHER = """
import sys, time
from pathlib import Path
from mmd_workers.engine.pacing.cpu_turns import POLL_SECONDS, Turns

turns = Turns(Path(sys.argv[1]))
waits = False
while not turns.take():
    if not waits:
        waits = True
        print("waits", flush=True)
    time.sleep(POLL_SECONDS)
print("computes", flush=True)
sys.stdin.readline()
turns.leave()
print("done", flush=True)
sys.stdin.readline()
"""


class Other:
    """A separate process that takes one turn, and holds it until told to end its step."""

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-c", OTHER, str(file)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self) -> str:
        """Its next word; it comes within the test's time limit."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end_step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "turns"


@pytest.fixture
def other(file: Path) -> Iterator[Callable[[], Other]]:
    """Starts another process."""
    with ExitStack() as started:

        def start() -> Other:
            one = Other(file)
            started.callback(one.end)
            return one

        yield start


@pytest.fixture
def own(file: Path) -> Iterator[Turns]:
    made = Turns(file)
    yield made
    made.close()


def until_taken(own: Turns) -> float:
    """Ask as an engine's thread does; how long it took."""
    begun = time.monotonic()
    while not own.take():
        time.sleep(cpu_turns.POLL_SECONDS)
    return time.monotonic() - begun


def test_one_computes_after_the_other_and_nobody_twice_while_another_waits(
    own: Turns, other: Callable[[], Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_turns, "PATIENCE_SECONDS", 60.0)
    assert own.take()
    second = other()
    assert second.says() == "waits"
    own.give()
    assert not own.take(), "the other is next"
    assert second.says() == "computes"
    assert not own.take()
    second.end_step()
    assert second.says() == "done"
    until_taken(own)
    own.give()
    assert own.take(), "nobody else waits"


def test_a_process_that_is_killed_in_its_turn_holds_nobody_up(
    own: Turns, other: Callable[[], Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_turns, "PATIENCE_SECONDS", 60.0)
    first = other()
    assert first.says() == "computes"
    assert not own.take()
    first.end()
    until_taken(own)


def test_a_process_that_is_frozen_in_its_turn_delays_another_once(
    own: Turns, other: Callable[[], Other]
) -> None:
    first = other()
    assert first.says() == "computes"
    first.process.send_signal(signal.SIGSTOP)
    assert until_taken(own) >= cpu_turns.PATIENCE_SECONDS
    for _ in range(3):
        own.give()
        assert own.take(), "it computes beside the other"
    own.leave()
    first.process.send_signal(signal.SIGCONT)
    first.end_step()
    assert first.says() == "done"
    assert own.take()
    assert other().says() == "waits", "turns are taken again"


def test_who_has_nothing_to_compute_any_more_leaves_the_queue(own: Turns, other: Callable[[], Other]) -> None:
    first = other()
    assert first.says() == "computes"
    assert not own.take()
    own.leave()
    first.end_step()
    assert first.says() == "done"
    assert other().says() == "computes"


BUSY = """
import sys, time
from pathlib import Path
from mmd_workers.engine.pacing.cpu_turns import POLL_SECONDS, Turns

turns, steps, end = Turns(Path(sys.argv[1])), [float(s) for s in sys.argv[3].split(",")], time.monotonic() + float(sys.argv[2])
taken = vain = 0
while time.monotonic() < end:
    while not turns.take():
        time.sleep(POLL_SECONDS)
    taken, vain = taken + 1, vain + (not turns._holds)
    time.sleep(steps[taken - 1] if taken <= len(steps) else steps[-1])
    turns.give()
print(taken, vain, flush=True)
"""


@pytest.mark.parametrize(
    "steps",
    [["0.02", "0.1,0.1,0.7,0.1"], ["0.02", "0.1", "0.1"], ["0.03"] * 4],
    ids=["one step takes long", "three", "four"],
)
def test_busy_processes_keep_taking_turns(file: Path, steps: list[str]) -> None:
    command = [sys.executable, "-c", BUSY, str(file), "4"]
    running = [subprocess.Popen([*command, own], stdout=subprocess.PIPE, text=True) for own in steps]
    for process in running:
        taken, vain = map(int, process.communicate(timeout=60)[0].split())
        assert vain <= taken / 4 + 2, f"{vain} of {taken} steps ran beside another"
        assert taken >= 3


async def test_an_engine_takes_commands_while_it_waits_for_its_turn(
    file: Path, other: Callable[[], Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_turns, "PATIENCE_SECONDS", 60.0)
    first = other()
    assert first.says() == "computes"
    model, prompt, tokens = TextModel(llama()), prompt_of(9, 1), list[int]()
    runner = EngineRunner(
        make_engine(model),
        lambda output: tokens.extend(token.token_id for token in output.tokens),
        turns=Turns(file),
    )
    runner.start()
    try:
        await runner.call(lambda engine: engine.add(text_input(model, "a", prompt, 5)))
        assert await runner.call(lambda engine: engine.stats().waiting_sequences) == 1
        await runner.call(lambda engine: engine.abort("a"))
        second = other()
        assert second.says() == "waits"
        first.end_step()
        assert second.says() == "computes", "the engine has no work, and does not wait any more"
        second.end_step()
        await runner.call(lambda engine: engine.add(text_input(model, "b", prompt, 5)))
        while len(tokens) < 5:
            await runner.call(lambda engine: None)
        assert tokens == generate(llama(), prompt, 5)
    finally:
        assert await runner.stop(10)
