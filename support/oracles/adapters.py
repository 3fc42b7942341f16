"""LoRA adapters with random weights, as PEFT saves them.

The oracle is the whole model with an adapter merged into its weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

PREFIX = "base_model.model."
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def linears(model: Any) -> dict[str, nn.Linear]:
    """The linear layers of a whole model's language model, by their names in the whole model."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    return {
        ".".join(filter(None, (prefix, name))): module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear)
    }


def write(
    folder: Path,
    model: Any,
    *,
    seed: int,
    rank: int = 8,
    targets: tuple[str, ...] = ATTENTION,
    strength: float = 2.0,
    also: dict[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of a whole model, strong enough to change its answers.

    `also`: further tensors. `config`: entries of adapter_config.json; the tensors follow its `rank_pattern`.
    """
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in linears(model).items():
        if name.rpartition(".")[2] in targets:
            module_rank = _by_pattern(config.get("rank_pattern"), name, rank)
            a = torch.randn(module_rank, module.in_features, generator=random) / module.in_features**0.5
            b = (
                torch.randn(module.out_features, module_rank, generator=random)
                * module.weight.std()
                * strength
            )
            tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors | (also or {}), folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def _by_pattern(pattern: dict[str, Any] | None, name: str, default: Any) -> Any:
    """The value that PEFT finds for a module: that of the first key that matches the end of its name."""
    values = (value for key, value in (pattern or {}).items() if re.fullmatch(rf"(.*\.)?({key})", name))
    return next(values, default)


def _scale(config: dict[str, Any], name: str) -> float:
    rank = _by_pattern(config.get("rank_pattern"), name, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


@contextmanager
def merged(model: Any, folder: Path | None) -> Iterator[None]:
    """Replace W by W + scale * B A in the model until the block ends. None leaves the model as it is."""
    if folder is None:
        yield
        return
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    before: dict[str, torch.Tensor] = {}
    layers = linears(model)
    for key, a in tensors.items():
        if (match := re.fullmatch(re.escape(PREFIX) + r"(.*)\.lora_A\.weight", key)) is None:
            continue
        name = match[1]
        weight = layers[name].weight
        before[name] = weight.data.clone()
        weight.data += _scale(config, name) * tensors[f"{PREFIX}{name}.lora_B.weight"] @ a
    try:
        yield
    finally:
        for name, weight in before.items():
            layers[name].weight.data.copy_(weight)
