"""Which specs are the same to pods, and how an earlier one comes back: properties over drawn specs, and a table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from mmd_api.history import is_read_by_pods, restored, spec_digest
from mmd_api.readers import changed_paths, spec_paths
from mmd_api.resource import MultimodalDeployment
from support.cluster.deployments import ANOTHER_MODEL, SPEC, deployment
from support.cluster.manifests import merge

from .planned import valid_deployments


def raw(of: MultimodalDeployment) -> dict[str, Any]:
    """The spec as the API server holds it, with its defaults."""
    return of.spec.model_dump(mode="json", by_alias=True, exclude_none=True)


@settings(max_examples=15, deadline=None)
@given(valid_deployments(), valid_deployments())
def test_a_restored_spec_takes_from_the_record_what_pods_read(one, other):
    made = restored(raw(one), raw(other))
    back = MultimodalDeployment.model_validate(
        {**one.model_dump(mode="json", by_alias=True, exclude_none=True), "spec": made},
        context={"structure_only": True},
    ).spec
    assert spec_digest(back) == spec_digest(other.spec)
    pools = {name for name in ("encoder", "prefill") if getattr(one.spec, name) is not None}
    kept = [p for p in changed_paths(one.spec, back) if not is_read_by_pods(p)]
    assert {path.partition(".")[0] for path in kept} <= {"encoder", "prefill"} - pools


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"decode": {"replicas": 5}}, True),
        ({"decode": {"autoscaling": {"maxReplicas": 5}, "replicas": None}}, True),
        ({"gpuBudget": 9, "paused": True, "rollout": {"paused": True}}, True),
        ({"gateway": {"service": {"type": "LoadBalancer"}}}, True),
        ({"decode": {"schedulingDeadlineSeconds": 60}}, True),
        ({"decode": {"startDeadlineSeconds": 60}, "gateway": {"replicas": 7}}, True),
        ({"nats": {"replicas": 3}}, False),
        ({"decode": {"maxSequences": 5}}, False),
        ({"decode": {"resources": {"memory": "4Gi"}}}, False),
        ({"observability": {"logLevel": "Debug"}}, False),
        ({"prefill": None}, False),
        (ANOTHER_MODEL, False),
    ],
)
def test_a_change_is_recorded_if_pods_read_it(change, same):
    changed = deployment(merge(SPEC, change))
    assert (spec_digest(changed.spec) == spec_digest(deployment(SPEC).spec)) is same


def test_sizes_and_deadlines_need_no_rollout_except_nats_servers():
    """Budgets of bytes belong to the processes, and `nats.replicas` to the addresses that all pods start with."""
    paths = [
        p for p in spec_paths() if p.endswith(("eplicas", "DeadlineSeconds", "Budget", "BudgetMebibytes"))
    ]
    assert {path for path in paths if is_read_by_pods(path)} == {
        "nats.replicas",
        "prefill.featureBudgetMebibytes",
    }
    assert {"gateway.replicas", "prefill.startDeadlineSeconds", "gpuBudget"} <= set(paths)


def test_a_returning_pool_gets_its_recorded_size_and_others_keep_theirs():
    recorded = {"encoder": {"gpus": 0, "replicas": 4}, "decode": {"gpus": 0, "replicas": 2}}
    present = {
        "decode": {"gpus": 1, "autoscaling": {"maxReplicas": 9}},
        "prefill": {"gpus": 0},
        "network": {"egress": "Restricted"},
    }
    assert restored(present, recorded) == {
        "encoder": {"gpus": 0, "replicas": 4},
        "decode": {"gpus": 0, "autoscaling": {"maxReplicas": 9}},
        "network": {"egress": "Restricted"},
    }


def test_fields_of_a_newer_release_come_back_as_recorded():
    assert restored({"a": 1, "decode": {"b": 1}}, {"c": 2, "decode": {"b": 2}}) == {
        "c": 2,
        "decode": {"b": 2},
    }
