import asyncio
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from nats.aio.msg import Msg

from mmd_api.contract.errors import CapacityError, DeadlineError, OverloadedError, PeerLostError
from mmd_api.contract.pools import MODALITIES
from mmd_workers.wire import jobs
from mmd_workers.wire.jobs import Delivery, EncodeQueue, QueueLimits, check_fits, round_work
from mmd_workers.wire.messages.encoder import EncodeJob
from mmd_workers.wire.messages.message_parts import FeatureRef
from support.harness.clock import FakeClock
from support.harness.processes import frozen
from support.harness.waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.promise

SHORT = QueueLimits(ack_wait_seconds=1.0)
PATIENT = QueueLimits(ack_wait_seconds=60.0)


def job(name: str, modality: str = "image", work: int = 64) -> EncodeJob:
    feature = FeatureRef(name, name, modality, 10, 4, [[0, 4]], {}, {}, work)  # type: ignore[arg-type]
    return EncodeJob(name, feature, "gw-0", "prefill-0", "inc", time.time() + 60, time.time(), f"r-{name}")


@pytest.fixture
async def queue(connect):
    queue = EncodeQueue(await connect("encoder"), SHORT)
    await queue.ensure()
    yield queue
    await queue.close()


async def test_a_job_is_delivered_once_and_leaves_when_acknowledged(queue):
    await queue.publish(job("a"))
    (delivery,) = await queue.pull(MODALITIES, batch=4, wait=2)
    assert (delivery.job.job_id, delivery.is_first) == ("a", True)
    await delivery.ack()
    assert (await queue.depth())["image"].jobs == 0
    assert await queue.pull(MODALITIES, batch=4, wait=0.1) == []


async def test_a_waiting_pull_receives_a_new_job_at_once(queue, connect):
    clock = FakeClock()
    waiting = EncodeQueue(await connect("waiting"), SHORT, clock)
    waits = asyncio.create_task(waiting.pull(MODALITIES, batch=1, wait=60))
    await until(lambda: is_pausing(waiting))
    looks = waiting._turn
    await queue.publish(job("a"))
    await until(lambda: waiting._turn > looks)  # its clock stands still: it does not look again by itself
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not waits.done():
            await asyncio.sleep(0.01)
            await clock.let_pass(jobs._SOON_SECONDS)  # the signal was here before the stream had the job
        (delivery,) = await waits
    await delivery.ack()


async def test_a_pull_without_a_signal_looks_again_until_its_time_ends(queue, connect):
    clock = FakeClock()
    waiting = EncodeQueue(await connect("waiting"), SHORT, clock)
    begin = clock.now()
    waits = asyncio.create_task(waiting.pull(MODALITIES, batch=1, wait=1.0))
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not waits.done():
            await until(lambda: is_pausing(waiting) or waits.done())
            if not waits.done():
                await clock.let_pass(jobs._POLL_SECONDS)
    assert await waits == []
    assert (clock.now() - begin, waiting._turn) == (1.0, 1 + 1.0 / jobs._POLL_SECONDS)


def is_pausing(queue: EncodeQueue) -> bool:
    """Whether a pull found nothing, and waits for a signal or its next look."""
    return bool(queue._wake._waiters)


async def test_a_pull_that_the_server_does_not_answer_ends_in_time(own_nats_server, connect):
    clock = FakeClock()
    bus = await connect("encoder")
    await EncodeQueue(bus, PATIENT).ensure()
    puller = jobs._Puller(bus, bus.subjects.encode_stream, "image", clock)
    await puller.open()
    await bus.flush()
    with frozen(own_nats_server.pid):
        takes = asyncio.create_task(puller.take(1))
        await until(lambda: clock.is_awaited)
        await clock.let_pass(jobs._API_SECONDS - 0.1)
        assert not takes.done()
        await clock.let_pass(0.1)
        with pytest.raises(TimeoutError):
            await takes


async def test_a_pull_looks_again_as_soon_as_the_server_is_back(own_nats_server, connect):
    """Its request went with the server, and the clock stands still: waiting for the answer would take for ever."""
    bus = await connect("encoder")
    queue = EncodeQueue(bus, PATIENT)
    await queue.ensure()
    puller = jobs._Puller(bus, bus.subjects.encode_stream, "image", clock := FakeClock())
    await puller.open()
    await bus.flush()
    with frozen(own_nats_server.pid):
        takes = asyncio.create_task(puller.take(1))
        await until(lambda: clock.is_awaited)
        await asyncio.to_thread(own_nats_server.kill)
    await asyncio.to_thread(own_nats_server.start)
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await takes == []
    await queue.publish(job("a"))
    async with asyncio.timeout(DEADLINE_SECONDS):
        (message,) = await puller.take(1)
    assert message.data


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancellation_that_meets_an_answer_of_the_queue_is_not_lost(queue, connect, turns):
    bus = await connect("cancelled")
    puller = jobs._Puller(bus, bus.subjects.encode_stream, "image")
    await puller.open()
    taking = asyncio.create_task(puller.take(1, linger_seconds=DEADLINE_SECONDS))
    inbox = puller._subscription
    await until(lambda: inbox._pending_next_msgs_calls)
    await asyncio.sleep(0)
    inbox._pending_queue.put_nowait(Msg(bus.client, f"{puller._inbox}.1", "", b"", {"Status": "404"}))
    for _ in range(turns):
        await asyncio.sleep(0)
    under_way = taking.cancel()
    await asyncio.wait([taking], timeout=DEADLINE_SECONDS)
    assert taking.cancelled() is under_way


