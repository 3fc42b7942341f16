"""VideoLLaMA 3: its processor drops tokens where nothing moves, so that their number depends on pixels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mmd_workers.model.adapters.packed import PackedAdapter
from mmd_workers.model.inputs import MediaInputs, Processed


class VideoLlama3Adapter(PackedAdapter):
    """Keeps every token of a video, as the processor does with `use_token_compression` off.

    So their number is known without pixels.
    """

    def prepare_processor(self, processor: Any, folder: Path) -> Any:
        """Turn off the compression."""
        del folder
        processor.video_processor.use_token_compression = False
        return processor

    def video(
        self,
        inputs: MediaInputs,
        frames: torch.Tensor,
        indices: list[int],
        fps: float,
        num_frames: int,
        size: Mapping[str, int] | None = None,
    ) -> Processed:
        """Process a video to each frame's time and tokens.

        The processor counts the tokens in a mask, which has no data if only shapes are processed.
        """
        result = super().video(inputs, frames, indices, fps, num_frames, size)
        outputs = {name: value for name, value in result.outputs.items() if name != "video_compression_mask"}
        _, rows, columns = outputs["video_grid_thw"][0].tolist()
        tokens = rows * columns // int(outputs["video_merge_sizes"][0]) ** 2
        token = inputs.processor.video_token
        times = result.replacement.replace(token, "").split(",")
        return Processed(",".join(time + token * tokens for time in times), outputs)
