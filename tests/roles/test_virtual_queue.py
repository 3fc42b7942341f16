"""The queue of the virtual pods does what the real one does, over a real server."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mmd_workers.wire.bus import Bus
from mmd_workers.wire.jobs import EncodeQueue, QueueLimits
from mmd_workers.wire.messages.encoder import EncodeJob
from mmd_workers.wire.messages.message_parts import FeatureRef
from support.harness.waiting import DEADLINE_SECONDS

from .virtual_pods import Net, PodBus, PodQueue

LIMITS = QueueLimits(ack_wait_seconds=0.5, memory_storage=True)


def job(name: str) -> EncodeJob:
    feature = FeatureRef(name, name, "image", 10, 4, [[0, 4]], {}, {}, 16)
    now = time.time()
    return EncodeJob(name, feature, "gateway-0", "prefill-0", "i1", now + 60, now, "r")


@pytest.fixture(params=["real", "virtual"])
async def queue(request: pytest.FixtureRequest, connect: Callable[[str], Awaitable[Bus]]) -> Any:
    if request.param == "virtual":
        return PodQueue(PodBus(Net(random.Random(0), 0.0), "encoder-0", LIMITS))
    real = EncodeQueue(await connect("encoder-0"), LIMITS)
    await real.ensure()
    return real


async def pull(queue: Any, seconds: float = DEADLINE_SECONDS) -> list[tuple[str, bool]]:
    return [(one.job.job_id, one.is_first) for one in await queue.pull(["image"], 4, seconds)]


async def test_a_job_leaves_with_its_acknowledgement_and_is_queued_once(queue: Any) -> None:
    await queue.publish(job("a"))
    await queue.publish(job("a"))
    (delivery,) = await queue.pull(["image"], 4, DEADLINE_SECONDS)
    assert delivery.is_first
    await delivery.ack()
    assert await pull(queue, 2 * LIMITS.ack_wait_seconds) == []


async def test_a_silent_encoders_job_is_delivered_again(queue: Any) -> None:
    await queue.publish(job("a"))
    assert await pull(queue) == [("a", True)]
    assert await pull(queue) == [("a", False)]


async def test_a_job_given_back_is_delivered_again_after_the_delay(queue: Any) -> None:
    await queue.publish(job("a"))
    (delivery,) = await queue.pull(["image"], 4, DEADLINE_SECONDS)
    await delivery.retry(0.0)
    assert await pull(queue) == [("a", False)]


async def test_the_first_delivery_keeps_and_ends_a_redelivered_job(queue: Any) -> None:
    await queue.publish(job("a"))
    (running,) = await queue.pull(["image"], 4, DEADLINE_SECONDS)
    assert await pull(queue) == [("a", False)]
    async with running.keep_alive():
        assert await pull(queue, 2.5 * LIMITS.ack_wait_seconds) == []
    await running.ack()
    assert await pull(queue, 2 * LIMITS.ack_wait_seconds) == []


async def test_a_joined_redelivery_is_the_same_message(queue: Any) -> None:
    await queue.publish(job("a"))
    (running,) = await queue.pull(["image"], 4, DEADLINE_SECONDS)
    (again,) = await queue.pull(["image"], 4, DEADLINE_SECONDS)
    running.join(again)
    assert len(running._replies) == 1
    await running.terminate("done")
    assert await pull(queue, 2 * LIMITS.ack_wait_seconds) == []
