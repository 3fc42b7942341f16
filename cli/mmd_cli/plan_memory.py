"""`mmd plan-memory`: the memory that a deployment's pods need, and how many requests fit, from settings
alone.

Models are built on PyTorch's meta device: no weights are read, nothing is computed, only sizes count. On CPUs
the activations are an upper bound: attention on the meta device keeps its scores. Towers run on a few small
media without content, on the CPU and with one layer's memory for all layers of a stack; the need of the
largest batch is extrapolated.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mmd_api.contract.errors import MemoryBudgetError, MmdError, UnsupportedInputError, UnsupportedModelError
from mmd_api.contract.pools import POOL_NAMES, PoolName
from mmd_api.pipeline import active_roles, roles_of
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.fields import UNITS
from mmd_api.spec.pools import EncoderSpec, PrefillSpec
from mmd_workers.basics.memory import CPU_PERCENT, GPU_PERCENT, MEBIBYTE, MemoryBudget
from mmd_workers.encoder.profile import TowerMemory, tower_memory
from mmd_workers.engine.profile import activation_bytes, fused_kernel, gpu_kernel
from mmd_workers.media.medium import MediumInfo
from mmd_workers.model import requirements, source
from mmd_workers.model.adapters import adapter_for
from mmd_workers.model.encoder import HfEncoderModel
from mmd_workers.model.frontend import load_frontend, load_processor
from mmd_workers.model.language import HfLanguageModel
from mmd_workers.model.prompt import KvLayout
from mmd_workers.model.roles import ModelPart, architecture_class, sliced_class
from mmd_workers.model.tiles import follow_tiles

META = torch.device("meta")
SAMPLE_TEXT_TOKENS = 1000
SAMPLE_IMAGE_PIXELS = (1024, 768)
SAMPLE_VIDEO_SECONDS = 30
SAMPLE_AUDIO_SECONDS = 30
NO_TOWER = TowerMemory()
PROCESS_BYTES = 1024 * MEBIBYTE  # interpreter, libraries and, on a GPU, the CUDA context


@dataclass(frozen=True, slots=True)
class Example:
    """A typical request: its tokens, and the KV they take."""

    name: str
    tokens: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Memory budget of one pod of a pool, or of each rank's GPU if a replica has several ranks.

    `kv_bytes`: None if the pool holds no KV or no memory size was given. `refusal`: why a pod of this pool
    would not start.
    """

    pool: PoolName
    roles: tuple[str, ...]
    weights_bytes: int
    activation_bytes: int
    total_bytes: int | None
    kv_bytes: int | None = None
    refusal: str = ""
    ranks: int = 1  # GPUs across which the model of one replica is split
    has_tower: bool = False
    tower: TowerMemory = NO_TOWER  # activations of the tower's largest run


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of `mmd plan-memory`."""

    model: str
    dtype: str
    max_model_len: int
    kv_bytes_per_token: int
    pools: list[PoolPlan]
    examples: list[Example]

    def requests(self, pool: PoolPlan, example: Example) -> int:
        """How many such requests a replica holds at once."""
        return pool.ranks * (pool.kv_bytes or 0) // example.kv_bytes


def plan(spec: MultimodalDeploymentSpec, memory: dict[PoolName, int]) -> Plan:
    """Plan the budgets of all pools.

    `memory`: bytes of a pod's device, by pool. For a pool without an entry, only the need is computed.

    Raises:
        UnsupportedModelError: the model is missing or cannot be served.
    """
    try:
        return _plan(spec, memory)
    except MmdError:
        raise
    except Exception as error:  # transformers' own classes can raise anything
        raise UnsupportedModelError(
            f"the model cannot be built: {type(error).__name__}: {str(error)[:300]}; check its files and that this version of "
            "transformers loads it"
        ) from error


def _plan(spec: MultimodalDeploymentSpec, memory: dict[PoolName, int]) -> Plan:
    folder = source.resolve(spec.model, weights=False)
    config = source.load_config(folder)
    dtype = source.resolve_dtype(spec.model, config)
    empty, adapter = on_meta(config, "language", dtype), adapter_for(config)
    requirements.check(empty, adapter)
    language = HfLanguageModel(empty, adapter, META, dtype, 0, frozenset())
    max_model_len = source.resolve_max_model_len(spec.model, config)
    prefill = spec.prefill or PrefillSpec()
    on_gpus = gpu_kernel if spec.engine.type == "Native" else fused_kernel

    def activations(gpus: int) -> int:
        return activation_bytes(
            language,
            chunk_tokens=prefill.chunk_tokens,
            max_sequences=spec.decode.max_sequences,
            block_tokens=spec.decode.kv_block_tokens,
            max_model_len=max_model_len,
            kernel=on_gpus if gpus else None,
            kv_dtype=spec.engine.kv_dtype,
        )

    kv_layout = language.kv_layout.packed_as(spec.engine.kv_dtype)
    block_bytes = kv_layout.bytes_per_token() * spec.decode.kv_block_tokens
    pools = []
    for pool in POOL_NAMES:
        pool_spec = {"encoder": spec.encoder, "prefill": spec.prefill, "decode": spec.decode}[pool]
        if pool_spec is None:
            continue
        roles = roles_of(spec, pool)
        has_tower = "encode" in active_roles(spec, pool)
        weights, tower = 0, NO_TOWER
        if has_tower and language.model.base_model is not language.decoder:
            weights += bytes_of(on_meta(config, "encoder", dtype), dtype)
            tower = _tower_memory(spec, config, folder, dtype)
        holds_kv = roles != ("encode",)
        ranks = _gpus_of_ranks(spec, pool)
        if holds_kv:
            weights += -(-bytes_of(language.model, dtype) // ranks)
        total = memory.get(pool)
        step = activations(pool_spec.gpus) if holds_kv else 0
        planned = PoolPlan(pool, roles, weights, step, total, ranks=ranks, has_tower=has_tower, tower=tower)
        if holds_kv:
            planned = _with_kv(planned, spec, kv_layout, max_model_len)
        elif total is not None and weights + PROCESS_BYTES + tower.num_bytes > total:
            planned = replace(planned, refusal=_too_small(planned))
        pools.append(planned)

    def kv_of(tokens: int) -> int:
        return -(-tokens // spec.decode.kv_block_tokens) * block_bytes

    kinds = [("longest request (maxModelLen)", max_model_len), *_example_tokens(spec)]
    return Plan(
        spec.model.id,
        str(dtype).removeprefix("torch."),
        max_model_len,
        kv_layout.bytes_per_token(),
        pools,
        [Example(name, tokens, kv_of(tokens)) for name, tokens in kinds],
    )


def memory_of(spec: MultimodalDeploymentSpec, text: str | None) -> dict[PoolName, int]:
    """Bytes of a pod's device, by pool: `text` if given, else the memory limit of pools on CPUs.

    No resource states the size of a GPU.

    Raises:
        UnsupportedInputError: `text` is not a quantity.
    """
    device_bytes: dict[PoolName, int] = {}
    for pool in POOL_NAMES:
        pool_spec = {"encoder": spec.encoder, "prefill": spec.prefill, "decode": spec.decode}[pool]
        if pool_spec is None:
            continue
        if text is not None:
            device_bytes[pool] = quantity_bytes(text)
        elif not pool_spec.gpus and pool_spec.resources.memory is not None:
            device_bytes[pool] = quantity_bytes(str(pool_spec.resources.memory))
    return device_bytes


def quantity_bytes(text: str) -> int:
    """Bytes of a Kubernetes quantity: 80Gi, 512M, 1e9.

    Raises:
        UnsupportedInputError: `text` is not a quantity.
    """
    quantity = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?", text)
    try:
        number = float(quantity.group(1)) if quantity else math.nan
    except ValueError:
        number = math.nan
    if not quantity or not number > 0:
        raise UnsupportedInputError(
            f"--memory: {text!r} is not a memory quantity; use a value such as 80Gi or 24G"
        )
    return int(number * UNITS[quantity.group(2) or ""])


def lines_of(plan: Plan) -> list[str]:
    """The plan as text."""
    lines = [
        f"model {plan.model} in {plan.dtype}, context {plan.max_model_len} tokens, KV {plan.kv_bytes_per_token / 1024:.1f} KiB per token",
        "",
        "KV per request:",
        *(
            f"  {example.name:<34}{example.tokens:>9} tokens {_mebibytes(example.kv_bytes):>12}"
            for example in plan.examples
        ),
    ]
    for pool in plan.pools:
        total = "unknown; set --memory" if pool.total_bytes is None else _mebibytes(pool.total_bytes).strip()
        lines += [
            "",
            f"{_whose(pool)} ({'+'.join(pool.roles)}), memory {total}:",
            f"  weights                           {_mebibytes(pool.weights_bytes):>12}",
        ]
        if pool.has_tower:
            if pool.tower.num_bytes or not pool.tower.unknown:
                lines.append(f"  activations of the tower          {_mebibytes(pool.tower.num_bytes):>12}")
            lines += [
                f"  activations of the tower               unknown ({reason})"
                for reason in pool.tower.unknown
            ]
        if pool.roles != ("encode",):
            lines.append(f"  activations of the largest step   {_mebibytes(pool.activation_bytes):>12}")
        if pool.refusal:
            lines.append(f"  does not {'start' if pool.roles != ('encode',) else 'fit'}: {pool.refusal}")
        if pool.kv_bytes is None:
            continue
        lines.append(f"  KV pool                           {_mebibytes(pool.kv_bytes):>12}")
        lines += [f"  holds {plan.requests(pool, example):>7} x {example.name}" for example in plan.examples]
    return lines


def _whose(pool: PoolPlan) -> str:
    if pool.ranks == 1:
        return f"{pool.pool} pod"
    return f"each of the {pool.ranks} GPUs of a {pool.pool} replica"


def _gpus_of_ranks(spec: MultimodalDeploymentSpec, pool: PoolName) -> int:
    """GPUs across which the language model of a replica is split.

    Ranks on CPUs share the memory of their pod.
    """
    part = getattr(spec, pool)
    if spec.engine.type == "Native" or pool == "encoder" or not part.gpus:
        return 1
    return int(spec.replica_gpus(pool))


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / MEBIBYTE:,.1f} MiB"


def on_meta(config: Any, role: ModelPart, dtype: torch.dtype) -> Any:
    """The model of a role as `load_role` builds it, without weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with META:
            model = sliced_class(architecture_class(config), role)(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def bytes_of(model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the parameters, shared ones counted once."""
    return sum(parameter.numel() * dtype.itemsize for parameter in model.parameters())


def _with_kv(
    planned: PoolPlan, spec: MultimodalDeploymentSpec, kv_layout: KvLayout, max_model_len: int
) -> PoolPlan:
    pool_spec = spec.prefill if planned.pool == "prefill" and spec.prefill is not None else spec.decode
    override = pool_spec.kv_cache_mebibytes
    if planned.total_bytes is None and override is None:
        return planned
    budget = MemoryBudget(
        planned.total_bytes or 0,
        planned.weights_bytes + PROCESS_BYTES,
        planned.activation_bytes,
        pool_spec.kv_cache_percent or (GPU_PERCENT if pool_spec.gpus else CPU_PERCENT),
        override and override * MEBIBYTE,
        planned.tower.num_bytes,
    )
    kv_bytes, refusal = None, ""
    try:
        kv_bytes = budget.kv_bytes(
            bytes_per_token=-(-kv_layout.bytes_per_token() // planned.ranks),
            block_tokens=spec.decode.kv_block_tokens,
            max_model_len=max_model_len,
            max_sequences=spec.decode.max_sequences,
            pool=planned.pool,
        )
    except MemoryBudgetError as error:
        refusal = error.message
    return replace(planned, kv_bytes=kv_bytes, refusal=refusal)


def _too_small(planned: PoolPlan) -> str:
    needed = planned.weights_bytes + PROCESS_BYTES + planned.tower.num_bytes
    return (
        f"weights, process and the largest tower run need {_mebibytes(needed)}: lower the limits of spec.gateway.media or "
        "spec.encoder.batching.maxWork, or give the pod more memory"
    )


def _tower_memory(
    spec: MultimodalDeploymentSpec, config: Any, folder: Path, dtype: torch.dtype
) -> TowerMemory:
    """Measure the memory of the tower as a worker does on a CPU, without the weights."""
    adapter = adapter_for(config)
    _, processor = load_processor(folder, adapter, spec.model)
    if processor is None or not adapter.modalities(processor):
        return NO_TOWER
    follow_tiles(config, processor)
    model = with_shared_layers(on_meta(config, "encoder", dtype))
    encoder = HfEncoderModel(model, processor, adapter, torch.device("cpu"), dtype, 0)
    batching = (spec.encoder or EncoderSpec()).batching
    return tower_memory(encoder, spec.gateway.media, batching)


def with_shared_layers(model: torch.nn.Module) -> Any:
    """Fill a model from the meta device with zeros. Equal layers share their tensors."""
    shared: dict[tuple[str, torch.Size, torch.dtype], torch.Tensor] = {}
    for name, module in model.named_modules():
        for kind, tensors in (("p", module._parameters), ("b", module._buffers)):
            for attribute, tensor in list(tensors.items()):
                if tensor is None or not tensor.is_meta:
                    continue
                key = (kind + re.sub(r"\.\d+", "", name) + "." + attribute, tensor.shape, tensor.dtype)
                if key not in shared:
                    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
                    shared[key] = torch.nn.Parameter(zeros, requires_grad=False) if kind == "p" else zeros
                tensors[attribute] = shared[key]
    return model


def _example_tokens(spec: MultimodalDeploymentSpec) -> list[tuple[str, int]]:
    """Tokens of a typical request of each modality that the model takes."""
    examples = [(f"text of {SAMPLE_TEXT_TOKENS} tokens", SAMPLE_TEXT_TOKENS)]
    frontend = load_frontend(spec.model, spec.gateway.media)
    width, height = SAMPLE_IMAGE_PIXELS
    fps, rate = 30.0, 16_000
    media: list[tuple[str, MediumInfo]] = [
        (
            f"image of {width} x {height} pixels",
            MediumInfo("image", "0" * 64, 1, "png", width=width, height=height),
        ),
        (
            f"video of {SAMPLE_VIDEO_SECONDS} s",
            MediumInfo(
                "video",
                "0" * 64,
                1,
                "mp4",
                width=width,
                height=height,
                num_frames=int(SAMPLE_VIDEO_SECONDS * fps),
                fps=fps,
                duration_seconds=float(SAMPLE_VIDEO_SECONDS),
            ),
        ),
        (
            f"audio of {SAMPLE_AUDIO_SECONDS} s",
            MediumInfo(
                "audio",
                "0" * 64,
                1,
                "wav",
                duration_seconds=float(SAMPLE_AUDIO_SECONDS),
                num_samples=SAMPLE_AUDIO_SECONDS * rate,
                sample_rate_hz=rate,
            ),
        ),
    ]
    for name, info in media:
        message = {"role": "user", "content": [{"type": info.modality}]}
        try:
            examples.append((name, len(frontend.layout([message], [info]).token_ids)))
        except MmdError:
            continue  # the model does not take this modality, or not this size
    return examples
