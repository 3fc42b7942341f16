"""How long a test waits for what must happen: as long as a machine with two busy cores may take, and no longer than it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

DEADLINE_SECONDS = 60.0
"""Only a test that fails waits for so long."""


async def until(condition: Callable[[], Any], seconds: float = DEADLINE_SECONDS) -> None:
    """Poll a condition of this process until it holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def is_closed(host: str, port: int) -> bool:
    """Whether a new connection is closed without a byte."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        return await asyncio.wait_for(reader.read(), DEADLINE_SECONDS) == b""
    except ConnectionError:
        return True
    finally:
        writer.close()
