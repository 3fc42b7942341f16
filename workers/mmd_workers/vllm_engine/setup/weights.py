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
from vllm.model_executor.models.utils import WeightsMapper

LOAD_FORMAT = "mmd"
SUPPRESSED = "suppressed_token_ids"  # in the loader's extra configuration
RENAMED: dict[str, list[tuple[str, str]]] = {
    "audioflamingo3": [(r"^model\.language_model\.", "language_model.model.")],
    "llava": [(r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.")],
    "qwen2_5_omni": [(r"^model\.language_model\.", "model."), (r"^(?!thinker\.)", "thinker.")],
}
"""By model type: patterns of names as transformers saves or has them, and what vLLM calls them. Names of the hub match none."""


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
    """vLLM's own loader, with names that it knows, for a model without a tower that samples no placeholder."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra = dict(load_config.model_loader_extra_config)
        self._suppressed = list(extra.pop(SUPPRESSED, ()))
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=extra))

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Names and tensors of the checkpoint."""
        patterns = RENAMED.get(model_config.hf_config.model_type, [])
        for name, tensor in super().get_all_weights(model_config, model):
            for pattern, replacement in patterns:
                name = re.sub(pattern, replacement, name)
            yield name, tensor

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load them, and change what vLLM's model does otherwise."""
        super().load_weights(model, model_config)
        _note_size(model)
        _take_names(model, model_config)
        _take_deepstack(model, model_config)
        _suppress(model, self._suppressed)


def _note_size(model: Any) -> None:
    """Before vLLM repacks weights for the device."""
    tensors = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    model.loaded_bytes = sum(tensors.values())


def loaded_bytes(worker: Any) -> int:
    """Bytes of the weights that a rank has loaded, those of a model that drafts included."""
    models = (worker.get_model(), worker.get_draft_model())
    return sum(getattr(model, "loaded_bytes", 0) for model in models)


def _take_names(model: Any, model_config: ModelConfig) -> None:
    """Adapters have the names of the model that they were trained on."""
    if patterns := RENAMED.get(model_config.hf_config.model_type):
        renamed = {re.compile(pattern): replacement for pattern, replacement in patterns}
        known = getattr(model, "hf_to_vllm_mapper", WeightsMapper())
        model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_regex=renamed) | known


def _suppress(model: Any, token_ids: list[int]) -> None:
    """Placeholders must not be sampled, and the distribution is the one without them: vLLM's bias of a request leaves it as it was."""
    compute_logits = model.compute_logits
    index = torch.tensor(token_ids)

    def suppressed(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        nonlocal index
        logits: torch.Tensor | None = compute_logits(*args, **kwargs)
        if logits is None:
            return None
        index = index.to(logits.device)  # once: a step does not wait for a copy
        return logits.index_fill_(-1, index, -torch.inf)

    if token_ids:
        model.compute_logits = suppressed


def _take_deepstack(model: Any, model_config: ModelConfig) -> None:
    """Let a model add the deepstack levels of features to its layers. vLLM turns that off where it loads no tower."""
    levels = getattr(getattr(model_config.hf_config, "vision_config", None), "deepstack_visual_indexes", None)
    if not levels or getattr(model, "use_deepstack", True):
        return
    parameter = next(model.parameters())
    hidden = model_config.hf_config.get_text_config().hidden_size
    model.use_deepstack = True
    model.deepstack_num_level = len(levels)
    model.multiscale_dim = model.visual_dim * len(levels)
    model.deepstack_input_embeds = [  # a row at first: the model makes them longer as it needs
        torch.zeros(1, hidden, device=parameter.device, dtype=model_config.dtype) for _ in levels
    ]
    model.deepstack_input_embeds_num_tokens = 0
