"""What a worker process reads at start: the part of the resource that its pipeline revision was planned from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from mmd_api.base import ApiModel
from mmd_api.spec import MultimodalDeploymentSpec

PoolName = Literal["encoder", "prefill", "decode"]
Role = Literal["encode", "prefill", "decode"]


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


class PipelineConfig(ApiModel):
    """Name, revision and spec of one pipeline revision, as it stands in the ConfigMap that every pod mounts."""

    namespace: str
    name: str
    revision: str
    spec: MultimodalDeploymentSpec

    @classmethod
    def load(cls, path: str | Path) -> PipelineConfig:
        """Read a JSON file that `dump` wrote."""
        return cls.model_validate(json.loads(Path(path).read_text()))

    def dump(self) -> str:
        """Canonical JSON, the same for the same content."""
        return json.dumps(self.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=True, indent=1)
