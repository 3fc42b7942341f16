"""The ConfigMap with what every pod of a pipeline revision is told."""

from __future__ import annotations

import hashlib

from mmd_api.pipeline import PipelineConfig
from mmd_operator.resources.naming import Manifest, Scope


def config_map(scope: Scope) -> Manifest:
    """`pipeline.json` of this revision."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": scope.metadata(scope.config, of_revision=True),
        "data": {"pipeline.json": _pipeline(scope)},
    }


def config_hash(scope: Scope) -> str:
    """Short hash of the content: in a pod template it rolls the pods when they would read something else."""
    return hashlib.sha256(_pipeline(scope).encode()).hexdigest()[:16]


def _pipeline(scope: Scope) -> str:
    return PipelineConfig.of(scope.spec, scope.namespace, scope.name).dump()
