"""How long the dispatcher waits for a pod that is lost, silent or forgetful: on a clock that the test moves, with the constants that ship."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from typing import Any

import pytest

from mmd_api.contract.errors import DeadlineError
from mmd_api.contract.load import PodLoad
from mmd_workers.caches.index import CacheIndex
from mmd_workers.gateway.placement.dispatcher import (
    CANCEL_SECONDS,
    GAP_SECONDS,
    HANDOVER_SECONDS,
    RETRY_SECONDS,
    SILENCE_SECONDS,
    SUSPECT_SECONDS,
    TICK_SECONDS,
    UNREPORTED_SECONDS,
    Dispatcher,
    ServedSequence,
)
from mmd_workers.gateway.placement.router import FeatureNeed, PlacementLimits, Router, RouteRequest
from mmd_workers.gateway.placement.sequence_state import SequenceSpec
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.messages.message_parts import FeatureRef, Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest
from mmd_workers.wire.peers import PeerDirectory
from support.harness.clock import FakeClock
from support.serving.memory_bus import MemoryNet
from tests.gateway.scripted import Script, ScriptedWorker, answer_well, forget, half_then, say_nothing

ANSWER = list(range(100, 109))
HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT_SECONDS = 0.5, 2.5
AGAIN_SECONDS = TICK_SECONDS + RETRY_SECONDS[0]
"""At most, between the moment at which an attempt counts as lost and the next one."""
DEADLINE_SECONDS = 600.0  # seconds after its arrival
IMAGE = FeatureRef("f1", "digest", "image", 100, 2, [[0, 2]], {}, {}, 64)
NEED = FeatureNeed("f1", "image", 64, 2)


class Fleet:
    """The dispatcher of gateway-0, and pods that are scripted, in one process and on one clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.net = MemoryNet(self.clock)
        self.workers: list[ScriptedWorker] = []
        bus, metrics = self.net.bus("gateway-0"), Metrics(("gateway",))
        self.directory = PeerDirectory(bus, HEARTBEAT_TIMEOUT_SECONDS, self.clock)
        router = Router(
            "r1", PlacementLimits(100, local_encode_tokens=1000), random.Random(0), CacheIndex(), CacheIndex()
        )
        self.dispatcher = Dispatcher(bus, self.directory, router, "gateway-0", 3, metrics, self.clock)

    async def start(self) -> None:
        await self.directory.start()
        await self.dispatcher.start()

    async def close(self) -> None:
        await self.dispatcher.close()
        for worker in self.workers:
            await worker.close()
        await self.directory.close()

    async def worker(self, script: Script, pod: str = "decode-0", **more: Any) -> ScriptedWorker:
        """A pod that the directory lists."""
        more |= {"clock": self.clock, "period_seconds": HEARTBEAT_SECONDS}
        worker = await ScriptedWorker.on(self.net.bus(pod), ANSWER, script, **more)
        self.workers.append(worker)
        await self.clock.until(lambda: self.directory.get(pod) is not None)
        return worker

    def open(
        self, features: list[FeatureRef] | None = None, needs: tuple[FeatureNeed, ...] = ()
    ) -> ServedSequence:
        now = self.clock.unix()
        end = now + DEADLINE_SECONDS
        spec = SequenceSpec("r.0", [1, 2, 3], features or [], Sampling(max_tokens=16), now, end)
        route = RouteRequest(spec.request_id, len(spec.token_ids), 16, needs)
        return self.dispatcher.open(spec, route, Timeline("r", now), asyncio.Event())

    async def answer(self, sequence: ServedSequence) -> list[int]:
        """Its tokens, once all have come; nothing of it is left then."""
        await self.clock.until(lambda: sequence.state.finished or sequence.error)
        if sequence.error is not None:
            raise sequence.error
        tokens = [taken.token_id for taken in sequence.state.take(len(ANSWER) + 1)]
        await self.dispatcher.release(sequence)
        assert self.dispatcher.live_sequences == 0
        return tokens


