"""Before a pod is Ready it has done everything once, and nothing shows it but the phases of its start."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from mmd_api.contract.errors import DeviceLostError, MmdError
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_api.spec.pools import EncoderSpec
from mmd_workers.decode.decode_service import DecodeService
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.engine.engine import Engine
from mmd_workers.features.cache import FeatureCache
from mmd_workers.kv.links import LinkManager
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.encoder import load_encoder
from mmd_workers.model.language import load_language_model
from mmd_workers.model.prompt import KvLayout
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.startup import Startup
from mmd_workers.observe.tracing import Tracing
from mmd_workers.prefill import kv_sender
from mmd_workers.prefill.kv_sender import KvSender
from mmd_workers.process.warmup import media_steps, warm_up
from mmd_workers.sequences.token_publisher import SequenceBook
from mmd_workers.wire import codec
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages import MESSAGES
from mmd_workers.wire.messages.decode import KvCommit
from mmd_workers.wire.messages.gateway import TokenBatch
from mmd_workers.wire.messages.message_parts import Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import wait_until

from .worker_process import environment_of

Connect = Callable[[str], Awaitable[Bus]]
CPU = torch.device("cpu")
DEMO = ModelSpec(id="builtin/demo")
LAYOUT = KvLayout(num_layers=1, num_kv_heads=[1], head_dim=[16], dtype="float32")


def startup() -> Startup:
    return Startup(Metrics())


# --- what it does, and what remains of it ----------------------------------------------------------------------------


async def test_the_tower_has_seen_every_modality_and_nothing_was_counted_or_kept() -> None:
    model, metrics, seen = load_encoder(DEMO, CPU), Metrics(("encode",)), list[tuple[str, str]]()
    encode = model.encode

    def noting(batch: Any) -> Any:
        features = encode(batch)
        seen.append((features[0].modality, threading.current_thread().name))
        return features

    model.encode = noting  # type: ignore[method-assign]
    decoders, cache = DecodePool(2, 20), FeatureCache(1 << 20)
    pipeline = EncodePipeline(model, decoders, MediaPolicy(), EncoderSpec(), cache, metrics)
    await decoders.start()
    try:
        before, started = metrics.expose(), startup()
        steps = media_steps(decoders, model.frontend(), MediaPolicy(), pipeline.warm_up)
        await warm_up(steps, started, CPU)
        assert [modality for modality, _ in seen] == ["audio", "image", "video"]
        assert all(thread.startswith("tower") for _, thread in seen)
        assert list(started.seconds()) == ["warm_up_audio", "warm_up_image", "warm_up_video"]
        assert _counted(metrics.expose()) == _counted(before)
        assert pipeline.stages.work_per_second() == {}
        assert pipeline.stages.busy_fraction() == 0
        assert (cache.used_bytes, pipeline.running, pipeline.queued_work) == (0, 0, {})
    finally:
        pipeline.close()
        await decoders.close()


def _counted(exposed: tuple[bytes, str]) -> str:
    return "\n".join(line for line in exposed[0].decode().splitlines() if not line.startswith("process_"))


@pytest.mark.parametrize("num_blocks", [1, 64])
def test_the_engine_has_run_prefill_and_decode_and_is_as_it_was(num_blocks: int) -> None:
    model = load_language_model(DEMO, CPU)
    engine = Engine(
        model,
        kv_cache_bytes=num_blocks * 16 * model.kv_layout.bytes_per_token(),
        block_tokens=16,
        max_sequences=4,
        chunk_tokens=48,
        prefix_cache=True,
        max_model_len=1024,
    )
    rows, logits = list[int](), model.logits
    forward = model.forward

    def noting(embeds: Any, positions: Any, extras: Any) -> Any:
        rows.append(embeds.shape[0])
        return forward(embeds, positions, extras)

    sampled = list[int]()
    model.forward = noting  # type: ignore[method-assign]
    model.logits = lambda hidden: (sampled.append(hidden.shape[0]), logits(hidden))[1]  # type: ignore
    before, kv = engine.stats(), [tensor.clone() for tensor in (*engine.kv.keys, *engine.kv.values)]
    engine.warm_up()
    assert rows == ([48, 1] if num_blocks > 1 else [15, 1])
    assert sampled == [1, 1]
    assert engine.stats() == before
    assert before.prefill_tokens_per_second == before.itl_seconds == 0
    assert engine.prefix_changes.take(100).empty
    assert not engine.has_work()
    after = (*engine.kv.keys, *engine.kv.values)
    assert all(torch.equal(a, b) for a, b in zip(kv, after, strict=True))


def test_the_first_message_of_each_type_is_as_fast_as_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_serializers", {})
    monkeypatch.setattr(codec, "_validators", {})
    codec.warm_up(MESSAGES)
    monkeypatch.delattr(codec, "TypeAdapter")  # nothing is left to build
    sampling = Sampling(4)
    request = GenerateRequest("r", 0, "gateway-0", [1], [], sampling, [], 1.0, 0.0)
    for message in (request, KvCommit("lease", request, [1], 1, 1), TokenBatch("pod", 1, [])):
        assert codec.unpack(type(message), codec.pack(message)) == message


def test_the_first_request_of_a_process_imports_no_tracing() -> None:
    code = """if True:
        import sys
        from mmd_workers.observe.tracing import Tracing
        tracing = Tracing("pod", "deployment", "namespace", None)
        tracing.warm_up()
        before = set(sys.modules)
        tracing.begin({}, 1.0, "request").end(2.0, "an_error")
        print(*sorted(set(sys.modules) - before), "opentelemetry.sdk.trace" in before)
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True"]


