"""The clock of tests: it wakes who waits in the order of time, and nothing happens at another moment than its own."""

from __future__ import annotations

import asyncio

import pytest

from support.harness.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


async def test_sleepers_wake_in_order_of_moment_and_then_arrival(clock: FakeClock) -> None:
    woken: list[tuple[str, float]] = []
    begin = clock.now()

    async def sleep(name: str, *seconds: float) -> None:
        for pause in seconds:
            await clock.sleep(pause)
            woken.append((name, clock.now() - begin))

    pauses = {"a": (2.0, 2.0), "b": (1.0, 1.0, 1.0), "c": (2.0,)}
    tasks = [asyncio.create_task(sleep(name, *seconds)) for name, seconds in pauses.items()]
    await clock.until(lambda: all(task.done() for task in tasks))
    assert woken == [("b", 1.0), ("a", 2.0), ("c", 2.0), ("b", 2.0), ("b", 3.0), ("a", 4.0)]


async def test_so_much_time_passes_as_the_test_lets(clock: FakeClock) -> None:
    begin, unix = clock.now(), clock.unix()
    sleeping = asyncio.create_task(clock.sleep(1.5))
    await clock.let_pass(1.0)
    assert (clock.now() - begin, sleeping.done()) == (1.0, False)
    await clock.let_pass(0.5)
    assert sleeping.done()
    assert (clock.now() - begin, clock.unix() - unix) == (1.5, pytest.approx(1.5))


async def test_a_block_times_out_at_its_moment_but_not_after_ending(clock: FakeClock) -> None:
    begin = clock.now()

    async def wait(seconds: float) -> float:
        try:
            async with clock.timeout(seconds):
                await asyncio.Event().wait()
        except TimeoutError:
            return clock.now() - begin
        raise AssertionError

    waiting = asyncio.gather(wait(3.0), wait(0.0), wait(-1.0), wait(2.0))
    await clock.until(waiting.done)
    assert await waiting == [3.0, 0.0, 0.0, 2.0]
    async with clock.timeout(1.0):
        pass
    await clock.let_pass(2.0)


async def test_a_cancelled_block_is_cancelled_and_not_late(clock: FakeClock) -> None:
    async def wait() -> None:
        async with clock.timeout(1.0):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await clock.let_pass(5.0)
    assert waiting.cancelled()


async def test_tasks_that_wait_for_no_time_come_to_rest_before_time_passes(clock: FakeClock) -> None:
    begin, ends = clock.now(), list[float]()

    async def work() -> None:
        for _ in range(500):
            await asyncio.sleep(0)
        ends.append(clock.now() - begin)

    tasks = [asyncio.create_task(work()), asyncio.create_task(clock.sleep(1.0))]
    await clock.until(tasks[1].done)
    assert ends == [0.0]


async def test_a_condition_that_does_not_hold_in_time_fails(clock: FakeClock) -> None:
    sleeping = asyncio.create_task(clock.sleep(10.0))
    with pytest.raises(AssertionError, match="does not hold after 5 s"):
        await clock.until(sleeping.done, 5.0)
    sleeping.cancel()
