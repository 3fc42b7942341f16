"""Reads the tool calls in an answer, piece by piece. The forms of calls are in `model.call_forms`.

This module does not use transformers' `parse_response`: that needs a `response_template`, which few checkpoints have, returns the arguments of
a call only once the call has ended, and fails on a broken call. Nor does it use vLLM's parsers, for the reasons in `reasoning_parser.py`.
Independent of requests and the network.
"""

from __future__ import annotations

import secrets
import string
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import regex

from mmd_workers.gateway.output.detokenizer import overlap
from mmd_workers.gateway.output.element_values import ANY_TYPE, as_json, is_text, quoted
from mmd_workers.model.call_forms import Spelling

MAX_TOOL_CALLS = 128
"""Maximum calls in one message, as at OpenAI."""

CALL_ID_CHARACTERS = 9  # letters and digits, as templates of Mistral require
_ID_CHARACTERS = string.ascii_letters + string.digits
_BLANK = " \t\r\n"
_IN_STRING = regex.compile(r'["\\]')
_OUTSIDE = regex.compile(r'["\[\]{}]|[^ \t\r\nA-Za-z0-9+.,:\-]')
_CLOSES = {"}": "{", "]": "["}
_MORE = regex.compile(r'[ \t\r\n]{0,8},[ \t\r\n]{0,8}"')  # begins another field of the call


