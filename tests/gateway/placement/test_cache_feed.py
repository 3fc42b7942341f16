"""How a gateway comes to know the caches of pods, and a prefill pod those of encoders, over a real message server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from mmd_api.contract.load import PodLoad
from mmd_api.contract.pools import Role
from mmd_workers.caches import feed, reports
from mmd_workers.caches.feed import CacheFeed
from mmd_workers.caches.index import CacheIndex
from mmd_workers.caches.kinds import FEATURES, PREFIXES, CacheKind
from mmd_workers.caches.reports import CacheReports
from mmd_workers.engine.memory.cache_changes import CacheChanges
from mmd_workers.features.held import feature_identity
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.every_pod import CacheReport, Heartbeat
from mmd_workers.wire.peers import Heartbeater, PeerDirectory
from support.harness.waiting import DEADLINE_SECONDS, until
from support.serving.cached import held_by

Connect = Callable[[str], Awaitable[Bus]]
POD = "prefill-0"


@dataclass
class Pod:
    """A pod of which only the prefix cache is there: it samples and beats as a worker does, faster."""

    bus: Bus
    incarnation: str
    roles: list[Role] = field(default_factory=lambda: ["prefill"])
    kind: CacheKind = PREFIXES
    changes: CacheChanges = field(default_factory=CacheChanges)
    tasks: list[Any] = field(default_factory=list)
    name: str = POD

    async def start(self) -> Pod:
        settings = SimpleNamespace(incarnation=self.incarnation)
        pod: Any = SimpleNamespace(name=self.name, bus=self.bus, settings=settings)
        self.reports = CacheReports(pod, self.kind, block_tokens=16)
        await self.reports.start()
        self.heartbeater = Heartbeater(self.bus, self.beat, 0.05)
        await self.heartbeater.start()
        self.tasks.append(asyncio.create_task(self.sample()))
        return self

    async def sample(self) -> None:
        while True:
            if self.reports.take_wanted():
                self.changes.restart()
            await self.reports.publish(self.changes.take(8))
            await asyncio.sleep(0.02)

    def beat(self) -> Heartbeat:
        return Heartbeat(
            pod=self.name,
            pool="prefill",
            roles=self.roles,
            incarnation=self.incarnation,
            revision="r",
            state="ready",
            http_endpoint="",
            sent=asyncio.get_running_loop().time(),
            load=PodLoad(),
            prefix_number=self.reports.number if self.kind is PREFIXES else 0,
            feature_number=self.reports.number if self.kind is FEATURES else 0,
        )

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await self.heartbeater.close(announce=False)


@dataclass
class Gateway:
    """The parts of a gateway that follow prefix caches."""

    index: CacheIndex
    feed: CacheFeed
    directory: PeerDirectory
    metrics: Metrics

    def held(self) -> set[bytes]:
        return held_by(self.index, POD, [*identities(*range(20)), b"a", b"b", b"new"])

    async def until(self, held: set[bytes]) -> None:
        await until(lambda: self.held() == held)

    def asked(self) -> float:
        return value(self.metrics.prefix_snapshots)


def value(metric: Any) -> float:
    return float(next(iter(metric.collect())).samples[0].value)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(feed, "ASK_AGAIN_SECONDS", DEADLINE_SECONDS)
    monkeypatch.setattr(reports, "MOST_NAMED", 3)


@pytest.fixture
async def begin(connect: Connect) -> AsyncIterator[Callable[[str], Awaitable[Gateway]]]:
    begun: list[Gateway] = []

    async def make(
        name: str,
        most_in_all: int = 1000,
        kind: CacheKind = PREFIXES,
        *,
        encoders_only: bool = False,
        lost_after_seconds: float = 20.0,
    ) -> Gateway:
        bus, index, metrics = await connect(name), CacheIndex(most_in_all=most_in_all), Metrics()
        directory = PeerDirectory(bus, lost_after_seconds)
        await directory.start()
        follower = CacheFeed(bus, directory, index, name, metrics, kind, encoders_only=encoders_only)
        gateway = Gateway(index, follower, directory, metrics)
        await gateway.feed.start()
        begun.append(gateway)
        return gateway

    yield make
    for gateway in begun:
        await gateway.feed.close()
        await gateway.directory.close()


@pytest.fixture
async def pod(connect: Connect) -> AsyncIterator[Pod]:
    pod = await Pod(await connect(POD), "one").start()
    yield pod
    await pod.end()


def identities(*numbers: int) -> set[bytes]:
    return {bytes([number]) for number in numbers}


async def test_a_gateway_follows_what_a_pod_caches_and_evicts(begin: Any, pod: Pod) -> None:
    gateway = await begin("gateway-0")
    for identity in sorted(identities(*range(20))):
        pod.changes.add(identity)
    await gateway.until(identities(*range(20)))
    for identity in identities(*range(15)):
        pod.changes.remove(identity)
    await gateway.until(identities(*range(15, 20)))


async def test_a_gateway_that_starts_late_catches_up_without_disturbing_another(begin: Any, pod: Pod) -> None:
    early = await begin("gateway-0")
    for identity in sorted(identities(*range(20))):
        pod.changes.add(identity)
    await early.until(identities(*range(20)))
    asked = early.asked()
    late = await begin("gateway-1")
    await late.until(identities(*range(20)))
    assert late.asked() == 1
    assert early.held() == identities(*range(20))
    pod.changes.add(b"new")
    for gateway in (early, late):
        await gateway.until({*identities(*range(20)), b"new"})
    assert early.asked() == asked


async def test_a_report_that_was_lost_is_missed_though_none_follows_it(
    begin: Any, pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "ASK_AGAIN_SECONDS", 0.3)  # the answer may be lost too
    gateway = await begin("gateway-0")
    pod.changes.add(b"a")
    await gateway.until({b"a"})
    with monkeypatch.context() as losing:

        async def lose(*_: object) -> None:
            pass

        losing.setattr(pod.bus, "publish", lose)
        pod.changes.add(b"b")
        await until(lambda: pod.reports.number != 1)
    await gateway.until({b"a", b"b"})
    assert gateway.asked() >= 1


async def test_a_pod_that_comes_back_has_nothing_of_before(begin: Any, pod: Pod, connect: Connect) -> None:
    gateway = await begin("gateway-0")
    pod.changes.add(b"a")
    await gateway.until({b"a"})
    await pod.end()
    again = await Pod(await connect(f"{POD}-again"), "two").start()
    again.changes.add(b"b")
    await gateway.until({b"b"})
    await again.end()


async def test_a_pod_that_is_lost_is_forgotten(begin: Any, pod: Pod) -> None:
    gateway = await begin("gateway-0", lost_after_seconds=0.6)
    pod.changes.add(b"a")
    await gateway.until({b"a"})
    await pod.end()
    await gateway.until(set())
    await until(lambda: not gateway.index.num_blocks)


async def test_a_pod_with_omitted_blocks_is_asked_once_there_is_room(begin: Any, pod: Pod) -> None:
    gateway = await begin("gateway-0", most_in_all=12)
    everything = identities(*range(20))
    for identity in sorted(everything):
        pod.changes.add(identity)
    await gateway.until(identities(*range(12)))
    await until(lambda: value(gateway.metrics.prefix_index_cut) == 1)
    assert value(gateway.metrics.prefix_index_limit) == 12
    asked = gateway.asked()
    for identity in identities(*range(10)):
        pod.changes.remove(identity)
    await gateway.until(identities(*range(10, 20)))
    assert gateway.asked() == asked + 1
    await until(lambda: not value(gateway.metrics.prefix_index_cut))


async def test_a_report_of_a_pod_that_nobody_knows_does_not_stay(begin: Any, connect: Connect) -> None:
    gateway, bus = await begin("gateway-0"), await connect("stranger")
    await bus.publish(bus.subjects.prefix_report("stranger"), CacheReport("stranger", "i", 1, 16, [b"a"], []))
    await until(lambda: gateway.index.version >= 2)  # it came, and went
    assert gateway.index.pods == []


async def test_a_prefill_pod_follows_the_features_of_encoder_pods_alone(
    connect: Connect, begin, pod: Pod
) -> None:
    made = {"encoder-0": ["encode"], "prefill-0": ["prefill"]}
    holders = [Pod(await connect(f"{name}-too"), "one", roles, FEATURES) for name, roles in made.items()]
    for number, (holder, name) in enumerate(zip(holders, made, strict=True)):
        holder.name = name
        holder.changes.add(feature_identity(f"f{number}"))
        await holder.start()
    pod.changes.add(feature_identity("f2"))
    gateway = await begin("gateway-0", kind=FEATURES)
    prefill = await begin("prefill-1", kind=FEATURES, encoders_only=True)

    def known(one: Gateway) -> list[bool]:
        return [one.index.holders(feature_identity(f"f{number}")) != 0 for number in range(3)]

    await until(lambda: known(gateway) == [True, True, False] and known(prefill) == [True, False, False])
    found = prefill.index.holders(feature_identity("f0"))
    assert found == 1 << prefill.index.slot("encoder-0")
    assert prefill.index.pods == ["encoder-0"]
    holders[0].changes.remove(feature_identity("f0"))
    await until(lambda: not known(prefill)[0] and not known(gateway)[0])
    for holder in holders:
        await holder.end()


async def test_who_starts_late_knows_at_once_what_was_reported_before(
    connect: Connect, begin, monkeypatch: pytest.MonkeyPatch, pod: Pod
) -> None:
    monkeypatch.setattr(feed, "CHECK_SECONDS", 3600)
    pod.changes.add(b"a")
    await until(lambda: pod.reports.number)
    bus, index = await connect("late"), CacheIndex()
    directory = PeerDirectory(bus, 20.0)
    await directory.start()
    await until(lambda: directory.pods(state=None) and directory.pods(state=None)[0].prefix_number)
    follower = CacheFeed(bus, directory, index, "late", Metrics(), PREFIXES)
    await follower.start()
    await until(lambda: index.holders(b"a"))
    await follower.close()
    await directory.close()
