"""Runs vLLM as a part of a pod: weights, KV pool and thread, made from the spec."""

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
    from vllm.v1.request import Request

    from mmd_workers.vllm_engine.core import VllmCore

log = logging.getLogger(__name__)

RECOMPUTED_SECONDS = 0.02


class VllmEngine(SteppedEngine):
    """Translates a role's requests into commands of `VllmCore`."""

    _runner: EngineRunner[VllmCore]

    def __init__(
        self,
        runner: EngineRunner[VllmCore],
        grammars: Grammars,
        kv_layout: KvLayout,
        feature_row_bytes: int,
    ) -> None:
        """`feature_row_bytes`: bytes of one token of a feature, all of its tensors included."""
        # vLLM computes text causally, also where a model does not. Only the tokens of one medium see one another.
        super().__init__(runner, grammars, bidirectional_prompt=False)
        self._kv_layout = kv_layout
        self._feature_row_bytes = feature_row_bytes

    @property
    def keeps_features(self) -> bool:
        """False: features are released with the next token, and no memory is reserved for those of decoding sequences."""
        return False

    @property
    def kv_layout(self) -> KvLayout:
        """Layout of the model's KV, into which vLLM's own layout is converted."""
        return self._kv_layout

    def feature_bytes(self, modality: Modality, num_tokens: int) -> int:
        """Return the bytes of the embeddings and the tensors that belong to them."""
        return num_tokens * self._feature_row_bytes

    async def cached_tokens(self, sequence: str, request: GenerateRequest) -> int:
        """Return how many leading tokens vLLM's prefix cache holds."""
        return await self._runner.look(lambda core: core.cached_tokens(request))

    def _identity_tokens(self, engine: VllmCore) -> int:
        return engine.identity_tokens

    async def add(
        self,
        sequence: str,
        request: GenerateRequest,
        *,
        stop_after_prefill: bool,
        features: Mapping[int, Feature] | None = None,
    ) -> Added:
        """Queue the request with vLLM's scheduler. vLLM computes rotary positions itself, so none are sent."""
        constraint = await self._constraint(request, request.output_token_ids)
        identities = await self.identities(sequence, request)
        outputs = request.output_token_ids
        prepared = await self._runner.aside(
            lambda core: core.prepare(sequence, request, outputs, stop_after_prefill=stop_after_prefill)
        )
        self._identities.pop(sequence, None)

        def begin(core: VllmCore) -> Added:
            added_at = time.time()
            core.add(
                sequence,
                request,
                stop_after_prefill=stop_after_prefill,
                constraint=constraint,
                prepared=prepared,
                identities=identities,
            )
            for medium, feature in (features or {}).items():
                core.fill(sequence, medium, feature)
            return Added(added_at, next_position=0)

        return await self._runner.call(begin)

    async def read_kv(self, sequence: str, start: int, end: int) -> list[torch.Tensor]:
        """Copy the KV range on the engine's device. After a preemption, wait until it has been computed again."""
        while (read := await self._runner.call(lambda core: core.read_kv(sequence, start, end))) is None:
            await asyncio.sleep(RECOMPUTED_SECONDS)
        return read

    async def attach(
        self, sequence: str, request: GenerateRequest, output_token_ids: list[int], next_position: int
    ) -> None:
        """Start decoding the sequence from the next step on."""
        constraint = await self._constraint(request, output_token_ids)
        leading = self._identities.pop(sequence, [])

        def prepare(core: VllmCore) -> tuple[Request, list[bytes]]:
            prepared = core.prepare(sequence, request, output_token_ids)
            return prepared, self._hashed(core, request, output_token_ids, leading)

        prepared, identities = await self._runner.aside(prepare)
        await self._runner.call(
            lambda core: core.attach(sequence, request, output_token_ids, constraint, prepared, identities)
        )


