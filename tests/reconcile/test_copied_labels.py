"""A StatefulSet with the labels of a pool, such as a copy of it for debugging, is not taken for the pool."""

from __future__ import annotations

import pytest

from mmd_operator.observed.observed import Observed, child_of
from mmd_operator.scaling.scaling_facts import pool_workload
from mmd_operator.sizes.gpu_share import gpu_share
from mmd_operator.status.facts import Facts
from support.cluster.deployments import deployment

from .bodies import NEW, OLD, UID, workload


@pytest.mark.parametrize("owner", [None, "another"])
def test_a_copy_of_a_pool_is_neither_scaled_nor_counted(owner: str | None) -> None:
    body = workload("StatefulSet", "decode", NEW, replicas=2, gpus=1)
    copied = workload("StatefulSet", "decode", NEW, replicas=7, owner=owner or "")
    copied["metadata"]["name"] = "a-copy"
    if owner is None:
        del copied["metadata"]["ownerReferences"]
    copy, pool = child_of("StatefulSet", copied), child_of("StatefulSet", body)
    for children in ((copy, pool), (pool, copy)):
        seen = Observed({child.key: child for child in children})
        assert pool_workload(seen, "decode", NEW, UID) is pool
        facts = Facts("demo", "default", ("decode",), False, seen, (), None)
        assert facts.workloads("decode") == {NEW: pool.workload}
        spec = deployment(
            {
                "model": {"id": "builtin/demo"},
                "decode": {"gpus": 1, "autoscaling": {"minReplicas": 1, "maxReplicas": 9}},
                "gpuBudget": 3,
            }
        ).spec
        share = gpu_share(spec, OLD, NEW, seen, UID)
        assert "1 of 2 decode pods" in share.words
