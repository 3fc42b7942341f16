"""Sequences that end for a reason from outside, however many, have all left vLLM's core before its next step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from mmd_workers.sequences import sequence_events, token_publisher
from mmd_workers.vllm_engine.host import VllmEngine
from support.serving.held_pod import MANY, NAMES, PROMPT, REASONS, HeldPod, held_pod

from . import cores


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cores.checkpoint("llava", tmp_path_factory.mktemp("models"))


@pytest.fixture
async def held(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HeldPod]:
    monkeypatch.setattr(sequence_events, "DEADLINE_CHECK_SECONDS", 0.02)
    monkeypatch.setattr(token_publisher, "REPORT_SECONDS", 0.02)
    core: Any = cores.make(folder, blocks=3 * MANY, max_sequences=2 * MANY)

    def engine_of(runner: Any) -> VllmEngine:
        return VllmEngine(runner, core.grammars, core.kv_layout, core.feature_row_bytes)

    async with held_pod(core, engine_of) as pod:
        yield pod


@pytest.mark.parametrize("end", REASONS)
async def test_a_thousand_sequences_of_vllm_end_with_one_step(
    held: HeldPod, end: Callable[[HeldPod], Awaitable[None]]
) -> None:
    await held.add(*NAMES)
    await held.hold()
    await end(held)
    assert await held.loads_of_two_steps() == [MANY + 1, 1]
    assert held.book.all() == ["other#0"]


async def test_a_thousand_reservations_of_vllm_end_with_one_step(held: HeldPod) -> None:
    await asyncio.gather(*(held.engine.reserve(name, len(PROMPT), 4, []) for name in NAMES))
    await held.hold()
    held.engine.abort(*NAMES)
    assert await held.loads_of_two_steps() == [MANY + 1, 1]
