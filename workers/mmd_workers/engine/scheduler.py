"""Chooses what the next step runs: all decodable sequences and a budget of prefill tokens. Pure; independent
of tensors and the clock."""

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
MAX_OVERTAKEN = 16  # admissions past a sequence that does not fit; then nothing passes it until it does
MAX_PASSED = 8  # waiting sequences that do not fit and are skipped in one step
STEPS_BETWEEN_TURNS = 3
"""The oldest long prompt has a turn after this many steps, and not before the others have had this many times
the time of its last piece."""
TEXT_SECONDS = 30.0  # another text is expected within this time, measured in steps
LONGEST_TURN = 20
"""A turn counts as at most this many step bounds, so that a pause in it does not delay the next turn for minutes."""


@dataclass(slots=True)
class StepPlan:
    """Work of one step: decodes (one token each, and its drafts), then prefill chunks."""

    decodes: list[Work] = field(default_factory=list)
    prefills: list[Work] = field(default_factory=list)
    bounded: bool = False  # the step has a time limit


class Scheduler:
    """Continuous batching with chunked prefill.

    - A sequence is admitted when it has blocks for all of its known tokens, so a prefill never runs dry.
      Where all layers have a window, blocks for the window and a chunk suffice; they are reused again and
      again. Sequences behind one that does not fit are admitted past it, at most `MAX_OVERTAKEN` times; then
      freed blocks accumulate for it.
    - Prefill goes to the shortest remaining prompt first. Every step without progress makes a sequence count
      as shorter (aging).
    - A step begins a prompt that it would not finish only with half of the budget or more. With less, prompts
      that the step does finish would wait, and the unfinished prompt's first token would come no earlier.
    - Prefill stops before the first missing feature, and never inside an atomic range.
    - `pace` limits the prompt tokens of a step that may compute a prompt with media while a sequence waits
      for its end. The limit covers all prompts. Pieces that read long contexts, and atomic ranges, may exceed
      it if they are first in the step. They may also if the step would be less than half full without them
      and has at most twice the limit with them.
    - In such steps the oldest prompt that has media or exceeds a chunk gets turns. It comes first in
      admission and in the step when it has not advanced for `STEPS_BETWEEN_TURNS` steps and the others have
      had that many times the time of its last piece. So it gets a fourth of the time, or what the order gives
      it.
    - Text alone, and media whose steps nobody waits for, are scheduled as if there were no `pace`.
    - With a `text_share`, a step that could compute both texts and prompts with media is divided between
      them, each side in the order above.
    - Decode takes blocks one by one. When no block remains, the newest request is preempted: it gives up its
      blocks, keeps its tokens, and waits to be recomputed here. If its prompt is not here it leaves
      (`preempted`). The oldest request is never preempted, so it finishes.
    - In a step without prompts, decoding sequences may have drafts as long as the step has at most
      `max_sequences` rows: memory is measured for that many. A draft takes only blocks that no other sequence
      needs.
    - Where all layers have a window, blocks whose tokens no later row sees are released. A sequence that will
      be handed over keeps all of its blocks: its decoder reads them.
    - A sequence that runs alone and finds no block waits for reserved or held ones; these end at their own deadlines.
    - A sequence with a companion gets the blocks of both or none, and two places. The companion's prompt
      comes first, except for its last token. That token is computed with the sequence's last one, so that
      both logits come from one step.
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
        """`pace`: limits steps with media; None: they have `chunk_tokens`, like steps without.

        `text_share`: divides steps with both texts and media; None: the order alone decides. `drafts`: for
        sequences of up to `max_model_len` tokens; None: no drafts.
        """
        self.pool = pool
        self.max_sequences = max_sequences
        self.chunk_tokens = chunk_tokens
        self.prefix_cache = prefix_cache
        self.pace = pace
        self.text_share = text_share
        self.drafts = drafts
        self.max_model_len = max_model_len
        self.window: int | None = None  # most tokens that a row sees, its own included; None: all
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self.prefix_miss_tokens = 0
        self.preempted: list[Sequence] = []  # without blocks; they continue elsewhere
        self.admitted: dict[str, int] = {}  # sequences since the last batch: cached tokens
        self._steps_without_oldest = 0  # consecutive steps
        self._seconds_since_text = math.inf  # measured in steps
        self._oldest_share = 0.0  # part of the newest step that the oldest long prompt has
        self._turn_seconds = 0.0  # its part of the last step in which it had a piece
        self._others_seconds = 0.0  # time of other prompts since then

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
        """Stop scheduling a running sequence, which keeps its blocks.

        Its companion's blocks are released: a decoder computes that prompt itself.
        """
        self.running.remove(sequence)
        sequence.state = SequenceState.HELD
        if sequence.companion is not None:
            self._release(sequence.companion)
            sequence.companion = None

    @property
    def places(self) -> int:
        """Places that running sequences take."""
        return sum(sequence.places for sequence in self.running)

    @property
    def waiting_places(self) -> int:
        """Places that waiting sequences will take."""
        return sum(sequence.places for sequence in self.waiting)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in any state and release its blocks."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        self._release(sequence)
        self.admitted.pop(sequence.sequence_id, None)

    def schedule(self, reserved_slots: int = 0) -> StepPlan:
        """Choose the next step's work. `reserved_slots` places stay free for sequences that are expected from elsewhere.

        Admits, grows and preempts on the way. An empty schedule: nothing can run until something is filled,
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
        oldest_tokens = sum(work.tokens for work in schedule.prefills if work.sequence is oldest)
        self._oldest_share = oldest_tokens and oldest_tokens / sum(work.tokens for work in schedule.prefills)
        self._steps_without_oldest = 0 if oldest is None or oldest_tokens else self._steps_without_oldest + 1
        return schedule

    def finish_step(self, output: StepOutput) -> None:
        """Learn the duration of the step that was scheduled last."""
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
        """Record that the KV of `work` exists.

        Offers the blocks that it filled to the prefix cache, and releases those that left the window.
        """
        if work.companion is not None:
            self.finish_chunk(work.companion)
        sequence = work.sequence
        sequence.computed = work.end
        if self.prefix_cache:
            full = sequence.computed // self.pool.block_tokens
            if self._missing_blocks(sequence):
                # A block that other sequences share would not become free when it leaves the window.
                full = min(full, self._out_of_window(sequence))
            if full > sequence.registered:
                self._hash_until(sequence, full)
                for number in range(sequence.registered, full):
                    self.pool.register(sequence.blocks[number], sequence.identities[number])
                sequence.registered = full
        self._drop_blocks(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence's blocks from the prefix cache, those already released included."""
        for part in sequence.parts:
            self._hash_until(part, part.registered)
            self.pool.forget(part.identities[: part.registered])

    def restart_uncached(self, sequence: Sequence) -> bool:
        """Queue a running sequence to be computed again without cached blocks. False: it had none, or cannot be.

        It cannot without its prompt, or where a peer has been told of its KV.
        """
        shares = any(part.shared for part in sequence.parts)
        if not shares or sequence.prompt is None or sequence.announced:
            return False
        for part in sequence.parts:
            part.avoids_cache = True
        self._withdraw(sequence)
        self.add(sequence)
        return True

    def finish_drafts(self, work: Work, accepted: int) -> None:
        """Record how many of the drafts of `work` the model sampled too."""
        if self.drafts is not None and work.sequence.lookup is not None:
            self.drafts.learn(work.sequence.lookup, len(work.drafts), accepted)

    def _with_drafts(self, drafts: Drafts, decodes: list[Work]) -> list[Work]:
        work, rows = list[Work](), self.max_sequences - sum(item.tokens for item in decodes)
        for item in decodes:
            sequence = item.sequence
            if sequence.lookup is not None:
                remaining_tokens = min(
                    sequence.sampling.max_tokens - sequence.num_outputs, self.max_model_len - item.end
                )
                most_drafts = min(rows, remaining_tokens - 1)
                draft = drafts.draft(sequence.lookup, sequence.token_ids, most_drafts, len(decodes))
                draft = draft[: self._room_for(sequence, len(draft))]
                rows -= len(draft)
                item = Work(sequence, item.start, item.end + len(draft), tuple(draft))
            work.append(item)
        return work

    def _room_for(self, sequence: Sequence, tokens: int) -> int:
        """Return how many more tokens, up to `tokens`, fit into a sequence's blocks.

        Adds blocks while each running sequence could still get one.
        """
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
        """True if media could delay a sequence that decodes, or a text that is here or may come."""
        if self.pace is None:
            return False
        return self._seconds_since_text < TEXT_SECONDS or any(s.decoding for s in self.running)

    def _oldest_long(self) -> Sequence | None:
        """Return the oldest prompt that has media or exceeds a chunk and that a step could compute.

        None if no such prompt has media.
        """
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
        """Return the step's pieces of prompts."""
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
        cached_prefixes = [(part, self._cached_prefix(part)) for part in sequence.parts]
        block_counts = [self._blocks_at_once(sequence, part, len(cached)) for part, cached in cached_prefixes]
        needed = sum(block_counts)
        room = self.pool.available_beside({block for _, cached in cached_prefixes for block in cached})
        # Each running sequence keeps a spare block, so that the next decode step does not undo the admission.
        if needed + self.places > room and (self.running or needed > room):
            return False
        self.waiting.remove(sequence)
        for _, cached in cached_prefixes:
            self.pool.share(cached)
        for (part, cached), more in zip(cached_prefixes, block_counts, strict=True):
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
        """Return cached leading blocks, never those of all known tokens: the last must be computed.

        Empty where log probabilities of the prompt are requested: no block has them.
        """
        if not self.prefix_cache or sequence.prompt_logprobs is not None or sequence.avoids_cache:
            return []
        most_blocks = (sequence.num_tokens - 1) // self.pool.block_tokens
        self._hash_until(sequence, most_blocks)
        return self.pool.find(sequence.identities[:most_blocks])

    def _hash_until(self, sequence: Sequence, full_blocks: int) -> None:
        size = self.pool.block_tokens
        # A sequence that decodes gets here often, and its media end before what is hashed then.
        spans = sequence.media_spans if len(sequence.identities) * size < sequence.spans_end else ()
        extend_identities(sequence.identities, sequence.token_ids, spans, size, full_blocks, sequence.root)

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
        """Return the part of a sequence without a block for its last known token; None: every part has one."""
        for part in sequence.parts:
            if len(part.blocks) < self.pool.blocks_for(part.num_tokens):
                return part
        return None

    def _blocks_at_once(self, sequence: Sequence, part: Sequence, cached: int) -> int:
        """Return how many blocks, besides cached ones, a part of a prompt needs at most while it is computed.

        A window and a chunk after it suffice where blocks that leave the window are released. All blocks are
        needed with an atomic range, which may be longer than both, and with a companion, which takes part of
        the same chunks.
        """
        missing = self.pool.blocks_for(part.num_tokens) - cached
        if (
            self.window is None
            or part.stop_after_prefill
            or part.atomic_ranges
            or sequence.companion is not None
        ):
            return missing
        return min(missing, self.pool.blocks_for(self.window - 1 + self.chunk_tokens) + 1)

    def _missing_blocks(self, sequence: Sequence) -> int:
        return max(0, self.pool.blocks_for(sequence.num_tokens) - len(sequence.blocks))

    def _out_of_window(self, sequence: Sequence) -> int:
        """Return how many leading blocks lie before the window of the next token; later windows begin no earlier.

        The rows of an atomic range see all of it. A chunk never ends inside one; a cached prefix may.
        """
        if self.window is None or sequence.stop_after_prefill:
            return 0
        seen = (start for start, stop in sequence.atomic_ranges if start < sequence.computed < stop)
        first = min([max(0, sequence.computed + 1 - self.window), *seen])
        return min(first // self.pool.block_tokens, len(sequence.blocks) - 1)

    def _drop_blocks(self, sequence: Sequence) -> None:
        """Release the blocks that left the window. A prompt that lacks blocks gets up to as many as it owned of these.

        The owned ones are now free, or unreferenced in the prefix cache, so the prompt never runs dry.
        """
        until, shared_or_dropped = self._out_of_window(sequence), max(sequence.dropped, sequence.shared)
        self.pool.release(sequence.drop_blocks(until))
        if missing := self._missing_blocks(sequence):
            sequence.blocks += self.pool.allocate(min(missing, max(0, until - shared_or_dropped)))

    def _release(self, sequence: Sequence) -> None:
        for part in sequence.parts:
            self.pool.release(part.held_blocks)
            self.pool.touch(part.identities[: part.dropped])  # they were released before the later blocks
            part.blocks, part.dropped = [], 0

    def _withdraw(self, sequence: Sequence) -> None:
        """Take all KV from a running sequence, which keeps its tokens."""
        self.running.remove(sequence)
        self._release(sequence)
        for part in sequence.parts:
            part.computed = part.registered = part.shared = 0
        if sequence.rules is not None:
            sequence.rules.leave_device()

    def _preempt(self, sequence: Sequence) -> None:
        self._withdraw(sequence)
        self.preemptions += 1
        if sequence.prompt is None:
            sequence.state = SequenceState.HELD
            self.preempted.append(sequence)
        else:
            self.add(sequence)


def _last_of(sequence: Sequence) -> Work:
    """Return the work of a sequence's last known token, and of its companion's."""
    companion = None if sequence.companion is None else _last_of(sequence.companion)
    return Work(sequence, sequence.computed, sequence.num_tokens, companion=companion)
