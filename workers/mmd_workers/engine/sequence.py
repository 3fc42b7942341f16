"""One sequence in the engine: its tokens, how much of its KV exists, and the blocks that hold it. Independent of the model and the pool."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from mmd_workers.engine.choosing.drafts import PromptLookup
from mmd_workers.engine.choosing.logit_rules import RuleState
from mmd_workers.engine.interface import Logprob, SamplingParams
from mmd_workers.engine.memory.blocks import MediaSpan
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

    `prompt_length` counts the tokens whose positions and features stand in `prompt` (or, for a sequence that was attached, whose
    KV came from elsewhere); token i beyond it has rotary position `next_position + i - prompt_length`. `prompt` is None for
    attached sequences: their KV cannot be computed here, so when they are preempted they leave this engine.

    `companion`: its answer is guided away from this one's, which has the same output tokens after another prompt, and blocks of its own. No list
    of the scheduler has it: it comes, runs and goes with the sequence.
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
    blocks: list[int] = field(default_factory=list)  # by position; the first `dropped` are not its own
    dropped: int = 0  # leading blocks that left every layer's window
    shared: int = 0  # leading blocks that were cached at its admission
    root: bytes = b""  # see `blocks.root_of`
    identities: list[bytes] = field(default_factory=list)  # of the leading full blocks
    registered: int = 0  # leading blocks offered to the prefix cache
    admitted: bool = False  # now, or before a preemption
    computed: int = 0
    waited_steps: int = 0
    overtaken: int = 0  # admissions of others past this one while it did not fit
    constraint: Constraint | None = None  # has advanced over all output tokens
    lookup: PromptLookup | None = None  # None: nothing is drafted for it
    prompt_logprobs: dict[int, Logprob] | None = None  # of the tokens of its prompt so far; None: not wanted
    guidance_scale: float = 1.0
    companion: Sequence | None = None
    _media_end: int = field(init=False, default=0)  # of the last medium that is computed here

    def __post_init__(self) -> None:
        if self.prompt is not None:
            spans = (start + length for start, length, _ in self.media_spans)
            self._media_end = max((*spans, *(stop for _, stop in self.atomic_ranges)), default=0)

    @property
    def num_tokens(self) -> int:
        """Known tokens, outputs included."""
        return len(self.token_ids)

    @property
    def remaining(self) -> int:
        """Known tokens without KV; 1 while decoding."""
        return len(self.token_ids) - self.computed

    @property
    def parts(self) -> tuple[Sequence, ...]:
        """It and its companion, if it has one."""
        return (self,) if self.companion is None else (self, self.companion)

    @property
    def places(self) -> int:
        """Rows that it has in a step in which it decodes."""
        return 1 if self.companion is None else 2

    @property
    def to_compute(self) -> int:
        """Known tokens without KV, its companion's included."""
        return self.remaining if self.companion is None else self.remaining + self.companion.remaining

    @property
    def blocked(self) -> int:
        """Those of the remaining tokens that come after a missing feature."""
        return self.num_tokens - max(self.computed, self.computable_until())

    @property
    def held_blocks(self) -> list[int]:
        """Blocks that it has a reference to."""
        return self.blocks[self.dropped :]

    def drop_blocks(self, until: int) -> list[int]:
        """Give up the leading blocks before number `until`, and return those that it held. In their places stands the first one that it keeps:
        attention that reads whole contexts must find numbers there, whatever they are."""
        given_up = self.blocks[self.dropped : until]
        if given_up:
            self.dropped = until
            self.blocks[:until] = [self.blocks[until]] * until
        return given_up

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens so far, those generated elsewhere included."""
        return self.token_ids[self.num_tokens - self.num_outputs :]

    @property
    def decoding(self) -> bool:
        """Whether the next step feeds a token this engine (or the one before it) has generated, and that alone."""
        alone = self.companion is None or self.companion.remaining == 1
        return self.remaining == 1 and self.num_tokens > self.prompt_length and alone

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

    @property
    def media_ahead(self) -> bool:
        """Whether KV of a medium's tokens is still to be computed here."""
        return self.computed < self._media_end

    @property
    def ready(self) -> bool:
        """Whether a step may compute a piece of it: its next token waits for no feature."""
        return self.ready_tokens > 0

    @property
    def ready_tokens(self) -> int:
        """How many of its next tokens wait for no feature."""
        return max(0, self.computable_until() - self.computed)

    def computable_until(self) -> int:
        """Tokens up to the first missing feature that is still needed, or the atomic range that it is in; cached blocks need none."""
        if self.prompt is None:
            return self.num_tokens
        starts = [start for start, last in self.prompt.missing.values() if last > self.computed]
        until = min(starts, default=self.num_tokens)
        return next((start for start, stop in self.atomic_ranges if start < until < stop), until)

    def append(self, token_id: int) -> None:
        """Note its next output token, which is its companion's too."""
        for part in self.parts:
            part.token_ids.append(token_id)
            part.num_outputs += 1

    def position(self, index: int) -> int:
        """Rotary position of a token beyond the prompt."""
        return self.next_position + index - self.prompt_length
