"""Encode jobs between the pod that needs a feature and the encoder, over a real server: every job ends, and says how."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmd_api.contract.errors import ERRORS, BadMediaError, MmdError, UnprocessableMediumError
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.pools import EncoderSpec
from mmd_workers.encoder.encoder_service import EncoderService
from mmd_workers.encoder.job_claims import JobClaims
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.features.cache import FeatureCache
from mmd_workers.features.held import feature_identity
from mmd_workers.features.source import EncodeError
from mmd_workers.features.store import FeatureStore
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.prompt import Feature
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.prefill import queue_source
from mmd_workers.prefill.queue_source import QueueSource
from mmd_workers.wire import jobs
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.codec import Frame
from mmd_workers.wire.jobs import Delivery, EncodeQueue, QueueLimits
from mmd_workers.wire.messages.encoder import EncodeJob, EncodeTaken
from mmd_workers.wire.messages.gateway import MediaRead
from mmd_workers.wire.messages.message_parts import Acknowledged, FeatureRef, Sampling
from mmd_workers.wire.messages.prefill import EncodeCheck, EncodeFailed, GenerateRequest
from mmd_workers.wire.server import NatsServer
from support.harness.clock import FakeClock
from support.harness.waiting import DEADLINE_SECONDS, until
from support.serving.memory_bus import MemoryNet

pytestmark = pytest.mark.promise

NO_TRACING = Tracing("test", "test", "test", None)

Connect = Callable[[str], Awaitable[Bus]]
BYTES = 4096
MAX_ATTEMPTS = 3
REF = FeatureRef("feature-1", "digest", "image", 10, 4, [[0, 4]], {}, {}, 16)


def request(deadline_seconds: float = 30.0, gateway: str = "gateway-0") -> GenerateRequest:
    now = time.time()
    return GenerateRequest("r", 0, gateway, [1] * 8, [REF], Sampling(4), [], now + deadline_seconds, now)


def feature() -> Feature:
    return Feature("image", {"embeddings": torch.arange(BYTES // 4, dtype=torch.float32).reshape(4, -1)})


def nobody(_: str) -> list[str]:
    return []


async def receiver(
    bus: Bus,
    job_timeout_seconds: float = 20.0,
    holders: Callable[[str], list[str]] = nobody,
    memory_storage: bool = True,
    pod: str = "prefill-0",
    ack_wait_seconds: float = 60.0,
    absences: Callable[[], int] = lambda: 0,
) -> tuple[QueueSource, FeatureStore]:
    store = FeatureStore(1 << 20, lambda *_: None)
    queue = EncodeQueue(bus, QueueLimits(memory_storage=memory_storage, ack_wait_seconds=ack_wait_seconds))
    await queue.ensure()
    source = QueueSource(
        *(
            bus,
            pod,
            "i1",
            queue,
            holders,
            absences,
            store,
            1 << 16,
            1 << 14,
            job_timeout_seconds,
            2.0,
            Metrics(),
        )
    )
    await source.start()
    await store.admit("r#0", {REF.feature_id: BYTES}, lambda _: None)
    return source, store


def encoder(
    bus: Bus,
    alive: dict[str, str],
    cache: FeatureCache,
    ack_wait_seconds: float = 60.0,
    silent_seconds: float = math.inf,
) -> tuple[EncoderService, EncodeQueue, Metrics]:
    """An encoder whose cache has the feature already: what is tested is the way of the job."""
    metrics = Metrics()
    unused: Any = None
    decoders = DecodePool(1, 5, 1 << 20)
    pipeline = EncodePipeline(unused, decoders, MediaPolicy(), EncoderSpec(), cache, metrics)
    queue = EncodeQueue(bus, QueueLimits(memory_storage=True, ack_wait_seconds=ack_wait_seconds))
    claims = JobClaims(bus, "i1", alive.get, lambda _: silent_seconds)
    service = EncoderService(bus, queue, pipeline, ["image"], claims, MAX_ATTEMPTS, metrics, NO_TRACING)
    return service, queue, metrics


def with_feature() -> FeatureCache:
    cache = FeatureCache(1 << 20)
    cache.put(REF.feature_id, feature())
    return cache


async def jobs_left(queue: EncodeQueue) -> int:
    return (await queue.depth())["image"].jobs


async def until_done(queue: EncodeQueue, seconds: float = DEADLINE_SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while await jobs_left(queue):
            await asyncio.sleep(0.05)


async def test_waiters_get_the_error_of_a_job_that_could_not_be_published(connect: Connect) -> None:
    """Whatever the reason, and long before the deadline."""

    def broken(_: str) -> list[str]:
        raise KeyError("holders")

    source, store = await receiver(await connect("prefill-0"), holders=broken)
    arrival = store.arrival(REF.feature_id)
    source.request(REF, request(deadline_seconds=600.0))
    with pytest.raises(EncodeError, match="KeyError") as failed:
        await asyncio.wait_for(asyncio.shield(arrival), DEADLINE_SECONDS)
    assert failed.value.retryable


@pytest.mark.parametrize("kept", [True, False], ids=["stored", "lost"])
async def test_a_server_outage_leaves_a_job_queued_exactly_once(
    own_nats_server: NatsServer, connect: Connect, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """The feature is not waited for until the job's deadline, while no encoder has anything to do."""
    bus, gateway = await connect("prefill-0"), await connect("gateway-0")
    source, _ = await receiver(bus, job_timeout_seconds=600.0, memory_storage=not kept)
    queue = EncodeQueue(gateway, QueueLimits(memory_storage=not kept, ack_wait_seconds=60.0))
    published = 0

    async def publish(job: EncodeJob, copy: int) -> None:
        nonlocal published
        await EncodeQueue.publish(source._queue, job, copy)
        published += 1

    monkeypatch.setattr(source._queue, "publish", publish)
    source.request(REF, request(deadline_seconds=600.0))
    async with asyncio.timeout(30):
        while published != 1:
            await asyncio.sleep(0.02)
    await asyncio.to_thread(own_nats_server.kill)
    await asyncio.to_thread(own_nats_server.start)
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(MmdError):
                await queue.ensure()  # as a gateway does
            if published == 2:
                break
            await asyncio.sleep(0.05)
    assert await jobs_left(queue) == 1


