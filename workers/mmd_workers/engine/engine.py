"""The engine: sequences in, tokens out, one step at a time. Independent of the network, and of any clock but its own stopwatch; not thread safe.

A step goes through the files in this order: scheduler (what runs) → batch (where its KV stands) → model with `attention` → sampler.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from mmd_api.contract.answers import FinishReason
from mmd_api.contract.errors import (
    BadLogitsError,
    CountMismatchError,
    GrammarFailedError,
    MmdError,
    OverloadedError,
    StepFailedError,
)
from mmd_workers.device import run_isolating
from mmd_workers.engine import attention
from mmd_workers.engine.batch import Batch
from mmd_workers.engine.blocks import BlockPool, MediaSpan, extend_identities
from mmd_workers.engine.estimates import Estimates
from mmd_workers.engine.fusion import prepare
from mmd_workers.engine.interface import (
    EngineStats,
    KvReady,
    SampledToken,
    SamplingParams,
    SequenceInput,
    StepOutput,
)
from mmd_workers.engine.kv_pool import KvPool
from mmd_workers.engine.logit_rules import RuleState, rule_state
from mmd_workers.engine.masks import Masks
from mmd_workers.engine.room import check_fits, check_spare, preempted
from mmd_workers.engine.sampler import Draw, Sampled, sample
from mmd_workers.engine.scheduler import Scheduler, Work
from mmd_workers.engine.sequence import Sequence
from mmd_workers.model.grammar import Constraint
from mmd_workers.model.interfaces import LanguageModel
from mmd_workers.model.prompt import Feature

STEP_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, MmdError)  # a model's, on one batch
WARM_UP_TOKENS = 64


@dataclass(slots=True)
class _Reservation:
    blocks: list[int]
    kv_tokens: int  # at most this many may be written
    shared: int  # leading blocks, of the prefix cache
    written: int  # with what these hold


class Engine:
    """Continuous batching over a paged KV pool for one `LanguageModel`, whose decoder it gives its own attention."""

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
    ) -> None:
        """Allocate the pool and take over the decoder's attention. `fused_layers`: the CPU kernels compute whole decoder layers, where
        they can; without it only their linear layers, norms and attention.

        Raises:
            UnsupportedModelError: the decoder cannot be served from a paged KV pool.
            CapacityError: `kv_cache_bytes` holds not one block.
        """
        prepare(model, fused_layers=fused_layers)
        self.model = model
        self.max_model_len = max_model_len
        self.kv = KvPool.of_bytes(model.kv_layout, kv_cache_bytes, block_tokens, model.device)
        self.kernel = attention.select_kernel(model.kv_layout, model.device)
        self.blocks = BlockPool(self.kv.num_blocks, block_tokens)
        self.scheduler = Scheduler(
            self.blocks, max_sequences=max_sequences, chunk_tokens=chunk_tokens, prefix_cache=prefix_cache
        )
        self._sequences: dict[str, Sequence] = {}
        self._reservations: dict[str, _Reservation] = {}
        self._arrivals = 0
        self._estimates = Estimates()

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self.model.device

    # --- sequences ------------------------------------------------------------------------------------------------

    def add(self, item: SequenceInput) -> None:
        """Queue a sequence. Its features may follow by `fill`.

        Raises:
            CapacityError: it can never fit into the context or the pool.
            ValueError: the id is in use, or nothing is left to generate.
        """
        self._check_new(item.sequence_id)
        prompt, sampling = item.prompt, item.sampling
        left = sampling.max_tokens - len(item.output_token_ids)
        if left < 1:
            raise ValueError(
                f"sequence {item.sequence_id}: max_tokens {sampling.max_tokens} have already been generated"
            )
        self._check_fits(len(prompt.token_ids), 1 if item.stop_after_prefill else left)
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
            rules=self._rules(
                sampling, prompt.token_ids[: len(prompt.token_ids) - len(item.output_token_ids)]
            ),
            stop_after_prefill=item.stop_after_prefill,
            identities=list(item.identities),
            constraint=item.constraint,
        )
        self._sequences[item.sequence_id] = sequence
        self.scheduler.add(sequence)

    def prefix(self, token_ids: Items[int], media_spans: Items[MediaSpan]) -> tuple[list[bytes], int]:
        """Identities of a prompt's full blocks, and how many of its tokens the prefix cache holds now. Changes nothing.

        The last token is never cached: it must be computed. Cached blocks may be evicted before the prompt is added and admitted:
        `StepOutput.admitted` says what was there then.
        """
        if not self.scheduler.prefix_cache:
            return [], 0
        size, identities = self.blocks.block_tokens, list[bytes]()
        extend_identities(identities, token_ids, media_spans, size, (len(token_ids) - 1) // size)
        return identities, len(self.blocks.find(identities)) * size

    def fill(self, sequence_id: str, medium: int, feature: Feature) -> bool:
        """Give a sequence the feature of its medium; False: the sequence is no longer here, or no longer needs it.

        Raises:
            CountMismatchError: the feature has another number of tokens than the prompt's layout.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.prompt is None or medium not in sequence.prompt.missing:
            return False
        with torch.inference_mode():
            self.model.fill(sequence.prompt, medium, feature)
        return True

    def abort(self, sequence_id: str) -> None:
        """Forget a sequence or a reservation in any state and free its blocks; unknown ids are ignored."""
        reservation = self._reservations.pop(sequence_id, None)
        if reservation is not None:
            self.blocks.release(reservation.blocks)
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self.scheduler.remove(sequence)

    def has_work(self) -> bool:
        """Whether a sequence waits or runs; a step may still find that all of them wait for features or blocks."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    # --- moving KV ------------------------------------------------------------------------------------------------

    def read_kv(self, sequence_id: str, start: int, end: int) -> list[torch.Tensor]:
        """KV of the tokens [start, end): for each layer a contiguous [2, tokens, kv_heads, head_dim].

        Raises:
            KeyError: unknown sequence.
            CountMismatchError: not all of these tokens have KV yet.
        """
        sequence = self._sequences[sequence_id]
        if not 0 <= start <= end <= sequence.computed:
            raise CountMismatchError(
                f"KV of tokens [{start}, {end}) was requested, but only {sequence.computed} tokens are computed; wait for KvReady"
            )
        with torch.no_grad():
            return self.kv.read(sequence.blocks, start, end)

    def reserve(
        self, sequence_id: str, prompt_tokens: int, max_tokens: int, prefix: Items[bytes] = ()
    ) -> int:
        """Hold blocks for `prompt_tokens` tokens whose KV will arrive by `write_kv` and the first of `max_tokens` more; the rest
        grows block by block, so an unlimited answer reserves no more than a short one. `prefix`: identities of the leading whole blocks.
        Returns how many tokens have their KV in the prefix cache: what is written begins there.

        Raises:
            CapacityError: this can never fit.
            OverloadedError: no blocks or no place for a sequence now.
        """
        self._check_new(sequence_id)
        self._check_fits(prompt_tokens, max_tokens)
        places = self.scheduler.max_sequences - len(self.scheduler.running) - len(self._reservations)
        if places < 1:
            raise OverloadedError(
                f"all {self.scheduler.max_sequences} sequence slots are in use; try another decode worker"
            )
        size, pool = self.blocks.block_tokens, self.blocks
        found = pool.find(prefix[: prompt_tokens // size]) if self.scheduler.prefix_cache else []
        needed = pool.blocks_for(prompt_tokens + 1) - len(found)
        growing = len(self.scheduler.running) + len(self._reservations)
        check_spare(needed, growing, pool.available_beside(found), pool.num_blocks)
        pool.share(found)
        try:
            blocks = [*found, *pool.allocate(needed)]
        except OverloadedError:
            pool.release(found)
            raise
        cached = len(found) * size
        self._reservations[sequence_id] = _Reservation(blocks, prompt_tokens, len(found), cached)
        return cached

    def write_kv(self, sequence_id: str, start: int, tensors: list[torch.Tensor]) -> None:
        """Write KV of the tokens from `start` on (the layout of `read_kv`) to reserved blocks; ranges come in order.

        Raises:
            KeyError: nothing is reserved under this id.
            CountMismatchError: a gap, more tokens than reserved, or another model's geometry.
        """
        reservation = self._reservations[sequence_id]
        end = start + int(tensors[0].shape[1])
        own = reservation.shared * self.blocks.block_tokens
        if not own <= start <= reservation.written or end > reservation.kv_tokens:
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
    ) -> None:
        """Start decoding a reserved sequence whose KV has been written.

        `token_ids` is the prompt without outputs; `output_token_ids` ends with the one token that has no KV yet, whose rotary
        position is `next_position` (`LoweredPrompt.next_position` when prefill has just sampled it). `constraint`: as of `SequenceInput`.

        Raises:
            KeyError: nothing is reserved under this id.
            CountMismatchError: KV of some token has not been written. The reservation stays.
        """
        reservation = self._reservations[sequence_id]
        known = list(token_ids) + list(output_token_ids)
        if not output_token_ids or reservation.written < len(known) - 1:
            raise CountMismatchError(
                f"{len(known) - 1} tokens need KV, but only {reservation.written} have it; send the rest before committing"
            )
        del self._reservations[sequence_id]
        sequence = Sequence(
            sequence_id=sequence_id,
            arrival=self._next_arrival(),
            token_ids=known,
            prompt_length=len(known) - 1,
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
        )
        self._sequences[sequence_id] = sequence
        self.scheduler.start(sequence)
        self.scheduler.finish_chunk(Work(sequence, 0, len(known) - 1))

    # --- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Run one batch. Empty output: nothing can run until something is added, filled or released. Sequences that had to
        yield and cannot be recomputed here are dropped and reported in `failed` as PreemptedError.

        When the model fails, the batch is halved until the sequences at fault run alone; those are dropped and reported in
        `failed`.

        Raises:
            DeviceLostError: the accelerator is broken; the engine is then unusable.
        """
        started = time.perf_counter()
        schedule = self.scheduler.schedule(len(self._reservations))
        chunks = schedule.prefills
        work = schedule.decodes + sorted(chunks, key=lambda item: item.end - item.start > 1)
        output = StepOutput(
            sequences=len(work),
            prefill_tokens=sum(item.end - item.start for item in chunks),
            decode_sequences=len(schedule.decodes),
        )
        for sequence in self._take_preempted():
            error = preempted(self.blocks.num_blocks, sequence.num_outputs)
            output.failed.append((sequence.sequence_id, error))
        output.admitted, self.scheduler.admitted = self.scheduler.admitted, {}
        if not work:
            return output
        # Running rows again is safe: they write the same KV to the same slots, and nothing is sampled before all have run.
        results = run_isolating(work, self._run, self.model.device, STEP_ERRORS)
        for item, result in zip(work, results, strict=True):
            if isinstance(result, Exception):
                self.abort(item.sequence.sequence_id)
                output.failed.append((item.sequence.sequence_id, _failure(result, item.sequence, item)))
                continue
            self.scheduler.finish_chunk(item)
            self._report(item, result, output)
        output.duration_seconds = time.perf_counter() - started
        self._estimates.add(output)
        return output

    def warm_up(self) -> None:
        """Prefill a chunk and decode a token, both sampled, on the thread and in the pool that sequences will use. Nothing remains of
        it: blocks are free and empty as before, and neither counts nor estimates know of it.

        Raises:
            OverloadedError: no blocks are free, because sequences run already.
        """
        most = min(self.max_model_len, self.kv.num_blocks * self.blocks.block_tokens)
        tokens = max(1, min(WARM_UP_TOKENS, self.scheduler.chunk_tokens, most - 1))
        blocks = self.blocks.allocate(self.blocks.blocks_for(min(tokens + 1, most)))
        try:
            with torch.inference_mode():
                prompt = self.model.lower([0] * tokens, [])
            drawn = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9)
            sequence = Sequence("", 0, [0] * tokens, tokens, prompt.next_position, drawn, [], prompt)
            sequence.blocks = blocks
            self._run([Work(sequence, 0, tokens)])
            if tokens < most:
                sequence.token_ids.append(0)
                sequence.sampling = SamplingParams(max_tokens=2)
                self._run([Work(sequence, tokens, tokens + 1)])
        finally:
            self.kv.clear(blocks)
            self.blocks.release(blocks)

    def _take_preempted(self) -> list[Sequence]:
        preempted, self.scheduler.preempted = self.scheduler.preempted, []
        for sequence in preempted:
            del self._sequences[sequence.sequence_id]
        return preempted

    def _run(self, work: Items[Work]) -> list[Sampled | None]:
        """Compute the rows of `work`; returns a sample for each item, None if none was due or possible."""
        batch = Batch(self.kv, work)
        sampled: list[Sampled | None] = [None] * len(work)
        with torch.inference_mode():
            embeds, positions, extras = self._inputs(work)
            with attention.running(batch, self.kernel):
                hidden = self.model.forward(embeds, positions, extras)
            sampling = [number for number, item in enumerate(work) if item.samples]
            if not sampling:
                return sampled
            constraints = {
                row: constraint
                for row, number in enumerate(sampling)
                if (constraint := work[number].sequence.constraint) is not None
            }
            masks = Masks.of(constraints, hidden.device) if constraints else None  # before what waits for it
            rows = torch.tensor([batch.last_rows[number] for number in sampling], device=hidden.device)
            draws = [self._draw(work[number].sequence) for number in sampling]
            logits = self.model.logits(hidden[rows])
            for number, result in zip(sampling, sample(logits, draws, masks), strict=True):
                sampled[number] = result
        return sampled

    def _draw(self, sequence: Sequence) -> Draw:
        """How to sample a sequence's next token."""
        if sequence.rules is not None:
            sequence.rules.follow(sequence.output_token_ids)
        return Draw(sequence.sampling, sequence.num_outputs, self.model.suppress_token_ids, sequence.rules)

    def _inputs(self, work: Items[Work]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Embeddings [rows, hidden], positions [axes, rows] and extras [rows, ...]: prompt rows as lowered, the others embedded."""
        model, device = self.model, self.model.device
        generated: list[int] = []
        generated_positions: list[int] = []
        segments: list[tuple[Sequence | None, int, int]] = []  # rows of a prompt, or of the generated ones
        for item in work:
            sequence = item.sequence
            cut = min(max(sequence.prompt_length, item.start), item.end)
            if item.start < cut:
                segments.append((sequence, item.start, cut))
            if cut < item.end:
                first = len(generated)
                generated += sequence.token_ids[cut : item.end]
                generated_positions += [sequence.position(index) for index in range(cut, item.end)]
                segments.append((None, first, len(generated)))
        own_embeds, own_positions = torch.empty(0), torch.empty(0)
        own_extras: dict[str, torch.Tensor] = {}
        if generated:
            own_embeds, own_extras = model.embed(torch.tensor(generated, device=device))
            own_positions = torch.tensor(generated_positions, device=device).expand(model.position_axes, -1)
            if len(segments) == sum(segment[0] is None for segment in segments):
                return own_embeds, own_positions, own_extras
        parts: list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = []
        for owner, start, end in segments:
            if owner is None:
                source = own_embeds, own_positions, own_extras
            else:
                assert owner.prompt is not None
                source = owner.prompt.embeds, owner.prompt.positions, owner.prompt.extras
            embeds, positions, extras = source
            rows = {name: tensor[start:end].to(device, non_blocking=True) for name, tensor in extras.items()}
            parts.append(
                (
                    embeds[start:end].to(device=device, dtype=model.dtype, non_blocking=True),
                    positions[:, start:end].to(device, non_blocking=True).expand(model.position_axes, -1),
                    rows,
                )
            )
        joined: dict[str, torch.Tensor] = {}
        samples = {name: tensor for _, _, extras in parts for name, tensor in extras.items()}
        for name, like in samples.items():
            joined[name] = torch.cat(
                [
                    extras[name] if name in extras else like.new_zeros(embeds.shape[0], *like.shape[1:])
                    for embeds, _, extras in parts
                ]
            )
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts], dim=1), joined

    def _report(self, item: Work, result: Sampled | None, output: StepOutput) -> None:
        sequence = item.sequence
        computed, samples = sequence.computed, item.samples  # as of this step, before the new token
        if samples:
            if (failure := _grammar_failure(sequence, result)) is not None:
                self.abort(sequence.sequence_id)
                output.failed.append((sequence.sequence_id, failure))
                return
            if result is None:
                self.blocks.forget(
                    sequence.blocks
                )  # what broke its logits may be in their KV: nobody must find it
                self.abort(sequence.sequence_id)
                output.failed.append(
                    (
                        sequence.sequence_id,
                        BadLogitsError(
                            "the model's logits are not finite; check its weights and its input features"
                        ),
                    )
                )
                return
            sequence.token_ids.append(result.token_id)
            sequence.num_outputs += 1
            reason = self._finish_reason(sequence)
            output.tokens.append(
                SampledToken(
                    sequence_id=sequence.sequence_id,
                    index=sequence.num_outputs - 1,
                    token_id=result.token_id,
                    finish_reason=reason,
                    logprob=result.logprob,
                    top_logprobs=result.top_logprobs,
                )
            )
            if sequence.stop_after_prefill:
                self.scheduler.hold(sequence)
                sequence.prompt = None
            elif reason is not None:
                self.abort(sequence.sequence_id)
        if sequence.stop_after_prefill and (samples or computed > sequence.announced):
            # A cached prefix is ready at once: it travels in pieces as small as those that are computed.
            start = min(sequence.announced, computed)
            for end in (
                *range(start + self.scheduler.chunk_tokens, computed, self.scheduler.chunk_tokens),
                computed,
            ):
                ready = KvReady(sequence.sequence_id, start, end, last=samples and end == computed)
                output.kv_ready.append(ready)
                start = end
            sequence.announced = computed

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        sampling, newest = sequence.sampling, sequence.token_ids[-1]
        if newest in self._eos(sampling) or newest in sampling.stop_token_ids:
            return "stop"
        if sequence.constraint is not None and sequence.constraint.complete:
            return "stop"
        if sequence.num_outputs >= sampling.max_tokens or sequence.num_tokens >= self.max_model_len:
            return "length"
        return None

    def _eos(self, sampling: SamplingParams) -> frozenset[int]:
        """End-of-sequence tokens that end an answer."""
        return frozenset() if sampling.ignore_eos else sampling.eos_token_ids or self.model.eos_token_ids

    def _rules(self, sampling: SamplingParams, prompt: Items[int]) -> RuleState | None:
        return rule_state(sampling, self._eos(sampling) | sampling.stop_token_ids, prompt)

    # --- load -----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The load as of now."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        prefilling = [s for s in (*waiting, *running) if not s.decoding]
        return EngineStats(
            blocks_total=self.blocks.num_blocks,
            blocks_free=self.blocks.available,
            blocks_reserved=sum(len(r.blocks) - r.shared for r in self._reservations.values()),
            block_tokens=self.blocks.block_tokens,
            waiting_sequences=len(waiting),
            running_sequences=len(running),
            held_sequences=len(self._sequences) - len(running) - len(waiting),
            reserved_sequences=len(self._reservations),
            max_sequences=self.scheduler.max_sequences,
            waiting_tokens=sum(s.remaining for s in prefilling),
            blocked_tokens=sum(s.blocked for s in prefilling),
            preemptions=self.scheduler.preemptions,
            prefix_hit_tokens=self.scheduler.prefix_hit_tokens,
            prefix_miss_tokens=self.scheduler.prefix_miss_tokens,
            prefill_tokens_per_second=self._estimates.prefill_tokens_per_second,
            itl_seconds=self._estimates.itl_seconds,
        )

    def prefix_blocks(self, limit: int) -> list[str]:
        """Identities of up to `limit` of the newest cached blocks, for locality in routing."""
        return self.blocks.sample_identities(limit)

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _check_new(self, sequence_id: str) -> None:
        if sequence_id in self._sequences or sequence_id in self._reservations:
            raise ValueError(f"sequence {sequence_id} already exists")

    def _check_fits(self, prompt_tokens: int, max_tokens: int) -> None:
        check_fits(
            prompt_tokens,
            max_tokens,
            max_model_len=self.max_model_len,
            blocks=self.blocks.num_blocks,
            block_tokens=self.blocks.block_tokens,
        )


def _grammar_failure(sequence: Sequence, result: Sampled | None) -> GrammarFailedError | None:
    """Advance a sequence's constraint over its new token; what to report if that is not possible, or its mask could not be computed."""
    if sequence.constraint is None:
        return None
    try:
        sequence.constraint.advance([] if result is None else [result.token_id])
    except GrammarFailedError as error:
        return error
    return None


def _failure(error: Exception, sequence: Sequence, work: Work) -> MmdError:
    """What to report for a sequence whose step failed although it ran alone."""
    what = f"tokens [{work.start}, {work.end}) of {sequence.num_tokens}"
    failure: MmdError
    if isinstance(error, torch.OutOfMemoryError):
        failure = OverloadedError(
            f"the device ran out of memory for {what} alone ({str(error)[:300]}); lower spec.prefill.chunkTokens or the KV "
            "cache's share of memory"
        )
    else:
        failure = StepFailedError(
            f"the model failed on {what}, in a separate batch: {type(error).__name__}: {str(error)[:300]}"
        )
    failure.__cause__ = error
    return failure
