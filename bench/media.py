"""What encoding takes, in process and stage by stage: media of several sizes, batches of the tower, and putting features into a prompt.

    python -m bench.media [--model builtin/demo] [--dtype Float32] [--repeats 9] [--only runs]

- Stages: each medium is probed and decoded in a decode process, laid out, processed and encoded alone, as on an encoder pod. Files are drawn
  here: JPEG, PNG, H.264 and 16-bit WAV.
- Batches: one run of the tower over as many media as named, beside the same media one at a time; and images of twelve sizes, on a random
  model with native resolution, in processor time of one thread.
- Clips: the most bytes that a random model's tower holds at once for clips of several lengths, in one run and divided between runs.
- Servers: media a second of a burst through the whole pipeline, by the number of decode processes and threads that process.
- Hits: the feature of each medium, and one as large as a model of 7 billion parameters makes of a long video, from the cache in the same pod,
  from that of another pod (a process of its own, through a nats-server, as a prefill pod gets it) and from its disk, beside encoding.
- Merging: the rows of 5,000 tokens are made on the engine's device, looked up and with features on all of them.

Times are medians of the repeats, after one that warms up. A medium that the model does not take is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from PIL import Image
from rich.console import Console
from rich.table import Table

from bench.report import keep
from mmd_api.contract.errors import DeadlineError, PeerLostError
from mmd_api.contract.pools import Modality
from mmd_api.contract.subjects import Subjects
from mmd_api.spec.media import AudioPolicy, MediaPolicy, VideoPolicy
from mmd_api.spec.model import ModelSpec
from mmd_api.spec.pools import EncoderSpec
from mmd_api.spec.transfer import EmbeddingTransfer
from mmd_cli import samples
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.encoder.stages import Servers
from mmd_workers.engine.profile import LiveBytes
from mmd_workers.features.cache import FeatureCache
from mmd_workers.features.disk import DiskTier
from mmd_workers.features.held import HeldFeatures
from mmd_workers.features.store import FeatureStore
from mmd_workers.features.tensors import buffers_of
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.medium import Decoded, DecodedImage, DecodedVideo, MediumInfo
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.encoder import HfEncoderModel, load_encoder
from mmd_workers.model.language import HfLanguageModel, load_language_model
from mmd_workers.model.prompt import Feature, MediumLayout, ProcessedMedium, SamplingPlan
from mmd_workers.observe.metrics import Metrics
from mmd_workers.prefill.queue_source import QueueSource
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.embedding_sender import EmbeddingSender
from mmd_workers.wire.jobs import EncodeQueue, QueueLimits
from mmd_workers.wire.messages.encoder import EncodeJob, EncodeTaken
from mmd_workers.wire.messages.message_parts import FeatureRef, Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest
from mmd_workers.wire.server import NatsServer
from support.oracles import random_model

SECTIONS = ("stages", "runs", "servers", "merging")
STAGES = ("probe", "layout", "decode", "process", "tower")
ENCODING = ("decode", "process", "tower")
PLACES = ("here", "another pod", "disk", "encoding")
SUBJECTS = Subjects("bench", "media", "r1")
BATCHES = (1, 2, 4, 8, 16, 32)
MERGED_TOKENS = 5_000
AUDIO_HZ = 16_000
DECODE_SECONDS = 300
NATIVE = "qwen2_5_vl"
NATIVE_SIZE = random_model.Size(vision_hidden=160, vision_layers=4)
NATIVE_SIDES = [(width, height) for width in (56, 84, 112, 140) for height in (56, 84, 112)]
CLIP_MODELS = ("qwen2_5_vl", "llava_onevision")
CLIP_FRAMES = (4, 16, 64)
FRAMES_AT_ONCE = 4  # of a clip that is divided
SERVERS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2))  # decode processes, threads that process
BURST = 64
console = Console(width=130)
Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Made = TypeVar("Made")


@dataclass(frozen=True)
class File:
    """One medium. `max_frames`: of a video, that the resource allows."""

    name: str
    modality: Modality
    data: bytes
    max_frames: int = 64

    @property
    def policy(self) -> MediaPolicy:
        """The resource's, which cuts sound that is too long."""
        return MediaPolicy(
            video=VideoPolicy(max_frames=self.max_frames), audio=AudioPolicy(too_long="Truncate")
        )


