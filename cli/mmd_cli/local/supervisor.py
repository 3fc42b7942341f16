"""Runs the processes of `mmd up`, pods and nats-server, with logs, probes, restarts and an orderly stop.

Log lines have prefixes, and restarts back off. A process that does not come back in a bounded number of
starts, or does not stay, is given up, and the whole run with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx

from mmd_api.contract import paths
from mmd_api.contract.environment import PREFIX
from mmd_api.contract.errors import PeerLostError
from mmd_api.contract.logs import last_reason
from mmd_cli.errors import CommandError
from mmd_cli.local.engines import Interpreter
from mmd_cli.local.forkserver import ForkedProcess, ForkServer, ForkServers
from mmd_cli.local.pods import LocalPod
from mmd_cli.local.state import EXITED
from mmd_workers.basics.clock import SYSTEM_CLOCK, Clock
from mmd_workers.wire.server import NatsServer

BACKOFF_SECONDS = (0.5, 30.0)
MAX_FUTILE_STARTS = 5  # starts in a row that end before the process is Ready
MAX_CRASHES = 10  # ends in a row, each before the process had been Ready for STABLE_SECONDS
STABLE_SECONDS = 60.0
READY_POLL_SECONDS = 0.5
KILLED_SECONDS = 10.0  # time that a killed process has to end
LIVENESS_PERIOD_SECONDS = 10.0
LIVENESS_TIMEOUT_SECONDS = 5.0
LIVENESS_FAILURES = 3  # probes in a row that the process does not answer
# Probes in a row that report an engine without progress: on few cores one step may take minutes.
STALLED_FAILURES = 60
START_SECONDS = 3600.0  # time in which a process must load
NATS = "nats-server"
MAX_LINE_BYTES = 16_384
MAX_FAULT_CHARACTERS = 500


class GaveUpError(CommandError):
    """A process ended, and did not come back, or did not stay, in a bounded number of starts."""


@dataclass(slots=True)
class PodProcess:
    """One pod's process over its restarts."""

    pod: LocalPod
    process: ForkedProcess | None = None
    restarts: int = 0
    started: float = 0.0  # by the supervisor's clock
    last_line: str = ""
    reason: str = ""  # why it last ended, in its own words
    ready_since: float = 0.0  # by the supervisor's clock; 0: not Ready since its last start
    stopping: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def last_output(self) -> str:
        """Why it ended, in its own words if it gave any."""
        return self.reason or self.last_line or "nothing"

    @property
    def ready(self) -> bool:
        """Whether it has been Ready since its last start."""
        return self.ready_since > 0

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self.process.pid if self.process is not None and self.process.returncode is None else None


