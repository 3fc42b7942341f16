"""What goes into the engine and what comes out of it. The engine is independent of the network: it is stepped, and returns what happened."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmd_api.contract.answers import FinishReason
from mmd_api.contract.sampling import Guidance, LogitRules
from mmd_workers.model.grammar import Constraint
from mmd_workers.model.prompt import LoweredPrompt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 mean no limit.

    The draw for output token i depends on (seed, i) and the logits alone, and the `rules` on the tokens before it. Of the first `min_tokens`
    output tokens none is one that ends the answer: those of `stop_token_ids`, and of `eos_token_ids` unless `ignore_eos`. `prompt_logprobs`: the
    first output token brings log probabilities of the prompt's tokens, of which none may come from the prefix cache.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    rules: LogitRules | None = None
    eos_token_ids: frozenset[int] = frozenset()
    suppress_token_ids: tuple[int, ...] = ()  # placeholders must never be sampled
    prompt_logprobs: bool = False


@dataclass(slots=True)
class SequenceInput:
    """A sequence to run.

    `stop_after_prefill`: the engine samples one token, keeps the KV blocks until `abort`, and reports the ranges that are complete as
    `KvReady`.
    `output_token_ids`: already generated elsewhere; they are part of what has to be prefilled (`prompt` covers them too).
    `constraint`: what the answer must match; it has advanced over `output_token_ids`, and is the engine's from now on.
    `root`: of the identities of its blocks (`blocks.root_of`).
    `guidance`: a companion runs with it, whose prompt has the output tokens too; it counts as a second sequence.
    """

    sequence_id: str
    prompt: LoweredPrompt
    sampling: SamplingParams
    media_spans: list[tuple[int, int, str]] = field(default_factory=list)  # start, length, feature id
    output_token_ids: list[int] = field(default_factory=list)
    arrived: float = (
        0.0  # Unix seconds at which the request reached its gateway: the newest is preempted first
    )
    stop_after_prefill: bool = False
    identities: list[bytes] = field(
        default_factory=list
    )  # of the leading blocks, where `Engine.prefix` gave them
    constraint: Constraint | None = None
    root: bytes = b""
    guidance: Guidance | None = None


Logprob = tuple[float, tuple[tuple[int, float], ...]]
"""Of a token, and of the likeliest ones in its place."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One output token. `index` counts from 0 over the whole output, migrations included. `prompt_logprobs`: of the prompt's tokens from the second one on,
    with the first output token.
    """

    sequence_id: str
    index: int
    token_id: int
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class KvReady:
    """Prefill has completed the KV of tokens [start, end) of a `stop_after_prefill` sequence: they may travel now."""

    sequence_id: str
    start: int
    end: int
    last: bool


@dataclass(slots=True)
class StepOutput:
    """What one step did. `sequences`, `prefill_tokens`, `decode_sequences` and `draft_tokens` describe the batch that ran, companions included."""

    tokens: list[SampledToken] = field(default_factory=list)
    kv_ready: list[KvReady] = field(default_factory=list)
    failed: list[tuple[str, Exception]] = field(default_factory=list)
    admitted: dict[str, int] = field(default_factory=dict)  # since the last step, with their cached tokens
    sequences: int = 0
    prefill_tokens: int = 0
    decode_sequences: int = 0
    draft_tokens: int = 0  # computed beside those that the decoding sequences had
    duration_seconds: float = 0.0
    timed: bool = True  # the duration is its own: the model ran once, after the kernels of the steps before
    changed: bool = False  # nothing ran, but the next step may: a sequence gave its blocks back


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How loaded the engine is. `blocks_free` includes cached blocks that nobody refers to; `blocks_reserved` are granted to
    sequences that have not been attached yet. A sequence with a companion counts as two. The estimates are running averages, 0 before the first step.
    """

    blocks_total: int
    blocks_free: int
    blocks_reserved: int
    block_tokens: int
    waiting_sequences: int
    running_sequences: int
    held_sequences: int
    reserved_sequences: int
    max_sequences: int
    waiting_tokens: int  # known tokens without KV, of sequences that do not decode yet
    blocked_tokens: int  # those of them that come after a missing feature
    preemptions: int
    prefix_hit_tokens: int  # of prompts at their first admission: with KV in the prefix cache, and without
    prefix_miss_tokens: int
    prefill_tokens_per_second: float
    itl_seconds: float  # from one token of a sequence to its next one
    somebody_waits: bool = False  # for the end of a step, which media could delay
    draft_tokens: int = 0  # that were computed, and those of them that the model sampled too
    accepted_tokens: int = 0
    media_step_tokens: int = 0  # of prompts, that a step with media has by the engine's pace; 0: it has none
