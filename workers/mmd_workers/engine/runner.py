"""Runs an engine on a dedicated thread. Commands run between steps, and outputs arrive on an asyncio loop.
Independent of the network."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from mmd_api.contract.errors import DeviceLostError, EngineDeadError, OverloadedError
from mmd_workers.basics.device import check_device
from mmd_workers.engine.interface import StepOutput
from mmd_workers.engine.pacing.cpu_turns import POLL_SECONDS, Turns

T = TypeVar("T")
log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0  # interval at which an idle thread reports progress
MAX_COMMANDS = 4096
MAX_OUTPUTS = 256  # the engine waits while the loop has this many outputs to take


class Stepped(Protocol):
    """An engine that runs one batch at a time. Not thread safe."""

    @property
    def device(self) -> torch.device:
        """Device that computes the steps."""
        ...

    def has_work(self) -> bool:
        """True if a step may do something."""
        ...

    def step(self) -> StepOutput:
        """Run one batch. Empty output: nothing can run until a command changes something."""
        ...


E = TypeVar("E", bound=Stepped)


class EngineRunner(Generic[E]):
    """Owns an engine from `start` to `stop`; everything else reaches it through `call`.

    `on_output` runs on the loop, in order, for every step that did something. Its consumer calls `taken`
    after each; while 256 are pending, the engine waits. `on_dead` runs once, when an error ends the thread.
    `turns`: set where other engines compute on the same cores. A `step` then waits for its turn; commands do
    not. `last_progress` (time.monotonic) advances with every command, step and idle turn; it stands still
    when the model is stuck.
    """

    def __init__(
        self,
        engine: E,
        on_output: Callable[[StepOutput], None],
        on_dead: Callable[[BaseException], None] | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._engine = engine
        self._on_output = on_output
        self._on_dead = on_dead
        self._turns = turns
        self._commands: deque[tuple[Callable[[E], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._output_slots = threading.BoundedSemaphore(MAX_OUTPUTS)
        self._calls_wait = False  # calls wait for space in the command queue
        self._drained = asyncio.Event()
        self._asides = ThreadPoolExecutor(1, thread_name_prefix="beside-engine")
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.error: BaseException | None = None
        self.last_progress = time.monotonic()

    def start(self) -> None:
        """Start the thread. Outputs go to the running loop."""
        self._loop = asyncio.get_running_loop()
        self.last_progress = time.monotonic()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the thread runs. The liveness probe checks this and `last_progress`."""
        return self._thread.is_alive() and self.error is None

    def submit(self, command: Callable[[E], T]) -> Future[T]:
        """Run `command(engine)` between two steps. May be called from any thread.

        Raises:
            OverloadedError: too many commands wait.
            EngineDeadError: the thread has ended.
        """
        future: Future[T] = Future()
        with self._wake:
            if self._stopping or self.error is not None:
                raise self._ended()
            if len(self._commands) >= MAX_COMMANDS:
                raise OverloadedError(f"{MAX_COMMANDS} engine commands are waiting; try another worker")
            self._commands.append((command, future))
            self._wake.notify()
        return future

    def _ended(self) -> EngineDeadError:
        return EngineDeadError(
            f"the engine has stopped ({self.error or 'stopped'}); place the request elsewhere"
        )

    def post(self, command: Callable[[E], object]) -> None:
        """Run a command like `submit`, in order with all others, without waiting for it.

        A full queue takes it nevertheless: what frees the engine must not wait for it. So callers post no
        more than a few commands for each sequence. An error is logged. Nothing runs once the thread has ended.
        """
        future: Future[object] = Future()
        future.add_done_callback(_log_failure)
        with self._wake:
            if not self._stopping and self.error is None:
                self._commands.append((command, future))
                self._wake.notify()

    async def call(self, command: Callable[[E], T]) -> T:
        """Run a command like `submit`, from a coroutine on the loop of `start`, and return its result or
        raise its exception.

        A cancelled call that has not begun never runs. While the queue is full the call waits, at most until
        the engine's next turn.

        Raises:
            EngineDeadError: the thread has ended.
        """
        while True:
            try:
                future = self.submit(command)
            except OverloadedError:
                await self._until_drained()
            else:
                return await asyncio.wrap_future(future)

    async def aside(self, work: Callable[[E], T]) -> T:
        """Return `work(engine)`, called on another thread without waiting for a step. `work` may only read what
        never changes in the engine.

        All work and all looks share one thread: Python runs one at a time, and steps must not wait for many.

        Raises:
            EngineDeadError: the thread of the engine has ended.
        """
        if self._stopping or self.error is not None:
            raise self._ended()
        return await asyncio.get_running_loop().run_in_executor(self._asides, work, self._engine)

    async def look(self, read: Callable[[E], T]) -> T:
        """Return `read(engine)`, called like work `aside`. `read` may look up single entries too.

        If it meets a concurrent change it raises RuntimeError or StopIteration, and is called again between
        two steps.

        Raises:
            EngineDeadError: the thread of the engine has ended.
        """
        try:
            return await self.aside(partial(_looked, read))
        except RuntimeError:
            return await self.call(read)

    async def _until_drained(self) -> None:
        self._drained.clear()
        with self._wake:
            if len(self._commands) < MAX_COMMANDS:
                return
            self._calls_wait = True
        await self._drained.wait()

    def _wake_calls(self) -> None:
        """Wake the calls that wait for space in the queue. The caller holds the lock."""
        if self._calls_wait and self._loop is not None and not self._loop.is_closed():
            self._calls_wait = False
            self._loop.call_soon_threadsafe(self._drained.set)

    def taken(self) -> None:
        """Report that one output has been processed."""
        self._output_slots.release()

    async def stop(self, timeout_seconds: float) -> bool:
        """Stop after the current step. Waiting commands fail. False: the thread did not end in time (it is a daemon)."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._asides.shutdown(wait=False)
        if self._thread.ident is None:
            return True
        await asyncio.to_thread(self._thread.join, timeout_seconds)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            stalled = waiting = False
            while self._obey_all(self._wait_seconds(stalled=stalled, waiting=waiting)):
                if not self._engine.has_work():
                    if self._turns is not None:
                        self._turns.leave()
                        waiting = False
                    continue
                if waiting := self._turns is not None and not self._turns.take():
                    continue
                output = self._engine.step()
                if self._turns is not None:
                    self._turns.give()
                # After an empty step every sequence waits for a feature or for blocks: only a command changes that.
                idle = not (output.prefill_tokens or output.decode_sequences)
                stalled = idle and not output.changed
                if not idle or output.failed or output.admitted:
                    self._post(output)
                self.last_progress = time.monotonic()
        except Exception as error:
            # The thread's last resort: whatever failed, the engine's state is unknown now.
            log.exception("the engine failed")
            self.error = error
            if self._on_dead is not None and self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._on_dead, error)
        finally:
            if self._turns is not None:
                self._turns.close()
            self._fail_commands()

    def _wait_seconds(self, *, stalled: bool, waiting: bool) -> float:
        """Return how long to wait for a command."""
        if waiting:
            return POLL_SECONDS
        return IDLE_SECONDS if stalled or not self._engine.has_work() else 0.0

    def _obey_all(self, wait_seconds: float) -> bool:
        """Wait for a command, then run all that are queued. False: stop now."""
        with self._wake:
            if wait_seconds and not self._commands and not self._stopping:
                self._wake.wait(wait_seconds)
            if self._stopping:
                return False
            queued = len(self._commands)
        for _ in range(queued):
            # One by one: if a command finds the device lost, those behind it are still queued and get an error.
            with self._wake:
                command, future = self._commands.popleft()
            if future.set_running_or_notify_cancel():
                self._obey(command, future)
        with self._wake:
            self._wake_calls()
        self.last_progress = time.monotonic()
        return True

    def _obey(self, command: Callable[[E], Any], future: Future[Any]) -> None:
        """Run one command. An exception goes to the caller; if the device is lost, it also ends the thread."""
        try:
            result = command(self._engine)
        except Exception as error:  # noqa: BLE001
            try:
                check_device(error, self._engine.device)
            except DeviceLostError as lost:
                future.set_exception(lost)
                raise
            future.set_exception(error)
        else:
            future.set_result(result)

    def _post(self, output: StepOutput) -> None:
        while not self._output_slots.acquire(timeout=IDLE_SECONDS):
            if self._stopping:
                return
            self.last_progress = time.monotonic()  # the consumer of outputs is slow, not the model
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_output, output)

    def _fail_commands(self) -> None:
        with self._wake:
            self._stopping = True
            commands = list(self._commands)
            self._commands.clear()
            self._wake_calls()
        for _, future in commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineDeadError("the engine has stopped; place the request elsewhere"))


def _log_failure(posted: Future[object]) -> None:
    error = posted.exception()
    logged_by_thread = isinstance(error, (DeviceLostError, EngineDeadError))
    if error is not None and not logged_by_thread:
        log.error("an engine command failed: %s", error, exc_info=error)


def _looked(read: Callable[[E], T], engine: E) -> T:
    try:
        return read(engine)
    except StopIteration as error:  # no future can hold it
        raise RuntimeError("the engine changed meanwhile") from error
