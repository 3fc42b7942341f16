"""A medium whose tokens are all in the prefix cache is not encoded, and one that turns out to be needed still is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from mmd_workers.engine.interface import SampledToken
from mmd_workers.prefill.prefill_service import PrefillService
from mmd_workers.sequences import token_publisher
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.message_parts import FeatureRef
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.harness.waiting import until

from .media_model import FIRST, SECOND, TOKENS, request_of
from .prefill_pod import Pod, answer

Connect = Callable[[str], Awaitable[Bus]]


@pytest.fixture
async def pod(connect: Connect) -> AsyncIterator[Pod]:
    pod = Pod(await connect("p-0"))
    pod.runner.start()
    yield pod
    assert await pod.runner.stop(10)


async def test_a_medium_whose_tokens_are_all_cached_is_not_encoded(pod: Pod) -> None:
    assert await pod.serve("first") == answer()
    assert pod.source.asked == ["feature-8", "feature-24"]
    pod.forget_features()
    assert await pod.serve("again") == answer()
    assert pod.source.asked == ["feature-8", "feature-24"], "nothing is encoded the second time"
    assert pod.failed == []


async def test_a_prompt_counts_as_waiting_until_figures_or_tokens_show_it(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[SampledToken] = []
    service, pod.done["r#0"] = pod.service, asyncio.Event()
    monkeypatch.setattr(service, "on_token", tokens.append)
    monkeypatch.setattr(pod.book, "forget", lambda _: None)  # however fast the engine answers
    assert (await service._place(request_of("r", media=False))).accepted
    assert service.waiting_tokens(time.time() + 60) == len(TOKENS)
    await until(lambda: "r#0" in service._added)
    added = service._added["r#0"]
    assert service.waiting_tokens(added) == len(TOKENS)
    assert service.waiting_tokens(added + 0.001) == 0
    await until(lambda: bool(tokens))
    PrefillService.on_token(service, tokens[0])
    assert service.waiting_tokens(0.0) == 0


@pytest.mark.parametrize(("expected", "counted"), [(16, 24), (-16, 40), (1 << 62, 0)])
async def test_a_prompt_briefly_counts_without_its_expected_cached_tokens(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, expected: int, counted: int
) -> None:
    pod.done["r#0"] = asyncio.Event()
    assert (await pod.service._place(replace(request_of("r"), cached_tokens=expected))).accepted
    assert pod.service.waiting_tokens(0.0) == counted
    monkeypatch.setattr(token_publisher, "EXPECTATION_SECONDS", 0.0)
    assert pod.service.waiting_tokens(0.0) == len(TOKENS), "it may have been evicted since"
    async with asyncio.timeout(25):
        await pod.done["r#0"].wait()


async def test_a_prompt_with_its_media_present_waits_for_one_step_only(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, turns = pod.runner.call, list[list[int]]()

    async def counted(command: Any) -> Any:
        turns.append(list(pod.tokens.get("r#0", [])))
        return await call(command)

    monkeypatch.setattr(pod.runner, "call", counted)
    monkeypatch.setattr(pod.service, "_overlap_tokens", len(TOKENS))  # no text goes before its media
    assert await pod.serve("r") == answer()
    assert [before for before in turns if not before] == [[]], "its media come with it"
    assert pod.source.asked == ["feature-8", "feature-24"]


async def test_a_medium_that_is_cached_in_part_is_encoded(pod: Pod) -> None:
    assert await pod.serve("first") == answer()
    pod.forget_features()

    def forget_from(engine: Any) -> None:
        identities, cached = engine.prefix(TOKENS, [(*FIRST, "feature-8"), (*SECOND, "feature-24")])
        assert cached == 32
        del engine.blocks._block_of[identities[3]]

    await pod.runner.call(forget_from)
    assert await pod.serve("again") == answer()
    assert pod.source.asked == ["feature-8", "feature-24", "feature-24"]


async def test_media_whose_blocks_are_evicted_before_their_admission_are_encoded_after_all(pod: Pod) -> None:
    assert await pod.serve("first") == answer()
    pod.forget_features()
    engine = pod.runner._engine
    blocks, add = engine.blocks, engine.add

    def evicted_first(item: Any) -> None:  # in the very turn in which the engine gets the sequence
        blocks.release(blocks.allocate(blocks.num_blocks))
        add(item)

    engine.add = evicted_first  # type: ignore[method-assign]
    assert await pod.serve("again") == answer()
    assert sorted(pod.source.asked) == sorted(2 * ["feature-8", "feature-24"])
    await until(lambda: not any(entry.users for entry in pod.store._entries.values()))
    assert pod.store.used_bytes == sum(e.num_bytes for e in pod.store._entries.values())


async def test_a_preempted_sequence_gets_the_media_skipped_at_first_admission(pod: Pod) -> None:
    assert await pod.serve("first") == answer()
    pod.forget_features()
    preempted = asyncio.Event()

    def preempt(engine: Any) -> None:
        running = [s for s in engine.scheduler.running if s.num_outputs > 2]
        if running and not preempted.is_set():
            engine.scheduler._preempt(running[0])
            engine.blocks.release(engine.blocks.allocate(engine.blocks.available))
            loop.call_soon_threadsafe(preempted.set)

    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(pod.serve("again", 60))
    async with asyncio.timeout(25):
        while not preempted.is_set():
            await pod.runner.call(preempt)
    assert await serving == answer(60)
    assert sorted(pod.source.asked) == sorted(2 * ["feature-8", "feature-24"])
    assert pod.metrics.late_features._value.get() == 2


async def test_late_media_needed_one_after_another_all_come(pod: Pod) -> None:
    """The first that has come gives its room back, and not that of the second."""
    asked: list[FeatureRef] = []
    pod.source.request = lambda ref, _: asked.append(ref)  # type: ignore[method-assign]
    tracked = pod.book.open(request_of("r"))
    for number in range(2):
        tracked.absent = {number}
        pod.service.on_admitted("r#0", 0)
        await until(lambda number=number: len(asked) > number)
    tasks = set(pod.service._late)
    for ref in asked:
        ((start, length),) = ref.ranges
        pod.store.deliver(ref.feature_id, pod.model.feature(start, length))
        done, tasks = await asyncio.wait(tasks, timeout=25, return_when=asyncio.FIRST_COMPLETED)
        assert [(task.cancelled(), task.exception()) for task in done] == [(False, None)]
    assert all(not entry.users for entry in pod.store._entries.values())
    pod.book.forget("r#0")


async def test_a_shared_medium_is_encoded_although_its_first_request_leaves(pod: Pod) -> None:
    await pod.store.admit("full", {"room": pod.store.budget_bytes}, lambda _: None)
    first, second = request_of("first"), request_of("second")
    for request in (first, replace(second, features=second.features[:1])):
        pod.done[f"{request.request_id}#0"] = asyncio.Event()
        assert (await pod.service._place(request)).accepted
    await until(lambda: len(pod.store._waiting) == 2)
    pod.store.release("full")
    pod.service.cancel("first#0")  # it was admitted, but its task has not resumed
    async with asyncio.timeout(25):
        await pod.done["second#0"].wait()
    assert "feature-8" in pod.source.asked


class Handover:
    """Sends to a decoder, once `taken` is set."""

    def __init__(self) -> None:
        self.taken = asyncio.Event()

    async def reserve(self, request: GenerateRequest) -> object:
        return object()

    async def hand_over(self, *_: object) -> None:
        await self.taken.wait()


async def test_a_handover_that_takes_long_holds_no_room_for_features(connect: Connect) -> None:
    handover = Handover()
    pod = Pod(await connect("p-0"), sender=handover)
    pod.runner.start()
    assert (await pod.service._place(replace(request_of("r"), decode_pods=["d-0"]))).accepted
    await until(lambda: pod.tokens.get("r#0"))
    await until(lambda: not any(entry.users for entry in pod.store._entries.values()))
    assert pod.service.active == 1, "it has not been handed over"
    handover.taken.set()
    await until(lambda: not pod.service.active)
    assert await pod.runner.stop(10)
