"""GLM-4V and its successors: the frames of a video are marked as images are, with their times between them."""

from __future__ import annotations

from mmd_api.contract.pools import Modality
from mmd_workers.model.adapters.packed import PackedAdapter


class Glm4vAdapter(PackedAdapter):
    """The configuration names a token for videos, which only the chat template uses."""

    def placeholder_id(self, modality: Modality) -> int | None:
        """The placeholder of images, for images and videos."""
        return super().placeholder_id("image" if modality == "video" else modality)
