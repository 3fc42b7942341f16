"""Limits the tiles into which a processor cuts an image, if a deployment allows fewer than its checkpoint."""

from __future__ import annotations

import math
from typing import Any

from mmd_api.contract.errors import UnsupportedModelError

FIELD = "spec.model.maxImageTiles"


def bound_tiles(processor: Any, most: int) -> None:
    """Let a processor cut an image into at most `most` tiles, not counting an overview of the whole image.

    Raises:
        UnsupportedModelError: it cuts no images, or always into more tiles; the message names the field and the remedy.
    """
    images = (
        processor.image_processor if processor is not None and hasattr(processor, "image_processor") else None
    )
    if images is not None and getattr(images, "image_grid_pinpoints", None):
        _bound_grids(images, most)
    elif images is not None and getattr(images, "max_patches", None):
        images.max_patches = min(images.max_patches, most)
        images.min_patches = min(getattr(images, "min_patches", 1), most)
    elif images is not None and getattr(images, "do_image_splitting", False) and images.max_image_size:
        side = images.max_image_size["longest_edge"]
        images.size = {"longest_edge": min(images.size["longest_edge"], side * math.isqrt(most))}
    else:
        raise UnsupportedModelError(
            f"{FIELD}: this model's processor does not cut images into a number of tiles that can be bounded; remove it"
        )


def _bound_grids(images: Any, most: int) -> None:
    """Limit a processor that chooses one of several resolutions, [height, width] in whole tiles."""
    side = min(min(grid) for grid in images.image_grid_pinpoints)
    numbers = [(height // side) * (width // side) for height, width in images.image_grid_pinpoints]
    if most < min(numbers):
        raise UnsupportedModelError(
            f"{FIELD}: {most} tiles are fewer than the {min(numbers)} that this model's processor cuts any image into; raise it or remove it"
        )
    images.image_grid_pinpoints = [
        grid for grid, number in zip(images.image_grid_pinpoints, numbers, strict=True) if number <= most
    ]


def follow_tiles(config: Any, processor: Any) -> None:
    """Give a model's configuration the resolutions of its processor, from which towers compute the tiles of an image."""
    if getattr(config, "image_grid_pinpoints", None):
        config.image_grid_pinpoints = processor.image_processor.image_grid_pinpoints
