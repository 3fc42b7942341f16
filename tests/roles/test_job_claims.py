"""Which encoder runs a job, and which runs count: an encoder, the receiver and other encoders on buses in memory, on one clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from mmd_api.contract.errors import OverloadedError, ReceiverGoneError
from mmd_workers.encoder import job_claims
from mmd_workers.encoder.job_claims import Claim, JobClaims, RunsElsewhereError, RunUnclearError
from mmd_workers.wire.job_runs import JobRuns, unwanted
from mmd_workers.wire.messages.encoder import EncodeJob, EncodeTaken
from mmd_workers.wire.messages.message_parts import FeatureRef
from mmd_workers.wire.messages.prefill import EncodeCheck, EncodeWanted
from support.harness.clock import FakeClock
from support.serving.memory_bus import MemoryNet

REF = FeatureRef("feature-1", "digest", "image", 10, 4, [[0, 4]], {}, {}, 16)
OTHER = "encoder-0"


class World:
    """encoder-1, which claims; encoder-0, which has claimed before; and their receiver."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.net = MemoryNet(self.clock)
        self.runs = JobRuns()
        self.alive = {"prefill-0": "i1", OTHER: "i1", "encoder-1": "i1"}
        self.lost_at = 0.0  # pods that are not alive
        now = self.clock.unix()
        self.job = EncodeJob("job", REF, "gateway-0", "prefill-0", "i1", now + 60, now, "r")
        self.other = self.claims_of(OTHER, "i1")
        self.claims = self.claims_of("encoder-1", "i1")

    def claims_of(self, encoder: str, incarnation: str) -> JobClaims:
        def silent_seconds(_: str) -> float:
            return self.clock.now() - self.lost_at

        return JobClaims(self.net.bus(encoder), incarnation, self.alive.get, silent_seconds, self.clock)

    async def receive(self) -> None:
        async def check(asked: EncodeCheck) -> EncodeWanted:
            return self.runs.answer(asked)

        bus = self.net.bus("prefill-0")
        await bus.serve(bus.subjects.encode_wanted("prefill-0"), EncodeCheck, check)

    async def serve_other(self, answer: Callable[[EncodeJob], Awaitable[EncodeTaken]]) -> None:
        bus = self.net.bus(OTHER)
        await bus.serve(bus.subjects.encode_cached(OTHER), EncodeJob, answer)

    async def claim(self, is_first: bool = False) -> object:
        claiming = asyncio.create_task(self.claims.claim(self.job, is_first))
        await self.clock.until(claiming.done)
        try:
            return (await claiming).attempt
        except RunsElsewhereError:
            return "elsewhere"
        except RunUnclearError:
            return "unclear"


async def takes(job: EncodeJob) -> EncodeTaken:
    return EncodeTaken(job.job_id, taken=True)


async def takes_not(job: EncodeJob) -> EncodeTaken:
    return EncodeTaken(job.job_id, taken=False)


async def hangs(_: EncodeJob) -> EncodeTaken:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture
async def world() -> World:
    """The receiver records a run of encoder-0."""
    made = World()
    await made.receive()
    assert await made.other.claim(made.job, is_first=True) == Claim(1)
    return made


@pytest.mark.parametrize(
    ("incarnation", "answer", "claimed"),
    [
        pytest.param("i1", takes, "elsewhere", id="runs it"),
        pytest.param(None, takes, "elsewhere", id="runs it, and its heartbeats were lost"),
        pytest.param("i1", takes_not, 1, id="lives, and does not run it"),
        pytest.param("i1", hangs, "unclear", id="does not answer"),
        pytest.param("i1", None, "unclear", id="lives, and is not connected"),
        pytest.param(None, None, 2, id="is lost"),
        pytest.param(None, hangs, 2, id="hangs"),
        pytest.param("i2", takes_not, 2, id="died and started again"),
    ],
)
async def test_only_a_dead_encoder_costs_an_attempt(
    world: World,
    incarnation: str | None,
    answer: Callable[[EncodeJob], Awaitable[EncodeTaken]] | None,
    claimed: object,
) -> None:
    if incarnation is None:
        del world.alive[OTHER]
    else:
        world.alive[OTHER] = incarnation
    if answer is not None:
        await world.serve_other(answer)
    assert await world.claim() == claimed


