"""Pools groups of successive frames of a video into one: the mean of their features. For towers that read frames one by one.

Each frame of a group belongs to another clip. The clips are media to the processor and the tower, and the feature is the mean of
their features. So a row that belongs to no frame, such as one that closes a video, stays as it is.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mmd_api.contract.errors import UnsupportedModelError
from mmd_workers.media.choice import thinned
from mmd_workers.media.medium import Decoded, DecodedVideo
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.prompt import Feature, SamplingPlan

FIELD = "spec.model.pooledVideoFrames"


def check_pooling(adapter: Adapter, processor: Any, frames: int) -> None:
    """Refuse groups for a model that does not read their frames one by one.

    Raises:
        UnsupportedModelError: the model takes no video or merges frames itself; the message names the field and the remedy.
    """
    if frames > 1 and not (
        processor is not None
        and "video" in adapter.modalities(processor)
        and adapter.tower_run("video").reads_single_frames
    ):
        raise UnsupportedModelError(
            f"{FIELD}: this model does not read the frames of a video one by one, so that they cannot be averaged; remove it"
        )


def grouped(plan: SamplingPlan, frames: int) -> SamplingPlan:
    """The plan in whole groups. Frames beyond them are left out evenly; with fewer than one group, the last frame is repeated."""
    if frames == 1:
        return plan
    count = len(plan.frame_indices)
    places = thinned(range(count), count - count % frames) if count >= frames else list(range(count))
    places += [places[-1]] * (-len(places) % frames)
    return replace(
        plan,
        frame_indices=[plan.frame_indices[place] for place in places],
        nominal_indices=[plan.nominal_indices[place] for place in places] if plan.nominal_indices else [],
        pooled_frames=frames,
    )


def clips(medium: Decoded, plan: SamplingPlan) -> list[Decoded]:
    """The medium alone, or for a video in groups a clip of all first frames, one of all second frames, and so on."""
    if plan.pooled_frames == 1 or not isinstance(medium, DecodedVideo):
        return [medium]
    return [
        replace(
            medium,
            frames=np.ascontiguousarray(medium.frames[place :: plan.pooled_frames]),
            indices=medium.indices[place :: plan.pooled_frames],
        )
        for place in range(plan.pooled_frames)
    ]


class Mean:
    """The mean of features of one shape, computed in float32. Thread safe.

    It keeps only their sum, however many are added.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, feature: Feature) -> None:
        """Add a feature."""
        with self._lock:
            self._count += 1
            for name, tensor in feature.tensors.items():
                if self._count == 1:
                    self._sums[name] = tensor.to(torch.float32, copy=True)
                else:
                    self._sums[name] += tensor

    def of_all(self, last: Feature) -> Feature:
        """The mean of all added features and this last one, in its dtype."""
        self.add(last)
        with self._lock:
            tensors = {
                name: (self._sums[name] / self._count).to(tensor.dtype)
                for name, tensor in last.tensors.items()
            }
        return Feature(last.modality, tensors)
