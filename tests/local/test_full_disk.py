"""`mmd up` on a full disk: whoever supervises goes on, or says why it cannot."""

from __future__ import annotations

import asyncio

import pytest

from mmd_cli.local import supervisor as supervisor_module
from mmd_cli.local.supervisor import GaveUpError, Supervisor

FULL = OSError(28, "No space left on device")


class CrashedServer:
    """A nats-server that ended, and whose configuration can no longer be written."""

    crashed = True
    url = "nats://127.0.0.1:1"

    def spawn(self) -> None:
        raise FULL


async def test_a_server_without_disk_space_is_given_up_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "BACKOFF_SECONDS", (0.0, 0.0))
    given_up: list[GaveUpError] = []

    def cannot_print(_name: str, _line: str) -> None:
        raise FULL

    supervisor = Supervisor(cannot_print, given_up.append)
    async with asyncio.timeout(30):
        await supervisor.keep_nats(CrashedServer())  # type: ignore[arg-type]
    (error,) = given_up
    assert "No space left on device" in error.message