@pytest.fixture
async def fleet() -> Any:
    one = Fleet()
    await one.start()
    yield one
    await one.close()


def waits(sequence: ServedSequence) -> list[float]:
    """Seconds from each placement of a sequence to the next."""
    placed = [attempt.placed for attempt in sequence.timeline.attempts]
    return [later - earlier for earlier, later in pairwise(placed)]


async def test_a_token_lost_on_the_wire_is_made_again(fleet: Fleet) -> None:
    async def lose_one(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if request.attempt:
            await answer_well(worker, request)
        else:
            await worker.tokens(request, [index for index in range(len(ANSWER)) if index != 3])
            await say_nothing(worker, request)

    worker = await fleet.worker(lose_one)
    sequence = fleet.open()
    assert await fleet.answer(sequence) == ANSWER
    assert worker.requests[1].output_token_ids == ANSWER[:3]
    assert worker.cancels[0].attempt == 0
    (wait,) = waits(sequence)
    assert GAP_SECONDS < wait < GAP_SECONDS + AGAIN_SECONDS


@pytest.mark.parametrize(
    "load", [PodLoad(), PodLoad(decode_running=3, prefill_waiting_requests=2)], ids=["idle", "busy"]
)
@pytest.mark.parametrize("script", [half_then(forget), forget], ids=["half", "nothing"])
@pytest.mark.parametrize(("features", "needs"), [([], ()), ([IMAGE], (NEED,))], ids=["text", "image"])
async def test_a_request_that_no_pod_reports_is_placed_again(
    fleet: Fleet, load: PodLoad, script: Script, features: list[FeatureRef], needs: tuple[FeatureNeed, ...]
) -> None:
    async def lose_the_first(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await (answer_well if request.attempt else script)(worker, request)

    worker = await fleet.worker(lose_the_first, load=load)
    sequence = fleet.open(features, needs)
    assert await fleet.answer(sequence) == ANSWER
    assert len(worker.requests) == 2
    (wait,) = waits(sequence)
    limit = HEARTBEAT_TIMEOUT_SECONDS + UNREPORTED_SECONDS
    assert limit < wait < limit + AGAIN_SECONDS


@pytest.mark.parametrize("reported_first", [False, True], ids=["token first", "report first"])
async def test_a_preempted_sequence_that_its_pod_reports_is_waited_for(
    fleet: Fleet, reported_first: bool
) -> None:
    async def wait_for_blocks(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await fleet.clock.sleep(5 * SILENCE_SECONDS)
        if reported_first:
            worker.made[request.request_id, request.attempt] = len(ANSWER)
            await fleet.clock.sleep(SILENCE_SECONDS - HEARTBEAT_SECONDS)
        await answer_well(worker, request)

    worker = await fleet.worker(half_then(wait_for_blocks))
    assert await fleet.answer(fleet.open()) == ANSWER
    assert len(worker.requests) == 1
    assert worker.cancels == []


async def test_reported_tokens_that_do_not_arrive_are_made_in_another_attempt(fleet: Fleet) -> None:
    async def lose_the_rest(worker: ScriptedWorker, request: GenerateRequest) -> None:
        worker.made[request.request_id, request.attempt] = len(ANSWER)
        await say_nothing(worker, request)

    worker = await fleet.worker(half_then(lose_the_rest))
    sequence = fleet.open()
    assert await fleet.answer(sequence) == ANSWER
    assert [request.attempt for request in worker.requests] == [0, 1]
    assert worker.cancels[0].attempt == 0
    (wait,) = waits(sequence)
    assert SILENCE_SECONDS < wait < SILENCE_SECONDS + HEARTBEAT_SECONDS + AGAIN_SECONDS


async def test_a_sequence_that_waits_for_blocks_ends_at_its_deadline(fleet: Fleet) -> None:
    worker = await fleet.worker(half_then(say_nothing))
    sequence, begin = fleet.open(), fleet.clock.now()
    with pytest.raises(DeadlineError):
        await fleet.answer(sequence)
    assert DEADLINE_SECONDS <= fleet.clock.now() - begin < DEADLINE_SECONDS + AGAIN_SECONDS
    assert len(worker.requests) == 1
    await fleet.dispatcher.release(sequence)


async def test_a_decoder_that_may_hold_the_sequence_dies_before_it_reports(fleet: Fleet) -> None:
    async def hand_over(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if request.attempt:
            await answer_well(worker, request)
        else:
            await worker.tokens(request, [0])
            await decoder.die()

    decoder = await fleet.worker(say_nothing, "d0", roles=["decode"])
    prefill = await fleet.worker(hand_over, "p0", roles=["prefill"])
    sequence = fleet.open()
    await fleet.clock.until(lambda: decoder.bus.client.is_closed)
    await fleet.worker(say_nothing, "d1", roles=["decode"])
    assert await fleet.answer(sequence) == ANSWER
    assert prefill.requests[0].decode_pods == ["d0"]
    assert prefill.requests[1].decode_pods == ["d1"]
    assert prefill.requests[1].output_token_ids == ANSWER[:1]
    (wait,) = waits(sequence)
    assert HEARTBEAT_TIMEOUT_SECONDS < wait < HEARTBEAT_TIMEOUT_SECONDS * 9 / 8 + AGAIN_SECONDS


async def test_a_decoder_that_may_hold_the_sequence_is_reborn_before_reporting(fleet: Fleet) -> None:
    async def hand_over(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if request.attempt:
            await answer_well(worker, request)
        else:
            await worker.tokens(request, [0])
            await decoder.die()
            await fleet.worker(say_nothing, "d0", roles=["decode"], incarnation="two")

    decoder = await fleet.worker(say_nothing, "d0", roles=["decode"])
    prefill = await fleet.worker(hand_over, "p0", roles=["prefill"])
    sequence = fleet.open()
    assert await fleet.answer(sequence) == ANSWER
    assert prefill.requests[1].output_token_ids == ANSWER[:1]
    (wait,) = waits(sequence)
    assert HANDOVER_SECONDS < wait < HANDOVER_SECONDS + AGAIN_SECONDS


@pytest.mark.parametrize("code", ["preempted", "overloaded"])
async def test_a_sequence_that_finds_no_room_waits_longer_each_time(fleet: Fleet, code: str) -> None:
    async def give_up(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if request.attempt < 12:
            await worker.fail(request, code, "no KV block left", retryable=True)
        else:
            await answer_well(worker, request)

    await fleet.worker(give_up)
    sequence = fleet.open()
    assert await fleet.answer(sequence) == ANSWER
    first, longest = RETRY_SECONDS
    most = [min(first * 2**number, longest) for number in range(12)]
    assert all(limit / 2 <= wait <= limit + 0.001 for wait, limit in zip(waits(sequence), most, strict=True))


async def test_a_medium_is_suspected_for_some_minutes(fleet: Fleet) -> None:
    async def fail_the_first(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if len(worker.requests) > 1:
            await answer_well(worker, request)
        else:
            await worker.fail(request, "unprocessable_medium", "the tower is gone", retryable=True)

    worker = await fleet.worker(fail_the_first, roles=["prefill", "decode"], encodes_small_media=True)
    for seconds in (0.0, SUSPECT_SECONDS - 1.0, 1.0):
        await fleet.clock.let_pass(seconds)
        assert await fleet.answer(fleet.open([IMAGE], (NEED,))) == ANSWER
    assert [request.encode_here for request in worker.requests] == [True, False, False, True]


async def test_a_release_repeats_a_cancellation_that_was_swallowed(fleet: Fleet) -> None:
    sequence = fleet.open()

    async def swallow() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    assert sequence.task is not None
    sequence.task.cancel()
    sequence.task = asyncio.create_task(swallow())
    await asyncio.sleep(0)
    begin = fleet.clock.now()
    releasing = asyncio.create_task(fleet.dispatcher.release(sequence))
    await fleet.clock.until(releasing.done)
    assert fleet.clock.now() - begin == pytest.approx(CANCEL_SECONDS)