async def test_a_feature_travels_from_the_encoder_to_its_requester(connect: Connect) -> None:
    source, store = await receiver(await connect("prefill-0"))
    service, queue, _ = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, with_feature())
    running = asyncio.create_task(service.run())
    source.request(REF, request())
    arrived = await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), DEADLINE_SECONDS)
    assert torch.equal(arrived.tensors["embeddings"], feature().tensors["embeddings"])
    await until_done(queue)
    service.drain()
    await asyncio.wait_for(running, DEADLINE_SECONDS)
    assert service.drained


async def test_a_job_that_is_queued_twice_delivers_its_feature_once(connect: Connect) -> None:
    """As after an outage longer than the queue remembers what was published: the first copy may be there still."""
    source, store = await receiver(await connect("prefill-0"), ack_wait_seconds=1.0)
    source.request(REF, request())
    arrival = asyncio.shield(store.arrival(REF.feature_id))
    alive = {"prefill-0": "i1", "e-0": "i1", "e-1": "i1"}
    services = [encoder(await connect(f"e-{n}"), alive, with_feature(), 1.0) for n in range(2)]
    queue = services[0][1]
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await jobs_left(queue):
            await asyncio.sleep(0.05)
    (job,) = source._wanted.values()
    await queue.publish(job, copy=1)
    assert await jobs_left(queue) == 2
    running = [asyncio.create_task(service.run()) for service, _, _ in services]
    await asyncio.wait_for(arrival, DEADLINE_SECONDS)
    await until_done(queue)
    received = source._metrics.transfer_bytes.labels("embedding", "received")._value.get()
    assert received == BYTES
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_a_job_whose_receiver_is_lost_leaves_the_queue(connect: Connect) -> None:
    bus = await connect("prefill-0")
    source, _ = await receiver(bus)
    source.request(REF, request())
    queue = EncodeQueue(bus)
    async with asyncio.timeout(30):
        while not await jobs_left(queue):
            await asyncio.sleep(0.02)
    await bus.close()
    service, queue, metrics = encoder(await connect("encoder-0"), {"prefill-0": "another"}, with_feature())
    running = asyncio.create_task(service.run())
    await until_done(queue)
    running.cancel()
    assert metrics.encode_jobs.labels("image", "receiver_gone")._value.get() == 1


