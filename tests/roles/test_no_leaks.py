"""Ten thousand media on pods that fail: when all requests have ended, nothing is held anywhere, and the sums balance."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmd_api.contract.errors import BadMediaError, LinkError, MediaGoneError, MmdError
from mmd_api.contract.pools import Modality
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.pools import EncoderBatching, EncoderSpec
from mmd_workers.encoder import encoder_service as service_module
from mmd_workers.encoder import pipeline as pipeline_module
from mmd_workers.encoder.budget import ByteBudget
from mmd_workers.encoder.cache_handover import FeatureTaker, hand_over
from mmd_workers.encoder.encoder_service import EncoderService
from mmd_workers.encoder.job_claims import JobClaims
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.features import disk as disk_module
from mmd_workers.features.cache import FeatureCache
from mmd_workers.features.disk import DiskTier
from mmd_workers.features.held import HeldFeatures, feature_identity
from mmd_workers.features.store import FeatureState, FeatureStore
from mmd_workers.media.medium import DecodedImage
from mmd_workers.model.prompt import Feature, ProcessedMedium
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.prefill.queue_source import QueueSource
from mmd_workers.wire.messages.message_parts import FeatureRef, Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest

from .virtual_pods import InLine, Net, PodBus, PodQueue, Slowly, VirtualLoop, as_pod

SEED = 20_261_128
LIFECYCLES = 10_000
EPISODE = 250  # lifecycles, after each of which everything is counted
MEDIA = 40  # different ones of an episode
WIDTH = 64
STORE_BYTES = 12 * 16 * WIDTH * 4
CACHE_BYTES = 8 * 16 * WIDTH * 4
DISK_BYTES = 6 * 8192
FAULTS = 0.03
QUIET_SECONDS = 300.0  # longer than every deadline
JOB_SECONDS = 20.0


def ref(medium: int) -> FeatureRef:
    """Some are poison: every tenth breaks its decoder, every eleventh the tower, every twelfth its gateway has not."""
    tokens = 4 + medium % 13
    return FeatureRef(
        *(f"feature-{medium}", f"digest-{medium}", "image", 100, tokens, [[0, tokens]], {}, {}, 16),
        host_bytes=4096,
    )


def num_bytes(one: FeatureRef) -> int:
    return one.num_tokens * WIDTH * 4


class Decoders:
    """In place of decode processes, which have tests of their own."""

    processes = 2

    async def probe(self, data: bytes, *_more: object) -> int:
        await asyncio.sleep(0.002)
        if int(data) % 10 == 9:
            raise BadMediaError("not an image")
        return int(data)

    async def decode_image(self, _data: bytes, info: int) -> DecodedImage:
        await asyncio.sleep(0.01 * (1 + info % 5))
        return DecodedImage(np.full((1, 1, 3), info, np.uint8))


class Tower:
    device = torch.device("cpu")

    def process(self, decoded: DecodedImage, layout: Any) -> ProcessedMedium:
        medium = torch.tensor([[int(decoded.pixels[0, 0, 0])]])
        return ProcessedMedium("image", {"pixel_values": medium}, {}, layout.num_tokens, ("image",))

    def part(self, medium: ProcessedMedium, _first: int, _last: int) -> ProcessedMedium:
        return medium

    def encode(self, batch: list[ProcessedMedium]) -> list[Feature]:
        media = [int(one.tensors["pixel_values"]) for one in batch]
        if any(medium % 11 == 10 for medium in media):
            raise RuntimeError("the tower broke")
        return [
            Feature("image", {"embeddings": torch.full((one.num_tokens, WIDTH), float(medium))})
            for one, medium in zip(batch, media, strict=True)
        ]


class CrowdedBudget(ByteBudget):
    """Now and then everybody who waited for a medium leaves at the moment at which memory becomes free for it."""

    leave: Callable[[list[asyncio.Future[None]]], None]

    def free(self, num_bytes: int, modality: Modality) -> None:
        waiting = [one.turn for line in self._waiting.values() for one in line]
        super().free(num_bytes, modality)
        self.leave([turn for turn in waiting if turn.done() and not turn.cancelled()])


class Encoder:
    """An encoder pod."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.held = HeldFeatures()
        bus, metrics = PodBus(world.net, name), Metrics(["encode"])
        self.bus: Any = bus
        self.disk = DiskTier(world.folder / name, "r1", DISK_BYTES, self.held, metrics)
        self.cache = FeatureCache(CACHE_BYTES, self.held, self.disk)
        spec = EncoderSpec(batching=EncoderBatching(max_items=2), media_mebibytes=16)
        decoders: Any = Decoders()
        tower: Any = Tower()
        self.pipeline = EncodePipeline(tower, decoders, MediaPolicy(), spec, self.cache, metrics)
        self.pipeline._memory = budget = CrowdedBudget(3 * 4200, "spec.encoder.mediaMebibytes")
        budget.leave = self._leave
        self._rng = world.rng
        self.queue = PodQueue(bus)
        queue: Any = self.queue
        tracing = Tracing("test", "test", "test", None)
        self.service = EncoderService(
            *(self.bus, queue, self.pipeline, ["image"]),
            JobClaims(
                *(self.bus, world.net.incarnations[name], world.net.incarnations.get),
                world.net.silent_seconds,
            ),
            *(3, metrics, tracing),
        )
        self.draining = False
        self.taker = FeatureTaker(self.bus, name, self.cache, lambda: self.draining)
        self.metrics = metrics

    async def start(self) -> None:
        self.main = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("disk", self.disk.run()),
                ("tower", self.pipeline.run()),
                ("service", self.service.run()),
            )
        ]
        await self.taker.start()

    def _leave(self, granted: list[asyncio.Future[None]]) -> None:
        for task in self.pipeline._running.values():
            if getattr(task, "_fut_waiter", None) in granted and self._rng.random() < 5 * FAULTS:
                task.cancel()

    def close(self) -> None:
        self.pipeline.close()
        self.disk.close()

    def left(self) -> dict[str, Any]:
        """What should be nothing when no request is left."""
        pipeline, service, cache, disk = self.pipeline, self.service, self.cache, self.disk
        found: dict[str, Any] = {
            "media": len(pipeline._running),
            "users": len(pipeline._users),
            "ready": len(pipeline._ready),
            "work": sum(pipeline.queued_work.values()),
            "memory": pipeline._memory.used_bytes,
            "waiting for memory": sum(map(len, pipeline._memory._waiting.values())),
            "jobs": len(service._jobs) + (not service._takes_jobs.is_set()),
            "cached jobs": len(service._cached_jobs),
            "slots": service._max_jobs - self.queue.last_batch,
            "slots past the queue": service._max_jobs - service._cached_slots._value,
            "cache bytes": cache.used_bytes - sum(e.feature.num_bytes for e in cache._features.values()),
            "over budget": max(0, cache.used_bytes - CACHE_BYTES),
            "heap": len(cache._coldest) - len(cache),
            "disk waiting": disk.waiting_bytes + len(disk._waiting),
            "disk bytes": disk.used_bytes - sum(disk._files.values()),
            "disk over budget": max(0, disk.used_bytes - DISK_BYTES),
            "transfers": len(self.taker._receiver._transfers) + self.taker._receiver.reserved_bytes,
            "endings": len(self.taker._receiver._endings),
            "reports": self.held._places - (Counter([*cache._features]) + Counter([*disk._files])),
            "unreported": (Counter([*cache._features]) + Counter([*disk._files])) - self.held._places,
        }
        for stage in (pipeline._places, *pipeline.stages.all):
            found[f"stage {stage.name}"] = stage.servers + stage.spare - stage._free + len(stage._running)
            found[f"waiting for {stage.name}"] = sum(map(len, stage._waiting.values()))
        files = (
            {path.stem for path in (disk._folder).glob("*.safetensors")} if disk.is_on else set(disk._files)
        )
        found["files"] = files ^ set(disk._files)
        found["parts"] = list(disk._folder.glob("*.part"))
        return {name: value for name, value in found.items() if value}


