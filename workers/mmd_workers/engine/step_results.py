"""What the samples of a step do to their sequences: tokens, KV that is ready, finish reasons and failures. Independent of the KV pool."""

from __future__ import annotations

import torch

from mmd_api.contract.answers import FinishReason
from mmd_api.contract.errors import (
    BadLogitsError,
    GrammarFailedError,
    MmdError,
    OverloadedError,
    StepFailedError,
)
from mmd_workers.engine.choosing.sampler import Sampled
from mmd_workers.engine.interface import KvReady, SampledToken, SamplingParams, StepOutput
from mmd_workers.engine.pieces import Work
from mmd_workers.engine.scheduler import Scheduler
from mmd_workers.engine.sequence import Sequence
from mmd_workers.engine.sequence_table import SequenceTable
from mmd_workers.model.interfaces import LanguageModel


class StepResults:
    """Applies the results of steps to the sequences of an engine. Sequences that end leave the table."""

    def __init__(
        self, model: LanguageModel, scheduler: Scheduler, table: SequenceTable, max_model_len: int
    ) -> None:
        self._model, self._scheduler, self._table = model, scheduler, table
        self._max_model_len = max_model_len

    def finish(self, item: Work, results: list[Sampled | None], output: StepOutput) -> None:
        """Report an item's accepted drafts, and the token after them. The KV of rejected drafts is overwritten later."""
        sequence, known_end, accepted = item.sequence, item.end - len(item.drafts), 0
        if item.drafts and None in results:
            # The cause may be a draft, which is only a guess: later steps compute this sequence without drafts.
            results, sequence.lookup = results[: results.index(None)], None
            if not results:
                return
        self._scheduler.finish_chunk(Work(sequence, item.start, known_end, companion=item.companion))
        self._report(Work(sequence, item.start, known_end), results[0] if results else None, output)
        for draft, result in zip(item.drafts, results[1:], strict=False):
            if sequence.sequence_id not in self._table.sequences or sequence.token_ids[-1] != draft:
                break
            accepted += 1
            self._scheduler.finish_chunk(Work(sequence, known_end, known_end + 1))
            self._report(Work(sequence, known_end, known_end + 1), result, output)
            known_end += 1
        self._scheduler.finish_drafts(item, accepted)

    def _report(self, item: Work, result: Sampled | None, output: StepOutput) -> None:
        sequence = item.sequence
        computed, samples = sequence.computed, item.samples  # as of this step, before the new token
        if samples:
            if (failure := _grammar_failure(sequence, result)) is not None:
                self._table.abort(sequence.sequence_id)
                output.failed.append((sequence.sequence_id, failure))
                return
            if result is None:
                # The cause may be in the KV of these blocks: no other sequence must find them. It may be the
                # fault of a sequence that computed some of them and has not sampled a token yet.
                self._scheduler.forget(sequence)
                if self._scheduler.restart_uncached(sequence):
                    return
                self._table.abort(sequence.sequence_id)
                output.failed.append(
                    (
                        sequence.sequence_id,
                        BadLogitsError(
                            "the model's logits are not finite; check its weights and its input features"
                        ),
                    )
                )
                return
            sequence.append(result.token_id)
            reason = self._finish_reason(sequence)
            prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs or {}, None
            output.tokens.append(
                SampledToken(
                    sequence_id=sequence.sequence_id,
                    index=sequence.num_outputs - 1,
                    token_id=result.token_id,
                    finish_reason=reason,
                    logprob=result.logprob,
                    top_logprobs=result.top_logprobs,
                    prompt_logprobs=tuple(prompt_logprobs[place] for place in sorted(prompt_logprobs)),
                )
            )
            if sequence.stop_after_prefill:
                self._scheduler.hold(sequence)
                sequence.prompt = None
            elif reason is not None:
                self._table.abort(sequence.sequence_id)
        if sequence.stop_after_prefill and (samples or computed > sequence.announced):
            # A cached prefix is ready at once. It is sent in pieces no larger than computed ones.
            start = min(sequence.announced, computed)
            for end in (
                *range(start + self._scheduler.chunk_tokens, computed, self._scheduler.chunk_tokens),
                computed,
            ):
                ready = KvReady(sequence.sequence_id, start, end, last=samples and end == computed)
                output.kv_ready.append(ready)
                start = end
            sequence.announced = computed

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        sampling, newest = sequence.sampling, sequence.token_ids[-1]
        if newest in eos_of(self._model, sampling) or newest in sampling.stop_token_ids:
            return "stop"
        if sequence.constraint is not None and sequence.constraint.complete:
            return "stop"
        longest = max(part.num_tokens for part in sequence.parts)
        if sequence.num_outputs >= sampling.max_tokens or longest >= self._max_model_len:
            return "length"
        return None


def eos_of(model: LanguageModel, sampling: SamplingParams) -> frozenset[int]:
    """Return the end-of-sequence tokens that end an answer."""
    return frozenset() if sampling.ignore_eos else sampling.eos_token_ids or model.eos_token_ids


def _grammar_failure(sequence: Sequence, result: Sampled | None) -> GrammarFailedError | None:
    """Advance a sequence's constraint over its new token.

    Returns the error to report if that is not possible, or if the mask could not be computed.
    """
    if sequence.constraint is None:
        return None
    try:
        sequence.constraint.advance([] if result is None else [result.token_id])
    except GrammarFailedError as error:
        return error
    return None


def failure_of(error: Exception, sequence: Sequence, work: Work) -> MmdError:
    """Return the error to report for a sequence that failed although it ran alone."""
    what = f"tokens [{work.start}, {work.end}) of {sequence.num_tokens}"
    failure: MmdError
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
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