async def test_a_receiver_briefly_away_gets_its_feature_at_the_first_attempt(
    connect: Connect,
) -> None:
    bus = await connect("prefill-0")
    source, store = await receiver(bus)
    source.request(REF, request())
    await source._receiver._bulk.run(source._receiver._offers.unsubscribe())  # type: ignore[union-attr]
    service, queue, metrics = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, with_feature())
    running = asyncio.create_task(service.run())
    async with asyncio.timeout(30):
        while not metrics.transfer_failures.labels("embedding", "peer_lost")._value.get():
            await asyncio.sleep(0.02)
    await source._receiver.start()
    await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), DEADLINE_SECONDS)
    await until_done(queue)
    running.cancel()
    assert metrics.redeliveries.labels("image")._value.get() == 0


async def test_an_encoder_that_cannot_reach_a_receiver_is_free_until_it_is_back(connect: Connect) -> None:
    """The feature is made, and the receiver is cut off before it can be sent."""
    source, store = await receiver(await connect("prefill-0"))
    source.request(REF, request())
    await source._receiver._bulk.run(source._receiver._offers.unsubscribe())  # type: ignore[union-attr]
    alive = dict[str, str]()
    service, queue, metrics = encoder(await connect("encoder-0"), alive, with_feature(), silent_seconds=0.0)
    running = asyncio.create_task(service.run())
    await until(metrics.transfer_failures.labels("embedding", "peer_lost")._value.get)
    await until(lambda: not service._jobs, "the job holds no slot")
    assert await jobs_left(queue) == 1
    alive["prefill-0"] = "i1"
    await source._receiver.start()
    await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), DEADLINE_SECONDS)
    await until_done(queue)
    running.cancel()
    assert metrics.redeliveries.labels("image")._value.get() == 0


async def test_a_job_that_was_dropped_during_an_absence_is_queued_again(connect: Connect) -> None:
    """The receiver was cut off for so long that an encoder took it for lost."""
    absences = 3
    source, store = await receiver(await connect("prefill-0"), absences=lambda: absences)
    source.request(REF, request())
    service, queue, _ = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, with_feature())
    (delivery,) = await queue.pull(["image"], 1, DEADLINE_SECONDS)
    await delivery.terminate("its receiver is lost")
    absences += 1
    running = asyncio.create_task(service.run())
    await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), DEADLINE_SECONDS)
    await until_done(queue)
    running.cancel()


async def test_a_medium_whose_gateway_is_lost_is_given_up_as_retryable(
    connect: Connect,
) -> None:
    source, store = await receiver(await connect("prefill-0"))
    service, queue, _ = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, FeatureCache(1))
    running = asyncio.create_task(service.run())
    arrival = store.arrival(REF.feature_id)
    source.request(REF, request(gateway="nobody"))
    with pytest.raises(EncodeError) as given_up:
        await asyncio.wait_for(asyncio.shield(arrival), DEADLINE_SECONDS)
    assert given_up.value.code == "media_gone"
    assert given_up.value.retryable
    await until_done(queue)
    running.cancel()


