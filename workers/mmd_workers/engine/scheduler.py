"""What runs in the next step: all decodable sequences and a budget of prefill tokens. Pure bookkeeping; independent of tensors and the clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmd_workers.engine.blocks import BlockPool, extend_identities
from mmd_workers.engine.sequence import Sequence, SequenceState

AGING_DIVISOR = 8  # a waiting step outweighs 1/8 of a chunk of remaining prompt
MAX_OVERTAKEN = 16  # sequences admitted past one that does not fit; then nobody passes until it does
MAX_PASSED = 8  # waiting sequences that do not fit, looked past in one step


@dataclass(frozen=True, slots=True)
class Work:
    """Compute the tokens [start, end) of a sequence; `samples`: its last known token is among them."""

    sequence: Sequence
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Whether this step yields the logits of the next token."""
        return self.end == self.sequence.num_tokens


@dataclass(slots=True)
class StepPlan:
    """One step: decode work (one token each), then prefill chunks."""

    decodes: list[Work] = field(default_factory=list)
    prefills: list[Work] = field(default_factory=list)


class Scheduler:
    """Continuous batching with chunked prefill.

    - A sequence is admitted when blocks for all of its known tokens are its own; so a prefill never runs dry. Those behind one that
      does not fit are admitted past it, at most `MAX_OVERTAKEN` times; then freed blocks accumulate for it.
    - Prefill goes to the shortest remaining prompt first; every step without progress makes a sequence count as shorter (aging).
    - A prompt that a step would not finish is begun there only with half of the budget or more: less would make those wait that
      the step does finish, and bring its own first token no nearer.
    - Prefill stops before the first missing feature, and never inside an atomic range.
    - Decode takes blocks one by one. When none is left, the newest request is preempted: it gives up its blocks, keeps its tokens,
      and waits to be recomputed here, or leaves (`preempted`) if its prompt is not here. The oldest is never preempted, so it finishes.
    - A sequence that runs alone and finds no block waits for those that are reserved or held; they end at their own deadlines.
    """

    def __init__(self, pool: BlockPool, *, max_sequences: int, chunk_tokens: int, prefix_cache: bool) -> None:
        self.pool = pool
        self.max_sequences = max_sequences
        self.chunk_tokens = chunk_tokens
        self.prefix_cache = prefix_cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self.prefix_miss_tokens = 0
        self.preempted: list[Sequence] = []  # without blocks; to be continued elsewhere
        self.admitted: dict[str, int] = {}  # since the last batch, with their cached tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has no blocks yet."""
        sequence.state = SequenceState.WAITING
        self.waiting.append(sequence)

    def start(self, sequence: Sequence) -> None:
        """Run a sequence that brings its blocks and KV with it."""
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Stop scheduling a running sequence; it keeps its blocks."""
        self.running.remove(sequence)
        sequence.state = SequenceState.HELD

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in any state and drop its blocks."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self.admitted.pop(sequence.sequence_id, None)

    def schedule(self, reserved_slots: int = 0) -> StepPlan:
        """Choose the next step's work; `reserved_slots` sequences are expected from elsewhere and keep their places free.

        Admits, grows and preempts on the way; an empty schedule means that nothing can run until something is filled,
        released or added.
        """
        schedule = StepPlan()
        self._grow_decodes()
        self._admit(self.max_sequences - reserved_slots)
        for sequence in self.running:
            if sequence.decoding and len(sequence.blocks) >= self.pool.blocks_for(sequence.num_tokens):
                schedule.decodes.append(Work(sequence, sequence.computed, sequence.num_tokens))
        budget = self.chunk_tokens
        for sequence in sorted((s for s in self.running if not s.decoding), key=self._priority):
            end = self._chunk_end(sequence, budget, alone=not schedule.prefills)
            if end > sequence.computed:
                schedule.prefills.append(Work(sequence, sequence.computed, end))
                budget -= end - sequence.computed
                sequence.waited_steps = 0
            else:
                sequence.waited_steps += 1
        return schedule

    def finish_chunk(self, work: Work) -> None:
        """Record that the KV of `work` exists now, and offer the blocks it filled to the prefix cache."""
        sequence = work.sequence
        sequence.computed = work.end
        if self.prefix_cache:
            full = sequence.computed // self.pool.block_tokens
            if full > sequence.registered:
                self._hash_until(sequence, full)
                for number in range(sequence.registered, full):
                    self.pool.register(sequence.blocks[number], sequence.identities[number])
                sequence.registered = full

    def _priority(self, sequence: Sequence) -> tuple[int, int]:
        aging = sequence.waited_steps * max(1, self.chunk_tokens // AGING_DIVISOR)
        return sequence.remaining - aging, sequence.arrival

    def _chunk_end(self, sequence: Sequence, budget: int, *, alone: bool) -> int:
        """How far this step may prefill a sequence; an atomic range larger than the budget runs when it is the first chunk."""
        limit = sequence.computable_until()
        end = min(limit, sequence.computed + budget)
        if end < limit and 2 * budget < self.chunk_tokens:
            return sequence.computed
        for start, stop in sequence.atomic_ranges:
            if start < end < stop:
                if start > sequence.computed:
                    return start
                return stop if alone and stop <= limit else sequence.computed
        return end

    def _admit(self, slots: int) -> None:
        passed: list[Sequence] = []
        for sequence in sorted(self.waiting, key=self._priority):
            if len(self.running) >= slots or len(passed) > MAX_PASSED:
                break
            if self._try_admit(sequence):
                for other in passed:
                    other.overtaken += 1
            else:
                passed.append(sequence)
            if any(other.overtaken >= MAX_OVERTAKEN for other in passed):
                break
        for sequence in self.waiting:
            sequence.waited_steps += 1

    def _try_admit(self, sequence: Sequence) -> bool:
        cached = self._cached_prefix(sequence)
        needed = self.pool.blocks_for(sequence.num_tokens) - len(cached)
        room = self.pool.available_beside(cached)
        # One spare block for each running sequence, so that an admission is not undone by the next decode step.
        if needed + len(self.running) > room and (self.running or needed > room):
            return False
        self.waiting.remove(sequence)
        self.pool.share(cached)
        sequence.blocks = cached + self.pool.allocate(needed)
        sequence.computed = len(cached) * self.pool.block_tokens
        sequence.registered = len(cached)
        sequence.waited_steps = sequence.overtaken = 0
        if not sequence.admitted:
            sequence.admitted = True
            self.prefix_hit_tokens += sequence.computed
            self.prefix_miss_tokens += sequence.num_tokens - sequence.computed
        self.admitted[sequence.sequence_id] = sequence.computed
        self.start(sequence)
        return True

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Cached leading blocks, never all known tokens (the last one must be computed) and never a part of an atomic range."""
        if not self.prefix_cache:
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
            *(self.pool.block_tokens, full_blocks),
        )

    def _grow_decodes(self) -> None:
        for sequence in sorted(self.running, key=lambda s: s.age):
            if sequence.state is not SequenceState.RUNNING or not sequence.decoding:
                continue
            while len(sequence.blocks) < self.pool.blocks_for(sequence.num_tokens):
                if self.pool.available:
                    sequence.blocks += self.pool.allocate(1)
                    continue
                if len(self.running) == 1:
                    break
                victim = max((s for s in self.running if s.preemptable), key=lambda s: s.age)
                self._preempt(victim)
                if victim is sequence:
                    break

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.registered = 0
        self.preemptions += 1
        if sequence.rules is not None:
            sequence.rules.leave_device()
        if sequence.prompt is None:
            sequence.state = SequenceState.HELD
            self.preempted.append(sequence)
        else:
            self.add(sequence)
