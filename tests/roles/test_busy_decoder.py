"""A decoder whose engine is in a long step: handovers wait for it, whatever the deadline of a chunk on the link."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import torch

from mmd_workers.decode.service import DecodeService
from mmd_workers.kv.links import LinkManager
from mmd_workers.model.types import KvLayout
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.prefill.handoff import Finished, KvSender, Ranges
from mmd_workers.sequences.book import SequenceBook
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages import GenerateRequest, Sampling

Connect = Callable[[str], Awaitable[Bus]]
LAYOUT = KvLayout(num_layers=1, num_kv_heads=[1], head_dim=[16], dtype="float32")
CHUNK_SECONDS = 0.4
CPU = torch.device("cpu")


class BusyEngine:
    """An engine that runs a command after a step of `step_seconds`; `log` has the commands in order."""

    kv_layout = LAYOUT

    def __init__(self, step_seconds: float) -> None:
        self.log: list[str] = []
        self._step_seconds = step_seconds

    async def reserve(self, *_: object) -> None:
        await self._run("reserve")

    async def read_kv(self, sequence: str, start: int, end: int) -> list[torch.Tensor]:
        return [torch.full((2, end - start, 1, 16), float(start))]

    async def write_kv(self, sequence: str, start: int, tensors: list[torch.Tensor]) -> None:
        assert torch.equal(tensors[0], torch.full_like(tensors[0], float(start)))
        await self._run(f"write {start}")

    async def attach(self, *_: object) -> None:
        await self._run("attach")

    async def abort(self, sequence: str) -> None:
        await self._run("abort")

    async def _run(self, command: str) -> None:
        await asyncio.sleep(self._step_seconds)
        self.log.append(command)


@pytest.mark.parametrize(
    "step_seconds", [CHUNK_SECONDS - 0.1, CHUNK_SECONDS, CHUNK_SECONDS + 0.1, 3 * CHUNK_SECONDS]
)
async def test_an_engine_step_longer_than_the_deadline_of_a_chunk_breaks_no_link(
    connect: Connect, step_seconds: float
) -> None:
    decode, prefill = await connect("decode-0"), await connect("prefill-0")
    links = [
        LinkManager("Gloo", pod, "i1", "127.0.0.1", CPU, chunk_timeout_seconds=CHUNK_SECONDS)
        for pod in ("decode-0", "prefill-0")
    ]
    engine = BusyEngine(step_seconds)
    book = SequenceBook(decode, "decode-0", Metrics(), Tracing("test", "test", "test", None))
    parts: tuple[Any, ...] = (decode, "decode-0", engine, links[0], book, Metrics())
    await cast(Any, DecodeService)(*parts).start()
    await decode.flush()
    reader = cast(Any, BusyEngine(0.0))
    sender = KvSender(
        *(prefill, "prefill-0", "i1", reader, links[1], 60.0, lambda: {"decode-0": "i1"}, Metrics())
    )
    now = time.time()
    request = GenerateRequest("r", 0, "gateway-0", [1] * 12, [], Sampling(4), ["decode-0"], now + 60, now)
    ranges = Ranges(ready=[(0, 4), (4, 8), (8, 12)], finished=Finished([1], 12))
    try:
        await sender.hand_over(request, "r#0", await sender.reserve(request), ranges)
        assert engine.log == ["reserve", "write 0", "write 4", "write 8", "attach"]
        assert [manager.live_links for manager in links] == [1, 1]
    finally:
        for manager in links:
            manager.close()