async def test_a_feature_nobody_delivers_fails_its_job_but_not_its_request(connect: Connect) -> None:
    source, store = await receiver(await connect("prefill-0"), job_timeout_seconds=0.3)
    arrival = store.arrival(REF.feature_id)
    source.request(REF, request())
    with pytest.raises(EncodeError, match="jobTimeoutSeconds") as late:
        await asyncio.wait_for(asyncio.shield(arrival), DEADLINE_SECONDS)
    assert late.value.retryable
    assert late.value.feature_id == REF.feature_id, "its job had all the time that one may take"
    assert store.used_bytes == 0


async def test_a_job_that_ends_with_its_request_says_nothing_about_the_medium(connect: Connect) -> None:
    source, store = await receiver(await connect("prefill-0"), job_timeout_seconds=60.0)
    arrival = store.arrival(REF.feature_id)
    source.request(REF, request(deadline_seconds=0.3))
    with pytest.raises(EncodeError, match="no encoder delivered") as late:
        await asyncio.wait_for(asyncio.shield(arrival), DEADLINE_SECONDS)
    assert late.value.feature_id == ""


async def test_poison_is_not_retryable_and_an_earlier_jobs_failure_is_ignored(connect: Connect) -> None:
    bus = await connect("prefill-0")
    source, store = await receiver(bus)
    arrival = store.arrival(REF.feature_id)
    source.request(REF, request())
    (job,) = source._wanted.values()
    failed = EncodeFailed(
        REF.feature_id, "an earlier job", BadMediaError.code, "not an image", retryable=False
    )
    await source._failed(failed)
    assert not arrival.done()
    await source._failed(replace(failed, job_id=job.job_id))
    with pytest.raises(EncodeError, match="not an image") as poison:
        await asyncio.shield(arrival)
    assert not poison.value.retryable
    assert poison.value.feature_id == "", "a damaged file is its client's error"


async def test_the_failure_of_all_encoders_names_the_medium(connect: Connect) -> None:
    source, store = await receiver(await connect("prefill-0"))
    arrival = store.arrival(REF.feature_id)
    source.request(REF, request())
    (job,) = source._wanted.values()
    code = UnprocessableMediumError.code
    await source._failed(EncodeFailed(REF.feature_id, job.job_id, code, "3 encoders failed", retryable=False))
    with pytest.raises(EncodeError) as failed:
        await asyncio.shield(arrival)
    assert failed.value.feature_id == REF.feature_id


async def test_a_job_without_waiters_leaves_the_encoder(connect: Connect) -> None:
    source, store = await receiver(await connect("prefill-0"))
    reading = asyncio.Event()

    async def never(_: MediaRead) -> Frame:
        reading.set()
        await asyncio.Event().wait()
        raise AssertionError

    bus = await connect("gateway-0")
    await bus.serve(bus.subjects.media("gateway-0"), MediaRead, never)
    alive = {"prefill-0": "i1", "gateway-0": "i1"}
    service, queue, metrics = encoder(await connect("encoder-0"), alive, FeatureCache(1))
    running = asyncio.create_task(service.run())
    source.request(REF, request())
    async with asyncio.timeout(30):
        await reading.wait()
    assert service._pipeline.running == 1
    store.release("r#0")  # the client left
    await until_done(queue)
    running.cancel()
    assert service._pipeline.running == 0
    assert metrics.encode_jobs.labels("image", "receiver_gone")._value.get() == 1