class Linked:
    """The two halves of a KV link: a decode service and the sender of a prefill pod."""

    def __init__(self, decode: Bus, prefill: Bus, decoders: Sequence[str] = ("decode-0",)) -> None:
        self.links = [LinkManager("Gloo", pod, "i1", "127.0.0.1", CPU) for pod in (*decoders, "prefill-0")]
        self.metrics = Metrics()
        self.services = [self._service(decode, n, pod) for n, pod in enumerate(decoders)]
        self.decode = self.services[0]
        there, engine = dict.fromkeys(decoders, "i1"), cast(Any, SimpleNamespace(kv_layout=LAYOUT))
        self.sender = KvSender(
            *(prefill, "prefill-0", "i1", engine, self.links[-1], 60.0, lambda: there),
            self.metrics,
        )

    def _service(self, bus: Bus, number: int, pod: str) -> DecodeService:
        engine = SimpleNamespace(kv_layout=LAYOUT)
        book = SequenceBook(bus, pod, self.metrics, Tracing("test", "test", "test", None))
        parts: tuple[Any, ...] = (bus, pod, engine, self.links[number], book, self.metrics)
        return cast(Any, DecodeService)(*parts)

    def close(self) -> None:
        for manager in self.links:
            manager.close()


async def test_a_link_is_made_before_a_request_needs_it_and_reserves_nothing(connect: Connect) -> None:
    decode = await connect("decode-0")
    linked = Linked(decode, await connect("prefill-0"))
    await linked.decode.start()
    await decode.flush()
    before = linked.metrics.expose()
    try:
        await linked.sender.link("decode-0", "i1")
        assert [manager.live_links for manager in linked.links] == [1, 1]
        assert linked.decode.inbound == 0
        assert _counted(linked.metrics.expose()) == _counted(before)
    finally:
        linked.close()


