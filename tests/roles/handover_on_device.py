"""Run in a separate process: prefill → link → decode with engines and links on a device that never mixes with host memory.

`python -m tests.roles.handover_on_device NATS_URL` prints as JSON the output compared with that of `generate`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import torch

from mmd_api.contract.subjects import Subjects
from mmd_workers.decode.decode_service import DecodeService
from mmd_workers.engine.interface import StepOutput
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.features.store import FeatureStore
from mmd_workers.kv.links import LinkManager
from mmd_workers.model.grammar import Grammars
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.prefill.kv_sender import KvSender
from mmd_workers.prefill.prefill_service import PrefillService
from mmd_workers.sequences.native import NativeEngine
from mmd_workers.sequences.token_publisher import SequenceBook
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.gateway import RequestFailed, TokenBatch
from mmd_workers.wire.messages.message_parts import Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest, Placed
from support.oracles import strict_device
from support.oracles.devices import DEVICE, ON_GPU
from support.oracles.engine_oracle import TextModel, generate, llama, make_engine, prompt_of

LENGTHS = (5, 90, 33)
NEW_TOKENS = 6


class Pod:
    """Engine, links and book of one worker on the device."""

    def __init__(self, bus: Bus, name: str, device: torch.device) -> None:
        self.bus, self.name = bus, name
        self.model = TextModel(llama().to(device))
        self.outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        self.runner = EngineRunner(make_engine(self.model, chunk_tokens=32), self.outputs.put_nowait)
        self.engine = NativeEngine(self.runner, self.model, Grammars(lambda: None, 0, ()))
        self.links = LinkManager("Gloo", name, "i1", "127.0.0.1", device)
        self.metrics = Metrics()
        self.book = SequenceBook(bus, name, self.metrics, Tracing("test", "test", "test", None))
        self.runner.start()


async def decode_pod(bus: Bus, device: torch.device) -> Pod:
    pod = Pod(bus, "decode-0", device)
    await DecodeService(bus, pod.name, pod.engine, pod.links, pod.book, pod.metrics).start()

    async def publish() -> None:
        while True:
            await pod.book.publish(await pod.outputs.get())
            pod.runner.taken()

    pod.publishing = asyncio.create_task(publish())
    return pod


async def prefill_pod(bus: Bus, device: torch.device) -> Pod:
    pod = Pod(bus, "prefill-0", device)
    sender = KvSender(
        bus,
        pod.name,
        "i1",
        pod.engine,
        pod.links,
        5.0,
        lambda: {"decode-0": "i1"},
        pod.metrics,
    )
    service = PrefillService(
        bus,
        pod.name,
        pod.engine,
        FeatureStore(0, lambda *_: None),
        None,  # text needs no features
        pod.book,
        sender,
        max_waiting=8,
        max_in_engine=8,
        overlap_tokens=8,
        metrics=pod.metrics,
    )
    await service.start()

    async def publish() -> None:
        while True:
            output = await pod.outputs.get()
            for ready in output.kv_ready:
                service.on_kv_ready(ready)
            await pod.book.publish(output)
            for token in output.tokens:
                service.on_token(token)
            for sequence, error in output.failed:
                service.on_failed(sequence, error)
            pod.runner.taken()

    pod.publishing = asyncio.create_task(publish())
    return pod


async def main(url: str) -> dict[str, object]:
    device = DEVICE if ON_GPU else strict_device.install()
    subjects = Subjects("test", "device", "r1")
    buses = [await Bus.connect(url, name, subjects) for name in ("decode-0", "prefill-0", "gateway-0")]
    gateway = buses[2]
    tokens: dict[str, list[int]] = {}
    failures: list[str] = []
    done = asyncio.Event()

    async def on_tokens(batch: TokenBatch) -> None:
        for item in batch.items:
            tokens.setdefault(item.request_id, []).append(item.token_id)
        if sum(map(len, tokens.values())) == len(LENGTHS) * NEW_TOKENS:
            done.set()

    async def on_failure(failed: RequestFailed) -> None:
        failures.append(f"{failed.code}: {failed.message}")
        done.set()

    await gateway.subscribe(subjects.tokens("gateway-0"), TokenBatch, on_tokens)
    await gateway.subscribe(subjects.failures("gateway-0"), RequestFailed, on_failure)
    decode = await decode_pod(buses[0], device)
    prefill = await prefill_pod(buses[1], device)
    for bus in buses:
        await bus.flush()
    reference = llama()
    now = time.time()
    for length in LENGTHS:
        request = GenerateRequest(
            f"r{length}",
            0,
            "gateway-0",
            prompt_of(length, length),
            [],
            Sampling(NEW_TOKENS, ignore_eos=True),
            ["decode-0"],
            now + 100,
            now,
        )
        placed = await gateway.request(subjects.prefill("prefill-0"), request, Placed, timeout=30)
        assert placed.accepted, placed
    async with asyncio.timeout(90):
        await done.wait()
    expected = {f"r{n}": generate(reference, prompt_of(n, n), NEW_TOKENS) for n in LENGTHS}
    device_of_pools = {str(pod.runner._engine.kv.keys[0].device) for pod in (decode, prefill)}
    for pod in (decode, prefill):
        pod.publishing.cancel()
        await pod.runner.stop(5.0)
        pod.links.close()
    for bus in buses:
        await bus.close(timeout=1.0)
    return {"tokens": tokens, "expected": expected, "failures": failures, "devices": sorted(device_of_pools)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(sys.argv[1]))) + "\n")
