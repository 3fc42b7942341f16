"""LoRA adapters in vLLM: required settings and memory, and loading.

vLLM ignores tensors that do not match the model: an adapter of another architecture would answer as the model
alone. So each tensor is checked before vLLM loads it. An adapter changes only linear layers of the language
model; features are the same with every adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import regex
import torch
from safetensors import safe_open
from vllm import __version__
from vllm.config import ModelConfig
from vllm.config.lora import LoRAConfig, MaxLoRARanks
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models import supports_lora
from vllm.v1.engine.core import EngineCore

from mmd_api.contract.errors import EngineSettingsError, MmdError
from mmd_api.spec.adapters import AdapterSpec
from mmd_api.spec.engine import EngineSpec
from mmd_workers.model import source
from mmd_workers.vllm_engine.reasons import reason

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter with a configuration that vLLM accepts. `rank`: the largest rank of its layers."""

    name: str
    folder: Path
    rank: int


def found(specs: Sequence[AdapterSpec]) -> list[Lora]:
    """Return the adapters of a spec, fetched from the hub if they come from there.

    Raises:
        UnsupportedModelError: an adapter is not available.
        EngineSettingsError: vLLM does not serve this kind of adapter; the message has vLLM's text.
    """
    return [_read(spec.name, source.resolve_adapter(spec, weights=True)) for spec in specs]


def faults(engine: EngineSpec) -> Iterator[str]:
    """Yield what vLLM refuses of a spec's adapters in folders on this machine, with field, problem and remedy."""
    for spec in engine.adapters:
        if Path(spec.id).is_dir():
            try:
                found([spec])
            except MmdError as error:
                yield error.message


def _read(name: str, folder: Path) -> Lora:
    try:
        kind = json.loads((folder / source.ADAPTER_CONFIG).read_text()).get("peft_type")
        if kind != "LORA":
            raise ValueError(f"its peft_type is {kind}, and only LORA is served")
        if not (folder / source.ADAPTER_WEIGHTS).is_file():
            raise ValueError(f"it has no {source.ADAPTER_WEIGHTS}")
        config = PEFTHelper.from_local_dir(str(folder), None)
        config.get_rank_and_scaling("")  # reads the patterns
        lora = Lora(name, folder, max([config.r, *config.rank_pattern.values()]))
        config.validate_legal(LoRAConfig(max_lora_rank=_served_rank(lora.rank)))
    except (ValueError, TypeError, AttributeError, OSError, regex.error) as error:
        raise _refusal(name, error) from error
    return lora


def _refusal(name: str, error: Exception) -> EngineSettingsError:
    return EngineSettingsError(
        f"spec.engine.adapters[{name}]: vLLM {__version__} cannot serve it: {reason(error)}; set id to another adapter, or remove it"
    )


def _served_rank(rank: int) -> int:
    """Return the smallest rank that vLLM serves and that is not below `rank`. vLLM serves only a few ranks."""
    ranks = get_args(MaxLoRARanks)
    if rank > max(ranks):
        raise ValueError(f"its rank is {rank}, and the largest is {max(ranks)}")
    return min(int(served) for served in ranks if served >= rank)


def check_architecture(model: ModelConfig) -> None:
    """Check that vLLM has adapters for a model's architecture, before the weights are read.

    Raises:
        EngineSettingsError: vLLM has no adapters for it.
    """
    architecture = get_model_cls(model)
    if not supports_lora(architecture):
        raise EngineSettingsError(
            f"spec.engine.adapters: vLLM {__version__} has no LoRA adapters for {architecture.__name__}; remove them, or change spec.model"
        )


def _slots(loras: Sequence[Lora], device: torch.device) -> int:
    """Return the number of slots: one per adapter, so that any of them may share a step.

    On CPUs vLLM computes a request without an adapter with the last slot, so one more stays empty.
    """
    return len(loras) + (device.type == "cpu")


def check_dtype(loras: Sequence[Lora], dtype: torch.dtype, device: torch.device) -> None:
    """Check the data type for adapters, before the weights are read.

    Raises:
        EngineSettingsError: vLLM's kernels for adapters do not support it on this device.
    """
    if loras and device.type != "cpu" and dtype == torch.float32:
        raise EngineSettingsError(
            f"spec.model.dtype: on GPUs vLLM {__version__} computes adapters of models in Float16 and BFloat16, not in Float32; set one of "
            "these, or remove spec.engine.adapters"
        )


