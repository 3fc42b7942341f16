"""The status of a MultimodalDeployment: what the operator observed, and the reasons for its decisions.

Conditions are keyed by type; numbers with fractions are milli integers, as everywhere in the resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from mmd_api.base import ApiModel
from mmd_api.contract.pools import MODALITIES
from mmd_api.spec.adapters import MAX_ADAPTERS
from mmd_api.spec.fields import keyed_by

ConditionType = Literal[
    "Ready",
    "Progressing",
    "Degraded",
    "Stalled",
    "EncoderReady",
    "PrefillReady",
    "DecodeReady",
    "ScalingActive",
    "ScalingLimited",
    "MetricsFresh",
    "RouteAccepted",
    "AuthenticationRequired",
    "WeightsCached",
]
ByteCount = Annotated[int, Field(ge=0, le=10**18)]
Count = Annotated[int, Field(ge=0, le=100_000)]
Revision = Annotated[str, Field(max_length=10, pattern=r"^[0-9a-f]{10}$")]
Commit = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9._-]+$")]
Reason = Annotated[str, Field(max_length=128, pattern=r"^[A-Z][A-Za-z0-9]*$")]
Text = Annotated[str, Field(max_length=1024)]
RuleName = Annotated[str, Field(max_length=64, pattern=r"^[a-z][a-z0-9_]*$")]


class Condition(ApiModel):
    """Condition of the deployment."""

    type: ConditionType
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Status of the condition."""
    observed_generation: Annotated[int, Field(ge=0)]
    """Generation of the spec that the condition was derived from."""
    last_transition_time: AwareDatetime
    """Time of the last change of status."""
    reason: Reason
    """Machine-readable reason for the last transition, in CamelCase."""
    message: Text = ""
    """Human-readable details, with the remedy if there is a problem."""


class RuleEffect(ApiModel):
    """Effect of a rule of the autoscaler on a decision."""

    rule: RuleName
    """Name of the rule."""
    limit: Reason | None = None
    """Limit that the rule imposed."""
    message: Text = ""
    """What the rule does, with the numbers of this decision."""


class StepEffect(ApiModel):
    """Effect of a step of the rollout."""

    step: RuleName
    """Name of the step."""
    message: Text = ""
    """What the step does, with the objects or numbers of this pass."""


class ScalingDecision(ApiModel):
    """Decision about the size of a pool, with the metric and the rules that caused it."""

    time: AwareDatetime
    """Time of the decision."""
    from_replicas: Count
    """Number of replicas before the decision."""
    to_replicas: Count
    """Number of replicas after the decision."""
    reason: Reason
    """Machine-readable reason, in CamelCase."""
    metric: Annotated[str, Field(max_length=64)] | None = None
    """Metric that caused the decision."""
    observed_milli: Annotated[int, Field(ge=0)] | None = None
    """Observed value of the metric, in thousandths."""
    target_milli: Annotated[int, Field(ge=0)] | None = None
    """Target value of the metric, in thousandths."""
    limited_by: Reason | None = None
    """Limit that applied to the decision."""
    message: Text = ""
    """Human-readable explanation."""
    effects: Annotated[list[RuleEffect], Field(max_length=32)] = []
    """Effects of rules on the decision, in the order in which the rules applied."""


LARGEST_MILLI = 10**15
PerSecondMilli = Annotated[int, Field(ge=1, le=LARGEST_MILLI)]


class PoolThroughput(ApiModel):
    """Measured throughput per replica, in thousandths per second. Kinds of work not measured yet are absent.

    Persisted so that a restarted operator knows it before the pods have work again.
    """

    time: AwareDatetime
    """Time of the measurement. Changes of less than 10 % are not recorded."""
    image_milli: PerSecondMilli | None = None
    """Encoded image patches."""
    video_milli: PerSecondMilli | None = None
    """Encoded video patches."""
    audio_milli: PerSecondMilli | None = None
    """Encoded audio frames."""
    tokens_milli: PerSecondMilli | None = None
    """Prefilled prompt tokens."""

    @classmethod
    def of(cls, rates: Mapping[str, float], time: datetime) -> PoolThroughput:
        """Throughput from rates per second by kind (image, video, audio, tokens).

        Other kinds are left out.
        """
        measured = {kind: rates[kind] for kind in _KINDS if rates.get(kind, 0.0) >= 0.001}
        milli = {f"{kind}_milli": min(LARGEST_MILLI, round(1000 * rate)) for kind, rate in measured.items()}
        return cls(time=time, **milli)

    @property
    def rates(self) -> dict[str, float]:
        """Rates per second, by kind."""
        milli_by_kind = {kind: getattr(self, f"{kind}_milli") for kind in _KINDS}
        return {kind: milli / 1000 for kind, milli in milli_by_kind.items() if milli is not None}


_KINDS = (*MODALITIES, "tokens")


class PoolStatus(ApiModel):
    """Observed state of a pool over all its revisions."""

    desired: Count = 0
    """Desired number of pods."""
    ready: Count = 0
    """Number of pods that accept requests."""
    draining: Count = 0
    """Number of pods that are draining."""
    revision: Revision | None = None
    """Pipeline revision that accepts new requests."""
    last_decision: ScalingDecision | None = None
    """Scaling decision that holds now. Updated when its sizes, reason, metric or rules change, not with each number."""
    last_change: ScalingDecision | None = None
    """Last scaling decision that changed the size of the pool."""
    throughput: PoolThroughput | None = None
    """Measured throughput per replica."""


