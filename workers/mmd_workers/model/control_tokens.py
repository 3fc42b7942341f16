"""Control tokens in texts that users wrote, which must stay text. Independent of models and requests.

A regular expression holds Python's lock until it returns, for as long as a long text takes: texts are searched in pieces, between which other
threads run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from transformers.utils.chat_template_utils import mark_control_tokens

PIECE_CHARACTERS = 32_768
_BEGIN, _END = mark_control_tokens("x", re.compile("x")).split("x")  # what marks a token


class ControlTokens:
    """The added tokens of one tokenizer; of two that begin at one character the longer one counts. Thread safe."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self._longest = len(longest_first[0]) if longest_first else 0
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def appear_in(self, text: str) -> bool:
        """Whether the text has one of them."""
        pieces = range(0, len(text), PIECE_CHARACTERS)
        return any(self._any.search(text, at, at + PIECE_CHARACTERS + self._longest) for at in pieces)

    def marked(self, text: str) -> str:
        """The text with its tokens marked, for a tokenizer that encodes those as text. Marks that it has already are dropped."""
        pieces = self._pieces(text.replace(_BEGIN, "").replace(_END, ""))
        return "".join(mark_control_tokens(piece, self._any) for piece in pieces)

    def _pieces(self, text: str) -> Iterator[str]:
        """The text, cut where no token is."""
        at = 0
        while at < len(text):
            end = at + PIECE_CHARACTERS
            for found in self._any.finditer(text, at, end + self._longest):
                if found.start() >= at + PIECE_CHARACTERS:
                    break
                end = max(end, found.end())
            yield text[at:end]
            at = end
