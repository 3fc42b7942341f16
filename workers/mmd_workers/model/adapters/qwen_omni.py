"""Qwen omni thinkers: the processor class carries a video size that hides the checkpoint's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmd_workers.model.adapters.base import Adapter


class QwenOmniAdapter(Adapter):
    """A checkpoint that states a size for videos in processor_config.json means it; others keep the class's default."""

    def prepare_processor(self, processor: Any, folder: Path) -> Any:
        """Let a stated video size win over the class's."""
        settings = folder / "processor_config.json"
        if settings.is_file() and "size" in json.loads(settings.read_text()).get("video_processor", {}):
            processor.videos_kwargs = {k: v for k, v in type(processor).videos_kwargs.items() if k != "size"}
        return processor
