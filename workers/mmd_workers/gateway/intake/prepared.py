"""What a validated request becomes: its exact prompt, its features and its sampling. Independent of HTTP and of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmd_api.contract.sampling import Guidance
from mmd_workers.gateway.intake.fallback import Fallback
from mmd_workers.gateway.output.call_parser import CallParser
from mmd_workers.gateway.output.reasoning_parser import ReasoningParser
from mmd_workers.media.identity import feature_id
from mmd_workers.media.medium import MediumInfo
from mmd_workers.model.prompt import PromptLayout
from mmd_workers.wire.messages.message_parts import FeatureRef, Sampling


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that may be placed: the exact prompt, its features, and its sampling.

    `new_parser`: creates the parser of tool calls; None if the answer can have none. `new_reasoning`: creates the parser of reasoning.
    `fallback`: if given, a medium that cannot be encoded need not end the request.
    """

    layout: PromptLayout
    features: list[FeatureRef]
    sampling: Sampling
    new_parser: Callable[[], CallParser] | None = None
    new_reasoning: Callable[[], ReasoningParser] | None = None
    fallback: Fallback[Prepared] | None = None
    guidance: Guidance | None = None

    @property
    def companion_tokens(self) -> int:
        """Tokens of the companion's prompt; 0 if there is no companion."""
        return 0 if self.guidance is None else len(self.guidance.token_ids)


def feature_refs(infos: Sequence[MediumInfo], layout: PromptLayout, revision: str) -> list[FeatureRef]:
    """References to the features of a prompt. `revision`: of the pipeline, which is part of a feature's id."""
    pairs = zip(infos, layout.media, strict=True)
    return [_feature_ref(info, medium, revision) for info, medium in pairs]


def _feature_ref(info: MediumInfo, medium: Any, revision: str) -> FeatureRef:
    """A reference to the feature of a medium. `medium`: its layout in the prompt."""
    sampling = asdict(medium.sampling)
    size = sampling.pop("size")
    if not sampling["nominal_indices"]:
        del sampling["nominal_indices"]
    if medium.sampling.pooled_frames == 1:
        del sampling["pooled_frames"]
    if not info.page:
        del sampling["page"]
    if not info.of_video:
        del sampling["of_video"]
    settings = {**sampling, "modality": info.modality} | ({"size": size} if size else {})
    return FeatureRef(
        feature_id=feature_id(info.digest, revision, settings),
        digest=info.digest,
        modality=medium.modality,
        num_bytes=info.num_bytes,
        num_tokens=medium.num_tokens,
        ranges=[list(span) for span in medium.ranges],
        geometry=medium.geometry,
        sampling=sampling,
        work=medium.work,
        host_bytes=medium.host_bytes,
        size=size,
    )


def ids_of(features: Sequence[FeatureRef]) -> list[str]:
    """The ids of these features, in order."""
    return [feature.feature_id for feature in features]
