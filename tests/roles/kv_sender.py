"""The sender of KV, with links that nobody uses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from typing import Any, cast

from mmd_workers.basics.clock import SYSTEM_CLOCK, Clock
from mmd_workers.kv.links import LinkManager, PairLink
from mmd_workers.model.prompt import KvLayout
from mmd_workers.observe.metrics import Metrics
from mmd_workers.prefill.kv_sender import KvSender
from mmd_workers.wire.bus import Bus, Subscription
from mmd_workers.wire.messages.decode import KvRelease
from mmd_workers.wire.messages.message_parts import Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest

LEASE_SECONDS = 5.0
Connect = Callable[[str], Awaitable[Bus]]


class HeldLink:
    """A link that is there and is asked for nothing."""

    @contextmanager
    def held(self) -> Any:
        yield


class NoLinks:
    """The manager of links that nobody asks for."""

    endpoint = "127.0.0.1:1"
    backend = "Gloo"
    chunk_timeout_seconds = 2.0

    def failed_epoch(self, pod: str, incarnation: str) -> int:
        return -1

    def connect(self, *_: object) -> PairLink:
        return cast(PairLink, HeldLink())


class NoCache:
    """An engine without a prefix cache."""

    kv_layout = KvLayout(num_layers=1, num_kv_heads=[1], head_dim=[16], dtype="float32")

    async def identities(self, sequence: str, request: GenerateRequest) -> list[bytes]:
        return []


def sender_of(bus: Bus, there: dict[str, str] | None = None, clock: Clock = SYSTEM_CLOCK) -> KvSender:
    decoders = {"decode-0": "i1"} if there is None else there
    engine, links = cast(Any, NoCache()), cast(LinkManager, NoLinks())
    parts = (bus, "prefill-0", "i1", engine, links, LEASE_SECONDS, lambda: decoders, Metrics())
    return KvSender(*parts, clock=clock)


def request(seconds: float, clock: Clock = SYSTEM_CLOCK) -> GenerateRequest:
    now = clock.unix()
    return GenerateRequest("r", 0, "gateway-0", [1] * 8, [], Sampling(4), ["decode-0"], now + seconds, now)


async def released(bus: Bus) -> tuple[asyncio.Queue[KvRelease], Subscription]:
    heard: asyncio.Queue[KvRelease] = asyncio.Queue()
    subscription = await bus.subscribe(bus.subjects.kv_release("decode-0"), KvRelease, heard.put)
    await bus.flush()
    return heard, subscription
