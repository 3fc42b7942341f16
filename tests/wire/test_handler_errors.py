"""What becomes of a handler's errors, on a bus over a real server and on one in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from mmd_api.contract.errors import MmdError, OverloadedError
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.prefill import Cancel, Placed
from support.harness.waiting import DEADLINE_SECONDS, until
from support.serving.memory_bus import MemoryNet

Connect = Callable[[str], Awaitable[Bus]]


@pytest.fixture(params=["nats", "memory"])
async def here_and_there(request: pytest.FixtureRequest, connect: Connect) -> tuple[Bus, Bus]:
    if request.param == "memory":
        net = MemoryNet()
        return net.bus("here"), net.bus("there")
    return await connect("here"), await connect("there")


async def test_a_subscription_goes_on_after_errors_of_its_handler(here_and_there: tuple[Bus, Bus]) -> None:
    here, there = here_and_there
    handled: list[int] = []

    async def handle(cancel: Cancel) -> None:
        handled.append(cancel.attempt)
        if cancel.attempt == 0:
            raise OverloadedError("try elsewhere")
        if cancel.attempt == 1:
            raise KeyError("a fault of the handler")

    await there.subscribe("a.b", Cancel, handle)
    await there.flush()
    for attempt in range(4):
        await here.publish("a.b", Cancel("r", attempt))
    await until(lambda: handled == [0, 1, 2, 3])
    assert (there.handler_errors, there.bad_messages) == (2, 0)


async def test_a_subscription_goes_on_after_a_message_of_another_kind(
    here_and_there: tuple[Bus, Bus],
) -> None:
    here, there = here_and_there
    handled: list[str] = []

    async def handle(cancel: Cancel) -> None:
        handled.append(cancel.request_id)

    await there.subscribe("a.b", Cancel, handle)
    await there.flush()
    await here.publish("a.b", Placed("r", accepted=True))
    await here.publish("a.b", Cancel("good", 0))
    await until(lambda: handled == ["good"])
    assert (there.handler_errors, there.bad_messages) == (0, 1)


@pytest.mark.parametrize(
    ("error", "code", "message", "errors"),
    [
        (OverloadedError("no blocks"), "overloaded", "no blocks", 0),
        (ZeroDivisionError("oops"), "internal", "ZeroDivisionError while serving place: oops", 1),
    ],
    ids=["typed", "a fault"],
)
async def test_a_requester_gets_the_error_of_the_handler(
    here_and_there: tuple[Bus, Bus], error: Exception, code: str, message: str, errors: int
) -> None:
    here, there = here_and_there

    async def refuse(_: Cancel) -> Placed:
        raise error

    await there.serve("place", Cancel, refuse)
    await there.flush()
    for _ in range(2):
        with pytest.raises(MmdError) as refused:
            await here.request("place", Cancel("r", 0), Placed, timeout=DEADLINE_SECONDS)
        assert (refused.value.code, refused.value.message) == (code, message)
    assert there.handler_errors == 2 * errors
