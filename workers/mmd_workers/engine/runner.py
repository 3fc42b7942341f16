"""The engine on a dedicated thread: commands go in between steps, outputs come out on an asyncio loop. Independent of the network."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

import torch

from mmd_api.contract.errors import DeviceLostError, EngineDeadError, OverloadedError
from mmd_workers.basics.device import check_device
from mmd_workers.engine.interface import StepOutput
from mmd_workers.engine.pacing.cpu_turns import POLL_SECONDS, Turns

T = TypeVar("T")
log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0  # an idle thread reports progress this often
MAX_COMMANDS = 4096
MAX_OUTPUTS = 256  # outputs the loop has not taken yet; then the engine waits


class Stepped(Protocol):
    """An engine that runs one batch at a time. Not thread safe."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def has_work(self) -> bool:
        """Whether a step may do something."""
        ...

    def step(self) -> StepOutput:
        """Run one batch. Empty output: nothing can run until a command changes something."""
        ...


E = TypeVar("E", bound=Stepped)


class EngineRunner(Generic[E]):
    """Owns an engine from `start` to `stop`; everything else reaches it through `call`.

    `on_output` runs on the loop, in order, for every step that did something, and its consumer calls `taken` after each;
    while 256 are pending, the engine waits. `on_dead` runs once, when the thread ends by an error.
    `turns`: where others compute with the same cores; `step` runs in a turn, commands do not wait for one.
    `last_progress` (time.monotonic) moves with every command, step and idle turn: a stuck model stops it.
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
        self._room = threading.BoundedSemaphore(MAX_OUTPUTS)
        self._calls_wait = False  # for room in the command queue
        self._drained = asyncio.Event()
        self._looks = ThreadPoolExecutor(1, thread_name_prefix="looks")
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.error: BaseException | None = None
        self.last_progress = time.monotonic()

    def start(self) -> None:
        """Start the thread; outputs go to the running loop."""
        self._loop = asyncio.get_running_loop()
        self.last_progress = time.monotonic()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; the liveness probe checks this and `last_progress`."""
        return self._thread.is_alive() and self.error is None

    def submit(self, command: Callable[[E], T]) -> Future[T]:
        """Run `command(engine)` between two steps; from any thread.

        Raises:
            OverloadedError: too many commands wait.
            EngineDeadError: the thread has ended.
        """
        future: Future[T] = Future()
        with self._wake:
            if self._stopping or self.error is not None:
                raise EngineDeadError(
                    f"the engine has stopped ({self.error or 'stopped'}); place the request elsewhere"
                )
            if len(self._commands) >= MAX_COMMANDS:
                raise OverloadedError(f"{MAX_COMMANDS} engine commands are waiting; try another worker")
            self._commands.append((command, future))
            self._wake.notify()
        return future

    async def call(self, command: Callable[[E], T]) -> T:
        """`submit` for coroutines on the loop of `start`: the command's result or its exception. A cancelled call that has not
        begun never runs. While the queue is full the call waits, until the engine's next turn at the latest.

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

    async def look(self, read: Callable[[E], T]) -> T:
        """The result of `read(engine)`, which only looks single entries up, on another thread beside the steps: it waits for none. That is one
        thread for all, since Python runs one at a time, and steps shall not wait for many. If `read` meets a change it raises RuntimeError or
        StopIteration, and is asked again between two steps.

        Raises:
            EngineDeadError: the thread has ended.
        """
        if not self.alive:
            return await self.call(read)  # which says why
        try:
            return await asyncio.get_running_loop().run_in_executor(self._looks, _looked, read, self._engine)
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
        """Wake the calls that wait for room in the queue. Called with the lock held."""
        if self._calls_wait and self._loop is not None and not self._loop.is_closed():
            self._calls_wait = False
            self._loop.call_soon_threadsafe(self._drained.set)

    def taken(self) -> None:
        """One output has been dealt with."""
        self._room.release()

    async def stop(self, timeout_seconds: float) -> bool:
        """End after the current step; commands still waiting fail. False: the thread did not end in time (it is a daemon)."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._looks.shutdown(wait=False)
        if self._thread.ident is None:
            return True
        await asyncio.to_thread(self._thread.join, timeout_seconds)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            standing = waiting = False
            while self._obey_all(self._wait_seconds(standing=standing, waiting=waiting)):
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
                # An empty step means that every sequence waits for a feature or for blocks: only a command changes that.
                idle = not (output.prefill_tokens or output.decode_sequences)
                standing = idle and not output.changed
                if not idle or output.failed or output.admitted:
                    self._post(output)
                self.last_progress = time.monotonic()
        except (
            Exception
        ) as error:  # the thread's last resort: whatever it was, the engine's state is unknown now
            log.exception("the engine failed")
            self.error = error
            if self._on_dead is not None and self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._on_dead, error)
        finally:
            if self._turns is not None:
                self._turns.close()
            self._fail_commands()

    def _wait_seconds(self, *, standing: bool, waiting: bool) -> float:
        """How long to wait for a command, where there is none."""
        if waiting:
            return POLL_SECONDS
        return IDLE_SECONDS if standing or not self._engine.has_work() else 0.0

    def _obey_all(self, wait_seconds: float) -> bool:
        """Run all waiting commands, after waiting for the first. False: stop now."""
        with self._wake:
            if wait_seconds and not self._commands and not self._stopping:
                self._wake.wait(wait_seconds)
            if self._stopping:
                return False
            waiting = len(self._commands)
        for _ in range(
            waiting
        ):  # one by one: those behind one that finds the device lost are failed, not forgotten
            with self._wake:
                command, future = self._commands.popleft()
            if future.set_running_or_notify_cancel():
                self._obey(command, future)
        with self._wake:
            self._wake_calls()
        self.last_progress = time.monotonic()
        return True

    def _obey(self, command: Callable[[E], Any], future: Future[Any]) -> None:
        """Run one command. Any exception goes to its caller; if the device is lost, it also ends the thread."""
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
        while not self._room.acquire(timeout=IDLE_SECONDS):
            if self._stopping:
                return
            self.last_progress = time.monotonic()  # the consumer of the outputs is slow, not the model
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


def _looked(read: Callable[[E], T], engine: E) -> T:
    try:
        return read(engine)
    except StopIteration as error:  # no future can hold it
        raise RuntimeError("the engine changed meanwhile") from error
