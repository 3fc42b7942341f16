"""What a step of vLLM's core did, in the terms of engines: admissions, tokens, ready KV, ends and failures. Not thread safe."""

from __future__ import annotations

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason

from mmd_api.contract import answers
from mmd_api.contract.errors import BadLogitsError, GrammarFailedError, MmdError, StepFailedError
from mmd_workers.engine.interface import KvReady, Logprob, SampledToken, StepOutput
from mmd_workers.engine.memory.sequence_room import preempted
from mmd_workers.vllm_engine.core_table import CoreSequence, CoreTable
from mmd_workers.vllm_engine.features import Shelf
from mmd_workers.vllm_engine.prefix_blocks import PrefixBlocks


class StepOutputs:
    """Applies vLLM's plans and outputs to the sequences of a table, and reports them."""

    def __init__(
        self,
        table: CoreTable,
        shelf: Shelf,
        prefix_blocks: PrefixBlocks,
        num_blocks: int,
        chunk_tokens: int,
        max_model_len: int,
    ) -> None:
        self._table, self._shelf, self._prefix_blocks = table, shelf, prefix_blocks
        self._num_blocks, self._chunk_tokens = num_blocks, chunk_tokens
        self._max_model_len = max_model_len
        self.preemptions = self.hit_tokens = self.miss_tokens = 0

    def note_plan(self, plan: SchedulerOutput | None, output: StepOutput) -> None:
        """Report what vLLM chose to run: admissions, preemptions, and the number of tokens of each kind."""
        for name, tokens in self._shelf.short.items():
            if self._table.reported.get(name) != tokens:
                output.admitted[name] = self._table.reported[name] = tokens
        if plan is None:
            return
        for new_request in plan.scheduled_new_reqs:
            if (
                sequence := self._table.sequences.get(new_request.req_id)
            ) is not None and not sequence.attached:
                output.admitted[new_request.req_id] = new_request.num_computed_tokens
                self.hit_tokens += new_request.num_computed_tokens
                self.miss_tokens += (
                    len(sequence.request.prompt_token_ids or ()) - new_request.num_computed_tokens
                )
        for name, tokens in plan.num_scheduled_tokens.items():
            if (sequence := self._table.sequences.get(name)) is None:
                continue
            output.sequences += 1
            drafts = plan.scheduled_spec_decode_tokens.get(name, ())
            if tokens == 1 + len(drafts) and (sequence.made or sequence.attached):
                output.decode_sequences += 1
            else:
                output.prefill_tokens += tokens
        for name in plan.preempted_req_ids or ():
            self.preemptions += 1
            output.changed = True
            if (sequence := self._table.sequences.get(name)) is not None and sequence.attached:
                self._table.abort(name)  # its KV came from another pod, and its media are not on this one
                output.failed.append((name, preempted(self._num_blocks, sequence.first + sequence.made)))

    def note_output(self, result: EngineCoreOutput, output: StepOutput) -> None:
        """Report a request's new tokens, and end the sequence if the request has ended."""
        name = result.request_id
        if (sequence := self._table.sequences.get(name)) is None:
            return
        if result.num_nans_in_logits:
            self._table.abort_spoiled(name, sequence)
            output.failed.append((name, _bad_logits(sequence.source.adapter)))
            return
        if result.new_token_ids:  # the sequence continues from KV alone
            self._shelf.release(name)
            # After a preemption, its role has to bring the features again.
            self._table.reported.pop(name, None)
        complete = False
        for number, token in enumerate(result.new_token_ids):
            last = number == len(result.new_token_ids) - 1
            if sequence.constraint is not None:
                try:
                    sequence.constraint.advance([token])
                except GrammarFailedError as error:
                    self._table.abort(name)
                    output.failed.append((name, error))
                    return
                complete = sequence.constraint.complete
            finish_reason = self._finish_reason(sequence, result.finish_reason) if last else None
            if complete:
                finish_reason = "stop"
            logprob, top = _logprobs(result, number, sequence.source.sampling.logprobs)
            prompt_logprobs = _prompt_logprobs(result) if number == 0 else ()
            output.tokens.append(
                SampledToken(
                    name, sequence.first + sequence.made, token, finish_reason, logprob, top, prompt_logprobs
                )
            )
            sequence.made += 1
            if sequence.made == 1:
                self._prefix_blocks.note(sequence)
        ended = result.finish_reason is not None
        if ended and not result.new_token_ids:
            self._table.abort(name)
            output.failed.append((name, _failure(result)))
        elif (ended or complete) and not sequence.stop_after_prefill:
            self._prefix_blocks.note(sequence)
            self._table.abort(name)

    def _finish_reason(
        self, sequence: CoreSequence, vllm_reason: FinishReason | None
    ) -> answers.FinishReason | None:
        """Return vLLM's reason; None for a sequence that ends here after its prefill and continues elsewhere."""
        if vllm_reason is FinishReason.STOP:
            return "stop"
        if vllm_reason is not FinishReason.LENGTH:
            return None
        outputs = sequence.first + sequence.made + 1
        room = len(sequence.source.token_ids) + outputs < self._max_model_len
        continues = sequence.stop_after_prefill and room and outputs < sequence.source.sampling.max_tokens
        return None if continues else "length"

    def announce(self, plan: SchedulerOutput | None, output: StepOutput) -> None:
        """Report ranges of prompts whose KV has been computed, or found in the prefix cache; none is longer
        than a chunk."""
        if plan is None:
            return
        for name in plan.num_scheduled_tokens:
            sequence = self._table.sequences.get(name)
            if sequence is None or not sequence.stop_after_prefill:
                continue
            prompt_tokens = len(sequence.request.prompt_token_ids or ())
            ready = (
                prompt_tokens
                if sequence.made
                else min(prompt_tokens, int(sequence.request.num_computed_tokens))
            )
            sequence.computed = ready
            while sequence.announced < ready:
                end = min(ready, sequence.announced + self._chunk_tokens)
                output.kv_ready.append(KvReady(name, sequence.announced, end, end == prompt_tokens))
                sequence.announced = end


def _bad_logits(adapter: str) -> BadLogitsError:
    what = f"adapter {adapter} and the model" if adapter else "the model"
    return BadLogitsError(
        f"{what} computed logits that are not numbers; check {'their' if adapter else 'its'} weights and spec.model.dtype"
    )


def _failure(result: EngineCoreOutput) -> MmdError:
    """Return the error for a request that vLLM ended. vLLM gives no reason; its log has one."""
    return StepFailedError(
        f"vLLM ended the request ({result.finish_reason}); its log, above this line, has the reason"
    )


def _logprobs(
    result: EngineCoreOutput, number: int, count: int | None
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """Return a token's log probability, and those of the most likely tokens."""
    if count is None or result.new_logprobs is None:
        return None, ()
    ids = result.new_logprobs.logprob_token_ids[number].tolist()
    values = result.new_logprobs.logprobs[number].tolist()
    return values[0], tuple(zip(ids[1 : count + 1], values[1 : count + 1], strict=True))


def _prompt_logprobs(result: EngineCoreOutput) -> tuple[Logprob, ...]:
    """Return log probabilities of the prompt's tokens from the second on, and of the likeliest tokens in their places.

    They come with the first output token.
    """
    if (tensors := result.new_prompt_logprobs_tensors) is None:
        return ()
    rows = zip(tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist(), strict=True)
    return tuple((values[0], tuple(zip(ids[1:], values[1:], strict=True))) for ids, values in rows)
