"""Between the pods and their nats-server: forwards everything but the one message it is armed for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgpack

from mmd_workers.wire import messages

NESTED = {
    messages.message_parts.TensorHeader,
    messages.message_parts.FeatureRef,
    messages.encoder.GivenFeature,
    messages.prefill.EncodeRun,
    messages.message_parts.Sampling,
    messages.message_parts.TokenLogprob,
    messages.message_parts.PromptLogprob,
    messages.gateway.TokenItem,
    messages.gateway.HeldSequence,
    messages.message_parts.Phase,
}
"""Parts of messages; everything else in `messages` goes over the wire by itself."""
MESSAGES: tuple[type, ...] = tuple(kind for kind in messages.MESSAGES if kind not in NESTED)
_BY_FIELDS = {frozenset(field.name for field in dataclasses.fields(kind)): kind for kind in MESSAGES}
assert 25 < len(_BY_FIELDS) == len(MESSAGES), (
    "two messages have the same fields: their names must tell them apart"
)

Match = Callable[[type, dict[str, Any]], bool]


def message_in(payload: bytes) -> tuple[type, dict[str, Any]] | None:
    """Type and fields of a message or of a frame's header; None for anything else."""
    length = int.from_bytes(payload[:4], "little")
    for part in (payload, payload[4 : 4 + length]):
        with contextlib.suppress(ValueError, msgpack.UnpackException):
            value = msgpack.unpackb(part)
            if isinstance(value, dict) and (kind := _BY_FIELDS.get(frozenset(value))):
                return kind, value
    return None


class LossyProxy:
    """Listens on a dedicated port, on a dedicated thread. `struck` is set when the armed message came and was not forwarded."""

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        self._match: Match | None = None
        self._strike: Callable[[], None] = lambda: None
        self.struck = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        threading.Thread(target=self._run, name="lossy-proxy", daemon=True).start()
        assert self._ready.wait(10)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def arm(self, match: Match, strike: Callable[[], None] = lambda: None) -> None:
        """Swallow the next message that matches, and call `strike` at that moment."""
        self.struck.clear()
        self._strike, self._match = strike, match

    def disarm(self) -> None:
        self._match = None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        except OSError:
            writer.close()
            return
        pumps = {
            asyncio.create_task(self._commands(reader, up_writer)),
            asyncio.create_task(_copy(up_reader, writer)),
        }
        _, rest = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in rest:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        writer.close()
        up_writer.close()

    async def _commands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a client's commands, one by one."""
        while line := await reader.readline():
            words = line.split()
            verb = words[0].upper() if words else b""
            if verb not in (b"PUB", b"HPUB"):
                writer.write(line)
            else:
                body = await reader.readexactly(int(words[-1]) + 2)
                header_bytes = int(words[-2]) if verb == b"HPUB" else 0
                if not self._swallows(body[header_bytes:-2]):
                    writer.write(line + body)
            await writer.drain()

    def _swallows(self, payload: bytes) -> bool:
        match = self._match
        if match is None or (found := message_in(payload)) is None or not match(*found):
            return False
        self._match = None
        self._strike()
        self.struck.set()
        return True


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
