"""What a gateway and the process of its endpoint picker write to each other: lines of JSON over pipes. Independent of both."""

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
"""Of what the process may write to standard error, which is logged when it ends."""
MAX_COUNT = 1_000_000_000
MAX_SECONDS = 3600.0

PickOutcome = Literal[
    "picked", "passed", "no_gateway", "too_large", "invalid", "late", "too_many", "unread", "failed"
]
"""`late`: the request did not arrive in time, which is its client's doing. `unread`: the proxy took no answer in time."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first line in. `port` 0: a free one. `request_seconds`: how long a request may take at its gateway. `memory_bytes`: of the heap; the bounds of messages and streams follow from it, and beyond it an
    allocation fails, which ends the process and nothing else.
    """

    address: str
    port: int
    tls: bool
    request_seconds: float
    memory_bytes: int = MAX_MEMORY_BYTES


@dataclass(frozen=True, slots=True)
class View:
    """Each line after it: what the gateway knows. `is_current`: it would know of a change. `drain_seconds`: take no stream any more, and
    end after so long, or when none is left.
    """

    gateways: Sequence[GatewayLoad]
    max_body_bytes: int
    drain_seconds: float | None = None
    is_current: bool = True

    @staticmethod
    def of(line: bytes) -> View:
        """What the gateway wrote."""
        view = json.loads(line)
        return View(**{**view, "gateways": [GatewayLoad(**gateway) for gateway in view["gateways"]]})


@dataclass(frozen=True, slots=True)
class Report:
    """Each line out: where it listens, the streams that are open, and what has come since the line before. `seconds`: what answers took,
    `MAX_SAMPLES` at most.
    """

    port: int
    streams: int
    outcomes: Mapping[PickOutcome, int]
    seconds: Sequence[float]

    @staticmethod
    def of(line: bytes) -> Report:
        """What the process wrote, which may have been taken over by a peer.

        Raises:
            ValueError: it is no report.
        """
        found = json.loads(line)
        if not (
            isinstance(found, dict)
            and found.keys() == {"port", "streams", "outcomes", "seconds"}
            and all(_is_count(found[name]) for name in ("port", "streams"))
            and isinstance(found["outcomes"], dict)
            and found["outcomes"].keys() <= set(get_args(PickOutcome))
            and all(map(_is_count, found["outcomes"].values()))
            and isinstance(found["seconds"], list)
            and len(found["seconds"]) <= MAX_SAMPLES
            and all(isinstance(s, float) and 0 <= s <= MAX_SECONDS for s in found["seconds"])
        ):
            raise ValueError("this is no report")
        return Report(**found)


def picker_bytes(present: int) -> int:
    """Of the memory of a container with so much, what the process may take. The rest is the gateway's."""
    return max(MIN_MEMORY_BYTES, min(MAX_MEMORY_BYTES, present // MEMORY_DIVISOR))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= MAX_COUNT


def line_of(message: Setup | View | Report) -> bytes:
    """To be written."""
    return json.dumps(asdict(message)).encode() + b"\n"
