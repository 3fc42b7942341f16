"""The common part of Anthropic's messages and OpenAI's responses: one answer made of blocks. Independent of HTTP and workers."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from pydantic_core import to_json

from mmd_workers.gateway.answers.answer_part import AnswerPart, ApiFinishReason, Piece
from mmd_workers.gateway.answers.usage import Usage
from mmd_workers.gateway.output.reasoning_parser import ReasoningPart


class AnswerBlock:
    """Text of an answer, its reasoning, or one of its calls. `call_id` and `name` are set for calls only."""

    def __init__(
        self,
        kind: Literal["text", "reasoning", "call"] = "text",
        call_id: str | None = None,
        name: str | None = None,
    ) -> None:
        self.kind, self.call_id, self.name = kind, call_id, name
        self._text = io.StringIO()

    def write(self, text: str) -> None:
        """Append text to the block."""
        self._text.write(text)

    @property
    def text(self) -> str:
        """The text, the reasoning, or the arguments of the call."""
        return self._text.getvalue()


class WholeAnswer:
    """Collects an answer as blocks of reasoning, text and calls, and nothing else."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self.finish_reason: ApiFinishReason | None = None
        self.stop: str | None = None

    def add(self, part: AnswerPart) -> None:
        """Take the next part of the answer."""
        for piece in part.pieces:
            self.take(piece)
        self.end(part)

    def take(self, piece: Piece) -> bool:
        """Take a piece. Returns True if it begins a new block, which is then the last one."""
        num_before = len(self.blocks)
        last_kind = self.blocks[-1].kind if self.blocks else None
        if isinstance(piece, str):
            text = piece
            if last_kind != "text":
                self.blocks.append(AnswerBlock())
        elif isinstance(piece, ReasoningPart):
            text = piece.text
            if last_kind != "reasoning":
                self.blocks.append(AnswerBlock("reasoning"))
        else:
            text = piece.arguments
            if piece.id is not None:
                self.blocks.append(AnswerBlock("call", piece.id, piece.name))
        self.blocks[-1].write(text)
        return len(self.blocks) > num_before

    def end(self, part: AnswerPart) -> None:
        """Record how the answer ended, if this part ends it."""
        if part.finish_reason is not None:
            self.finish_reason, self.stop = part.finish_reason, part.stop

    @property
    def shown(self) -> list[AnswerBlock]:
        """The blocks; an empty answer has one empty block."""
        return self.blocks or [AnswerBlock()]


class OneAnswer(ABC):
    """Writes the single answer of a request as blocks. `_streamed`: the blocks sent so far on a stream."""

    def __init__(self) -> None:
        self._streamed = WholeAnswer()

    def chunk(self, _head: dict[str, Any], part: AnswerPart, _usage: Callable[[], Usage]) -> str:
        """The events for this part of the answer; empty if it has no reasoning, text or calls."""
        self._streamed.end(part)
        return "".join(event for piece in part.pieces for event in self._piece(piece))

    def collector(self, _index: int) -> WholeAnswer:
        """A collector for the answer."""
        return WholeAnswer()

    def body(
        self,
        head: dict[str, Any],
        wholes: Sequence[WholeAnswer],
        usage: Usage,
        timings: dict[str, float] | None,
    ) -> list[bytes]:
        """The JSON of the answer."""
        (whole,) = wholes
        return [to_json(self._whole(head, whole, usage, timings))]

    @abstractmethod
    def _piece(self, piece: Piece) -> Iterator[str]:
        """The events for one piece of the answer."""

    @abstractmethod
    def _whole(
        self, head: dict[str, Any], whole: WholeAnswer, usage: Usage, timings: dict[str, float] | None
    ) -> dict[str, Any]:
        """The complete answer."""


def named_event(value: dict[str, Any]) -> str:
    """A server-sent event named after its type."""
    return f"event: {value['type']}\ndata: {to_json(value).decode()}\n\n"
