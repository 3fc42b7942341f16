"""What vLLM calls architectures and weights. It knows the checkpoints of the hub; transformers saves some models under other names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Qwen2_5OmniConfig
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

LOAD_FORMAT = "mmd"
RENAMED: dict[str, list[tuple[str, str]]] = {
    "llava": [(r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.")],
    "qwen2_5_omni": [(r"^(?!thinker\.)", "thinker.")],
}
"""By model type: patterns of names as transformers saves them, and what vLLM calls them. Names of the hub match none."""


def as_published(config: Any) -> Any:
    """The configuration under which a model is published: that of a thinker alone is part of an omni model's."""
    if config.model_type != "qwen2_5_omni_thinker":
        return config
    whole = Qwen2_5OmniConfig(thinker_config=config.to_dict(), enable_audio_output=False)
    # vLLM looks for the rate of a video's positions there
    whole.thinker_config.vision_config.tokens_per_second = config.position_id_per_seconds
    whole.architectures = ["Qwen2_5OmniModel"]
    return whole


@register_model_loader(LOAD_FORMAT)
class Loader(DefaultModelLoader):
    """vLLM's own loader, with names that it knows."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Names and tensors of the checkpoint."""
        patterns = RENAMED.get(model_config.hf_config.model_type, [])
        for name, tensor in super().get_all_weights(model_config, model):
            for pattern, replacement in patterns:
                name = re.sub(pattern, replacement, name)
            yield name, tensor
