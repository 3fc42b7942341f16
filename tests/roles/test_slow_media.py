"""Prompts whose media are slow to come, beside text that needs none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.message_parts import FeatureRef
from support.harness.waiting import DEADLINE_SECONDS, until

from .prefill_pod import Pod, answer

Connect = Callable[[str], Awaitable[Bus]]
NUM_SLOW = 12  # more than the engine's places


def held(pod: Pod) -> list[FeatureRef]:
    """Features that are asked for from now on, and do not come."""
    asked: list[FeatureRef] = []

    def ask(ref: FeatureRef, _: Any) -> None:
        asked.append(ref)

    pod.source.request = ask  # type: ignore[method-assign]
    return asked


def deliver(pod: Pod, refs: list[FeatureRef]) -> None:
    for ref in refs:
        ((start, length),) = ref.ranges
        pod.store.deliver(ref.feature_id, pod.model.feature(start, length))


async def test_prompts_that_wait_for_media_leave_places_to_text(connect: Connect) -> None:
    """They began early, with the text before their media, and took every place of the engine."""
    pod = Pod(await connect("p-0"), max_waiting=NUM_SLOW + 1)
    pod.runner.start()
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            asked = held(pod)
            slow = [asyncio.create_task(pod.serve(f"slow-{number}")) for number in range(NUM_SLOW)]
            await until(lambda: len(pod.service._added) == pod.service._max_early)
            assert await pod.serve("text", media=False) == answer()
            assert not any(task.done() for task in slow)
            assert len(pod.service._added) == pod.service._max_early == 2
            deliver(pod, asked)
            assert await asyncio.gather(*slow) == [answer()] * NUM_SLOW
            assert not pod.service._early
            assert pod.failed == []
    finally:
        assert await pod.runner.stop(10)


async def test_a_prompt_that_ends_before_its_media_come_gives_its_early_place_back(connect: Connect) -> None:
    pod = Pod(await connect("p-0"), max_waiting=NUM_SLOW + 1)
    pod.runner.start()
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            held(pod)
            slow = [asyncio.create_task(pod.serve(f"slow-{number}")) for number in range(2)]
            await until(lambda: len(pod.service._added) == 2)
            pod.service.cancel("slow-0#0")
            await until(lambda: pod.service._early == {"slow-1#0"})
            slow.append(asyncio.create_task(pod.serve("slow-2")))
            await until(lambda: pod.service._early == {"slow-1#0", "slow-2#0"})
            for task in slow:
                task.cancel()
            for name in list(pod.service._tasks):
                pod.service.cancel(name)
            await until(lambda: not pod.service._tasks)
            assert not pod.service._early
    finally:
        assert await pod.runner.stop(10)
