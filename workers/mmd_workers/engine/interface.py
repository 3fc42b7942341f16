"""Inputs and outputs of the engine. It is independent of the network: a caller steps it, and each step
returns what happened."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmd_api.contract.answers import FinishReason
from mmd_api.contract.sampling import Guidance, LogitRules
from mmd_workers.model.grammar import Constraint
from mmd_workers.model.prompt import LoweredPrompt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 mean no limit.

    The draw for output token i depends only on (seed, i) and the logits; the `rules` depend only on the
    tokens before it. None of the first `min_tokens` output tokens ends the answer: `stop_token_ids` are
    excluded there, and so are `eos_token_ids` unless `ignore_eos` is set. `prompt_logprobs`: the first output
    token carries log probabilities of the prompt's tokens; none of these tokens may then come from the prefix
    cache.
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

    `stop_after_prefill`: the engine samples one token, keeps the KV blocks until `abort`, and reports
    completed ranges as `KvReady`. `output_token_ids`: tokens already generated elsewhere. They are prefilled
    with the prompt, and `prompt` covers them too. `constraint`: the grammar that the answer must match. It
    has advanced over `output_token_ids`, and now belongs to the engine. `root`: stands for those who share the
    blocks (`blocks.root_of`). `guidance`: runs a companion with this sequence. The companion's prompt ends
    with the same output tokens, and it counts as a second sequence. `engine_failures`: engines that failed in
    a step of this request before. `identities`: of the leading full blocks (`Engine.prefix`); the engine
    hashes the others.
    """

    sequence_id: str
    prompt: LoweredPrompt
    sampling: SamplingParams
    media_spans: list[tuple[int, int, str]] = field(default_factory=list)  # start, length, feature id
    output_token_ids: list[int] = field(default_factory=list)
    arrived: float = 0.0  # Unix time at which the request reached its gateway; the newest is preempted first
    stop_after_prefill: bool = False
    identities: list[bytes] = field(default_factory=list)
    constraint: Constraint | None = None
    root: bytes = b""
    guidance: Guidance | None = None
    engine_failures: int = 0


Logprob = tuple[float, tuple[tuple[int, float], ...]]
"""Log probability of a token, and (token id, log probability) of the likeliest tokens in its place."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One output token.

    `index` counts from 0 over the whole output, migrations included. `prompt_logprobs`: log probabilities of
    the prompt's tokens from the second on; only the first output token has them.
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
    """The KV of tokens [start, end) of a `stop_after_prefill` sequence is complete and may be sent."""

    sequence_id: str
    start: int
    end: int
    last: bool


@dataclass(slots=True)
class StepOutput:
    """Result of one step.

    `sequences`, `prefill_tokens`, `decode_sequences` and `draft_tokens` describe the batch that ran, companions included.
    """

    tokens: list[SampledToken] = field(default_factory=list)
    kv_ready: list[KvReady] = field(default_factory=list)
    failed: list[tuple[str, Exception]] = field(default_factory=list)
    admitted: dict[str, int] = field(default_factory=dict)  # sequences since the last step: cached tokens
    sequences: int = 0
    prefill_tokens: int = 0
    decode_sequences: int = 0
    draft_tokens: int = 0  # drafts, computed in addition to the known tokens of decoding sequences
    duration_seconds: float = 0.0
    timed: bool = True  # the duration covers one model run, and no kernels of earlier steps
    changed: bool = False  # nothing ran, but the next step may run something: a sequence returned its blocks


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Load of the engine.

    `blocks_free` includes unreferenced cached blocks; `blocks_reserved` are granted to sequences that have
    not been attached yet. A sequence with a companion counts as two. The estimates are running averages, 0
    before the first step.
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
    waiting_tokens: int  # known tokens without KV, in sequences that do not decode yet
    blocked_tokens: int  # waiting tokens after a missing feature
    preemptions: int
    prefix_hit_tokens: int  # prompt tokens found in the prefix cache at first admission
    prefix_miss_tokens: int  # prompt tokens not found there
    prefill_tokens_per_second: float
    itl_seconds: float  # between successive tokens of a sequence
    somebody_waits: bool = False  # a sequence waits for the end of a step, which media could delay
    draft_tokens: int = 0  # drafts computed so far
    accepted_tokens: int = 0  # drafts that the model sampled too
    media_step_tokens: int = 0  # prompt tokens of a step with media, by the engine's pace; 0: no pace
