"""Child processes with a pod's manners: prefixed logs, restarts with backoff, an orderly stop that leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mmd_workers.local.pods import LocalPod
from mmd_workers.wire.server import die_with_parent

BACKOFF_SECONDS = (0.5, 30.0)
STEADY_SECONDS = 60.0  # a process that ran this long starts its backoff anew
MAX_LINE_BYTES = 16_384
AUTOGROUP = Path("/proc/self/autogroup")


@dataclass(slots=True)
class Child:
    """One pod's process over its restarts."""

    pod: LocalPod
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    started: float = 0.0
    last_line: str = ""
    stopping: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self.process.pid if self.process is not None and self.process.returncode is None else None


@dataclass(slots=True)
class Supervisor:
    """Runs pods as processes of their own sessions; `log(pod, line)` takes what they print."""

    log: Callable[[str, str], None]
    children: dict[str, Child] = field(default_factory=dict)

    def start(self, pod: LocalPod) -> Child:
        """Run a pod until `stop`, starting it again whenever it ends."""
        child = Child(pod)
        self.children[pod.name] = child
        child.task = asyncio.create_task(self._keep_running(child), name=f"supervise-{pod.name}")
        return child

    async def _keep_running(self, child: Child) -> None:
        pause = BACKOFF_SECONDS[0]
        while not child.stopping:
            child.started = time.monotonic()
            code = await self._run_once(child)
            if child.stopping:
                return
            if time.monotonic() - child.started > STEADY_SECONDS:
                pause = BACKOFF_SECONDS[0]
            self.log(child.pod.name, f"ended with code {code}; starting again in {pause:.1f} s")
            await asyncio.sleep(pause)
            pause = min(pause * 2, BACKOFF_SECONDS[1])
            child.restarts += 1

    async def _run_once(self, child: Child) -> int:
        pod = child.pod
        child.process = await asyncio.create_subprocess_exec(
            *_command(pod.command),
            env={**os.environ, **pod.environment, "PYTHONUNBUFFERED": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(_begin, pod.nice),
            limit=MAX_LINE_BYTES,
        )
        assert child.process.stdout is not None
        while True:
            try:
                line = await child.process.stdout.readline()
            except ValueError:  # longer than the limit: what was read is dropped
                self.log(pod.name, f"(a line of more than {MAX_LINE_BYTES} bytes)")
                continue
            if not line:
                break
            child.last_line = line.decode(errors="replace").rstrip()
            self.log(pod.name, child.last_line)
        return await child.process.wait()

    async def stop(self, names: list[str] | None = None) -> None:
        """SIGTERM, then SIGKILL after each pod's grace period; returns when the processes are gone."""
        chosen = [self.children[name] for name in (names if names is not None else list(self.children))]
        await asyncio.gather(*(self._stop(child) for child in chosen))
        for child in chosen:
            self.children.pop(child.pod.name, None)

    async def _stop(self, child: Child) -> None:
        child.stopping = True
        assert child.task is not None
        if child.process is None or child.process.returncode is not None:
            child.task.cancel()
        else:
            self._signal(child, signal.SIGTERM)
            done, _ = await asyncio.wait([child.task], timeout=child.pod.grace_seconds)
            if not done:
                self.log(child.pod.name, f"still there after {child.pod.grace_seconds:.0f} s: killed")
                self._signal(child, signal.SIGKILL)
        with contextlib.suppress(asyncio.CancelledError):
            await child.task

    @staticmethod
    def _signal(child: Child, number: signal.Signals) -> None:
        if child.process is not None and child.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, number)


def _begin(nice: int) -> None:
    """In a child before it becomes its pod. Linux may weigh whole sessions against each other: then the session's own nice counts."""
    die_with_parent()
    if nice:
        os.nice(nice)
        with contextlib.suppress(OSError):
            AUTOGROUP.write_text(str(nice))


def _command(command: list[str]) -> list[str]:
    """`mmd` is this installation's, whether or not its folder is on the PATH."""
    if command[0] == "mmd":
        return [sys.executable, "-m", "mmd_api", *command[1:]]
    return command
