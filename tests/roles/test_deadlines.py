"""A sequence whose request's deadline has passed stops in the engine, whoever has forgotten it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
import torch

from mmd_api.pipeline import PipelineConfig
from mmd_workers.process.pod import Pod
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.sequences import sequence_events as module
from mmd_workers.sequences.native import NativeHost
from mmd_workers.sequences.sequence_events import Sequences
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.gateway import RequestFailed
from mmd_workers.wire.messages.message_parts import Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.harness.waiting import until
from support.oracles.engine_oracle import TextModel, llama, make_engine, prompt_of

Connect = Callable[[str], Awaitable[Bus]]
SPEC = {"model": {"id": "builtin/demo"}, "decode": {"replicas": 1, "gpus": 0}}
MAX_TOKENS = 400


async def test_a_sequence_stops_in_the_engine_at_its_deadline_and_frees_everything(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEADLINE_CHECK_SECONDS", 0.05)
    bus = await connect("decode-0")
    heard: asyncio.Queue[RequestFailed] = asyncio.Queue()
    await bus.subscribe(bus.subjects.failures("gateway-0"), RequestFailed, heard.put)
    await bus.flush()
    config = {"namespace": "test", "name": "late", "revision": "r1", "spec": SPEC}
    pipeline = PipelineConfig.model_validate(config)
    settings = WorkerSettings(pipeline, "decode-0", "127.0.0.1", 0, "nats://unused", threads=1)
    pod = Pod.of(settings, "decode", ("decode",))
    pod.bus = bus
    host = NativeHost(pod, torch.device("cpu"))
    host.run(make_engine(TextModel(llama()), blocks=128))
    sequences = Sequences(pod, host)
    now = time.time()
    prompt = prompt_of(9, 1)
    for name, seconds in (("late", 0.0), ("early", 600.0)):
        request = GenerateRequest(
            name, 0, "gateway-0", prompt, [], Sampling(MAX_TOKENS), [], now + seconds, now
        )
        sequences.book.open(request)
        await host.engine.add(f"{name}#0", request, stop_after_prefill=False)
    taking = asyncio.create_task(take_forever(host))
    watching = asyncio.create_task(sequences.end_late())
    try:
        async with asyncio.timeout(60):
            failed = await heard.get()
            assert (failed.request_id, failed.code, failed.retryable) == ("late", "deadline_exceeded", False)

        async def is_left() -> bool:
            return await sequences_in(host) == 1

        await until(is_left, "one sequence is left")
        assert sequences.book.all() == ["early#0"]
    finally:
        watching.cancel()
        taking.cancel()
        await host.stop()


async def take_forever(host: NativeHost) -> None:
    while True:
        await host.outputs.get()
        host.taken()


async def sequences_in(host: NativeHost) -> int:
    await host.sample()
    assert host.stats is not None
    return host.stats.running_sequences + host.stats.waiting_sequences
