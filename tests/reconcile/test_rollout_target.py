"""Which spec is in effect while a rollout is paused or has failed: passes over recorded specs, some of which cannot be read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from mmd_api.history import spec_digest
from mmd_api.pipeline import pipeline_revision
from mmd_api.resource import API_VERSION, KIND
from mmd_operator.kube.cluster import BusyError
from mmd_operator.kube.context import PassContext
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.observed.observed import Observed, child_of
from mmd_operator.observed.problems import Problem
from mmd_operator.observed.stored_spec import Reading, read
from mmd_operator.rollout.next_step import Stage, Step
from mmd_operator.rollout.rollout_target import RolloutTarget
from support.cluster.deployments import ANOTHER_MODEL, SPEC, deployment
from support.cluster.manifests import merge

from .bodies import UID, pod, workload

BEGIN = datetime(2027, 1, 1, tzinfo=UTC)
ROLLOUT = {"rollout": {"progressDeadlineSeconds": 60, "onFailure": "RollBack"}}
FIRST, SECOND = merge(SPEC, ROLLOUT), merge({**SPEC, **ANOTHER_MODEL}, ROLLOUT)
OLD, NEW = (pipeline_revision(deployment(spec).spec) for spec in (FIRST, SECOND))
DIGESTS = [spec_digest(deployment(spec).spec) for spec in (FIRST, SECOND)]
SERVES = Observed({}, (pod("gateway", OLD, name="g-0", ready=True),))


class Recorded:
    """ControllerRevisions by name. `busy`: the API server answers no request about them."""

    def __init__(self) -> None:
        self.bodies: dict[str, Any] = {}
        self.busy = False
        self.lists = 0

    async def recorded(self, _namespace: str, _selector: str) -> list[Any]:
        self._answer()
        self.lists += 1
        return copy.deepcopy(list(self.bodies.values()))

    async def create_recorded(self, _namespace: str, manifest: Mapping[str, Any]) -> Any:
        self._answer()
        self.bodies[manifest["metadata"]["name"]] = copy.deepcopy(manifest)
        return copy.deepcopy(manifest)

    async def patch_recorded(self, _namespace: str, name: str, change: Mapping[str, Any]) -> None:
        self._answer()
        self.bodies[name] = merge(self.bodies[name], change)

    async def delete_recorded(self, _namespace: str, name: str) -> None:
        self._answer()
        del self.bodies[name]

    def _answer(self) -> None:
        if self.busy:
            raise BusyError("too many requests")


class Reported:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def report(self, _body: object, reason: str, message: str, **_: object) -> None:
        self.events.append((reason, message))


class Passes:
    """Passes over one deployment, as `reconcile_pass` makes them, at the seconds that a test names."""

    def __init__(self, cluster: Recorded, status: Mapping[str, Any] | None = None) -> None:
        self.cluster, self.reported, self.generation = cluster, Reported(), 0
        context = PassContext(
            cast(Any, cluster), cast(Any, self.reported), OperatorMetrics(), "default", "demo", PRODUCTION
        )
        self.target = RolloutTarget(context, UID)
        self.target.remember(status or {})
        self.spec: dict[str, Any] = {}

    def change(self, spec: dict[str, Any]) -> None:
        self.generation, self.spec = self.generation + 1, spec

    async def look(self) -> Reading:
        """Find the spec in effect."""
        found = read(self._body)
        assert found.deployment is not None
        return await self.target.find(self._body, found.deployment.spec, found)

    async def run(
        self,
        second: int,
        stage: Stage = "BringingUp",
        *,
        serving: str | None = OLD,
        observed: Observed = SERVES,
        problems: tuple[Problem, ...] = (),
    ) -> str | None:
        """A whole pass. Returns the revision that it works towards; None: there is no plan."""
        own = read(self._body).deployment
        reading = await self.look()
        assert own is not None
        if reading.deployment is None:
            return None
        spec = reading.deployment.spec
        revision = pipeline_revision(spec)
        step = Step(stage, revision, serving, (), {}, ())
        self.target.history._due = 0.0  # seconds pass between passes
        await self.target.keep(self._body, own.spec, step.serving)
        now = BEGIN + timedelta(seconds=second)
        await self.target.advance(self._body, spec, step, observed, problems, now, downloading=False)
        if stage == "Complete" and self.target.digest is not None and not spec.paused:
            await self.target.history.complete(self.target.digest)
        return revision

    @property
    def _body(self) -> dict[str, Any]:
        metadata = {"name": "demo", "namespace": "default", "uid": UID, "generation": self.generation}
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": self.spec}


async def served(then: dict[str, Any]) -> Passes:
    """The first spec serves and is complete, and another one begins to be rolled out."""
    passes = Passes(Recorded())
    passes.change(FIRST)
    assert await passes.run(0, "Complete") == OLD
    passes.change(then)
    return passes


async def test_a_busy_api_server_delays_the_rollback_by_one_pass() -> None:
    before = await served(SECOND)
    await before.run(10)
    progress = before.target.progress
    assert progress is not None
    status = {"rolloutProgress": progress.model_dump(mode="json", by_alias=True)}
    passes = Passes(before.cluster, status)  # another operator process
    passes.change(SECOND)
    passes.cluster.busy = True
    await passes.run(100)
    assert passes.target.rolled_back is None
    assert passes.target.not_rolled_back == "the recorded specs have not been read yet"
    passes.cluster.busy = False
    await passes.run(105)
    assert passes.target.rolled_back is not None
    assert passes.target.not_rolled_back == ""
    assert await passes.run(110) == OLD


async def test_an_unready_old_gateway_pod_delays_the_rollback_by_one_pass() -> None:
    passes = await served(SECOND)
    gateway = child_of("Deployment", workload("Deployment", "gateway", None, template=NEW, ready=0))
    away = Observed({gateway.key: gateway}, (pod("gateway", OLD, name="g-0", ready=False),))
    await passes.run(10, "Draining", serving=NEW, observed=away)
    await passes.run(100, "Draining", serving=NEW, observed=away)
    assert passes.target.not_rolled_back == "no gateway pod of another revision is Ready"
    await passes.run(105, "Draining", serving=NEW, observed=replace(away, pods=SERVES.pods))
    assert [reason for reason, _ in passes.reported.events] == ["RolledBack"]


async def test_a_rollout_without_a_way_back_reads_the_specs_once() -> None:
    passes = await served(SECOND)
    passes.cluster.bodies.clear()
    await passes.run(10)
    for second in range(100, 150, 5):
        await passes.run(second)
        assert passes.target.not_rolled_back == f"no recorded spec makes revision {OLD}"
    assert passes.cluster.lists < 4


PAUSED = merge(SECOND, {"rollout": {"paused": True}})


async def test_a_missing_recorded_spec_holds_a_paused_rollout_until_resumed() -> None:
    passes = await served(PAUSED)
    assert await passes.run(10, "Complete") == OLD
    passes.cluster.bodies.clear()
    passes.change(merge(PAUSED, {"decode": {"replicas": 3}}))
    reading = await passes.look()
    assert reading.deployment is None
    assert [str(fault) for fault in reading.faults] == [
        f"spec.rollout.paused: recorded spec {DIGESTS[0]}, in effect while the rollout is paused, is missing"
    ]
    assert "mmd rollout resume demo" in reading.remedy
    assert await passes.run(20) is None
    passes.change(merge(SECOND, {"decode": {"replicas": 3}}))
    assert await passes.run(30) == NEW


async def test_a_recorded_spec_invalid_with_present_sizes_names_the_field() -> None:
    passes = await served(merge(FIRST, {"decode": {"gpus": 1}}))
    await passes.run(10, "Complete")
    small = merge(PAUSED, {"decode": {"replicas": 2}, "gpuBudget": 1})
    passes.change(small)
    reading = await passes.look()
    assert [fault.field for fault in reading.faults] == ["spec.gpuBudget"], reading.faults
    assert "in effect while the rollout is paused, is invalid with it" in reading.faults[0].message
    passes.change(merge(small, {"gpuBudget": 2}))
    assert await passes.run(20) == OLD


async def test_a_failed_revision_does_not_return_without_the_recorded_spec() -> None:
    passes = await served(SECOND)
    await passes.run(10)
    await passes.run(100)
    assert await passes.run(105) == OLD
    rolled_back = passes.target.rolled_back
    assert rolled_back is not None
    passes.cluster.bodies.clear()
    status = {"rolledBack": rolled_back.model_dump(mode="json", by_alias=True)}
    successor = Passes(passes.cluster, status)
    successor.generation, successor.spec = passes.generation, passes.spec
    assert await successor.run(110) is None
    assert successor.target.rolled_back == rolled_back
    assert "change the spec" in (await successor.look()).remedy
    successor.change(merge(SECOND, {"decode": {"replicas": 3}}))
    assert await successor.run(120) == NEW


@pytest.mark.parametrize("part", [{"gateway": {"replicas": 3}}, {"decode": {"startDeadlineSeconds": 900}}])
async def test_sizes_and_deadlines_do_not_wait_while_a_rollout_is_paused(part: dict[str, Any]) -> None:
    passes = await served(merge(PAUSED, part))
    spec = (await passes.look()).deployment
    assert spec is not None
    assert pipeline_revision(spec.spec) == OLD
    found = spec.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert merge(found, part) == found


async def test_what_changes_while_the_operator_is_suspended_is_neither_complete_nor_late() -> None:
    passes = await served(merge(SECOND, {"paused": True}))
    await passes.run(10, "Complete")  # of the objects that are there
    await passes.run(10_000)
    assert passes.target.overdue_seconds is None
    passes.change(SECOND)
    await passes.run(10_010)
    progress = passes.target.progress
    assert progress is not None
    assert not progress.complete
    assert passes.target.overdue_seconds is None
    await passes.run(10_100)
    assert passes.target.rolled_back is not None


async def test_the_spec_before_is_kept_while_its_gateways_may_still_serve() -> None:
    passes = await served(merge(SECOND, {"rollout": {"revisionHistoryLimit": 0}}))
    await passes.run(10, "SwitchingGateway", serving=NEW)
    await passes.run(20, "Draining", serving=NEW)
    assert len(passes.cluster.bodies) == 2
    await passes.run(30, "Complete", serving=NEW)
    await passes.run(40, "Complete", serving=NEW)
    assert len(passes.cluster.bodies) == 1
