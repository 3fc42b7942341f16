"""The messages between a gateway and its endpoint picker process: lines of JSON over pipes. Independent of both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from mmd_api.contract.picker import MIN_MEMORY_MEBIBYTES
from mmd_workers.gateway.picker.picks import GatewayLoad

MIN_MEMORY_BYTES, MAX_MEMORY_BYTES = MIN_MEMORY_MEBIBYTES << 20, 1 << 30
MEMORY_DIVISOR = 4
MAX_SAMPLES = 512
MAX_OUTPUT_BYTES = 16 << 10
"""The most bytes that the process may write to standard error, which is logged when it ends."""
MAX_COUNT = 1_000_000_000
MAX_SECONDS = 3600.0

PickOutcome = Literal[
    "picked", "passed", "no_gateway", "too_large", "invalid", "late", "too_many", "unread", "failed"
]
"""`late`: the request did not arrive in time, which its client caused. `unread`: the proxy took no answer in time."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first line that the process reads.

    `port`: 0 chooses a free one. `request_seconds`: how long a request may take at its gateway. `memory_bytes`: limit of the heap, from which
    the limits on messages and streams follow; an allocation beyond it fails, which ends the process and nothing else.
    """

    address: str
    port: int
    tls: bool
    request_seconds: float
    memory_bytes: int = MAX_MEMORY_BYTES


@dataclass(frozen=True, slots=True)
class View:
    """Each later line that the process reads: the gateway's view of the gateways.

    `is_current`: the gateway would know of a change. `drain_seconds`: take no more streams, and end after this time or when none is left.
    """

    gateways: Sequence[GatewayLoad]
    max_body_bytes: int
    drain_seconds: float | None = None
    is_current: bool = True

    @staticmethod
    def of(line: bytes) -> View:
        """Parse a line from the gateway."""
        view = json.loads(line)
        return View(**{**view, "gateways": [GatewayLoad(**gateway) for gateway in view["gateways"]]})


@dataclass(frozen=True, slots=True)
class Report:
    """Each line that the process writes: its port, its open streams, and the outcomes since the previous line.

    `seconds`: how long answers took, at most `MAX_SAMPLES`.
    """

    port: int
    streams: int
    outcomes: Mapping[PickOutcome, int]
    seconds: Sequence[float]

    @staticmethod
    def of(line: bytes) -> Report:
        """Parse a line from the process. The line is checked, because a peer may have taken over the process.

        Raises:
            ValueError: the line is not a report.
        """
        report = json.loads(line)
        if not (
            isinstance(report, dict)
            and report.keys() == {"port", "streams", "outcomes", "seconds"}
            and all(_is_count(report[name]) for name in ("port", "streams"))
            and isinstance(report["outcomes"], dict)
            and report["outcomes"].keys() <= set(get_args(PickOutcome))
            and all(map(_is_count, report["outcomes"].values()))
            and isinstance(report["seconds"], list)
            and len(report["seconds"]) <= MAX_SAMPLES
            and all(isinstance(s, float) and 0 <= s <= MAX_SECONDS for s in report["seconds"])
        ):
            raise ValueError("this is no report")
        return Report(**report)


def picker_bytes(present: int) -> int:
    """The memory for the process, in a container with `present` bytes. The rest is for the gateway."""
    return max(MIN_MEMORY_BYTES, min(MAX_MEMORY_BYTES, present // MEMORY_DIVISOR))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= MAX_COUNT


def line_of(message: Setup | View | Report) -> bytes:
    """Encode a message as a line."""
    return json.dumps(asdict(message)).encode() + b"\n"