def files() -> list[File]:
    """What is encoded."""
    sizes = ((224, 224), (640, 480), (1280, 720), (1920, 1080), (3840, 2160))
    made = [File(f"JPEG {w}x{h}", "image", _image(w, h, "JPEG")) for w, h in sizes]
    made.append(File("PNG 1280x720", "image", _image(1280, 720, "PNG")))
    short, long = _video(1280, 720, seconds=4), _video(640, 360, seconds=60)
    made += [File(f"video 1280x720, 4 s, {n} frames", "video", short, n) for n in (2, 8)]
    made += [File(f"video 640x360, 60 s, {n} frames", "video", long, n) for n in (8, 32)]
    return [*made, *(File(f"sound of {s} s", "audio", _sound(s)) for s in (1, 10, 30))]


def _picture(width: int, height: int, shift: int = 0) -> Pixels:
    """A gradient under noise: neither a plain nor a random surface, which codecs treat as nothing else."""
    x, y = np.arange(width)[None, :] + shift, np.arange(height)[:, None]
    noise = np.random.default_rng(shift).integers(0, 24, (height, width))
    red, green = (x * 255 // width + noise) % 256, (y * 255 // height + noise) % 256
    return np.stack([red, green, np.broadcast_to(noise + 100, red.shape)], axis=-1).astype(np.uint8)


def _image(width: int, height: int, form: str, shift: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(_picture(width, height, shift)).save(file, form, quality=90)
    return file.getvalue()


def _video(width: int, height: int, seconds: int) -> bytes:
    loop = [_picture(width, height, 4 * frame) for frame in range(samples.VIDEO_FPS)]
    return samples.encode_video(np.stack(loop * seconds), crf=28)


def _sound(seconds: int) -> bytes:
    at = np.arange(seconds * AUDIO_HZ) / AUDIO_HZ
    tone = 0.3 * np.sin(2 * np.pi * 440 * at) + np.random.default_rng(1).normal(0, 0.01, len(at))
    return samples.encode_audio(tone.astype(np.float32), AUDIO_HZ, "audio/wav")


# --- stages -------------------------------------------------------------------------------------------------------------


class Encoding:
    """One model's encoder with real decode processes."""

    def __init__(self, model: HfEncoderModel, decoders: DecodePool, repeats: int) -> None:
        self.model = model
        self.decoders = decoders
        self.repeats = repeats

    async def stages(self, file: File) -> tuple[dict[str, Any], ProcessedMedium]:
        """Milliseconds of each stage, and what the tower gets."""
        policy = file.policy
        frontend = self.model.frontend(policy)
        info, probe = await self._timed(lambda: self.decoders.probe(file.data, file.modality, policy))
        message = {"role": "user", "content": [{"type": file.modality}]}

        async def lay_out() -> MediumLayout:
            return frontend.layout([message], [info]).media[0]

        layout, layout_ms = await self._timed(lay_out)
        decoded, decode = await self._timed(lambda: self._decode(file.data, info, layout))

        async def process() -> ProcessedMedium:
            return self.model.process(decoded, layout)

        async def encode() -> list[Feature]:
            return self.model.encode([processed])

        processed, process_ms = await self._timed(process)
        _, tower = await self._timed(encode)
        times = dict(zip(STAGES, (probe, layout_ms, decode, process_ms, tower), strict=True))
        frames = len(layout.sampling.frame_indices)
        found = {
            "medium": file.name,
            "tokens": layout.num_tokens,
            "frames": frames,
            "bytes": len(file.data),
            "ms": times,
        }
        return found, processed

    async def _decode(self, data: bytes, info: MediumInfo, layout: MediumLayout) -> Decoded:
        sampling: SamplingPlan = layout.sampling
        if layout.modality == "image":
            return await self.decoders.decode_image(data, info)
        if layout.modality == "video":
            return await self.decoders.decode_video(data, info, sampling.frame_indices)
        return await self.decoders.decode_audio(data, info, sampling.sample_rate_hz, sampling.num_samples)

    async def _timed(self, made: Callable[[], Awaitable[Made]]) -> tuple[Made, float]:
        times = []
        for _ in range(self.repeats + 1):
            begun = time.perf_counter()
            result = await made()
            times.append(1000 * (time.perf_counter() - begun))
        return result, statistics.median(times[1:])


def batches(
    model: HfEncoderModel,
    media: Sequence[ProcessedMedium],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Milliseconds of the tower's run by how many media share it, and of as many runs with one; sizes take turns."""
    together: dict[int, list[float]] = {size: [] for size in BATCHES}
    alone: dict[int, list[float]] = {size: [] for size in BATCHES}
    for _ in range(repeats + 1):
        for size in BATCHES:
            batch = [media[number % len(media)] for number in range(size)]
            together[size].append(_encode_ms(model, [batch], clock))
            alone[size].append(_encode_ms(model, [[medium] for medium in batch], clock))
    return {
        "ms": {size: statistics.median(seen[1:]) for size, seen in together.items()},
        "alone_ms": {size: statistics.median(seen[1:]) for size, seen in alone.items()},
    }


def _encode_ms(
    model: HfEncoderModel, runs: Sequence[Sequence[ProcessedMedium]], clock: Callable[[], float]
) -> float:
    begun = clock()
    for run in runs:
        model.encode(run)
    return 1000 * (clock() - begun)


@contextmanager
def one_thread() -> Iterator[None]:
    """All operators on the thread that calls them, whose processor time then shows what they take, whatever else the machine does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- random models ------------------------------------------------------------------------------------------------------


def random_encoder(arch: str, folder: Path, size: random_model.Size | None = None) -> HfEncoderModel:
    """The tower of an architecture, with random weights, on the CPU."""
    path = random_model.build(arch, folder / arch, size=size)
    return load_encoder(ModelSpec(id=str(path), dtype="Float32"), torch.device("cpu"))


def images_of_mixed_sizes(model: HfEncoderModel) -> list[ProcessedMedium]:
    """Small ones."""
    return [
        _processed(model, MediumInfo("image", "0" * 64, 1, "png", width=width, height=height))
        for width, height in NATIVE_SIDES
    ]


def clip(model: HfEncoderModel, frames: int) -> ProcessedMedium:
    """At one frame a second."""
    info = MediumInfo(
        *("video", "0" * 64, 1, "mp4", 112, 112),
        num_frames=frames,
        fps=1.0,
        duration_seconds=float(frames),
    )
    return _processed(model, info)


def _processed(model: HfEncoderModel, info: MediumInfo) -> ProcessedMedium:
    """Of a gradient."""
    choices = [SamplingChoice(num_frames=info.num_frames)] if info.modality == "video" else []
    message = {"role": "user", "content": [{"type": info.modality}]}
    (layout,) = model.frontend().layout([message], [info], choices=choices).media
    pixels = _picture(info.width, info.height)
    if info.modality == "image":
        return model.process(DecodedImage(pixels), layout)
    indices = layout.sampling.frame_indices
    return model.process(
        DecodedVideo(np.stack([pixels] * len(indices)), indices, info.fps, info.num_frames), layout
    )


def clip_memory(model: HfEncoderModel) -> dict[str, dict[int, int]]:
    """The most bytes held at once by the number of frames, in one run, and in runs of a few parts each."""
    found: dict[str, dict[int, int]] = {"one run": {}, "divided": {}}
    for frames in CLIP_FRAMES:
        medium = clip(model, frames)
        at_once = max(1, medium.parts * FRAMES_AT_ONCE // frames)
        found["one run"][frames] = _held_bytes(model, medium)
        found["divided"][frames] = max(
            _held_bytes(model, model.part(medium, first, min(first + at_once, medium.parts)))
            for first in range(0, medium.parts, at_once)
        )
    return found


def _held_bytes(model: HfEncoderModel, medium: ProcessedMedium) -> int:
    with LiveBytes() as live:
        model.encode([medium])
    return int(live.peak)


# --- servers ------------------------------------------------------------------------------------------------------------


async def burst(model: HfEncoderModel, files: Sequence[File], decode: int, process: int) -> float:
    """Media a second where all come at once. `decode`: processes. `process`: threads."""
    decoders = DecodePool(decode, DECODE_SECONDS)
    await decoders.start()
    policy = files[0].policy
    pipeline = EncodePipeline(
        *(model, decoders, policy, EncoderSpec(), FeatureCache(0), Metrics()), servers=Servers(process)
    )
    running = asyncio.create_task(pipeline.run())
    try:
        refs = [(await _reference(model, decoders, file), file.data) for file in files]
        await pipeline.encode(*_job(*refs[0]))
        begun = time.perf_counter()
        await asyncio.gather(*(pipeline.encode(*_job(ref, data)) for ref, data in refs[1:]))
        return (len(refs) - 1) / (time.perf_counter() - begun)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        pipeline.close()
        await decoders.close()


def _job(ref: FeatureRef, data: bytes) -> tuple[FeatureRef, Callable[[], Any]]:
    async def read() -> bytes:
        return data

    return ref, read


async def _reference(model: HfEncoderModel, decoders: DecodePool, file: File) -> FeatureRef:
    info = await decoders.probe(file.data, file.modality, file.policy)
    message = {"role": "user", "content": [{"type": file.modality}]}
    (laid,) = model.frontend(file.policy).layout([message], [info]).media
    sampling = asdict(laid.sampling)
    return FeatureRef(
        *(file.name, info.digest, file.modality, len(file.data), laid.num_tokens),
        *([[*r] for r in laid.ranges], laid.geometry),
        size=sampling.pop("size"),
        sampling=sampling,
        work=laid.work,
        host_bytes=laid.host_bytes,
    )


def bursts() -> dict[str, list[File]]:
    """What comes at once."""
    pictures = [File(f"picture {n}", "image", _image(1280, 720, "JPEG", n)) for n in range(BURST + 1)]
    short = _video(640, 360, seconds=4)
    mixed = [
        File(f"clip {n}", "video", samples.as_another_file(short, n), 8) if n % 4 == 1 else picture
        for n, picture in enumerate(pictures)
    ]
    return {"JPEG 1280x720": pictures, "the same and one in four H.264 640x360, 4 s": mixed}


# --- merging ------------------------------------------------------------------------------------------------------------


def merging(model: HfLanguageModel, repeats: int) -> float:
    """Milliseconds of making the rows of so many tokens with a feature on all of them."""
    layout = MediumLayout("image", MERGED_TOKENS, [(100, MERGED_TOKENS)], {}, SamplingPlan(), 0)
    prompt = model.lower([1] * 100 + [0] * MERGED_TOKENS + [1] * 100, [layout])
    _, _, extras = model.rows(prompt, 0, 1)
    tensors = {
        name: torch.rand(MERGED_TOKENS, model.hidden_size).to(model.dtype) for name in ("embeddings", *extras)
    }
    model.fill(prompt, 0, Feature("image", tensors))
    times: list[float] = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        model.rows(prompt, 100, 100 + MERGED_TOKENS)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times[1:])


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All that was asked for, of one model and of random ones."""
    spec = ModelSpec(id=options.model, dtype=options.dtype)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {}
    if {"stages", "servers"} & {*options.only}:
        model = load_encoder(spec, device)
        if "stages" in options.only:
            found |= await alone_and_in_batches(model, options.repeats)
        if "servers" in options.only:
            found["servers"] = await by_servers(model, max(1, options.repeats // 3))
    if "runs" in options.only:
        found |= of_random_models(options.repeats)
    if "merging" in options.only:
        language = load_language_model(spec, device)
        with console.status("merging"):
            milliseconds = merging(language, options.repeats)
        found["merging"] = {"tokens": MERGED_TOKENS, "hidden": language.hidden_size, "ms": milliseconds}
    return found


async def alone_and_in_batches(model: HfEncoderModel, repeats: int) -> dict[str, Any]:
    """Each medium stage by stage, batches of the smallest of each modality, and the feature of each from caches."""
    decoders = DecodePool(1, DECODE_SECONDS)
    await decoders.start()
    try:
        encoding = Encoding(model, decoders, repeats)
        features = dict[str, Feature]()
        found, smallest = [], dict[Modality, tuple[str, ProcessedMedium]]()
        for file in files():
            if file.modality not in model.modalities:
                continue
            with console.status(file.name):
                one, processed = await encoding.stages(file)
            found.append(one)
            features[file.name] = model.encode([processed])[0]
            smallest.setdefault(file.modality, (file.name, processed))
    finally:
        await decoders.close()
    curves = []
    for name, processed in smallest.values():
        with console.status(f"batches of {name}"):
            curves.append({"medium": name} | batches(model, [processed], repeats))
    features[LARGE] = large_feature()
    with console.status("hits"):
        hits = await Hits(features, repeats).measure()
    encoded = {one["medium"]: sum(one["ms"][stage] for stage in ENCODING) for one in found}
    for hit in hits:
        hit["ms"]["encoding"] = encoded.get(hit["medium"])
    return {"stages": found, "batches": curves, "hits": hits}


def of_random_models(repeats: int) -> dict[str, Any]:
    """Batches of mixed sizes, and clips of several lengths."""
    with tempfile.TemporaryDirectory() as folder:
        make = partial(random_encoder, folder=Path(folder))
        native = make(NATIVE, size=NATIVE_SIZE)
        name = f"images of {len(NATIVE_SIDES)} sizes, {NATIVE}, one thread"
        with console.status("batches of mixed sizes"), one_thread():
            images = images_of_mixed_sizes(native)
            curve = {"medium": name} | batches(native, images, repeats, time.thread_time)
        with console.status("clips"):
            clips = {arch: clip_memory(make(arch)) for arch in CLIP_MODELS}
    return {"mixed_sizes": [curve], "clip_bytes": clips}


async def by_servers(model: HfEncoderModel, repeats: int) -> list[dict[str, Any]]:
    """Bursts by decode processes and threads that process, which take turns."""
    found = []
    for name, media in bursts().items():
        if not {file.modality for file in media} <= model.modalities:
            continue
        rates: dict[tuple[int, int], list[float]] = {servers: [] for servers in SERVERS}
        for _ in range(repeats):
            for servers, seen in rates.items():
                with console.status(f"{name} with {servers}"):
                    seen.append(await burst(model, media, *servers))
        medians = {f"{d}+{p}": statistics.median(seen) for (d, p), seen in rates.items()}
        found.append({"media": name, "per_second": medians})
    return found


# --- hits ---------------------------------------------------------------------------------------------------------------


LARGE = "5,000 tokens of width 3,584"


def large_feature() -> Feature:
    """Of a long video for a model of 7 billion parameters: 36 MB."""
    return Feature("video", {"embeddings": torch.rand(MERGED_TOKENS, 3584).to(torch.bfloat16)})


def ref_of(name: str, feature: Feature) -> FeatureRef:
    """As much of a medium as a job for a cached feature needs."""
    tokens = feature.num_tokens
    return FeatureRef(name, name, feature.modality, 0, tokens, [[0, tokens]], {}, {}, 1)


def hold(url: str, features: dict[str, Feature]) -> None:
    """The other pod: sends what it has, as an encoder does past its queue, until it is killed."""

    async def serve() -> None:
        bus = await Bus.connect(url, "holder", SUBJECTS)
        sender, sending = EmbeddingSender(bus), set[asyncio.Task[Any]]()

        async def take(job: EncodeJob) -> EncodeTaken:
            if (feature := features.get(job.feature.feature_id)) is None:
                return EncodeTaken(job.job_id, taken=False)
            task = asyncio.create_task(sender.send(job, buffers_of(feature)))
            sending.add(task)
            task.add_done_callback(sending.discard)
            return EncodeTaken(job.job_id, taken=True)

        await bus.serve(bus.subjects.encode_cached("holder"), EncodeJob, take)
        await asyncio.Event().wait()

    asyncio.run(serve())


class Hits:
    """Milliseconds of getting features that have been encoded before."""

    def __init__(self, features: dict[str, Feature], repeats: int) -> None:
        self.features = features
        self.repeats = repeats

    async def measure(self) -> list[dict[str, Any]]:
        """By medium and place."""
        here, disk, other = await self.from_here(), await self.from_disk(), await self.from_another_pod()
        return [
            {
                "medium": name,
                "bytes": feature.num_bytes,
                "ms": {"here": here[name], "another pod": other[name], "disk": disk[name]},
            }
            for name, feature in self.features.items()
        ]

    async def from_here(self) -> dict[str, float]:
        """From memory."""
        cache = FeatureCache(1 << 30)
        for name, feature in self.features.items():
            cache.put(name, feature)

        async def get(name: str) -> None:
            cache.get(name)

        return {name: await self._median(partial(get, name)) for name in self.features}

    async def from_disk(self) -> dict[str, float]:
        """From files that the system has in memory, checked by their digests."""
        with tempfile.TemporaryDirectory() as folder:
            tier = DiskTier(Path(folder) / "pod", "r1", 1 << 30, HeldFeatures(), Metrics())
            running = asyncio.create_task(tier.run())
            while not tier.is_on:
                await asyncio.sleep(0.01)
            names = {name: f"feature-{n}" for n, name in enumerate(self.features)}
            for name, feature in self.features.items():
                tier.keep(names[name], feature)
                while tier.waiting_bytes:
                    await asyncio.sleep(0.01)
            times = {name: await self._median(partial(tier.read, names[name])) for name in self.features}
            running.cancel()
            await asyncio.wait([running])
            tier.close()
            return times

    async def from_another_pod(self) -> dict[str, float]:
        """As a prefill pod asks for them."""
        with tempfile.TemporaryDirectory() as folder:
            server = NatsServer(Path(folder)).start()
            holder = multiprocessing.get_context("spawn").Process(
                target=hold, args=(server.url, self.features)
            )
            holder.start()
            try:
                bus = await Bus.connect(server.url, "prefill-0", SUBJECTS)
                queue = EncodeQueue(bus, QueueLimits(memory_storage=True))
                await queue.ensure()
                return await self._from_holder(bus, queue)
            finally:
                holder.kill()
                holder.join()
                server.kill()

    async def _from_holder(self, bus: Bus, queue: EncodeQueue) -> dict[str, float]:
        store = FeatureStore(1 << 30, lambda *_: None)
        embedding = EmbeddingTransfer()
        source = QueueSource(
            *(bus, "prefill-0", "i1", queue, lambda _: ["holder"], lambda: 0, store),
            *(embedding.window_kibibytes << 10, embedding.chunk_kibibytes << 10, 120.0, 5.0, Metrics()),
        )
        await source.start()
        job = EncodeJob("probe", ref_of("none", next(iter(self.features.values()))), "", "", "", 0.0, 0.0, "")
        while True:  # until the other process serves
            try:
                await bus.request(bus.subjects.encode_cached("holder"), job, EncodeTaken, timeout=1)
                break
            except (PeerLostError, DeadlineError):
                await asyncio.sleep(0.05)

        async def get(name: str) -> None:
            ref, now = ref_of(name, self.features[name]), time.time()
            request = GenerateRequest("r", 0, "", [1], [ref], Sampling(1), [], now + 120, now)
            needs = {name: self.features[name].num_bytes}
            admitted = await store.admit("r", needs, lambda _: source.request(ref, request))
            await admitted.arrivals[name]
            store.release("r")
            # So that the next one comes from there too.
            await store.admit("all", {"room": store.budget_bytes}, lambda _: None)
            store.release("all")

        times = {name: await self._median(partial(get, name)) for name in self.features}
        await bus.close()
        return times

    async def _median(self, get: Callable[[], Awaitable[object]]) -> float:
        times = []
        for _ in range(self.repeats + 1):
            begun = time.perf_counter()
            await get()
            times.append(1000 * (time.perf_counter() - begun))
        return statistics.median(times[1:])


# --- report -------------------------------------------------------------------------------------------------------------


def tables(found: dict[str, Any]) -> list[Table]:
    """The report for a reader."""
    stages = Table(title="one medium alone, ms", title_justify="left")
    for heading in ("medium", "tokens", *STAGES, "all"):
        stages.add_column(heading, justify="left" if heading == "medium" else "right")
    for one in found.get("stages", []):
        times = [one["ms"][stage] for stage in STAGES]
        stages.add_row(one["medium"], str(one["tokens"]), *(f"{ms:.1f}" for ms in (*times, sum(times))))
    curves = Table(
        title="one run of the tower, ms (media a second to those of runs with one)", title_justify="left"
    )
    curves.add_column("medium")
    for size in BATCHES:
        curves.add_column(str(size), justify="right")
    for curve in [*found.get("batches", []), *found.get("mixed_sizes", [])]:
        alone = curve["alone_ms"]
        curves.add_row(
            curve["medium"], *(f"{ms:.1f} ({alone[size] / ms:.2f})" for size, ms in curve["ms"].items())
        )
    clips = Table(title="peak memory of the tower by clip length, MiB", title_justify="left")
    for heading in ("model", "", *(f"{frames} frames" for frames in CLIP_FRAMES)):
        clips.add_column(heading, justify="right" if "frames" in heading else "left")
    for arch, ways in found.get("clip_bytes", {}).items():
        for way, held in ways.items():
            clips.add_row(arch, way, *(f"{num_bytes / 2**20:.2f}" for num_bytes in held.values()))
    servers = Table(title="media a second, by decode processes + threads that process", title_justify="left")
    for heading in ("media", *(f"{decode}+{process}" for decode, process in SERVERS)):
        servers.add_column(heading, justify="left" if heading == "media" else "right")
    for one in found.get("servers", []):
        servers.add_row(one["media"], *(f"{rate:.0f}" for rate in one["per_second"].values()))
    hits = Table(title="a feature that has been encoded before, ms", title_justify="left")
    for heading in ("medium", "KiB", *PLACES):
        hits.add_column(heading, justify="left" if heading == "medium" else "right")
    for hit in found.get("hits", []):
        times = [hit["ms"][place] for place in PLACES]
        shown = ("" if ms is None else f"{ms:.3f}" if ms < 0.1 else f"{ms:.1f}" for ms in times)
        hits.add_row(hit["medium"], f"{hit['bytes'] / 1024:.0f}", *shown)
    return [table for table in (stages, curves, clips, servers, hits) if table.rows]


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin/demo")
    parser.add_argument("--dtype", default="Float32")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--name", default="media", help="of the report")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    found = asyncio.run(measure(options))
    for made in tables(found):
        console.print(made)
    if merged := found.get("merging"):
        console.print(
            f"{merged['tokens']} tokens of width {merged['hidden']} merged into a prompt: {merged['ms']:.2f} ms"
        )
    console.print(f"report: {keep(options.name, {'options': vars(options), **found})}", highlight=False)


if __name__ == "__main__":
    main()
