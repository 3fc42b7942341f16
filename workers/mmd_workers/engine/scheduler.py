"""What runs in the next step: all decodable sequences and a budget of prefill tokens. Pure bookkeeping; independent of tensors and the clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mmd_api.contract.text_share import TextShare
from mmd_workers.engine.choosing.drafts import Drafts
from mmd_workers.engine.interface import StepOutput
from mmd_workers.engine.memory.blocks import BlockPool, extend_identities
from mmd_workers.engine.pacing.pace import Pace
from mmd_workers.engine.pieces import Pieces, Work
from mmd_workers.engine.sequence import Sequence, SequenceState

AGING_DIVISOR = 8  # a step of waiting outweighs 1/8 of a chunk of remaining prompt
MAX_OVERTAKEN = 16  # sequences admitted past one that does not fit; then nobody passes until it does
MAX_PASSED = 8  # waiting sequences that do not fit, looked past in one step
STEPS_BETWEEN_TURNS = 3  # of the oldest long prompt, or more, until the others have had so many times the time of its last piece
TEXT_SECONDS = 30.0  # of steps after a text, in which another one is expected
LONGEST_TURN = 20  # times a step's bound, that a turn counts as at most: a pause in it must not delay the next one for minutes


@dataclass(slots=True)
class StepPlan:
    """One step: decode work (one token each, and its draft), then prefill chunks."""

    decodes: list[Work] = field(default_factory=list)
    prefills: list[Work] = field(default_factory=list)
    bounded: bool = False  # in time


class Scheduler:
    """Continuous batching with chunked prefill.

    - A sequence is admitted when blocks for all of its known tokens are its own, or where all layers have a window, for the window and a chunk, which
      it then uses again and again; so a prefill never runs dry. Those behind one that does not fit are admitted past it, at most `MAX_OVERTAKEN`
      times; then freed blocks accumulate for it.
    - Prefill goes to the shortest remaining prompt first; every step without progress makes a sequence count as shorter (aging).
    - A prompt that a step would not finish is begun there only with half of the budget or more: less would make those wait that
      the step does finish, and bring its own first token no nearer.
    - Prefill stops before the first missing feature, and never inside an atomic range.
    - A step that may compute a prompt with media while somebody waits for its end has no more tokens of prompts than `pace` says, of
      whatever prompts. Pieces that read long contexts may be longer, as atomic ranges may, where they are first in the step, or where it
      would be less than half full without them and is no more than twice as long with them.
    - Then the oldest prompt that has media or exceeds a chunk is first in admission and in the step when it has not advanced for
      `STEPS_BETWEEN_TURNS` steps and the others have had as many times the time of its last piece. So it has a fourth of the time, or what
      the order gives it.
    - Text alone, and media for whose steps nobody waits, are scheduled as if there were no `pace`.
    - With a `text_share`, a step that could compute both texts and prompts with media is divided between them, each side in the order above.
    - Decode takes blocks one by one. When none is left, the newest request is preempted: it gives up its blocks, keeps its tokens,
      and waits to be recomputed here, or leaves (`preempted`) if its prompt is not here. The oldest is never preempted, so it finishes.
    - In a step without prompts decoding sequences may have drafts, as far as the step has no more rows than `max_sequences`: memory is measured
      for those. A draft takes blocks that nobody else needs.
    - Where all layers have a window, blocks whose tokens no later row sees are given back, but of a sequence that is handed over none: its
      decoder reads them.
    - A sequence that runs alone and finds no block waits for those that are reserved or held; they end at their own deadlines.
    - A sequence with a companion has the blocks of both or none, and two places. The companion's prompt, all but its last token, comes
      first; that one is computed with the sequence's own, so that the logits of both are those of one step.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_sequences: int,
        chunk_tokens: int,
        prefix_cache: bool,
        pace: Pace | None = None,
        text_share: TextShare | None = None,
        drafts: Drafts | None = None,
        max_model_len: int = 0,
    ) -> None:
        """`pace`: of steps with media; None: they have `chunk_tokens`, as those without. `text_share`: of steps with both; None: the order alone
        decides. `drafts`: of sequences of up to `max_model_len` tokens; None: there are none."""
        self.pool = pool
        self.max_sequences = max_sequences
        self.chunk_tokens = chunk_tokens
        self.prefix_cache = prefix_cache
        self.pace = pace
        self.text_share = text_share
        self.drafts = drafts
        self.max_model_len = max_model_len
        self.window: int | None = None  # tokens that a row sees at most, its own included; None: all
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self.prefix_miss_tokens = 0
        self.preempted: list[Sequence] = []  # without blocks; to be continued elsewhere
        self.admitted: dict[str, int] = {}  # since the last batch, with their cached tokens
        self._steps_without_oldest = 0  # in a row
        self._seconds_since_text = math.inf  # of steps
        self._oldest_share = 0.0  # of the newest step, that the oldest long prompt has
        self._turn_seconds = 0.0  # that it took of the last step that had a piece of it
        self._others_seconds = 0.0  # since then

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has no blocks yet."""
        sequence.state = SequenceState.WAITING
        self.waiting.append(sequence)
        self._note_text(sequence)

    def start(self, sequence: Sequence) -> None:
        """Run a sequence that brings its blocks and KV with it."""
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Stop scheduling a running sequence; it keeps its blocks. Its companion does not: a decoder computes that prompt itself."""
        self.running.remove(sequence)
        sequence.state = SequenceState.HELD
        if sequence.companion is not None:
            self._release(sequence.companion)
            sequence.companion = None

    @property
    def places(self) -> int:
        """Places that running sequences have."""
        return sum(sequence.places for sequence in self.running)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in any state and drop its blocks."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        self._release(sequence)
        self.admitted.pop(sequence.sequence_id, None)

    def schedule(self, reserved_slots: int = 0) -> StepPlan:
        """Choose the next step's work; `reserved_slots` sequences are expected from elsewhere and keep their places free.

        Admits, grows and preempts on the way; an empty schedule means that nothing can run until something is filled,
        released or added.
        """
        schedule = StepPlan()
        self._grow_decodes()
        oldest = self._oldest_long() if self.somebody_waits else None
        due = oldest if self._turn_is_due() else None
        self._admit(self.max_sequences - reserved_slots, due)
        for sequence in self.running:
            if sequence.decoding and self._lacking(sequence) is None:
                schedule.decodes.append(_last_of(sequence))
        schedule.bounded = self._is_bounded()
        schedule.prefills = self._prefills(schedule, due)
        if self.drafts is not None and not schedule.prefills:
            schedule.decodes = self._with_drafts(self.drafts, schedule.decodes)
        of_oldest = sum(work.tokens for work in schedule.prefills if work.sequence is oldest)
        self._oldest_share = of_oldest and of_oldest / sum(work.tokens for work in schedule.prefills)
        self._steps_without_oldest = 0 if oldest is None or of_oldest else self._steps_without_oldest + 1
        return schedule

    def finish_step(self, output: StepOutput) -> None:
        """Learn how long the step took that was scheduled last."""
        if self.drafts is not None:
            self.drafts.finish_step(output)
        if self.pace is None:
            return
        self.pace.add(output)
        seconds = output.duration_seconds
        self._seconds_since_text += seconds
        if self._oldest_share:
            longest = LONGEST_TURN * self.pace.bound.seconds
            self._turn_seconds = min(longest, seconds * self._oldest_share)
            self._others_seconds = 0.0
        self._others_seconds += seconds * (1.0 - self._oldest_share)

    def finish_chunk(self, work: Work) -> None:
        """Record that the KV of `work` exists now, offer the blocks it filled to the prefix cache, and give back those that left the window."""
        if work.companion is not None:
            self.finish_chunk(work.companion)
        sequence = work.sequence
        sequence.computed = work.end
        if self.prefix_cache:
            full = sequence.computed // self.pool.block_tokens
            if self._missing_blocks(sequence):
                # one that others share would not be there again when it leaves the window
                full = min(full, self._out_of_window(sequence))
            if full > sequence.registered:
                self._hash_until(sequence, full)
                for number in range(sequence.registered, full):
                    self.pool.register(sequence.blocks[number], sequence.identities[number])
                sequence.registered = full
        self._drop_blocks(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Remove its blocks from the prefix cache, also those that it has given back."""
        for part in sequence.parts:
            self._hash_until(part, part.registered)
            self.pool.forget(part.identities[: part.registered])

    def finish_drafts(self, work: Work, accepted: int) -> None:
        """Record how many of the drafts of `work` the model sampled too."""
        if self.drafts is not None and work.sequence.lookup is not None:
            self.drafts.learn(work.sequence.lookup, len(work.drafts), accepted)

    def _with_drafts(self, drafts: Drafts, decodes: list[Work]) -> list[Work]:
        work, rows = list[Work](), self.max_sequences - sum(item.tokens for item in decodes)
        for item in decodes:
            sequence = item.sequence
            if sequence.lookup is not None:
                left = min(sequence.sampling.max_tokens - sequence.num_outputs, self.max_model_len - item.end)
                most = min(rows, left - 1)
                found = drafts.draft(sequence.lookup, sequence.token_ids, most, len(decodes))
                found = found[: self._room_for(sequence, len(found))]
                rows -= len(found)
                item = Work(sequence, item.start, item.end + len(found), tuple(found))
            work.append(item)
        return work

    def _room_for(self, sequence: Sequence, tokens: int) -> int:
        """How many tokens more than it has there is room for in the blocks of a sequence, which gets others as long as each that runs may have one."""
        size = self.pool.block_tokens
        while (room := len(sequence.blocks) * size - sequence.num_tokens) < tokens:
            if self.pool.available <= self.places:
                return room
            sequence.blocks += self.pool.allocate(1)
        return tokens

    def _priority(self, sequence: Sequence) -> tuple[int, int]:
        aging = sequence.waited_steps * max(1, self.chunk_tokens // AGING_DIVISOR)
        return sequence.to_compute - aging, sequence.arrival

    @property
    def somebody_waits(self) -> bool:
        """Whether media could keep somebody waiting: sequences that decode, or texts that are here or may come."""
        if self.pace is None:
            return False
        return self._seconds_since_text < TEXT_SECONDS or any(s.decoding for s in self.running)

    def _oldest_long(self) -> Sequence | None:
        """Of the prompts that a step could compute, those that have media or exceed a chunk. None where no media are among them."""
        oldest, with_media = None, False
        for sequence in (*self.running, *self.waiting):
            if sequence.decoding or not (sequence.media_ahead or sequence.remaining > self.chunk_tokens):
                continue
            older = oldest is None or sequence.age < oldest.age
            if (older or (sequence.media_ahead and not with_media)) and sequence.ready:
                oldest = sequence if older else oldest
                with_media = with_media or sequence.media_ahead
        return oldest if with_media else None

    def _note_text(self, sequence: Sequence) -> None:
        if not sequence.media_ahead:
            self._seconds_since_text = 0.0

    def _turn_is_due(self) -> bool:
        return (
            self._steps_without_oldest >= STEPS_BETWEEN_TURNS
            and self._others_seconds >= STEPS_BETWEEN_TURNS * self._turn_seconds
        )

    def _in_order(self, sequences: list[Sequence], first: Sequence | None) -> list[Sequence]:
        return sorted(sequences, key=lambda s: (s is not first, self._priority(s)))

    def _is_bounded(self) -> bool:
        ready = any(s.media_ahead and s.ready for s in self.running if not s.decoding)
        return ready and self.somebody_waits

    def _prefills(self, schedule: StepPlan, first: Sequence | None) -> list[Work]:
        """The pieces of prompts."""
        prompts = self._in_order([s for s in self.running if not s.decoding], first)
        tokens = self.chunk_tokens
        if self.pace is not None and schedule.bounded:
            tokens = self.pace.tokens(sum(item.tokens for item in schedule.decodes))
        pieces = Pieces(tokens, self.chunk_tokens, schedule.bounded)
        if self.text_share is None:
            pieces.take(prompts)
        else:
            pieces.divide(self.text_share, prompts)
        return pieces.work

    def _admit(self, slots: int, first: Sequence | None) -> None:
        passed: list[Sequence] = []
        for sequence in self._in_order(self.waiting, first):
            if self.places >= slots or len(passed) > MAX_PASSED:
                break
            if self.places + sequence.places <= slots and self._try_admit(sequence):
                for other in passed:
                    other.overtaken += 1
            else:
                passed.append(sequence)
            if any(other.overtaken >= MAX_OVERTAKEN for other in passed):
                break
        for sequence in self.waiting:
            sequence.waited_steps += 1

    def _try_admit(self, sequence: Sequence) -> bool:
        found = [(part, self._cached_prefix(part)) for part in sequence.parts]
        lacking = [self._blocks_at_once(sequence, part, len(cached)) for part, cached in found]
        needed = sum(lacking)
        room = self.pool.available_beside({block for _, cached in found for block in cached})
        # One spare block for each running sequence, so that an admission is not undone by the next decode step.
        if needed + self.places > room and (self.running or needed > room):
            return False
        self.waiting.remove(sequence)
        for _, cached in found:
            self.pool.share(cached)
        for (part, cached), more in zip(found, lacking, strict=True):
            part.blocks = cached + self.pool.allocate(more)
            part.computed = len(cached) * self.pool.block_tokens
            part.registered = part.shared = len(cached)
            if not sequence.admitted:
                self.prefix_hit_tokens += part.computed
                self.prefix_miss_tokens += part.remaining
            self._drop_blocks(part)
        sequence.waited_steps = sequence.overtaken = 0
        sequence.admitted = True
        self.admitted[sequence.sequence_id] = sequence.computed
        self._note_text(sequence)
        self.start(sequence)
        return True

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Cached leading blocks, never all known tokens (the last one must be computed) and never a part of an atomic range. None where log
        probabilities of the prompt are wanted, which no block has."""
        if not self.prefix_cache or sequence.prompt_logprobs is not None:
            return []
        size = self.pool.block_tokens
        most = (sequence.num_tokens - 1) // size
        self._hash_until(sequence, most)
        cached = self.pool.find(sequence.identities[:most])
        keep = len(cached)
        for start, stop in reversed(sequence.atomic_ranges):
            if start < keep * size < stop:
                keep = start // size
        return cached[:keep]

    def _hash_until(self, sequence: Sequence, full_blocks: int) -> None:
        extend_identities(
            *(sequence.identities, sequence.token_ids, sequence.media_spans),
            *(self.pool.block_tokens, full_blocks, sequence.root),
        )

    def _grow_decodes(self) -> None:
        for sequence in sorted(self.running, key=lambda s: s.age):
            if sequence.state is not SequenceState.RUNNING or not sequence.decoding:
                continue
            while (part := self._lacking(sequence)) is not None:
                if self.pool.available:
                    part.blocks += self.pool.allocate(1)
                    continue
                if len(self.running) == 1:
                    break
                victim = max((s for s in self.running if s.preemptable), key=lambda s: s.age)
                self._preempt(victim)
                if victim is sequence:
                    break

    def _lacking(self, sequence: Sequence) -> Sequence | None:
        """The one of its parts that has no block for its last known token; None: all have."""
        for part in sequence.parts:
            if len(part.blocks) < self.pool.blocks_for(part.num_tokens):
                return part
        return None

    def _blocks_at_once(self, sequence: Sequence, part: Sequence, cached: int) -> int:
        """How many blocks of its own, besides cached ones, a part of a prompt has at most while it is computed: those of a window, and of a chunk
        after it. With an atomic range, which may be longer than both, with a companion, which has a part of the same chunks, and where nothing is
        given back, it has all.
        """
        lacking = self.pool.blocks_for(part.num_tokens) - cached
        if (
            self.window is None
            or part.stop_after_prefill
            or part.atomic_ranges
            or sequence.companion is not None
        ):
            return lacking
        return min(lacking, self.pool.blocks_for(self.window - 1 + self.chunk_tokens) + 1)

    def _missing_blocks(self, sequence: Sequence) -> int:
        return max(0, self.pool.blocks_for(sequence.num_tokens) - len(sequence.blocks))

    def _out_of_window(self, sequence: Sequence) -> int:
        """How many leading blocks lie before the window of its next token: of later ones it begins no earlier. A cached prefix and a chunk end at no
        place inside an atomic range, whose rows see all of it."""
        if self.window is None or sequence.stop_after_prefill:
            return 0
        first = max(0, sequence.computed + 1 - self.window)
        return min(first // self.pool.block_tokens, len(sequence.blocks) - 1)

    def _drop_blocks(self, sequence: Sequence) -> None:
        """Give back the blocks that left the window. A prompt that lacks blocks gets as many, of those that were its own: these are free now, or in
        the prefix cache with nobody else, so it never runs dry."""
        until, kept = self._out_of_window(sequence), max(sequence.dropped, sequence.shared)
        self.pool.release(sequence.drop_blocks(until))
        if missing := self._missing_blocks(sequence):
            sequence.blocks += self.pool.allocate(min(missing, max(0, until - kept)))

    def _release(self, sequence: Sequence) -> None:
        for part in sequence.parts:
            self.pool.release(part.held_blocks)
            self.pool.touch(part.identities[: part.dropped])  # given back before its later blocks
            part.blocks, part.dropped = [], 0

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        for part in sequence.parts:
            part.computed = part.registered = 0
        self.preemptions += 1
        if sequence.rules is not None:
            sequence.rules.leave_device()
        if sequence.prompt is None:
            sequence.state = SequenceState.HELD
            self.preempted.append(sequence)
        else:
            self.add(sequence)


def _last_of(sequence: Sequence) -> Work:
    """The last known token of a sequence, and of its companion."""
    beside = None if sequence.companion is None else _last_of(sequence.companion)
    return Work(sequence, sequence.computed, sequence.num_tokens, companion=beside)
