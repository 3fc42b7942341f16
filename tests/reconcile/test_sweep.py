"""The sweep goes on for all kinds while one cannot be listed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from mmd_operator.kube.cluster import BusyError, Listing, Resource
from mmd_operator.kube.pauses import Pauses
from mmd_operator.kube.sweep import Sweep

FORBIDDEN, HEALTHY = Resource("", "v1", "configmaps"), Resource("", "v1", "services")


class Cluster:
    """Lists one kind and not the other."""

    def __init__(self) -> None:
        self.lists: Counter[str] = Counter()
        self.enough = asyncio.Event()

    async def uids(self, resource: Resource, *_: object) -> Listing:
        self.lists[resource.plural] += 1
        if self.lists["services"] >= 3:
            self.enough.set()
        if resource == FORBIDDEN:
            raise BusyError("no")
        return Listing({"u"}, "7")


async def test_a_kind_that_cannot_be_listed_does_not_stop_other_sweeps() -> None:
    cluster = Cluster()
    kinds = {kind: (None, lambda: [("u", "5")]) for kind in (FORBIDDEN, HEALTHY)}
    pauses = Pauses(sweep_seconds=0.2, sweep_retry_seconds=0.01)
    sweep = Sweep(cluster, lambda: None, kinds, lambda _: None, pauses)  # type: ignore[arg-type]
    running = asyncio.create_task(sweep.run())
    try:
        async with asyncio.timeout(30):
            await cluster.enough.wait()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    assert cluster.lists["configmaps"] > cluster.lists["services"]
