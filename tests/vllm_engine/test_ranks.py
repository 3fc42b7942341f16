"""Ranks of tensor parallelism: who learns that one has ended, and what ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from support.harness.processes import children
from support.harness.waiting import wait_until

from . import cores

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300), cores.needs_ranks]
DEADLINE_SECONDS = 60.0
TWO = {"tensorParallelSize": 2}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cores.checkpoint("llava", tmp_path_factory.mktemp("models"))


@pytest.fixture
def lost() -> Queue[str]:
    """What was reported of ranks that ended."""
    return Queue()


@pytest.fixture
def split(llava: Path, lost: Queue[str]) -> Iterator[Any]:
    core = cores.make(llava, vllm=TWO, rank_lost=lost.put)
    yield core
    for rank in ranks(core):
        rank.proc.kill()
    core.shut_down()


def ranks(core: Any) -> list[Any]:
    return list(core._core.model_executor.workers)


def test_a_rank_that_ends_is_reported_while_another_hangs(split, lost):
    first, second = ranks(split)
    os.kill(first.proc.pid, signal.SIGSTOP)
    os.kill(second.proc.pid, signal.SIGKILL)
    assert lost.get(timeout=DEADLINE_SECONDS) == "rank 1 of vLLM was killed (SIGKILL), perhaps for its memory"
    first.proc.join(DEADLINE_SECONDS)
    assert not first.proc.is_alive(), "it would wait for the other one, and hold its memory"


def test_a_request_whose_step_a_rank_ended_is_placed_again(split, lost):
    first, second = ranks(split)
    split.add("a", cores.text_request([1, 2, 3]), stop_after_prefill=False)
    os.kill(first.proc.pid, signal.SIGSTOP)
    killer = threading.Timer(1.0, os.kill, (second.proc.pid, signal.SIGKILL))
    killer.start()
    try:
        assert not split.step().failed, "it ran alone, and did nothing wrong"
    finally:
        killer.cancel()
        killer.join(DEADLINE_SECONDS)
    with pytest.raises(RuntimeError):
        split.step()


def test_a_request_that_has_ended_engines_before_is_not_placed_again(split, lost):
    request = replace(cores.text_request([1, 2, 3]), engine_failures=2)
    split.add("a", request, stop_after_prefill=False)
    os.kill(ranks(split)[1].proc.pid, signal.SIGKILL)
    lost.get(timeout=DEADLINE_SECONDS)
    assert [name for name, _ in split.step().failed] == ["a"]


def test_several_ranks_have_the_metrics_of_one_engine(split, llava, lost):
    """Ranks that the pod itself stops are not reported as lost."""
    split.add("a", cores.text_request([1, 2, 3], 5), stop_after_prefill=False)
    cores.step(split)
    counted = {
        (sample.name, sample.labels["engine"]): sample.value
        for family in split.metrics.registry.collect()
        for sample in family.samples
        if "generation_tokens" in sample.name and "request" not in sample.name
    }
    assert counted["vllm:generation_tokens_total", "0"] == 5
    assert {engine for _, engine in counted} == {"0"}
    whole = cores.served(llava).language.loaded_bytes
    assert whole <= split.loaded_bytes < 1.1 * whole, "norms are on both"
    split.shut_down()
    assert not any(rank.proc.is_alive() for rank in ranks(split))
    assert lost.empty()


PARENT = """
import sys
from pathlib import Path
from tests.vllm_engine import cores
cores.make(Path(sys.argv[1]), vllm={"tensorParallelSize": 2})
"""


def spawned(pid: int) -> list[int]:
    """Processes of vLLM that a process has started."""
    return [child for child in children(pid) if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_no_rank_outlives_a_pod_that_is_killed_while_it_starts(llava: Path) -> None:
    """Not even one that waits for another, which ended with the pod."""
    with subprocess.Popen([sys.executable, "-c", PARENT, str(llava)]) as pod:
        wait_until(lambda: pod.poll() is not None or len(spawned(pod.pid)) == 2)
        first, second = spawned(pod.pid)
        pod.kill()
        os.kill(second, signal.SIGKILL)
    try:
        wait_until(lambda: not running(first))
    finally:
        if running(first):
            os.kill(first, signal.SIGKILL)
