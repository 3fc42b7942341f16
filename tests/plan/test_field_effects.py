"""What a change of each field of the spec does to running pods: every field, one at a time, against the plan.

A reviewer sees the effects in `golden/effects.yaml`. To accept a change: `python -m tests.plan.test_field_effects > tests/plan/golden/effects.yaml`.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

import pytest
import yaml
from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from mmd_api.base import STRUCTURE_ONLY
from mmd_api.crd import crd_yaml
from mmd_api.generate import REFERENCE_FILE
from mmd_api.pipeline import pipeline_revision
from mmd_api.readers import EFFECTS, declared, part_of, spec_paths
from mmd_api.resource import MultimodalDeployment
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.resources import plan
from mmd_operator.resources.naming import INPUTS_ANNOTATION

EFFECTS_FILE = Path(__file__).parent / "golden" / "effects.yaml"
BASE: dict[str, Any] = {
    "model": {
        "id": "org/model",
        "revision": "main",
        "storage": {"type": "PersistentVolumeClaim", "claimName": "a", "subPath": "a"},
    },
    "encoder": {"gpus": 0, "autoscaling": {"maxReplicas": 4}, "cache": {"disk": {"sizeMebibytes": 64}}},
    "prefill": {"gpus": 0, "autoscaling": {"maxReplicas": 4}},
    "engine": {
        "type": "VLLM",
        **{
            pool: {
                "maxNumBatchedTokens": 64,
                "speculative": {"method": "draft_model", "model": "org/draft", "numSpeculativeTokens": 2},
            }
            for pool in ("prefill", "decode")
        },
    },
    "decode": {"gpus": 0, "autoscaling": {"maxReplicas": 4}},
    "transfer": {"kv": {"backend": "Nccl"}},
    "nats": {"url": "nats://one:4222", "credentialsSecret": "one"},
    "gateway": {
        "auth": {"keysSecret": "one", "oidc": {"issuer": "https://one.example.com", "audience": "one"}},
        "tls": {"secretName": "one"},
        "cors": {"allowedOrigins": ["https://one.example.com"]},
        "files": {},
        "httpRoute": {"parentRefs": [{"name": "one"}]},
        "inferencePool": {},
        "ingress": {"host": "one.example.com"},
        "media": {"underLoad": {}},
    },
}
"""Holds every part, and values that no cluster would take together: rules between fields are no part of this question."""
OTHER: dict[str, Any] = {
    "revision": "v2",
    "servedName": ["another"],
    "cpu": "3",
    "memory": "3Gi",
    "allowedHosts": ["example.com"],
    "loadBalancerSourceRanges": ["192.0.2.0/24"],
    "nodeSelector": {"a": "b"},
    "labels": {"a": "b"},
    "annotations": {"a": "b"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "env": [{"name": "A", "value": "b"}],
    "envFrom": [{"secretRef": {"name": "a"}}],
    "volumes": [{"name": "a", "emptyDir": {}}],
    "volumeMounts": [{"name": "a", "mountPath": "/a"}],
    "sidecars": [{"name": "a", "image": "b"}],
    "initContainers": [{"name": "a", "image": "b"}],
    "sharedMemory": "3Gi",
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [{"topologyKey": "a", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}],
    "securityContext": {"runAsUser": 1000},
    "patch": {"spec": {"dnsPolicy": "Default"}},
    "gpuResource": "amd.com/gpu",
    "resourceClaims": [{"name": "a", "resourceClaimTemplateName": "b"}],
    "schedules": [{"cron": "0 8 * * *", "durationMinutes": 60, "minReplicas": 2}],
    "pullSecrets": ["a"],
    "url": "nats://two:4222",
    "model.storage.url": "https://two.example.com/model",
    "cache": {"claimName": "a"},
    "otlpEndpoint": "http://collector:4318",
    "encoder": None,
    "prefill": None,
    "autoscaling": None,
    "disk": None,
    "auth": None,
    "oidc": None,
    "issuer": "https://two.example.com",
    "tls": None,
    "cors": None,
    "files": None,
    "allowedOrigins": ["https://two.example.com"],
    "httpRoute": None,
    "parentRefs": [{"name": "two"}],
    "hostnames": ["two.example.com"],
    "inferencePool": None,
    "ingress": None,
    "underLoad": None,
    "tiers": [{"memoryPercent": 70, "backlogMilliseconds": 500, "framesPercent": 50}],
    "decode": None,
    "speculative": None,
    "extraArgs": ["--max-logprobs=5"],
    "adapters": [{"name": "a", "id": "org/a"}],
}
"""Another value for fields whose type does not lead to one, by their last name. Other strings become `another`."""
# Where a field shows in a pod only beside another value of some other field.
BESIDE: dict[str, dict[str, Any]] = {
    "model.storage.tokenSecret": {"model.storage.type": "Hub"},
    "model.storage.cache.claimName": {"model.storage.cache": {"claimName": "a"}},
    **{
        f"model.storage.cache.{field}": {"model.storage.cache": {"sizeGibibytes": 5}}
        for field in ("sizeGibibytes", "storageClassName", "accessMode")
    },
    "nats.url": {"nats.managed": False},
    "nats.credentialsSecret": {"nats.managed": False},
}
PATHS = tuple(spec_paths())


def planned(data: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Pipeline revision, pod template by component, and configuration file by component."""
    body = {
        "apiVersion": "serving.multimodal.dev/v1alpha1",
        "kind": "MultimodalDeployment",
        "metadata": {"name": "sample"},
        "spec": data,
    }
    deployment = MultimodalDeployment.model_validate(body, context=STRUCTURE_ONLY)
    with mock.patch.object(plan, "cluster_faults", return_value=[]):  # they are rules between fields
        objects = plan.plan_objects(deployment, "somewhere")
    templates = {
        o["metadata"]["labels"]["app.kubernetes.io/component"]: o["spec"]["template"]
        for o in objects
        if o["kind"] in ("StatefulSet", "Deployment")
    }
    files = next(o["data"] for o in objects if o["kind"] == "ConfigMap" and "gateway.json" in o["data"])
    return (
        pipeline_revision(deployment.spec),
        templates,
        {f.removesuffix(".json"): t for f, t in files.items()},
    )