class PoolsStatus(ApiModel):
    """Observed state of the pools in the spec."""

    encoder: PoolStatus | None = None
    """Observed state of the encoder pool."""
    prefill: PoolStatus | None = None
    """Observed state of the prefill pool."""
    decode: PoolStatus | None = None
    """Observed state of the decode pool."""

    @property
    def summary(self) -> str:
        """Ready and desired pods at a glance, without omitted pools: `E 1/2 P 1/1 D 4/4`."""
        entries = (("E", self.encoder), ("P", self.prefill), ("D", self.decode))
        return " ".join(f"{letter} {p.ready}/{p.desired}" for letter, p in entries if p is not None)


def _is_empty(values: list[object]) -> bool:
    return not values


class PinnedAdapter(ApiModel):
    """Commit of an adapter's hub repository."""

    name: Annotated[str, Field(max_length=256)]
    """Name of the adapter."""
    commit: Commit
    """Commit of its hub repository."""


class PinnedRevision(ApiModel):
    """What a pipeline revision consists of, as reported by its first Ready pod. Pods that run anything else exit."""

    revision: Revision
    """Pipeline revision."""
    identity: Revision
    """Digest of code and weights."""
    commit: Commit | None = None
    """Commit of the model's hub repository. Not set for a model loaded from a folder."""
    adapters: Annotated[
        list[PinnedAdapter],
        Field(
            max_length=MAX_ADAPTERS,
            json_schema_extra=keyed_by("name"),
            exclude_if=_is_empty,  # pods and operators of the previous release do not know the field
        ),
    ] = Field(default_factory=list)  # no default in the schema: the API server would write it
    """Commits of the adapters from the hub."""
    image: Annotated[str, Field(max_length=1024)] | None = None
    """Digest reference of the worker image, as reported by the node."""


class RolloutProgress(ApiModel):
    """Progress of a spec's pods until all are Ready for the first time."""

    spec: Revision
    """Digest of what pods read of the spec."""
    revision: Revision
    """Its pipeline revision, which may change with the operator, too."""
    since: AwareDatetime | None = None
    """Time of the last progress. Not set while the rollout waits for GPUs or old pods, or is paused or complete."""
    scheduled: Count = 0
    """Highest number of new pods that had a node."""
    ready: Count = 0
    """Highest number of new pods that were Ready."""
    complete: bool = False
    """Whether all pods have been Ready."""


class RolledBack(ApiModel):
    """Rollout that failed and was undone, without a change of the spec."""

    generation: Annotated[int, Field(ge=0)]
    """Generation of the spec that failed. Another one is rolled out."""
    from_revision: Revision
    """Pipeline revision that failed."""
    to_revision: Revision
    """Pipeline revision that serves."""
    spec: Revision
    """Digest of the recorded spec that is in effect."""
    history_revision: Annotated[int, Field(ge=1)]
    """Its number in `mmd rollout history`."""
    time: AwareDatetime
    """Time of the return."""
    reason: Reason
    """Machine-readable reason, in CamelCase."""
    message: Text = ""
    """Why the rollout failed, and the remedy."""


class WeightsStatus(ApiModel):
    """Download of the model's weights to the cache."""

    claim: Annotated[str, Field(max_length=253)]
    """Name of the PersistentVolumeClaim."""
    job: Annotated[str, Field(max_length=253)]
    """Name of the Job."""
    state: Literal["Pending", "Waiting", "Downloading", "Complete", "Failed"]
    """State of the download. Pending until a pod of the Job runs; Waiting for the list of files, or for another download of the same files."""
    bytes: ByteCount | None = None
    """Number of bytes in the cache."""
    total_bytes: ByteCount | None = None
    """Number of bytes of all files."""
    bytes_per_second: ByteCount | None = None
    """Bytes downloaded per second, over the last 20 s."""
    remaining_seconds: Annotated[int, Field(ge=0, le=10**9)] | None = None
    """Estimated time to the end of the download, in seconds."""


class ModelStatus(ApiModel):
    """Observed state of the model."""

    weights: WeightsStatus | None = None
    """Download of the model's weights to the cache. Only with spec.model.storage.cache."""


class MultimodalDeploymentStatus(ApiModel):
    """Most recently observed state of the deployment."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Most recent generation of the spec that was reconciled."""
    pipeline_revision: Revision | None = None
    """Pipeline revision that accepts new requests."""
    pinned: Annotated[
        list[PinnedRevision],
        Field(
            max_length=8,
            json_schema_extra=keyed_by("revision"),
        ),
    ] = []
    """Code, model commit and image of each pipeline revision."""
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            json_schema_extra=keyed_by("type"),
        ),
    ] = []
    """Conditions of the deployment, keyed by type."""
    model: ModelStatus | None = None
    """Observed state of the model."""
    pools: PoolsStatus = PoolsStatus()
    """Observed state of each pool."""
    pools_summary: Annotated[str, Field(max_length=64)] = ""
    """Ready and desired pods of each pool, for the printer column."""
    bottleneck: Literal["Encoder", "Prefill", "Decode", "None"] | None = None
    """Pool that delays requests the most."""
    rollout: Annotated[list[StepEffect], Field(max_length=16)] = []
    """Effects of steps of the rollout in the last pass, in the order in which the steps applied."""
    rollout_progress: RolloutProgress | None = None
    """Progress of the spec's pods until all are Ready for the first time."""
    rolled_back: RolledBack | None = None
    """Rollout that failed and was undone. Not set while the spec is in effect."""
    endpoint: Annotated[str, Field(max_length=512)] | None = None
    """URL of the gateway inside the cluster."""

    def condition(self, condition_type: ConditionType) -> Condition | None:
        """The condition of a type, if it was ever set."""
        return next((c for c in self.conditions if c.type == condition_type), None)
