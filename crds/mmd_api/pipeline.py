"""What a worker process reads at start: the part of the resource that its pipeline revision was planned from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from mmd_api.base import ApiModel
from mmd_api.pools import POOL_NAMES, PoolName, Role
from mmd_api.spec import GatewaySpec, ImageSpec, MultimodalDeploymentSpec, NatsSpec, Pool

__all__ = [
    "WIRE_VERSION",
    "PipelineConfig",
    "PoolName",
    "Role",
    "pipeline_revision",
    "roles_of",
    "worker_view",
]

WIRE_VERSION = 1
"""Version of the messages and tensors between pods: raise it when peers of before and after must not talk."""


def roles_of(spec: MultimodalDeploymentSpec, pool: PoolName) -> tuple[Role, ...]:
    """Roles that pods of a pool hold, upstream first: a pool that is left out is served by the next one downstream."""
    if pool == "encoder":
        return ("encode",)
    roles: list[Role] = []
    if spec.encoder is None and (pool == "prefill" or spec.prefill is None):
        roles.append("encode")
    if pool == "prefill":
        return (*roles, "prefill")
    if spec.prefill is None:
        roles.append("prefill")
    return (*roles, "decode")


def pipeline_revision(spec: MultimodalDeploymentSpec) -> str:
    """Ten hex digits that name the meaning of this pipeline's embeddings and KV blocks.

    Covers the weights and where they come from, their dtype, how video is sampled, the KV block layout and wire precision, the
    worker image (its processors and adapters) and `WIRE_VERSION`. Sizes, limits, timeouts, placement and scaling leave it
    unchanged: pods that differ in those may pair.
    """
    video = spec.gateway.media.video
    meaning = {
        "model": [spec.model.id, spec.model.revision, spec.model.dtype],
        "storage": [spec.model.storage.type, spec.model.storage.claim_name, spec.model.storage.sub_path],
        "video": [video.max_frames, video.frames_per_second_milli],
        "kv": [spec.decode.kv_block_tokens, spec.decode.kv_dtype, spec.transfer.kv.wire_precision],
        "image": spec.image.worker,
        "wire": WIRE_VERSION,
    }
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:10]


def worker_view(spec: MultimodalDeploymentSpec) -> MultimodalDeploymentSpec:
    """The spec without what only the operator reads (sizes, placement, bus, budget), so that changing those restarts no pod."""
    changes: dict[str, object] = {
        "image": ImageSpec(worker=spec.image.worker),
        "gateway": _without_placement(spec.gateway, GatewaySpec()),
        "nats": NatsSpec(),
        "gpu_budget": None,
        "paused": False,
    }
    for name in POOL_NAMES:
        pool: Pool | None = getattr(spec, name)
        if pool is not None:
            changes[name] = _without_placement(pool, Pool())
    return spec.model_copy(update=changes)


def _without_placement(part: GatewaySpec | Pool, plain: GatewaySpec | Pool) -> GatewaySpec | Pool:
    kept = ("replicas", "autoscaling", "resources", "node_selector", "tolerations", "template")
    return part.model_copy(update={f: getattr(plain, f) for f in kept if f in type(plain).model_fields})


class PipelineConfig(ApiModel):
    """Name, revision and spec of one pipeline revision, as it stands in the ConfigMap that every pod mounts."""

    namespace: str
    name: str
    revision: str
    spec: MultimodalDeploymentSpec

    @classmethod
    def of(cls, spec: MultimodalDeploymentSpec, namespace: str, name: str) -> PipelineConfig:
        """What the workers of a deployment are told."""
        return cls(namespace=namespace, name=name, revision=pipeline_revision(spec), spec=worker_view(spec))

    @classmethod
    def load(cls, path: str | Path) -> PipelineConfig:
        """Read a JSON file that `dump` wrote."""
        return cls.model_validate(json.loads(Path(path).read_text()))

    def dump(self) -> str:
        """Canonical JSON, the same for the same content."""
        return json.dumps(
            self.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=True, indent=1
        )