async def test_a_cached_feature_comes_from_the_encoder_that_has_it(connect: Connect) -> None:
    source, store = await receiver(await connect("prefill-0"), holders=lambda _: ["encoder-1"])
    alive = {"prefill-0": "i1", "gateway-0": "i1"}
    other, queue, others = encoder(await connect("encoder-0"), alive, FeatureCache(1))
    holder, _, holders = encoder(await connect("encoder-1"), alive, with_feature())
    running = [asyncio.create_task(service.run()) for service in (other, holder)]
    await queue.depth()
    source.request(REF, request(gateway="nobody"))
    await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), DEADLINE_SECONDS)
    await until_done(queue)
    async with asyncio.timeout(30):
        while holders.encode_jobs.labels("image", "ok")._value.get() < 1:  # counted after the receiver has it
            await asyncio.sleep(0.01)
    for task in running:
        task.cancel()
    assert holders.encode_jobs.labels("image", "ok")._value.get() == 1
    assert [others.encode_jobs.labels("image", code)._value.get() for code in ("ok", "media_gone")] == [0, 0]


@pytest.mark.parametrize("holder", ["gone", "has dropped it", "never delivers"])
async def test_a_feature_whose_holder_does_not_deliver_comes_through_the_queue(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    monkeypatch.setattr(queue_source, "SENDING_SECONDS", 0.3)
    source, store = await receiver(await connect("prefill-0"), holders=lambda _: ["encoder-1"])

    async def answer(job: EncodeJob) -> EncodeTaken:
        return EncodeTaken(job.job_id, taken=holder == "never delivers")

    if holder != "gone":
        bus = await connect("encoder-1")
        await bus.serve(bus.subjects.encode_cached("encoder-1"), EncodeJob, answer)
    service, queue, _ = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, with_feature())
    running = asyncio.create_task(service.run())
    source.request(REF, request())
    await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), DEADLINE_SECONDS)
    await until_done(queue)
    running.cancel()


@pytest.mark.parametrize("holder", ["makes it", "sends it"])
async def test_a_job_stays_unqueued_while_its_holder_provides_the_feature(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    monkeypatch.setattr(queue_source, "SENDING_SECONDS", 0.0)
    monkeypatch.setattr(queue_source, "HOLDER_CHECK_SECONDS", 0.02)
    monkeypatch.setattr(queue_source, "HOLDER_REPLY_SECONDS", DEADLINE_SECONDS)
    source, _ = await receiver(await connect("prefill-0"), holders=lambda _: ["encoder-1"])
    bus, asked, works = await connect("encoder-1"), 0, True

    async def answer(job: EncodeJob) -> EncodeTaken:
        nonlocal asked
        asked += 1
        return EncodeTaken(job.job_id, taken=True, making=works and holder == "makes it")

    await bus.serve(bus.subjects.encode_cached("encoder-1"), EncodeJob, answer)
    await bus.flush()
    transfers: Any = source._receiver._transfers
    if holder == "sends it":
        transfers[REF.feature_id] = object()
    source.request(REF, request())
    await until(lambda: asked >= 10)
    assert await jobs_left(source._queue) == 0
    works = False
    transfers.clear()
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await jobs_left(source._queue):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("holder", ["busy", "draining"])
async def test_a_cached_feature_is_sent_while_its_holder_has_no_slot_left(
    connect: Connect, holder: str
) -> None:
    """It waits neither for decoding nor for the tower, and no other encoder makes it again."""
    source, store = await receiver(await connect("prefill-0"), holders=lambda _: ["encoder-1"])
    service, _, metrics = encoder(await connect("encoder-1"), {"prefill-0": "i1"}, with_feature())
    working = asyncio.create_task(asyncio.Event().wait())
    service._jobs[working] = Delivery(service._bus, pulled(), job_for("elsewhere"), QueueLimits())  # type: ignore[index]
    for _ in range(service._max_jobs):
        await service._slots.acquire()
    running = asyncio.create_task(service.run())
    if holder == "draining":
        service.drain()
    await until_serving(service)
    source.request(REF, request(gateway="nobody"))
    await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), DEADLINE_SECONDS)
    await until(lambda: metrics.encode_jobs.labels("image", "ok")._value.get() == 1)
    assert not service.drained
    for task in (running, working):
        task.cancel()


