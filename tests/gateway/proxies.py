"""A proxy that asks an endpoint picker over gRPC, with messages of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from mmd_workers.gateway.picker.ext_proc_messages import (
    METHOD,
    SERVICE,
    ProcessingRequest,
    ProcessingResponse,
)
from support.harness.waiting import DEADLINE_SECONDS, until

PATH = f"/{SERVICE}/{METHOD}"
KEY = "x-gateway-destination-endpoint"


class Proxy:
    """One HTTP request at a proxy that asks."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.call = call

    async def send(self, message: Any) -> None:
        await self.call.write(message if isinstance(message, bytes) else message.SerializeToString())

    async def ask(self, message: Any) -> Any:
        await self.send(message)
        return await self.answer()

    async def answer(self) -> Any:
        async with asyncio.timeout(DEADLINE_SECONDS):
            found = await self.call.read()
        assert found is not grpc.aio.EOF, await self.call.code()
        return ProcessingResponse.FromString(found)

    async def passed(self, num_bytes: int) -> tuple[bytes, bool]:
        """So much of a body of the request, in the pieces in which it comes back, and whether the last of them ends it."""
        content, ends = returned(await self.answer())
        while len(content) < num_bytes:
            assert not ends
            piece, ends = returned(await self.answer())
            assert len(piece) < 64 << 10
            content += piece
        return content, ends

    async def finish(self) -> grpc.StatusCode:
        """Send nothing more, and see how the picker ends the stream."""
        with contextlib.suppress(Exception):  # of gRPC's own kinds, where it has ended
            await self.call.done_writing()
        return await self.ends()

    async def ends(self) -> grpc.StatusCode:
        """How the picker ended the stream, after whatever it still answers."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            return await self.call.code()


@asynccontextmanager
async def channel_to(port: int, ip: str = "127.0.0.1") -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own: beyond the streams that one may have, a client waits by itself."""
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 4 << 20)]
    async with grpc.aio.insecure_channel(f"{ip}:{port}", own) as channel:
        yield channel


def stream(channel: grpc.aio.Channel) -> Proxy:
    return Proxy(channel.stream_stream(PATH)())


@asynccontextmanager
async def asking(port: int) -> AsyncIterator[Proxy]:
    async with channel_to(port) as channel:
        yield stream(channel)


async def begun(channel: grpc.aio.Channel) -> Proxy:
    """A stream whose headers have been answered."""
    proxy = stream(channel)
    endpoints(await proxy.ask(headers()))
    return proxy


def headers(
    ends: bool = False, subset: Any = None, modes: tuple[int, int] | None = None, **more: str | bytes
) -> Any:
    """Those of a request. `subset`: the value of the hint."""
    named = {":method": "POST", ":path": "/v1/chat/completions"} | {
        key.replace("_", "-"): value for key, value in more.items()
    }
    listed = [
        {"key": key, "raw_value": value.encode() if isinstance(value, str) else value}
        for key, value in named.items()
    ]
    message = ProcessingRequest(request_headers={"headers": {"headers": listed}, "end_of_stream": ends})
    if subset is not None:
        entry = {"key": "x-gateway-destination-endpoint-subset", "value": subset}
        hint = {"key": "envoy.lb.subset_hint", "value": {"fields": [entry]}}
        message.metadata_context.CopyFrom(
            ProcessingRequest(metadata_context={"filter_metadata": [hint]}).metadata_context
        )
    if modes is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
    return message


def listed(*endpoints: str) -> dict[str, Any]:
    """The value of a subset hint."""
    return {"list_value": {"values": [{"string_value": endpoint} for endpoint in endpoints]}}


def body(content: bytes, ends: bool = False, side: str = "request") -> Any:
    return ProcessingRequest(**{f"{side}_body": {"body": content, "end_of_stream": ends}})


def returned(answer: Any, side: str = "request") -> tuple[bytes, bool]:
    """The piece of a body that goes on, and whether it is the last."""
    piece = getattr(answer, f"{side}_body").response.body_mutation.streamed_response
    return piece.body, piece.end_of_stream


def endpoints(answer: Any) -> list[str]:
    """Of a request that may come in; header and metadata are the same."""
    assert answer.HasField("request_headers"), answer
    common = answer.request_headers.response
    assert common.clear_route_cache, "the route depends on the header"
    (option,) = common.header_mutation.set_headers
    assert option.header.key == KEY
    said = option.header.raw_value.decode()
    (entry,) = answer.dynamic_metadata.fields
    assert entry.key == "envoy.lb"
    (inner,) = entry.value.struct_value.fields
    assert (inner.key, inner.value.string_value) == (KEY, said)
    return said.split(",")


def has_no_choice(answer: Any) -> bool:
    """The request goes on as it is, to where the proxy chooses."""
    return answer == ProcessingResponse(request_headers={})


def refused(answer: Any) -> tuple[int, dict[str, Any]]:
    """Status and error for the client."""
    assert answer.HasField("immediate_response"), answer
    found = answer.immediate_response
    named = {o.header.key: o.header.raw_value.decode() for o in found.headers.set_headers}
    assert named["content-type"] == "application/json"
    error = json.loads(found.body)["error"]
    if "retry_after_seconds" in error:
        assert named["retry-after"] == str(error["retry_after_seconds"])
    return found.status.code, error


async def until_closed(port: int) -> None:
    """The picker takes no connection any more; no stream is opened to see that."""

    async def is_closed() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    await until(is_closed, f"port {port} is closed")


async def until_picked(port: int, wanted: Sequence[str]) -> None:
    """The picker answers, and knows these gateways."""

    async def is_picked() -> bool:
        async with asking(port) as proxy:
            await proxy.send(headers(ends=True))
            found = await proxy.call.read()
            if found is grpc.aio.EOF:
                return False
            answer = ProcessingResponse.FromString(found)
            asked = answer.HasField("request_headers") and not has_no_choice(answer)
            return asked and set(endpoints(answer)) == set(wanted)

    await until(is_picked, f"the picker at port {port} picks {wanted}", retried=(grpc.aio.AioRpcError,))
