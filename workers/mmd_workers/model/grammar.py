"""Compiles the grammars of answers with llguidance for one model's tokenizer. Independent of weights and of the network.

A constraint knows only the tokens of its sequence, so every pod with these tokens can make the same constraint.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from mmd_api.contract.answers import Grammar
from mmd_api.contract.errors import GrammarFailedError, UnsupportedParameterError

MAX_CACHED = 32  # grammars
MAX_CACHED_CHARACTERS = 1 << 20  # total of their sources
TOKENS_AT_ONCE = 16  # other threads wait meanwhile
# Total of their compilation. A long compilation takes memory, up to some 100 MB per second.
MAX_CACHED_CPU_SECONDS = 2.0
PROBE_TOKENS = 16  # how far a new grammar is followed before it is accepted
JSON_FORM = {
    # At most one space after a comma or colon: a model that repeats white space would never end its answer.
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""Options for all schemas. A schema may have others under `SCHEMA_OPTIONS`: by default, a keyword that is not enforced is an error."""
SCHEMA_OPTIONS = "x-guidance"
LENIENT = {"lenient": True, "coerce_one_of": True}
"""Options of a schema whose other keywords count as annotations. An answer may match several alternatives of its `oneOf`."""
PARSER_LIMITS = {
    "max_grammar_size": 20_000,
    "initial_lexer_fuel": 1_000_000,  # some 20 ms
    "step_lexer_fuel": 200_000,  # some 14 ms
    "step_max_items": 50_000,
    "max_lexer_states": 10_000,  # each up to 2 kB, in every sequence
    "verbose_errors": False,  # verbose errors quote the answer
}
_SPECIAL_TOKEN = re.compile(r"<\[\d+\]>")
LIMITS = LLParserLimits(**PARSER_LIMITS)  # type: ignore[arg-type]


class Constraint:
    """The allowed next tokens of one sequence. Not thread safe."""

    def __init__(self, matcher: LLMatcher, mask_bytes: int) -> None:
        """`mask_bytes`: size of a mask, with one bit for each token of the tokenizer or the model, whichever has more."""
        self.matcher = matcher
        self.mask_bytes = mask_bytes

    @property
    def complete(self) -> bool:
        """Whether the answer is complete and nothing can follow but its end."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def copy(self) -> Constraint:
        """Another constraint at the same point of the answer."""
        return Constraint(self.matcher.deep_copy(), self.mask_bytes)

    def advance(self, token_ids: Iterable[int]) -> None:
        """Advance by the sequence's next tokens.

        Raises:
            GrammarFailedError: the tokens do not match, or a limit of the library has been reached, now or while a mask was computed.
        """
        new = list(token_ids)
        for start in range(0, max(1, len(new)), TOKENS_AT_ONCE):  # shows a failure even without tokens
            if not self.matcher.consume_tokens(new[start : start + TOKENS_AT_ONCE]):
                raise _failure(self.matcher)


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: LLMatcher  # at the answer's start; copied for each sequence
    cpu_seconds: float


class Grammars:
    """Compiles the grammars of one model and keeps the newest. Thread safe."""

    def __init__(
        self, load_tokenizer: Callable[[], Any], vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        """`load_tokenizer()` returns the Hugging Face tokenizer, and is called once a grammar is needed.

        `vocab_size`: size of the model's logits.
        """
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def __contains__(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled; if so, it becomes the last to make room."""
        return self._kept(grammar) is not None

    def begin(self, grammar: Grammar, output_token_ids: Iterable[int] = ()) -> Constraint:
        """The constraint of a sequence with these output tokens so far.

        Compiling takes as long as `gateway/output/grammar_trial.py` allows, and loading the tokenizer takes a second: do not call
        this on a thread that others wait for.

        Raises:
            GrammarFailedError: the library cannot compile or follow the grammar; the message has the library's words.
            UnsupportedParameterError: the model has no tokenizer for it.
        """
        return self._at(self._compiled_of(grammar), output_token_ids)

    async def begin_aside(self, grammar: Grammar, output_token_ids: Iterable[int] = ()) -> Constraint:
        """Like `begin`, but on other threads. Only one compilation runs at a time, and a compiled grammar waits for none.

        If this is cancelled, work that has begun continues to its end.

        Raises:
            GrammarFailedError: as for `begin`.
            UnsupportedParameterError: as for `begin`.
        """
        compiled = self._kept(grammar)
        if compiled is None:
            loop = asyncio.get_running_loop()
            compiled = await loop.run_in_executor(self._thread, self._compiled_of, grammar)
        return await asyncio.to_thread(self._at, compiled, output_token_ids)

    def _kept(self, grammar: Grammar) -> LLMatcher | None:
        with self._lock:
            if (compiled := self._compiled.get(grammar)) is None:
                return None
            self._compiled.move_to_end(grammar)
            return compiled.matcher

    def _compiled_of(self, grammar: Grammar) -> LLMatcher:
        if (cached := self._kept(grammar)) is not None:
            return cached
        self._loaded()
        start = time.thread_time()
        matcher = self._compile(grammar)
        compiled = _Compiled(matcher, time.thread_time() - start)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > 1 and self._cached_too_much():
                self._compiled.popitem(last=False)
        return matcher

    def _at(self, compiled: LLMatcher, output_token_ids: Iterable[int]) -> Constraint:
        constraint = Constraint(compiled.deep_copy(), mask_bytes(self._loaded().vocab_size))
        constraint.advance(output_token_ids)
        return constraint

    def _cached_too_much(self) -> bool:
        return (
            len(self._compiled) > MAX_CACHED
            or sum(len(grammar.source) for grammar in self._compiled) > MAX_CACHED_CHARACTERS
            or sum(compiled.cpu_seconds for compiled in self._compiled.values()) > MAX_CACHED_CPU_SECONDS
        )

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            compiled = LLMatcher(self._loaded(), in_library_form(grammar), log_level=0, limits=LIMITS)
        except ValueError as error:
            raise GrammarFailedError(on_one_line(str(error))) from error
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
                        f"this model's tokenizer cannot follow a grammar ({on_one_line(str(error))})"
                    ) from error
            return self._tokenizer