async def test_the_same_job_is_queued_once(queue):
    for _ in range(3):
        await queue.publish(job("same"))
    assert (await queue.depth())["image"].jobs == 1


async def test_a_job_of_a_dead_encoder_goes_to_another(queue, connect):
    dies, lives = await connect("dies"), EncodeQueue(await connect("lives"), SHORT)
    await queue.publish(job("a"))
    (lost,) = await EncodeQueue(dies, SHORT).pull(MODALITIES, batch=1, wait=2)
    assert lost.is_first
    await dies.close()
    (again,) = await lives.pull(MODALITIES, batch=1, wait=10)
    assert (again.job.job_id, again.is_first) == ("a", False)
    await again.ack()


async def test_a_job_kept_alive_is_not_delivered_twice(queue, connect):
    other = EncodeQueue(await connect("other"), SHORT)
    await queue.publish(job("long"))
    (delivery,) = await queue.pull(MODALITIES, batch=1, wait=2)
    async with delivery.keep_alive():
        assert await other.pull(MODALITIES, batch=1, wait=2.5 * SHORT.ack_wait_seconds) == []
    await delivery.ack()
    assert (await queue.depth())["image"].jobs == 0


async def test_a_job_given_back_comes_again_after_the_delay(connect):
    queue = EncodeQueue(await connect("encoder"), PATIENT)
    await queue.ensure()
    await queue.publish(job("a"))
    (first,) = await queue.pull(MODALITIES, batch=1, wait=2)
    begin = time.monotonic()
    await first.retry(0.4)
    (second,) = await queue.pull(MODALITIES, batch=1, wait=20)
    assert time.monotonic() - begin > 0.3
    assert not second.is_first
    await second.ack()
    await queue.close()


def recorded_delivery(clock: FakeClock, sent: list[bytes]) -> Delivery:
    async def publish(_reply: str, verb: bytes, **_: float) -> None:
        sent.append(verb)

    bus = SimpleNamespace(client=SimpleNamespace(publish=publish, request=publish))
    metadata = SimpleNamespace(num_delivered=1, sequence=SimpleNamespace(stream=1))
    return Delivery(bus, SimpleNamespace(metadata=metadata, reply="ack"), job("a"), PATIENT, clock)


async def test_a_delivery_is_kept_alive_three_times_within_the_wait() -> None:
    clock, sent = FakeClock(), list[bytes]()
    async with recorded_delivery(clock, sent).keep_alive():
        await clock.let_pass(PATIENT.ack_wait_seconds)
    await clock.let_pass(PATIENT.ack_wait_seconds)
    assert sent == [b"+WPI"] * 3


async def test_a_delivery_is_kept_alive_after_a_connection_that_failed(monkeypatch) -> None:
    clock, sent = FakeClock(), list[bytes]()
    delivery = recorded_delivery(clock, sent)
    publish, faults = delivery._bus.client.publish, [RuntimeError("the handler is closed")]

    async def fail_once(*arguments) -> None:
        if faults:
            raise faults.pop()
        await publish(*arguments)

    monkeypatch.setattr(delivery._bus.client, "publish", fail_once)
    async with delivery.keep_alive():
        await clock.let_pass(PATIENT.ack_wait_seconds)
    assert sent
    assert set(sent) == {b"+WPI"}


async def test_a_delivery_given_back_is_not_kept_alive_any_longer() -> None:
    """The queue would deliver it after the acknowledgement wait, not after the delay."""
    clock, sent = FakeClock(), list[bytes]()
    delivery = recorded_delivery(clock, sent)
    async with delivery.keep_alive():
        await delivery.retry(0.1)
        await clock.let_pass(PATIENT.ack_wait_seconds)
    assert [verb[:5] for verb in sent] == [b"-NAK "]


