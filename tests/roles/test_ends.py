"""Sequences that end for a reason from outside, however many, have all left the engine before its next step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mmd_api.contract.errors import PeerLostError
from mmd_workers.decode import decode_service
from mmd_workers.decode.decode_service import DecodeService
from mmd_workers.decode.local_prompts import PromptService
from mmd_workers.features.store import FeatureStore
from mmd_workers.kv.quantize import KvWire
from mmd_workers.model.grammar import Grammars
from mmd_workers.prefill.prefill_service import PrefillService
from mmd_workers.sequences import sequence_events, token_publisher
from mmd_workers.sequences.native import NativeEngine
from mmd_workers.sequences.sequence_events import SequenceOwner
from mmd_workers.wire.messages.decode import KvOffer, KvRelease
from support.harness.waiting import until
from support.oracles.engine_oracle import TextModel, llama, make_engine
from support.serving.held_pod import MANY, NAMES, PROMPT, REASONS, HeldPod, cancel, held_pod, request

LEASE_SECONDS = 60.0


@pytest.fixture
async def held(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HeldPod]:
    monkeypatch.setattr(sequence_events, "DEADLINE_CHECK_SECONDS", 0.02)
    monkeypatch.setattr(token_publisher, "REPORT_SECONDS", 0.02)
    model = TextModel(llama())
    engine = make_engine(model, blocks=4 * MANY, max_sequences=2 * MANY)
    async with held_pod(
        engine, lambda runner: NativeEngine(runner, model, Grammars(lambda: None, 0, ()))
    ) as pod:
        yield pod


# --- sequences ----------------------------------------------------------------------------------------------------


class Decoder:
    """Has a lease for every sequence, and takes none over."""

    async def reserve(self, *_: object) -> object:
        return object()

    async def hand_over(self, *_: object) -> None:
        await asyncio.Event().wait()


def prompts(held: HeldPod) -> SequenceOwner:
    return PromptService(held.bus, "pod-0", held.engine, held.book, lambda: 0, MANY, held.pod.metrics)


def prefill(held: HeldPod, sender: Any = None) -> SequenceOwner:
    source: Any = None  # no request here has media
    parts = (
        held.bus,
        "pod-0",
        held.engine,
        FeatureStore(1 << 20, lambda *_: None),
        source,
        held.book,
        sender,
    )
    return PrefillService(
        *parts, max_waiting=MANY, max_in_engine=MANY, overlap_tokens=4, metrics=held.pod.metrics
    )


ROLES = {
    "monolithic": (prefill, []),
    "prefill": (lambda held: prefill(held, Decoder()), ["decode-0"]),
    "decode": (prompts, []),
}


@pytest.mark.parametrize("role", ROLES)
async def test_a_thousand_cancellations_end_with_one_step(held: HeldPod, role: str) -> None:
    make, decode_pods = ROLES[role]
    service: Any = make(held)
    held.sequences.add(service)
    for name in NAMES:
        assert (await service._place(request(name, decode_pods=decode_pods))).accepted
    await held.hold()
    await cancel(held)
    assert await held.loads_of_two_steps() == [MANY + 1, 1]
    assert held.book.all() == ["other#0"]


@pytest.mark.parametrize("end", REASONS)
async def test_a_thousand_sequences_end_with_one_step_whatever_the_reason(
    held: HeldPod, end: Callable[[HeldPod], Awaitable[None]]
) -> None:
    await held.add(*NAMES)
    await held.hold()
    await end(held)
    assert await held.loads_of_two_steps() == [MANY + 1, 1]
    assert held.book.all() == ["other#0"]


async def test_sequences_given_back_end_before_the_first_is_reported(held: HeldPod) -> None:
    await held.add(*NAMES)
    open_when_sent: list[int] = []

    async def send(*_: object) -> None:
        open_when_sent.append(len(held.book))

    held.book._send = send  # type: ignore[method-assign]
    await held.sequences.give_back(PeerLostError("the pod ends"))
    assert open_when_sent == [0] * MANY


# --- handovers ----------------------------------------------------------------------------------------------------


class Links:
    """One link, on which nothing comes."""

    endpoint = "127.0.0.1:1"
    backend = "Gloo"

    def __init__(self) -> None:
        self.link = SimpleNamespace(dead="", held=nullcontext)

    def epoch_for(self, pod: str, incarnation: str, failed_epoch: int) -> int:
        return failed_epoch + 1

    def connect(self, *_: object) -> Any:
        return self.link

    def drop(self, pod: str) -> None:
        """Nothing is kept."""


class Handovers:
    """MANY handovers of prefill-0, granted and not committed, on a pod that is held."""

    def __init__(self, held: HeldPod) -> None:
        self.held, self.links = held, Links()
        parts: tuple[Any, ...] = (held.bus, "pod-0", held.engine, self.links, held.book, held.pod.metrics)
        self.service = DecodeService(*parts, clock=held.clock)
        held.sequences.add(self.service)

    async def grant(self) -> None:
        grants = await asyncio.gather(*(self.service._offered(self.offer(name)) for name in NAMES))
        assert all(grant.granted for grant in grants)
        self.leases = [grant.lease_id for grant in grants]
        await self.held.hold()

    def offer(self, name: str, failed_epoch: int = -1) -> KvOffer:
        terms = KvWire(self.held.engine.kv_layout).terms
        place = ("prefill-0", "i1", len(PROMPT), 4, terms, "Gloo", "127.0.0.1:2", LEASE_SECONDS)
        return KvOffer(name, 0, *place, arrived=0.0, failed_epoch=failed_epoch)


async def lose_the_pod(handovers: Handovers) -> None:
    handovers.service.peer_lost("prefill-0", "i1")


async def lose_the_link(handovers: Handovers) -> None:
    await until(lambda: handovers.service._pumps["prefill-0"].made is not None)
    handovers.links.link.dead = "reset by peer"
    await handovers.held.clock.let_pass(decode_service.LEASE_CHECK_SECONDS)


async def replace_the_link(handovers: Handovers) -> None:
    handovers.service._ensure_pump(handovers.offer("new", failed_epoch=0), 1)


async def outlive_the_leases(handovers: Handovers) -> None:
    await handovers.held.clock.let_pass(LEASE_SECONDS + decode_service.LEASE_CHECK_SECONDS)


async def release(handovers: Handovers) -> None:
    for name, lease_id in zip(NAMES, handovers.leases, strict=True):
        releasing: Any = handovers.service._released(KvRelease(name, 0, lease_id))
        handovers.held.pod.tasks.in_background(releasing, f"release-{name}")


async def cancel_each(handovers: Handovers) -> None:
    await cancel(handovers.held)


@pytest.mark.parametrize(
    "end", [lose_the_pod, lose_the_link, replace_the_link, outlive_the_leases, release, cancel_each]
)
async def test_a_thousand_handovers_end_with_one_step(
    held: HeldPod, end: Callable[[Handovers], Awaitable[None]]
) -> None:
    handovers = Handovers(held)
    running = asyncio.create_task(handovers.service.run())
    await handovers.grant()
    await end(handovers)
    assert await held.loads_of_two_steps() == [MANY + 1, 1]
    assert handovers.service.inbound == 0
    running.cancel()
