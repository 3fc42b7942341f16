"""What becomes of an answer whose client hangs up."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import pytest

from mmd_api.contract.errors import ClientGoneError, InvalidValueError
from mmd_workers.gateway.answers.exchange import until_gone
from mmd_workers.gateway.basics.api_errors import ApiError


async def hang_up() -> dict[str, Any]:
    return {"type": "http.disconnect"}


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def failing_when_cancelled(error: Exception) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise error from None


async def forgotten() -> None:
    """Tasks that have ended are gone, which is when asyncio logs of an exception that none has looked at."""
    for _ in range(3):
        await asyncio.sleep(0)
        gc.collect()


def refusal() -> ApiError:
    return ApiError(InvalidValueError("input: send text"), param="input")


async def test_a_refusal_that_comes_when_the_client_has_gone_is_logged_nowhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ClientGoneError):
        await until_gone(hang_up, failing_when_cancelled(refusal()))
    await forgotten()
    assert not caplog.records


async def test_a_bug_that_shows_when_the_client_has_gone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ClientGoneError):
        await until_gone(hang_up, failing_when_cancelled(KeyError("head")))
    await forgotten()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.message == "an answer that nobody waits for failed"


async def cancelled(error: Exception) -> None:
    """What happens when the request itself is cancelled, as at the end of a server."""
    answering = asyncio.create_task(until_gone(never, failing_when_cancelled(error)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering


async def test_a_refusal_that_comes_when_the_request_is_cancelled_is_logged_nowhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await cancelled(refusal())
    await forgotten()
    assert not caplog.records


async def test_a_bug_that_shows_when_the_request_is_cancelled_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await cancelled(KeyError("head"))
    await forgotten()
    assert [record.message for record in caplog.records] == ["an answer that nobody waits for failed"]


async def test_an_answer_that_fails_before_its_client_goes_raises_its_error() -> None:
    async def refuse() -> None:
        raise refusal()

    with pytest.raises(ApiError):
        await until_gone(never, refuse())
