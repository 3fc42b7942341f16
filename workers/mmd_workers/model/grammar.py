"""Grammars that an answer must match, compiled by llguidance for one model's tokenizer. Independent of weights and of the network.

A constraint knows the tokens of its sequence and nothing else, so every pod that has them can make the same one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from mmd_api.contract.answers import Grammar
from mmd_api.contract.errors import GrammarFailedError, UnsupportedParameterError

MAX_CACHED = 32  # grammars
MAX_CACHED_CHARACTERS = 1 << 20  # of their sources
TOKENS_AT_ONCE = 16  # other threads wait meanwhile
PROBE_TOKENS = 16  # how far a new grammar is followed before it is accepted
JSON_FORM = {
    # At most one space after a comma or colon: a model that repeats white space would never end its answer.
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,  # a keyword that is not enforced is an error
}
LIMITS = LLParserLimits(
    max_grammar_size=20_000,
    initial_lexer_fuel=1_000_000,  # some 20 ms
    step_lexer_fuel=200_000,  # some 14 ms
    step_max_items=50_000,
    max_lexer_states=10_000,  # of up to 2 kB each, in every sequence
    verbose_errors=False,  # which quote the answer
)


class Constraint:
    """What the next token of one sequence may be. Not thread safe."""

    def __init__(self, matcher: LLMatcher, mask_bytes: int) -> None:
        """`mask_bytes`: of a mask, with one bit for each token of the tokenizer or the model, whichever has more."""
        self.matcher = matcher
        self.mask_bytes = mask_bytes

    @property
    def complete(self) -> bool:
        """Whether the answer is complete and nothing can follow but its end."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def advance(self, token_ids: Iterable[int]) -> None:
        """Go on after the sequence's next tokens.

        Raises:
            GrammarFailedError: they do not match, or a limit of the library has been reached, now or while a mask was computed.
        """
        new = list(token_ids)
        for start in range(0, len(new), TOKENS_AT_ONCE):
            if not self.matcher.consume_tokens(new[start : start + TOKENS_AT_ONCE]):
                raise _failure(self.matcher)


class Grammars:
    """The compiled grammars of one model, of which the newest are kept. Thread safe."""

    def __init__(
        self, load_tokenizer: Callable[[], Any], vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        """`load_tokenizer()`: the Hugging Face tokenizer, called once a grammar is needed. `vocab_size`: of the model's logits."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def begin(self, grammar: Grammar, output_token_ids: Iterable[int] = ()) -> Constraint:
        """The constraint of a sequence with these output tokens so far. Compiling takes up to some 100 ms, and loading the tokenizer a
        second: not for a thread that others wait for.

        Raises:
            GrammarFailedError: the library cannot compile or follow the grammar; the message has its words.
            UnsupportedParameterError: the model has no tokenizer for it.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = compiled
                while len(self._compiled) > MAX_CACHED or self._cached_characters() > MAX_CACHED_CHARACTERS:
                    self._compiled.popitem(last=False)
        constraint = Constraint(compiled.deep_copy(), -(-self._loaded().vocab_size // 32) * 4)
        constraint.advance(output_token_ids)
        return constraint

    def _cached_characters(self) -> int:
        return sum(len(grammar.source) for grammar in self._compiled)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            compiled = LLMatcher(self._loaded(), _in_library_form(grammar), log_level=0, limits=LIMITS)
        except ValueError as error:
            raise GrammarFailedError(_short(str(error))) from error
        if compiled.is_error():
            raise _failure(compiled)
        _follow(compiled.deep_copy())
        return compiled

    def _loaded(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                if not self._eos_token_ids:
                    raise UnsupportedParameterError("this model has no token that ends an answer")
                tokenizer = self._load_tokenizer()
                largest = max(tokenizer.get_vocab().values())
                try:
                    self._tokenizer = from_tokenizer(
                        tokenizer, max(self._vocab_size, largest + 1), self._eos_token_ids
                    )
                except ValueError as error:
                    raise UnsupportedParameterError(
                        f"this model's tokenizer cannot follow a grammar ({_short(str(error))})"
                    ) from error
            return self._tokenizer


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of the model in a folder, for processes that have no other use for it."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _in_library_form(grammar: Grammar) -> str:
    if grammar.type == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.source, overrides=JSON_FORM)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_regex(grammar.source)


def _follow(matcher: LLMatcher) -> None:
    """Follow a grammar a little way: one that nothing matches, or that takes too many steps, shows it at its first tokens."""
    for _ in range(PROBE_TOKENS):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise _failure(matcher)
        if matcher.is_stopped():
            return
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if not len(allowed):
            raise GrammarFailedError("no token of this model can begin or continue an answer")
        matcher.consume_token(int(allowed[0]))


def _failure(matcher: LLMatcher) -> GrammarFailedError:
    return GrammarFailedError(_short(matcher.get_error() or "the answer cannot be continued"))


def _short(words: str) -> str:
    """The library's words on one line, without what it appends for its developers."""
    return " ".join(words.replace("<non-verbose/>", "").split())[:300]
