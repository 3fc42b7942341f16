"""The native engine as a part of a pod: weights, KV pool and thread, created from the spec."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import torch

from mmd_api.contract.pools import Modality
from mmd_api.spec.engine import KvDtype
from mmd_workers.engine.engine import Engine
from mmd_workers.engine.interface import SamplingParams, SequenceInput
from mmd_workers.engine.memory.blocks import root_of
from mmd_workers.engine.profile import activation_bytes
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.features.references import layout_of, media_spans
from mmd_workers.model import source
from mmd_workers.model.grammar import Grammars, load_tokenizer
from mmd_workers.model.interfaces import LanguageModel
from mmd_workers.model.language import load_language_model
from mmd_workers.model.prompt import Feature, KvLayout
from mmd_workers.process.pod import Pod
from mmd_workers.sequences.engine import Added
from mmd_workers.sequences.kv_memory import kv_pool_bytes
from mmd_workers.sequences.step_thread import SteppedEngine, SteppedHost
from mmd_workers.wire.messages.prefill import GenerateRequest

log = logging.getLogger(__name__)


class NativeEngine(SteppedEngine):
    """Translates requests into the terms of `Engine`."""

    _runner: EngineRunner[Engine]

    def __init__(
        self,
        runner: EngineRunner[Engine],
        model: LanguageModel,
        grammars: Grammars,
        kv_dtype: KvDtype = "Model",
    ) -> None:
        """`kv_dtype`: data type of the engine's KV pool."""
        super().__init__(runner, grammars, bidirectional_prompt=model.bidirectional_prompt)
        self._model = model
        self._kv_layout = model.kv_layout.packed_as(kv_dtype)

    @property
    def keeps_features(self) -> bool:
        """True: features are a part of the prompt."""
        return True

    @property
    def kv_layout(self) -> KvLayout:
        """The layout of the KV pool."""
        return self._kv_layout

    def feature_bytes(self, modality: Modality, num_tokens: int) -> int:
        """Bytes of a feature of the model."""
        return self._model.feature_bytes(modality, num_tokens)

    async def cached_tokens(self, sequence: str, request: GenerateRequest) -> int:
        """Look up the prompt's blocks."""
        leading = await self.identities(sequence, request)
        spans, root = media_spans(request.features), _root_of(request)
        _, cached = await self._runner.look(
            lambda engine: engine.prefix(request.token_ids, spans, root, request.output_token_ids, leading)
        )
        return cached

    def _identity_tokens(self, engine: Engine) -> int:
        return engine.blocks.block_tokens if engine.scheduler.prefix_cache else 0

    async def add(
        self,
        sequence: str,
        request: GenerateRequest,
        *,
        stop_after_prefill: bool,
        features: Mapping[int, Feature] | None = None,
    ) -> Added:
        """Hash and lower the prompt beside the engine, then queue it in one turn between two steps."""
        constraint = await self._constraint(request, request.output_token_ids)
        identities = await self.identities(sequence, request)

        def prepare(_: Engine) -> SequenceInput:
            layouts = [layout_of(ref) for ref in request.features]
            return SequenceInput(
                sequence_id=sequence,
                prompt=self._model.lower(request.token_ids, layouts, request.output_token_ids),
                sampling=self._sampling(request),
                media_spans=media_spans(request.features),
                identities=identities,
                output_token_ids=request.output_token_ids,
                arrived=request.arrived,
                stop_after_prefill=stop_after_prefill,
                constraint=constraint,
                root=_root_of(request),
                guidance=request.guidance,
                engine_failures=request.engine_failures,
            )

        item = await self._runner.aside(prepare)
        self._identities.pop(sequence, None)

        def begin(engine: Engine) -> Added:
            at = time.time()
            engine.add(item)
            for medium, feature in (features or {}).items():
                engine.fill(sequence, medium, feature)
            return Added(at, item.prompt.next_position)

        return await self._runner.call(begin)

    async def attach(
        self, sequence: str, request: GenerateRequest, output_token_ids: list[int], next_position: int
    ) -> None:
        """Decode the sequence from the next step on. The offer brought the identities of nearly all blocks."""
        constraint = await self._constraint(request, output_token_ids)
        leading = self._identities.pop(sequence, [])
        identities, spans = await self._runner.aside(
            lambda engine: (
                self._hashed(engine, request, output_token_ids, leading),
                media_spans(request.features),
            )
        )
        await self._runner.call(
            lambda engine: engine.attach(
                sequence,
                token_ids=request.token_ids,
                sampling=self._sampling(request),
                output_token_ids=output_token_ids,
                next_position=next_position,
                media_spans=spans,
                arrived=request.arrived,
                constraint=constraint,
                root=_root_of(request),
                guidance=request.guidance,
                engine_failures=request.engine_failures,
                identities=identities,
            )
        )

    def _sampling(self, request: GenerateRequest) -> SamplingParams:
        """The request's sampling parameters, with the model's end-of-sequence and suppressed tokens."""
        sampling = request.sampling
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            logprobs=sampling.logprobs,
            ignore_eos=sampling.ignore_eos,
            min_tokens=sampling.min_tokens,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            rules=sampling.rules,
            eos_token_ids=self._model.eos_token_ids,
            suppress_token_ids=self._model.suppress_token_ids,
            prompt_logprobs=sampling.prompt_logprobs,
        )


