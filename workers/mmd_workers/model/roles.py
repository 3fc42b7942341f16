"""Loads one role's share of a checkpoint: the towers and projectors, or the language model. Independent of the tokenizer and requests.

The real Hugging Face class is subclassed and the children that the role does not need are replaced while the model is
still on the meta device; `from_pretrained` then asks safetensors for the remaining names only, so other bytes are never read.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import transformers
from torch import nn

from mmd_api.contract.errors import UnsupportedModelError

ModelPart = Literal["encoder", "language"]

_LOADING = threading.Lock()
"""Keeps loads apart. Two at once may leave transformers' own functions replaced, and no later model of the process would have its tied
weights.
"""


class Absent(nn.Module):
    """Replaces a module that another role loads. Has no parameters and refuses to run."""

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Never runs in this role.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this module belongs to another role and was not loaded")

    @property
    def dtype(self) -> torch.dtype:
        """A dtype for parents that read their tower's while they are built."""
        return torch.float32


FEATURE_LAYER_MODELS = frozenset({"llava", "llava_next", "video_llava"})
"""Model types whose features are only the hidden states named by `vision_feature_layer`, by default not those of the last layer."""


def drop_unread_layers(model: Any, config: Any) -> None:
    """Replace the layers of vision towers behind the last one that features are made of.

    A replacement passes its input on. It has the layer's class, because transformers collects the outputs of that class by index.
    """
    if config.model_type not in FEATURE_LAYER_MODELS:
        return
    depth = getattr(config.vision_config, "num_hidden_layers", 0)  # timm's towers have none
    selected = config.vision_feature_layer
    read = max(
        index % (depth + 1)  # the first hidden state is the first layer's input
        for index in ([selected] if isinstance(selected, int) else selected)
    )
    for name, tower in model.named_children():
        for layers in tower.modules() if name.endswith("_tower") else ():
            if isinstance(layers, nn.ModuleList) and len(layers) == depth:
                for position in range(read, depth):
                    layers[position] = _unread(type(layers[position]))


def _unread(layer: type[nn.Module]) -> nn.Module:
    class Unread(layer):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            nn.Module.__init__(self)

        def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            return hidden_states

    return Unread()


def architecture_class(config: Any) -> type[Any]:
    """The Hugging Face class of a configuration.

    Raises:
        UnsupportedModelError: transformers has no such class, or it does not generate text.
    """
    names = list(getattr(config, "architectures", None) or [])
    for mapping in ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"):
        mapped = getattr(transformers.models.auto.modeling_auto, mapping, {}).get(config.model_type)
        names += [mapped] if isinstance(mapped, str) else list(mapped or [])
    if config.model_type.endswith("_thinker"):
        stem = {"qwen2_5_omni_thinker": "Qwen2_5Omni", "qwen3_omni_moe_thinker": "Qwen3OmniMoe"}.get(
            config.model_type
        )
        names.insert(0, f"{stem}ThinkerForConditionalGeneration")
    for name in names:
        cls = getattr(transformers, name, None)
        if cls is not None and hasattr(cls, "generate"):
            return cls  # type: ignore[no-any-return]
    raise UnsupportedModelError(
        f"spec.model.id: model type {config.model_type!r} ({', '.join(names) or 'no architecture named'}) has no text-generating "
        "class in the installed transformers; choose a model with one"
    )


def sliced_class(cls: type[Any], role: ModelPart) -> type[Any]:
    """A subclass of `cls` that builds only the children needed by `role`.

    It keeps the name and module of `cls`, by which transformers decides which checkpoint key renaming applies.
    """

    class Sliced(cls):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            base, decoder = self.base_model, self.get_decoder()
            if base is decoder:
                return
            for name, child in list(base.named_children()):
                if (child is decoder) == (role == "encoder"):
                    setattr(base, name, Absent())
            if role == "encoder":
                drop_unread_layers(base, config)
                for name, child in list(self.named_children()):
                    if child is not base:
                        setattr(self, name, Absent())

        def get_input_embeddings(self) -> Any:
            return None if role == "encoder" else super().get_input_embeddings()

        def get_output_embeddings(self) -> Any:
            return None if role == "encoder" else super().get_output_embeddings()

    Sliced._keys_to_ignore_on_load_unexpected = ["."]  # the other role's weights are expected
    if role == "encoder":
        Sliced._tied_weights_keys = {}
    Sliced.__name__, Sliced.__qualname__, Sliced.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Sliced


def load_role(
    folder: Path, config: Any, role: ModelPart, dtype: torch.dtype, device: torch.device
) -> tuple[Any, int]:
    """Load a role's model in evaluation mode. Returns it and the bytes of its weights, counting shared ones once.

    Raises:
        UnsupportedModelError: weights are missing or have other shapes than the architecture needs.
    """
    cls = sliced_class(architecture_class(config), role)
    transformers.logging.disable_progress_bar()
    try:
        with _LOADING:
            model, report = cls.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"spec.model.id: the weights in {folder.name!r} cannot be loaded ({error}); they must be safetensors files"
        ) from error
    wrong = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise UnsupportedModelError(
            f"spec.model.id: {len(wrong)} weights of the {role} part are missing or misshapen in {folder.name!r} "
            f"(first: {wrong[0]}); the checkpoint is incomplete, or its architecture differs from config.json"
        )
    if role == "language" and model.base_model is not model.get_decoder():
        # A single row, such as the separator of tiled images, belongs to the encoder.
        for name in list(model.base_model._parameters):
            model.base_model._parameters[name] = None
    model.eval().requires_grad_(False).to(device)
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in model.parameters() if t.numel()}
    return model, sum(tensors.values())
