"""Encoders that drain hand their caches over to those that remain, over a real server and between real processes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from mmd_api.contract.subjects import Subjects
from mmd_api.pipeline import PipelineConfig
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_cli.samples import draw
from mmd_workers.encoder import cache_handover
from mmd_workers.encoder.cache_handover import FeatureTaker, hand_over, seconds_of
from mmd_workers.features.cache import FeatureCache
from mmd_workers.features.store import FeatureStore
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.frontend import load_frontend
from mmd_workers.model.prompt import Feature
from mmd_workers.observe.metrics import Metrics
from mmd_workers.prefill.queue_source import QueueSource
from mmd_workers.process.identity import identified
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.jobs import EncodeQueue, QueueLimits
from mmd_workers.wire.media import MediaServer
from mmd_workers.wire.messages.encoder import FeaturesGiven, FeaturesWanted, GivenFeature
from mmd_workers.wire.messages.message_parts import FeatureRef, Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest
from mmd_workers.wire.peers import PeerDirectory
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import DEADLINE_SECONDS, until

from .worker_process import environment_of

Connect = Callable[[str], Awaitable[Bus]]
ROWS, WIDTH = 4, 8
SIZE = 4 * ROWS * WIDTH
SECONDS = 20.0
MEDIA = 3


def feature(value: float) -> Feature:
    return Feature("image", {"embeddings": torch.full((ROWS, WIDTH), float(value))})


def cache_of(*names: str, most: int = 100) -> FeatureCache:
    """Each hotter than the one before."""
    cache = FeatureCache(most * SIZE)
    for n, name in enumerate(names):
        cache.put(name, feature(n))
        for _ in range(3 * n):
            cache.get(name)
    return cache


async def taker(connect: Connect, pod: str, cache: FeatureCache, *, draining: bool = False) -> FeatureTaker:
    made = FeatureTaker(await connect(pod), pod, cache, lambda: draining)
    await made.start()
    return made


async def test_features_no_remaining_encoder_has_are_divided_equally(connect: Connect) -> None:
    given = cache_of(*(f"f{n}" for n in range(8)))
    one, two = cache_of("f3"), cache_of()
    takers = [await taker(connect, "e-1", one), await taker(connect, "e-2", two)]
    metrics = Metrics()
    counts = await hand_over(await connect("e-0"), given, ["e-1", "e-2", "gone"], SECONDS, metrics)
    assert counts == {"sent": 7, "held": 1}
    assert metrics.handed_over.labels("sent")._value.get() == 7
    assert 3 <= len(two) <= 4
    assert all((f"f{n}" in one) != (f"f{n}" in two) for n in range(8))
    where = one if "f6" in one else two
    arrived = where.get("f6")
    assert arrived is not None
    assert torch.equal(arrived.tensors["embeddings"], feature(6).tensors["embeddings"])
    assert not any(taker._receiver.reserved_bytes for taker in takers)


async def test_an_encoder_with_a_full_cache_takes_only_hotter_features(connect: Connect) -> None:
    given = cache_of("cold", "warm", "hot")
    full = cache_of("mine", "mine-hotter", most=2)
    for _ in range(4):
        full.get("mine-hotter")
    await taker(connect, "e-1", full)
    counts = await hand_over(await connect("e-0"), given, ["e-1"], SECONDS, Metrics())
    assert counts == {"sent": 1, "refused": 2}
    assert "hot" in full
    assert "mine-hotter" in full


async def test_an_encoder_that_drains_itself_takes_nothing(connect: Connect) -> None:
    await taker(connect, "e-1", cache := cache_of(), draining=True)
    assert await hand_over(await connect("e-0"), cache_of("a"), ["e-1"], SECONDS, Metrics()) == {"refused": 1}
    assert not len(cache)


async def test_a_handover_ends_in_time_although_an_encoder_never_finishes(connect: Connect) -> None:
    made = await taker(connect, "e-1", cache_of())
    made._receiver._reserved = made._receiver._budget  # each offer has to wait
    counts = await hand_over(await connect("e-0"), cache_of("a", "b"), ["e-1"], 0.5, Metrics())
    assert sum(counts.values()) == 2
    assert set(counts) <= {"late", "failed"}


async def test_a_silent_encoder_gets_no_features_and_delays_the_drain_briefly(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drain waits two seconds for its answer."""
    monkeypatch.setattr(cache_handover, "REPLY_SECONDS", 0.2)
    silent = await connect("e-1")

    async def answer(_: FeaturesGiven) -> FeaturesWanted:
        await asyncio.sleep(60)
        raise AssertionError

    subject = silent.subjects.features_given("e-1")
    await silent.serve(subject, FeaturesGiven, answer)
    await taker(connect, "e-2", cache := cache_of())
    bus = await connect("e-0")
    request = bus.request

    async def ask(asked: str, *rest: Any, timeout: float) -> Any:
        return await request(asked, *rest, timeout=timeout if asked == subject else DEADLINE_SECONDS)

    monkeypatch.setattr(bus, "request", ask)
    assert await hand_over(bus, cache_of("a"), ["e-1", "e-2"], DEADLINE_SECONDS, Metrics()) == {"sent": 1}
    assert "a" in cache