class NativeHost(SteppedHost):
    """Owns the weights, the KV pool and the engine's thread."""

    def __init__(self, pod: Pod, device: torch.device, tower_bytes: Callable[[], int] = lambda: 0) -> None:
        """`tower_bytes()`: activations of a tower on the same device, for which the KV pool leaves room."""
        super().__init__(pod, device)
        self._tower_bytes = tower_bytes
        self._model: LanguageModel | None = None
        self._engine: NativeEngine | None = None

    @property
    def engine(self) -> NativeEngine:
        """The engine's commands."""
        assert self._engine is not None
        return self._engine

    async def load_weights(self) -> None:
        """Read only the language model's weights."""
        pod = self._pod
        with pod.startup.phase("load_language"):
            self._model = await asyncio.to_thread(load_language_model, pod.spec.model, self._device)
        pod.metrics.loaded_bytes.inc(self._model.loaded_bytes)
        log.info("language role loaded %d bytes", self._model.loaded_bytes)

    async def start(self) -> None:
        """Create the engine, with a KV pool as large as memory allows.

        Raises:
            MemoryBudgetError: the pool does not hold one request of full length.
        """
        assert self._model is not None
        pod, spec, model = self._pod, self._pod.spec, self._model
        prefill = pod.prefill_spec
        max_model_len = model.max_model_len
        if spec.model.max_model_len is not None:
            max_model_len = min(max_model_len, spec.model.max_model_len)
        self._max_model_len = max_model_len
        with pod.startup.phase("memory"):
            activations = await asyncio.to_thread(
                activation_bytes,
                model,
                chunk_tokens=prefill.chunk_tokens,
                max_sequences=spec.decode.max_sequences,
                block_tokens=spec.decode.kv_block_tokens,
                max_model_len=max_model_len,
                kv_dtype=spec.engine.kv_dtype,
            )
        kv_bytes = kv_pool_bytes(
            pod,
            model.device,
            model.kv_layout.packed_as(spec.engine.kv_dtype),
            block_tokens=spec.decode.kv_block_tokens,
            max_model_len=max_model_len,
            activation_bytes=activations,
            tower_bytes=self._tower_bytes(),
        )
        with pod.startup.phase("engine"):
            engine = await asyncio.to_thread(
                Engine,
                model,
                kv_cache_bytes=kv_bytes,
                block_tokens=spec.decode.kv_block_tokens,
                max_sequences=spec.decode.max_sequences,
                chunk_tokens=prefill.chunk_tokens,
                prefix_cache=prefill.prefix_cache,
                max_model_len=max_model_len,
                step_seconds=spec.engine.step_seconds,
                text_share_percent=spec.engine.text_share_percent,
                draft_tokens=spec.engine.prompt_lookup_tokens or 0,
                kv_dtype=spec.engine.kv_dtype,
            )
        self.run(engine)

    def run(self, engine: Engine) -> None:
        """Run an engine on a dedicated thread from now on."""
        spec, model = self._pod.spec, engine.model
        grammars = Grammars(
            lambda: load_tokenizer(source.resolve(spec.model, weights=True)),
            model.vocab_size,
            model.eos_token_ids,
        )
        self._engine = NativeEngine(self._run(engine), model, grammars, spec.engine.kv_dtype)


def _root_of(request: GenerateRequest) -> bytes:
    return root_of(request.adapter, request.cache_salt)
