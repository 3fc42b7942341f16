"""Child processes with a pod's manners: prefixed logs, restarts with backoff, an orderly stop that leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mmd_workers.errors import PeerLostError
from mmd_workers.local.forkserver import ForkedProcess, ForkServer
from mmd_workers.local.pods import LocalPod

BACKOFF_SECONDS = (0.5, 30.0)
STEADY_SECONDS = 60.0  # a process that ran this long starts its backoff anew
MAX_LINE_BYTES = 16_384
OWN = "MMD_"  # variables that only our own programs read, once they run


@dataclass(slots=True)
class Child:
    """One pod's process over its restarts."""

    pod: LocalPod
    process: ForkedProcess | None = None
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
    _servers: dict[frozenset[tuple[str, str]], ForkServer] = field(default_factory=dict)

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
        try:
            child.process = await self._server_for(pod).start(
                pod.command, pod.environment, pod.nice, MAX_LINE_BYTES
            )
        except PeerLostError as error:
            self.log(pod.name, error.message)
            return 1
        while True:
            try:
                line = await child.process.output.readline()
            except ValueError:  # longer than the limit: what was read is dropped
                self.log(pod.name, f"(a line of more than {MAX_LINE_BYTES} bytes)")
                continue
            if not line:
                break
            child.last_line = line.decode(errors="replace").rstrip()
            self.log(pod.name, child.last_line)
        return await child.process.ended

    def _server_for(self, pod: LocalPod) -> ForkServer:
        """Pods may share what is imported if all that libraries could read of their environments is the same."""
        environment = {name: value for name, value in pod.environment.items() if not name.startswith(OWN)}
        return self._servers.setdefault(frozenset(environment.items()), ForkServer(environment))

    async def close(self) -> None:
        """Stop all pods, and what started them."""
        await self.stop()
        await asyncio.gather(*(server.close() for server in self._servers.values()))

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