def with_value(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(data)
    *parts, last = path.split(".")
    node = changed
    for part in parts:
        node = node.setdefault(part, {})
    node[last] = value
    return changed


def field_at(path: str) -> FieldInfo:
    model: Any = MultimodalDeploymentSpec
    for part in path.split("."):
        field = next(f for f in model.model_fields.values() if f.alias == part)
        model = part_of(field)
    return field


def value_at(path: str) -> Any:
    node: Any = BASE
    for part in path.split("."):
        if part not in node:
            return field_at(path).get_default(call_default_factory=True)
        node = node[part]
    return node


def other_value(path: str) -> Any:
    field, present, name = field_at(path), value_at(path), path.rpartition(".")[2]
    for known in (path, name):
        if known in OTHER:
            return OTHER[known]
    kinds = [field.annotation, *get_args(field.annotation)]
    choices = next((get_args(k) for k in kinds if get_origin(k) is Literal), None)
    if choices:
        return next(choice for choice in choices if choice != present)
    if bool in kinds:
        return not present
    bounds = [*field.metadata, *(m for k in kinds for m in getattr(k, "__metadata__", ()))]
    if int in kinds or any(int in get_args(k) for k in kinds):
        found = {type(b): b for k in bounds for b in (getattr(k, "metadata", None) or [k])}
        low = found[Ge].ge if Ge in found else 0
        high = found[Le].le if Le in found else low + 2
        return next(n for n in ((present or low) + 1, low, high) if n != present and low <= n <= high)
    return "another"


def effect(path: str) -> dict[str, Any]:
    """What the plan does about a change of this field alone."""
    base = BASE
    for other, value in BESIDE.get(path, {}).items():
        base = with_value(base, other, value)
    before, after = planned(base), planned(with_value(base, path, other_value(path)))
    if before[0] != after[0]:
        return {"revision": "new"}
    both = sorted(before[1].keys() & after[1].keys())
    found = {
        "replaces": [c for c in both if inputs(before[1][c]) != inputs(after[1][c])],
        "templates": [c for c in both if before[1][c] != after[1][c]],
        "live": [
            c
            for c in both
            if before[2].get(c) != after[2].get(c) and inputs(before[1][c]) == inputs(after[1][c])
        ],
    }
    # A template that changes without its inputs would reach only pods that start later, and the change would be lost on the others.
    assert found["replaces"] == found.pop("templates"), path
    return {what: components for what, components in found.items() if components}


def inputs(template: dict[str, Any]) -> str:
    return template["metadata"]["annotations"][INPUTS_ANNOTATION]


@pytest.mark.parametrize("path", PATHS)
def test_a_change_of_a_field_replaces_only_the_pods_that_read_it(path: str):
    expected = yaml.safe_load(EFFECTS_FILE.read_text())
    assert declared(path) is not None, f"spec.{path} has no entry in mmd_api/readers.py: say who reads it"
    assert path in expected, f"spec.{path} has no entry in {EFFECTS_FILE.name}"
    assert effect(path) == expected[path]


def test_prefill_pods_that_have_towers_read_what_encoder_pods_do():
    without, small = (planned(with_value(BASE, "prefill.localEncodeTokens", n)) for n in (0, 64))
    readers = [json.loads(files["prefill"])["readers"] for _, _, files in (without, small)]
    assert readers == [["prefill"], ["encode", "prefill"]]
    assert without[0] == small[0], "the revision stays: pods with a tower and without may pair"


def test_the_table_names_no_field_that_does_not_exist():
    parts = {path.rpartition(".")[0] + ".*" for path in PATHS} | {
        f"{'.'.join(path.split('.')[:2])}.*" for path in PATHS
    }
    assert EFFECTS.keys() <= {*PATHS, *parts}
    assert yaml.safe_load(EFFECTS_FILE.read_text()).keys() == set(PATHS)


def test_the_reference_states_for_every_field_what_a_change_does():
    documented, everything = changes_in_the_reference(), {"gateway", "nats", "encoder", "prefill", "decode"}
    for path, found in yaml.safe_load(EFFECTS_FILE.read_text()).items():
        cell = documented[path]
        if found.get("revision"):
            assert cell == "new revision", path
            continue
        replaced, _, running = cell.removeprefix("replaces ").partition("; no restart of ")
        names = {"no restart": set(), "its pods": {path.partition(".")[0]}, "all pods": everything}
        named = names[replaced] if replaced in names else set(replaced.split(", "))
        assert named == set(found.get("replaces", ())), path
        if replaced != "no restart":
            assert set(filter(None, running.split(", "))) == set(found.get("live", ())), path


def test_no_field_is_immutable_as_the_reference_states():
    assert "No\n  field is immutable" in REFERENCE_FILE.read_text()
    assert "oldSelf" not in crd_yaml()


def changes_in_the_reference() -> dict[str, str]:
    """The column "change" of the committed page, by path below `spec`."""
    found, owners = dict[str, str](), list[str]()
    for line in REFERENCE_FILE.read_text().splitlines():
        if line.startswith("## "):
            owners = [o for o in line[3:].split(", ") if o.partition(".")[0] == "spec"]
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            for owner in owners:
                found[f"{owner}.{cells[0].strip('` ')}".removeprefix("spec.")] = cells[3]
    return found


@pytest.mark.parametrize(
    "path",
    [
        "gateway.webPage",
        "slo.ttftMilliseconds",
        "slo.percentile",
        "observability.logLevel",
        "gateway.maxRetries",
    ],
)
def test_what_may_change_at_runtime_replaces_no_pod(path: str):
    assert "gateway" in effect(path)["live"]
    assert "replaces" not in effect(path)


if __name__ == "__main__":
    sys.stdout.write(yaml.safe_dump({path: effect(path) for path in PATHS}, sort_keys=False, width=120))
