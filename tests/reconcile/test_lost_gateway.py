"""Other clients delete the gateway or set it back: what serves is remembered elsewhere, also by the next operator process."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator

import pytest

from mmd_api.pipeline import pipeline_revision
from mmd_operator.observed.stored_spec import read
from support.cluster.deployments import ANOTHER_MODEL

from .lagging_cluster import Race

GATEWAY = ("Deployment", "demo-gateway")


@pytest.fixture
async def race() -> AsyncIterator[Race]:
    """A deployment that serves its first revision, while pods of the next one do not become Ready."""
    made = Race(budget=12)
    await made.settle()
    made.change(**ANOTHER_MODEL)
    made.cluster.broken.add(new(made))
    await made.settle()
    yield made
    await made.end()


def new(race: Race) -> str:
    deployment = read(race.body).deployment
    assert deployment is not None
    return pipeline_revision(deployment.spec)


def pools(race: Race) -> set[str]:
    return {name.rpartition("-")[2] for kind, name in race.cluster.stored if kind == "StatefulSet"}


@pytest.mark.parametrize("another_process", [False, True])
async def test_a_gateway_deleted_during_a_rollout_comes_back_as_it_was(race: Race, another_process: bool):
    before = copy.deepcopy(race.cluster.stored.pop(GATEWAY))
    old = race.cluster.status["pipelineRevision"]
    assert old != new(race)
    if another_process:
        race.restart()
    await race.settle()
    assert race.gateway_revision == old
    assert race.cluster.stored[GATEWAY]["spec"] == before["spec"]
    assert pools(race) == {old, new(race)}
    race.cluster.recover(new(race))
    await race.settle()
    assert race.gateway_revision == new(race)
    assert pools(race) == {new(race)}


async def test_a_gateway_without_a_recorded_spec_is_a_problem_until_the_new_pools_serve(race: Race):
    old = race.cluster.status["pipelineRevision"]
    del race.cluster.stored[GATEWAY]
    race.cluster.specs.clear()
    race.restart()
    await race.settle()
    assert race.gateway_revision is None
    assert pools(race) == {old, new(race)}
    assert race.cluster.status["pipelineRevision"] == old
    (degraded,) = [c for c in race.cluster.status["conditions"] if c["type"] == "Degraded"]
    assert degraded["reason"] == "GatewayLost"
    assert "no recorded spec makes that revision" in degraded["message"]
    race.cluster.recover(new(race))
    await race.settle()
    assert race.gateway_revision == new(race)
    assert pools(race) == {new(race)}


@pytest.mark.parametrize("to", ["gone", "not ready"])
async def test_a_gateway_that_another_client_switched_is_switched_back(race: Race, to: str):
    old = race.cluster.status["pipelineRevision"]
    race.serve("aaaaaaaaaa" if to == "gone" else new(race))
    await race.settle()
    assert race.gateway_revision == old
    assert pools(race) == {old, new(race)}


async def test_a_gateway_without_a_plan_leaves_what_served_in_the_status(race: Race):
    old = race.cluster.status["pipelineRevision"]
    race.change(decode={"gpus": -1, "replicas": 1})
    del race.cluster.stored[GATEWAY]
    await race.settle()
    assert race.cluster.status["pipelineRevision"] == old
