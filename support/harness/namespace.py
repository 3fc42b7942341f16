"""Runs programs in a network namespace that has loopback alone, where one port reaches a server of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PORT = 8000
"""The port in the namespace."""
_UNSHARE = (
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
_ENTER = """
import fcntl, os, socket, struct, sys
up = struct.pack("16sh14x", b"lo", 1)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x8914, up)
listening = socket.create_server(("127.0.0.1", int(sys.argv[2])))
with socket.socket(fileno=int(sys.argv[1])) as parent:
    socket.send_fds(parent, [b"x"], [listening.fileno()])
listening.close()
os.execvp(sys.argv[3], sys.argv[3:])
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that has ended, and what it wrote."""

    status: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """Everything that it wrote."""
        return self.stdout + self.stderr


@cache
def missing() -> str:
    """Why this machine cannot make such a namespace; empty if it can."""
    if shutil.which(_UNSHARE[0]) is None:
        return "no program 'unshare': install util-linux"
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, timeout=30)
    return f"unshare: {tried.stderr.strip()}; allow user namespaces" if tried.returncode else ""


async def run_without_outside(
    command: Sequence[object],
    *,
    server: tuple[str, int],
    environment: Mapping[str, str],
    folder: Path,
    seconds: float,
) -> Ended:
    """Run a program whose `127.0.0.1:PORT` is `server` and that reaches nothing else.

    All its processes end with it. It is killed after `seconds`, and then the status is negative.
    """
    with _pair() as (ours, theirs):
        arguments = [sys.executable, "-I", "-c", _ENTER, str(theirs.fileno()), str(PORT), *map(str, command)]
        process = await asyncio.create_subprocess_exec(
            *_UNSHARE,
            *arguments,
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
        )
        theirs.close()
        output = asyncio.create_task(process.communicate())
        server_there: asyncio.Server | None = None
        try:
            async with asyncio.timeout(seconds):
                server_there = await asyncio.start_server(_relay_to(*server), sock=await _listening(ours))
                await asyncio.shield(output)
        except TimeoutError:
            pass  # the status reports it
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = await output
            if server_there is not None:
                server_there.close()
    assert process.returncode is not None
    return Ended(process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace"))


@contextmanager
def _pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


async def _listening(ours: socket.socket) -> socket.socket:
    """The socket that listens in the namespace."""
    _, (descriptor,), _, _ = await asyncio.to_thread(socket.recv_fds, ours, 1, 1)
    listening = socket.socket(fileno=descriptor)
    listening.setblocking(False)
    return listening


def _relay_to(
    host: str, port: int
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        ways = [
            asyncio.create_task(_copy(reader, there_writer)),
            asyncio.create_task(_copy(there_reader, writer)),
        ]
        await asyncio.wait(ways)

    return relay


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy to the end or to a lost connection, and then close the copy as well."""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        writer.close()
