"""Prompts that a decode pod computes itself: what it takes, what it gives back, and that it keeps nothing of either."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from mmd_api.contract.errors import DrainingError, OverloadedError, RequestCancelledError
from mmd_workers.decode.local_prompts import PromptService
from mmd_workers.engine.interface import SampledToken, StepOutput
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.model.grammar import Grammars
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.sequences.native import NativeEngine
from mmd_workers.sequences.token_publisher import SequenceBook
from mmd_workers.wire.bus import Bus
from support.harness.waiting import until
from support.oracles.engine_oracle import generate, llama, make_engine

from .media_model import FIRST, NEW_TOKENS, SECOND, TOKENS, MediaModel, request_of

Connect = Callable[[str], Awaitable[Bus]]
MOST = 3


class Pod:
    """A decode pod, as the worker joins its parts."""

    def __init__(self, bus: Bus) -> None:
        self.metrics = metrics = Metrics()
        self.model = MediaModel(llama())
        self.runner = EngineRunner(make_engine(self.model), self.take)
        self.engine = NativeEngine(self.runner, self.model, Grammars(lambda: None, 0, ()))
        self.book = SequenceBook(bus, "d-0", metrics, Tracing("t", "t", "t", None))
        self.handovers = 0
        self.tokens: dict[str, list[int]] = {}
        self.service = PromptService(
            bus, "d-0", self.engine, self.book, lambda: self.handovers, MOST, metrics
        )

    def take(self, output: StepOutput) -> None:
        for sequence, cached in output.admitted.items():
            self.service.on_admitted(sequence, cached)
        for token in output.tokens:
            self._token(token)
        self.runner.taken()

    def _token(self, token: SampledToken) -> None:
        self.tokens.setdefault(token.sequence_id, []).append(token.token_id)
        self.service.on_token(token)

    async def blocks_in_use(self) -> int:
        stats = await self.runner.call(lambda engine: engine.stats())
        return int(stats.blocks_total - stats.blocks_free)


@pytest.fixture
async def pod(connect: Connect) -> AsyncIterator[Pod]:
    pod = Pod(await connect("d-0"))
    pod.runner.start()
    yield pod
    assert await pod.runner.stop(10)


async def cache(pod: Pod) -> None:
    """Leave the KV of a prompt with media in the prefix cache, as a handover or another request does."""
    request = request_of("before")
    await pod.engine.add("before#0", request, stop_after_prefill=False)
    for number, (start, length) in enumerate((FIRST, SECOND)):
        await pod.engine.fill("before#0", number, pod.model.feature(start, length))
    await until(lambda: len(pod.tokens.get("before#0", ())) == NEW_TOKENS)


def failures(pod: Pod) -> dict[str, tuple[str, bool]]:
    """Code of each failure that waits for its gateway, and whether it places the request again."""
    return {
        name: (tracked.failure.code, tracked.failure.retryable)
        for name, tracked in pod.book._ended.items()
        if tracked.failure is not None
    }


def outcomes(pod: Pod) -> dict[str, float]:
    """What the pod has counted of its prompts."""
    counted = {
        outcome: pod.metrics.local_prompts.labels(outcome)._value.get()
        for outcome in ("accepted", "refused", "returned")
    }
    return {outcome: count for outcome, count in counted.items() if count}


async def test_a_prompt_is_answered_like_generate_with_its_phases(pod: Pod) -> None:
    assert (await pod.service._place(request_of("r", media=False))).accepted
    await until(lambda: len(pod.tokens.get("r#0", ())) == NEW_TOKENS)
    assert pod.tokens["r#0"] == generate(llama(), TOKENS, NEW_TOKENS)
    tracked = pod.book.get("r#0")
    assert tracked is not None
    assert [phase.name for phase in tracked.phases] == ["queue", "prefill"]
    assert pod.service._prompts == {}


async def test_a_prompt_waits_here_until_figures_of_the_engine_show_it(pod: Pod) -> None:
    pod._token = lambda token: None  # type: ignore[method-assign]  # the first token has not come yet
    assert pod.service.waiting(0.0) == []
    assert (await pod.service._place(request_of("r", media=False))).accepted
    assert pod.service.waiting(time.time() + 60) == [len(TOKENS)]
    prompt = pod.service._prompts["r#0"]
    await until(lambda: prompt.added > 0)
    assert pod.service.waiting(prompt.added) == [len(TOKENS)]
    assert pod.service.waiting(prompt.added + 0.001) == []


async def test_a_prompt_waits_here_without_what_the_router_knows_to_be_cached(pod: Pod) -> None:
    asked = replace(request_of("r", media=False), cached_tokens=16)
    assert (await pod.service._place(asked)).accepted
    assert pod.service.waiting(0.0) == [len(TOKENS) - 16]


async def test_a_prompt_that_has_its_first_token_waits_no_longer(pod: Pod) -> None:
    assert (await pod.service._place(request_of("r", media=False))).accepted
    await until(lambda: bool(pod.tokens.get("r#0")))
    assert pod.service.waiting(0.0) == []


async def test_a_prompt_whose_media_are_cached_is_answered_like_generate(pod: Pod) -> None:
    await cache(pod)
    assert (await pod.service._place(request_of("r"))).accepted
    await until(lambda: len(pod.tokens.get("r#0", ())) == NEW_TOKENS)
    assert pod.tokens["r#0"] == generate(llama(), TOKENS, NEW_TOKENS)
    assert failures(pod) == {}


async def test_a_prompt_whose_media_are_not_cached_goes_back_to_its_gateway(pod: Pod) -> None:
    assert (await pod.service._place(request_of("r"))).accepted
    await until(lambda: bool(failures(pod)))
    assert failures(pod) == {"r#0": (OverloadedError.code, True)}
    assert outcomes(pod) == {"accepted": 1, "returned": 1}
    assert await pod.blocks_in_use() == 0
    assert pod.service._prompts == {}


async def test_a_prompt_whose_media_are_evicted_before_it_is_admitted_goes_back(pod: Pod) -> None:
    await cache(pod)
    blocks, lower = pod.runner._engine.blocks, pod.model.lower

    def evicted_first(*arguments: Any, **more: Any) -> Any:  # in the turn in which the engine gets it
        blocks.release(blocks.allocate(blocks.num_blocks))
        return lower(*arguments, **more)

    pod.model.lower = evicted_first  # type: ignore[method-assign]
    assert (await pod.service._place(request_of("r"))).accepted
    await until(lambda: bool(failures(pod)))
    assert failures(pod) == {"r#0": (OverloadedError.code, True)}
    assert await pod.blocks_in_use() == 0
    assert outcomes(pod) == {"accepted": 1, "returned": 1}


async def test_a_prompt_that_is_short_of_media_twice_is_returned_once(pod: Pod) -> None:
    await cache(pod)
    assert (await pod.service._place(request_of("r", 200))).accepted
    await until(lambda: bool(pod.tokens.get("r#0")))
    for _ in range(
        2
    ):  # as an engine reports it again, with what else it has lost, before the request is back
        pod.service.on_admitted("r#0", 0)
    await until(lambda: bool(failures(pod)))
    await until(lambda: not pod.service._returns)
    assert outcomes(pod) == {"accepted": 1, "returned": 1}


async def test_a_cancelled_prompt_leaves_nothing(pod: Pod) -> None:
    assert (await pod.service._place(request_of("r", 200, media=False))).accepted
    pod.book.cancel("r", 0)
    pod.service.cancel("r#0")  # as `Sequences` does
    pod.book.forget("r#0")
    pod.engine.abort("r#0")

    async def is_free() -> bool:
        return await pod.blocks_in_use() == 0

    await until(is_free)
    await until(lambda: pod.service._prompts == {})
    refused = await pod.service._place(request_of("r", media=False))
    assert (refused.accepted, refused.code) == (False, RequestCancelledError.code)


async def test_a_pod_takes_a_placement_once_although_it_is_repeated(pod: Pod) -> None:
    request = request_of("r", media=False)
    assert all([(await pod.service._place(request)).accepted for _ in range(3)])
    await until(lambda: len(pod.tokens.get("r#0", ())) == NEW_TOKENS)
    await asyncio.sleep(0.1)
    assert len(pod.tokens["r#0"]) == NEW_TOKENS


async def test_prompts_do_not_overtake_handovers_that_wait_for_blocks(pod: Pod) -> None:
    pod.handovers = 2
    refused = await pod.service._place(request_of("r", media=False))
    assert (refused.accepted, refused.code) == (False, OverloadedError.code)
    pod.handovers = 0
    assert (await pod.service._place(request_of("r", media=False))).accepted


async def test_only_so_many_prompts_wait_at_a_pod(pod: Pod) -> None:
    placed = [await pod.service._place(request_of(f"r{number}", media=False)) for number in range(MOST + 2)]
    assert [one.accepted for one in placed].count(True) >= MOST
    assert {one.code for one in placed if not one.accepted} <= {OverloadedError.code}
    full = {f"r{number}#0": object() for number in range(MOST)}
    pod.service._prompts = full  # type: ignore[assignment]
    assert not (await pod.service._place(request_of("late", media=False))).accepted


async def test_a_draining_pod_takes_no_prompt(pod: Pod) -> None:
    pod.service.drain()
    refused = await pod.service._place(request_of("r", media=False))
    assert (refused.accepted, refused.code) == (False, DrainingError.code)
