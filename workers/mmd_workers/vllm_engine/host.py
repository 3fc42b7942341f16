"""vLLM as a part of a pod: weights, KV pool and thread, made from the spec."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch

from mmd_api.contract.errors import BadLogitsError, EngineDeadError, EngineSettingsError, MmdError
from mmd_api.contract.pools import Modality
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.model.grammar import Grammars
from mmd_workers.model.prompt import Feature, KvLayout
from mmd_workers.observe.server import Progress
from mmd_workers.process.closing import close_each, end_now
from mmd_workers.process.group import Leader
from mmd_workers.process.pod import Pod
from mmd_workers.sequences.engine import Added
from mmd_workers.sequences.step_thread import SteppedEngine, SteppedHost
from mmd_workers.vllm_engine.ranks.together import (
    SETTLE_SECONDS,
    MemberEndedError,
    StuckError,
    fetch_weights,
    join_seconds,
    until_ended,
)
from mmd_workers.vllm_engine.reasons import reason, weight
from mmd_workers.vllm_engine.setup.environment import prepare_environment
from mmd_workers.wire.messages.prefill import GenerateRequest

if TYPE_CHECKING:
    from mmd_workers.vllm_engine.core import VllmCore

log = logging.getLogger(__name__)

RECOMPUTED_SECONDS = 0.02


class VllmEngine(SteppedEngine):
    """Requests in the terms of `VllmCore`."""

    _runner: EngineRunner[VllmCore]

    def __init__(
        self,
        runner: EngineRunner[VllmCore],
        grammars: Grammars,
        kv_layout: KvLayout,
        feature_row_bytes: int,
    ) -> None:
        """`feature_row_bytes`: of one token of a feature, with all that belongs to it."""
        super().__init__(runner, grammars)
        self._kv_layout = kv_layout
        self._feature_row_bytes = feature_row_bytes

    @property
    def keeps_features(self) -> bool:
        """They have gone with the next token: memory for those of all that decode is not reserved."""
        return False

    @property
    def kv_layout(self) -> KvLayout:
        """That of the model: vLLM's own is converted."""
        return self._kv_layout

    def feature_bytes(self, modality: Modality, num_tokens: int) -> int:
        """Embeddings and what goes with them."""
        return num_tokens * self._feature_row_bytes

    async def cached_tokens(self, sequence: str, request: GenerateRequest) -> int:
        """Ask vLLM's prefix cache."""
        return await self._runner.look(lambda core: core.cached_tokens(request))

    async def add(
        self,
        sequence: str,
        request: GenerateRequest,
        *,
        stop_after_prefill: bool,
        features: Mapping[int, Feature] | None = None,
    ) -> Added:
        """Queue it with vLLM's scheduler. vLLM computes rotary positions itself, so none travels."""
        constraint = await self._constraint(request, request.output_token_ids)

        def begin(core: VllmCore) -> Added:
            at = time.time()
            core.add(sequence, request, stop_after_prefill=stop_after_prefill, constraint=constraint)
            for medium, feature in (features or {}).items():
                core.fill(sequence, medium, feature)
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
        constraint = await self._constraint(request, output_token_ids)
        await self._runner.call(
            lambda core: core.attach(sequence, request, output_token_ids, constraint=constraint)
        )