@dataclass(slots=True)
class Supervisor:
    """Runs pods as processes in their own groups.

    `log(pod, line)` takes what they print, `gave_up` the error that ends the run. `shared_servers`: fork
    servers that others use too, and that outlive this supervisor; without them, it has its own.
    """

    log: Callable[[str, str], None]
    gave_up: Callable[[GaveUpError], None] = lambda _: None
    interpreter: Interpreter = field(default_factory=Interpreter)
    clock: Clock = SYSTEM_CLOCK
    children: dict[str, PodProcess] = field(default_factory=dict)
    shared_servers: ForkServers | None = None
    _servers: ForkServers = field(default_factory=ForkServers)

    def start(self, pod: LocalPod) -> PodProcess:
        """Run a pod until `stop` or until it is given up, and restart it whenever it ends."""
        child = PodProcess(pod)
        self.children[pod.name] = child
        child.task = self.supervise(pod.name, self._keep_running(child))
        return child

    def supervise(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run the work that keeps a process running.

        If that work itself fails, the run is given up, because nothing would restart the process any more.
        """

        def failed(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.gave_up(
                    GaveUpError(
                        f"the supervision of {name} failed with {type(error).__name__}: {error}; nothing would restart it; run `mmd up` again"
                    )
                )

        task = asyncio.create_task(work, name=f"supervise-{name}")
        task.add_done_callback(failed)
        return task

    async def _keep_running(self, child: PodProcess) -> None:
        futile = crashes = 0
        while not child.stopping:
            child.started, child.ready_since, child.reason = self.clock.now(), 0.0, ""
            watch = asyncio.create_task(self._probe(child), name=f"probe-{child.pod.name}")
            try:
                code = await self._run_once(child)
            finally:
                watch.cancel()
            if child.stopping:
                return
            stable = child.ready and self.clock.now() - child.ready_since >= STABLE_SECONDS
            futile = 0 if child.ready else futile + 1
            crashes = 1 if stable else crashes + 1
            if futile >= MAX_FUTILE_STARTS:
                self.gave_up(
                    GaveUpError(
                        f"{child.pod.name} exited {futile} times in a row before it became Ready, last with code {code}; last output: "
                        f"{child.last_output}"
                    )
                )
                return
            if crashes >= MAX_CRASHES:
                self.gave_up(
                    GaveUpError(
                        f"{child.pod.name} exited {crashes} times in a row, each time before it had been Ready for {STABLE_SECONDS:.0f} s, last with "
                        f"code {code}; last output: {child.last_output}"
                    )
                )
                return
            pause = _backoff(crashes - 1)
            self._print(child.pod.name, f"{EXITED} {code}; restarting in {pause:.1f} s")
            await self.clock.sleep(pause)
            child.restarts += 1

    async def _probe(self, child: PodProcess) -> None:
        """Record when the process is Ready, and kill it if that takes too long.

        It is also killed if its liveness probe fails, as by a kubelet.
        """
        name, url = child.pod.name, child.pod.admin_url
        async with httpx.AsyncClient(timeout=LIVENESS_TIMEOUT_SECONDS) as client:
            why = await self._not_ready(child, client, f"{url}{paths.READYZ}") or await self._not_alive(
                client, f"{url}{paths.LIVEZ}"
            )
        self._print(name, f"{why}; killing the process")
        self._signal(child, signal.SIGKILL)

    async def keep_nats(self, nats: NatsServer) -> None:
        """Restart nats-server whenever it ends by itself, on its port and with its data.

        Ends when cancelled or given up. Run it on a thread that lasts: the server ends with the thread that
        started it.
        """
        crashes, started = 0, self.clock.now()
        while True:
            while not nats.crashed:
                await self.clock.sleep(READY_POLL_SECONDS)
            crashes = 1 if self.clock.now() - started >= STABLE_SECONDS else crashes + 1
            if crashes >= MAX_CRASHES:
                self.gave_up(
                    GaveUpError(
                        f"{NATS} exited {crashes} times in a row, each time within {STABLE_SECONDS:.0f} s of its start; no pod works without it"
                    )
                )
                return
            for futile in range(MAX_FUTILE_STARTS):
                pause = _backoff(crashes - 1 + futile)
                self._print(NATS, f"exited; restarting in {pause:.1f} s")
                await self.clock.sleep(pause)
                started = self.clock.now()
                try:
                    nats.spawn()
                    await asyncio.to_thread(nats.until_ready)
                except (PeerLostError, OSError) as error:  # such as a full disk, or no free process
                    reason = str(error)
                    self._print(NATS, reason)
                else:
                    self._print(NATS, f"available again at {nats.url}")
                    break
            else:
                self.gave_up(
                    GaveUpError(
                        f"{NATS} exited and did not recover within {MAX_FUTILE_STARTS} starts; no pod can work without it; last error: {reason}"
                    )
                )
                return

    async def _run_once(self, child: PodProcess) -> int:
        pod = child.pod
        try:
            child.process = await self._server_for(pod).start(
                pod.command, pod.environment, pod.nice, MAX_LINE_BYTES
            )
        except (PeerLostError, OSError) as error:
            child.reason = str(error)
            self._print(pod.name, child.reason)
            return 1
        while True:
            try:
                line = await child.process.output.readline()
            except ValueError:  # longer than the limit: the part read is dropped
                self._print(pod.name, f"(a line of more than {MAX_LINE_BYTES} bytes)")
                continue
            if not line:
                break
            child.last_line = line.decode(errors="replace").rstrip()
            child.reason = last_reason(child.last_line) or child.reason
            self._print(pod.name, child.last_line)
        return await child.process.ended

    def _server_for(self, pod: LocalPod) -> ForkServer:
        """The fork server for a pod.

        Pods may share imports if all variables that libraries could read are the same.
        """
        pod_variables = {
            name: value for name, value in pod.environment.items() if not name.startswith(PREFIX)
        }
        environment = {**self.interpreter.environment, **pod_variables}
        servers = self.shared_servers or self._servers
        return servers.server(environment, self.interpreter.python, self.interpreter.imported)

    async def close(self) -> None:
        """Stop all pods, and their fork servers unless they are shared."""
        await self.stop()
        await self._servers.close()

    async def stop(self, names: list[str] | None = None) -> None:
        """SIGTERM, then SIGKILL after each pod's grace period; returns when the processes have ended.

        One that a kernel cannot end is named in the log and left behind.
        """
        chosen = [self.children[name] for name in (names if names is not None else list(self.children))]
        await asyncio.gather(*(self._stop(child) for child in chosen))
        for child in chosen:
            self.children.pop(child.pod.name, None)

    def _print(self, name: str, line: str) -> None:
        """Log a line. If it cannot be written, the process that printed it continues.

        The disk may be full, or the terminal closed.
        """
        with contextlib.suppress(OSError):
            self.log(name, line)

    def kill(self) -> None:
        """Send SIGKILL to every pod that still runs. `stop` and `close` then return at once."""
        for child in self.children.values():
            child.stopping = True
            self._signal(child, signal.SIGKILL)

    async def _stop(self, child: PodProcess) -> None:
        child.stopping = True
        assert child.task is not None
        if child.process is None or child.process.returncode is not None:
            child.task.cancel()
        else:
            self._signal(child, signal.SIGTERM)
            done, _ = await asyncio.wait([child.task], timeout=child.pod.grace_seconds)
            if not done:
                self._print(child.pod.name, f"still running after {child.pod.grace_seconds:.0f} s; killed")
                self._signal(child, signal.SIGKILL)
        done, _ = await asyncio.wait([child.task], timeout=KILLED_SECONDS)
        if not done:
            self._print(child.pod.name, f"still there {KILLED_SECONDS:.0f} s after it was killed")
            child.task.cancel()

    async def _not_ready(self, child: PodProcess, client: httpx.AsyncClient, url: str) -> str:
        """Wait until the process is Ready; returns why it never will be, or empty."""
        while child.pid is None:
            await self.clock.sleep(READY_POLL_SECONDS)
        started = self.clock.now()
        while self.clock.now() - started < START_SECONDS:
            silent, fault = await self._probed(client, url)
            if not silent and not fault:
                child.ready_since = self.clock.now()
                return ""
            await self.clock.sleep(READY_POLL_SECONDS)
        return f"not Ready within {START_SECONDS:.0f} s of its start"

    async def _not_alive(self, client: httpx.AsyncClient, url: str) -> str:
        """Wait until the process counts as dead; returns why."""
        silences = failures = 0
        fault = ""
        while silences < LIVENESS_FAILURES and failures < STALLED_FAILURES:
            await self.clock.sleep(LIVENESS_PERIOD_SECONDS)
            silent, fault = await self._probed(client, url)
            silences = silences + 1 if silent else 0
            failures = failures + 1 if fault else 0
        return f"liveness probe failed {failures} times in a row, last with {fault}"

    @staticmethod
    async def _probed(client: httpx.AsyncClient, url: str) -> tuple[bool, str]:
        """Return whether a probe got no answer, and what is wrong, or an empty string."""
        try:
            answer = await client.get(url)
        except httpx.HTTPError as error:
            return True, f"{type(error).__name__} {error}".strip()
        if answer.status_code == 200:
            return False, ""
        return False, f"status {answer.status_code}: {answer.text[:MAX_FAULT_CHARACTERS]}"

    @staticmethod
    def _signal(child: PodProcess, number: signal.Signals) -> None:
        if child.process is not None and child.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, number)


def _backoff(earlier: int) -> float:
    """Seconds before the next start. `earlier`: starts in a row before the last one."""
    return float(min(BACKOFF_SECONDS[0] * 2**earlier, BACKOFF_SECONDS[1]))
