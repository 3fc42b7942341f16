"""Prompts are hashed and lowered on one thread beside the engine: neither the event loop nor the engine's steps wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from hashlib import blake2b
from typing import Any

import pytest

from mmd_workers.engine.interface import StepOutput
from mmd_workers.engine.memory import blocks
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.model.grammar import Grammars
from mmd_workers.sequences.native import NativeEngine
from support.harness.waiting import until
from support.oracles.engine_oracle import generate, llama, make_engine

from .media_model import FIRST, NEW_TOKENS, SECOND, TOKENS, MediaModel, request_of

BLOCK = 8
FULL_BLOCKS = len(TOKENS) // BLOCK
CHECKED = 1  # the first identity is hashed again where identities were given


class Side:
    """An engine on its thread. `lowered`: the threads that lowered prompts, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = MediaModel(llama())
        self.lowered: list[str] = []
        self.tokens: list[int] = []
        self.runner = EngineRunner(make_engine(self.model, block_tokens=BLOCK), self.take)
        self.engine = NativeEngine(self.runner, self.model, Grammars(lambda: None, 0, ()))
        lower = self.model.lower

        def noted(*given: Any, **more: Any) -> Any:
            self.lowered.append(threading.current_thread().name)
            return lower(*given, **more)

        monkeypatch.setattr(self.model, "lower", noted)

    def take(self, output: StepOutput) -> None:
        self.tokens += [token.token_id for token in output.tokens]
        self.runner.taken()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that hashed blocks, in order."""
    threads: list[str] = []

    def noted(*given: Any, **more: Any) -> Any:
        threads.append(threading.current_thread().name)
        return blake2b(*given, **more)

    monkeypatch.setattr(blocks, "blake2b", noted)
    return threads


@pytest.fixture
async def sides(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Side, Side]]:
    both = Side(monkeypatch), Side(monkeypatch)
    for side in both:
        side.runner.start()
    yield both
    for side in both:
        assert await side.runner.stop(10)


def beside(threads: list[str]) -> bool:
    return all(name.startswith("beside-engine") for name in threads)


@pytest.mark.parametrize("media", [False, True])
async def test_a_prompt_is_hashed_once_and_lowered_beside_the_engine(
    sides: tuple[Side, Side], hashed: list[str], media: bool
) -> None:
    side, _ = sides
    request = request_of("r", media=media)
    assert await side.engine.cached_tokens("r#0", request) == 0
    assert len(await side.engine.identities("r#0", request)) == FULL_BLOCKS
    features = {n: side.model.feature(*run) for n, run in enumerate((FIRST, SECOND))} if media else {}
    await side.engine.add("r#0", request, stop_after_prefill=False, features=features)
    await until(lambda: len(side.tokens) == NEW_TOKENS)
    assert side.tokens == generate(llama(), TOKENS, NEW_TOKENS)
    assert beside(hashed)
    assert len(hashed) == FULL_BLOCKS + CHECKED
    assert beside(side.lowered)
    assert len(side.lowered) == 1
    assert not side.engine._identities, "nothing is kept of a prompt that the engine has"


async def test_a_text_that_nobody_looked_up_is_hashed_beside_the_engine_too(
    sides: tuple[Side, Side], hashed: list[str]
) -> None:
    side, _ = sides
    await side.engine.add("r#0", request_of("r", media=False), stop_after_prefill=False)
    await until(lambda: len(side.tokens) == NEW_TOKENS)
    assert beside(hashed)
    assert len(hashed) == FULL_BLOCKS


async def hand_over(prefill: Side, decode: Side, prefix: list[bytes], hashed: list[str]) -> None:
    """Answer a request on two engines. `hashed` is cleared once prefill is done."""
    request = request_of("r", media=False)
    await prefill.engine.add("r#0", request, stop_after_prefill=True)
    await until(lambda: bool(prefill.tokens))
    hashed.clear()
    cached = await decode.engine.reserve("r#0", len(TOKENS), NEW_TOKENS, prefix)
    await decode.engine.write_kv("r#0", cached, await prefill.engine.read_kv("r#0", cached, len(TOKENS)))
    await decode.engine.attach("r#0", request, list(prefill.tokens), len(TOKENS))
    await until(lambda: len(decode.tokens) == NEW_TOKENS - 1)
    assert prefill.tokens + decode.tokens == generate(llama(), TOKENS, NEW_TOKENS)
    assert beside(hashed)
    assert not decode.engine._identities


async def test_a_sequence_is_attached_with_the_identities_of_its_offer(
    sides: tuple[Side, Side], hashed: list[str]
) -> None:
    prefill, decode = sides
    prefix = await prefill.engine.identities("r#0", request_of("r", media=False))
    await hand_over(prefill, decode, prefix, hashed)
    assert len(hashed) == CHECKED
    again = await decode.engine.cached_tokens("again#0", request_of("again", media=False))
    assert again == (len(TOKENS) - 1) // BLOCK * BLOCK


async def test_blocks_are_not_found_under_identities_that_a_peer_hashed_in_another_size(
    sides: tuple[Side, Side], hashed: list[str]
) -> None:
    prefill, decode = sides
    wrong = blocks.leading_identities(TOKENS, [], b"", BLOCK // 2)
    await hand_over(prefill, decode, wrong, hashed)
    assert await decode.runner.look(lambda engine: engine.blocks.find(wrong)) == []
    again = await decode.engine.cached_tokens("again#0", request_of("again", media=False))
    assert again == (len(TOKENS) - 1) // BLOCK * BLOCK


async def test_identities_of_a_prompt_that_is_aborted_are_not_kept(sides: tuple[Side, Side]) -> None:
    side, _ = sides
    await side.engine.identities("r#0", request_of("r"))
    await side.engine.reserve("s#0", len(TOKENS), 1, [b"any"])
    side.engine.abort("r#0", "s#0")
    assert not side.engine._identities


async def test_a_prompt_is_prepared_while_the_engine_is_in_a_step(sides: tuple[Side, Side]) -> None:
    side, _ = sides
    stepping, may_end = threading.Event(), threading.Event()

    def long_step(_: Any) -> None:
        stepping.set()
        assert may_end.wait(60)

    step = asyncio.create_task(side.runner.call(long_step))
    try:
        await asyncio.to_thread(stepping.wait, 60)
        assert len(await side.engine.identities("r#0", request_of("r"))) == FULL_BLOCKS
        adding = asyncio.create_task(
            side.engine.add("r#0", request_of("r", media=False), stop_after_prefill=False)
        )
        await until(lambda: bool(side.lowered))
        assert not adding.done()
    finally:
        may_end.set()
    await step
    await adding
    await until(lambda: len(side.tokens) == NEW_TOKENS)