class Prefill:
    """A prefill pod without an engine."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.steps: Counter[FeatureState | None] = Counter()
        self.world = world
        self.held = HeldFeatures()
        self.store = FeatureStore(STORE_BYTES, self._count, self.held)
        bus: Any = PodBus(world.net, name)
        queue: Any = PodQueue(bus)
        self.source = QueueSource(
            *(bus, name, world.net.incarnations[name], queue, world.holders, lambda: 0, self.store),
            *(4096, 1024, JOB_SECONDS, 2.0, Metrics(["prefill"])),
        )
        self.main: list[asyncio.Task[None]] = []

    def _count(self, _before: FeatureState | None, after: FeatureState) -> None:
        self.steps[after] += 1

    async def start(self) -> None:
        await self.source.start()

    def close(self) -> None:
        pass

    async def serve(self, request: GenerateRequest) -> str:
        """As the prefill service does: admit and request what is new, wait, merge, release."""
        name = f"{request.request_id}#{request.attempt}"
        needs = {one.feature_id: num_bytes(one) for one in request.features}
        try:
            async with asyncio.timeout(request.deadline - time.time()):
                media = {one.feature_id: one for one in request.features}
                admitted = await self.store.admit(
                    name, needs, lambda feature_id: self.source.request(media[feature_id], request)
                )
                for one in request.features:
                    feature = await asyncio.shield(admitted.arrivals[one.feature_id])
                    medium = float(one.feature_id.removeprefix("feature-"))
                    assert feature.tensors["embeddings"].shape == (one.num_tokens, WIDTH)
                    assert (feature.tensors["embeddings"] == medium).all(), "the feature of another medium"
                    self.store.merged(one.feature_id)
                return "ok"
        except TimeoutError:
            return "late"
        except MmdError as error:
            return error.code
        finally:
            self.store.release(name)

    def left(self) -> dict[str, Any]:
        store, source = self.store, self.source
        receiver = source._receiver
        entries = store._entries.values()
        found: dict[str, Any] = {
            "waiting": len(store._waiting),
            "users": [entry.users for entry in entries if entry.users],
            "unfinished": [e.state for e in entries if e.state is not FeatureState.PREFILLED],
            "bytes": store.used_bytes - sum(entry.num_bytes for entry in entries),
            "over budget": max(0, store.used_bytes - STORE_BYTES),
            "balance": self.steps[FeatureState.REGISTERED]
            - self.steps[FeatureState.DISCARDED]
            - len(entries),
            "wanted": len(source._wanted) + len(source._runs),
            "tasks": len(source._tasks),
            "transfers": len(receiver._transfers) + receiver.reserved_bytes + len(receiver._endings),
            "reports": self.held._places - Counter([*store._entries]),
            "unreported": Counter([*store._entries]) - self.held._places,
        }
        return {name: value for name, value in found.items() if value}


class World:
    """Two encoders and two prefill pods, which fail and come back."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, folder: Path) -> None:
        self.loop = loop
        self.rng = rng
        self.folder = folder
        self.net = Net(rng, FAULTS)
        self.pods: dict[str, Encoder | Prefill] = {}
        self.starts = 0

    async def start(self, name: str) -> None:
        self.starts += 1
        self.net.incarnations[name] = f"i{self.starts}"
        with as_pod(name):
            made = Encoder(self, name) if name.startswith("encoder") else Prefill(self, name)
            self.pods[name] = made
            await made.start()

    async def kill(self, name: str) -> None:
        """All at once; what was in its memory is gone."""
        pod = self.pods.pop(name)
        self.net.kill(name)
        while tasks := [task for task in self.loop.owned[name] if task is not asyncio.current_task()]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        pod.close()

    async def drain(self, name: str) -> None:
        pod = self.pods[name]
        assert isinstance(pod, Encoder)
        pod.draining = True
        pod.service.drain()
        with as_pod(name):
            await asyncio.create_task(
                self._hand_over(pod, [other for other in self.encoders() if other != name])
            )
        if self.pods.get(name) is pod:
            await asyncio.wait([pod.main[-1]], timeout=60)
            await self.kill(name)
            await self.start(name)

    async def _hand_over(self, pod: Encoder, others: list[str]) -> None:
        await hand_over(pod.bus, pod.cache, others, 5.0, pod.metrics)

    def encoders(self) -> list[str]:
        return [name for name in self.pods if name.startswith("encoder")]

    def holders(self, feature_id: str) -> list[str]:
        """With some that have it no more, as reports come late."""
        found = [
            name
            for name in ("encoder-0", "encoder-1")
            if isinstance(pod := self.pods.get(name), Encoder)
            and (feature_identity(feature_id) in pod.held.changes or self.rng.random() < 0.05)
        ]
        return self.rng.sample(found, len(found))

    async def read(self, _bus: Any, _gateway: str, digest: str, _bytes: int, _deadline: float) -> bytes:
        await asyncio.sleep(0.003)
        medium = int(digest.removeprefix("digest-"))
        if medium % 12 == 11:
            raise MediaGoneError("its request has ended")
        if self.rng.random() < FAULTS:
            raise LinkError("slices were lost")
        return str(medium).encode()

    # --- an episode -----------------------------------------------------------------------------------------------

    async def request(self, number: int, ends: Counter[str]) -> int:
        """One request somewhere, which may be cancelled; returns its media."""
        rng, now = self.rng, time.time()
        media = rng.choices(range(MEDIA), k=rng.choice((1, 1, 2, 3)))
        pods = [pod for pod in self.pods.values() if isinstance(pod, Prefill)]
        if pods:
            deadline = now + rng.choice((0.05, 1.0, 30.0, 60.0))
            asked = GenerateRequest(
                *(f"r{number}", 0, "gateway-0", [1], [ref(m) for m in media], Sampling(1), [], deadline, now)
            )
            pod = rng.choice(pods)
            with as_pod(pod.name):
                serving = asyncio.create_task(pod.serve(asked))
            if rng.random() < 0.2:
                self.loop.call_later(rng.random() * 0.2, serving.cancel)
            serving.add_done_callback(
                lambda one: ends.update(["cancelled" if one.cancelled() else one.result()])
            )
        await asyncio.sleep(rng.expovariate(50))
        return len(media)

    async def mishap(self) -> None:
        rng = self.rng
        name = rng.choice(list(self.pods))
        if rng.random() < 0.5 and name.startswith("encoder"):
            self.mishaps.add(asyncio.create_task(self.drain(name)))
            return
        if rng.random() < 0.3 and name.startswith("encoder"):
            pod = self.pods[name]
            assert isinstance(pod, Encoder)
            for file in list(pod.disk._folder.glob("*.safetensors"))[:2]:
                file.write_bytes(file.read_bytes()[: rng.randrange(200)])
            return
        await self.kill(name)
        await asyncio.sleep(rng.random())
        await self.start(name)

    async def episode(self, first: int, ends: Counter[str]) -> int:
        self.mishaps: set[asyncio.Task[None]] = set()
        for name in ("encoder-0", "encoder-1", "prefill-0", "prefill-1"):
            await self.start(name)
        media = requests = 0
        while media < EPISODE:
            media += await self.request(first + requests, ends)
            requests += 1
            if self.rng.random() < 0.04 and not any(not task.done() for task in self.mishaps):
                await self.mishap()
        await asyncio.gather(*self.mishaps)
        await asyncio.sleep(QUIET_SECONDS)
        self.check()
        for name in list(self.pods):
            await self.kill(name)
        return media

    def check(self) -> None:
        """Nothing is left of any request."""
        for name, pod in self.pods.items():
            assert pod.left() == {}, name
            running = {task.get_name() for task in self.loop.owned[name]} - {t.get_name() for t in pod.main}
            assert not running, f"{name}: {running}"
        assert not self.net.queue
        inboxes = {s for s, them in self.net.subscriptions.items() if them and s.startswith("inbox")}
        assert not inboxes
        waiting = [task for name, tasks in self.loop.owned.items() if name not in self.pods for task in tasks]
        assert len(waiting) == 1, waiting  # this one


