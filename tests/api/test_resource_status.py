import pytest
from pydantic import ValidationError

from mmd_api.status import MultimodalDeploymentStatus

STATUS = {
    "observedGeneration": 3,
    "pipelineRevision": "0123456789",
    "conditions": [
        {
            "type": "Ready",
            "status": "False",
            "observedGeneration": 3,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
            "reason": "EncoderStarting",
            "message": "1 of 2 encoder pods are ready",
        }
    ],
    "pools": {
        "encoder": {
            "desired": 2,
            "ready": 1,
            "lastDecision": {
                "time": "2026-01-01T00:00:00Z",
                "fromReplicas": 1,
                "toReplicas": 2,
                "reason": "Backlog",
                "metric": "backlogSeconds",
                "observedMilli": 4200,
                "targetMilli": 1000,
            },
        },
        "decode": {"desired": 4, "ready": 4, "draining": 1},
    },
    "bottleneck": "Encoder",
}


def test_a_status_is_read_and_written_in_the_resources_spelling():
    status = MultimodalDeploymentStatus.model_validate(STATUS)
    assert status.model_validate(status.model_dump(mode="json", by_alias=True)) == status
    assert status.condition("Ready").reason == "EncoderStarting"
    assert status.condition("Degraded") is None


def test_the_pool_summary_leaves_out_absent_pools():
    assert MultimodalDeploymentStatus.model_validate(STATUS).pools.summary == "E 1/2 D 4/4"


@pytest.mark.parametrize("reason", ["not camel case", "lower", ""])
def test_reasons_are_camel_case(reason):
    condition = {**STATUS["conditions"][0], "reason": reason}
    with pytest.raises(ValidationError, match="reason"):
        MultimodalDeploymentStatus.model_validate({"conditions": [condition]})
