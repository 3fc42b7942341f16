"""The status of a MultimodalDeployment: what the operator observed and why it decided what it did. Holds nothing it would need to act.

Conditions are keyed by type; numbers with fractions are milli integers, as everywhere in the resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
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
    """What the fact is about."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: Annotated[int, Field(ge=0)]
    """Generation of the spec it was seen at."""
    last_transition_time: AwareDatetime
    """When status last changed."""
    reason: Reason
    """One CamelCase word."""
    message: Text = ""
    """For people, with the remedy where something is wrong."""


class ScalingDecision(ApiModel):
    """The last change of a pool's size, with the metric and the numbers that drove it."""

    time: AwareDatetime
    """When."""
    from_replicas: Count
    """Size before."""
    to_replicas: Count
    """Size after."""
    reason: Reason
    """Why, in one CamelCase word."""
    metric: Annotated[str, Field(max_length=64)] | None = None
    """Signal that drove it."""
    observed_milli: Annotated[int, Field(ge=0)] | None = None
    """What the signal said, times 1000."""
    target_milli: Annotated[int, Field(ge=0)] | None = None
    """What it was aimed at, times 1000."""
    limited_by: Reason | None = None
    """What kept it from going further."""
    message: Text = ""
    """The same for people."""


LARGEST_MILLI = 10**15
PerSecondMilli = Annotated[int, Field(ge=1, le=LARGEST_MILLI)]


class PoolThroughput(ApiModel):
    """What one replica does in a second, times 1000, as its pods measured it; what none has met yet is left out.

    Kept here so that an operator that starts anew knows it before its pods have work again.
    """

    time: AwareDatetime
    """When these numbers were taken; newer ones that differ by less than a tenth are not written."""
    image_milli: PerSecondMilli | None = None
    """Encode work of images (patches)."""
    video_milli: PerSecondMilli | None = None
    """Encode work of videos (patches)."""
    audio_milli: PerSecondMilli | None = None
    """Encode work of sounds (frames)."""
    tokens_milli: PerSecondMilli | None = None
    """Prompt tokens."""

    @classmethod
    def of(cls, rates: Mapping[str, float], time: datetime) -> PoolThroughput:
        """From rates a second by kind (image, video, audio, tokens); other kinds are left out."""
        known = {kind: rates[kind] for kind in _KINDS if rates.get(kind, 0.0) >= 0.001}
        milli = {f"{kind}_milli": min(LARGEST_MILLI, round(1000 * rate)) for kind, rate in known.items()}
        return cls(time=time, **milli)

    @property
    def rates(self) -> dict[str, float]:
        """By kind, a second."""
        found = {kind: getattr(self, f"{kind}_milli") for kind in _KINDS}
        return {kind: milli / 1000 for kind, milli in found.items() if milli is not None}


_KINDS = ("image", "video", "audio", "tokens")


class PoolStatus(ApiModel):
    """Pods of one pool over all its revisions; `revision` is the one that takes new requests."""

    desired: Count = 0
    """Pods wanted."""
    ready: Count = 0
    """Pods that take work."""
    draining: Count = 0
    """Pods that finish what they hold."""
    revision: Revision | None = None
    """Pipeline revision that takes new requests."""
    last_decision: ScalingDecision | None = None
    """Last change of size."""
    throughput: PoolThroughput | None = None
    """What one replica does, as measured."""


class PoolsStatus(ApiModel):
    """One entry for each pool of the spec."""

    encoder: PoolStatus | None = None
    """Encoder pool."""
    prefill: PoolStatus | None = None
    """Prefill pool."""
    decode: PoolStatus | None = None
    """Decode pool."""

    @property
    def summary(self) -> str:
        """Ready and desired pods at a glance: `E 1/2 P 1/1 D 4/4`; a pool that is left out is left out."""
        entries = (("E", self.encoder), ("P", self.prefill), ("D", self.decode))
        return " ".join(f"{letter} {p.ready}/{p.desired}" for letter, p in entries if p is not None)


class MultimodalDeploymentStatus(ApiModel):
    """What the operator last saw. `poolsSummary` repeats `pools` in the words of the printer column."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that was last acted on."""
    pipeline_revision: Revision | None = None
    """Revision that takes new requests."""
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = []
    """Facts, keyed by type."""
    pools: PoolsStatus = PoolsStatus()
    """Each pool."""
    pools_summary: Annotated[str, Field(max_length=64)] = ""
    """Ready and desired pods, as in the printer column."""
    bottleneck: Literal["Gateway", "Encoder", "Prefill", "Decode", "Transfer", "None"] | None = None
    """What holds requests up most."""
    endpoint: Annotated[str, Field(max_length=512)] | None = None
    """Where the gateway listens."""

    def condition(self, condition_type: ConditionType) -> Condition | None:
        """The condition of a type, if it was ever set."""
        return next((c for c in self.conditions if c.type == condition_type), None)
