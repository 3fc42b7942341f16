"""Qwen omni thinkers: the processor class carries a video size that hides the checkpoint's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.inputs import MediaInputs, Processed


class QwenOmniAdapter(Adapter):
    """A checkpoint that states a size for videos in processor_config.json means it; others keep the class's default."""

    def prepare_processor(self, processor: Any, folder: Path) -> Any:
        """Let a stated video size win over the class's."""
        settings = folder / "processor_config.json"
        if settings.is_file() and "size" in json.loads(settings.read_text()).get("video_processor", {}):
            processor.videos_kwargs = {k: v for k, v in type(processor).videos_kwargs.items() if k != "size"}
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
