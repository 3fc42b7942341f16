"""Earlier specs of a deployment: which specs count as the same, and how an earlier one is restored. Pure.

As with a Deployment's pod template, the history covers what pods read. Sizes, bounds and deadlines, which
only the operator reads, make no new entry and are not restored, nor are the few of them that pods read too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel

from mmd_api.readers import (
    Effect,
    canonical,
    effect_of,
    part_of,
    selected_spec,
)
from mmd_api.resource import GROUP
from mmd_api.spec.deployment import MultimodalDeploymentSpec

SPEC_LABEL = f"{GROUP}/spec"
"""Label of deployments' ControllerRevisions: digest of the recorded spec.

Those that StatefulSets make for themselves lack it.
"""
COMPLETED_ANNOTATION = f"{GROUP}/completed"
"""Annotation of the same: time at which all pods of the spec were first Ready."""
_OF_THE_PRESENT = frozenset(
    {"gateway.replicas", "prefill.startDeadlineSeconds", "decode.startDeadlineSeconds"}
)
"""Sizes and deadlines that pods read at runtime too.

Not `nats.replicas`: all pods start with the servers' addresses.
"""


def is_read_by_pods(path: str) -> bool:
    """Whether pods read the field at `path` below `spec`.

    Sizes and deadlines, which need no rollout, do not count.
    """
    return path not in _OF_THE_PRESENT and effect_of(path) != Effect()


def spec_digest(spec: MultimodalDeploymentSpec) -> str:
    """Ten hex digits of what pods read.

    Fields with their defaults do not count, so that the digest outlives releases that only add fields.
    """
    fields = selected_spec(spec, is_read_by_pods)
    return hashlib.sha256(canonical(fields).encode()).hexdigest()[:10]


def restored(present: Mapping[str, Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded spec with the present values of the fields that no pod reads.

    Both specs are as the API server holds them.
    """
    return _restored(present, recorded, MultimodalDeploymentSpec, "")


def _restored(
    present: Mapping[str, Any], recorded: Mapping[str, Any], model: type[BaseModel], prefix: str
) -> dict[str, Any]:
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    result: dict[str, Any] = {}
    for key in dict.fromkeys((*recorded, *present)):
        path, field = f"{prefix}{key}", fields.get(key)
        source = present if field is not None and not is_read_by_pods(path) else recorded
        inner = part_of(field) if field is not None and source is recorded else None
        optional = field is not None and type(None) in get_args(field.annotation)
        if inner is None or (optional and not (key in recorded and key in present)):
            if key in source:
                result[key] = source[key]
            continue
        below = _restored(present.get(key) or {}, recorded.get(key) or {}, inner, f"{path}.")
        if below or key in recorded:
            result[key] = below
    return result