async def test_an_encoder_that_restarted_takes_its_own_job_again(world: World) -> None:
    """It reaches itself under the name of the process that died, which ran the job."""
    await world.serve_other(takes)
    world.alive[OTHER] = "i2"
    world.claims = world.claims_of(OTHER, "i2")
    assert await world.claim() == 2


async def test_an_encoder_whose_heartbeats_come_back_is_not_dead(world: World) -> None:
    """As after a freeze of the server: it has been without heartbeats, and is slow to answer."""
    del world.alive[OTHER]

    async def hangs_alive(job: EncodeJob) -> EncodeTaken:
        world.alive[OTHER] = "i1"
        return await hangs(job)

    await world.serve_other(hangs_alive)
    assert await world.claim() == "unclear"


async def test_an_encoder_that_was_cut_off_and_is_back_costs_nothing(world: World) -> None:
    """Nobody can tell it from a dead one before."""
    del world.alive[OTHER]
    assert await world.claim() == 2
    await world.other.confirm(world.job, is_claimed=True)
    assert world.runs.answer(EncodeCheck("feature-1", "job")).attempt == 1
    with pytest.raises(RunsElsewhereError):  # its heir stops
        await world.claims.confirm(world.job, is_claimed=True)
    await world.claims.confirm(world.job, is_claimed=False)


async def test_after_a_reconnect_an_absent_encoder_is_not_dead_yet(world: World) -> None:
    del world.alive[OTHER]
    await world.claims._reconnected()
    assert await world.claim() == "unclear"
    await world.clock.let_pass(job_claims.RECONNECT_SECONDS)
    assert await world.claim() == 2


@pytest.mark.parametrize(("failed", "attempt"), [(True, 2), (False, 1)])
async def test_a_reported_end_is_believed_without_a_question(
    world: World, failed: bool, attempt: int
) -> None:
    await world.other.report_end(world.job, failed)
    assert await world.claim() == attempt


@pytest.mark.parametrize(
    ("is_first", "connected", "claimed"),
    [(True, True, 1), (False, True, "unclear"), (True, False, "unclear")],
    ids=["delivered first", "delivered again", "without a server"],
)
async def test_a_job_whose_receiver_does_not_answer(is_first: bool, connected: bool, claimed: object) -> None:
    """A fresh job need not wait for a busy receiver. Without a server, nobody would know of the run."""
    world = World()
    world.claims._bus.is_connected = connected  # type: ignore[misc]
    assert await world.claim(is_first) == claimed


async def test_after_a_reconnect_a_first_delivery_proves_nothing() -> None:
    """A server that was killed may count the deliveries of a job anew, while another encoder runs it."""
    world = World()
    await world.claims._reconnected()
    assert await world.claim(is_first=True) == "unclear"
    await world.clock.let_pass(job_claims.RECONNECT_SECONDS)
    assert await world.claim(is_first=True) == 1


async def test_a_first_delivery_proves_nothing_once_another_run_is_known(world: World) -> None:
    """A copy of a job is delivered first, too. The receiver names the run of a dead encoder, and answers nothing more."""
    del world.alive[OTHER]
    answers = 0

    async def check_once(asked: EncodeCheck) -> EncodeWanted:
        nonlocal answers
        answers += 1
        if answers > 1:
            await asyncio.Event().wait()
        return world.runs.answer(asked)

    world.net.served.clear()
    bus = world.net.bus("prefill-0")
    await bus.serve(bus.subjects.encode_wanted("prefill-0"), EncodeCheck, check_once)
    assert await world.claim(is_first=True) == "unclear"


async def hangs_on_checks(_: EncodeCheck) -> EncodeWanted:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("is_subscribed", [False, True], ids=["no connection", "half a connection"])
async def test_a_receiver_that_is_cut_off_is_lost_after_a_while(is_subscribed: bool) -> None:
    """Its jobs are left in the queue until then, whatever the server knows of its connection."""
    world = World()
    if is_subscribed:
        bus = world.net.bus("prefill-0")
        await bus.serve(bus.subjects.encode_wanted("prefill-0"), EncodeCheck, hangs_on_checks)
    del world.alive["prefill-0"]
    world.lost_at = world.clock.now()
    assert await world.claim(is_first=True) == "unclear"
    await world.clock.let_pass(job_claims.RECEIVER_PATIENCE_SECONDS - 4 * job_claims.REPLY_SECONDS)
    assert await world.claim() == "unclear"
    world.alive["prefill-0"] = "i1"
    assert await world.claim(is_first=True) == 1, "it is back"
    del world.alive["prefill-0"]
    await world.clock.let_pass(4 * job_claims.REPLY_SECONDS)
    with pytest.raises(ReceiverGoneError, match="prefill-0"):
        await world.claim(is_first=True)


