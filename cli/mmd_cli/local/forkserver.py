"""Forks processes from one that has already imported everything: a pod starts in 0.1 s instead of 5 s.

Importing torch and transformers is most of a worker's start, and the same each time; a machine that runs a
whole deployment would do it for every pod and every restart. `ForkServer` is the side of `mmd up`;
`python -m mmd_cli.local.forkserver` is the process that forks. Orders reach it through its standard input,
each with the file descriptor for the new process's output. It reports their results on its standard output,
one line of JSON each.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from subprocess import SubprocessError

from mmd_api.contract.errors import PeerLostError
from mmd_workers.basics.imports import frozen_imports
from mmd_workers.wire.server import die_with_parent

PROGRAM = "mmd"
IMPORTED = ("mmd_workers.worker", "mmd_workers.gateway.process.gateway_process", "torch._dynamo")
FORKS_PROGRAMS = sys.platform == "linux"
"""Whether programs are forked.

Elsewhere libraries' threads do not survive a fork, so a pod is a new interpreter.
"""
MAX_ORDER_BYTES = 131_072
MAX_REASON_CHARACTERS = 1000
LAST_WORDS_SECONDS = 5.0  # forked processes may still hold the server's standard error
IDLE_NICE = 20
"""One more than the highest niceness of Linux: such a process runs only where no other would."""


@dataclass(frozen=True, slots=True)
class Order:
    """A request for a new process. `nice`: 0 to `IDLE_NICE`."""

    number: int
    command: list[str]
    environment: dict[str, str]
    nice: int


@dataclass(slots=True)
class ForkedProcess:
    """A process in its own group, which Ctrl-C does not reach. Everything it prints arrives in `output`."""

    pid: int
    output: asyncio.StreamReader
    ended: asyncio.Future[int]

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.ended.result() if self.ended.done() else None


@dataclass(slots=True)
class ForkServer:
    """Starts processes. The server starts with the first one, and ends with the thread that started it.

    All processes end with the server. `environment`: variables that libraries may read while they are
    imported; a process's own variables are set after that. `python`: the interpreter, and so the environment,
    of all processes; empty: the current one. `imported`: modules that they have besides `IMPORTED`.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    imported: Sequence[str] = ()
    _orders: socket.socket | None = None
    _listening: asyncio.Task[None] | None = None
    _pids: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    _ended: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    _number: int = 0
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], nice: int, max_line_bytes: int
    ) -> ForkedProcess:
        """Run a command. `mmd` is this installation's, whether or not its folder is on the PATH.

        Raises:
            PeerLostError: it could not be started; the message has the reason.
        """
        loop = asyncio.get_running_loop()
        async with self._starting:
            if self._orders is None:
                await self._start_server()
        assert self._orders is not None
        orders = self._orders
        self._number += 1
        order = Order(self._number, list(command), dict(environment), nice)
        started = self._pids[order.number] = loop.create_future()
        ended = self._ended[order.number] = loop.create_future()
        output = asyncio.StreamReader(limit=max_line_bytes)
        read, write = os.pipe()
        await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, output), os.fdopen(read, "rb", 0))
        try:
            socket.send_fds(orders, [json.dumps(asdict(order)).encode()], [write])
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has ended: `_listen` reports its exit status to all waiters
        except OSError as error:
            del self._pids[order.number], self._ended[order.number]
            raise PeerLostError(f"the fork server does not accept commands ({error})") from error
        finally:
            os.close(write)
        return ForkedProcess(await started, output, ended)

    async def close(self) -> None:
        """End the server and all its processes that still run."""
        if self._orders is not None and self._listening is not None:
            self._orders.close()
            await self._listening

    async def _start_server(self) -> None:
        orders, server_end = socket.socketpair()
        orders.setblocking(False)
        with server_end, contextlib.ExitStack() as unless_started:
            # A server that starts nevertheless ends when its orders end.
            unless_started.callback(orders.close)
            try:
                server = await asyncio.create_subprocess_exec(
                    *(self.python or sys.executable, "-m", __name__, *self.imported),
                    env={**os.environ, **self.environment, "PYTHONUNBUFFERED": "1"},
                    stdin=server_end.fileno(),
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    process_group=0,
                    preexec_fn=die_with_parent,
                )
            except (OSError, SubprocessError) as error:
                raise PeerLostError(f"the fork server cannot be started ({error})") from error
            unless_started.pop_all()
        self._orders = orders
        self._listening = asyncio.create_task(self._listen(server), name="fork-server")

    async def _show_errors(self, stderr: asyncio.StreamReader, tail: list[str]) -> None:
        """Pass on the server's standard error until it ends.

        Its last characters stay in `tail`, with the reason if the server could not start.
        """
        while piece := await stderr.read(MAX_ORDER_BYTES):
            text = piece.decode(errors="replace")
            sys.stderr.write(text)
            tail[:] = ["".join((*tail, text))[-MAX_REASON_CHARACTERS:]]

    async def _listen(self, server: asyncio.subprocess.Process) -> None:
        assert server.stdout is not None
        assert server.stderr is not None
        tail: list[str] = []
        showing = asyncio.create_task(self._show_errors(server.stderr, tail))
        while line := await server.stdout.readline():
            reply = json.loads(line)
            started, ended = self._pids.pop(reply["number"], None), self._ended[reply["number"]]
            if "pid" not in reply:
                del self._ended[reply["number"]]
                if not ended.done():
                    ended.set_result(reply["status"])
                if started is not None and not started.done():
                    started.set_exception(PeerLostError(f"no process: {reply['why']}"))
            elif started is not None and started.cancelled():  # nobody awaits it any more
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(reply["pid"], signal.SIGKILL)
            elif started is not None:
                started.set_result(reply["pid"])
        status = await server.wait()
        # Orders that come meanwhile fail like the earlier ones.
        await asyncio.wait({showing}, timeout=LAST_WORDS_SECONDS)
        self._orders = None
        showing.cancel()
        reason = "".join(tail).rstrip().rpartition("\n")[2] or "it said nothing"
        for started in self._pids.values():
            if not started.done():
                started.set_exception(PeerLostError(f"the fork server exited with status {status}: {reason}"))
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result(-signal.SIGKILL)
        self._pids.clear()
        self._ended.clear()