async def test_decoders_that_come_together_get_no_more_links_ahead_than_the_limit(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sender, "LINKS_AHEAD", 2)
    decode, decoders = await connect("decode-0"), [f"decode-{n}" for n in range(4)]
    linked = Linked(decode, await connect("prefill-0"), decoders)
    for service in linked.services:
        await service.start()
    await decode.flush()
    try:
        await asyncio.gather(*(linked.sender.link(pod, "i1") for pod in decoders))
        assert linked.links[-1].live_links == 2
        linked.links[-1].notify_lost("decode-0")
        await linked.sender.link(
            "decode-3", "i1"
        )  # the places of those that are gone or failed are free again
        assert linked.links[-1].live_links == 2
    finally:
        linked.close()


async def test_a_missing_decoder_delays_no_warm_up(connect: Connect) -> None:
    linked = Linked(await connect("decode-0"), await connect("prefill-0"))
    try:
        with pytest.raises(MmdError):
            await linked.sender.link("decode-0", "i1")
        assert [manager.live_links for manager in linked.links] == [0, 0]
    finally:
        linked.close()


# --- when it goes wrong ----------------------------------------------------------------------------------------------


async def test_a_step_that_fails_is_named_and_the_others_run(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []

    async def fails() -> None:
        raise ValueError("no such kernel")

    async def works() -> None:
        ran.append("works")

    started = startup()
    with caplog.at_level(logging.WARNING):
        await warm_up({"image": fails, "engine": works}, started, CPU)
    assert ran == ["works"]
    assert "warm-up of image failed" in caplog.text
    assert "no such kernel" in caplog.text
    assert list(started.seconds()) == ["warm_up_image", "warm_up_engine"]


async def test_steps_that_do_not_end_are_given_up_together(caplog: pytest.LogCaptureFixture) -> None:
    async def hangs() -> None:
        await asyncio.Event().wait()

    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(30):
            await warm_up({"image": hangs, "engine": hangs}, startup(), CPU, limit_seconds=0.1)
    assert [r.getMessage().split()[2] for r in caplog.records] == ["image", "engine"]


async def test_a_device_that_fails_ends_the_start() -> None:
    async def breaks() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(DeviceLostError, match="illegal memory access"):
        await warm_up({"image": breaks}, startup(), CPU)


# --- whole pods ------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    ("pool", "role", "phases"),
    [
        (
            "encoder",
            "encode",
            {"load_encoder", "warm_up_messages", "warm_up_audio", "warm_up_image", "warm_up_video"},
        ),
        ("prefill", "prefill", {"load_language", "memory", "engine", "warm_up_engine", "warm_up_links"}),
    ],
)
def test_a_ready_worker_shows_how_it_started_and_has_counted_nothing(
    nats_server: NatsServer, tmp_path: Path, pool: str, role: str, phases: set[str]
) -> None:
    environment = environment_of(nats_server, tmp_path, f"warm-{pool}")
    command = [sys.executable, "-m", "mmd_cli", "worker", "--pool", pool, "--roles", role]
    url = f"http://127.0.0.1:{environment['MMD_HTTP_PORT']}"
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError("it ended before it was ready")
        return _get(f"{url}/readyz") != ""

    try:
        wait_until(ready, "it is ready", retried=(urllib.error.URLError,))
        state, exposed = json.loads(_get(f"{url}/state")), _get(f"{url}/metrics")
    finally:
        process.terminate()
        assert process.wait(60) == 0
    assert phases <= set(state["startup_seconds"])
    samples = [s for family in text_string_to_metric_families(exposed) for s in family.samples]
    shown = {s.labels["phase"]: s.value for s in samples if s.name == "mmd_startup_seconds"}
    assert shown == state["startup_seconds"]
    load = state["load"]
    assert load["encode_work_per_second"] == {}
    assert load["prefill_tokens_per_second"] == load["encode_busy_fraction"] == 0
    assert load["kv_blocks_free"] == load["kv_blocks_total"]
    moved = {
        s.name
        for s in samples
        if s.value and s.name.endswith(("_total", "_count")) and not s.name.startswith("process_")
    }
    assert moved <= {"mmd_nats_round_trip_seconds_count"}


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
