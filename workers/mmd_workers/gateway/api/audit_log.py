"""Writes the audit log from a dedicated thread. Lines that nobody reads are dropped and counted, so no request waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import select
import threading
from typing import Any

from mmd_workers.observe.logs import RepeatedWarning
from mmd_workers.observe.metrics import Metrics

MAX_LINES = 4096  # the capacity of the queue
CLOSE_SECONDS = 2.0
STANDARD_OUTPUT = 1

_warn = RepeatedWarning(logging.getLogger(__name__))


class AuditLog:
    """Writes lines to a file descriptor in order, from a thread."""

    def __init__(self, metrics: Metrics, descriptor: int = STANDARD_OUTPUT) -> None:
        self._metrics, self._descriptor = metrics, descriptor
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_LINES)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._is_cut = False  # whether the last line was written only in part

    def write(self, entry: dict[str, Any]) -> None:
        """Queue a line without waiting; it is dropped if the queue is full, and after `close`."""
        if self._closed:
            self._dropped("the gateway has closed it")
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="audit-log", daemon=True)
            self._thread.start()
        try:
            self._lines.put_nowait(json.dumps(entry).encode() + b"\n")
        except queue.Full:
            self._dropped("nobody reads standard output")

    async def close(self) -> None:
        """Wait until all queued lines are written, or until that takes too long."""
        self._closed = True
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except OSError as error:
                self._dropped(error.strerror or type(error).__name__)

    def _write(self, line: bytes) -> None:
        remaining = full_line = memoryview(b"\n" + line if self._is_cut else line)
        try:
            while remaining:
                try:
                    remaining = remaining[os.write(self._descriptor, remaining) :]
                except BlockingIOError:
                    self._wait_for_reader()
        finally:
            self._is_cut = bool(remaining) and (self._is_cut or len(remaining) < len(full_line))

    def _wait_for_reader(self) -> None:
        """Wait until the descriptor can be written: another process may have made the file behind it non-blocking."""
        ready = select.poll()
        ready.register(self._descriptor, select.POLLOUT)
        ready.poll()

    def _dropped(self, reason: str) -> None:
        self._metrics.audit_dropped.inc()
        _warn(
            "dropped", "a line of the audit log was dropped: %s; check what reads this pod's output", reason
        )
