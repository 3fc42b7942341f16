"""Counts bytes of finished answers that clients have not yet received. Independent of HTTP.

A finished answer is in the kernel's send buffers, which hold megabytes if a client reads slowly. A pod's network ends with its process and
discards these buffers; the client then waits for the rest until its own timeout.
"""

from __future__ import annotations

from pathlib import Path

TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))  # for this network namespace
_LISTEN = "0A"


def undelivered_bytes(port: int) -> int:
    """The bytes sent from this local port that receivers have not acknowledged, including those on closed connections.

    Returns 0 if the kernel has no such table.
    """
    return sum(_unacknowledged(line, port) for table in TABLES for line in _lines(table))


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text().splitlines()[1:]
    except OSError:
        return []


def _unacknowledged(line: str, port: int) -> int:
    """The unacknowledged bytes of one connection.

    `line`: `sl local_address rem_address st tx_queue:rx_queue ...`, with numbers in hexadecimal.
    """
    _, local, _, state, queues, *_ = line.split()
    if int(local.rpartition(":")[2], 16) != port or state == _LISTEN:
        return 0
    return int(queues.partition(":")[0], 16)
