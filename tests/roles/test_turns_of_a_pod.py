"""Engines take turns only on CPUs, and only in pods whose settings name a file for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmd_workers.engine.pacing.cpu_turns import Turns
from mmd_workers.sequences.native import NativeHost
from support.oracles.engine_oracle import TextModel, llama, make_engine, prompt_of, text_input


@pytest.mark.parametrize(("device", "told", "waits"), [("cpu", 1, 1), ("cpu", 0, 0), ("cuda", 1, 0)])
async def test_an_engine_waits_for_its_turn(tmp_path: Path, device: str, told: bool, waits: bool) -> None:
    file = tmp_path / "turns"
    settings = SimpleNamespace(turns=str(file) if told else "", memory_fraction=1.0)
    decode, tasks = SimpleNamespace(kv_block_tokens=16), SimpleNamespace(failed=print)
    spec = SimpleNamespace(model=None, decode=decode, engine=SimpleNamespace(kv_dtype="Model"))
    pod: Any = SimpleNamespace(settings=settings, spec=spec, tasks=tasks, metrics=None)
    host, model = NativeHost(pod, torch.device(device)), TextModel(llama())
    host.run(make_engine(model))
    assert (host._runner is not None and isinstance(host._runner._turns, Turns)) == waits
    assert file.exists() == waits
    await host._runner.call(lambda e: e.add(text_input(model, "a", prompt_of(9, 1), 3)))
    async with asyncio.timeout(30):
        assert (await host.outputs.get()).tokens
    await host.stop()
