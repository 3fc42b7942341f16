"""Converts token ids to text, piece by piece, and finds stop strings. Independent of requests and the network: it is fed, and returns text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# An unfinished UTF-8 sequence has at most three bytes, which a decoder shows as one to three replacement characters.
MAX_UNFINISHED = 3
BROKEN_AFTER_TOKENS = 8
CONTEXT_TOKENS = 8
"""Tokens of a text before the sequence that decide how its first piece decodes: those of a word and of an unfinished character."""
WINDOW_TOKENS = 12


class IncrementalDetokenizer:
    """Decodes a growing sequence of token ids so that the pieces join to `decode(all ids)`.

    Each step decodes only a short window of ids: the ids since the last clean boundary and the piece before it. That piece is the context for
    decoders that treat the start of a text differently (a leading space is dropped). Trailing replacement characters may be the beginning of a
    character, and are held back until the next ids decide.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        """`before`: the last ids of the text that the sequence continues, to which the first piece joins; at most `CONTEXT_TOKENS`."""
        self._decode = decode
        self._window = list(before)
        # Characters of decode(window) that have been returned, or are a part of the text before.
        self._emitted = len(decode(self._window).rstrip(REPLACEMENT)) if self._window else 0
        self._piece_start = 0  # start of the newest clean piece in the window
        self._clean_end = len(self._window)  # end of the newest clean piece in the window

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids, and return the text that became certain; it may be empty."""
        return "".join([self._push(token_id) for token_id in token_ids])

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = self._without_unfinished_tail(text)
        piece = stable[self._emitted :]
        self._emitted = max(self._emitted, len(stable))
        if len(stable) == len(text) and piece:
            self._piece_start, self._clean_end = self._clean_end, len(self._window)
        if len(self._window) >= WINDOW_TOKENS:
            self._shrink(text)
        return piece

    def _without_unfinished_tail(self, text: str) -> str:
        """The text without an end that may be an unfinished character.

        Byte fallback decodes a run of bytes with an unfinished end entirely as replacement characters, so the whole tail is held. It is not held for
        ever, because a model may also produce bytes that never become a character.
        """
        complete_length = len(text.rstrip(REPLACEMENT))
        if len(self._window) - self._clean_end <= BROKEN_AFTER_TOKENS:
            return text[:complete_length]
        return text[: max(complete_length, len(text) - MAX_UNFINISHED)]

    def flush(self) -> str:
        """The rest, replacement characters included; call once, at the end."""
        piece = self._decode(self._window)[self._emitted :]
        self._emitted += len(piece)
        return piece

    def _shrink(self, text: str) -> None:
        start = self._piece_start or self._split_point(text)
        if not start:
            return
        prefix_length = len(self._decode(self._window[:start]))
        rest = self._decode(self._window[start:])
        # A leading piece may decode differently than inside a text, so count from the end, which decodes the same.
        pending = len(text) - self._emitted
        if not rest or prefix_length > self._emitted or pending > len(rest):
            return
        del self._window[:start]
        self._emitted = len(rest) - pending
        self._clean_end = max(0, self._clean_end - start)
        self._piece_start = 0

    def _split_point(self, text: str) -> int:
        """A cut that changes no text, for streams of broken bytes without a clean end; 0 if there is none."""
        for cut in range(len(self._window) - MAX_UNFINISHED - 1, 0, -1):
            prefix = self._decode(self._window[:cut])
            if prefix and len(prefix) <= self._emitted and prefix + self._decode(self._window[cut:]) == text:
                return cut
        return 0


class StopScanner:
    """Finds stop strings across pieces of text, and holds back only text that may be the beginning of one.

    The first complete stop string wins (the longest, if two end together), so the outcome does not depend on how the text was cut into
    pieces.
    """

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        """`shown`: the stop string that ends the text is a part of it."""
        self._shown = shown
        self._by_first: dict[str, list[str]] = {}  # most tokens have the first character of few of them
        for stop in filter(None, stops):
            self._by_first.setdefault(stop[0], []).append(stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, *, stops: bool = True) -> str:
        """Add a piece, and return the text that surely is before the end of the answer. After a match (`matched` is set) no more text is returned.

        Without `stops`, stop strings that are complete with this piece count as text.
        """
        if self.matched is not None:
            return ""
        # A stop string that is complete in the held text has counted as text.
        text, num_held = self._held + piece, len(self._held)
        candidates = [stop for first, group in self._by_first.items() if first in text for stop in group]
        matches = [
            (at + len(stop), at, stop)
            for stop in candidates
            if stops and (at := text.find(stop, max(0, num_held + 1 - len(stop)))) >= 0
        ]
        if matches:
            end, at, self.matched = min(matches)
            self._held = ""
            return text[: end if self._shown else at]
        hold = max((overlap(text, stop) for stop in candidates), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """The text still held back at the end of the output."""
        rest, self._held = self._held, ""
        return rest


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    first = stop[:1]
    at = text.find(first, max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(first, at + 1)
    return 0 if at < 0 else len(text) - at