def opened(folder: Path) -> list[str]:
    """Files of this process below a folder; others are open in it for as long as other tests please."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of this listing itself
            found.append(os.readlink(descriptor))
    return [name for name in found if name.startswith(str(folder))]


def run(
    seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, lifecycles: int = LIFECYCLES
) -> Counter[str]:
    """All episodes of a seed; how requests ended."""
    loop, rng = VirtualLoop(), random.Random(seed)
    ends: Counter[str] = Counter()
    faults: list[str] = []
    loop.set_exception_handler(
        lambda _, found: faults.append(f"{found['message']}: {found.get('exception')!r}")
    )

    async def episodes() -> None:
        media = number = 0
        while media < lifecycles:
            number += 1
            world = World(loop, rng, folder / str(number))
            patch.setattr(service_module, "read_medium", world.read)
            media += await world.episode(1000 * number, ends)
            assert not opened(folder)
            gc.collect()  # a task that failed unseen is reported when it goes
            assert not faults

    with monkeypatch.context() as patch:
        patch.setattr(time, "time", loop.time)
        patch.setattr(time, "monotonic", loop.time)
        patch.setattr(pipeline_module, "ThreadPoolExecutor", Slowly)
        patch.setattr(disk_module, "ThreadPoolExecutor", InLine)
        random.seed(seed)
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(episodes())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
    return ends


@pytest.mark.timeout(900)  # half a minute of one core
def test_ten_thousand_media_on_pods_that_fail_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("mmd_workers").setLevel(logging.CRITICAL)
    seed = int(os.environ.get("MMD_LEAK_SEED", SEED))
    print(f"MMD_LEAK_SEED={seed}")  # noqa: T201 -- pytest shows it with a failure
    try:
        ends = run(seed, tmp_path, monkeypatch)
    finally:
        logging.getLogger("mmd_workers").setLevel(logging.NOTSET)
    assert ends["ok"] > LIFECYCLES / 5, ends
    for end in ("cancelled", "late", "bad_media", "media_gone", "unprocessable_medium"):
        assert ends[end], f"no request ended so, of {dict(ends)}"
