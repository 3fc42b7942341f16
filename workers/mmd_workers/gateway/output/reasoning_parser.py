"""Separates the reasoning at the beginning of an answer from the answer, piece by piece.

transformers' `parse_response` is no alternative: it needs a `response_template`, which few checkpoints have, and reads only whole answers.
vLLM's reasoning parsers need vLLM, which gateways of the native engine do not have, and one must be named for each model. This parser reads
the same formats (`tests/vllm_engine/test_formats.py`). Independent of requests and the network.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from mmd_workers.gateway.output.detokenizer import overlap
from mmd_workers.model.reasoning import BLANK, Reasoning

RunKind = Literal["reasoning", "content", "left out"]


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """The text that a piece of an answer adds to its reasoning."""

    text: str


class ReasoningParser:
    """Reads one answer, however its text is cut into pieces.

    Reasoning starts at the beginning, or at a marker there, and ends at the first end marker; everything after that is content. If the model
    has the markers as tokens, text that spells them is no marker. Markers are left out, and so is white space beside them, except in an answer
    that must match exactly. No more text is held than may be a marker.
    """

    def __init__(self, reasoning: Reasoning, *, inside: bool, gap: bool = True) -> None:
        """`inside`: the prompt has begun the reasoning. `gap`: white space after the end marker is no content.

        The text must include the tokens of `token_ids`.
        """
        self.token_ids = frozenset(reasoning.tokens.values())
        self.num_tokens = 0
        """Tokens of the reasoning so far, markers included."""
        self._begin, self._end = reasoning.begin, reasoning.end
        self._markers = {token_id: marker for marker, token_id in reasoning.tokens.items()}
        self._place: Literal["begin", "reasoning", "end", "content"] = "begin"
        self._begun = inside
        self._gap = gap
        self._has_reasoning = False  # reasoning other than white space
        self._undecided_tokens = 0
        self._blank = 0  # undecided white space characters before the undecided text
        self._undecided = ""  # noted text that is not decided yet
        self._runs = deque[tuple[RunKind, int]]()  # kinds of the next characters that are pushed
        self._pushed = list[str]()  # text beyond the decided runs

    def expect(self, token_id: int | None, text: str) -> None:
        """Note a token and its text before the text is pushed. None: the detokenizer's remaining text."""
        if self._place == "content":
            return
        self._undecided_tokens += token_id is not None and self._place != "end"
        marker = None if token_id is None else self._markers.get(token_id)
        if marker is None or (at := text.rfind(marker)) < 0:
            self._note(text)
        else:
            self._note(text[:at])
            self._marked(marker)
            self._note(text[at + len(marker) :])
        if self._begun:
            self.num_tokens += self._undecided_tokens
            self._undecided_tokens = 0

    def push(self, piece: str) -> list[tuple[RunKind, str]]:
        """Add a piece, and return the runs that became certain, in order. Text that is left out is among them."""
        self._pushed.append(piece)
        if not self._runs and self._place != "content":
            return []
        rest = "".join(self._pushed)
        runs: list[tuple[RunKind, str]] = []
        while rest and (self._runs or self._place == "content"):
            kind, characters = self._runs.popleft() if self._runs else ("content", len(rest))
            if characters > len(rest):
                self._runs.appendleft((kind, characters - len(rest)))
            runs.append((kind, rest[:characters]))
            rest = rest[characters:]
        self._pushed = [rest]
        return runs

    def flush(self) -> list[tuple[RunKind, str]]:
        """The rest, at the end of the answer."""
        if self._begun and self._place != "content":
            self._reason(self._undecided)
            self._leave_out(0)
        self._place = "content"
        return self.push("")

    def _note(self, text: str) -> None:
        self._undecided += text
        while self._undecided and self._place != "content":
            steps = {"begin": self._at_begin, "reasoning": self._in_reasoning, "end": self._after_end}
            if not steps[self._place]():
                return

    # Each step returns True if another step may follow, and False if more text has to come.

    def _at_begin(self) -> bool:
        text = self._undecided.lstrip(BLANK)
        self._blank += len(self._undecided) - len(text)
        self._undecided = text
        if not self._markers and text.startswith(self._begin):
            self._undecided = text[len(self._begin) :]
            self._marked(self._begin)
            return True
        if not text or (not self._markers and self._begin.startswith(text)):
            return False
        self._place = "reasoning" if self._begun else "content"
        return True

    def _in_reasoning(self) -> bool:
        at = -1 if self._markers else self._undecided.find(self._end)
        if at < 0:
            self._reason(
                self._undecided, undecided=0 if self._markers else overlap(self._undecided, self._end)
            )
            return False
        rest = self._undecided[at + len(self._end) :]
        self._reason(self._undecided[:at])
        self._marked(self._end)
        self._undecided = rest
        return True

    def _after_end(self) -> bool:
        text = self._undecided.lstrip(BLANK)
        self._leave_out(len(self._undecided) - len(text))
        self._undecided = text
        if text:
            self._place = "content"
        return True

    def _marked(self, marker: str) -> None:
        """Note that a marker comes next."""
        if self._place == "begin" and marker == self._begin:
            self._begun, self._place = True, "reasoning"
            self._leave_out(len(marker))
        elif self._begun and self._place in ("begin", "reasoning") and marker == self._end:
            self._place = "end" if self._gap else "content"
            self._leave_out(len(marker))
        elif self._place == "reasoning":
            self._reason(marker)
        else:
            self._place = "content"

    def _reason(self, text: str, *, undecided: int = 0) -> None:
        """Count this text as reasoning, except for the `undecided` characters at its end, which stay held."""
        body, self._undecided = text[: len(text) - undecided], text[len(text) - undecided :]
        core = body.rstrip(BLANK)
        if core and not self._has_reasoning:
            self._leave_out(len(core) - len(core.lstrip(BLANK)))
            core = core.lstrip(BLANK)
            self._has_reasoning = True
        if core:
            self._runs.append(("reasoning", self._blank + len(core)))
            self._blank = 0
        self._blank += len(body) - len(body.rstrip(BLANK))

    def _leave_out(self, characters: int) -> None:
        """Leave out the undecided white space, and so many characters more."""
        if self._blank + characters:
            self._runs.append(("left out", self._blank + characters))
        self._blank = 0
