"""The engine that runs the language model, and the settings of vLLM for each pool."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.rule import Rule
from mmd_api.spec.adapters import MAX_ADAPTERS, AdapterSpec
from mmd_api.spec.engine_arguments import (
    HAVE_A_FIELD,
    NOT_SERVED,
    OF_THE_OPERATOR,
    PATTERN,
    expression,
    none_of,
    spelled,
)
from mmd_api.spec.fields import keyed_by

EngineType = Literal["Native", "VLLM"]
KvDtype = Literal["Model", "Int8", "Fp8"]
KvCacheDtype = Literal["Auto", "Fp8E4M3", "Fp8E5M2"]
SpeculativeMethod = Literal["ngram", "draft_model", "eagle", "eagle3", "medusa", "mtp"]
QuantizationMethod = Annotated[str, Field(max_length=64, pattern=r"^[a-z0-9][a-z0-9_-]*$")]
Argument = Annotated[str, Field(max_length=1024, pattern=PATTERN)]

STEP_MILLISECONDS = 100
NEED_A_MODEL: tuple[SpeculativeMethod, ...] = ("draft_model", "eagle", "eagle3", "medusa")


def _drafts_have_a_source(s: SpeculativeSpec) -> bool:
    return (s.model is not None) if s.method in NEED_A_MODEL else (s.model is None)


def _free(names: tuple[str, ...], p: VllmPoolSpec) -> bool:
    return none_of(names, p.extra_args)


def _none_is(names: tuple[str, ...]) -> str:
    return f"!self.extraArgs.exists(a, a.matches('{expression(names)}'))"


def _lookup_of_native(e: EngineSpec) -> bool:
    return e.type == "Native" or e.prompt_lookup_tokens is None


def _step_of_native(e: EngineSpec) -> bool:
    return e.type == "Native" or e.step_milliseconds is None


def _share_of_native(e: EngineSpec) -> bool:
    return e.type == "Native" or e.text_share_percent is None


def _kv_dtype_of_native(e: EngineSpec) -> bool:
    return e.type == "Native" or e.kv_dtype == "Model"


def _settings_of_vllm(e: EngineSpec) -> bool:
    return e.type == "VLLM" or (e.prefill is None and e.decode is None)


def _adapters_of_vllm(e: EngineSpec) -> bool:
    return e.type == "VLLM" or not e.adapters


def _adapter_names_unique(e: EngineSpec) -> bool:
    return len({adapter.name for adapter in e.adapters}) == len(e.adapters)


SPECULATIVE = (
    Rule(
        field="model",
        cel=f"(self.method in {[*NEED_A_MODEL]}) == has(self.model)",
        holds=_drafts_have_a_source,
        problem=f"the methods {', '.join(NEED_A_MODEL)} need a model, and the others have none",
        remedy="set model to the one that drafts, or remove it",
    ),
)


VLLM_POOL = (
    Rule(
        field="extraArgs",
        cel=_none_is(HAVE_A_FIELD),
        holds=partial(_free, HAVE_A_FIELD),
        problem=f"an argument is set by a field of the spec: {spelled(HAVE_A_FIELD)}",
        remedy="set the field instead",
    ),
    Rule(
        field="extraArgs",
        cel=_none_is(OF_THE_OPERATOR),
        holds=partial(_free, OF_THE_OPERATOR),
        problem=f"an argument belongs to the operator: {spelled(OF_THE_OPERATOR)}",
        remedy="remove it",
    ),
    Rule(
        field="extraArgs",
        cel=_none_is(NOT_SERVED),
        holds=partial(_free, NOT_SERVED),
        problem=f"parallelism across replicas is not served yet: {spelled(NOT_SERVED)}",
        remedy="remove the argument",
    ),
)


ENGINE = (
    Rule(
        field="type",
        cel="self.type == 'VLLM' || (!has(self.prefill) && !has(self.decode))",
        holds=_settings_of_vllm,
        problem="engine.prefill and engine.decode are settings of vLLM, which serves tensor parallelism, quantization and speculative "
        "decoding, and type is Native, which does not",
        remedy="set type: VLLM, or remove them",
    ),
    Rule(
        field="stepMilliseconds",
        cel="self.type == 'Native' || !has(self.stepMilliseconds)",
        holds=_step_of_native,
        problem="engine.stepMilliseconds bounds the steps of Native, and type is VLLM, which schedules its own steps",
        remedy="remove it; maxNumBatchedTokens of engine.prefill and engine.decode limits the steps of vLLM",
    ),
    Rule(
        field="textSharePercent",
        cel="self.type == 'Native' || !has(self.textSharePercent)",
        holds=_share_of_native,
        problem="engine.textSharePercent divides the steps of Native, and type is VLLM, which schedules its own steps",
        remedy="remove it; with a prefill pool, decode.localPrefillTokens has short texts computed apart from media",
    ),
    Rule(
        field="promptLookupTokens",
        cel="self.type == 'Native' || !has(self.promptLookupTokens)",
        holds=_lookup_of_native,
        problem="engine.promptLookupTokens has Native look for drafts in a sequence, and type is VLLM, which has settings of its own for that",
        remedy="remove it; engine.decode.speculative with method: ngram does the same for vLLM",
    ),
    Rule(
        field="kvDtype",
        cel="self.type == 'Native' || self.kvDtype == 'Model'",
        holds=_kv_dtype_of_native,
        problem="engine.kvDtype is the data type of the KV of Native, and type is VLLM, whose pools have one of their own",
        remedy="remove it, and set kvCacheDtype: Fp8E4M3 in engine.prefill and engine.decode",
    ),
    Rule(
        field="adapters",
        cel="self.type == 'VLLM' || size(self.adapters) == 0",
        holds=_adapters_of_vllm,
        problem="engine.adapters are LoRA adapters, which vLLM serves, and type is Native, which does not",
        remedy="set type: VLLM, or remove them",
    ),
    Rule(
        field="adapters",
        cel=None,
        holds=_adapter_names_unique,
        problem="two adapters have the same name",
        remedy="rename one of them",
    ),
)


class SpeculativeSpec(ApiModel, rules=SPECULATIVE):
    """Speculative decoding: several tokens are drafted, and the model verifies them in one step."""

    method: SpeculativeMethod
    """What drafts tokens, by vLLM's names. ngram looks for the last tokens in the prompt and needs no model."""
    model: Annotated[str, Field(max_length=512, pattern=r"^/?[A-Za-z0-9._][A-Za-z0-9._/-]*$")] | None = None
    """Hub id or absolute path of the model that drafts."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)]
    """Number of tokens drafted per step."""


class VllmPoolSpec(ApiModel, rules=VLLM_POOL):
    """How vLLM runs the language model in the pods of a pool."""

    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of GPUs that each layer is split across. Times pipelineParallelSize, it is the number of GPUs of a replica; where that is
    more than gpus of the pool, a replica is a group of pods, which needs LeaderWorkerSet in the cluster."""
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of stages that the layers are divided into, each on GPUs of its own."""
    quantization: QuantizationMethod | None = None
    """Quantization of the weights, by vLLM's names, such as fp8. Defaults to that of the checkpoint."""
    kv_cache_dtype: KvCacheDtype = "Auto"
    """Data type of KV. Auto uses the data type of the model."""
    gpu_memory_utilization_percent: Annotated[int, Field(ge=1, le=100)] | None = None
    """Percentage of the GPU memory for weights, activations and KV together. Defaults to 90. kvCacheMebibytes of the pool overrides it."""
    max_num_batched_tokens: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    """Maximum number of tokens per engine step. Defaults to prefill.chunkTokens or decode.maxSequences, whichever is larger."""
    enforce_eager: bool | None = None
    """Whether the model runs without compilation and CUDA graphs. Defaults to true on CPUs and false on GPUs."""
    speculative: SpeculativeSpec | None = None
    """Speculative decoding. Off if not set."""
    extra_args: Annotated[list[Argument], Field(max_length=32)] = []
    """Further arguments of `vllm serve` for the engine, each with its value, such as --max-logprobs=5."""

    @property
    def ranks(self) -> int:
        """Processes that run the model together, each on a GPU of its own where there are GPUs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class EngineSpec(ApiModel, rules=ENGINE):
    """Engine of prefill and decode pods."""

    type: EngineType = "Native"
    """Native is part of the worker image and needs no GPU. VLLM needs an image that contains vLLM (build argument ENGINE=vllm)."""
    step_milliseconds: Annotated[int, Field(ge=5, le=60_000)] | None = None
    """How long an engine step that computes prompts with media may take while sequences decode or texts come, so that these do not wait for a
    chunk of image tokens. It has as many prompt tokens as fit by measured speed, between an eighth of prefill.chunkTokens and all of them, and
    takes longer where its fixed cost would exceed a sixth of it. Shorter steps cost media throughput. Defaults to 100. Only with type Native."""
    text_share_percent: Annotated[int, Field(ge=1, le=99)] | None = None
    """Percentage of the prompt tokens of an engine step that prompts of text alone have while prompts with media could have them all; media
    have the rest, and each what the other leaves. Without it the shortest prompts come first, whatever they are, and long ones
    with their age. Only with type Native."""
    prompt_lookup_tokens: Annotated[int, Field(ge=0, le=32)] | None = None
    """Speculative decoding by prompt lookup: how many tokens a step may compute for a sequence besides its next one, namely those that followed its last
    tokens where these stood in it before. They count as far as the model samples the same ones, so answers are the same and come in fewer
    steps where they repeat their prompt or themselves. As many are computed as pay by measured speed and success. Defaults to 0, which is
    none. Only with type Native."""
    kv_dtype: KvDtype = "Model"
    """Data type of KV in the pools of prefill and decode. Model is that of the model, which is exact; Int8 and Fp8 take 8 bits and a scale for each
    token and head, so that more tokens fit, and change tokens. KV travels as it is in the pools. Only with type Native."""
    prefill: VllmPoolSpec | None = None
    """How vLLM runs in prefill pods. Only with type VLLM."""
    decode: VllmPoolSpec | None = None
    """How vLLM runs in decode pods, also where they prefill. Only with type VLLM."""
    adapters: Annotated[
        list[AdapterSpec],
        Field(
            max_length=MAX_ADAPTERS,
            json_schema_extra=keyed_by("name"),
        ),
    ] = []
    """LoRA adapters of the model, each of which clients request as a model of its own. Only with type VLLM."""

    @property
    def step_seconds(self) -> float:
        """Time that a step of Native with media may take."""
        return (STEP_MILLISECONDS if self.step_milliseconds is None else self.step_milliseconds) / 1000

    def formats(self, *, prefills: bool) -> list[list[object]]:
        """Settings of the pools that change the meaning of KV, other than the defaults.

        `prefills`: whether there is a prefill pool.
        """
        pools = {"decode": self.decode, **({"prefill": self.prefill} if prefills else {})}
        present = {name: pool for name, pool in pools.items() if pool is not None}
        types = {(pool.quantization, pool.kv_cache_dtype) for pool in present.values()} - {(None, "Auto")}
        formats: list[list[object]] = [list(pair) for pair in sorted(types, key=str)]
        return formats + [[name, pool.extra_args] for name, pool in present.items() if pool.extra_args]
