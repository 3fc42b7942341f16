"""Towers that read packed patches with a grid for each medium: Qwen's vision models, and models built like them."""

from __future__ import annotations

from mmd_api.contract.pools import Modality
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.runs import Patches, TowerRun

RUNS: dict[str, TowerRun] = {
    "image": Patches("pixel_values", "image_grid_thw"),
    "video": Patches("pixel_values_videos", "video_grid_thw"),
}


class PackedAdapter(Adapter):
    """Attention is within a frame: pictures of any size may share a run, and frames of a video need not share one."""

    def tower_run(self, modality: Modality) -> TowerRun:
        """Media are joined and divided by their grids."""
        return RUNS.get(modality) or super().tower_run(modality)
