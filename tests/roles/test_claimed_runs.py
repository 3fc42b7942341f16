"""Claims of jobs in an encoder. One with a failed run waits until it is alone: at no cost, and only while somebody needs the feature."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from mmd_workers.encoder import encoder_service
from mmd_workers.encoder.job_claims import RECEIVER_PATIENCE_SECONDS
from mmd_workers.wire.messages.encoder import EncodeJob, EncodeTaken
from mmd_workers.wire.messages.prefill import EncodeCheck, EncodeRun
from mmd_workers.wire.server import NatsServer
from mmd_workers.worker import SURRENDER_SECONDS
from support.harness.waiting import until

from .held_jobs import Connect, Deployment, deployed, job


async def let_wait(deployment: Deployment, suspect: EncodeJob) -> None:
    """Run job-0, and have the suspect wait for its end."""
    await deployment.run(job(0))
    await deployment.publish(suspect, is_suspect=True)
    (service,) = deployment.services
    await until(lambda: not service._takes_jobs.is_set())
    await until(lambda: run_of(deployment, suspect) is None, "it is not recorded as running")


def run_of(deployment: Deployment, one: EncodeJob) -> EncodeRun | None:
    return deployment.runs[one.job_id].answer(EncodeCheck(one.feature.feature_id, one.job_id)).other


async def test_a_claim_that_was_not_answered_is_confirmed_at_once(
    nats_server: NatsServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, a copy of the job would run beside it."""
    monkeypatch.setattr(encoder_service, "CHECK_SECONDS", 3600.0)
    async with deployed(connect, nats_server, encoders=1) as deployment:
        deployment.unanswered.add("job-0")
        await deployment.run(job(0))
        await until(lambda: run_of(deployment, job(0)) is not None)
        await deployment.until_done()


async def test_a_crash_beside_a_waiting_suspect_does_not_count_for_it(
    nats_server: NatsServer, connect: Connect
) -> None:
    async with deployed(connect, nats_server, encoders=1, running=[job(2)]) as deployment:
        await let_wait(deployment, job(1))
        await deployment.kill(0)
        await deployment.start_encoder("encoder-1")
        await deployment.until_done()
        assert deployment.attempts == {"job-0": 2, "job-1": 2, "job-2": 2}
        assert deployment.begun == {"job-0": 2, "job-1": 1, "job-2": 2}
        assert not deployment.failures


@pytest.mark.parametrize("reason", ["receiver_gone", "deadline_exceeded"])
async def test_a_suspect_that_nobody_needs_stops_waiting(
    nats_server: NatsServer, connect: Connect, reason: str
) -> None:
    """Other jobs are taken again, while the one that it waited for still runs."""
    async with deployed(connect, nats_server, encoders=1) as deployment:
        suspect = job(1)
        if reason == "deadline_exceeded":
            suspect = replace(suspect, deadline=time.time() + 5)
        await let_wait(deployment, suspect)
        if reason == "receiver_gone":
            del deployment.runs["job-1"]
        ended = deployment.metrics.encode_jobs.labels("image", reason)
        await until(lambda: ended._value.get() == 1)
        await deployment.run(job(2))
        await deployment.until_done()
        assert deployment.begun == {"job-0": 1, "job-2": 1}


async def test_a_suspect_that_runs_elsewhere_after_its_wait_is_left(
    nats_server: NatsServer, connect: Connect
) -> None:
    """A copy of the job went to another encoder meanwhile."""
    async with deployed(connect, nats_server, encoders=1) as deployment:
        await let_wait(deployment, job(1))
        other, asked = await connect("encoder-1"), list[str]()

        async def run(one: EncodeJob) -> EncodeTaken:
            asked.append(one.job_id)
            return EncodeTaken(one.job_id, taken=True)

        await other.serve(other.subjects.encode_cached("encoder-1"), EncodeJob, run)
        await other.flush()
        claim = EncodeCheck("feature-1", "job-1", EncodeRun("encoder-1", "i1"))
        deployment.runs["job-1"].answer(claim)
        deployment.may_end.set()
        await until(lambda: asked)
        del deployment.runs["job-1"]  # the other encoder has sent the feature
        await deployment.until_done()
        assert deployment.begun == {"job-0": 1}


async def test_an_encoder_that_was_cut_off_goes_on_and_its_heir_stops(
    nats_server: NatsServer, connect: Connect
) -> None:
    async with deployed(connect, nats_server, encoders=2, running=[job(0)]) as deployment:
        (number,) = (n for n, service in enumerate(deployment.services) if service._jobs)
        heir = deployment.services[1 - number]
        with deployment.cut_off(number):
            await until(lambda: deployment.begun["job-0"] == 2)
            assert deployment.attempts["job-0"] == 2
        await until(lambda: deployment.attempts["job-0"] == 1)
        await until(lambda: not heir._jobs)
        await deployment.until_done()
        assert deployment.begun["job-0"] == 2
        assert deployment.attempts["job-0"] == 1
        assert not deployment.failures


async def test_jobs_of_a_receiver_that_is_cut_off_wait_in_the_queue_and_hold_no_slots(
    nats_server: NatsServer, connect: Connect
) -> None:
    async with deployed(connect, nats_server, encoders=1) as deployment:
        jobs = [job(number) for number in range(2 * deployment.slots)]
        deployment.alive["prefill-1"] = "i1"
        async with deployment.receiver_cut_off():
            await deployment.publish(*jobs)
            await until(lambda: all(deployment.redelivered[one.job_id] for one in jobs))
            await deployment.run(replace(job(99), receiver="prefill-1"))
            assert deployment.begun == {"job-99": 1}
        await deployment.until_done()
        assert deployment.begun == {one.job_id: 1 for one in [*jobs, job(99)]}
        assert not deployment.failures


async def test_jobs_of_a_receiver_that_stays_away_leave_the_queue(
    nats_server: NatsServer, connect: Connect
) -> None:
    async with deployed(connect, nats_server, encoders=1) as deployment:
        async with deployment.receiver_cut_off():
            await deployment.publish(job(0))
            await until(lambda: deployment.redelivered["job-0"])
            deployment.silent_seconds = RECEIVER_PATIENCE_SECONDS
            await deployment.until_done()
        assert not deployment.begun


async def test_a_hanging_receiver_leaves_time_to_give_jobs_back(
    nats_server: NatsServer, connect: Connect
) -> None:
    async with deployed(connect, nats_server, encoders=1, running=[job(0)]) as deployment:
        deployment.hangs = True
        async with asyncio.timeout(SURRENDER_SECONDS):
            await deployment.services[0].abandon()