def arguments(loras: Sequence[Lora], device: torch.device) -> dict[str, Any]:
    """Return keyword arguments of vLLM's `EngineArgs` for these adapters."""
    if not loras:
        return {}
    slots = _slots(loras, device)
    rank = max(_served_rank(lora.rank) for lora in loras)
    return {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": rank}


def memory_bytes(loras: Sequence[Lora], model: Path, device: torch.device, itemsize: int, tokens: int) -> int:
    """Return the most memory that these adapters take beside the model's weights.

    It covers their slots in every linear layer and their own weights. On CPUs a step of `tokens` also copies
    a layer's slot for each token, once unchanged and once in float32.
    """
    if not loras:
        return 0
    rank = max(_served_rank(lora.rank) for lora in loras)
    shapes = _matrices(model)
    slots = _slots(loras, device) * rank * sum(rows + columns for rows, columns in shapes)
    widest = max((columns for _, columns in shapes), default=0)
    file_bytes = sum((lora.folder / source.ADAPTER_WEIGHTS).stat().st_size for lora in loras)
    copies = tokens * rank * widest * (itemsize + FLOAT32_BYTES if itemsize != FLOAT32_BYTES else itemsize)
    return slots * itemsize + copies + file_bytes


def _matrices(folder: Path) -> list[tuple[int, int]]:
    matrices: list[tuple[int, int]] = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
        matrices += [(shape[0], shape[1]) for shape in shapes if len(shape) == 2]
    return matrices


def load(core: EngineCore, loras: Sequence[Lora]) -> dict[str, LoRARequest]:
    """Load adapters into an engine, on all of its ranks. Returns vLLM's LoRA request of each adapter, by name.

    Raises:
        EngineSettingsError: an adapter does not fit the model; the message names the first tensor at fault, or has vLLM's text.
    """
    requests: dict[str, LoRARequest] = {}
    for number, lora in enumerate(loras, 1):
        request = LoRARequest(lora.name, number, str(lora.folder))
        try:
            core.model_executor.collective_rpc(_take, args=(request,))
        except Exception as error:
            raise _refusal(lora.name, error) from error
        requests[lora.name] = request
    return requests


def _take(worker: Any, request: LoRARequest) -> None:
    """Load an adapter on a rank, if it fits the model."""
    manager = worker.model_runner.lora_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    renamed = mapper.get_rename_mapper() if mapper is not None else None
    layers = _layers(manager)
    config = PEFTHelper.from_local_dir(request.lora_path, None)
    halves: dict[str, dict[bool, int]] = {}  # by layer, rank of A (True) and of B (False)
    ranks: dict[str, int] = {}  # by layer, rank in the configuration
    with safe_open(Path(request.lora_path) / source.ADAPTER_WEIGHTS, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            module, is_a = parse_fine_tuned_lora_name(name, renamed)
            if module not in layers:
                raise ValueError(
                    f"its tensor {name} changes no linear layer of this language model: it is of a tower, of a projector or of another "
                    "architecture"
                )
            size, tensor = layers[module][0 if is_a else 1], tensors.get_tensor(name)
            shape = list(tensor.shape)
            if size is not None and size != shape[1 if is_a else 0]:
                raise ValueError(
                    f"its tensor {name} has the shape {shape}, and the model's layer has {size} {'inputs' if is_a else 'outputs'}"
                )
            if not torch.isfinite(tensor.float()).all():
                raise ValueError(f"its tensor {name} has values that are not numbers, or infinite")
            halves.setdefault(module, {})[is_a] = shape[0 if is_a else 1] if size is not None else 0
            ranks[module], _ = config.get_rank_and_scaling(_module_of(name))
    _check_halves(halves, ranks)
    worker.add_lora(request)


def _module_of(tensor: str) -> str:
    """Return PEFT's name of a tensor's layer, which the patterns of a configuration match."""
    return tensor.removeprefix("base_model.model.").rpartition(".lora_")[0]


def _check_halves(halves: Mapping[str, Mapping[bool, int]], ranks: Mapping[str, int]) -> None:
    """Check that each layer has both halves, with the rank of its configuration. A rank of 0 is unknown.

    A layer with one half would answer as the model alone, and one of another rank would be scaled wrongly.
    """
    if not halves:
        raise ValueError("it has no tensors")
    for module, layer_ranks in halves.items():
        if len(layer_ranks) < 2:
            raise ValueError(f"of {module} it has lora_{'A' if True in layer_ranks else 'B'} alone")
        known_ranks = {rank for rank in layer_ranks.values() if rank}
        if known_ranks and known_ranks != {ranks[module]}:
            raise ValueError(
                f"the ranks of its tensors of {module} are {layer_ranks[True]} and {layer_ranks[False]}, and its configuration has {ranks[module]} there"
            )


def _layers(manager: Any) -> dict[str, tuple[int | None, int | None]]:
    """Return inputs and outputs of the layers that adapters can change, by vLLM's names.

    Layers that vLLM joins into one also have their own names. None: unknown, as for experts.
    """
    sizes_by_name: dict[str, tuple[int | None, int | None]] = {}
    for name, module in manager.modules.items():
        base = getattr(module, "base_layer", None)
        inputs, outputs = getattr(base, "input_size", None), getattr(base, "output_size", None)
        parts = manager.packed_modules.get(name, [])
        sizes: list[int | None] = [*_outputs(base)]
        if len(sizes) != len(parts):
            sizes = [None] * len(parts)
        sizes_by_name |= {part: (inputs, size) for part, size in zip(parts, sizes, strict=True)}
        sizes_by_name[name] = (inputs, outputs)
    return sizes_by_name


def _outputs(layer: Any) -> list[int]:
    """Return the output sizes of the layers that this one joins.

    If there are fewer heads of keys and values than ranks, vLLM's own sizes include copies of them.
    """
    if isinstance(layer, QKVParallelLinear):
        keys, values = layer.head_size, layer.v_head_size
        heads, shared = layer.total_num_heads, layer.total_num_kv_heads
        return [heads * keys, shared * keys, shared * values]
    return list(getattr(layer, "output_sizes", ()))
