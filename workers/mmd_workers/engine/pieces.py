"""The pieces of prompts that a step computes: how long each is, and how texts and media share the step. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mmd_api.contract.text_share import TextShare
from mmd_workers.engine.sequence import Sequence

CONTEXT_DIVISOR = 32  # a piece of a bounded step has 1/32 of the tokens before it or more


@dataclass(frozen=True, slots=True)
class Work:
    """Compute the tokens [start, end) of a sequence; `samples`: its last known token is among them. The last of them may be `drafts`, which
    nobody knows yet. `companion`: what of the sequence's companion is computed with it, its last known token if `samples`; then the sequence's own
    tokens may be none.
    """

    sequence: Sequence
    start: int
    end: int
    drafts: tuple[int, ...] = ()
    companion: Work | None = None

    @property
    def tokens(self) -> int:
        """How many they are, with the companion's."""
        own = self.end - self.start
        return own if self.companion is None else own + self.companion.tokens

    @property
    def samples(self) -> bool:
        """Whether this step yields the logits of the next token."""
        return self.end - len(self.drafts) == self.sequence.num_tokens

    def in_rows(self) -> list[Work]:
        """The pieces of a batch that it is."""
        if self.companion is None:
            return [self]
        return [piece for piece in (self, self.companion) if piece.end > piece.start]


@dataclass(slots=True)
class Pieces:
    """Of a step with `tokens` of prompts, `chunk_tokens` at most; `bounded`: in time."""

    tokens: int
    chunk_tokens: int
    bounded: bool
    work: list[Work] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Tokens of all pieces."""
        return sum(piece.tokens for piece in self.work)

    def take(self, prompts: Iterable[Sequence], quota: int | None = None, least: int | None = None) -> None:
        """Add pieces of `prompts`, in their order, of `quota` tokens together; None: what the step has left. A prompt that the piece does not
        end has `least` tokens or more; None: half of the step."""
        left = self.tokens - self.total
        quota = left if quota is None else min(quota, left)
        usual = -(-self.tokens // 2) if least is None else least
        for sequence in prompts:
            shortest = usual
            if self.bounded:
                shortest = max(shortest, min(self.chunk_tokens, sequence.computed // CONTEXT_DIVISOR))
            companion = sequence.companion
            before = 0 if companion is None else min(max(quota, 0), companion.remaining - 1)
            left, quota = left - before, quota - before
            longest = None
            if self.work or before:
                longest = self._longest(left) if self.bounded else 0
            room = max(quota, shortest) if longest is None or shortest <= longest else quota
            end = sequence.computed
            if companion is None or companion.remaining - 1 == before:
                end = _end(sequence, room, shortest, longest)
            if end > sequence.computed or before:
                self.work.append(_piece(sequence, end, before))
                left, quota = left - (end - sequence.computed), quota - (end - sequence.computed)
                sequence.waited_steps = 0
            else:
                sequence.waited_steps += 1

    def divide(self, share: TextShare, prompts: list[Sequence]) -> None:
        """Add pieces of texts and of prompts with media, each by its share if both are ready. They are cut wherever it ends: the step is full anyway."""
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

    def _longest(self, left: int) -> int:
        """How many tokens a piece may have that is longer than what is left of a bounded step. With it the step has no more than a chunk: memory
        is measured for that."""
        tokens = self.tokens
        return min(tokens + left, self.chunk_tokens - (tokens - left)) if 2 * left > tokens else 0


def _end(sequence: Sequence, room: int, least: int, longest: int | None) -> int:
    """How far `room` tokens prefill a sequence. Fewer than `least` run only if nothing is left after them; an atomic range that exceeds
    `room` runs if it has `longest` tokens or fewer, or whatever it has (None)."""
    limit = sequence.computable_until()
    end = min(limit, sequence.computed + room)
    if end < limit and room < least:
        return sequence.computed
    for start, stop in sequence.atomic_ranges:
        if start < end < stop:
            if start > sequence.computed:
                return start
            return stop if longest is None or stop - start <= longest else start
    return end


def _ready_tokens(sequence: Sequence) -> int:
    """How many tokens of it and its companion a step may compute. The companion's last one is computed with its own last one."""
    if sequence.companion is None:
        return sequence.ready_tokens
    ends = sequence.computable_until() == sequence.num_tokens
    return sequence.ready_tokens + sequence.companion.remaining - 1 + ends


def _piece(sequence: Sequence, end: int, of_companion: int) -> Work:
    """A sequence's next tokens until `end`, after so many of its companion, and one more where the next token is sampled."""
    companion = sequence.companion
    if companion is None:
        return Work(sequence, sequence.computed, end)
    until = companion.computed + of_companion + (end == sequence.num_tokens)
    return Work(sequence, sequence.computed, end, companion=Work(companion, companion.computed, until))
