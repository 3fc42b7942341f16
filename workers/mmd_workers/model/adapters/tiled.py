"""Towers that read images as tiles of one size, and the frames of videos likewise."""

from __future__ import annotations

from mmd_api.contract.pools import Modality
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.runs import Along, Tiles, TowerRun

FRAMES = Along({"pixel_values_videos": 1}, divided=True)
MASKED = {"pixel_values": 1, "pixel_attention_mask": 1}


class FramesAdapter(Adapter):
    """Images of one size, and frames that the tower reads one by one."""

    def tower_run(self, modality: Modality) -> TowerRun:
        """Videos of different lengths share a run, and a video may run in parts."""
        return FRAMES if modality == "video" else super().tower_run(modality)


class InternVlAdapter(FramesAdapter):
    """InternVL: an image is [tiles, channels, height, width]."""

    def tower_run(self, modality: Modality) -> TowerRun:
        """Images with any number of tiles share a run."""
        return Along({"pixel_values": 0}) if modality == "image" else super().tower_run(modality)


class LlavaNextAdapter(FramesAdapter):
    """LLaVA-NeXT: an image is [1, tiles, channels, height, width], and its size determines the number of tiles."""

    def tower_run(self, modality: Modality) -> TowerRun:
        """Images with any number of tiles share a run."""
        return Tiles("pixel_values") if modality == "image" else super().tower_run(modality)


class IdeficsAdapter(Adapter):
    """Idefics 3 and SmolVLM: an image or a video is [1, tiles or frames, channels, height, width] with a mask of its pixels."""

    def tower_run(self, modality: Modality) -> TowerRun:
        """Media with any number of tiles or frames share a run."""
        return Along(MASKED, divided=modality == "video")
