"""Steps vLLM's engine core on the engine's thread; everything else happens between steps. Not thread safe;
independent of the network.

The core is stepped here and not by vLLM's own loop. So a sequence's blocks can be reserved, read and written
between two steps, and a core whose requests all wait for features does not spin. This module, `core_table` and
`prefix_blocks` use vLLM's scheduler, KV cache manager and block pool directly; vLLM's version is pinned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from vllm.model_executor.models.interfaces import supports_mrope
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from mmd_api.contract.errors import (
    BadLogitsError,
    CountMismatchError,
    DeviceLostError,
    OverloadedError,
)
from mmd_workers.basics.device import check_device
from mmd_workers.engine.interface import EngineStats, StepOutput
from mmd_workers.engine.memory.cache_changes import CacheChanges
from mmd_workers.engine.memory.sequence_room import blocks_for, check_fits, check_spare
from mmd_workers.engine.pacing.estimates import Estimates
from mmd_workers.engine.suspects import charged, suspicion
from mmd_workers.model.grammar import Constraint, Grammars
from mmd_workers.model.prompt import Feature, KvLayout
from mmd_workers.vllm_engine.core_table import CoreReservation, CoreSequence, CoreTable
from mmd_workers.vllm_engine.features import Shelf
from mmd_workers.vllm_engine.metrics import VllmMetrics
from mmd_workers.vllm_engine.prefix_blocks import PrefixBlocks
from mmd_workers.vllm_engine.ranks.kv_of_ranks import Kv
from mmd_workers.vllm_engine.ranks.rank_executor import RankExecutor
from mmd_workers.vllm_engine.reasons import FROM_A_RANK, reason
from mmd_workers.vllm_engine.requests import (
    RequestBuilder,
    check_layout,
    check_runs,
    check_unguided,
    in_order,
    joined,
)
from mmd_workers.vllm_engine.scheduling import PoolScheduler
from mmd_workers.vllm_engine.setup.weights import loaded_bytes
from mmd_workers.vllm_engine.step_outputs import StepOutputs
from mmd_workers.vllm_engine.structured import StepMasks
from mmd_workers.wire.messages.message_parts import Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest


class VllmCore:
    """Sequences on vLLM's engine core, with the commands and outputs of the native `Engine`."""

    def __init__(
        self,
        core: EngineCore,
        shelf: Shelf,
        builder: RequestBuilder,
        grammars: Grammars,
        kv: Kv | None,
        identity_tokens: int,
        feature_row_bytes: int,
        num_threads: int,
    ) -> None:
        """`grammars`: the model's grammars. `kv`: the KV pool, where sequences move between pods.

        `identity_tokens`: tokens per block whose identity is advertised. `feature_row_bytes`: bytes of one
        token of a feature. `num_threads`: OpenMP threads of the thread that steps.
        """
        assert isinstance(core.scheduler, PoolScheduler)
        self._core = core
        self._scheduler = core.scheduler
        self._manager = core.scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._shelf = shelf
        shelf.on_plan = self._planned
        self._scheduler.get_grammar_bitmask = self._masks  # called in each step, while the model runs
        self._plan: SchedulerOutput | None = None  # plan of the running step
        self._builder = builder
        self.grammars = grammars
        self._kv = kv
        self.feature_row_bytes = feature_row_bytes
        self._num_threads = num_threads
        self._stepping_thread: int | None = None  # identifier of the thread that has stepped
        config = core.vllm_config
        self._vocabulary = int(config.model_config.get_vocab_size())
        self._feature_width = feature_row_bytes // config.model_config.dtype.itemsize
        driver = getattr(core.model_executor, "driver_worker", None)  # None if workers are other processes
        model = driver.worker.model_runner.get_model() if driver is not None else None
        self._model = model if supports_mrope(model) else None
        self.device: torch.device = config.device_config.device or torch.device("cpu")
        # Masks for workers in other processes are made on the CPU.
        self._mask_device = self.device if driver is not None else torch.device("cpu")
        self.max_model_len = int(config.model_config.max_model_len)
        self._num_drafts = int(config.num_speculative_tokens)
        self._max_sequences = int(config.scheduler_config.max_num_seqs)
        chunk_tokens = int(config.scheduler_config.max_num_batched_tokens)
        self._block_tokens = int(core.scheduler.block_size)
        self._num_blocks = int(self._pool.num_gpu_blocks) - 1  # vLLM keeps one for itself
        self._failure: Exception | None = None  # error of the step that ended this engine
        self._estimates = Estimates()
        self.metrics = VllmMetrics(config)
        self.table = CoreTable(self._scheduler, shelf, self.metrics)
        self.prefix_blocks = PrefixBlocks(self._manager, self._block_tokens, identity_tokens)
        self._outputs = StepOutputs(
            self.table, shelf, self.prefix_blocks, self._num_blocks, chunk_tokens, self.max_model_len
        )
        self.loaded_bytes = sum(core.model_executor.collective_rpc(loaded_bytes))  # sum of all ranks

    @property
    def kv_layout(self) -> KvLayout:
        """Layout of the KV that pods exchange; empty if this pod exchanges none."""
        return self._kv.layout if self._kv is not None else KvLayout(0, [], [], "")

    def shut_down(self) -> None:
        """End everything that vLLM has started. Call this after the engine's thread has ended."""
        self._core.shutdown()

    def give_up(self) -> None:
        """End the ranks of this pod. May be called from any thread.

        Needed when another pod of the group has ended: the running step would wait for it.
        """
        executor = self._core.model_executor
        if isinstance(executor, RankExecutor):
            executor.give_up()

    def warm_up(self) -> None:
        """Generate two tokens, once without and once with each adapter, and forget them.

        Raises:
            BadLogitsError: the model, or an adapter with it, computes logits that are not numbers.
        """
        self.metrics.paused = True
        try:
            for adapter in ("", *self._builder.adapters):
                self._warm_up(adapter)
        finally:
            self.metrics.paused = False
        self.forget_prefixes()
        self._outputs.hit_tokens = self._outputs.miss_tokens = 0
        self._estimates = Estimates()

    def _warm_up(self, adapter: str) -> None:
        sampling, prompt = Sampling(max_tokens=2, ignore_eos=True), [0] * min(64, self.max_model_len // 2)
        request = GenerateRequest("warm-up", 0, "", prompt, [], sampling, [], 0.0, 0.0, adapter=adapter)
        try:
            self.add("warm-up", request, stop_after_prefill=False)
            while "warm-up" in self.table.sequences:
                for _, error in self.step().failed:
                    if isinstance(error, BadLogitsError):  # any other failure is raised by the next step
                        raise error
        except Exception as error:
            if error is self._failure:  # the caller gets it
                self._failure = None
            raise
        finally:
            self.abort("warm-up")

    # --- sequences ------------------------------------------------------------------------------------------------

    def cached_tokens(self, request: GenerateRequest) -> int:
        """Return the number of leading tokens whose KV is in the prefix cache now, without the last token.

        Only looks up blocks, so another thread may call it. It gets RuntimeError or StopIteration if a block
        was added or removed meanwhile.
        """
        probe = self._builder.build("probe", request, request.output_token_ids, 1)
        return int(self._manager.get_computed_blocks(probe)[1])

    def add(
        self,
        name: str,
        request: GenerateRequest,
        *,
        stop_after_prefill: bool,
        constraint: Constraint | None = None,
        prepared: Request | None = None,
        identities: Sequence[bytes] = (),
    ) -> None:
        """Queue a request. Its features may follow through `fill`; features that another sequence brought are shared.

        `constraint`: state of the request's grammar after its output tokens. `prepared`: the result of
        `prepare`, if it has run on another thread. `identities`: of the leading full blocks, if they are known.

        Raises:
            CapacityError: it can never fit into the context, the KV pool or, with a medium that must not be cut, a step.
            StepFailedError: the model cannot run it.
            ValueError: the id is in use, or nothing is left to generate.
        """
        self.table.check_new(name)
        outputs = request.output_token_ids
        vllm_request = prepared or self.prepare(name, request, outputs, stop_after_prefill=stop_after_prefill)
        self._scheduler.check_media(vllm_request)
        self.table.sequences[name] = CoreSequence(
            request,
            vllm_request,
            len(outputs),
            stop_after_prefill,
            constraint=constraint,
            identities=list(identities),
        )
        for ref in request.features:
            self._shelf.share(ref.feature_id, name)
        self._begin(vllm_request)

    def fill(self, name: str, medium: int, feature: Feature) -> None:
        """Give a sequence the feature of one of its media. Nothing happens if the sequence has left.

        Raises:
            CountMismatchError: the feature's number of tokens differs from the prompt layout's, or its width from the model's.
        """
        if (sequence := self.table.sequences.get(name)) is None:
            return
        ref = sequence.source.features[medium]
        if feature.num_tokens != ref.num_tokens:
            raise CountMismatchError(
                f"medium {medium} has {ref.num_tokens} placeholders, its feature {feature.num_tokens} rows; encoder and language model "
                "serve different models or settings"
            )
        rows = joined(feature)
        if rows.shape != (ref.num_tokens, self._feature_width):
            raise CountMismatchError(
                f"medium {medium} has a feature of {list(rows.shape)} numbers instead of {[ref.num_tokens, self._feature_width]}; encoder "
                "and language model serve different models"
            )
        self._shelf.put(ref.feature_id, name, rows)

    def abort(self, name: str) -> None:
        """Forget a sequence or reservation in any state and free its blocks and features; unknown ids are ignored."""
        self.table.abort(name)

    def prepare(
        self,
        name: str,
        request: GenerateRequest,
        output_token_ids: Sequence[int],
        *,
        stop_after_prefill: bool = False,
    ) -> Request:
        """Build vLLM's request with its hashes, and check that the model can run it.

        May run on any thread: it reads only what never changes.

        Raises:
            CapacityError: it can never fit into the context or the KV pool.
            StepFailedError: the model cannot run it.
            ValueError: nothing is left to generate.
        """
        remaining_tokens = request.sampling.max_tokens - len(output_token_ids)
        if remaining_tokens < 1:
            raise ValueError(
                f"sequence {name}: max_tokens {request.sampling.max_tokens} have already been generated"
            )
        max_tokens = 1 if stop_after_prefill else remaining_tokens
        self._check_fits(len(request.token_ids) + len(output_token_ids), max_tokens)
        check_layout(request, self._vocabulary)
        vllm_request = self._builder.build(name, request, output_token_ids, max_tokens)
        check_runs(vllm_request, self._model)
        return vllm_request

    def _begin(self, request: Request) -> None:
        self.metrics.begin(request)
        self._scheduler.add_request(request)

    def _check_fits(self, prompt_tokens: int, max_tokens: int) -> None:
        check_fits(
            prompt_tokens,
            max_tokens,
            max_model_len=self.max_model_len,
            blocks=self._num_blocks,
            block_tokens=self._block_tokens,
        )

    # --- KV -------------------------------------------------------------------------------------------------------

    def read_kv(self, name: str, start: int, end: int) -> list[torch.Tensor] | None:
        """Return the announced KV of tokens [start, end) of a sequence with `stop_after_prefill`.

        None: after a preemption the KV is being computed again.

        Raises:
            KeyError: there is no such sequence.
        """
        sequence = self.table.sequences[name]
        assert self._kv is not None
        if end > sequence.computed:
            return None
        return self._kv.read([block.block_id for block in sequence.blocks], start, end)

    def reserve(
        self,
        name: str,
        prompt_tokens: int,
        max_tokens: int,
        prefix: Sequence[bytes] = (),
        companion_tokens: int = 0,
    ) -> int:
        """Reserve blocks for the KV of `prompt_tokens` tokens, and for the next token with its drafts.

        `prefix`: identities of the leading full blocks. Returns the number of tokens whose KV is in the
        prefix cache. The first write starts there.

        Raises:
            CapacityError: the sequence can never fit.
            OverloadedError: there are no blocks or no sequence slot now.
            UnsupportedParameterError: the sequence has a companion.
        """
        self.table.check_new(name)
        check_unguided(companion_tokens)
        self._check_fits(prompt_tokens, max_tokens)
        assert self._kv is not None
        num_sequences = len(self.table.reservations) + sum(self._scheduler.get_request_counts())
        if num_sequences >= self._max_sequences:
            raise OverloadedError(
                f"{num_sequences} sequences are on this pod already; retry when one has finished"
            )
        first_step = min(prompt_tokens + 1 + self._num_drafts, self.max_model_len)
        shared = self.prefix_blocks.cached(prefix, prompt_tokens)
        needed = blocks_for(first_step, self._block_tokens) - len(shared)
        free = self._pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in shared)
        check_spare(needed, num_sequences, free, self._num_blocks)
        if needed > free:
            raise OverloadedError(
                f"{needed} KV blocks are needed, {free} are available; try another decode worker, or give the pool more memory"
            )
        self._pool.touch(shared)
        blocks = [*shared, *self._pool.get_new_blocks(needed)]
        cached = len(shared) * self._block_tokens
        self.table.reservations[name] = CoreReservation(blocks, prompt_tokens, len(shared), cached)
        try:
            # Blocks that the prompt fills are written entirely before attention reads them.
            partly = blocks[prompt_tokens // self._block_tokens :]
            self._kv.clear([block.block_id for block in partly])
        except BaseException:
            self.abort(name)
            raise
        return cached

    def write_kv(self, name: str, start: int, tensors: list[torch.Tensor]) -> None:
        """Write the KV of the tokens from `start` on to reserved blocks. Ranges come in order.

        Raises:
            KeyError: nothing is reserved under this id.
            CountMismatchError: a gap, more tokens than reserved, or another model's geometry.
        """
        reservation = self.table.reservations[name]
        assert self._kv is not None
        tokens = tensors[0].shape[1] if tensors else 0
        layout = self._kv.layout
        shapes = [
            (2, tokens, *heads_and_dim)
            for heads_and_dim in zip(layout.num_kv_heads, layout.head_dim, strict=True)
        ]
        if [tuple(tensor.shape) for tensor in tensors] != shapes:
            raise CountMismatchError(f"KV of {name} has another model's geometry: {len(tensors)} layers")
        if start != reservation.written or start + tokens > reservation.prompt_tokens:
            raise CountMismatchError(
                f"KV of tokens {start} to {start + tokens} of {name} came after {reservation.written} of {reservation.prompt_tokens}"
            )
        self._kv.write([block.block_id for block in reservation.blocks], start, tensors)
        reservation.written += tokens

    def attach(
        self,
        name: str,
        request: GenerateRequest,
        output_token_ids: Sequence[int],
        constraint: Constraint | None = None,
        prepared: Request | None = None,
        identities: Sequence[bytes] = (),
    ) -> None:
        """Start decoding a reserved sequence. Its KV has been written, except for the last of `output_token_ids`.

        `constraint`, `prepared`, `identities`: see `add`.

        Raises:
            KeyError: nothing is reserved under this id.
            CountMismatchError: the KV of some token has not been written. The reservation stays.
            StepFailedError: the model cannot run it. The reservation stays.
        """
        reservation = self.table.reservations[name]
        num_tokens = len(request.token_ids) + len(output_token_ids)
        if reservation.written != num_tokens - 1:
            raise CountMismatchError(
                f"KV of {reservation.written} tokens of {name} was written, but {num_tokens - 1} are known"
            )
        vllm_request = prepared or self.prepare(name, request, output_token_ids)
        self._adopt(vllm_request, reservation, num_tokens - 1)
        del self.table.reservations[name]
        self.table.sequences[name] = CoreSequence(
            request,
            vllm_request,
            len(output_token_ids),
            attached=True,
            constraint=constraint,
            identities=list(identities),
        )
        self._begin(vllm_request)

    def _adopt(self, request: Request, reservation: CoreReservation, tokens: int) -> None:
        """Give a request the blocks with the KV of its first tokens, as if it had computed them."""
        (manager,) = self._manager.coordinator.single_type_managers
        manager.req_to_blocks[request.request_id] = list(reservation.blocks)
        manager.num_cached_block[request.request_id] = reservation.shared
        self._manager.cache_blocks(request, tokens)
        request.num_computed_tokens = tokens
        cached = reservation.shared * self._block_tokens
        if request.prefill_stats is not None:
            request.prefill_stats.set(
                request.num_prompt_tokens,
                num_local_cached_tokens=cached,
                num_external_cached_tokens=tokens - cached,
            )

    # --- steps ----------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """True if a request has not ended, or if the model's side does not know yet that it has."""
        return bool(self._scheduler.has_requests() or self._failure)

    def step(self) -> StepOutput:
        """Run one batch. Empty output: nothing can run until something is added, filled or aborted.

        Raises:
            Exception: vLLM failed, and its state is unknown.
        """
        if self._failure is not None:
            raise self._failure
        if self._stepping_thread != threading.get_ident():
            self._stepping_thread = threading.get_ident()
            set_num_threads(self._num_threads)
        started = time.perf_counter()
        self._plan = None
        self._shelf.short.clear()
        try:
            outputs, executed = self._core.step()
            self._core.post_step(executed)
        except Exception as error:  # noqa: BLE001  the next step raises it
            self._failure = error
            return StepOutput(failed=self._suspects(error), changed=True)
        preempted = self._plan.preempted_req_ids if self._plan is not None else None
        self.metrics.record(outputs.values(), len(preempted or ()))
        output = StepOutput()
        self._outputs.note_plan(self._plan, output)
        for client_outputs in outputs.values():
            for result in client_outputs.outputs:
                self._outputs.note_output(result, output)
        self._outputs.announce(self._plan, output)
        output.duration_seconds = time.perf_counter() - started
        self._estimates.add(output)
        return output

    def _suspects(self, error: Exception) -> list[tuple[str, Exception]]:
        """Return the errors to report for the requests of a failed step. The engine ends with its next step.

        A request that ran alone, or in whose steps engines have failed before, must not be placed again:
        another pod would end too. Requests beside it are placed again, and the failure is counted. No request
        is the cause of a lost device, of exhausted memory or of a rank that has ended; after a rank's end
        only a request that is already suspected is not placed again.
        """
        names = list(self._plan.num_scheduled_tokens) if self._plan is not None else []
        sources = {name: self.table.sequences[name].source for name in names if name in self.table.sequences}
        in_rank = FROM_A_RANK.match(str(error))  # vLLM passes on only the text
        if isinstance(error, torch.OutOfMemoryError) or (in_rank and "out of memory" in in_rank[1]):
            out_of_memory = OverloadedError(
                f"the device ran out of memory in a step of {len(sources)} requests ({reason(error)}); lower spec.prefill.chunkTokens or "
                "the KV cache's share of memory"
            )
            return [(name, out_of_memory) for name in sources]
        if in_rank and "CUDA error" in in_rank[1]:
            return []
        try:
            check_device(error, self.device)
        except DeviceLostError as lost:
            self._failure = lost
            return []
        executor = self._core.model_executor
        rank_lost = isinstance(executor, RankExecutor) and executor.has_lost_a_rank()
        return [
            (name, suspicion("vLLM", source.engine_failures, len(sources), error))
            for name, source in sources.items()
            if not rank_lost or charged(source.engine_failures, alone=False)
        ]

    def _planned(self, plan: SchedulerOutput) -> None:
        """Note the plan of a step after vLLM has allocated its blocks, and before anything runs.

        After the step, a sequence that has ended no longer has blocks.
        """
        self._plan = plan
        for name in plan.preempted_req_ids or ():
            if (sequence := self.table.sequences.get(name)) is not None:
                self.table.release_blocks(sequence)
        for name in plan.num_scheduled_tokens:
            if (sequence := self.table.sequences.get(name)) is not None and sequence.stop_after_prefill:
                self.table.keep_blocks(sequence)

    def _masks(self, plan: SchedulerOutput) -> StepMasks | None:
        """Return the grammar masks of the requests that get a token in this step."""
        constraints = {
            name: sequence.constraint
            for name in plan.num_scheduled_tokens
            if (sequence := self.table.sequences.get(name)) is not None
            and sequence.constraint is not None
            and not sequence.request.is_prefill_chunk
        }
        return StepMasks.of(constraints, self._mask_device) if constraints else None

    # --- prefixes -------------------------------------------------------------------------------------------------

    def forget_prefixes(self) -> bool:
        """Empty the prefix cache. False: sequences use blocks of it."""
        return self.prefix_blocks.clear()

    @property
    def identity_tokens(self) -> int:
        """Tokens per block whose identity is exchanged; 0: there is no prefix cache."""
        return self.prefix_blocks.identity_tokens if self._manager.enable_caching else 0

    @property
    def prefix_changes(self) -> CacheChanges:
        """Blocks that the prefix cache has gained and lost, for locality in routing."""
        return self.prefix_blocks.changes

    # --- figures --------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the current load."""
        scheduler = self._scheduler
        self.metrics.refresh(scheduler.make_stats())
        running, waiting = scheduler.get_request_counts()
        unfinished = [
            s for name, s in self.table.sequences.items() if name in scheduler.requests and not s.decodes
        ]
        held_sequences = sum(name not in scheduler.requests for name in self.table.sequences)
        return EngineStats(
            blocks_total=self._num_blocks,
            blocks_free=self._pool.get_num_free_blocks(),
            blocks_reserved=sum(len(r.blocks) - r.shared for r in self.table.reservations.values()),
            block_tokens=self._block_tokens,
            waiting_sequences=waiting,
            running_sequences=running,
            held_sequences=held_sequences,
            reserved_sequences=len(self.table.reservations),
            max_sequences=self._max_sequences,
            waiting_tokens=sum(s.request.num_tokens - s.request.num_computed_tokens for s in unfinished),
            blocked_tokens=sum(self._blocked(s) for s in unfinished),
            preemptions=self._outputs.preemptions,
            prefix_hit_tokens=self._outputs.hit_tokens,
            prefix_miss_tokens=self._outputs.miss_tokens,
            prefill_tokens_per_second=self._estimates.prefill_tokens_per_second,
            itl_seconds=self._estimates.itl_seconds,
        )

    def _blocked(self, sequence: CoreSequence) -> int:
        """Return the number of tokens after a missing feature."""
        request = sequence.request
        missing = [ref for ref in in_order(sequence.source.features) if ref.feature_id not in self._shelf]
        starts = [ref.ranges[0][0] for ref in missing if sum(ref.ranges[-1]) > request.num_computed_tokens]
        return request.num_tokens - max(starts[0], request.num_computed_tokens) if starts else 0


def set_num_threads(count: int) -> None:
    """Set OpenMP's number of threads for the calling thread.

    torch would do this at its first parallel operation, but attention fails if it is planned for one number
    and run with another. vLLM replaces torch's public function by one that does nothing.
    """
    torch._C.set_num_threads(count)