async def test_a_receiver_that_answers_is_not_lost_without_heartbeats(world: World) -> None:
    del world.alive["prefill-0"]
    await world.other.report_end(world.job, failed=False)
    assert await world.claim() == 1


async def test_a_receiver_that_restarted_is_lost_at_once() -> None:
    world = World()
    world.alive["prefill-0"] = "i2"
    world.lost_at = world.clock.now()
    with pytest.raises(ReceiverGoneError, match="prefill-0"):
        await world.claim(is_first=True)


async def test_a_job_that_nobody_waits_for_is_not_claimed() -> None:
    world = World()

    async def check(asked: EncodeCheck) -> EncodeWanted:
        return unwanted(asked)

    bus = world.net.bus("prefill-0")
    await bus.serve(bus.subjects.encode_wanted("prefill-0"), EncodeCheck, check)
    with pytest.raises(ReceiverGoneError, match="no longer needed"):
        await world.claim(is_first=True)


async def test_a_claim_that_was_not_answered_is_made_with_the_next_check() -> None:
    world = World()
    assert await world.claim(is_first=True) == 1
    await world.receive()
    await world.claims.confirm(world.job, is_claimed=False)
    assert world.runs.answer(EncodeCheck("feature-1", "job")).other is None
    await world.claims.confirm(world.job, is_claimed=True)
    assert world.runs.answer(EncodeCheck("feature-1", "job")).other == world.claims._run


@pytest.mark.parametrize("seconds", [job_claims.END_REPORT_SECONDS, 2.0])
async def test_the_end_of_a_run_is_reported_until_its_receiver_is_lost(seconds: float) -> None:
    world = World()
    begin = world.clock.now()
    reporting = asyncio.create_task(world.claims.report_end(world.job, failed=True, seconds=seconds))
    await world.clock.until(reporting.done)
    assert world.clock.now() - begin == seconds
    await world.claims.report_end(replace(world.job, receiver="gone"), failed=True)
    assert world.clock.now() - begin == seconds


async def test_a_receiver_that_is_overloaded_is_asked_again_after_a_pause() -> None:
    world, asked_at = World(), list[float]()

    async def refuse(_: EncodeCheck) -> EncodeWanted:
        asked_at.append(world.clock.now())
        raise OverloadedError("busy")

    bus = world.net.bus("prefill-0")
    await bus.serve(bus.subjects.encode_wanted("prefill-0"), EncodeCheck, refuse)
    reporting = asyncio.create_task(world.claims.report_end(world.job, failed=True, seconds=1.0))
    await world.clock.until(reporting.done)
    pauses = [later - earlier for earlier, later in pairwise(asked_at)]
    assert pauses == [job_claims.REPORT_PAUSE_SECONDS] * 3


async def test_a_receiver_without_heartbeats_is_asked_about_one_job_at_a_time() -> None:
    """It may be on a dead node: the server still routes questions to it, and each would hold a slot until it times out."""
    world, asked = World(), list[EncodeCheck]()
    del world.alive["prefill-0"]
    world.lost_at = world.clock.now()

    async def hangs(check: EncodeCheck) -> EncodeWanted:
        asked.append(check)
        return await hangs_on_checks(check)

    bus = world.net.bus("prefill-0")
    await bus.serve(bus.subjects.encode_wanted("prefill-0"), EncodeCheck, hangs)
    claims = [asyncio.create_task(world.claims.claim(world.job, is_first=True)) for _ in range(3)]
    await world.clock.until(lambda: all(claim.done() for claim in claims))
    assert [type(claim.exception()) for claim in claims] == [RunUnclearError] * 3
    assert len(asked) == 1
    await world.clock.let_pass(job_claims.SILENT_CHECK_SECONDS)
    assert await world.claim(is_first=True) == "unclear"
    assert len(asked) == 2


async def test_after_a_reconnect_a_receiver_that_seems_to_have_restarted_may_not_have() -> None:
    """The heartbeat of the process that the job names may not have come yet."""
    world = World()
    world.alive["prefill-0"] = "i0"
    world.lost_at = world.clock.now()
    await world.claims._reconnected()
    assert await world.claim(is_first=True) == "unclear"
