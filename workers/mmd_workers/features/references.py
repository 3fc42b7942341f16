"""Converts the wire's `FeatureRef` to the model's `MediumLayout`, which holds the same facts."""

from __future__ import annotations

from collections.abc import Iterable

from mmd_api.contract.errors import UnprocessableMediumError
from mmd_workers.model.prompt import MediumLayout, SamplingPlan
from mmd_workers.wire.messages.message_parts import FeatureRef


def layout_of(ref: FeatureRef) -> MediumLayout:
    """The layout of a medium that came over the wire, as the model needs it."""
    return MediumLayout(
        modality=ref.modality,
        num_tokens=ref.num_tokens,
        ranges=[(start, length) for start, length in ref.ranges],
        geometry=ref.geometry,
        sampling=SamplingPlan(**ref.sampling, size=ref.size),
        work=ref.work,
        host_bytes=ref.host_bytes,
    )


def media_spans(features: Iterable[FeatureRef]) -> list[tuple[int, int, str]]:
    """(start, length, feature id) of every run of placeholders, for the identity of KV blocks."""
    return [(start, length, ref.feature_id) for ref in features for start, length in ref.ranges]


def media_end(features: Iterable[FeatureRef]) -> int:
    """The number of leading tokens of a prompt that hold all of its media."""
    return max((start + length for ref in features for start, length in ref.ranges), default=0)


def unprocessable(ref: FeatureRef, attempts: int, error: Exception) -> UnprocessableMediumError:
    """The error that a client gets for a medium on which every encoder failed."""
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
    return UnprocessableMediumError(
        f"{attempts} encoders failed on this {ref.modality} ({ref.num_tokens} tokens, {ref.num_bytes} bytes), each processing it alone; "
        f"the last error was {reason}; send a smaller file or re-encode it"
    )
