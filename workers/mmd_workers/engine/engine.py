"""The engine: sequences in, tokens out, one step at a time. Independent of the network, and of any clock but its own stopwatch; not thread safe.

A step goes through the files in this order: scheduler (what runs) → model_runner (batch, model with
`attention`, sampler) → step_results (tokens, ready KV, ends).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from functools import partial

import torch

from mmd_api.contract.errors import CapacityError, CountMismatchError, OverloadedError
from mmd_api.contract.sampling import Guidance
from mmd_api.contract.steps import StepBound
from mmd_api.contract.text_share import TextShare
from mmd_api.spec.engine import KvDtype
from mmd_workers.basics.device import check_device, run_isolating
from mmd_workers.engine.choosing.drafts import Drafts, PromptLookup
from mmd_workers.engine.choosing.logit_rules import RuleState, rule_state
from mmd_workers.engine.fusion import prepare
from mmd_workers.engine.interface import EngineStats, SamplingParams, SequenceInput, StepOutput
from mmd_workers.engine.memory.blocks import BlockPool, MediaSpan, completed_identities, prompt_root
from mmd_workers.engine.memory.cache_changes import CacheChanges
from mmd_workers.engine.memory.kv_pool import KvPool
from mmd_workers.engine.memory.sequence_room import check_fits, check_spare, preempted
from mmd_workers.engine.model_runner import ModelRunner
from mmd_workers.engine.pacing.estimates import Estimates
from mmd_workers.engine.pacing.pace import Pace
from mmd_workers.engine.pieces import Work
from mmd_workers.engine.scheduler import Scheduler
from mmd_workers.engine.sequence import Sequence
from mmd_workers.engine.sequence_table import Reservation, SequenceTable
from mmd_workers.engine.step_results import StepResults, eos_of, failure_of
from mmd_workers.engine.suspects import suspicion
from mmd_workers.model.grammar import Constraint
from mmd_workers.model.interfaces import LanguageModel
from mmd_workers.model.prompt import Feature

WARM_UP_TOKENS = 64


class Engine:
    """Continuous batching over a paged KV pool for one `LanguageModel`. Replaces the attention of the model's decoder."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        kv_cache_bytes: int,
        block_tokens: int,
        max_sequences: int,
        chunk_tokens: int,
        prefix_cache: bool,
        max_model_len: int,
        fused_layers: bool = True,
        step_seconds: float | None = None,
        text_share_percent: int | None = None,
        draft_tokens: int = 0,
        kv_dtype: KvDtype = "Model",
    ) -> None:
        """Allocate the pool and replace the decoder's attention.

        `fused_layers`: let the CPU kernels compute whole decoder layers where they can; otherwise they
        compute only linear layers, norms and attention. `step_seconds`: time limit of a step with media;
        None: as long as `chunk_tokens` take. `text_share_percent`: share of texts in the prompt tokens of a
        step with both texts and media; None: the order of prompts decides. `draft_tokens`: drafts that a step
        may compute for a sequence in addition to its next token; 0: none. `kv_dtype`: data type of the pool.

        Raises:
            UnsupportedModelError: the decoder cannot be served from a paged KV pool.
            CapacityError: `kv_cache_bytes` does not hold one block.
        """
        prepare(model, fused_layers=fused_layers)
        self.model = model
        self.max_model_len = max_model_len
        self.kv = KvPool.of_bytes(
            model.kv_layout.packed_as(kv_dtype), kv_cache_bytes, block_tokens, model.device
        )
        self.blocks = BlockPool(self.kv.num_blocks, block_tokens)
        self._pace = None if step_seconds is None else Pace(StepBound.of_chunks(step_seconds, chunk_tokens))
        self.scheduler = Scheduler(
            self.blocks,
            max_sequences=max_sequences,
            chunk_tokens=chunk_tokens,
            prefix_cache=prefix_cache,
            pace=self._pace,
            text_share=None if text_share_percent is None else TextShare(text_share_percent),
            drafts=Drafts(draft_tokens, model.vocab_size, model.suppress_token_ids) if draft_tokens else None,
            max_model_len=max_model_len,
        )
        self.table = SequenceTable(self.scheduler)
        self.model_runner = ModelRunner(model, self.kv, self.scheduler.max_sequences)
        self._results = StepResults(model, self.scheduler, self.table, max_model_len)
        self._kernels_pending = False  # launched, and nothing has waited for them
        self._arrivals = 0
        self._suspects: list[Sequence] = []  # sequences on which the running step may fail
        self._failure: Exception | None = None  # error of the step that ended this engine
        self._estimates = Estimates()

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    # --- sequences ------------------------------------------------------------------------------------------------

    def add(self, item: SequenceInput) -> None:
        """Queue a sequence. Its features may follow through `fill`.

        Raises:
            CapacityError: it can never fit into the context or the pool.
            ValueError: the id is in use, or nothing is left to generate.
        """
        self.table.check_new(item.sequence_id)
        prompt, sampling = item.prompt, item.sampling
        remaining_tokens = sampling.max_tokens - len(item.output_token_ids)
        if remaining_tokens < 1:
            raise ValueError(
                f"sequence {item.sequence_id}: max_tokens {sampling.max_tokens} have already been generated"
            )
        companion = self._companion(
            item.sequence_id, item.guidance, item.output_token_ids, sampling, item.root
        )
        companion_tokens = 0 if companion is None else companion.num_tokens
        self._check_fits(
            len(prompt.token_ids), 1 if item.stop_after_prefill else remaining_tokens, companion_tokens
        )
        prompt_tokens = prompt.token_ids[: len(prompt.token_ids) - len(item.output_token_ids)]
        sequence = Sequence(
            sequence_id=item.sequence_id,
            arrival=self._next_arrival(),
            token_ids=list(prompt.token_ids),
            prompt_length=len(prompt.token_ids),
            next_position=prompt.next_position,
            sampling=sampling,
            media_spans=list(item.media_spans),
            prompt=prompt,
            arrived=item.arrived,
            num_outputs=len(item.output_token_ids),
            rules=self._rules(sampling, prompt_tokens),
            stop_after_prefill=item.stop_after_prefill,
            root=self._root(item.root, prompt_tokens, item.media_spans, item.identities),
            identities=list(item.identities),
            constraint=item.constraint,
            prompt_logprobs={} if sampling.prompt_logprobs and not item.output_token_ids else None,
            engine_failures=item.engine_failures,
            guidance_scale=1.0 if item.guidance is None else item.guidance.scale,
            companion=companion,
        )
        self._follow(sequence)
        self.table.sequences[item.sequence_id] = sequence
        self.scheduler.add(sequence)

    def prefix(
        self,
        prompt_token_ids: Items[int],
        media_spans: Items[MediaSpan],
        root: bytes = b"",
        output_token_ids: Items[int] = (),
        leading: Items[bytes] = (),
    ) -> tuple[list[bytes], int]:
        """Return the identities of a prompt's and its outputs' full blocks, and how many of these tokens the prefix
        cache holds now. Empty without a prefix cache.

        Changes nothing, and only looks up blocks. `root`: see `SequenceInput`. `leading`: identities of the
        first blocks, where another pod has hashed them. The last token is never cached: it must be computed.
        Cached blocks may be evicted before the prompt is added and admitted; `StepOutput.admitted` reports
        what was still cached then.
        """
        if not self.scheduler.prefix_cache:
            return [], 0
        size, token_ids = self.blocks.block_tokens, [*prompt_token_ids, *output_token_ids]
        root = self._root(root, prompt_token_ids, media_spans)
        identities = completed_identities(leading, token_ids, media_spans, size, root)
        return identities, len(self.blocks.find(identities[: (len(token_ids) - 1) // size])) * size

    def fill(self, sequence_id: str, medium: int, feature: Feature) -> bool:
        """Give a sequence the feature of one of its media. False: the sequence has left, or no longer needs the feature.

        Raises:
            CountMismatchError: the feature's number of tokens differs from the prompt layout's.
        """
        sequence = self.table.sequences.get(sequence_id)
        if sequence is None or sequence.prompt is None or medium not in sequence.prompt.missing:
            return False
        self.model.fill(sequence.prompt, medium, feature)
        return True

    def abort(self, sequence_id: str) -> None:
        """Forget a sequence or a reservation in any state and free its blocks; unknown ids are ignored."""
        self.table.abort(sequence_id)

    def has_work(self) -> bool:
        """True if a sequence waits or runs. A step may still find that all of them wait for features or blocks."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._failure)

    # --- moving KV ------------------------------------------------------------------------------------------------

    def read_kv(self, sequence_id: str, start: int, end: int) -> list[torch.Tensor]:
        """Return the KV of tokens [start, end): for each layer a contiguous [2, tokens, kv_heads, head_dim]
        of the pool's layout.

        Raises:
            KeyError: unknown sequence.
            CountMismatchError: some of these tokens have no KV yet, or their blocks have been returned to the pool.
        """
        sequence = self.table.sequences[sequence_id]
        kept = sequence.dropped * self.blocks.block_tokens
        if start < kept:
            raise CountMismatchError(
                f"KV of tokens [{start}, {end}) was requested, but the first {kept} left the model's window; only a sequence that is "
                "handed over keeps them"
            )
        if not 0 <= start <= end <= sequence.computed:
            raise CountMismatchError(
                f"KV of tokens [{start}, {end}) was requested, but only {sequence.computed} tokens are computed; wait for KvReady"
            )
        with torch.no_grad():
            return self.kv.read(sequence.blocks, start, end)

    def reserve(
        self,
        sequence_id: str,
        prompt_tokens: int,
        max_tokens: int,
        prefix: Items[bytes] = (),
        companion_tokens: int = 0,
    ) -> int:
        """Reserve blocks for a sequence whose KV will arrive through `write_kv`.

        The blocks hold `prompt_tokens` tokens and the first of `max_tokens` more. The rest grows block by
        block, so an unlimited answer reserves no more than a short one. `prefix`: identities of the leading
        full blocks. `companion_tokens`: prompt tokens of the companion, which gets blocks too but receives no
        KV; 0: no companion. Returns the number of tokens whose KV is in the prefix cache. The first write
        starts there.

        Sequences that wait here keep a slot each: without one they would never run while reservations keep coming.

        Raises:
            CapacityError: the sequence can never fit.
            OverloadedError: there are no blocks or no sequence slot now.
        """
        self.table.check_new(sequence_id)
        self._check_fits(prompt_tokens, max_tokens, companion_tokens)
        num_sequences = self.scheduler.places + self.scheduler.waiting_places + self.table.reserved_places
        if num_sequences + (2 if companion_tokens else 1) > self.scheduler.max_sequences:
            raise OverloadedError(
                f"{num_sequences} of {self.scheduler.max_sequences} sequence slots are in use; try another decode worker"
            )
        size, pool = self.blocks.block_tokens, self.blocks
        cached_blocks = pool.find(prefix[: prompt_tokens // size]) if self.scheduler.prefix_cache else []
        own_blocks = pool.blocks_for(prompt_tokens + 1) - len(cached_blocks)
        companion_blocks = pool.blocks_for(companion_tokens + 1) if companion_tokens else 0
        check_spare(
            own_blocks + companion_blocks,
            num_sequences,
            pool.available_beside(cached_blocks),
            pool.num_blocks,
        )
        pool.share(cached_blocks)
        try:
            blocks = pool.allocate(own_blocks + companion_blocks)
        except OverloadedError:
            pool.release(cached_blocks)
            raise
        cached = len(cached_blocks) * size
        self.table.reservations[sequence_id] = Reservation(
            [*cached_blocks, *blocks[:own_blocks]],
            prompt_tokens,
            len(cached_blocks),
            cached,
            blocks[own_blocks:],
        )
        return cached

    def write_kv(self, sequence_id: str, start: int, tensors: list[torch.Tensor]) -> None:
        """Write the KV of the tokens from `start` on, in the layout of `read_kv`, to reserved blocks. Ranges come in order.

        Raises:
            KeyError: nothing is reserved under this id.
            CountMismatchError: a gap, more tokens than reserved, or another model's geometry.
        """
        reservation = self.table.reservations[sequence_id]
        end = start + int(tensors[0].shape[1])
        shared_tokens = reservation.shared * self.blocks.block_tokens
        if not shared_tokens <= start <= reservation.written or end > reservation.kv_tokens:
            raise CountMismatchError(
                f"KV of tokens [{start}, {end}) arrived after {reservation.written} of {reservation.kv_tokens}"
            )
        with torch.no_grad():
            self.kv.write(reservation.blocks, start, tensors)
        reservation.written = max(reservation.written, end)

    def attach(
        self,
        sequence_id: str,
        token_ids: list[int],
        sampling: SamplingParams,
        output_token_ids: list[int],
        next_position: int,
        media_spans: Items[MediaSpan],
        arrived: float = 0.0,
        constraint: Constraint | None = None,
        root: bytes = b"",
        guidance: Guidance | None = None,
        engine_failures: int = 0,
        identities: Items[bytes] = (),
    ) -> None:
        """Start decoding a reserved sequence whose KV has been written.

        `token_ids` is the prompt without outputs. `output_token_ids` ends with the only token without KV;
        `next_position` is its rotary position (`LoweredPrompt.next_position` when prefill has just sampled
        it). `constraint`, `root`, `guidance`, `engine_failures`, `identities`: see `SequenceInput`. The companion's prompt is
        computed first.

        Raises:
            KeyError: nothing is reserved under this id.
            CountMismatchError: the KV of some token has not been written. The reservation stays.
        """
        reservation = self.table.reservations[sequence_id]
        all_tokens = list(token_ids) + list(output_token_ids)
        if not output_token_ids or reservation.written < len(all_tokens) - 1:
            raise CountMismatchError(
                f"{len(all_tokens) - 1} tokens need KV, but only {reservation.written} have it; send the rest before committing"
            )
        companion = self._companion(sequence_id, guidance, output_token_ids, sampling, root)
        lacking = 0 if companion is None else self.blocks.blocks_for(companion.num_tokens)
        held = len(reservation.companion_blocks)
        if lacking > held or bool(lacking) != bool(held):
            raise CountMismatchError(
                f"the companion needs {lacking} KV blocks, but {held} are reserved for it; offer the sequence with its companion's tokens"
            )
        if companion is not None:
            companion.blocks = reservation.companion_blocks
        del self.table.reservations[sequence_id]
        sequence = Sequence(
            sequence_id=sequence_id,
            arrival=self._next_arrival(),
            token_ids=all_tokens,
            prompt_length=len(all_tokens) - 1,
            next_position=next_position,
            sampling=sampling,
            media_spans=list(media_spans),
            prompt=None,
            arrived=arrived,
            num_outputs=len(output_token_ids),
            rules=self._rules(sampling, token_ids),
            blocks=reservation.blocks,
            registered=reservation.shared,
            constraint=constraint,
            root=self._root(root, token_ids, media_spans, identities),
            identities=list(identities),
            engine_failures=engine_failures,
            guidance_scale=1.0 if guidance is None else guidance.scale,
            companion=companion,
        )
        self._follow(sequence)
        self.table.sequences[sequence_id] = sequence
        self.scheduler.start(sequence)
        self.scheduler.finish_chunk(Work(sequence, 0, len(all_tokens) - 1))

    # --- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Run one batch. Empty output: nothing can run until something is added, filled or released.

        Preempted sequences that cannot be recomputed here are dropped and reported in `failed` as
        PreemptedError. When the model fails, the batch is halved until the faulty sequences run alone; those
        are dropped and reported in `failed`. When the engine's own code fails, `failed` has the sequences that it
        may have failed on, and the next step raises the error.

        Raises:
            DeviceLostError: the accelerator is broken; the engine is unusable from then on.
            Exception: the step before failed, and the engine's state is unknown.
        """
        if self._failure is not None:
            raise self._failure
        self._suspects = [*self.scheduler.running, *self.scheduler.waiting]
        try:
            return self._step()
        except Exception as error:  # noqa: BLE001  the next step raises it
            check_device(error, self.device)
            self._failure = error
            failed: list[tuple[str, Exception]] = [
                (s.sequence_id, suspicion("the engine", s.engine_failures, len(self._suspects), error))
                for s in self._suspects
            ]
            return StepOutput(failed=failed, changed=True)
        finally:
            self._suspects = []

    def _step(self) -> StepOutput:
        started = time.perf_counter()
        schedule = self.scheduler.schedule(self.table.reserved_places)
        work = schedule.decodes + schedule.prefills
        output = StepOutput(
            sequences=sum(item.sequence.places for item in work),
            prefill_tokens=sum(item.tokens for item in schedule.prefills),
            decode_sequences=sum(item.sequence.places for item in schedule.decodes),
            draft_tokens=sum(len(item.drafts) for item in schedule.decodes),
        )
        for sequence in self.table.take_preempted():
            error = preempted(self.blocks.num_blocks, sequence.num_outputs)
            output.failed.append((sequence.sequence_id, error))
        output.admitted, self.scheduler.admitted = self.scheduler.admitted, {}
        if not work:
            return output
        runs_before, pending_before = self.model_runner.num_runs, self._kernels_pending
        # Rows may run again: they write the same KV to the same slots, and nothing is sampled before all rows have run.
        run = partial(self.model_runner.run, waits=schedule.bounded)
        results = run_isolating(work, run, self.model.device)
        self.scheduler.window = self.model_runner.window
        for item, result in zip(work, results, strict=True):
            self._suspects = [item.sequence]
            if isinstance(result, Exception):
                self.abort(item.sequence.sequence_id)
                output.failed.append((item.sequence.sequence_id, failure_of(result, item.sequence, item)))
                continue
            self._results.finish(item, result, output)
        self._suspects = [item.sequence for item in work]
        waited = schedule.bounded or any(item.samples for item in work)
        self._kernels_pending = self.model.device.type == "cuda" and not waited
        output.timed = self.model_runner.num_runs - runs_before == 1 and not (
            pending_before or self._kernels_pending
        )
        output.duration_seconds = time.perf_counter() - started
        self._estimates.add(output)
        self.scheduler.finish_step(output)
        return output

    def warm_up(self) -> None:
        """Prefill a chunk and decode a token, both sampled, on the thread and in the pool that sequences will use.

        Leaves no trace: blocks are free and empty as before, and no counter or estimate changes.

        Raises:
            OverloadedError: no blocks are free, because sequences already run.
        """
        most_tokens = min(self.max_model_len, self.kv.num_blocks * self.blocks.block_tokens)
        tokens = max(1, min(WARM_UP_TOKENS, self.scheduler.chunk_tokens, most_tokens - 1))
        blocks = self.blocks.allocate(self.blocks.blocks_for(min(tokens + 1, most_tokens)))
        try:
            prompt = self.model.lower([0] * tokens, [])
            random_sampling = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9)
            sequence = Sequence(
                "", 0, [0] * tokens, tokens, prompt.next_position, random_sampling, [], prompt
            )
            sequence.blocks = blocks
            self.model_runner.run([Work(sequence, 0, tokens)])
            if tokens < most_tokens:
                sequence.token_ids.append(0)
                sequence.sampling = SamplingParams(max_tokens=2)
                self.model_runner.run([Work(sequence, tokens, tokens + 1)])
            self.scheduler.window = self.model_runner.window
        finally:
            self.kv.clear(blocks)
            self.blocks.release(blocks)

    def _follow(self, sequence: Sequence) -> None:
        """Enable drafts for a sequence without rules, grammar and companion.

        Rules and grammars depend on earlier tokens, so the next token must be known first. With a companion,
        each draft would take two rows.
        """
        unconstrained = sequence.rules is None and sequence.constraint is None and sequence.companion is None
        if self.scheduler.drafts is not None and unconstrained:
            sequence.lookup = PromptLookup()

    def _companion(
        self,
        sequence_id: str,
        guidance: Guidance | None,
        output_token_ids: list[int],
        sampling: SamplingParams,
        root: bytes,
    ) -> Sequence | None:
        """Return the sequence that guidance steers away from: a text prompt of its own, followed by the same
        output tokens."""
        if guidance is None:
            return None
        prompt = self.model.lower(guidance.token_ids, [], output_token_ids)
        return Sequence(
            sequence_id=sequence_id,
            arrival=0,
            token_ids=list(prompt.token_ids),
            prompt_length=len(prompt.token_ids),
            next_position=prompt.next_position,
            sampling=sampling,
            media_spans=[],
            prompt=prompt,
            num_outputs=len(output_token_ids),
            root=self._root(root, guidance.token_ids, []),
        )

    def _root(
        self,
        root: bytes,
        prompt_token_ids: Items[int],
        media_spans: Items[MediaSpan],
        identities: Items[bytes] = (),
    ) -> bytes:
        """Return the parent of the first block; `root` itself where that block has its identity already."""
        if identities:
            return root
        bidirectional = self.model.bidirectional_prompt
        return prompt_root(root, prompt_token_ids, media_spans, bidirectional=bidirectional)

    def _rules(self, sampling: SamplingParams, prompt: Items[int]) -> RuleState | None:
        return rule_state(sampling, eos_of(self.model, sampling) | sampling.stop_token_ids, prompt)

    # --- load -----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the current load."""
        running, waiting, drafts = self.scheduler.running, self.scheduler.waiting, self.scheduler.drafts
        prefilling = [s for s in (*waiting, *running) if not s.decoding]
        return EngineStats(
            blocks_total=self.blocks.num_blocks,
            blocks_free=self.blocks.available,
            blocks_reserved=sum(
                len(r.blocks) - r.shared + len(r.companion_blocks) for r in self.table.reservations.values()
            ),
            block_tokens=self.blocks.block_tokens,
            waiting_sequences=self.scheduler.waiting_places,
            running_sequences=self.scheduler.places,
            held_sequences=len(self.table.sequences) - len(running) - len(waiting),
            reserved_sequences=self.table.reserved_places,
            max_sequences=self.scheduler.max_sequences,
            waiting_tokens=sum(s.to_compute for s in prefilling),
            blocked_tokens=sum(s.blocked for s in prefilling),
            preemptions=self.scheduler.preemptions,
            prefix_hit_tokens=self.scheduler.prefix_hit_tokens,
            prefix_miss_tokens=self.scheduler.prefix_miss_tokens,
            prefill_tokens_per_second=self._estimates.prefill_tokens_per_second,
            itl_seconds=self._estimates.itl_seconds,
            somebody_waits=self.scheduler.somebody_waits,
            draft_tokens=drafts.drafted if drafts is not None else 0,
            accepted_tokens=drafts.accepted if drafts is not None else 0,
            media_step_tokens=0 if self._pace is None else self._pace.tokens(),
        )

    @property
    def prefix_changes(self) -> CacheChanges:
        """Blocks that the prefix cache has gained and lost, for locality in routing."""
        return self.blocks.changes

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _check_fits(self, prompt_tokens: int, max_tokens: int, companion_tokens: int = 0) -> None:
        if companion_tokens and self.scheduler.max_sequences < 2:
            raise CapacityError(
                "guidance_scale takes a second place in each step, and this pod has one; omit it, or raise spec.decode.maxSequences"
            )
        check_fits(
            prompt_tokens,
            max_tokens,
            max_model_len=self.max_model_len,
            blocks=self.blocks.num_blocks,
            block_tokens=self.blocks.block_tokens,
            companion_tokens=companion_tokens,
        )
