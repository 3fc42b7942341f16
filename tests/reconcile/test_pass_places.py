"""Reconcile passes run at the same time in a few places, which no namespace may keep from the others."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, cast

import pytest
from kubernetes.aio import client

from mmd_operator.kube.cluster import Cluster
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pass_places import PassPlaces
from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.passes.reconciler import Reconciler

PLACES = 16


class Passes:
    """Passes by namespace: those that run, those that have ended, and what lets them end."""

    def __init__(self) -> None:
        self.places = PassPlaces(PLACES)
        self.running: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.may_end: dict[str, asyncio.Event] = {}

    def begin(self, namespace: str, number: int = 1) -> list[asyncio.Task[None]]:
        self.may_end.setdefault(namespace, asyncio.Event())
        return [asyncio.create_task(self._run(namespace)) for _ in range(number)]

    async def _run(self, namespace: str) -> None:
        async with self.places.of(namespace):
            self.running[namespace] += 1
            assert self.running.total() <= PLACES
            try:
                await self.may_end[namespace].wait()
            finally:
                self.running[namespace] -= 1
            self.ended[namespace] += 1


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_namespaces_whose_passes_do_not_end_leave_places_to_others() -> None:
    passes = Passes()
    stuck = [task for name in ("slow", "slower", "slowest") for task in passes.begin(name, 16)]
    await settle()
    assert passes.running == {"slow": 8, "slower": 4, "slowest": 2}
    quick = passes.begin("quick")
    passes.may_end["quick"].set()
    async with asyncio.timeout(60):
        await asyncio.gather(*quick)
    async with asyncio.timeout(60):
        await asyncio.gather(*passes.begin("quick", 50))
    assert passes.ended == {"quick": 51}
    await end(stuck)


async def test_the_namespace_with_the_fewest_passes_is_next() -> None:
    passes = Passes()
    tasks = [*passes.begin("many", 20), *passes.begin("few", 6)]
    await settle()
    assert passes.running == {"many": 8, "few": 4}
    passes.may_end["many"].set()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks[:20])
    await settle()
    assert passes.running == {"many": 0, "few": 6}
    await end(tasks)


@pytest.mark.parametrize("seed", range(20))
async def test_whoever_waits_ends_in_the_end_whatever_is_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    passes = Passes()
    tasks: list[asyncio.Task[None]] = []
    for _ in range(100):
        tasks += passes.begin(rng.choice("abcdef"), rng.randrange(4))
        if tasks and rng.random() < 0.3:
            rng.choice(tasks).cancel()
        if rng.random() < 0.2:
            passes.may_end[name := rng.choice(sorted(passes.may_end))].set()
            await settle()
            passes.may_end[name].clear()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    for event in passes.may_end.values():
        event.set()
    async with asyncio.timeout(60):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert passes.ended.total() + sum(isinstance(r, asyncio.CancelledError) for r in results) == len(tasks)
    again = passes.begin("a", 1)
    async with asyncio.timeout(60):
        await asyncio.gather(*again)
    assert passes.places._free == PLACES
    assert not passes.places._held.total()


async def test_the_loops_of_deployments_take_the_places_of_their_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: Counter[str] = Counter()
    done = asyncio.Event()

    async def one_pass(reconciler: Reconciler, _: Any) -> float:
        if reconciler.namespace == "slow":
            await asyncio.Event().wait()
        passed[reconciler.namespace] += 1
        if passed["quick"] >= 30:
            done.set()
        return 3600.0

    monkeypatch.setattr(Reconciler, "_one_pass", one_pass)
    metrics, nothing = OperatorMetrics(), cast(Any, None)
    async with client.ApiClient(client.Configuration()) as api:
        cluster = Cluster(api, metrics)
        loops = []
        for namespace in ("slow", "quick"):
            for number in range(30):
                name = f"d{number}"
                body = {"metadata": {"namespace": namespace, "name": name, "uid": f"{namespace}-{name}"}}
                reconciler = Reconciler(
                    cluster, nothing, nothing, metrics, namespace, name, nothing, body, PRODUCTION
                )
                loops.append(asyncio.create_task(reconciler.run()))
        async with asyncio.timeout(60):
            await done.wait()
        assert passed == {"quick": 30}
        await end(loops)
