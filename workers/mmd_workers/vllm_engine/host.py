"""vLLM as a part of a pod: weights, KV pool and thread, made from the spec."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import torch

from mmd_api.contract.errors import MmdError, UnsupportedModelError
from mmd_api.contract.pools import Modality
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.model.prompt import KvLayout
from mmd_workers.pod import Pod
from mmd_workers.sequences.engine import Added
from mmd_workers.sequences.stepped import SteppedEngine, SteppedHost
from mmd_workers.vllm_engine.environment import prepare_environment
from mmd_workers.wire.messages import GenerateRequest

if TYPE_CHECKING:
    from mmd_workers.vllm_engine.core import VllmCore

RECOMPUTED_SECONDS = 0.02


class VllmEngine(SteppedEngine):
    """Requests in the terms of `VllmCore`."""

    _runner: EngineRunner[VllmCore]

    def __init__(self, runner: EngineRunner[VllmCore], kv_layout: KvLayout, feature_row_bytes: int) -> None:
        """`feature_row_bytes`: of one token of a feature, with all that belongs to it."""
        super().__init__(runner)
        self._kv_layout = kv_layout
        self._feature_row_bytes = feature_row_bytes

    @property
    def kv_layout(self) -> KvLayout:
        """That of the model: vLLM's own is converted."""
        return self._kv_layout

    def feature_bytes(self, modality: Modality, num_tokens: int) -> int:
        """Embeddings and what goes with them."""
        return num_tokens * self._feature_row_bytes

    async def cached_tokens(self, sequence: str, request: GenerateRequest) -> int:
        """Ask vLLM's prefix cache."""
        return await self._runner.call(lambda core: core.cached_tokens(request))

    async def add(self, sequence: str, request: GenerateRequest, *, stop_after_prefill: bool) -> Added:
        """Queue it with vLLM's scheduler. vLLM computes rotary positions itself, so none travels."""

        def begin(core: VllmCore) -> Added:
            at = time.time()
            core.add(sequence, request, stop_after_prefill=stop_after_prefill)
            return Added(at, next_position=0)

        return await self._runner.call(begin)

    async def read_kv(self, sequence: str, start: int, end: int) -> list[torch.Tensor]:
        """Copy the range, on the engine's device; after a preemption, once it has been computed again."""
        while (read := await self._runner.call(lambda core: core.read_kv(sequence, start, end))) is None:
            await asyncio.sleep(RECOMPUTED_SECONDS)
        return read

    async def attach(
        self, sequence: str, request: GenerateRequest, output_token_ids: list[int], next_position: int
    ) -> None:
        """It decodes from the next step on."""
        await self._runner.call(lambda core: core.attach(sequence, request, output_token_ids))


class VllmHost(SteppedHost):
    """Owns vLLM's engine core and the thread that steps it."""

    def __init__(self, pod: Pod, device: torch.device) -> None:
        super().__init__(pod, device)
        self._engine: VllmEngine | None = None
        self._core: VllmCore | None = None

    @property
    def engine(self) -> VllmEngine:
        """The engine's commands."""
        assert self._engine is not None
        return self._engine

    async def start(self) -> None:
        """Load the weights, and make the KV pool as large as memory allows.

        Raises:
            UnsupportedModelError: vLLM is not installed here, or cannot serve the model; the message is vLLM's own.
            MemoryBudgetError: the pool does not hold one request of full length.
        """
        with self._pod.startup.phase("engine"):
            core = self._core = await asyncio.to_thread(self._make_core)
        self._max_model_len = core.max_model_len
        self._engine = VllmEngine(self._run(core), core.kv_layout, core.feature_row_bytes)

    def _make_core(self) -> VllmCore:
        prepare_environment()
        try:
            from mmd_workers.vllm_engine.make import make_core
        except ImportError as error:
            raise UnsupportedModelError(
                f"spec.engine.type: VLLM is not installed in this environment ({error}); use an image built with ENGINE=vllm, or run "
                "`make vllm` on this machine"
            ) from error
        try:
            return make_core(self._pod, self._device)
        except MmdError:
            raise
        except Exception as error:  # whatever vLLM raises, it is about the model or the machine
            raise UnsupportedModelError(
                f"spec.engine.type: vLLM cannot serve this model here: {_reason(error)}"
            ) from error

    async def stop(self) -> None:
        """End the engine's thread after its current step, and what vLLM has started."""
        await super().stop()
        if self._core is not None:
            await asyncio.to_thread(self._core.shut_down)


def _reason(error: BaseException) -> str:
    """The first line of each message in the chain of causes, the innermost last."""
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(lines) < 4:
        lines.append(f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0][:300]}")
        cause = cause.__cause__ or cause.__context__
    return "; ".join(lines)
