"""What Anthropic's messages and OpenAI's responses have in common: one answer, which consists of blocks. Independent of HTTP and workers."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic_core import to_json

from mmd_workers.gateway.answers.answer_part import AnswerPart, FinishReason, Piece
from mmd_workers.gateway.answers.usage import Usage
from mmd_workers.gateway.constraints.reasoning_parser import ReasoningPart


class AnswerBlock:
    """Text of an answer, its reasoning, or one of its calls. `call_id`, `name`: of a call."""

    def __init__(
        self,
        kind: Literal["text", "reasoning", "call"] = "text",
        call_id: str | None = None,
        name: str | None = None,
    ) -> None:
        self.kind, self.call_id, self.name = kind, call_id, name
        self._text = io.StringIO()

    def write(self, text: str) -> None:
        """Add to it."""
        self._text.write(text)

    @property
    def text(self) -> str:
        """The text, the reasoning, or the arguments of the call."""
        return self._text.getvalue()


class WholeAnswer:
    """An answer as it is collected, where blocks of reasoning, text and calls are all that is shown of it."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self.finish_reason: FinishReason | None = None
        self.stop: str | None = None

    def add(self, part: AnswerPart) -> None:
        """Take the next part of the answer."""
        for piece in part.pieces:
            self.take(piece)
        self.end(part)

    def take(self, piece: Piece) -> bool:
        """Take a piece. Returns whether it begins a block, the last one."""
        before = len(self.blocks)
        last = self.blocks[-1].kind if self.blocks else None
        if isinstance(piece, str):
            text = piece
            if last != "text":
                self.blocks.append(AnswerBlock())
        elif isinstance(piece, ReasoningPart):
            text = piece.text
            if last != "reasoning":
                self.blocks.append(AnswerBlock("reasoning"))
        else:
            text = piece.arguments
            if piece.id is not None:
                self.blocks.append(AnswerBlock("call", piece.id, piece.name))
        self.blocks[-1].write(text)
        return len(self.blocks) > before

    def end(self, part: AnswerPart) -> None:
        """Take how the answer ended, if it did."""
        if part.finish_reason is not None:
            self.finish_reason, self.stop = part.finish_reason, part.stop

    @property
    def shown(self) -> list[AnswerBlock]:
        """Its blocks; an answer of nothing has an empty one."""
        return self.blocks or [AnswerBlock()]


class OneAnswer(ABC):
    """Answers to requests that have one answer, of blocks. `_streamed`: what a stream has had of it."""

    def __init__(self) -> None:
        self._streamed = WholeAnswer()

    def chunk(self, _head: dict[str, Any], part: AnswerPart) -> str:
        """The events with this part of the answer; empty where it has neither reasoning nor text nor calls."""
        self._streamed.end(part)
        return "".join(event for piece in part.pieces for event in self._piece(piece))

    def collector(self, _index: int) -> WholeAnswer:
        """Collects the answer."""
        return WholeAnswer()

    def body(
        self,
        head: dict[str, Any],
        wholes: Sequence[WholeAnswer],
        usage: Usage,
        timings: dict[str, float] | None,
    ) -> list[bytes]:
        """JSON of the answer."""
        (whole,) = wholes
        return [to_json(self._whole(head, whole, usage, timings))]

    @abstractmethod
    def _piece(self, piece: Piece) -> Iterator[str]:
        """The events with a piece of the answer."""

    @abstractmethod
    def _whole(
        self, head: dict[str, Any], whole: WholeAnswer, usage: Usage, timings: dict[str, float] | None
    ) -> dict[str, Any]:
        """The whole answer."""


def named_event(value: dict[str, Any]) -> str:
    """A server-sent event that has its type as its name."""
    return f"event: {value['type']}\ndata: {to_json(value).decode()}\n\n"
