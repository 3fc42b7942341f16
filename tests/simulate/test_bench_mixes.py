"""What `bench.mixes` sends."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.mixes import COMPARISONS, MIXES, Turns, asks_of
from bench.openloop import Answered, Ask


@pytest.mark.parametrize("mix", MIXES)
def test_a_turn_has_the_kinds_in_their_shares_and_no_file_twice(mix: str) -> None:
    asks = [*asks_of(MIXES[mix], 20, seed=3), *asks_of(MIXES[mix], 20, seed=4)]
    counts = Counter(ask.kind for ask in asks)
    assert counts == {kind: 40 * share for kind, share in MIXES[mix].items()}
    parts = [part for ask in asks for part in json.loads(ask.body)["messages"][0]["content"]]
    assert len({json.dumps(part) for part in parts}) == len(parts)


def test_a_report_has_rates_per_round_and_percentiles_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answered(
        url: str,
        asks: list[Ask],
        clients: int,
        key: str,
        on_answer: Callable[[Answered], None],
        on_ask: Callable[[], None],
    ) -> None:
        for number in range(20):
            ttft = None if number == 0 else 0.1
            on_answer(Answered(0.0, "text" if number < 19 else "image", "r", ttft))
        await asyncio.sleep(0.01)

    monkeypatch.setattr("bench.mixes.keep_busy", answered)
    turns = Turns()
    asyncio.run(turns.take("", [], 1))
    report = turns.report()
    assert report["failed"] == 1
    assert len(report["requests_per_second"]) == 1
    assert 0 < report["requests_per_second"][0] <= 19 / 0.01
    assert report["ttft_seconds"]["p50"] == 0.1
    assert set(report["by_kind"]) == {"text"}, "one image has no percentiles"


def test_text_comes_before_the_media_where_it_is_to_be_prefilled_meanwhile() -> None:
    (first,) = asks_of({"image": 1.0}, 1, seed=3, words=250, text_first=True)
    (behind,) = asks_of({"image": 1.0}, 1, seed=3)
    kinds = [
        [part["type"] for part in json.loads(ask.body)["messages"][0]["content"]] for ask in (first, behind)
    ]
    assert kinds == [["text", "image_url"], ["image_url", "text"]]


def test_the_engine_pauses_while_a_medium_is_encoded_between_steps() -> None:
    program = """
import asyncio
import torch
from bench.synchronous import BetweenSteps
from mmd_workers.engine.interface import StepOutput
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.prefill import prefill_role as role

class Engine:
    device, steps = torch.device("cpu"), 0
    def has_work(self):
        return True
    def step(self):
        self.steps += 1
        return StepOutput(prefill_tokens=0, decode_sequences=0, changed=True)

async def main():
    engine, seen = Engine(), []
    runner = EngineRunner(engine, lambda _: None)
    runner.start()
    async def encode(ref, read):
        before, data = engine.steps, await read()
        for _ in range(100):
            await asyncio.sleep(0)
        await asyncio.to_thread(lambda: None)
        seen.append((ref, data, engine.steps - before, before))
        return ref, {}
    async def read():
        return b"bytes"
    source = BetweenSteps(encode, runner)
    features = await asyncio.gather(source.encode(1, read), source.encode(2, read))
    await runner.call(lambda _: None)
    await runner.stop(5.0)
    print(features, seen, engine.steps)
    assert [one[:3] for one in seen] == [(1, b"bytes", 0), (2, b"bytes", 0)]
    assert seen[0][3] < seen[1][3], "no step between two media"
    service = role.PrefillService(*[None] * 7, max_waiting=1, max_in_engine=1, overlap_tokens=128, metrics=None)
    assert service._overlap_tokens > 10**9, "text is prefilled before its media are encoded"

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_what_changes_the_pods_of_a_bench_is_imported_by_nothing_else() -> None:
    root = Path(__file__).parents[2]
    names = {
        name for comparison in COMPARISONS for one in comparison.variants.values() for name in one.imported
    }
    assert names == {"bench.synchronous", "bench.no_overlap"}
    for folder in ("workers", "operator", "cli", "crds"):
        for file in (root / folder).rglob("*.py"):
            assert not re.search(r"^\s*(from|import) bench\b", file.read_text(), re.MULTILINE), file
