"""Encode jobs between the pod that needs a feature and the encoder, over a real server: every job ends, and says how."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mmd_api.spec import EncoderBatching, MediaPolicy
from mmd_workers.encoder.cache import FeatureCache
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.encoder.service import EncoderService
from mmd_workers.errors import BadMediaError
from mmd_workers.model.types import Feature
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.prefill.features import FeatureStore
from mmd_workers.prefill.sources import EncodeError, QueueSource
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.jobs import EncodeQueue, QueueLimits
from mmd_workers.wire.messages import EncodeFailed, FeatureRef, GenerateRequest, Sampling

NO_TRACING = Tracing("test", "test", "test", None)

Connect = Callable[[str], Awaitable[Bus]]
BYTES = 4096
REF = FeatureRef("feature-1", "digest", "image", 10, 4, [[0, 4]], {}, {}, 16)


def request(deadline_seconds: float = 30.0, gateway: str = "gateway-0") -> GenerateRequest:
    now = time.time()
    return GenerateRequest("r", 0, gateway, [1] * 8, [REF], Sampling(4), [], now + deadline_seconds, now)


def feature() -> Feature:
    return Feature("image", {"embeddings": torch.arange(BYTES // 4, dtype=torch.float32).reshape(4, -1)})


async def receiver(bus: Bus, job_timeout_seconds: float = 20.0) -> tuple[QueueSource, FeatureStore]:
    store = FeatureStore(1 << 20, lambda *_: None)
    queue = EncodeQueue(bus, QueueLimits(memory_storage=True, ack_wait_seconds=1.0))
    await queue.ensure()
    source = QueueSource(
        *(bus, "prefill-0", "i1", queue, store, 1 << 16, 1 << 14, job_timeout_seconds, 2.0, Metrics())
    )
    await source.start()
    await store.admit("r#0", {REF.feature_id: BYTES})
    return source, store


def encoder(
    bus: Bus, alive: dict[str, str], cache: FeatureCache
) -> tuple[EncoderService, EncodeQueue, Metrics]:
    """An encoder whose cache has the feature already: what is tested is the way of the job."""
    metrics = Metrics()
    unused: Any = None
    pipeline = EncodePipeline(unused, unused, MediaPolicy(), EncoderBatching(), cache, metrics)
    queue = EncodeQueue(bus, QueueLimits(memory_storage=True, ack_wait_seconds=1.0))
    return EncoderService(bus, queue, pipeline, ["image"], 4, alive.get, metrics, NO_TRACING), queue, metrics


def with_feature() -> FeatureCache:
    cache = FeatureCache(1 << 20)
    cache.put(REF.feature_id, feature())
    return cache


async def jobs_left(queue: EncodeQueue) -> int:
    return (await queue.depth())["image"].jobs


async def until_done(queue: EncodeQueue, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while await jobs_left(queue):
            await asyncio.sleep(0.05)


async def test_a_feature_travels_from_the_encoder_to_whoever_asked(connect: Connect) -> None:
    source, store = await receiver(await connect("prefill-0"))
    service, queue, _ = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, with_feature())
    running = asyncio.create_task(service.run())
    source.request(REF, request())
    arrived = await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), 10)
    assert torch.equal(arrived.tensors["embeddings"], feature().tensors["embeddings"])
    await until_done(queue)
    service.drain()
    await asyncio.wait_for(running, 10)
    assert service.drained


async def test_a_job_whose_receiver_is_gone_leaves_the_queue(connect: Connect) -> None:
    bus = await connect("prefill-0")
    source, _ = await receiver(bus)
    source.request(REF, request())
    queue = EncodeQueue(bus)
    async with asyncio.timeout(5):
        while not await jobs_left(queue):
            await asyncio.sleep(0.02)
    await bus.close()
    service, queue, metrics = encoder(await connect("encoder-0"), {"prefill-0": "another"}, with_feature())
    running = asyncio.create_task(service.run())
    await until_done(queue)
    running.cancel()
    assert metrics.encode_jobs.labels("image", "receiver_gone")._value.get() == 1


async def test_a_receiver_that_is_away_for_a_moment_gets_its_feature_at_the_first_attempt(
    connect: Connect,
) -> None:
    bus = await connect("prefill-0")
    source, store = await receiver(bus)
    source.request(REF, request())
    await source._receiver._bulk.run(source._receiver._offers.unsubscribe())  # type: ignore[union-attr]
    service, queue, metrics = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, with_feature())
    running = asyncio.create_task(service.run())
    async with asyncio.timeout(10):
        while not metrics.transfer_failures.labels("embedding", "peer_lost")._value.get():
            await asyncio.sleep(0.02)
    await source._receiver.start()
    await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), 10)
    await until_done(queue)
    running.cancel()
    assert metrics.redeliveries.labels("image")._value.get() == 0


async def test_a_medium_whose_gateway_is_gone_is_given_up_so_that_the_request_can_be_placed_again(
    connect: Connect,
) -> None:
    source, store = await receiver(await connect("prefill-0"))
    service, queue, _ = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, FeatureCache(1))
    running = asyncio.create_task(service.run())
    arrival = store.arrival(REF.feature_id)
    source.request(REF, request(gateway="nobody"))
    with pytest.raises(EncodeError) as given_up:
        await asyncio.wait_for(asyncio.shield(arrival), 10)
    assert given_up.value.code == "media_gone"
    assert given_up.value.retryable
    await until_done(queue)
    running.cancel()


async def test_a_feature_that_no_encoder_delivers_fails_its_job_but_not_its_request(connect: Connect) -> None:
    source, store = await receiver(await connect("prefill-0"), job_timeout_seconds=0.3)
    arrival = store.arrival(REF.feature_id)
    source.request(REF, request())
    with pytest.raises(EncodeError, match="jobTimeoutSeconds") as late:
        await asyncio.wait_for(asyncio.shield(arrival), 5)
    assert late.value.retryable
    assert store.used_bytes == 0


async def test_poison_is_not_retryable_and_a_failure_of_an_earlier_job_is_no_news(connect: Connect) -> None:
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


async def test_a_second_request_for_a_feature_that_failed_gets_a_job_of_its_own(connect: Connect) -> None:
    source, store = await receiver(await connect("prefill-0"))
    source.request(REF, request())
    store.release("r#0")  # the client left
    await store.admit("r#1", {REF.feature_id: BYTES})
    source.request(REF, request())
    service, queue, _ = encoder(await connect("encoder-0"), {"prefill-0": "i1"}, with_feature())
    running = asyncio.create_task(service.run())
    await asyncio.wait_for(asyncio.shield(store.arrival(REF.feature_id)), 10)
    await until_done(queue)
    running.cancel()