@dataclass(slots=True)
class ForkServers:
    """Fork servers by environment and interpreter.

    Processes share a server if libraries could read the same variables while they are imported. All calls
    must come from one event loop.
    """

    _servers: dict[tuple[str, tuple[str, ...], frozenset[tuple[str, str]]], ForkServer] = field(
        default_factory=dict
    )

    def server(self, environment: Mapping[str, str], python: str, imported: Sequence[str]) -> ForkServer:
        """The server for such processes, which starts with the first of them."""
        key = (python, tuple(imported), frozenset(environment.items()))
        return self._servers.setdefault(key, ForkServer(dict(environment), python, imported))

    async def close(self) -> None:
        """End the servers and all their processes that still run."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))


def serve() -> Order | None:
    """Fork on order. Returns the order in each new process, and None in this one when orders end."""
    begin, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    orders = socket.socket(fileno=os.dup(0))
    children: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        selector.register(begin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is begin:
                    begin.recv(4096)
                    _reap(children)
                    continue
                # One order at a time: a call receives no more than the order that its descriptor belongs to.
                text, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 1)
                if not text:
                    return None
                order = Order(**json.loads(text))
                try:
                    pid = os.fork()
                except OSError as error:
                    _reply(number=order.number, status=1, why=str(error))
                    os.close(descriptors[0])
                    continue
                if pid == 0:
                    _leave_the_server(order, descriptors[0])
                    return order
                children[pid] = order.number
                os.close(descriptors[0])


def _reap(children: dict[int, int]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _reply(
                number=children.pop(pid),
                status=os.waitstatus_to_exitcode(status),
                why="it exited immediately",
            )


def _leave_the_server(order: Order, output: int) -> None:
    """Drop all state of the server in the new process, except its imports."""
    die_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Not a session: Linux may give each session an equal share of the cores, whatever the niceness in it.
    os.setpgid(0, 0)
    if sys.platform == "linux" and order.nice == IDLE_NICE:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    elif order.nice:
        os.nice(order.nice)
    _reply(number=order.number, pid=os.getpid())
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, standard)
    os.close(nothing)
    os.close(output)
    os.environ.update(order.environment)


def _reply(**words: object) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def main() -> None:
    """Import, then fork. A forked process becomes its command here."""
    if FORKS_PROGRAMS:
        # Look for GPUs without CUDA, which must be initialized after the fork.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        with frozen_imports():
            from mmd_workers.process.identity import code_fingerprint

            for name in (*IMPORTED, *sys.argv[1:]):
                importlib.import_module(name)
            # Taken from the imported code: forked processes do not run files that change later.
            code_fingerprint()
    order = serve()
    if order is None:
        return
    if order.command[0] != PROGRAM:
        try:
            os.execvp(order.command[0], order.command)  # noqa: S606
        except OSError as error:
            sys.exit(f"{order.command[0]} cannot be run: {error.strerror}")
    if not FORKS_PROGRAMS:
        os.execv(sys.executable, [sys.executable, "-m", "mmd_cli", *order.command[1:]])  # noqa: S606
    from mmd_cli.program import main as program

    sys.argv = list(order.command)
    program()


if __name__ == "__main__":
    main()
