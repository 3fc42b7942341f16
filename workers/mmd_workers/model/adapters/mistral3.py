"""Mistral 3: its projector cannot take an image that becomes a single token."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.inputs import MediaInputs, Processed


class Mistral3Adapter(Adapter):
    """Refuses an image of one token before it travels: transformers squeezes its rows away and fails.

    Images of different sizes share no run, though Pixtral could pack them: its attention computes a mask over all patches of a run, so
    that eight images together would take seven times as long.
    """

    def image(
        self, inputs: MediaInputs, pixels: torch.Tensor, size: Mapping[str, int] | None = None
    ) -> Processed:
        """Process one image.

        Raises:
            ValueError: the image becomes a single token.
        """
        result = super().image(inputs, pixels, size)
        if result.replacement.count(inputs.processor.image_token) < 2:
            raise ValueError(
                "an image this small becomes a single token, which this model's projector does not accept"
            )
        return result
