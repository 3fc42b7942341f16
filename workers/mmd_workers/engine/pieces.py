"""Pieces of prompts that a step computes: the length of each, and how texts and media share the step. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mmd_api.contract.text_share import TextShare
from mmd_workers.engine.sequence import Sequence

CONTEXT_DIVISOR = 32  # in a bounded step, a piece is at least 1/32 as long as its context


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens [start, end) of a sequence to compute; the last of them may be `drafts`, which are guesses.

    `companion`: tokens of the sequence's companion that are computed in the same step, its last known token
    if `samples`. With a companion, the sequence's own range may be empty.
    """

    sequence: Sequence
    start: int
    end: int
    drafts: tuple[int, ...] = ()
    companion: Work | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens, the companion's included."""
        own_tokens = self.end - self.start
        return own_tokens if self.companion is None else own_tokens + self.companion.tokens

    @property
    def samples(self) -> bool:
        """True if this step yields the logits of the next token."""
        return self.end - len(self.drafts) == self.sequence.num_tokens

    @property
    def is_single(self) -> bool:
        """True for one row that sees the tokens up to its own, and no atomic range around it."""
        if self.end - self.start != 1:
            return False
        return not any(start <= self.start < stop for start, stop in self.sequence.atomic_ranges)

    def in_rows(self) -> list[Work]:
        """Return the pieces that get rows in the batch."""
        if self.companion is None:
            return [self]
        return [piece for piece in (self, self.companion) if piece.end > piece.start]


@dataclass(slots=True)
class Pieces:
    """Pieces of a step with up to `tokens` prompt tokens, at most `chunk_tokens`. `bounded`: the step has a time limit."""

    tokens: int
    chunk_tokens: int
    bounded: bool
    work: list[Work] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of tokens in all pieces."""
        return sum(piece.tokens for piece in self.work)

    def take(self, prompts: Iterable[Sequence], quota: int | None = None, least: int | None = None) -> None:
        """Add pieces of `prompts`, in their order, with `quota` tokens together; None: all that the step has left.

        A piece that does not finish its prompt has at least `least` tokens; None: half of the step.
        """
        remaining = self.tokens - self.total
        quota = remaining if quota is None else min(quota, remaining)
        default_least = -(-self.tokens // 2) if least is None else least
        for sequence in prompts:
            shortest = default_least
            if self.bounded:
                shortest = max(shortest, min(self.chunk_tokens, sequence.computed // CONTEXT_DIVISOR))
            companion = sequence.companion
            companion_tokens = 0 if companion is None else min(max(quota, 0), companion.remaining - 1)
            remaining, quota = remaining - companion_tokens, quota - companion_tokens
            longest = None
            if self.work or companion_tokens:
                longest = self._longest(remaining) if self.bounded else 0
            room = max(quota, shortest) if longest is None or shortest <= longest else quota
            end = sequence.computed
            if companion is None or companion.remaining - 1 == companion_tokens:
                end = _end(sequence, room, shortest, longest)
            if end > sequence.computed or companion_tokens:
                self.work.append(_piece(sequence, end, companion_tokens))
                remaining, quota = remaining - (end - sequence.computed), quota - (end - sequence.computed)
                sequence.waited_steps = 0
            else:
                sequence.waited_steps += 1

    def divide(self, share: TextShare, prompts: list[Sequence]) -> None:
        """Add pieces of texts and of prompts with media, each up to its share if both are ready.

        A piece is cut where the share ends, whatever its length: the step is full anyway.
        """
        texts = [s for s in prompts if not s.media_ahead]
        media = [s for s in prompts if s.media_ahead]
        text_tokens, media_tokens = (sum(map(_ready_tokens, side)) for side in (texts, media))
        if not text_tokens or not media_tokens:
            share.clear()
            self.take(prompts)
            return
        first, second = (texts, media) if share.text_first else (media, texts)
        self.take(first, share.quota(self.tokens, text_tokens, media_tokens), least=1)
        self.take(second, least=1)
        of_text = sum(piece.tokens for piece in self.work if not piece.sequence.media_ahead)
        of_media = self.total - of_text
        share.add(
            of_text,
            of_media,
            text_wants=of_text < text_tokens,
            media_want=of_media < media_tokens,
            most=max(self.chunk_tokens, self.total),
        )

    def _longest(self, rest: int) -> int:
        """Return how many tokens a piece may have if it is longer than the rest of a bounded step.

        With it the step has no more tokens than a chunk: memory is measured for that.
        """
        tokens = self.tokens
        return min(tokens + rest, self.chunk_tokens - (tokens - rest)) if 2 * rest > tokens else 0


def _end(sequence: Sequence, room: int, least: int, longest: int | None) -> int:
    """Return how far `room` tokens prefill a sequence.

    Fewer than `least` tokens run only if nothing computable remains after them. What is left of an atomic range
    and exceeds `room` runs if it has at most `longest` tokens; None: whatever its length.
    """
    limit = sequence.computable_until()
    end = min(limit, sequence.computed + room)
    if end < limit and room < least:
        return sequence.computed
    for start, stop in sequence.atomic_ranges:
        if start < end < stop:
            if start > sequence.computed:
                return start
            fits = longest is None or stop - sequence.computed <= longest
            return stop if fits else sequence.computed
    return end


def _ready_tokens(sequence: Sequence) -> int:
    """Return how many tokens of a sequence and its companion a step may compute.

    The companion's last token is computed together with the sequence's last token.
    """
    if sequence.companion is None:
        return sequence.ready_tokens
    reaches_end = sequence.computable_until() == sequence.num_tokens
    return sequence.ready_tokens + sequence.companion.remaining - 1 + reaches_end


def _piece(sequence: Sequence, end: int, companion_tokens: int) -> Work:
    """Return a sequence's next tokens up to `end`, with `companion_tokens` of its companion.

    Where the next token is sampled, the companion's last token is added.
    """
    companion = sequence.companion
    if companion is None:
        return Work(sequence, sequence.computed, end)
    until = companion.computed + companion_tokens + (end == sequence.num_tokens)
    return Work(sequence, sequence.computed, end, companion=Work(companion, companion.computed, until))
