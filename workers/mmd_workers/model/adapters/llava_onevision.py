"""LLaVA-OneVision: a row closes each video."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mmd_api.contract.pools import Modality
from mmd_workers.model.adapters.tiled import LlavaNextAdapter
from mmd_workers.model.runs import Along, Inputs, TowerRun


class _Frames(Along):
    """Frames of videos, with their number in each video, and whether the last one is among them."""

    def __init__(self) -> None:
        super().__init__({"pixel_values_videos": 1}, divided=True)

    def join(self, media: Sequence[Inputs]) -> dict[str, Any]:
        """Join the frames, with their number by video and which videos end."""
        joined = super().join([{"pixel_values_videos": m["pixel_values_videos"]} for m in media])
        joined["frames"] = torch.tensor([m["pixel_values_videos"].shape[1] for m in media])
        joined["ends"] = torch.tensor(["unfinished" not in m for m in media])
        return joined

    def part_tokens(self, inputs: Inputs, num_tokens: int) -> tuple[int, ...]:
        """The last part has one more row."""
        *others, last = super().part_tokens(inputs, num_tokens - 1)
        return (*others, last + 1)

    def part(self, inputs: Inputs, first: int, last: int) -> dict[str, Any]:
        """Views of the frames, marked if more frames follow."""
        inputs_of_part = super().part(inputs, first, last)
        if last < inputs["pixel_values_videos"].shape[1]:
            inputs_of_part["unfinished"] = torch.ones(1, dtype=torch.bool)
        return inputs_of_part


class LlavaOnevisionAdapter(LlavaNextAdapter):
    """Moves the closing row to the ends of videos; transformers appends it to all frames that it is given."""

    def tower_run(self, modality: Modality) -> TowerRun:
        """Frames of any number of videos share a run."""
        return _Frames() if modality == "video" else super().tower_run(modality)

    def features(self, model: Any, modality: Modality, batch: Mapping[str, torch.Tensor]) -> Any:
        """Rows of each video."""
        output = super().features(model, modality, batch)
        if modality != "video":
            return output
        (rows,) = output.pooler_output
        frames, newline = batch["frames"].tolist(), rows[-1:]
        rows_per_frame = (rows.shape[0] - 1) // sum(frames)
        videos = rows[:-1].split([count * rows_per_frame for count in frames])
        return [
            torch.cat([video, newline]) if ends else video
            for video, ends in zip(videos, batch["ends"].tolist(), strict=True)
        ]
