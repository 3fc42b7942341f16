"""Encoders whose NATS server goes away for longer than the acknowledgement wait, while their jobs run."""

from __future__ import annotations

import itertools

import pytest

from mmd_workers.wire.server import NatsServer
from support.harness.waiting import until

from .held_jobs import MAX_ATTEMPTS, Connect, deployed, job


@pytest.mark.parametrize("freezes", [False, True], ids=["killed", "frozen"])
async def test_free_slots_take_jobs_as_soon_as_the_server_is_back(
    own_nats_server: NatsServer, connect: Connect, freezes: bool
) -> None:
    """The jobs that run meanwhile are delivered again, neither begun again nor counted."""
    async with deployed(connect, own_nats_server, encoders=2) as deployment:
        slots = 2 * deployment.slots
        first = [job(number) for number in range(slots // 2)]
        await deployment.run(*first)
        await deployment.outages_until(lambda: len(deployment.redelivered) == len(first), freezes)
        await deployment.run(*(job(number) for number in range(slots // 2, slots)))
        await deployment.until_done()
        assert set(deployment.begun.values()) == {1}, "joined, not repeated"
        assert not deployment.failures
        assert deployment.metrics.redeliveries.labels("image")._value.get() == 0


async def test_outages_never_give_up_a_healthy_medium(own_nats_server: NatsServer, connect: Connect) -> None:
    async with deployed(connect, own_nats_server, encoders=3, running=[job(0)]) as deployment:
        await deployment.outages_until(lambda: deployment.redelivered["job-0"] > MAX_ATTEMPTS)
        await deployment.until_done()
        assert deployment.begun == {"job-0": 1}
        assert not deployment.failures


async def test_a_stored_copy_is_left_to_the_encoder_that_runs_the_job(
    own_nats_server: NatsServer, connect: Connect
) -> None:
    """A server that lost its messages gets the job again, while an encoder still runs it."""
    async with deployed(connect, own_nats_server, encoders=2, running=[job(0)]) as deployment:
        copies = itertools.count(1)

        async def has_met_the_other_encoder() -> bool:
            """The encoder that runs the job joins a copy, and the other one leaves it, so that it is delivered again."""
            await deployment._queue.publish(job(0), copy=next(copies))
            return bool(deployment.redelivered)

        await until(has_met_the_other_encoder, pause_seconds=0.2)
        await deployment.until_done()
        assert deployment.begun == {"job-0": 1}
