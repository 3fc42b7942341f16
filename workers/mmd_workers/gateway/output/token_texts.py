"""The text and the bytes of single tokens, which join to the text of an answer whatever its tokenizer. Independent of requests."""

from __future__ import annotations

import re
from typing import NamedTuple

from mmd_workers.gateway.output.detokenizer import REPLACEMENT
from mmd_workers.model.interfaces import Frontend

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in vocabularies with byte fallback


def _byte_level() -> dict[str, int]:
    """The characters by which vocabularies of byte-level BPE spell bytes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level()


class DecodedToken(NamedTuple):
    """A token. `text`: has replacement characters if the token is a part of a character. `data`: what it adds to the answer, in UTF-8."""

    text: str
    data: bytes

    @property
    def is_special(self) -> bool:
        """True for a token that has a spelling, but is no part of the answer's text."""
        return bool(self.text) and not self.data

    @property
    def is_broken(self) -> bool:
        """True for a part of a character."""
        return REPLACEMENT in self.text

    @property
    def characters(self) -> int:
        """Number of characters that begin with this token."""
        return sum(byte & 0xC0 != 0x80 for byte in self.data)


class TokenTexts:
    """The tokens of one answer. `special_tokens`: its text has special tokens."""

    def __init__(self, frontend: Frontend, *, special_tokens: bool = False) -> None:
        self._frontend = frontend
        self._special_tokens = special_tokens
        self._word = frontend.encode("a", special_tokens=False)
        self._word_text = frontend.decode(self._word)

    def of(self, token_id: int, *, begins: bool) -> DecodedToken:
        """The token with this id. `begins`: the text begins with it. There, some decoders drop a space."""
        frontend = self._frontend
        text = frontend.decode([token_id]) if begins else self._after_a_word(token_id)
        if not text:
            special = frontend.decode([token_id], special_tokens=True)
            return DecodedToken(special, special.encode() if self._special_tokens else b"")
        data = self._bytes_of_part(token_id) if REPLACEMENT in text else None
        return DecodedToken(text, text.encode() if data is None else data)

    def _after_a_word(self, token_id: int) -> str:
        text = self._frontend.decode([*self._word, token_id])
        if not text.startswith(self._word_text):
            return self._frontend.decode([token_id])
        return text[len(self._word_text) :]

    def _bytes_of_part(self, token_id: int) -> bytes | None:
        """The bytes of a token whose text cannot show them; None for a vocabulary in another form."""
        (spelling,) = self._frontend.token_strings([token_id])
        if match := _BYTE.fullmatch(spelling):
            return bytes([int(match[1], 16)])
        if all(character in _BYTE_LEVEL for character in spelling):
            return bytes(_BYTE_LEVEL[character] for character in spelling)
        return None
