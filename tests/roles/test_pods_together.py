"""Whole pods in one process: the same tokens wherever the roles are, and nothing in hand is lost in a drain."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from mmd_api.contract.sampling import Guidance
from mmd_api.pipeline import PipelineConfig, roles_of
from mmd_api.spec.model import ModelSpec
from mmd_workers.engine.interface import SequenceInput
from mmd_workers.kv.quantize import KvWire
from mmd_workers.model.interfaces import LanguageModel
from mmd_workers.model.language import load_language_model
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.wire.server import NatsServer
from mmd_workers.worker import Worker
from support.oracles.engine_oracle import greedy, make_engine, prompt_of, run
from support.serving.placing import SECONDS, Client

VARIED = prompt_of(60, 6)  # whose answer changes with KV in four bits
GUIDANCE = Guidance(3.0, prompt_of(9, 7))
POOL = {"replicas": 1, "gpus": 0, "kvCacheMebibytes": 16}
APART = {"encoder": {"replicas": 1, "gpus": 0}, "prefill": POOL, "decode": POOL}


@asynccontextmanager
async def running(
    server: NatsServer, *pools: Any, wire_format: str = "Model", kv_dtype: str = "Model", **spec: Any
) -> AsyncIterator[list[Worker]]:
    """A ready pod of each pool. Where they have not ended yet they are asked to."""
    kv = {"backend": "Gloo", "wireFormat": wire_format}
    spec |= {"model": {"id": "builtin/demo"}, "transfer": {"kv": kv}, "engine": {"kvDtype": kv_dtype}}
    config = {"namespace": "test", "name": "-".join(pools), "revision": "r1", "spec": spec}
    pipeline = PipelineConfig.model_validate(config)
    pods: list[Worker] = []
    serving: list[asyncio.Task[None]] = []
    try:
        for pool in pools:  # one after the other: two threads of a process cannot load models at once
            settings = WorkerSettings(pipeline, f"{pool}-0", "127.0.0.1", 0, server.url, threads=1)
            pods.append(Worker(settings, pool, roles_of(pipeline.spec, pool)))
            serving.append(asyncio.create_task(pods[-1].serve()))
            while pods[-1].state != "ready":
                assert not serving[-1].done(), serving[-1].result()
                await asyncio.sleep(0.05)
        yield pods
        for pod in pods:
            pod.stopping.set()
        await asyncio.gather(*serving)
    finally:
        for task in serving:
            task.cancel()
        await asyncio.wait(serving)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)


async def test_a_handed_over_sequence_equals_one_pods_and_survives_a_drain(
    own_nats_server: NatsServer,
) -> None:
    async with asyncio.timeout(SECONDS):
        async with running(own_nats_server, "decode", decode=POOL) as (alone,):
            client = Client(alone.pod.bus)
            await client.start()
            await client.place("decode-0", "here", 40, [])
            await client.place("decode-0", "guided here", 40, [], guidance=GUIDANCE)
            expected = await client.until_tokens("here", 40)
            guided = await client.until_tokens("guided here", 40)
            assert guided != expected
        async with running(own_nats_server, "prefill", "decode", **APART) as (prefill, decode):
            client = Client(prefill.pod.bus)
            await client.start()
            await client.place("prefill-0", "handed-over", 40, ["decode-0"])
            await client.place("prefill-0", "guided", 40, ["decode-0"], guidance=GUIDANCE)
            await client.until_tokens("handed-over", 3)
            await client.until_tokens("guided", 3)
            decode.stopping.set()
            assert await client.until_tokens("handed-over", 40) == expected
            assert await client.until_tokens("guided", 40) == guided
            while decode.state != "drained":
                await asyncio.sleep(0.02)
            assert not client.failures
            assert decode.heartbeat().load.decode_running == 0
            assert prefill.heartbeat().load.kv_blocks_total > 0


async def test_a_sequence_decodes_from_what_its_kv_is_after_four_bits(own_nats_server: NatsServer) -> None:
    tokens = 24
    async with asyncio.timeout(SECONDS):
        async with running(own_nats_server, "prefill", "decode", wire_format="Int4", **APART) as pods:
            client = Client(pods[0].pod.bus)
            await client.start()
            await client.place("prefill-0", "in-four-bits", tokens, ["decode-0"], VARIED)
            found = await client.until_tokens("in-four-bits", tokens)
            moved = [
                pod.pod.metrics.transfer_bytes.labels("kv", way)._value.get()
                for pod, way in zip(pods, ("sent", "received"), strict=True)
            ]
    model = load_language_model(ModelSpec(id="builtin/demo"), torch.device("cpu"))
    wire = KvWire(model.kv_layout, "Int4")
    assert moved == [len(VARIED) * wire.bytes_per_token] * 2
    assert found == decoded_after(wire, model, tokens)
    assert found != decoded_after(KvWire(model.kv_layout), model, tokens)


async def test_kv_in_8_bits_moves_as_stored_and_takes_less_room(
    own_nats_server: NatsServer,
) -> None:
    tokens = 24
    async with asyncio.timeout(SECONDS):
        async with running(own_nats_server, "prefill", "decode", kv_dtype="Int8", **APART) as pods:
            client = Client(pods[0].pod.bus)
            await client.start()
            await client.place("prefill-0", "in-8-bits", tokens, ["decode-0"], VARIED)
            found = await client.until_tokens("in-8-bits", tokens)
            moved = [
                pod.pod.metrics.transfer_bytes.labels("kv", way)._value.get()
                for pod, way in zip(pods, ("sent", "received"), strict=True)
            ]
            blocks = {pod.heartbeat().load.kv_blocks_total for pod in pods}
    model = load_language_model(ModelSpec(id="builtin/demo"), torch.device("cpu"))
    layout = model.kv_layout.packed_as("Int8")
    assert moved == [len(VARIED) * layout.bytes_per_token()] * 2
    block_tokens = pods[0].pod.spec.decode.kv_block_tokens
    assert blocks == {POOL["kvCacheMebibytes"] * 2**20 // (block_tokens * layout.bytes_per_token())}
    alone = make_engine(model, kv_dtype="Int8")
    alone.add(SequenceInput("r", model.lower(VARIED, []), greedy(tokens, ignore_eos=True)))
    assert found == run(alone).tokens["r"]


def decoded_after(wire: KvWire, model: LanguageModel, tokens: int) -> list[int]:
    """What engines answer, the second of which gets the KV of the first by this format."""
    prefill, decode = (make_engine(model) for _ in range(2))
    prompt, sampling = model.lower(VARIED, []), greedy(tokens, ignore_eos=True)
    prefill.add(SequenceInput("r", prompt, sampling, stop_after_prefill=True))
    first = run(prefill).tokens["r"]
    decode.reserve("r", len(VARIED), tokens)
    decode.write_kv("r", 0, wire.unpack(wire.pack(prefill.read_kv("r", 0, len(VARIED)))))
    decode.attach("r", VARIED, sampling, first, prompt.next_position, [])
    return [*first, *run(decode).tokens["r"]]
