"""Runs the ranks of a split model: vLLM's workers, each in its own process, which live exactly as long as the
pod's process.

If a replica spans pods, each pod has its own ranks, and `mmd_workers.process.group` makes the pods end
together. vLLM's parent process learns only that a rank did not start, so a rank leaves the reason in a file.
If a rank ends later, vLLM waits seconds for the others to end before it reports that, so `RankExecutor`
watches the ranks itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProcHandle

from mmd_workers.vllm_engine.kv import PagedKv
from mmd_workers.vllm_engine.ranks.kv_of_ranks import KvShare, Place
from mmd_workers.vllm_engine.ranks.worker import MaskedWorker
from mmd_workers.vllm_engine.ranks.zeroing import zero_new_blocks
from mmd_workers.vllm_engine.reasons import reason

zero_new_blocks()  # each rank's process imports this module, and so does the engine's

FAULT_FILE = "MMD_VLLM_RANK_FAULT"  # environment variable: the file where a rank writes why it cannot start
PARENT_CHECK_SECONDS = 0.5
END_SECONDS = 0.5  # after a failed step, the end of the process that caused it is visible within this time
NOT_STARTED = "WorkerProc initialization failed"  # vLLM's text for any rank that ends before it has started
UNEXPLAINED = "a rank of vLLM ended before it had started and gave no reason; if it was killed for its memory, give the pod more"

RankLost = Callable[[str], object]


class RankError(Exception):
    """A rank did not start; the message is the reason."""


@contextmanager
def starting(config: VllmConfig, threads: int, lost: RankLost) -> Iterator[Callable[[VllmConfig], Executor]]:
    """Yield a function that makes the executor, to be called inside the context. Its ranks share the pod's threads.

    `lost`: called once from another thread if a rank ends afterwards, with a text that says which rank and how.

    Raises:
        RankError: in place of vLLM's error, if a rank gave a reason or has ended.
    """
    if config.parallel_config.world_size == 1:
        yield Executor.get_class(config)
        return
    ranks = config.parallel_config.local_world_size
    ended: list[str] = []
    started = threading.Event()

    def note(words: str) -> None:
        ended.append(words)
        if started.is_set():
            lost(words)

    with tempfile.TemporaryDirectory(prefix="mmd-ranks-") as folder:
        file = Path(folder) / "fault"
        variables = {FAULT_FILE: str(file), "OMP_NUM_THREADS": str(max(1, threads // ranks))}
        previous = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield partial(RankExecutor, lost=note)
            started.set()
        except Exception as error:
            if file.exists():
                raise RankError(file.read_text()) from None
            if str(error).startswith(NOT_STARTED):
                ended.append(UNEXPLAINED)
            if ended:
                raise RankError(ended[0]) from None
            raise
        finally:
            for name, value in previous.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
    if ended:
        lost(ended[0])


class RankExecutor(MultiprocExecutor):
    """vLLM's executor, which also reports the end of a rank at once, and ends the others.

    The other ranks would wait for it for minutes.
    """

    def __init__(self, config: VllmConfig, lost: RankLost) -> None:
        self._lost = lost
        self._reporting = threading.Lock()
        self._reported = False
        super().__init__(config)

    def start_worker_monitor(self, inline: bool = False) -> None:
        """Watch the ranks from a thread."""
        watch = threading.Thread(
            target=_watch, args=(weakref.ref(self), self.workers), daemon=True, name="ranks"
        )
        watch.start()

    def has_lost_a_rank(self) -> bool:
        """Return whether a rank has ended, and not merely failed in a step. Call this after a failed step."""
        return self.is_failed or bool(
            connection.wait([worker.proc.sentinel for worker in self.workers], END_SECONDS)
        )

    def end_with(self, ended: WorkerProcHandle) -> None:
        """Report a rank that has ended, and end the others."""
        self.is_failed = True
        ended.proc.join()  # does not wait, but reads the exit code
        self.fail(f"rank {ended.rank} of vLLM {_how(ended.proc.exitcode)}")

    def fail(self, words: str) -> None:
        """Report why the ranks cannot continue, unless a reason has been reported, and end them."""
        with self._reporting:
            first, self._reported = not self._reported, True
        if first:
            self._lost(words)
        self.give_up()

    def give_up(self) -> None:
        """End all ranks of this pod, because they would wait for a rank that has ended."""
        self.is_failed = True
        self.shutting_down = True  # so that their end is not reported
        for worker in self.workers:
            worker.proc.kill()
        self.shutting_down = False
        self.shutdown()


def _watch(executor: weakref.ref[RankExecutor], workers: list[WorkerProcHandle]) -> None:
    by_sentinel = {worker.proc.sentinel: worker for worker in workers}
    (first, *_) = connection.wait(list(by_sentinel))
    live_executor = executor()
    if live_executor is not None and not getattr(live_executor, "shutting_down", False):
        live_executor.end_with(by_sentinel[first])


def _how(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL), perhaps for its memory"
    if code is not None and code < 0:
        return f"was killed ({signal.Signals(-code).name})"
    return f"exited with code {code}"


def _explains(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except Exception as error:
            if (file := os.environ.get(FAULT_FILE)) is not None:
                part = Path(f"{file}.{os.getpid()}")
                part.write_text(reason(error))
                part.rename(file)
            raise

    return wrapped


def _end_with_parent() -> None:
    """End this process with its parent.

    vLLM's ranks notice their parent's end only after they have started, and only while none of them waits for another.
    """
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


class Rank(MaskedWorker):
    """vLLM's worker in its own process."""

    @_explains
    def __init__(self, *arguments: Any, **named: Any) -> None:
        os.setsid()  # signals to the process group are for the pod's process, which drains first
        threading.Thread(target=_end_with_parent, daemon=True, name="parent").start()
        super().__init__(*arguments, **named)

    @_explains
    def init_device(self) -> None:
        """Join the other ranks."""
        super().init_device()

    @_explains
    def load_model(self, *arguments: Any, **named: Any) -> None:
        """Make this rank's part of the model, and read its weights."""
        super().load_model(*arguments, **named)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            # Buffers for the previous stage's output. vLLM makes them while it measures memory, which it does only on GPUs.
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    def open_kv(self, block_tokens: int) -> Place:
        """Find the arrangement of this rank's KV, and return its place in the model's."""
        config, stages, stage = self.vllm_config, get_pp_group(), get_tp_group()
        layers = config.compilation_config.static_forward_context
        self._kv = KvShare(
            PagedKv(layers, block_tokens),
            total_heads=config.model_config.get_total_num_kv_heads(),
            stage=stages.rank_in_group,
            number=stage.rank_in_group,
            ranks_of_stage=stage.world_size,
        )
        return self._kv.place

    def read_kv(self, block_ids: list[int], start: int, end: int) -> list[torch.Tensor]:
        """Call `KvShare.read`."""
        return self._kv.read(block_ids, start, end)

    def write_kv(self, block_ids: list[int], start: int, tensors: list[list[torch.Tensor]]) -> None:
        """Call `KvShare.write`."""
        self._kv.write(block_ids, start, tensors)

    def clear_kv(self, block_ids: list[int]) -> None:
        """Call `KvShare.clear`."""
        self._kv.clear(block_ids)
