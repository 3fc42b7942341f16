"""The MultimodalPool: one for each pool of a MultimodalDeployment, so that its size can be read and set through a `scale` subresource.

The operator creates it; people and autoscalers write its `spec.replicas` where the pool's autoscaling has mode External.
"""

from __future__ import annotations

from typing import Annotated, Any

import yaml
from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.crd import custom_resource, structural_schema
from mmd_api.resource import VERSION

POOL_KIND = "MultimodalPool"
POOL_PLURAL = "multimodalpools"
POOL_SHORT_NAME = "mmp"
MAX_SELECTOR_CHARACTERS = 1024

_COLUMNS = (
    ("Desired", "integer", ".spec.replicas"),
    ("Replicas", "integer", ".status.replicas"),
    ("Ready", "integer", ".status.readyReplicas"),
    ("Age", "date", ".metadata.creationTimestamp"),
)


class MultimodalPoolSpec(ApiModel):
    """Desired size of the pool."""

    replicas: Annotated[int, Field(ge=0, le=1000)]
    """Number of replicas. Followed within minReplicas, maxReplicas and gpuBudget where the pool's autoscaling has mode External; else set by
    the operator."""


class MultimodalPoolStatus(ApiModel):
    """Observed size of the pool."""

    replicas: Annotated[int, Field(ge=0)] = 0
    """Number of replicas of the revision that serves."""
    ready_replicas: Annotated[int, Field(ge=0)] = 0
    """Number of Ready replicas of the revision that serves."""
    selector: Annotated[str, Field(max_length=MAX_SELECTOR_CHARACTERS)] = ""
    """Label selector of the pool's pods, one for each replica."""


class MultimodalPool(ApiModel):
    """Size of one pool of a MultimodalDeployment. Created by the operator."""

    spec: MultimodalPoolSpec
    status: MultimodalPoolStatus | None = None


def pool_name(deployment: str, pool: str) -> str:
    """Name of the MultimodalPool of a deployment's pool."""
    return f"{deployment}-{pool}"


def pool_definition() -> dict[str, Any]:
    """The CustomResourceDefinition, as `kubectl apply` takes it."""
    schema = structural_schema(MultimodalPool)
    schema["properties"] |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [{"name": n, "type": t, "jsonPath": p} for n, t, p in _COLUMNS],
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "schema": {"openAPIV3Schema": schema},
    }
    return custom_resource(POOL_KIND, POOL_PLURAL, POOL_SHORT_NAME, version)


def pool_crd_yaml() -> str:
    """The definition as the committed file holds it."""
    text = yaml.safe_dump(pool_definition(), sort_keys=False, width=110)
    return f"# Generated from crds/mmd_api by `make crds`. Edit the models, not this file.\n{text}"
