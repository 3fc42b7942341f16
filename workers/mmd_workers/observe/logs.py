"""Logs of every process: JSON lines for machines, short lines on a terminal, with pod, request and trace on each.

Nobody logs media, prompts or tensors. A line is bounded whatever it contains, and shows control characters instead of obeying them.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

MAX_MESSAGE_CHARACTERS = 4096
MAX_TRACEBACK_CHARACTERS = 8192

# C0, DEL, C1; line and paragraph separators; overrides, embeddings and isolates of direction.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_request: ContextVar[tuple[str, str]] = ContextVar("mmd_request", default=("", ""))


@contextmanager
def request_context(request_id: str, trace_id: str = "") -> Iterator[None]:
    """Put the ids on every line logged inside, also by tasks started inside."""
    token = _request.set((request_id, trace_id))
    try:
        yield
    finally:
        _request.reset(token)


def configure(pod: str, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send the process's logs to `stream` (stderr): readable on a terminal, JSON lines elsewhere. Replaces any earlier setup."""
    target = stream or sys.stderr
    handler = logging.StreamHandler(target)
    handler.setFormatter(_TerminalFormatter(pod) if target.isatty() else _JsonFormatter(pod))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)
    for chatty in ("httpx", "httpx2", "httpcore", "uvicorn.access", "PIL", "libav"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def set_level(level: str) -> None:
    """Log nothing below `level` (Debug, Info, Warning, Error) from now on."""
    logging.getLogger().setLevel(level.upper())


def printable(text: str, keep: str = "") -> str:
    """The text with control characters escaped, except those in `keep`: it cannot move a cursor, change a title or fake a line.

    Characters that turn the direction of text are among them.
    """
    return _CONTROL.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), text)


def _escape(character: str) -> str:
    return f"\\x{ord(character):02x}" if ord(character) < 0x100 else f"\\u{ord(character):04x}"


def _bounded(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"


class _JsonFormatter(logging.Formatter):
    def __init__(self, pod: str) -> None:
        super().__init__()
        self._pod = pod

    def format(self, record: logging.LogRecord) -> str:
        request_id, trace_id = _request.get()
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _bounded(record.getMessage(), MAX_MESSAGE_CHARACTERS),
            "pod": self._pod,
        }
        if request_id:
            line["request_id"] = request_id[:128]
        if trace_id:
            line["trace_id"] = trace_id[:128]
        if record.exc_info:
            line["exception"] = _bounded(self.formatException(record.exc_info), MAX_TRACEBACK_CHARACTERS)
        return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(line, ensure_ascii=False))


class _TerminalFormatter(logging.Formatter):
    def __init__(self, pod: str) -> None:
        super().__init__()
        self._pod = pod

    def format(self, record: logging.LogRecord) -> str:
        request_id, _ = _request.get()
        clock = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
        about = f" [{request_id[:128]}]" if request_id else ""
        text = printable(_bounded(record.getMessage(), MAX_MESSAGE_CHARACTERS))
        line = f"{clock} {record.levelname[:1]} {self._pod} {record.name.rpartition('.')[2]}{about}: {text}"
        if record.exc_info:
            traceback = _bounded(self.formatException(record.exc_info), MAX_TRACEBACK_CHARACTERS)
            line += "\n" + printable(traceback, keep="\n")
        return line


class RepeatedWarning:
    """A warning that may come often: logged once per key and interval, with the number of times it was kept back."""

    def __init__(self, log: logging.Logger, interval_seconds: float = 10.0, max_keys: int = 256) -> None:
        self._log = log
        self._interval_seconds = interval_seconds
        self._max_keys = max_keys
        self._last: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __call__(self, key: str, message: str, *arguments: object, now: float | None = None) -> bool:
        """Log `message % arguments` unless `key` was logged less than an interval ago; returns whether it was logged."""
        now = time.monotonic() if now is None else now
        last, kept_back = self._last.get(key, (float("-inf"), 0))
        if now - last < self._interval_seconds:
            self._last[key] = (last, kept_back + 1)
            return False
        self._last[key] = (now, 0)
        self._last.move_to_end(key)
        if len(self._last) > self._max_keys:
            self._last.popitem(last=False)
        suffix = f" ({kept_back} similar suppressed)" if kept_back else ""
        self._log.warning(message + "%s", *arguments, suffix)
        return True
