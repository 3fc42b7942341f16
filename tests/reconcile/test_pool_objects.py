"""MultimodalPools on an API server that a test controls: they follow pools that the operator sizes, and lead those that others size."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mmd_api.pool_resource import POOL_KIND
from mmd_operator.kube.cluster import NotServedError
from mmd_operator.observed.observed import Workload
from mmd_operator.passes.pool_objects import pool_status

from .lagging_cluster import AUTOSCALING, Race

EXTERNAL = {**AUTOSCALING, "mode": "External"}


class Reported:
    """Events of a race."""

    def __init__(self, race: Race) -> None:
        self.found: list[tuple[str, str]] = []
        report = SimpleNamespace(report=lambda _, reason, words, **__: self.found.append((reason, words)))
        object.__setattr__(race._context, "events", report)
        race.restart()


def run(scenario: Callable[[Race], Awaitable[None]], mode: str = "External", budget: int = 8) -> None:
    async def whole() -> None:
        race = Race(budget)
        race.change(encoder={"gpus": 1, "autoscaling": {**AUTOSCALING, "mode": mode}})
        try:
            await race.settle(4)
            await scenario(race)
        finally:
            await race.end()

    asyncio.run(whole())


def pool_object(race: Race, pool: str) -> dict[str, Any]:
    return race.cluster.stored[POOL_KIND, f"demo-{pool}"]


def ask(race: Race, pool: str, replicas: int, manager: str = "kubectl") -> None:
    """As `kubectl scale` does."""
    body = pool_object(race, pool)
    body["spec"]["replicas"] = replicas
    body["metadata"]["managedFields"] = [
        {"manager": manager, "fieldsV1": {"f:spec": {"f:replicas": {}}}, "subresource": "scale"}
    ]
    race.cluster._store((POOL_KIND, f"demo-{pool}"), body)


def test_every_pool_has_an_object_with_its_size_and_selector():
    async def scenario(race: Race) -> None:
        for pool in ("encoder", "prefill", "decode"):
            found = pool_object(race, pool)
            assert found["spec"] == {"replicas": 1}
            assert (found["status"]["replicas"], found["status"]["readyReplicas"]) == (1, 1)
            assert found["status"]["selector"].endswith(f"app.kubernetes.io/component={pool}")
            assert found["metadata"]["ownerReferences"][0]["controller"]

    run(scenario)


def test_an_externally_sized_pool_follows_its_object_up_to_the_gpu_budget():
    async def scenario(race: Race) -> None:
        ask(race, "encoder", 3)
        await race.settle(3)
        assert race.cluster.size("encoder") == 3
        ask(race, "encoder", 4)
        await race.settle(3)
        assert race.cluster.size("encoder") == 3  # with one prefill and one decode pod: five GPUs
        assert pool_object(race, "encoder")["spec"]["replicas"] == 4
        assert pool_object(race, "encoder")["status"]["replicas"] == 3

    run(scenario, budget=5)


@pytest.mark.parametrize("pool", ["encoder", "decode"])
def test_a_size_set_on_a_pool_without_external_mode_is_reverted(pool: str):
    async def scenario(race: Race) -> None:
        events = Reported(race)
        await race.settle(2)
        ask(race, pool, 3)
        await race.settle(3)
        assert race.cluster.size(pool) == 1
        assert pool_object(race, pool)["spec"]["replicas"] == 1
        ((_, words),) = [e for e in events.found if e[0] == "SizeReverted"]
        assert f'3, which field manager "kubectl" set; set spec.{pool}.autoscaling.mode to External' in words

    run(scenario, mode="Active")


def test_a_deleted_object_comes_back_with_the_present_size():
    async def scenario(race: Race) -> None:
        ask(race, "encoder", 3)
        await race.settle(3)
        del race.cluster.stored[POOL_KIND, "demo-encoder"]
        await race.settle(3)
        assert race.cluster.size("encoder") == 3
        assert pool_object(race, "encoder")["spec"] == {"replicas": 3}

    run(scenario)


def test_the_object_follows_a_pool_that_its_load_sizes():
    async def scenario(race: Race) -> None:
        race.reports.queued = 1000.0
        await race.settle(4)
        assert race.cluster.size("encoder") > 1
        assert pool_object(race, "encoder")["spec"]["replicas"] == race.cluster.size("encoder")

    run(scenario, mode="Active")


def test_the_object_goes_with_its_pool():
    async def scenario(race: Race) -> None:
        del race.body["spec"]["prefill"]
        race.change()
        await race.settle(8)
        assert (POOL_KIND, "demo-prefill") not in race.cluster.stored
        assert (POOL_KIND, "demo-decode") in race.cluster.stored

    run(scenario)


def test_without_the_definition_only_an_externally_sized_pool_has_a_problem():
    async def scenario(race: Race) -> None:
        for name in ("demo-encoder", "demo-decode", "demo-prefill"):
            del race.cluster.stored[POOL_KIND, name]
        race.cluster.show()

        async def not_served(*_: Any) -> None:
            raise NotServedError("404 page not found")

        race.cluster.get = not_served  # type: ignore[method-assign, assignment]
        race.restart()
        view = race._pass.scaled(race.body)
        assert view is not None
        problems = await race._pass._pool_objects.publish(race.body, view.spec, view.observed, view.revision)
        assert [(p.reason, p.component) for p in problems] == [("PoolDefinitionMissing", "encoder")]

    run(scenario)


def test_the_selector_of_groups_selects_their_leaders():
    workload = Workload(2, 2, 1, 2, True, "r", True, None, group_size=4)
    status = pool_status("demo", "decode", workload)
    assert (status["replicas"], status["readyReplicas"]) == (2, 1)
    assert status["selector"].endswith(",leaderworkerset.sigs.k8s.io/worker-index=0")
