"""Translates names of architectures and weights for vLLM. It knows the hub's checkpoints; transformers saves
some under other names."""

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
from vllm.model_executor.models.utils import WeightsMapper

LOAD_FORMAT = "mmd"
SUPPRESSED = "suppressed_token_ids"  # key in the loader's extra configuration
RENAMED: dict[str, list[tuple[str, str]]] = {
    "audioflamingo3": [(r"^model\.language_model\.", "language_model.model.")],
    "llava": [(r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.")],
    "qwen2_5_omni": [(r"^model\.language_model\.", "model."), (r"^(?!thinker\.)", "thinker.")],
}
"""By model type: patterns of names that transformers saves or uses, and vLLM's names. Names of the hub match no pattern."""


def as_published(config: Any) -> Any:
    """Return the configuration under which a model is published. A thinker's is part of an omni model's."""
    if config.model_type != "qwen2_5_omni_thinker":
        return config
    omni_config = Qwen2_5OmniConfig(thinker_config=config.to_dict(), enable_audio_output=False)
    # vLLM reads the rate of a video's positions there.
    omni_config.thinker_config.vision_config.tokens_per_second = config.position_id_per_seconds
    omni_config.architectures = ["Qwen2_5OmniModel"]
    return omni_config


@register_model_loader(LOAD_FORMAT)
class Loader(DefaultModelLoader):
    """vLLM's own loader, with names that it knows. The model has no tower, and never samples a placeholder."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra = dict(load_config.model_loader_extra_config)
        self._suppressed = list(extra.pop(SUPPRESSED, ()))
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=extra))

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield names and tensors of the checkpoint."""
        patterns = RENAMED.get(model_config.hf_config.model_type, [])
        for name, tensor in super().get_all_weights(model_config, model):
            for pattern, replacement in patterns:
                name = re.sub(pattern, replacement, name)
            yield name, tensor

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the weights, and adapt vLLM's model where it differs."""
        super().load_weights(model, model_config)
        _note_size(model)
        _take_names(model, model_config)
        _take_deepstack(model, model_config)
        _suppress(model, self._suppressed)


def _note_size(model: Any) -> None:
    """Record the size of the weights before vLLM repacks them for the device."""
    bytes_by_address = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    model.loaded_bytes = sum(bytes_by_address.values())


def loaded_bytes(worker: Any) -> int:
    """Return the bytes of the weights that a rank has loaded, those of a draft model included."""
    models = (worker.get_model(), worker.get_draft_model())
    return sum(getattr(model, "loaded_bytes", 0) for model in models)


def _take_names(model: Any, model_config: ModelConfig) -> None:
    """Let vLLM map the names in adapters, which have those of the model that they were trained on."""
    if patterns := RENAMED.get(model_config.hf_config.model_type):
        renamed = {re.compile(pattern): replacement for pattern, replacement in patterns}
        own_mapper = getattr(model, "hf_to_vllm_mapper", WeightsMapper())
        model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_regex=renamed) | own_mapper


def _suppress(model: Any, token_ids: list[int]) -> None:
    """Suppress placeholders, which must not be sampled and not be part of the distribution.

    vLLM's bias of a request would leave the distribution unchanged.
    """
    compute_logits = model.compute_logits
    index = torch.tensor(token_ids)

    def suppressed(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        nonlocal index
        logits: torch.Tensor | None = compute_logits(*args, **kwargs)
        if logits is None:
            return None
        index = index.to(logits.device)  # copied once: a step does not wait for it
        return logits.index_fill_(-1, index, -torch.inf)

    if token_ids:
        model.compute_logits = suppressed


def _take_deepstack(model: Any, model_config: ModelConfig) -> None:
    """Let a model add the deepstack levels of features to its layers. vLLM disables that if it loads no tower."""
    levels = getattr(getattr(model_config.hf_config, "vision_config", None), "deepstack_visual_indexes", None)
    if not levels or getattr(model, "use_deepstack", True):
        return
    parameter = next(model.parameters())
    hidden = model_config.hf_config.get_text_config().hidden_size
    model.use_deepstack = True
    model.deepstack_num_level = len(levels)
    model.multiscale_dim = model.visual_dim * len(levels)
    model.deepstack_input_embeds = [  # one row at first; the model enlarges them as needed
        torch.zeros(1, hidden, device=parameter.device, dtype=model_config.dtype) for _ in levels
    ]
    model.deepstack_input_embeds_num_tokens = 0
