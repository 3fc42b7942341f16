"""The pod that joins the only one of a pool while that is replaced: it is not the pool's size unless the autoscaler wants it to be."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import pytest

from mmd_api.pipeline import pipeline_revision
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.kube.pod_client import NoAnswerError
from mmd_operator.observed.observed import SCALER_FIELD_MANAGER, SURGE_FIELD_MANAGER, Observed, child_of
from mmd_operator.rollout.next_step import Step, next_step
from mmd_operator.scaling.pool_scaling import PoolScaling, ScalingView
from mmd_operator.sizes.pending_growth import PendingGrowth
from support.cluster.deployments import deployment

from .bodies import UID, pod, workload

NOW = 1767225600.0
CREATED = "2026-01-01T00:00:00Z"
LONG_AFTER = NOW + 901
QUICK = {
    "minReplicas": 1,
    "maxReplicas": 2,
    "scaleDownStabilizationSeconds": 0,
    "scaleDownCooldownSeconds": 0,
    "panicWindowSeconds": 0,
}


class Pool:
    """A StatefulSet of an encoder that scales, by its size and who owns that; the API server takes its calls."""

    def __init__(self, mode: str = "Active", most: int = 2) -> None:
        self.resize({"autoscaling": {**QUICK, "mode": mode, "maxReplicas": most}})
        self.revision = pipeline_revision(self.spec)
        self.name = f"demo-encoder-{self.revision}"
        self.replicas, self.owners = 2, {SURGE_FIELD_MANAGER}
        self.released, self.events = 0, list[str]()
        self.inputs = ["new", "new"]
        self.unplaced: set[int] = set()
        self.unready: set[int] = set()
        self.decode_surge = False  # of a decode pool of one; no node takes it
        self.queued = 0.0
        self.shown: Observed | None = None  # by a watch that lags
        self._now = NOW
        self._scaling = PoolScaling(
            cast(Any, self), cast(Any, self), OperatorMetrics(), "default", PendingGrowth(), PRODUCTION
        )

    async def get(self, address: str, *_: object) -> bytes:
        if "encoder" in address and int(address.rpartition("-")[2]) in self.unready:
            raise NoAnswerError("does not answer")
        report: dict[str, Any] = {"pod": address, "revision": self.revision}
        if "gateway" in address:
            ttft = {"window_seconds": 30.0, "requests": 0, "seconds": 0.0}
            report |= {"queue": {"age_seconds": 0.0, "waiting_work": {}}, "ttft": ttft}
        else:
            busy = {"encode_queued_work": {"video": self.queued}, "encode_work_per_second": {"video": 100.0}}
            decodes = {"decode_running": 1, "decode_max_sequences": 100}
            report |= {"state": "ready", "load": busy if "encoder" in address else decodes}
        return json.dumps(report).encode()

    async def scale(self, _kind: str, _namespace: str, name: str, replicas: int) -> None:
        if name != self.name:
            self.decode_surge = replicas > 1
        elif replicas != self.replicas:
            self.replicas, self.owners = replicas, {SCALER_FIELD_MANAGER}

    async def release_replicas(self, _kind: str, _namespace: str, _name: str, replicas: int) -> None:
        assert replicas == self.replicas
        self.owners |= {SCALER_FIELD_MANAGER}
        self.released += 1

    async def ask_to_drain(self, *_: object) -> None:
        pass

    def observed(self) -> Observed:
        bodies = [
            workload("StatefulSet", name, self.revision, replicas=size, inputs="new")
            for name, size in (("encoder", self.replicas), ("prefill", 1), ("decode", 1 + self.decode_surge))
        ]
        owned = {"fieldsV1": {"f:spec": {"f:replicas": {}}}}
        bodies[0]["metadata"]["managedFields"] = [{"manager": o, **owned} for o in sorted(self.owners)]
        bodies[2]["metadata"]["managedFields"] = [
            {"manager": SURGE_FIELD_MANAGER, **owned}
        ] * self.decode_surge
        children = [child_of("StatefulSet", body) for body in bodies]
        children.append(
            child_of("Deployment", workload("Deployment", "gateway", None, template=self.revision))
        )
        pods = [self._pod("encoder", n) for n in range(self.replicas)]
        pods += [self._pod(name, 0) for name in ("prefill", "decode", "gateway")]
        if self.decode_surge:
            pods = [replace(p, inputs="old") if p.component == "decode" else p for p in pods]
            pods.append(self._pod("decode", 1))
        return Observed({child.key: child for child in children}, tuple(pods))

    def _pod(self, component: str, ordinal: int) -> Any:
        lacks = ordinal in self.unplaced if component == "encoder" else ordinal > 0
        made = pod(
            component,
            self.revision,
            name=f"demo-{component}-{self.revision}-{ordinal}",
            ready=not lacks and not (component == "encoder" and ordinal in self.unready),
            scheduling="no node" if lacks else None,
            inputs=self.inputs[ordinal] if component == "encoder" and ordinal < len(self.inputs) else "new",
            created=CREATED,
        )
        return replace(made, address=made.name)

    async def tick(self, ticks: int = 1) -> None:
        for _ in range(ticks):
            self._now += 2
            events, _ = await self._scaling.tick(self._now, self.view)
            self.events += [message for _, message in events]

    def resize(self, encoder: dict[str, Any]) -> None:
        """The spec gets another size of the pool."""
        self.spec = deployment(
            {
                "model": {"id": "builtin/demo", "dtype": "Float32"},
                "encoder": {"gpus": 0, **encoder},
                "prefill": {"gpus": 0},
                "decode": {"gpus": 0},
                "transfer": {"kv": {"backend": "Gloo"}},
            }
        ).spec

    def view(self) -> ScalingView:
        return ScalingView(self.spec, self.revision, self.shown or self.observed(), UID)

    def step(self) -> Step:
        planned = [
            {
                "kind": "Deployment",
                "metadata": {"name": "demo-gateway", "labels": {}},
                "spec": {"replicas": 1},
            }
        ]
        return next_step(self.spec, self.revision, planned, self.observed(), UID, LONG_AFTER)

    @property
    def surged(self) -> bool:
        child = self.observed().sized(self.name)
        assert child is not None
        assert child.workload is not None
        return child.workload.surged


async def test_a_surge_that_the_autoscaler_wants_becomes_the_size_of_the_pool():
    pool = Pool()
    pool.queued = 700.0
    await pool.tick()
    assert (pool.replicas, pool.surged) == (2, False)


async def test_a_pool_that_kept_its_surge_drops_at_most_one_pod():
    pool = Pool()
    pool.queued = 700.0
    await pool.tick()
    pool.inputs, pool.unplaced = ["old", "old"], {1}
    assert [gone.name for gone in pool.step().replace[pool.name].delete] == [f"{pool.name}-1"]
    pool.inputs = ["old", "new"]
    found = pool.step().replace[pool.name]
    assert found.delete == ()
    assert found.waiting == f"no node takes pod {pool.name}-1"


async def test_a_surge_is_not_kept_for_a_rule_that_holds_the_size():
    pool = Pool()
    pool.unplaced = {0}  # no report: nothing is lowered
    await pool.tick()
    assert pool.surged


@pytest.mark.parametrize("mode", ["Active", "Shadow"])
async def test_a_surge_leaves_when_its_pool_is_replaced(mode: str):
    pool = Pool(mode)
    pool.inputs = ["old", "new"]
    await pool.tick(20)
    assert (pool.replicas, pool.surged) == (2, True)
    pool.inputs = ["new", "new"]
    pool.unplaced = {1}
    await pool.tick(20)
    assert (pool.replicas, pool.surged) == (1, False)


async def test_an_unplaced_surge_is_no_loss_of_capacity():
    pool = Pool(most=4)
    pool.replicas, pool.owners, pool.decode_surge = 1, {SCALER_FIELD_MANAGER}, True
    pool._now, pool.queued = LONG_AFTER, 700.0
    await pool.tick(2)
    assert pool.replicas == 2, "the decode pool behind it is not saturated"
    assert pool.decode_surge
    assert not [words for words in pool._scaling.report.limited if "decode" in words]


async def test_load_does_not_keep_a_surge_that_does_not_start():
    pool = Pool()
    pool.inputs, pool.unready = ["old", "new"], {1}
    pool._now, pool.queued = LONG_AFTER, 50.0
    await pool.tick(2)
    assert pool.surged


@pytest.mark.parametrize("inputs", ["old", "new"])
async def test_a_surge_becomes_the_size_of_a_fixed_pool_made_as_large(inputs: str):
    pool = Pool()
    pool.inputs = [inputs, "new"]
    pool.resize({"replicas": 2})
    assert pool.step().sizes == {}
    assert pool._scaling.needed(pool.view())
    await pool.tick()
    assert (pool.replicas, pool.surged) == (2, False)
    assert not pool._scaling.needed(pool.view())


async def test_a_surge_leaves_a_fixed_pool_whose_size_stays():
    pool = Pool()
    pool.resize({"replicas": 1})
    pool.unplaced = {1}
    assert pool._scaling.needed(pool.view())
    await pool.tick()
    assert (pool.replicas, pool.surged) == (1, False)


async def test_a_surge_that_is_kept_is_reported_once_while_the_watch_lags():
    pool = Pool()
    pool.queued, pool.shown = 700.0, pool.observed()
    await pool.tick(6)
    assert len([words for words in pool.events if "keeps all 2 pods" in words]) == 1
    assert pool.released == 2, "once, and again after the time that a watch may need"


async def test_another_surge_that_is_kept_is_reported_too():
    pool = Pool()
    pool.queued = 700.0
    await pool.tick(2)
    pool.owners = {SURGE_FIELD_MANAGER}
    await pool.tick()
    assert len([words for words in pool.events if "keeps all 2 pods" in words]) == 2
    assert not pool.surged


async def test_the_size_of_another_revision_is_nobodys_change():
    """A revision that serves now may have begun smaller, as `gpuBudget` allowed."""
    pool = Pool(most=6)
    pool.owners, pool.queued = {SCALER_FIELD_MANAGER}, 2000.0
    await pool.tick()
    assert pool.replicas > 2
    pool.revision, pool.replicas = "aaaaaaaaaa", 1
    pool.name = f"demo-encoder-{pool.revision}"
    await pool.tick()
    decision = pool._scaling.decisions["encoder"]
    assert (decision.current, decision.foreign_replicas) == (1, None)
