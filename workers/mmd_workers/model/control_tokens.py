"""Marks control tokens in texts by users, which must stay text. Independent of models and requests.

A regular expression holds Python's lock until it returns, which takes long for a long text: texts are searched in pieces, and other
threads run between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from transformers.utils.chat_template_utils import mark_control_tokens

PIECE_CHARACTERS = 32_768
_BEGIN, _END = mark_control_tokens("x", re.compile("x")).split("x")  # marks around a token


class ControlTokens:
    """The added tokens of one tokenizer. If two begin at the same character, the longer one counts. Thread safe."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self._longest = len(longest_first[0]) if longest_first else 0
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def appear_in(self, text: str) -> bool:
        """Whether the text has a control token."""
        pieces = range(0, len(text), PIECE_CHARACTERS)
        return any(self._any.search(text, at, at + PIECE_CHARACTERS + self._longest) for at in pieces)

    def marked(self, text: str) -> str:
        """The text with its tokens marked, for a tokenizer that encodes marked tokens as text. Earlier marks are dropped."""
        pieces = self._pieces(text.replace(_BEGIN, "").replace(_END, ""))
        return "".join(mark_control_tokens(piece, self._any) for piece in pieces)

    def _pieces(self, text: str) -> Iterator[str]:
        """The text in pieces, cut outside of tokens."""
        at = 0
        while at < len(text):
            end = at + PIECE_CHARACTERS
            for match in self._any.finditer(text, at, end + self._longest):
                if match.start() >= at + PIECE_CHARACTERS:
                    break
                end = max(end, match.end())
            yield text[at:end]
            at = end