async def test_a_feature_that_another_pod_waits_for_is_made_once(connect: Connect) -> None:
    """A second job for it goes to the encoder that is making it, with a free encoder at hand."""
    first, _ = await receiver(await connect("prefill-0"))
    reads, may_read = 0, asyncio.Event()

    async def read(_: MediaRead) -> Frame:
        nonlocal reads
        reads += 1
        await may_read.wait()
        raise BadMediaError("nothing to see")

    bus = await connect("gateway-0")
    await bus.serve(bus.subjects.media("gateway-0"), MediaRead, read)
    maker, queue, _ = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, FeatureCache(1 << 20))
    held: list[str] = []
    second, _ = await receiver(await connect("prefill-1"), holders=lambda _: held, pod="prefill-1")
    running = [asyncio.create_task(maker.run())]
    first.request(REF, request())
    await until(lambda: reads)
    assert feature_identity(REF.feature_id) in maker._pipeline._cache.held.changes, (
        "reported while it is made"
    )
    idle, _, _ = encoder(await connect("encoder-1"), {"prefill-0": "i1"}, FeatureCache(1 << 20))
    held.append("encoder-0")
    running.append(asyncio.create_task(idle.run()))
    second.request(REF, request())
    await until(lambda: maker._cached_jobs)
    assert (reads, idle._pipeline.running, await jobs_left(queue)) == (1, 0, 1)
    for task in running:
        task.cancel()


async def test_a_cached_feature_waits_for_none_of_those_that_are_being_made(connect: Connect) -> None:
    source, store = await receiver(await connect("prefill-0"), holders=lambda _: ["encoder-0"])
    reading = asyncio.Event()

    async def never(_: MediaRead) -> Frame:
        reading.set()
        await asyncio.Event().wait()
        raise AssertionError

    bus = await connect("gateway-0")
    await bus.serve(bus.subjects.media("gateway-0"), MediaRead, never)
    alive = {"prefill-0": "i1", "elsewhere": "i1"}
    service, queue, _ = encoder(await connect("encoder-0"), alive, with_feature())
    slow = replace(job_for("elsewhere"), feature=replace(REF, feature_id="slow"))
    await queue.publish(slow)
    running = asyncio.create_task(service.run())
    await asyncio.wait_for(reading.wait(), DEADLINE_SECONDS)
    for number in range(2 * service._max_jobs):
        joined = await service._take_cached(replace(slow, job_id=f"joins-{number}"))
        assert (joined.taken, joined.making) == (True, True)
    assert (await service._take_cached(replace(slow, job_id="joins-0"))).making, "asked again"
    held = await service._take_cached(job_for("elsewhere"))
    assert (held.taken, held.making) == (True, False)
    source.request(REF, request())
    await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), DEADLINE_SECONDS)
    assert len(service._cached_jobs) >= 2 * service._max_jobs
    running.cancel()
    await service.abandon()


async def test_an_encoder_with_the_feature_takes_a_job_past_the_queue(
    connect: Connect,
) -> None:
    held: list[str] = []
    source, store = await receiver(await connect("prefill-0"), holders=lambda _: held)
    source.request(REF, request())
    queue = source._queue
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await jobs_left(queue):
            await asyncio.sleep(0.02)
    service, _, _ = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, with_feature())
    service._modalities = []  # it never pulls
    running = asyncio.create_task(service.run())
    held.append("encoder-0")
    await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), DEADLINE_SECONDS)
    assert await jobs_left(queue) == 1, "an encoder that pulls it later finds that nobody waits for it"
    running.cancel()


@pytest.mark.parametrize("holder", ["dies", "loses it"])
async def test_a_feature_is_made_elsewhere_if_its_holder_fails_the_job(connect: Connect, holder: str) -> None:
    source, store = await receiver(await connect("prefill-0"), holders=lambda _: ["encoder-1"])
    bus, asked = await connect("encoder-1"), asyncio.Event()

    async def answer(job: EncodeJob) -> EncodeTaken:
        taken = not asked.is_set()
        asked.set()
        return EncodeTaken(job.job_id, taken=taken)

    await bus.serve(bus.subjects.encode_cached("encoder-1"), EncodeJob, answer)
    service, queue, _ = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, with_feature())
    running = asyncio.create_task(service.run())
    source.request(REF, request())
    await asyncio.wait_for(asked.wait(), DEADLINE_SECONDS)
    if holder == "dies":
        await bus.close()
    await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), DEADLINE_SECONDS)
    await until_done(queue)
    running.cancel()