class VllmHost(SteppedHost):
    """Owns vLLM's engine core and the thread that steps it."""

    def __init__(self, pod: Pod, device: torch.device, tower_bytes: Callable[[], int] = lambda: 0) -> None:
        """`tower_bytes()`: activations of a tower on the same device, for which the KV pool leaves room."""
        super().__init__(pod, device)
        self._tower_bytes = tower_bytes
        self._engine: VllmEngine | None = None
        self._core: VllmCore | None = None
        self._refused: Exception | None = None  # why it failed in its first steps
        self._lost: EngineDeadError | None = None  # how a rank, or another pod of the group, ended
        self._warming_up = False
        self._stopping = False
        self._reason = ""  # why this pod cannot serve
        self._ended = asyncio.Event()  # another pod of the group has
        settings = pod.settings
        self._group = Leader(settings, self._member_lost, self._asked_to_drain) if settings.group else None

    @property
    def engine(self) -> VllmEngine:
        """The engine's commands."""
        assert self._engine is not None
        return self._engine

    async def load_weights(self) -> None:
        """Wait for the other pods of the group, unless this one is asked to stop before they are there.

        Raises:
            EngineDeadError: they are not there in time.
            UnsupportedModelError: the model or an adapter is not there.
        """
        await super().load_weights()
        if self._group is None:
            return
        await fetch_weights(self._pod)
        gathering = asyncio.create_task(self._group.gather(join_seconds(self._pod)), name="gather")
        stopping = asyncio.create_task(self._pod.tasks.stopping.wait(), name="stopping")
        await asyncio.wait({gathering, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not gathering.done():
            gathering.cancel()
        elif isinstance(error := gathering.exception(), EngineDeadError):
            self._reason = error.message
            raise error
        else:
            gathering.result()

    async def start(self) -> None:
        """Load the weights, and make the KV pool as large as memory allows.

        Raises:
            EngineSettingsError: vLLM is not installed here, refuses its settings, or cannot serve the model; the message has its reason.
            MemoryBudgetError: the pool does not hold one request of full length.
        """
        with self._pod.startup.phase("engine"):
            loop = asyncio.get_running_loop()

            def lost(words: str) -> None:
                if not self._stopping:
                    loop.call_soon_threadsafe(self._rank_lost, words)

            core = self._core = await self._with_group(asyncio.to_thread(self._make_core, lost))
            if self._ended.is_set() and self._lost is not None:  # as it was made
                await asyncio.to_thread(core.give_up)
                raise self._lost
        metrics = self._pod.metrics
        metrics.pass_through(core.metrics.registry)
        metrics.loaded_bytes.inc(core.loaded_bytes)
        log.info("vLLM loaded %d bytes", core.loaded_bytes)
        self._max_model_len = core.max_model_len
        self._engine = VllmEngine(self._run(core), core.grammars, core.kv_layout, core.feature_row_bytes)

    async def _with_group(self, making: Awaitable[VllmCore]) -> VllmCore:
        """What a thread makes, unless another pod of the group ends first. The followers learn at once why it cannot be made.

        Raises:
            MmdError: it cannot be made here, or another pod has ended.
        """
        try:
            return await until_ended(making, self._ended)
        except StuckError:
            why = f"{self._lost.message if self._lost else ''}; a thread that starts vLLM did not end"
            if self._group is not None:
                await close_each(partial(self._group.close, why))
            end_now(why)
        except MemberEndedError as error:
            found = self._cause(error.own, first=False)
        except MmdError as error:
            if self._group is not None and weight(error.message) < 2:
                await self._until_another_ended()
            found = self._cause(error, first=True)
        self._reason = found.message
        if self._group is not None:
            await self._group.close(self._reason)
        raise found

    async def _until_another_ended(self) -> None:
        """What failed here may be a consequence, and another pod about to report of what."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._ended.wait()

    def _cause(self, own: MmdError | None, *, first: bool) -> MmdError:
        """Why this pod cannot go on: its own failure or the end of another process, whichever explains more; else what came first, since
        ranks end when those of other pods do. `first`: whether its own failure did.
        """
        if own is None or (
            self._lost is not None and (weight(self._lost.message), not first) > (weight(own.message), first)
        ):
            assert self._lost is not None
            return self._lost
        return own

    def _make_core(self, rank_lost: Callable[[str], object]) -> VllmCore:
        prepare_environment()
        try:
            from mmd_workers.vllm_engine.setup.make import make_core
        except ImportError as error:
            raise EngineSettingsError(
                f"spec.engine.type: VLLM is not installed in this environment ({error}); use an image built with ENGINE=vllm, or run "
                "`make vllm` on this machine"
            ) from error
        try:
            return make_core(self._pod, self._device, rank_lost, self._tower_bytes())
        except MmdError:
            raise
        except Exception as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> EngineSettingsError:
        """Whatever vLLM raises at its start, it is about the model, its settings or the machine."""
        others = (
            "remove spec.engine.adapters"
            if self._pod.spec.engine.adapters
            else "set spec.engine.type: Native"
        )
        remedy = f"change spec.model or spec.engine.{self._pod.pool}, or {others}"
        return EngineSettingsError(f"vLLM cannot start: {reason(error)}; {remedy}")

    def _rank_lost(self, words: str) -> None:
        if self._lost is None or weight(words) > weight(self._lost.message):
            self._lost = EngineDeadError(f"{words}; the pod restarts")
        self._pod.tasks.failed(self._lost)

    def _member_lost(self, words: str) -> None:
        self._rank_lost(words)
        self._ended.set()
        if self._core is not None:
            self._pod.tasks.in_background(asyncio.to_thread(self._core.give_up), "give-up")

    def _asked_to_drain(self, words: str) -> None:
        log.info("%s: draining", words)
        self._pod.tasks.stopping.set()

    async def stop(self) -> None:
        """End the engine's thread after its current step, what vLLM has started, and the other pods of the group."""
        self._stopping = True
        await asyncio.gather(super().stop(), self._settle())
        if self._group is not None:
            failure = self._pod.tasks.failure
            await self._group.close(self._reason or (str(failure) if failure is not None else ""))
        if self._core is not None:
            await asyncio.to_thread(self._core.shut_down)

    async def _settle(self) -> None:
        """A step that failed may be a consequence of another pod's end, whatever vLLM reports of it: that is the reason then."""
        tasks = self._pod.tasks
        if self._group is None or self._core is None or tasks.failure in (None, self._lost):
            return
        await self._until_another_ended()
        if self._lost is not None and weight(self._lost.message) >= min(1, weight(str(tasks.failure))):
            tasks.failure = self._lost

    async def warm_up(self) -> None:
        """Generate a few tokens: some of what vLLM refuses, it refuses in its first step.

        Raises:
            EngineSettingsError: it fails twice, so it cannot serve the model; the message has its reason. Or it does not end in time.
            BadLogitsError: the model, or an adapter with it, computes no numbers.
            EngineDeadError: a rank has ended.
        """
        self._warming_up = True
        await super().warm_up()
        self._warming_up = False
        if self._lost is not None:
            raise self._lost
        if isinstance(self._refused, MmdError):
            raise self._refused
        if self._refused is not None:
            raise self._refusal(self._refused) from self._refused

    def progress(self) -> dict[str, Progress]:
        """The engine's turns, once it takes some: its first one has a limit of its own."""
        return {} if self._warming_up else super().progress()

    def _warm_up_limit_seconds(self) -> float:
        """As long as the pod may take to start: compilation alone may take minutes."""
        return join_seconds(self._pod)

    async def _warm_up_engine(self) -> None:
        """Once more where it fails: the engine stays usable, and what does not fail again need not keep the pod from serving."""
        self._refused = EngineSettingsError(
            f"vLLM's first step did not end within {self._warm_up_limit_seconds():.0f} s; raise the pool's startDeadlineSeconds, or check "
            "the pod's log for what it waits for"
        )
        try:
            await super()._warm_up_engine()
        except MmdError as error:
            self._refused = error if isinstance(error, BadLogitsError) else None
            raise
        except Exception as error:  # noqa: BLE001  vLLM can raise anything
            log.warning("vLLM's first step failed (%s); it is tried once more", reason(error))
            try:
                await super()._warm_up_engine()
            except Exception:
                self._refused = error
                raise
        self._refused = None
