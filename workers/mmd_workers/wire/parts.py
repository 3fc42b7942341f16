"""Cuts requests larger than one NATS message into parts, and reassembles them within limits. Independent of connections.

Each part is a separate request, answered before the next is sent; the answer to the last part is the reply to the request.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from mmd_api.contract.errors import OverloadedError, WireError
from mmd_workers.wire.codec import MAX_REQUEST_BYTES

PART_HEADER = "Mmd-Part"
PART_BYTES = 768 << 10
MAX_ASSEMBLIES = 8  # requests that arrive in parts at the same time, on one subject
ASSEMBLY_SECONDS = 15.0  # a request expires after this long without a further part


def parts_of(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Header and bytes of every part, in order."""
    count, name = -(-len(data) // PART_BYTES), uuid.uuid4().hex
    for number in range(count):
        yield f"{name} {number} {count}", data[number * PART_BYTES : (number + 1) * PART_BYTES]


@dataclass(slots=True)
class _Assembly:
    count: int
    last_activity: float
    parts: list[bytes] = field(default_factory=list)


class Assembler:
    """Reassembles the parts of requests on one subject. `now` is seconds on any single clock that never goes back."""

    def __init__(self) -> None:
        self._assemblies: dict[str, _Assembly] = {}

    def take(self, header: str, data: bytes, now: float) -> bytes | None:
        """Take a part. Returns the complete request with its last part, None before.

        Raises:
            OverloadedError: too many requests arrive in parts.
            WireError: this is not a part, or a part is missing.
        """
        name, number, count = _parsed(header)
        for stale in [n for n, a in self._assemblies.items() if now - a.last_activity > ASSEMBLY_SECONDS]:
            del self._assemblies[stale]
        assembly = self._assemblies.get(name)
        if assembly is None:
            if len(self._assemblies) >= MAX_ASSEMBLIES:
                raise OverloadedError(f"{MAX_ASSEMBLIES} long requests are already arriving; retry elsewhere")
            assembly = self._assemblies[name] = _Assembly(count, now)
        if number != len(assembly.parts) or count != assembly.count or len(data) > PART_BYTES:
            del self._assemblies[name]
            raise WireError(
                f"part {number} of {count} arrived, but part {len(assembly.parts)} was expected; send it again"
            )
        assembly.parts.append(data)
        assembly.last_activity = now
        if number + 1 < count:
            return None
        del self._assemblies[name]
        return b"".join(assembly.parts)


def _parsed(header: str) -> tuple[str, int, int]:
    name, *numbers = header.split(" ")
    if len(numbers) != 2 or not all(number.isdecimal() and len(number) < 5 for number in numbers):
        raise WireError(f"{PART_HEADER} is invalid: {header[:80]!r}")
    number, count = map(int, numbers)
    if not number < count <= -(-MAX_REQUEST_BYTES // PART_BYTES):
        raise WireError(f"part {number} of {count}: the limit is {MAX_REQUEST_BYTES} bytes")
    return name, number, count