class VllmHost(SteppedHost):
    """Owns vLLM's engine core and the thread that steps it."""

    def __init__(self, pod: Pod, device: torch.device, tower_bytes: Callable[[], int] = lambda: 0) -> None:
        """`tower_bytes()`: bytes of activations of a tower on the same device, which the KV pool leaves free."""
        super().__init__(pod, device)
        self._tower_bytes = tower_bytes
        self._engine: VllmEngine | None = None
        self._core: VllmCore | None = None
        self._refused: Exception | None = None  # error of the first steps
        self._lost: EngineDeadError | None = None  # end of a rank, or of another pod of the group
        self._warming_up = False
        self._stopping = False
        self._reason = ""  # reason why this pod cannot serve
        self._ended = asyncio.Event()  # another pod of the group has ended
        settings = pod.settings
        self._group = Leader(settings, self._member_lost, self._asked_to_drain) if settings.group else None

    @property
    def engine(self) -> VllmEngine:
        """Engine with the commands for sequences."""
        assert self._engine is not None
        return self._engine

    async def load_weights(self) -> None:
        """Fetch the weights. In a group, wait until the other pods have joined, or this pod is asked to stop.

        Raises:
            EngineDeadError: a pod has not joined in time.
            UnsupportedModelError: the model or an adapter is not available.
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
            EngineSettingsError: vLLM is not installed here, refuses its settings, or cannot serve the model; the message has
                vLLM's reason.
            MemoryBudgetError: the pool does not hold one request of full length.
        """
        with self._pod.startup.phase("engine"):
            loop = asyncio.get_running_loop()

            def lost(words: str) -> None:
                if not self._stopping:
                    loop.call_soon_threadsafe(self._rank_lost, words)

            core = self._core = await self._with_group(asyncio.to_thread(self._make_core, lost))
            if self._ended.is_set() and self._lost is not None:  # a pod ended while the core was made
                await asyncio.to_thread(core.give_up)
                raise self._lost
        metrics = self._pod.metrics
        metrics.pass_through(core.metrics.registry)
        metrics.loaded_bytes.inc(core.loaded_bytes)
        log.info("vLLM loaded %d bytes", core.loaded_bytes)
        self._max_model_len = core.max_model_len
        self._engine = VllmEngine(self._run(core), core.grammars, core.kv_layout, core.feature_row_bytes)

    async def _with_group(self, making: Awaitable[VllmCore]) -> VllmCore:
        """Return the core that a thread makes, unless another pod of the group ends first.

        If the core cannot be made, the followers get the reason at once.

        Raises:
            MmdError: the core cannot be made here, or another pod has ended.
        """
        try:
            return await until_ended(making, self._ended)
        except StuckError:
            why = f"{self._lost.message if self._lost else ''}; a thread that starts vLLM did not end"
            if self._group is not None:
                await close_each(partial(self._group.close, why))
            end_now(why)
        except MemberEndedError as error:
            failure = self._cause(error.own, first=False)
        except MmdError as error:
            if self._group is not None and weight(error.message) < 2:
                await self._until_another_ended()
            failure = self._cause(error, first=True)
        self._reason = failure.message
        if self._group is not None:
            await self._group.close(self._reason)
        raise failure

    async def _until_another_ended(self) -> None:
        """Wait for the end of another pod: a failure here may be its consequence, and its report may be on the way."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._ended.wait()

    def _cause(self, own_failure: MmdError | None, *, first: bool) -> MmdError:
        """Return why this pod cannot continue: its own failure or the end of another process, whichever explains more.

        If both explain as much, the earlier one counts, since ranks end when those of other pods do. `first`:
        this pod's own failure came first.
        """
        if own_failure is None or (
            self._lost is not None
            and (weight(self._lost.message), not first) > (weight(own_failure.message), first)
        ):
            assert self._lost is not None
            return self._lost
        return own_failure

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
        """Turn an error of vLLM's start into one about the settings: it concerns the model, its settings or the machine."""
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
        """Stop the engine's thread after its current step, the other pods of the group, and everything vLLM has started."""
        self._stopping = True
        await asyncio.gather(super().stop(), self._settle())
        if self._group is not None:
            failure = self._pod.tasks.failure
            await self._group.close(self._reason or (str(failure) if failure is not None else ""))
        if self._core is not None:
            await asyncio.to_thread(self._core.shut_down)

    async def _settle(self) -> None:
        """Replace the failure of a step by the end of another pod, if the failure may be a consequence of that end.

        This holds whatever vLLM reports about the step.
        """
        tasks = self._pod.tasks
        if self._group is None or self._core is None or tasks.failure in (None, self._lost):
            return
        await self._until_another_ended()
        if self._lost is not None and weight(self._lost.message) >= min(1, weight(str(tasks.failure))):
            tasks.failure = self._lost

    async def warm_up(self) -> None:
        """Generate a few tokens, because vLLM refuses some settings only in its first step.

        Raises:
            EngineSettingsError: vLLM fails twice, so it cannot serve the model, and the message has its reason; or the first step
                does not end in time.
            BadLogitsError: the model, or an adapter with it, computes logits that are not numbers.
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
        """Return the engine's progress, except during warm-up, which has its own time limit."""
        return {} if self._warming_up else super().progress()

    def _warm_up_limit_seconds(self) -> float:
        """Return the time that the pod may take to start: compilation alone may take minutes."""
        return join_seconds(self._pod)

    async def _warm_up_engine(self) -> None:
        """Warm up the engine, and try once more if that fails.

        The engine stays usable, and a failure that does not recur must not keep the pod from serving.
        """
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
