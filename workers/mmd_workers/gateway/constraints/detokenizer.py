"""Token ids to text, piece by piece, and the stop strings in it. Independent of requests and the network: it is fed, and returns text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# An unfinished UTF-8 sequence has at most three bytes, and a decoder shows it as one to three replacement characters.
MAX_UNFINISHED = 3
BROKEN_AFTER_TOKENS = 8
WINDOW_TOKENS = 12


class IncrementalDetokenizer:
    """Decodes a growing sequence of token ids so that the pieces join to `decode(all ids)`.

    Only a short window of ids is decoded at each step: the ids since the last clean boundary plus the piece before it, which
    gives decoders that treat the start of a text differently (a leading space is dropped) the context they need.
    Trailing replacement characters may be the beginning of a character and are held back until the next ids decide.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._emitted = 0  # characters of decode(window) that have been returned
        self._piece_start = 0  # where in the window the newest clean piece begins
        self._clean_end = 0  # where in the window the newest clean piece ends

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these ids; may be empty."""
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
        """Byte fallback shows a run of bytes with an unfinished end as replacement characters throughout, so the whole tail is
        held; not for ever, because a model may also produce bytes that never become a character.
        """
        whole = len(text.rstrip(REPLACEMENT))
        if len(self._window) - self._clean_end <= BROKEN_AFTER_TOKENS:
            return text[:whole]
        return text[: max(whole, len(text) - MAX_UNFINISHED)]

    def flush(self) -> str:
        """The rest, replacement characters included; call once, at the end."""
        piece = self._decode(self._window)[self._emitted :]
        self._emitted += len(piece)
        return piece

    def _shrink(self, text: str) -> None:
        start = self._piece_start or self._split_point(text)
        if not start:
            return
        before = len(self._decode(self._window[:start]))
        rest = self._decode(self._window[start:])
        # What a leading piece shows may differ from what it shows inside a text, so count from the end, which does not.
        pending = len(text) - self._emitted
        if not rest or before > self._emitted or pending > len(rest):
            return
        del self._window[:start]
        self._emitted = len(rest) - pending
        self._clean_end = max(0, self._clean_end - start)
        self._piece_start = 0

    def _split_point(self, text: str) -> int:
        """A cut that changes nothing, for streams of broken bytes that never come to a clean end; 0: there is none."""
        for cut in range(len(self._window) - MAX_UNFINISHED - 1, 0, -1):
            left = self._decode(self._window[:cut])
            if left and len(left) <= self._emitted and left + self._decode(self._window[cut:]) == text:
                return cut
        return 0


class StopScanner:
    """Looks for stop strings across pieces of text, holding back no more than what may be the beginning of one.

    The stop string that is complete first wins (the longest, when two end together), so the outcome does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, *, stops: bool = True) -> str:
        """Text that is certain to precede any stop string. After a match (`matched` is set) nothing more comes. Without `stops` those that
        are complete with this piece are text."""
        if self.matched is not None:
            return ""
        text, before = self._held + piece, len(self._held)  # one that is complete in what was held was text
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if stops and (at := text.find(stop, max(0, before + 1 - len(stop)))) >= 0
        ]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        hold = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
