"""The operator's `/healthz` answers 503 for what only a restart of the process can fix, and names it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from kopf._cogs.clients import watching

from mmd_cli.local.pods import free_port
from mmd_operator.handlers import Loops
from mmd_operator.health import health_endpoint
from mmd_operator.kube.cluster import DEPLOYMENTS, PODS
from mmd_operator.kube.leadership import Leadership
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.passes.reconciler import Reconciler
from mmd_operator.serve import LEASE_STALE_SECONDS, trouble

HELPERS = ("sweep", "events", "namespaces")


class Helper:
    """A loop that runs until the test ends it, with an error or without."""

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        await self.end


class Operator:
    """Loops of an operator that leads and has no deployment."""

    def __init__(self) -> None:
        self.helpers = {name: Helper() for name in HELPERS}
        self.lease = SimpleNamespace(quiet_seconds=0.0)
        self.loops = Loops(cast(Any, None), (), OperatorMetrics(), PRODUCTION)
        loops = cast(Any, self.loops)
        loops._sweep, loops._events = self.helpers["sweep"], self.helpers["events"]
        loops._events.flush = self.flushed
        loops._watch_namespaces = self.helpers["namespaces"].run
        self.loops.start()

    async def flushed(self) -> None:
        pass


@asynccontextmanager
async def probed(operator: Operator) -> AsyncIterator[Any]:
    """A function that reads `/healthz`."""
    port = free_port()
    lease = cast(Leadership, operator.lease)
    health = health_endpoint(port, lambda: trouble(lease, operator.loops), OperatorMetrics())
    async with health, aiohttp.ClientSession() as session:

        async def healthz() -> tuple[int, str]:
            async with session.get(f"http://127.0.0.1:{port}/healthz") as answer:
                return answer.status, await answer.text()

        yield healthz
    await operator.loops.stop()


@pytest.mark.parametrize("name", HELPERS)
@pytest.mark.parametrize("error", [None, RuntimeError("broken")], ids=["returned", "raised"])
async def test_a_helper_loop_that_has_ended_is_reported(name: str, error: Exception | None) -> None:
    operator = Operator()
    async with probed(operator) as healthz:
        assert await healthz() == (200, "ok\n")
        end = operator.helpers[name].end
        end.set_exception(error) if error else end.set_result(None)
        await asyncio.wait([t for t in asyncio.all_tasks() if t.get_name() == name])
        assert await healthz() == (503, f"ended unexpectedly: {name}\n")


async def test_a_lease_that_is_not_checked_any_more_is_reported() -> None:
    operator = Operator()
    async with probed(operator) as healthz:
        operator.lease.quiet_seconds = LEASE_STALE_SECONDS
        assert await healthz() == (200, "ok\n")
        operator.lease.quiet_seconds = LEASE_STALE_SECONDS + 1
        assert await healthz() == (503, "the lease has not been checked for 61 s\n")


async def test_a_deployments_loop_survives_the_late_deletion_of_its_predecessor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No watch keeps the order between the DELETED of one object and the ADDED of the next with its name."""

    async def run(_: Reconciler) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Reconciler, "run", run)
    loops = Operator().loops

    def show(uid: str, *, gone: bool) -> None:
        body = {"metadata": {"namespace": "default", "name": "demo", "uid": uid, "resourceVersion": "1"}}
        loops.show(body, gone, cast(Any, {}), cast(Any, {}))

    show("second", gone=False)
    show("first", gone=True)
    assert list(loops._running) == [("default", "demo")]
    show("second", gone=True)
    assert not loops._running
    await loops.stop()


async def test_a_deployment_that_waits_for_the_first_lists_counts_as_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {"metadata": {"namespace": "team", "name": "demo", "uid": "u", "resourceVersion": "1"}}

    async def stream(**_: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "1"}}}
        yield {"type": None, "object": body}

    monkeypatch.setattr(watching, "infinite_watch", stream)
    loops = Operator().loops
    with loops.watches.in_force():
        async for _ in watching.infinite_watch(resource=PODS, namespace="team"):
            assert loops.oldest_pass_seconds == 0
        waited = [
            loops.oldest_pass_seconds
            async for _ in watching.infinite_watch(resource=DEPLOYMENTS, namespace="team")
        ]
        assert waited[0] == 0 < waited[1]
    loops.show(body, gone=True, children=cast(Any, {}), pods=cast(Any, {}))
    assert loops.oldest_pass_seconds == 0
    await loops.stop()