async def test_a_joined_delivery_leaves_the_queue_with_its_job(queue, connect):
    """The same message once more, and a copy that was published when the server had forgotten the first."""
    await queue.publish(job("a"))
    (running,) = await queue.pull(MODALITIES, batch=1, wait=2)
    (again,) = await queue.pull(MODALITIES, batch=1, wait=DEADLINE_SECONDS)  # after the wait
    running.join(again)
    await queue.publish(job("a"), copy=1)
    (copy,) = await queue.pull(MODALITIES, batch=1, wait=DEADLINE_SECONDS)
    running.join(copy)
    assert (again.is_first, copy.is_first, len(running._replies)) == (False, True, 2)
    await running.ack()
    assert (await queue.depth())["image"].jobs == 0


async def test_the_first_delivery_still_ends_a_redelivered_job(queue):
    await queue.publish(job("a"))
    (running,) = await queue.pull(MODALITIES, batch=1, wait=2)
    (elsewhere,) = await queue.pull(MODALITIES, batch=1, wait=DEADLINE_SECONDS)
    assert not elsewhere.is_first
    async with running.keep_alive():
        assert await queue.pull(MODALITIES, batch=1, wait=2.5 * SHORT.ack_wait_seconds) == []
    await running.ack()
    assert (await queue.depth())["image"].jobs == 0


async def test_a_job_given_back_is_queued_once_across_restarts(own_nats_server, connect):
    queue = EncodeQueue(await connect("here"), PATIENT)
    await queue.ensure()
    await queue.publish(job("a"))
    (delivery,) = await queue.pull(MODALITIES, batch=1, wait=DEADLINE_SECONDS)
    await delivery.retry(0.0)
    await queue.publish(job("a"))
    await asyncio.to_thread(own_nats_server.kill)
    await asyncio.to_thread(own_nats_server.start)

    async def is_published() -> bool:
        await queue.publish(job("a"))
        return True

    await until(is_published, retried=(DeadlineError, PeerLostError))
    assert (await queue.depth())["image"].jobs == 1


async def test_a_job_that_was_terminated_is_queued_again_as_another_copy(queue):
    await queue.publish(job("a"))
    (delivery,) = await queue.pull(MODALITIES, batch=1, wait=2)
    await delivery.terminate("its receiver is lost")
    await queue.publish(job("a"))
    assert (await queue.depth())["image"].jobs == 0, "a duplicate"
    for _ in range(2):
        await queue.publish(job("a"), copy=1)
    assert (await queue.depth())["image"].jobs == 1


