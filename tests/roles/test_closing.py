"""A process that ends, ends: whatever hangs is named."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from mmd_workers.process.closing import close_each

HANGS_AT_EXIT = """
import asyncio, threading, time
from mmd_workers.process import closing
closing.EXIT_SECONDS = 0.5
async def main():
    threading.Thread(target=never_ends).start()
def never_ends():
    time.sleep(600)
closing.run(main())
"""


async def test_a_part_that_hangs_or_fails_keeps_no_other_open(caplog: pytest.LogCaptureFixture) -> None:
    closed = []

    async def hangs() -> None:
        await asyncio.Event().wait()

    async def fails() -> None:
        raise ValueError("cannot close")

    async def closes() -> None:
        closed.append("it")

    await close_each(hangs, fails, closes, seconds=0.05)
    assert closed == ["it"]
    assert all(
        name in record.message for name, record in zip(("hangs", "fails"), caplog.records, strict=True)
    )


def test_a_thread_that_keeps_the_interpreter_is_printed_and_ended() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS_AT_EXIT], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "never_ends" in ended.stderr
