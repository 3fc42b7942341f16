"""Files to upload, and how they are."""

from __future__ import annotations

import io

import httpx
import nats
from PIL import Image

from support.harness.waiting import until

from .running import Running

FILES = {"maxMebibytes": 8, "maxTenantMebibytes": 4, "maxFileMebibytes": 2, "maxFiles": 64}


def png(colour: str = "red", side: int = 64) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(file, "PNG")
    return file.getvalue()


def bmp(num_pixels: int) -> bytes:
    """About three bytes a pixel."""
    file = io.BytesIO()
    Image.new("RGB", (1024, num_pixels // 1024), "blue").save(file, "BMP")
    return file.getvalue()


async def upload(gateway: Running, data: bytes, name: str = "red.png", **more: str) -> httpx.Response:
    return await gateway.http.post(
        "/v1/files", files={"file": (name, data)}, data={"purpose": "user_data", **more}
    )


async def until_nothing_is_stored(gateway: Running) -> None:
    """NATS has no message of a file any more."""

    async def is_empty() -> bool:
        count = await stored(gateway)
        assert count == 0, f"{count} messages are stored"
        return True

    await until(is_empty, "nothing is stored")


async def stored(gateway: Running) -> int:
    """Messages that NATS has of files."""
    client = await nats.connect(gateway.nats.url)
    try:
        names = gateway.subjects.files_stream, gateway.subjects.file_bytes_stream
        return sum([(await client.jetstream().stream_info(name)).state.messages for name in names])
    finally:
        await client.close()
