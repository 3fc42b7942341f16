"""The deployment that tests on a cluster begin with: every pool, no GPU."""

from __future__ import annotations

from typing import Any

from mmd_api.resource import API_VERSION, KIND, MultimodalDeployment

SPEC: dict[str, Any] = {
    "model": {"id": "builtin/demo", "dtype": "Float32"},
    "encoder": {"gpus": 0},
    "prefill": {"gpus": 0},
    "decode": {"gpus": 0, "replicas": 2},
    "transfer": {"kv": {"backend": "Gloo"}},
}
ANOTHER_MODEL = {"model": {"id": "builtin/demo", "dtype": "BFloat16"}}
"""A change that makes another pipeline revision."""
FIRST_MODEL = {"model": SPEC["model"]}


def deployment(spec: dict[str, Any], name: str = "demo") -> MultimodalDeployment:
    return MultimodalDeployment.parse(
        {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
    )
