"""What the autoscaler may use of the GPU budget while pods are ending: sizes it may want, and growth it may carry out now."""

from __future__ import annotations

import pytest

from mmd_operator.autoscaling import ScaleActions
from mmd_operator.observed.observed import Observed, child_of
from mmd_operator.scaling.scaling_limits import growth_within
from mmd_operator.sizes.gpu_budget import serving_budget
from support.cluster.deployments import deployment

from .bodies import NEW, OLD, pod, workload

SPEC = {
    "model": {"id": "builtin/demo", "dtype": "Float32"},
    "prefill": {"gpus": 1, "autoscaling": {"minReplicas": 1, "maxReplicas": 9}},
    "decode": {"gpus": 1, "replicas": 1},
    "gpuBudget": 6,
}
PREFILL = child_of("StatefulSet", workload("StatefulSet", "prefill", NEW, replicas=2, gpus=1))


def budget(*names: str) -> int | None:
    """For a prefill pool of two, while these pods are ending."""
    of = {name: OLD if OLD in name else NEW for name in names}
    gone = [pod("prefill", r, name=name, deleting=True, gpus=1) for name, r in of.items()]
    there = [pod("prefill", NEW, name=f"{PREFILL.name}-{n}", ready=True, gpus=1) for n in range(2)]
    return serving_budget(deployment(SPEC).spec, Observed({PREFILL.key: PREFILL}, (*there, *gone)), NEW)


def test_pods_that_are_ending_are_not_there_for_growth():
    assert budget() == 6
    assert budget(f"demo-prefill-{OLD}-0", f"demo-prefill-{OLD}-1") == 4
    assert budget(f"{PREFILL.name}-2") == 5
    assert budget(*(f"demo-prefill-{OLD}-{n}" for n in range(6))) == 2, "nothing shrinks for them"


@pytest.mark.parametrize(
    ("free", "wanted", "size", "left"),
    [
        (None, 5, 5, None),
        (3, 5, 5, 0),
        (2, 5, 4, 0),
        (0, 5, None, 0),
        (-1, 5, None, -1),
        (0, 1, 1, 0),
        (3, None, None, 3),
    ],
)
def test_a_pool_grows_into_free_gpus_and_leaves_the_rest(free, wanted, size, left):
    actions, remaining = growth_within(
        free, ScaleActions(replicas=wanted), PREFILL, Observed({PREFILL.key: PREFILL})
    )
    assert (actions.replicas, remaining) == (size, left)
