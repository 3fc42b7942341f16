"""Whatever happens while pods of several pools are replaced: no more GPUs are held than the budget has, and no pool drops more than one
below its size."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.pipeline import pipeline_revision
from mmd_operator.observed.observed import Observed, child_of
from mmd_operator.rollout.next_step import Step, next_step
from support.cluster.deployments import deployment

from .bodies import UID, pod, workload

DEADLINE = 900.0
CREATED = "2026-01-01T00:00:00Z"
CREATED_AT = 1767225600.0
MODEL = {"id": "builtin/demo", "dtype": "Float32"}
POOLS = ("prefill", "decode")


@dataclass
class Pod:
    """`state`: Starting, Unplaced, Ready or Ending."""

    inputs: str = "new"
    state: str = "Starting"


@dataclass
class Pool:
    """A StatefulSet and its pods by ordinal. `size`: that of the pool before anything is replaced."""

    size: int
    gpus: int
    scales: bool
    replicas: int = 0
    surged: bool = False
    pods: dict[int, Pod] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replicas = self.size
        self.pods = {n: Pod("old", "Ready") for n in range(self.size)}

    @property
    def spec(self) -> dict:
        bounds = {"minReplicas": 1, "maxReplicas": 5}
        return {"gpus": self.gpus, **({"autoscaling": bounds} if self.scales else {"replicas": self.size})}

    @property
    def ready(self) -> int:
        return sum(p.state == "Ready" for p in self.pods.values())

    @property
    def gpus_held(self) -> int:
        return len(self.pods.keys() | range(self.replicas)) * self.gpus


class Cluster:
    """Two pools whose pods are all outdated, and what an operator sees of them."""

    def __init__(self, pools: dict[str, Pool], budget: int | None) -> None:
        self.pools, self.budget = pools, budget
        spec = {"model": MODEL, **{name: pool.spec for name, pool in pools.items()}, "gpuBudget": budget}
        self.spec = deployment(spec).spec
        self.revision = pipeline_revision(self.spec)
        self.now = CREATED_AT

    def step(self) -> Step:
        children, pods = [], []
        for name, pool in self.pools.items():
            body = workload(
                "StatefulSet",
                name,
                self.revision,
                replicas=pool.replicas,
                ready=pool.ready,
                inputs="new",
                gpus=pool.gpus,
                surged=pool.surged,
            )
            children.append(child_of("StatefulSet", body))
            pods += [
                pod(
                    name,
                    self.revision,
                    name=f"demo-{name}-{self.revision}-{n}",
                    inputs=p.inputs,
                    ready=p.state == "Ready",
                    deleting=p.state == "Ending",
                    scheduling="no node" if p.state == "Unplaced" else None,
                    created=CREATED,
                    gpus=pool.gpus,
                )
                for n, p in pool.pods.items()
            ]
        gateway = workload("Deployment", "gateway", None, template=self.revision)
        children.append(child_of("Deployment", gateway))
        planned = [
            {
                "kind": "Deployment",
                "metadata": {"name": "demo-gateway", "labels": {}},
                "spec": {"replicas": 1},
            }
        ]
        seen = Observed({c.key: c for c in children}, tuple(pods))
        return next_step(self.spec, self.revision, planned, seen, UID, self.now)

    def act(self) -> None:
        """The operator's part of a pass. A pool is not made smaller here: its pods drain first."""
        step = self.step()
        for name, pool in self.pools.items():
            key = f"demo-{name}-{self.revision}"
            if step.sizes.get(key, 0) > pool.replicas:
                pool.replicas = step.sizes[key]
                pool.surged = step.replace[key].replicas is not None
            found = step.replace.get(key)
            for gone in found.delete if found else ():
                pool.pods[int(gone.name.rpartition("-")[2])].state = "Ending"

    def happen(self, name: str, event: str) -> None:
        """One thing that others do to a pool."""
        pool = self.pools[name]
        if event == "make":
            pool.pods = {n: p for n, p in pool.pods.items() if p.state != "Ending"}
            for n in range(pool.replicas):
                pool.pods.setdefault(n, Pod())
        elif event == "wait":
            self.now += DEADLINE
        else:
            for p in pool.pods.values():
                if p.state == "Starting" or (p.state == "Unplaced" and event == "Ready"):
                    p.state = event
                    break


pools = st.builds(Pool, st.integers(1, 4), st.just(1), st.booleans())
events = st.tuples(st.sampled_from(POOLS), st.sampled_from(["make", "Ready", "Unplaced", "wait"]))


@settings(max_examples=300, deadline=None)
@given(
    prefill=pools,
    decode=pools,
    spare=st.none() | st.integers(0, 3),
    sequence=st.lists(events, min_size=5, max_size=40),
)
def test_replacing_keeps_to_the_budget_and_to_one_pod_below_each_size(
    prefill: Pool, decode: Pool, spare: int | None, sequence: list[tuple[str, str]]
):
    budget = None if spare is None else prefill.gpus_held + decode.gpus_held + spare
    cluster = Cluster({"prefill": prefill, "decode": decode}, budget)
    for name, event in sequence:
        cluster.act()
        for pool in cluster.pools.values():
            assert pool.ready >= pool.size - 1
        if budget is not None:
            assert prefill.gpus_held + decode.gpus_held <= budget
        cluster.happen(name, event)


@pytest.mark.parametrize("scales", [False, True])
def test_all_pods_are_replaced_where_every_pod_finds_a_node(scales: bool):
    cluster = Cluster({"prefill": Pool(1, 1, scales), "decode": Pool(3, 1, scales)}, 5)
    for _ in range(20):
        cluster.act()
        for name in POOLS:
            cluster.happen(name, "make")
            cluster.happen(name, "Ready")
    assert {p.inputs for pool in cluster.pools.values() for p in pool.pods.values()} == {"new"}


@pytest.mark.parametrize("scales", [False, True])
def test_a_pool_of_one_is_replaced_although_no_node_takes_its_surge(scales: bool):
    cluster = Cluster({"prefill": Pool(1, 1, scales), "decode": Pool(1, 1, scales)}, None)
    cluster.act()
    for name in POOLS:
        cluster.happen(name, "make")
        cluster.happen(name, "Unplaced")
    cluster.act()
    assert [pool.ready for pool in cluster.pools.values()] == [1, 1]
    cluster.happen("decode", "wait")
    cluster.happen("decode", "wait")
    cluster.act()
    assert [pool.pods[0].state for pool in cluster.pools.values()] == ["Ending", "Ending"]


def test_two_surges_share_what_the_budget_leaves():
    cluster = Cluster({"prefill": Pool(1, 1, scales=False), "decode": Pool(1, 1, scales=False)}, 3)
    sizes = {name.split("-")[1]: size for name, size in cluster.step().sizes.items()}
    assert sizes == {"prefill": 2}
