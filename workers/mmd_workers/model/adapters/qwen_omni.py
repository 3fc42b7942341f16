"""Qwen omni thinkers: the processor class carries a video size that hides the checkpoint's own, and cuts sounds off."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.inputs import MediaInputs, Processed
from mmd_workers.model.prompt import MediumLayout


class QwenOmniAdapter(Adapter):
    """A video size that a checkpoint sets in processor_config.json overrides the class's default.

    The tower reads sound in windows, however long it is: the processor need not cut it off.
    """

    def prepare_processor(self, processor: Any, folder: Path) -> Any:
        """Let a stated video size win over the class's."""
        settings = folder / "processor_config.json"
        if settings.is_file() and "size" in json.loads(settings.read_text()).get("video_processor", {}):
            processor.videos_kwargs = {k: v for k, v in type(processor).videos_kwargs.items() if k != "size"}
        processor.audio_kwargs = {**type(processor).audio_kwargs, "truncation": False}
        return processor


class Qwen3OmniAdapter(QwenOmniAdapter):
    """Its `get_rope_index` gives a video fractions of positions; the seconds per grid are rounded so that it gives whole ones."""

    def video(
        self, inputs: MediaInputs, frames: torch.Tensor, indices: list[int], fps: float, num_frames: int
    ) -> Processed:
        """Process the sampled frames of one video."""
        made = super().video(inputs, frames, indices, fps, num_frames)
        per_second = self.config.position_id_per_seconds
        seconds = [max(1, round(s * per_second)) / per_second for s in made.outputs["video_second_per_grid"]]
        return Processed(made.replacement, made.outputs | {"video_second_per_grid": seconds})

    def unsplit_inputs(
        self, processor: Any, given: Mapping[str, Any], media: Sequence[MediumLayout]
    ) -> dict[str, Any]:
        """With the same whole positions as `video` gives them."""
        made = super().unsplit_inputs(processor, given, media)
        if seconds := [m.geometry["video_second_per_grid"] for m in media if m.modality == "video"]:
            made["video_second_per_grid"] = torch.tensor(seconds).flatten()
        return made