async def test_a_job_that_is_asked_for_again_is_sent_once(connect: Connect) -> None:
    service, _, _ = encoder(await connect("encoder-0"), {}, with_feature())
    job = job_for("nobody")
    for _ in range(3):
        assert (await service._take_cached(job)).taken
    (task,) = (one for one in asyncio.all_tasks() if one.get_name() == f"cached-{job.job_id}")
    await asyncio.wait([task], timeout=DEADLINE_SECONDS)
    assert not service._cached_jobs


async def test_no_delivery_joins_one_that_is_leaving(connect: Connect) -> None:
    """It would neither be settled with the other nor handled."""
    service, queue, _ = encoder(await connect("encoder-0"), {}, with_feature())
    await queue.ensure()
    await queue.publish(job_for("nobody"))
    (delivery,) = await queue.pull(["image"], 1, DEADLINE_SECONDS)
    handling = asyncio.create_task(asyncio.sleep(0))
    service._jobs[handling] = delivery
    assert service._running(delivery.job) is delivery
    leaving = asyncio.create_task(delivery.retry(0.0))
    await handling
    assert service._running(delivery.job) is None
    await leaving


async def test_a_job_shared_with_a_remaining_request_continues(connect: Connect) -> None:
    source, store = await receiver(await connect("prefill-0"))
    await store.admit("other#0", {REF.feature_id: BYTES}, lambda _: None)
    source.request(REF, request())
    store.release("r#0")
    (job,) = source._wanted.values()
    assert (await source._checked(EncodeCheck(REF.feature_id, job.job_id))).wanted
    assert not (await source._checked(EncodeCheck(REF.feature_id, "an earlier job"))).wanted
    service, queue, _ = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, with_feature())
    running = asyncio.create_task(service.run())
    await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), DEADLINE_SECONDS)
    await until_done(queue)
    running.cancel()


async def test_a_failure_that_no_receiver_hears_keeps_its_job_in_the_queue() -> None:
    """The receiver may be cut off. The next encoder to get the job finds out whether it is lost."""
    clock, settled = FakeClock(), list[bytes]()
    bus = MemoryNet(clock).bus("encoder-0")

    async def settle(_reply: str, verb: bytes, timeout: float) -> None:
        settled.append(verb)

    bus.client.request = settle  # type: ignore[assignment, method-assign]
    delivery = Delivery(bus, pulled(), job_for("prefill-0"), QueueLimits())
    failed = EncodeFailed(REF.feature_id, delivery.job.job_id, "bad_media", "broken", retryable=False)
    reporting = asyncio.create_task(jobs.report_failure(bus, delivery, failed, "broken", clock))
    await clock.until(reporting.done)
    assert [verb[:5] for verb in settled] == [b"-NAK "]


