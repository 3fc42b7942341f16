"""The status of a MultimodalDeployment: what the operator observed and why it decided what it did. Holds nothing it would need to act.

Conditions are keyed by type; numbers with fractions are milli integers, as everywhere in the resource.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from mmd_api.base import ApiModel

ConditionType = Literal[
    "Ready",
    "Progressing",
    "Degraded",
    "EncoderReady",
    "PrefillReady",
    "DecodeReady",
    "ScalingActive",
    "ScalingLimited",
    "MetricsFresh",
    "TransferHealthy",
]
Count = Annotated[int, Field(ge=0, le=100_000)]
Revision = Annotated[str, Field(max_length=10, pattern=r"^[0-9a-f]{10}$")]
Reason = Annotated[str, Field(max_length=128, pattern=r"^[A-Z][A-Za-z0-9]*$")]
Text = Annotated[str, Field(max_length=1024)]


class Condition(ApiModel):
    """One fact about the deployment, true at `observedGeneration`."""

    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    observed_generation: Annotated[int, Field(ge=0)]
    last_transition_time: AwareDatetime
    reason: Reason
    message: Text = ""


class ScalingDecision(ApiModel):
    """The last change of a pool's size, with the metric and the numbers that drove it."""

    time: AwareDatetime
    from_replicas: Count
    to_replicas: Count
    reason: Reason
    metric: Annotated[str, Field(max_length=64)] | None = None
    observed_milli: Annotated[int, Field(ge=0)] | None = None
    target_milli: Annotated[int, Field(ge=0)] | None = None
    limited_by: Reason | None = None
    message: Text = ""


class PoolStatus(ApiModel):
    """Pods of one pool over all its revisions; `revision` is the one that takes new requests."""

    desired: Count = 0
    ready: Count = 0
    draining: Count = 0
    revision: Revision | None = None
    last_decision: ScalingDecision | None = None


class PoolsStatus(ApiModel):
    """One entry for each pool of the spec."""

    encoder: PoolStatus | None = None
    prefill: PoolStatus | None = None
    decode: PoolStatus | None = None

    @property
    def summary(self) -> str:
        """Ready and desired pods at a glance: `E 1/2 P 1/1 D 4/4`; a pool that is left out is left out."""
        entries = (("E", self.encoder), ("P", self.prefill), ("D", self.decode))
        return " ".join(f"{letter} {p.ready}/{p.desired}" for letter, p in entries if p is not None)


class MultimodalDeploymentStatus(ApiModel):
    """What the operator last saw. `poolsSummary` repeats `pools` in the words of the printer column."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    pipeline_revision: Revision | None = None
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = []
    pools: PoolsStatus = PoolsStatus()
    pools_summary: Annotated[str, Field(max_length=64)] = ""
    bottleneck: Literal["Gateway", "Encoder", "Prefill", "Decode", "Transfer", "None"] | None = None
    endpoint: Annotated[str, Field(max_length=512)] | None = None

    def condition(self, condition_type: ConditionType) -> Condition | None:
        """The condition of a type, if it was ever set."""
        return next((c for c in self.conditions if c.type == condition_type), None)