@dataclass(slots=True)
class CallPart:
    """An addition to one of the calls of an answer: first `id` and `name`, then parts of the arguments, which are JSON."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(slots=True)
class Parsed:
    """The result of reading pieces of an answer, in order: content, and one part for each call."""

    pieces: list[str | CallPart] = field(default_factory=list)

    @property
    def content(self) -> str:
        """The content without the calls."""
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def calls(self) -> list[CallPart]:
        """The parts of calls."""
        return [piece for piece in self.pieces if isinstance(piece, CallPart)]


class CallParser:
    """Reads the calls of one answer, however its text is cut into pieces.

    A call begins once the name of a tool and the opening brace of its arguments are complete. Its arguments continue until they are complete or
    cannot be JSON. Arguments that are elements become one JSON object, which ends with the last element. If the model has the marker as a token, text that spells the marker begins no call. All other text is content, even if it
    looks like the beginning of a call. White space is left out at the beginning, before a call, and after a call.
    """

    def __init__(
        self,
        spelling: Spelling,
        names: frozenset[str],
        *,
        most: int = MAX_TOOL_CALLS,
        types: Mapping[str, Mapping[str, AbstractSet[str]]] | None = None,
    ) -> None:
        """`most`: maximum number of calls; text after them is content. `types`: of each tool's arguments, where they are elements.

        The text must include the tokens of `token_ids`, and each of these must be noted with `expect`.
        """
        form = spelling.form
        self.token_ids = frozenset(spelling.tokens.values())
        self._marker_id = spelling.tokens.get(form.marker)
        self._marker = form.marker
        self._markers = deque[int]()  # positions in the answer of markers that are tokens
        self._expected = 0  # characters noted so far
        self._at = 0  # position in the answer of the held text
        self._first = regex.compile(form.first)
        self._after = regex.compile(form.after)
        self._following = regex.compile(form.following) if form.following else None
        self._last = regex.compile(form.last)
        self._element = form.element
        self._key = regex.compile(form.element.key) if form.element else None
        self._types = types or {}
        self._call_types: Mapping[str, AbstractSet[str]] = {}
        self._value_types: AbstractSet[str] = ANY_TYPE
        self._value: list[str] = []  # in parts, while it may be no text
        self._num_elements = 0
        self._names = names
        self._most = 1 if form.separator is None else most
        self._held = ""  # text that is not decided yet
        self._blank: list[str] = []  # white space at the beginning or after a call
        self._has_content = False  # since the beginning or the last call
        self._step = self._text
        self._arguments = _Object()
        self._rest = _Object()  # the call's fields after its arguments
        self._parsed = Parsed()
        self.num_calls = 0

    @property
    def complete(self) -> bool:
        """True if there are calls, and the arguments of all of them are complete."""
        return self.num_calls > 0 and not self._arguments.open

    def expect(self, token_id: int, text: str) -> None:
        """Note a token and its text before the text is pushed."""
        if token_id == self._marker_id and (at := text.rfind(self._marker)) >= 0:
            self._markers.append(self._expected + at)
        self._expected += len(text)

    def skip(self, characters: int) -> None:
        """Skip characters of the answer that have been noted but are not pushed."""
        self._at += characters
        while self._markers and self._markers[0] < self._at:
            self._markers.popleft()

    def push(self, piece: str) -> Parsed:
        """Add a piece, and return the results that became certain."""
        return self._parse(piece, final=False)

    def flush(self) -> Parsed:
        """The rest, at the end of the answer."""
        parsed = self._parse("", final=True)
        if not self.num_calls and (blank := "".join(self._blank)):
            parsed.pieces.append(blank)
        return parsed

    def _parse(self, piece: str, *, final: bool) -> Parsed:
        self._held += piece
        self._parsed = Parsed()
        while self._held and self._step(final):
            pass
        if final and self._value:  # the answer has ended in a value
            self._argue("".join(self._value))
        return self._parsed

    # Each step returns True if another step may follow, and False if more text has to come.

    def _text(self, final: bool) -> bool:
        if not self._has_content:
            blank = len(self._held) - len(self._held.lstrip(_BLANK))
            self._blank.append(self._take(blank))
            if not self._held:
                return False
            if not self._marker and not self.num_calls:
                self._step = self._beginning
                return True
        at = self._held.find(self._marker) if self._marker else -1
        if at >= 0 and self._is_spelled(at):
            self._content(at + 1)
            return True
        if at >= 0:
            self._content(at)
            self._step = self._beginning
            return True
        self._content(len(self._held) - (0 if final else overlap(self._held, self._marker)))
        return False

    def _beginning(self, final: bool) -> bool:
        match = self._first.match(self._held, partial=not final)
        if match and match.partial:
            return False
        if not self._begin(match):
            self._content(max(1, len(self._marker)))
            self._step = self._text
        return True

    def _begin(self, match: regex.Match[str] | None) -> bool:
        if match is None or match["name"] not in self._names or self.num_calls >= self._most:
            return False
        self._blank.clear()
        call_id = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(CALL_ID_CHARACTERS))
        self._parsed.pieces.append(CallPart(self.num_calls, call_id, match["name"], ""))
        self.num_calls += 1
        self._take(match.end())
        self._arguments = _Object(open=True)
        self._step = self._in_arguments
        if self._element is not None:
            self._call_types, self._num_elements = self._types.get(match["name"], {}), 0
            self._argue("{")
            self._step = self._after_blank
        return True

    def _in_arguments(self, final: bool) -> bool:
        del final
        end, is_json = self._arguments.scan(self._held)
        if end:
            self._argue(self._take(end))
        if not is_json:
            self._go_on_with_text()
        elif not self._arguments.open:
            self._has_content = False
            self._step = self._at_end_of_call
        return True

    def _before_element(self, final: bool) -> bool:
        assert self._element is not None
        assert self._key is not None
        key = self._key.match(self._held, partial=True)
        if key and not key.partial:
            self._argue(f"{', ' if self._num_elements else ''}{quoted(key['key'])}: ")
            self._num_elements += 1
            self._value_types = self._call_types.get(key["key"], ANY_TYPE)
            self._argue('"' if is_text(self._value_types) else "")
            self._take(key.end())
            self._step = self._begin_value
        elif key or (len(self._held) < len(self._element.end) and self._element.end.startswith(self._held)):
            return self._unfinished(final)
        else:  # the end, or text that is no element
            self._argue("}")
            self._arguments.open = False
            self._has_content = False
            self._step = self._at_end_of_call
        return True

    def _begin_value(self, final: bool) -> bool:
        assert self._element is not None
        del final
        self._take(len(self._held) - len(self._held.removeprefix("\n")) if self._element.in_lines else 0)
        self._step = self._in_value
        return True

    def _in_value(self, final: bool) -> bool:
        """Read the value of an element. A text is passed on at once, what may be another value once it has ended."""
        assert self._element is not None
        close = self._element.close
        line = self._element.line
        at = self._held.find(close)
        if at < 0:
            kept = 0 if final else max(overlap(self._held, line + close), overlap(self._held, close))
            self._add_value(self._take(len(self._held) - kept))
            return False
        value = self._take(at + len(close))[:at]
        self._add_value(value.removesuffix(line))
        if is_text(self._value_types):
            self._argue('"')
        else:
            self._argue(as_json("".join(self._value), self._value_types))
            self._value.clear()
        self._step = self._after_blank
        return True

    def _after_blank(self, final: bool) -> bool:
        """Skip white space between elements."""
        del final
        self._take(len(self._held) - len(self._held.lstrip(_BLANK)))
        self._step = self._before_element
        return True

    def _add_value(self, piece: str) -> None:
        if is_text(self._value_types):
            self._argue(quoted(piece)[1:-1])
        else:
            self._value.append(piece)

    def _argue(self, piece: str) -> None:
        """Add to the arguments of the last call."""
        if not piece:
            return
        pieces = self._parsed.pieces
        call = pieces[-1] if pieces else None
        if not isinstance(call, CallPart) or call.index != self.num_calls - 1:
            call = CallPart(self.num_calls - 1, None, None, "")
            pieces.append(call)
        call.arguments += piece

    def _at_end_of_call(self, final: bool) -> bool:
        match = self._after.match(self._held, partial=True)
        next_field = _MORE.match(self._held, partial=True)
        if match and not match.partial:
            self._take(match.end())
            self._step = self._text if self._following is None else self._after_call
        elif match or (next_field and next_field.partial):
            return self._unfinished(final)
        elif next_field:
            self._rest = _Object.begun()
            self._step = self._in_rest
        else:
            self._go_on_with_text()
        return True

    def _in_rest(self, final: bool) -> bool:
        """Skip fields of a call after its arguments, which are left out."""
        del final
        end, is_json = self._rest.scan(self._held)
        self._take(end if self._rest.open else end - 1)
        if not is_json:
            self._go_on_with_text()
        elif not self._rest.open:
            self._step = self._at_end_of_call
        return True

    def _after_call(self, final: bool) -> bool:
        assert self._following is not None
        following = self._following.match(self._held, partial=True)
        last = self._last.match(self._held, partial=True)
        if following and not following.partial and self._begin(following):
            return True
        if last and not last.partial:
            self._take(last.end())
            self._step = self._text
        elif (following and following.partial) or last:
            return self._unfinished(final)
        else:
            self._go_on_with_text()
        return True

    def _unfinished(self, final: bool) -> bool:
        """Wait for more text after the arguments. If the answer has ended there, the call is complete."""
        if final:
            self._take(len(self._held))
        return False

    def _go_on_with_text(self) -> None:
        self._has_content = True
        self._step = self._text

    def _content(self, characters: int) -> None:
        if characters > 0:
            self._parsed.pieces.append("".join(self._blank) + self._take(characters))
            self._blank.clear()
            self._has_content = True

    def _take(self, characters: int) -> str:
        """Take characters that are decided from the held text."""
        decided, self._held = self._held[:characters], self._held[characters:]
        self.skip(characters)
        return decided

    def _is_spelled(self, at: int) -> bool:
        """True if the marker there is only text although the model has a token for it: text may quote a call."""
        return self._marker_id is not None and self._at + at not in self._markers


@dataclass(slots=True)
class _Object:
    """Finds the end of an object that begins with a brace: its last closing bracket, or the first text that cannot be JSON."""

    open: bool = False
    _brackets: list[str] = field(default_factory=list)  # brackets that are open
    _in_string: bool = False
    _escaped: bool = False

    @classmethod
    def begun(cls) -> _Object:
        """An object whose opening brace has been read."""
        return cls(open=True, _brackets=["{"])

    def scan(self, text: str) -> tuple[int, bool]:
        """The position in the next piece at which the object or the piece ends, and whether the object can still be JSON."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if match is None:
                return len(text), True
            mark, at = match.group(), match.end()
            if mark == '"':
                self._in_string = not self._in_string
            elif mark == "\\" and self._in_string:
                self._escaped = True
            elif mark in ("{", "["):
                self._brackets.append(mark)
            elif mark in _CLOSES and self._brackets[-1] == _CLOSES[mark]:
                self._brackets.pop()
                if not self._brackets:
                    self.open = False
                    return at, True
            else:
                return match.start(), False
        return len(text), True