async def test_a_failure_that_is_not_confirmed_keeps_its_job_in_the_queue() -> None:
    clock = FakeClock()
    bus, heard, settled = MemoryNet(clock).bus("encoder-0"), list[float](), list[bytes]()

    async def confirm_late(failed: EncodeFailed) -> Acknowledged:
        heard.append(clock.now())
        if len(heard) <= jobs._REPORTS:
            await asyncio.Event().wait()
        return Acknowledged()

    async def settle(_reply: str, verb: bytes, timeout: float) -> None:
        settled.append(verb)

    bus.client.request = settle  # type: ignore[assignment, method-assign]
    await bus.serve(bus.subjects.encode_failed("prefill-0"), EncodeFailed, confirm_late)
    delivery = Delivery(bus, pulled(), job_for("prefill-0"), QueueLimits())
    failed = EncodeFailed(REF.feature_id, delivery.job.job_id, "bad_media", "broken", retryable=False)
    for _ in range(2):
        reporting = asyncio.create_task(jobs.report_failure(bus, delivery, failed, "broken", clock))
        await clock.until(reporting.done)
    assert [verb[:5] for verb in settled] == [b"-NAK ", b"+TERM"]
    pauses = [later - earlier for earlier, later in pairwise(heard)]
    assert pauses == [jobs._CONFIRM_SECONDS + jobs._POLL_SECONDS] * jobs._REPORTS


def pulled() -> Any:
    """As much of a message of the queue as a delivery reads."""
    metadata = SimpleNamespace(num_delivered=1, sequence=SimpleNamespace(stream=1))
    return SimpleNamespace(metadata=metadata, reply="nowhere")


async def until_serving(service: EncoderService) -> None:
    """Until the bus of an encoder takes jobs past the queue."""
    subject = service._bus.subjects.encode_cached(service._bus.client_name)
    probe = replace(job_for("nobody"), feature=replace(REF, feature_id="unknown"))
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            with contextlib.suppress(MmdError):
                await service._bus.request(subject, probe, EncodeTaken, timeout=1)
                return
            await asyncio.sleep(0.02)


def job_for(receiver: str) -> EncodeJob:
    now = time.time()
    return EncodeJob("job", REF, "gateway-0", receiver, "i1", now + 30, now, "r")


async def test_a_second_request_for_a_feature_that_failed_gets_a_new_job(connect: Connect) -> None:
    source, store = await receiver(await connect("prefill-0"))
    source.request(REF, request())
    store.release("r#0")  # the client left
    await store.admit("r#1", {REF.feature_id: BYTES}, lambda _: None)
    source.request(REF, request())
    service, queue, _ = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, with_feature())
    running = asyncio.create_task(service.run())
    await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), DEADLINE_SECONDS)
    await until_done(queue)
    running.cancel()


async def test_a_code_that_no_error_has_is_internal(connect: Connect) -> None:
    """Codes become labels of metrics: a peer must not be able to make up as many as it likes."""
    source, store = await receiver(await connect("prefill-0"))
    peer = await connect("encoder-0")
    source.request(REF, request())
    (wanted,) = source._wanted.values()
    arrival = store.arrival(REF.feature_id)
    failed = EncodeFailed(REF.feature_id, wanted.job_id, "made-up-1234", "it broke", retryable=False)
    await peer.request(peer.subjects.encode_failed("prefill-0"), failed, Acknowledged, timeout=30)
    with pytest.raises(EncodeError, match="it broke") as caught:
        await asyncio.wait_for(arrival, 30)
    assert caught.value.code == "internal"


async def test_the_code_of_a_known_error_arrives(connect: Connect) -> None:
    source, store = await receiver(await connect("prefill-0"))
    peer = await connect("encoder-0")
    source.request(REF, request())
    (wanted,) = source._wanted.values()
    arrival = store.arrival(REF.feature_id)
    failed = EncodeFailed(REF.feature_id, wanted.job_id, "bad_media", "no image", retryable=False)
    await peer.request(peer.subjects.encode_failed("prefill-0"), failed, Acknowledged, timeout=30)
    with pytest.raises(EncodeError) as caught:
        await asyncio.wait_for(arrival, 30)
    assert (caught.value.code, caught.value.status) == ("bad_media", 400)


@pytest.mark.parametrize("row", ERRORS.values(), ids=ERRORS)
def test_a_given_up_medium_has_its_codes_status_and_remedy(row: type[MmdError]) -> None:
    error = EncodeError(row("why"), retryable=False)
    assert (error.code, error.status, error.remedy) == (row.code, row.status, row.remedy)
