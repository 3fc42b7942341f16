"""What runs in the next step: all decodable sequences and a budget of prefill tokens. Pure bookkeeping; knows no tensor and no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmd_workers.engine.blocks import BlockPool, block_hash
from mmd_workers.engine.sequence import Sequence, State

AGING_DIVISOR = 8  # a waiting step outweighs 1/8 of a chunk of remaining prompt


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
class Schedule:
    """One step: decode work (one token each), then prefill chunks."""

    decodes: list[Work] = field(default_factory=list)
    prefills: list[Work] = field(default_factory=list)


class Scheduler:
    """Continuous batching with chunked prefill.

    - A sequence is admitted when blocks for all of its known tokens are its own; so a prefill never runs dry.
    - Prefill goes to the shortest remaining prompt first; every step without progress makes a sequence count as shorter (aging).
    - A prompt that a step would not finish is begun there only with half of the budget or more: less would make those wait that
      the step does finish, and bring its own first token no nearer.
    - Prefill stops before the first missing feature, and never inside an atomic range.
    - When decode needs a block and none is left, the youngest sequence that can be recomputed gives up its blocks and waits;
      its tokens are kept.
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
        self.admitted: dict[str, int] = {}  # since the last batch, with their cached tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has no blocks yet."""
        sequence.state = State.WAITING
        self.waiting.append(sequence)

    def start(self, sequence: Sequence) -> None:
        """Run a sequence that brings its blocks and KV with it."""
        sequence.state = State.RUNNING
        self.running.append(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Stop scheduling a running sequence; it keeps its blocks."""
        self.running.remove(sequence)
        sequence.state = State.HELD

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in any state and drop its blocks."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.RUNNING:
            self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self.admitted.pop(sequence.sequence_id, None)

    def schedule(self, reserved_slots: int = 0) -> Schedule:
        """Choose the next step's work; `reserved_slots` sequences are expected from elsewhere and keep their places free.

        Admits, grows and preempts on the way; an empty schedule means that nothing can run until something is filled,
        released or added.
        """
        schedule = Schedule()
        self._grow_decodes()
        self._admit(self.max_sequences - reserved_slots)
        for sequence in self.running:
            if sequence.decoding:
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
        if budget <= 0 or (end < limit and 2 * budget < self.chunk_tokens):
            return sequence.computed
        for start, stop in sequence.atomic_ranges:
            if start < end < stop:
                if start > sequence.computed:
                    return start
                return stop if alone and stop <= limit else sequence.computed
        return end

    def _admit(self, slots: int) -> None:
        for sequence in sorted(self.waiting, key=self._priority):
            if len(self.running) >= slots or not self._try_admit(sequence):
                break
        for sequence in self.waiting:
            sequence.waited_steps += 1

    def _try_admit(self, sequence: Sequence) -> bool:
        cached = self._match(sequence)
        needed = self.pool.blocks_for(sequence.num_tokens) - len(cached)
        # One spare block for each running sequence, so that an admission is not undone by the next decode step.
        if needed + len(self.running) > self.pool.available and (
            self.running or needed > self.pool.available
        ):
            self.pool.release(cached)
            return False
        self.waiting.remove(sequence)
        sequence.blocks = cached + self.pool.allocate(needed)
        sequence.computed = len(cached) * self.pool.block_tokens
        sequence.registered = len(cached)
        sequence.waited_steps = 0
        self.prefix_hit_tokens += sequence.computed
        self.prefix_miss_tokens += sequence.num_tokens - sequence.computed
        self.admitted[sequence.sequence_id] = sequence.computed
        self.start(sequence)
        return True

    def _match(self, sequence: Sequence) -> list[int]:
        """Cached leading blocks, never all known tokens (the last one must be computed) and never a part of an atomic range."""
        if not self.prefix_cache:
            return []
        size = self.pool.block_tokens
        most = (sequence.num_tokens - 1) // size
        self._hash_until(sequence, most)
        cached = self.pool.match(sequence.identities[:most])
        keep = len(cached)
        for start, stop in reversed(sequence.atomic_ranges):
            if start < keep * size < stop:
                keep = start // size
        self.pool.release(cached[keep:])
        return cached[:keep]

    def _hash_until(self, sequence: Sequence, full_blocks: int) -> None:
        size = self.pool.block_tokens
        while len(sequence.identities) < full_blocks:
            number = len(sequence.identities)
            parent = sequence.identities[-1] if number else b""
            tokens = sequence.token_ids[number * size : (number + 1) * size]
            sequence.identities.append(block_hash(parent, tokens, number * size, sequence.media_spans))

    def _grow_decodes(self) -> None:
        for sequence in sorted(self.running, key=lambda s: s.arrival):
            if sequence.state is not State.RUNNING or not sequence.decoding:
                continue
            while len(sequence.blocks) < self.pool.blocks_for(sequence.num_tokens):
                if self.pool.available:
                    sequence.blocks += self.pool.allocate(1)
                    continue
                victim = max((s for s in self.running if s.preemptable), key=lambda s: s.arrival)
                self._preempt(victim)
                if victim is sequence:
                    break

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.registered = 0
        self.preemptions += 1
        self.add(sequence)