async def test_poison_is_terminated_with_its_reason_and_never_comes_back(queue, connect):
    bus = await connect("spy")
    reasons: asyncio.Queue[bytes] = asyncio.Queue()

    async def spy(message) -> None:
        await reasons.put(message.data)

    stream = bus.subjects.encode_stream
    await bus.client.subscribe(f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{stream}.*", cb=spy)
    await bus.flush()
    await queue.publish(job("bad"))
    (delivery,) = await queue.pull(MODALITIES, batch=1, wait=2)
    await delivery.terminate("not a\r\nPNG")
    async with asyncio.timeout(30):
        assert b"not a  PNG" in await reasons.get()
    assert await queue.pull(MODALITIES, batch=1, wait=2 * SHORT.ack_wait_seconds) == []
    assert (await queue.depth())["image"].jobs == 0


async def test_a_full_queue_is_a_typed_error_and_keeps_what_it_has(connect):
    small = EncodeQueue(await connect("small"), QueueLimits(max_jobs=3))
    await small.ensure()
    for i in range(3):
        await small.publish(job(f"j{i}"))
    with pytest.raises(OverloadedError, match="full"):
        await small.publish(job("j3"))
    assert (await small.depth())["image"].jobs == 3


@pytest.mark.parametrize(("ranges", "fits"), [(120_000, True), (200_000, False)])
async def test_other_requests_go_on_while_a_feature_of_many_ranges_is_checked(ranges: int, fits: bool):
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    try:
        with nullcontext() if fits else pytest.raises(CapacityError):
            await check_fits(replace(job("a").feature, ranges=[[70_000, 1]] * ranges))
        assert turns > 1
    finally:
        running.cancel()


async def test_a_checked_feature_fits_the_queue_with_the_longest_names(queue):
    def spread(ranges: int) -> FeatureRef:
        return replace(job("a").feature, ranges=[[70_000, 70_000]] * ranges)

    fewest, most = 0, 200_000  # ranges that pass, and that do not
    while most - fewest > 1:
        middle = (fewest + most) // 2
        try:
            await check_fits(spread(middle))
        except CapacityError:
            most = middle
        else:
            fewest = middle
    name = "n" * 253  # the longest name of a pod
    largest = replace(
        job("a"), feature=spread(fewest), gateway=name, receiver=name, request_id=name, trace={name: name}
    )
    await queue.publish(largest)
    with pytest.raises(CapacityError, match=r"separate ranges of the prompt.*send a smaller image"):
        await queue.publish(replace(largest, feature=spread(most + 1000)))
    assert (await queue.depth())["image"].jobs == 1


async def test_a_job_for_a_missing_queue_must_be_published_again(connect):
    queue = EncodeQueue(await connect("early"))
    with pytest.raises(DeadlineError, match="publish it again"):
        await queue.publish(job("a"))
    await queue.ensure()
    await queue.publish(job("a"))
    assert (await queue.depth())["image"].jobs == 1


async def test_images_and_audio_do_not_wait_behind_videos(queue):
    for i in range(20):
        await queue.publish(job(f"v{i}", "video", 100_000))
    await queue.publish(job("i", "image"))
    await queue.publish(job("s", "audio"))
    got = await queue.pull(MODALITIES, batch=3, wait=2)
    assert sorted(delivery.job.feature.modality for delivery in got) == ["audio", "image", "video"]
    ones = [(await queue.pull(MODALITIES, batch=1, wait=2))[0].job.feature.modality for _ in range(3)]
    assert ones == ["video"] * 3


async def test_every_modality_gets_its_turn_one_job_at_a_time(queue):
    for modality in MODALITIES:
        for i in range(6):
            await queue.publish(job(f"{modality}{i}", modality))
    got = [(await queue.pull(MODALITIES, batch=1, wait=2))[0].job.feature.modality for _ in range(6)]
    assert {modality: got.count(modality) for modality in MODALITIES} == dict.fromkeys(MODALITIES, 2)


async def test_a_batch_is_filled_from_one_modality_when_the_others_are_empty(queue):
    for i in range(8):
        await queue.publish(job(f"v{i}", "video"))
    assert len(await queue.pull(MODALITIES, batch=6, wait=2)) == 6


async def test_the_depth_is_work_and_includes_jobs_in_progress(queue):
    await queue.publish(job("small", "image", 64))
    await queue.publish(job("large", "image", 12_345))
    await queue.publish(job("film", "video", 1_000_000))
    await queue.pull(["video"], batch=1, wait=2)
    depth = await queue.depth()
    assert (depth["image"].jobs, depth["image"].work, depth["image"].running_jobs) == (2, 64 + 13_000, 0)
    assert (depth["video"].jobs, depth["video"].work, depth["video"].running_jobs) == (1, 1_000_000, 1)
    assert depth["audio"].jobs == 0


@pytest.mark.parametrize("size", ["x", "-1", "²", "9" * 400])
async def test_the_depth_is_read_whatever_subjects_others_publish(queue, connect, size):
    await queue.publish(job("small", "image", 64))
    bus = await connect("stranger")
    await bus.client.publish(bus.subjects.encode_work("image", "0").removesuffix("0") + size, b"no job")
    await bus.flush()
    depth = await queue.depth()
    assert (depth["image"].jobs, depth["image"].work) == (1, 64)


@pytest.mark.parametrize("work", [0, 1, 99, 100, 101, 999, 1000, 12_345, 9_999_999])
def test_rounded_work_is_never_less_and_at_most_a_tenth_more(work):
    assert work <= round_work(work) <= work * 1.1


async def test_nothing_is_lost_when_the_server_restarts(own_nats_server, connect):
    here = EncodeQueue(await connect("here"), SHORT)
    there = EncodeQueue(await connect("there"), SHORT)
    await here.ensure()
    names = {f"j{i}" for i in range(10)}
    for name in sorted(names):
        await here.publish(job(name))
    in_hand = await there.pull(MODALITIES, batch=3, wait=2)
    waits = asyncio.create_task(there.pull(["audio"], batch=1, wait=30))
    await asyncio.to_thread(own_nats_server.kill)
    await asyncio.to_thread(own_nats_server.start)
    done: set[str] = set()
    async with asyncio.timeout(30):
        while done != names:
            for delivery in await here.pull(["image"], batch=4, wait=2):
                done.add(delivery.job.job_id)
                await delivery.ack()
        await here.publish(job("late", "audio"))
        (late,) = await waits
    assert late.job.job_id == "late"
    assert len(in_hand) == 3


async def test_a_pull_outlives_a_server_that_forgot_the_queue(own_nats_server, connect):
    queue = EncodeQueue(await connect("here"), QueueLimits(memory_storage=True))
    await queue.ensure()
    waits = asyncio.create_task(queue.pull(MODALITIES, batch=1, wait=30))
    await asyncio.to_thread(own_nats_server.kill)
    await asyncio.to_thread(own_nats_server.start)
    async with asyncio.timeout(20):
        with pytest.raises(PeerLostError):
            await queue.depth()
        await queue.ensure()
        await queue.publish(job("a"))
        (delivery,) = await waits
    assert delivery.job.job_id == "a"