async def test_what_is_handed_over_is_bounded_by_number_and_bytes(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_handover, "MOST_BYTES", 2 * SIZE)
    await taker(connect, "e-1", cache := cache_of())
    assert await hand_over(await connect("e-0"), cache_of("a", "b", "c"), ["e-1"], SECONDS, Metrics()) == {
        "sent": 2
    }
    assert "a" not in cache, "the coldest"
    monkeypatch.setattr(cache_handover, "MOST_FEATURES", 1)
    other = cache_of("d", "e")
    assert await hand_over(await connect("e-2"), other, ["e-1"], SECONDS, Metrics()) == {"sent": 1}


async def test_a_feature_beyond_the_in_flight_limit_is_handed_over_alone(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_handover, "IN_FLIGHT_BYTES", SIZE - 1)
    made = await taker(connect, "e-1", cache := cache_of())
    assert made._receiver._budget == SIZE - 1
    assert await hand_over(await connect("e-0"), cache_of("a", "b"), ["e-1"], SECONDS, Metrics()) == {
        "sent": 2
    }
    assert "a" in cache


async def test_an_offer_is_answered_in_one_pass_over_the_cache(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each feature counts those before it, which are hotter."""
    passed, next_coldest = 0, FeatureCache._next_coldest

    def counted(cache: FeatureCache) -> object:
        nonlocal passed
        passed += 1
        return next_coldest(cache)

    cache = cache_of(*(f"mine-{n}" for n in range(64)), most=64)
    made = await taker(connect, "e-1", cache)
    offered = [GivenFeature(f"f{n}", "image", SIZE, 3600.0 - n) for n in range(96)]
    monkeypatch.setattr(FeatureCache, "_next_coldest", counted)
    answer = await made._given(FeaturesGiven("e-0", offered, SECONDS))
    assert passed <= 64
    monkeypatch.undo()
    fits = [n for n in range(96) if cache.has_room_for((n + 1) * SIZE, 3600.0 - n)]
    assert 0 < len(fits) < 64, "some of its own are hotter"
    assert answer.wanted == [f"f{n}" for n in fits]


async def test_a_feature_that_was_not_announced_is_refused(connect: Connect) -> None:
    made = await taker(connect, "e-1", cache_of())
    assert made._verdict("unknown", 1) == "refuse"


def test_a_hand_over_takes_a_share_of_the_drain() -> None:
    assert seconds_of(20) == 5
    assert seconds_of(10_000) == cache_handover.MOST_SECONDS


# --- processes ----------------------------------------------------------------------------------------------------


@dataclass
class Fleet:
    """Encoder pods as processes; this one is the gateway and the prefill pod that asks them."""

    server: NatsServer
    environment: dict[str, str]
    folder: Path
    bus: Bus
    directory: PeerDirectory
    refs: list[FeatureRef]
    pods: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    store: FeatureStore = field(default_factory=lambda: FeatureStore(1 << 26, lambda *_: None))
    holders: list[str] = field(default_factory=list)
    requests: int = 0

    async def start(self, *names: str, **more: str) -> None:
        for n, name in enumerate(names):
            port = str(int(self.environment["MMD_HTTP_PORT"]) + len(self.pods) + n)
            environment = self.environment | {"MMD_POD_NAME": name, "MMD_HTTP_PORT": port} | more
            with (self.folder / f"{name}.log").open("ab") as log:
                self.pods[name] = subprocess.Popen(
                    [sys.executable, "-m", "mmd_cli", "worker", "--pool", "encoder", "--roles", "encode"],
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
        await until(lambda: set(names) <= {beat.pod for beat in self.directory.pods("encode")})

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    async def ask(self, source: QueueSource, ref: FeatureRef) -> Feature:
        """As a request for one medium that no prefill pod has."""
        self.requests += 1
        now, name = time.time(), f"r{self.requests}"
        request = GenerateRequest(
            name, 0, "gateway-0", [1], [ref], Sampling(1), [], deadline=now + 120, arrived=now
        )
        admitted = await self.store.admit(
            name, {ref.feature_id: 1 << 20}, lambda _: source.request(ref, request)
        )
        feature = await asyncio.wait_for(asyncio.shield(admitted.arrivals[ref.feature_id]), 120)
        self.store.release(name)
        self.store._discard(ref.feature_id)
        return feature

    async def end(self, name: str) -> int:
        self.pods[name].send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.pods[name].wait, 120)


@asynccontextmanager
async def fleet(
    server: NatsServer, folder: Path, encoder: Mapping[str, int] = MappingProxyType({})
) -> AsyncIterator[tuple[Fleet, QueueSource]]:
    """`encoder`: fields of its spec."""
    environment = environment_of(server, folder, f"cache-{uuid.uuid4().hex[:8]}")
    file = Path(environment["MMD_PIPELINE_CONFIG"])
    described = json.loads(file.read_text())
    described["spec"]["encoder"] |= encoder
    file.write_text(json.dumps(described))
    config = PipelineConfig.load(environment["MMD_PIPELINE_CONFIG"])
    settings = identified(WorkerSettings(config, "gateway-0", "127.0.0.1", 0, server.url, threads=1))
    bus = await Bus.connect(server.url, "prefill-0", Subjects(config.namespace, config.name, settings.mesh))
    directory = PeerDirectory(bus, 5.0)
    await directory.start()
    files, refs = await references(config, MEDIA)
    server_of_media = MediaServer(bus, "gateway-0", files.get)
    await server_of_media.start()
    queue = EncodeQueue(bus, QueueLimits(memory_storage=True))
    await queue.ensure()
    made = Fleet(server, environment, folder, bus, directory, refs)
    source = QueueSource(
        *(
            bus,
            "prefill-0",
            "i1",
            queue,
            lambda _: made.holders,
            lambda: 0,
            made.store,
            1 << 20,
            1 << 18,
            120.0,
            5.0,
        ),
        metrics=Metrics(),
    )
    await source.start()
    try:
        yield made, source
    finally:
        for pod in made.pods.values():
            pod.kill()
            pod.wait(30)
        await directory.close()
        await bus.close(timeout=1.0)


async def references(config: PipelineConfig, media: int) -> tuple[dict[str, bytes], list[FeatureRef]]:
    """Pictures, and what a gateway would ask about them."""
    frontend = load_frontend(ModelSpec(id=config.spec.model.id), MediaPolicy())
    decoders = DecodePool(1, 30)
    await decoders.start()
    files, refs = {}, []
    try:
        for seed in range(media):
            data = draw("image", seed).bytes
            digest = hashlib.sha256(data).hexdigest()
            info = await decoders.probe(data, "image", MediaPolicy())
            medium = frontend.layout([{"role": "user", "content": [{"type": "image"}]}], [info]).media[0]
            sampling = asdict(medium.sampling)
            size = sampling.pop("size")
            refs.append(
                FeatureRef(
                    *(f"feature-{seed}", digest, "image", len(data), medium.num_tokens),
                    *([list(span) for span in medium.ranges], medium.geometry, sampling, medium.work),
                    host_bytes=medium.host_bytes,
                    size=size,
                )
            )
            files[digest] = data
    finally:
        await decoders.close()
    return files, refs


async def test_the_cache_of_an_encoder_process_survives_its_drain_in_another(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with fleet(nats_server, tmp_path) as (pods, source):
        await pods.start("encoder-1")
        before = [await pods.ask(source, ref) for ref in pods.refs]
        await pods.start("encoder-0")
        assert await pods.end("encoder-1") == 0
        assert "handed over 3 of 3 cached features" in pods.log_of("encoder-1")
        pods.holders[:] = ["encoder-0"]
        after = [await pods.ask(source, replace_gateway(ref)) for ref in pods.refs]
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one.tensors["embeddings"], other.tensors["embeddings"])


async def test_an_encoder_process_that_was_killed_finds_its_features_on_disk(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with fleet(nats_server, tmp_path, {"cacheMebibytes": 0}) as (pods, source):
        disk = {
            "MMD_FEATURE_DISK": str(tmp_path / "volume" / "encoder-0"),
            "MMD_FEATURE_DISK_MEBIBYTES": "16",
        }
        await pods.start("encoder-0", **disk)
        before = [await pods.ask(source, ref) for ref in pods.refs]
        files = tmp_path / "volume"
        await until(lambda: len(list(files.glob("*/*/*.safetensors"))) == len(pods.refs))
        pods.pods["encoder-0"].kill()
        pods.pods["encoder-0"].wait(30)
        await until(lambda: not pods.directory.pods("encode"))
        await pods.start("encoder-0", **disk)
        pods.holders[:] = ["encoder-0"]
        after = [await pods.ask(source, replace_gateway(ref)) for ref in pods.refs]
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one.tensors["embeddings"], other.tensors["embeddings"])


async def test_an_encoder_that_is_killed_while_it_hands_over_costs_no_request(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with fleet(nats_server, tmp_path) as (pods, source):
        await pods.start("encoder-1")
        before = [await pods.ask(source, ref) for ref in pods.refs]
        await pods.start("encoder-0")
        pods.pods["encoder-1"].send_signal(signal.SIGTERM)
        await until(lambda: "draining" in pods.log_of("encoder-1"))
        pods.pods["encoder-1"].kill()
        pods.holders[:] = ["encoder-1", "encoder-0"]
        after = [await pods.ask(source, ref) for ref in pods.refs]
        for one, other in zip(before, after, strict=True):
            assert torch.allclose(one.tensors["embeddings"], other.tensors["embeddings"])
        assert await pods.end("encoder-0") == 0


def replace_gateway(ref: FeatureRef) -> FeatureRef:
    """The same medium, whose bytes nobody has any more: it can only come from a cache."""
    return FeatureRef(**{**asdict(ref), "digest": "0" * 64})
