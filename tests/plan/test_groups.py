"""When a replica is a group of pods, and what that makes of the plan."""

from __future__ import annotations

from typing import Any

import pytest

from mmd_api.faults import InvalidDeploymentError
from mmd_api.pipeline import pipeline_revision
from mmd_operator.resources.plan import plan_objects
from support.cluster.deployments import deployment
from support.cluster.groups import GROUPS, ONE_POD


def spec_of(gpus: int, tensor: int, stages: int = 1) -> dict[str, Any]:
    decode = {"tensorParallelSize": tensor, "pipelineParallelSize": stages}
    return {**ONE_POD, "engine": {"type": "VLLM", "decode": decode}, "decode": {"gpus": gpus}}


@pytest.mark.parametrize(
    ("gpus", "tensor", "stages", "pods"),
    [(4, 4, 1, 1), (8, 8, 2, 2), (4, 8, 1, 2), (1, 2, 2, 4), (2, 2, 1, 1), (0, 4, 2, 1)],
)
def test_a_replica_has_as_many_pods_as_its_ranks_need(gpus: int, tensor: int, stages: int, pods: int):
    spec = deployment(spec_of(gpus, tensor, stages)).spec
    assert spec.group_size("decode") == pods
    assert spec.replica_gpus("decode") == gpus * pods
    assert spec.group_size("encoder") == 1


def test_native_replicas_are_single_pods():
    spec = deployment({**ONE_POD, "engine": {"type": "Native"}, "decode": {"gpus": 1}}).spec
    assert spec.group_size("decode") == 1


def test_ranks_that_fill_no_whole_number_of_pods_are_refused():
    with pytest.raises(InvalidDeploymentError) as refused:
        deployment(spec_of(4, 6))
    (fault,) = refused.value.faults
    assert fault.field == "spec.engine.decode.tensorParallelSize"
    assert "set decode.gpus to a divisor of their product" in fault.message


def test_the_revision_depends_on_pods_per_replica_and_not_their_split():
    one, other = (pipeline_revision(deployment(spec_of(4, tensor, 4 // tensor)).spec) for tensor in (4, 2))
    assert one == other
    two, four = (pipeline_revision(deployment(spec_of(gpus, 8)).spec) for gpus in (4, 2))
    assert len({one, two, four}) == 3


@pytest.mark.parametrize(("spec", "kind"), [(ONE_POD, "StatefulSet"), (GROUPS, "LeaderWorkerSet")])
def test_a_pool_of_groups_is_a_leader_worker_set(spec: dict[str, Any], kind: str):
    objects = plan_objects(deployment(spec), "default")
    label = "app.kubernetes.io/component"
    found = [o["kind"] for o in objects if o["metadata"]["labels"].get(label) == "decode"]
    assert found == ["Service", kind, "PodDisruptionBudget"]
