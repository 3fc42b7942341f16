"""The claim and the Job of a cache of weights, and what pods have of them."""

from __future__ import annotations

from typing import Any

import pytest

from mmd_api.contract import environment as env
from mmd_api.pipeline import pipeline_revision
from mmd_api.spec.model import MODELS_FOLDER
from mmd_api.weights import downloads_of, folder_of
from mmd_operator.resources.plan import plan_objects

from .planned import deployment, of_kind, pods

HUB = {"id": "org/llava", "revision": "v1", "storage": {"type": "Hub", "tokenSecret": "hub"}}
URL = "https://models.example.com:8443/llava/v3"


def cached(cache: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    model = {**HUB, "storage": {**HUB["storage"], "cache": cache}}
    return plan_objects(deployment({"model": model, **more}), "default")


def job_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (job,) = of_kind(objects, "Job")
    return job


def container_of(owner: dict[str, Any]) -> dict[str, Any]:
    return owner["spec"]["template"]["spec"]["containers"][0]


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in container["env"]}


def test_the_weights_claim_is_shared_by_nodes_and_outlives_revisions():
    objects = cached({"sizeGibibytes": 200, "storageClassName": "nfs"})
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    assert claim["metadata"]["name"] == "sample-weights"
    assert "serving.multimodal.dev/revision" not in claim["metadata"]["labels"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "200Gi"}},
        "storageClassName": "nfs",
    }
    assert "--claim=claim sample-weights of 200 GiB" in container_of(job_of(objects))["args"]
    assert not of_kind(cached({"claimName": "shared"}), "PersistentVolumeClaim")


def test_the_job_alone_has_the_token_and_writes_to_the_claim():
    objects = cached({"claimName": "shared"})
    job = job_of(objects)
    assert "HF_TOKEN" in variables(container_of(job))
    assert {"name": "models", "mountPath": MODELS_FOLDER} in container_of(job)["volumeMounts"]
    for name, template in pods(objects):
        if name.endswith("-nats"):
            continue
        container = template["spec"]["containers"][0]
        assert "HF_TOKEN" not in variables(container)
        assert variables(container)["HF_HUB_OFFLINE"] == "1"
        assert variables(container)[env.WEIGHTS] == MODELS_FOLDER
        mount = next(m for m in container["volumeMounts"] if m["name"] == "models")
        assert mount == {"name": "models", "mountPath": MODELS_FOLDER, "readOnly": True}


def test_the_job_is_restricted_and_retries_only_where_that_helps():
    spec = job_of(cached({"claimName": "shared"}))["spec"]
    pod = spec["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    assert pod["restartPolicy"] == "Never"
    rule = spec["podFailurePolicy"]["rules"][0]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [41, 44, 47]


def test_the_job_runs_where_gateways_do_and_as_they_do():
    gateway = {
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "cpu", "operator": "Exists"}],
        "template": {"serviceAccountName": "reader"},
    }
    pod = job_of(cached({"claimName": "shared"}, gateway=gateway))["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == gateway["nodeSelector"]
    assert pod["tolerations"] == gateway["tolerations"]
    assert pod["serviceAccountName"] == "reader"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"decode": {"gpus": 0, "replicas": 4}}, True),
        ({"image": {"worker": "other"}}, False),
        ({"engine": {"type": "VLLM", "adapters": [{"name": "sql", "id": "org/sql"}]}}, False),
    ],
)
def test_a_job_has_another_name_when_it_would_do_another_thing(change: dict[str, Any], same: bool):
    before, after = job_of(cached({"claimName": "shared"})), job_of(cached({"claimName": "shared"}, **change))
    assert (before["metadata"]["name"] == after["metadata"]["name"]) == same


def test_adapters_of_the_hub_are_downloaded_beside_the_model():
    spec = deployment(
        {
            "model": HUB,
            "engine": {"type": "VLLM", "adapters": [{"name": "sql", "id": "org/sql", "revision": "v2"}]},
        }
    ).spec
    found = [(one.field, one.url) for one in downloads_of(spec)]
    assert found == [
        ("spec.model", "hf://org/llava@v1"),
        ("spec.engine.adapters[sql]", "hf://org/sql@v2"),
    ]


def test_a_url_comes_with_a_bearer_token_and_store_credentials():
    model = {
        "id": "org/llava",
        "storage": {
            "type": "Url",
            "url": URL,
            "tokenSecret": "models",
            "credentialsSecret": "s3",
            "cache": {"claimName": "shared"},
        },
    }
    container = container_of(job_of(plan_objects(deployment({"model": model}), "default")))
    assert f"--item=spec.model={URL}" in container["args"]
    token = {"secretKeyRef": {"name": "models", "key": "token"}}
    assert variables(container)[env.WEIGHTS_TOKEN] == token
    assert "HF_TOKEN" not in variables(container)
    assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert folder_of(URL).startswith("models.example.com--8443--llava--v3-")


@pytest.mark.parametrize(
    ("storage", "ports"),
    [
        ({"type": "Hub"}, {443}),
        ({"type": "Url", "url": URL}, {8443}),
        ({"type": "Url", "url": "s3://bucket/llava"}, {443}),
    ],
)
def test_with_restricted_egress_the_job_alone_may_leave_the_cluster(storage: dict[str, Any], ports: set[int]):
    model = {"id": "org/llava", "storage": {**storage, "cache": {"claimName": "shared"}}}
    objects = plan_objects(deployment({"model": model, "network": {"egress": "Restricted"}}), "default")
    policies = {p["metadata"]["name"]: p["spec"] for p in of_kind(objects, "NetworkPolicy")}
    of_job = policies["sample.egress-weights"]["egress"]
    assert {p["port"] for rule in of_job for p in rule["ports"]} == {53, 5353, *ports}
    revision = pipeline_revision(deployment({"model": model}).spec)
    (of_workers,) = [spec for name, spec in policies.items() if name == f"sample.egress-{revision}"]
    assert "weights" in of_workers["podSelector"]["matchExpressions"][0]["values"]
    assert not [rule for rule in of_workers["egress"] if "ipBlock" in str(rule)]


def test_the_claim_is_part_of_the_revision_and_its_size_is_not():
    def revision(cache: dict[str, Any]) -> str:
        return pipeline_revision(
            deployment({"model": {**HUB, "storage": {"type": "Hub", "cache": cache}}}).spec
        )

    assert revision({"sizeGibibytes": 5}) == revision({"sizeGibibytes": 9, "storageClassName": "fast"})
    assert (
        len({revision({"sizeGibibytes": 5}), revision({"claimName": "a"}), revision({"claimName": "b"})}) == 3
    )
