"""Between the wire's `FeatureRef` and the model's `MediumLayout`: the same facts in each room's own terms."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mmd_workers.media.types import MediumInfo
from mmd_workers.model.types import MediumLayout, SamplingPlan
from mmd_workers.wire.messages import FeatureRef


def layout_of(ref: FeatureRef) -> MediumLayout:
    """What the model must know of a medium that came over the wire."""
    return MediumLayout(
        modality=ref.modality,
        num_tokens=ref.num_tokens,
        ranges=[(start, length) for start, length in ref.ranges],
        geometry=ref.geometry,
        sampling=SamplingPlan(**ref.sampling),
        work=ref.work,
    )


def sampling_settings(layout: MediumLayout) -> dict[str, Any]:
    """The sampling settings of a medium as they go over the wire and into its feature id."""
    return asdict(layout.sampling)


def ref_of(info: MediumInfo, layout: MediumLayout, feature_id: str) -> FeatureRef:
    """The wire's form of one medium of a prompt."""
    return FeatureRef(
        feature_id=feature_id,
        digest=info.digest,
        modality=layout.modality,
        num_bytes=info.num_bytes,
        num_tokens=layout.num_tokens,
        ranges=[[start, length] for start, length in layout.ranges],
        geometry=layout.geometry,
        sampling=sampling_settings(layout),
        work=layout.work,
    )
