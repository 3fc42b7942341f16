"""What `mmd up` does beside its processes goes on after a step that failed."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from mmd_cli.local.steps import repeat


async def test_a_step_that_fails_is_logged_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = iter([OSError("disk full"), OSError("disk full"), None, OSError("disk full")])
    ended = asyncio.Event()

    async def step() -> None:
        outcome = next(outcomes, "over")
        if outcome == "over":
            ended.set()
            await asyncio.sleep(3600)
        if isinstance(outcome, OSError):
            raise outcome

    repeating = asyncio.create_task(repeat("autoscaler", 0, step))
    async with asyncio.timeout(30):
        await ended.wait()
    repeating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await repeating
    assert [record.message for record in caplog.records] == ["autoscaler: step failed; next step in 0 s"] * 2
