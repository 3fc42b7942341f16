"""Mistral 3: its projector cannot take an image that becomes a single token."""

from __future__ import annotations

import torch

from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.inputs import MediaInputs, Processed


class Mistral3Adapter(Adapter):
    """transformers squeezes the rows of a one-token image away and fails; such an image is refused before it travels."""

    def image(self, inputs: MediaInputs, pixels: torch.Tensor) -> Processed:
        """Process one image.

        Raises:
            ValueError: the image becomes a single token.
        """
        made = super().image(inputs, pixels)
        if made.replacement.count(inputs.processor.image_token) < 2:
            raise ValueError(
                "an image this small becomes a single token, which this model's projector does not accept"
            )
        return made