def mask_bytes(vocab_size: int) -> int:
    """Bytes of a mask with one bit for each token, in whole words of 32 bits."""
    return -(-vocab_size // 32) * 4


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of the model in a folder, for processes that have no other use for it."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def in_library_form(grammar: Grammar, *, special_token_id: int | None = None) -> str:
    """The grammar in the library's form. `special_token_id` stands for every special token if a vocabulary has no other.

    Raises:
        GrammarFailedError: the library cannot read the grammar's text.
    """
    try:
        if grammar.type == "json_schema":
            return _schema(grammar.source)
        if grammar.type == "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        composite = json.loads(grammar.source)
        lark = composite["lark"]
        if special_token_id is not None:
            lark = _SPECIAL_TOKEN.sub(f"<[{special_token_id}]>", lark)
        converted = {name: _schema(json.dumps(schema)) for name, schema in composite["json_schema"].items()}
        converted |= {name: LLMatcher.grammar_from_regex(regex) for name, regex in composite["regex"].items()}
        parts = [{**json.loads(text)["grammars"][0], "name": name} for name, text in converted.items()]
        return json.dumps({"grammars": [{"lark_grammar": lark}, *parts]})
    except ValueError as error:
        raise GrammarFailedError(on_one_line(str(error))) from error


def _schema(source: str) -> str:
    return LLMatcher.grammar_from_json_schema(source, overrides=JSON_FORM)  # type: ignore[arg-type]


def _follow(matcher: LLMatcher) -> None:
    """Follow a grammar for its first tokens: there one fails that nothing matches, or that takes too many steps."""
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
    return GrammarFailedError(on_one_line(matcher.get_error() or "the answer cannot be continued"))


def on_one_line(words: str) -> str:
    """The library's words on one line of at most 300 characters, without its addition for developers."""
    return " ".join(words.replace("<non-verbose/>", "").split())[:300]
