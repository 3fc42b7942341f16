"""One sequence in the engine: its tokens, how much of its KV exists, and its blocks. Independent of the model
and the pool."""

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
    """State of a sequence. Only `RUNNING` sequences are scheduled; all but `WAITING` ones hold blocks."""

    WAITING = "waiting"  # waits for blocks
    RUNNING = "running"
    HELD = "held"  # prefilled; the KV stays until release


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, KV and blocks of one sequence. `token_ids` are all known tokens; the first `computed` of them have KV.

    `prompt_length` counts the tokens whose positions and features are in `prompt`; for an attached sequence,
    the tokens whose KV came from elsewhere. Token i beyond them has rotary position `next_position + i -
    prompt_length`. `prompt` is None for attached sequences: their KV cannot be computed here, so they leave
    this engine when preempted.

    `companion`: the sequence that guidance steers this answer away from. It has the same output tokens after
    another prompt, and blocks of its own. The scheduler does not list it: it arrives, runs and leaves with
    this sequence.
    """

    sequence_id: str
    arrival: int
    token_ids: list[int]
    prompt_length: int
    next_position: int
    sampling: SamplingParams
    media_spans: list[MediaSpan]
    prompt: LoweredPrompt | None
    arrived: float = 0.0  # Unix time at which the request reached its gateway
    num_outputs: int = 0  # output tokens at the end of token_ids
    rules: RuleState | None = None
    stop_after_prefill: bool = False
    announced: int = 0  # KV tokens reported by KvReady
    state: SequenceState = SequenceState.WAITING
    blocks: list[int] = field(default_factory=list)  # by position; it does not own the first `dropped`
    dropped: int = 0  # leading blocks that left every layer's window
    shared: int = 0  # leading blocks that were cached at admission
    root: bytes = b""  # see `blocks.prompt_root`
    identities: list[bytes] = field(default_factory=list)  # identities of the leading full blocks
    registered: int = 0  # leading blocks offered to the prefix cache
    admitted: bool = False  # now, or before a preemption
    avoids_cache: bool = False  # no cached block is used for it: one may have had bad KV
    computed: int = 0
    waited_steps: int = 0
    overtaken: int = 0  # admissions of other sequences past this one while it did not fit
    constraint: Constraint | None = None  # has advanced over all output tokens
    lookup: PromptLookup | None = None  # None: no drafts
    prompt_logprobs: dict[int, Logprob] | None = None  # by position, so far; None: not requested
    engine_failures: int = 0  # engines that failed in a step of its request before
    guidance_scale: float = 1.0
    companion: Sequence | None = None
    spans_end: int = field(init=False)  # end of the last medium
    _media_end: int = field(init=False, default=0)  # end of the last medium or atomic range in the prompt

    def __post_init__(self) -> None:
        self.spans_end = max((start + length for start, length, _ in self.media_spans), default=0)
        if self.prompt is not None:
            self._media_end = max((self.spans_end, *(stop for _, stop in self.atomic_ranges)))

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
        """The sequence and its companion, if there is one."""
        return (self,) if self.companion is None else (self, self.companion)

    @property
    def places(self) -> int:
        """Rows of the sequence in a step in which it decodes."""
        return 1 if self.companion is None else 2

    @property
    def to_compute(self) -> int:
        """Known tokens without KV, the companion's included."""
        return self.remaining if self.companion is None else self.remaining + self.companion.remaining

    @property
    def blocked(self) -> int:
        """Remaining tokens after a missing feature."""
        return self.num_tokens - max(self.computed, self.computable_until())

    @property
    def held_blocks(self) -> list[int]:
        """Blocks that the sequence holds a reference to."""
        return self.blocks[self.dropped :]

    def drop_blocks(self, until: int) -> list[int]:
        """Give up the leading blocks before index `until`, and return those that were still held.

        The first remaining block takes their places in `blocks`, so that the others keep theirs.
        """
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
        """True if the next step feeds only one token, generated by this engine or the one before it."""
        companion_ready = self.companion is None or self.companion.remaining == 1
        return self.remaining == 1 and self.num_tokens > self.prompt_length and companion_ready

    @property
    def preemptable(self) -> bool:
        """True if the blocks may be taken: the KV can be computed again, here or elsewhere, and no peer reads it."""
        return not self.stop_after_prefill

    @property
    def age(self) -> tuple[float, int]:
        """Sort key, oldest request first, by arrival at the gateway. Neither moving nor waiting changes it."""
        return self.arrived, self.arrival

    @property
    def atomic_ranges(self) -> list[tuple[int, int]]:
        """Prompt ranges [start, stop) with bidirectional attention inside."""
        return self.prompt.atomic_ranges if self.prompt is not None else []

    @property
    def media_ahead(self) -> bool:
        """True if the KV of a medium's tokens must still be computed here."""
        return self.computed < self._media_end

    @property
    def ready(self) -> bool:
        """True if a step may compute a piece of the sequence: its next token waits for no feature."""
        return self.ready_tokens > 0

    @property
    def ready_tokens(self) -> int:
        """Number of next tokens that wait for no feature."""
        return max(0, self.computable_until() - self.computed)

    def computable_until(self) -> int:
        """Return the number of tokens before the first missing feature, or before the atomic range around it.

        Features of cached blocks are not needed.
        """
        if self.prompt is None:
            return self.num_tokens
        starts = [start for start, last in self.prompt.missing.values() if last > self.computed]
        until = min(starts, default=self.num_tokens)
        return next((start for start, stop in self.atomic_ranges if start < until < stop), until)

    def append(self, token_id: int) -> None:
        """Append the next output token, to the companion too."""
        for part in self.parts:
            part.token_ids.append(token_id)
            part.num_outputs += 1

    def position(self, index: int) -> int:
        """Return the rotary position of a token beyond the prompt."""
        return self.next_position + index - self.prompt_length
