"""GPUs count the same whatever their resource is called, and when claims provide them."""

from typing import Any

import pytest

from mmd_api.resource import MultimodalDeployment
from mmd_operator.observed.observed import Observed, child_of, pod_of
from mmd_operator.resources.plan import plan_objects
from mmd_operator.sizes.gpu_budget import gpus_held

WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "NVIDIA": ({}, "3 Insufficient nvidia.com/gpu."),
    "AMD": ({"gpuResource": "amd.com/gpu"}, "3 Insufficient amd.com/gpu."),
    "MIG": ({"gpuResource": "nvidia.com/mig-1g.10gb"}, "3 Insufficient nvidia.com/mig-1g.10gb."),
    "claims": (
        {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}]},
        "3 cannot allocate all claims.",
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_gpus_are_counted_and_missed_by_whatever_name(way: tuple[dict[str, Any], str]):
    fields, words = way
    template = planned(fields)["spec"]["template"]
    pod = pod_of(
        {
            "metadata": {"name": "one", "uid": "1", **template["metadata"]},
            "spec": template["spec"],
            "status": {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
                ]
            },
        }
    )
    assert pod.gpus == 1
    assert pod.lacks_gpu
    body = planned(fields)
    body["metadata"] |= {"uid": "a", "resourceVersion": "1"}
    child = child_of("StatefulSet", body)
    assert child.workload is not None
    assert child.workload.gpus == 1
    assert gpus_held(Observed(children={child.key: child})) == 3, "pods that are about to be created"


def planned(fields: dict[str, Any]) -> dict[str, Any]:
    """The StatefulSet of a decode pool of three pods with one GPU each."""
    spec = {"model": {"id": "builtin/demo"}, "decode": {"gpus": 1, "replicas": 3, **fields}}
    deployment = MultimodalDeployment.parse(
        {
            "apiVersion": "serving.multimodal.dev/v1alpha1",
            "kind": "MultimodalDeployment",
            "metadata": {"name": "demo"},
            "spec": spec,
        }
    )
    objects = plan_objects(deployment, "default")
    return next(o for o in objects if o["kind"] == "StatefulSet" and "decode" in o["metadata"]["name"])
