"""One sequence in the engine: its tokens, how much of its KV exists, and the blocks that hold it. Independent of the model and the pool."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from mmd_workers.engine.blocks import MediaSpan
from mmd_workers.engine.interface import SamplingParams
from mmd_workers.engine.logit_rules import RuleState
from mmd_workers.model.grammar import Constraint
from mmd_workers.model.prompt import LoweredPrompt


class SequenceState(enum.Enum):
    """State of a sequence. Only `RUNNING` ones are scheduled; all but `WAITING` hold blocks."""

    WAITING = "waiting"  # for blocks
    RUNNING = "running"
    HELD = "held"  # prefilled: KV stays until release


@dataclass(slots=True, eq=False)
class Sequence:
    """`token_ids` are all known tokens, prompt first; KV exists for the first `computed` of them.

    `prompt_length` counts the tokens whose embeddings and positions stand in `prompt` (or, for a sequence that was attached, whose
    KV came from elsewhere); token i beyond it has rotary position `next_position + i - prompt_length`. `prompt` is None for
    attached sequences: their KV cannot be computed here, so when they are preempted they leave this engine.
    """

    sequence_id: str
    arrival: int
    token_ids: list[int]
    prompt_length: int
    next_position: int
    sampling: SamplingParams
    media_spans: list[MediaSpan]
    prompt: LoweredPrompt | None
    arrived: float = 0.0  # Unix seconds at which its request reached the gateway
    num_outputs: int = 0  # output tokens at the end of token_ids
    rules: RuleState | None = None
    stop_after_prefill: bool = False
    announced: int = 0  # KV tokens reported by KvReady
    state: SequenceState = SequenceState.WAITING
    blocks: list[int] = field(default_factory=list)
    identities: list[bytes] = field(default_factory=list)  # of the leading full blocks
    registered: int = 0  # leading blocks offered to the prefix cache
    admitted: bool = False  # now, or before a preemption
    computed: int = 0
    waited_steps: int = 0
    overtaken: int = 0  # admissions of others past this one while it did not fit
    constraint: Constraint | None = None  # has advanced over all output tokens

    @property
    def num_tokens(self) -> int:
        """Known tokens, outputs included."""
        return len(self.token_ids)

    @property
    def remaining(self) -> int:
        """Known tokens without KV; 1 while decoding."""
        return len(self.token_ids) - self.computed

    @property
    def blocked(self) -> int:
        """Those of the remaining tokens that come after a missing feature."""
        return self.num_tokens - max(self.computed, self.computable_until())

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens so far, those generated elsewhere included."""
        return self.token_ids[self.num_tokens - self.num_outputs :]

    @property
    def decoding(self) -> bool:
        """Whether the next step feeds a token this engine (or the one before it) has generated, and that alone."""
        return self.remaining == 1 and self.num_tokens > self.prompt_length

    @property
    def preemptable(self) -> bool:
        """Whether it may lose its blocks: its KV can be computed again, here or elsewhere, and no peer is reading it."""
        return not self.stop_after_prefill

    @property
    def age(self) -> tuple[float, int]:
        """Sorts the oldest request first, by the time its gateway received it, which moving and waiting do not change."""
        return self.arrived, self.arrival

    @property
    def atomic_ranges(self) -> list[tuple[int, int]]:
        """Ranges of the prompt with bidirectional attention inside."""
        return self.prompt.atomic_ranges if self.prompt is not None else []

    def computable_until(self) -> int:
        """Tokens up to the first missing feature that is still needed; cached blocks need none."""
        if self.prompt is None:
            return self.num_tokens
        starts = [start for start, last in self.prompt.missing.values() if last > self.computed]
        return min(starts, default=self.num_tokens)

    def position(self, index: int) -> int:
        """Rotary position of a token beyond the prompt."""
        return self.next_position + index - self.prompt_length
