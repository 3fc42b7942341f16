"""The shapes in which answers are sent: chat completions and text completions, whole or in chunks. Independent of HTTP and workers."""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

from pydantic_core import to_json

from mmd_workers.gateway.chat import ChoiceStream, CompleteChoice, with_logprobs
from mmd_workers.gateway.chat_response import (
    ApiFinishReason,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    Piece,
    Usage,
)
from mmd_workers.gateway.reasoning_parser import ReasoningPart
from mmd_workers.gateway.text_response import TextChoice, TextCompletion, TextLogprobs


class Collector(Protocol):
    """One of the answers as it is collected to be sent in one piece."""

    def add(self, part: ChunkChoice) -> None:
        """Take the next part of the answer."""
        ...


class AnswerShape(Protocol):
    """How the answers to one request are written. `head`: id, created, model. `keeps_text`: a stream repeats its text at the end. `waiting`:
    an event of a stream that has no news.
    """

    keeps_text: bool
    waiting: str

    def opening(self, head: dict[str, Any], usage: Usage) -> Iterable[str]:
        """Events that begin a stream."""
        ...

    def chunk(self, head: dict[str, Any], part: ChunkChoice) -> str:
        """The event with this part of an answer."""
        ...

    def ending(self, head: dict[str, Any], usage: Usage, timings: dict[str, float] | None) -> Iterable[str]:
        """Events that end a stream."""
        ...

    def collector(self, stream: ChoiceStream) -> Collector:
        """Collects one of the answers."""
        ...

    def body(
        self, head: dict[str, Any], wholes: Sequence[Any], usage: Usage, timings: dict[str, float] | None
    ) -> list[bytes]:
        """JSON of all the answers, in pieces."""
        ...


class _Chunks(ABC):
    """Streams of chunks of OpenAI's completions. `usage`: whether the last chunk has the token counts."""

    keeps_text = False
    waiting = ": waiting\n\n"

    def __init__(self, *, usage: bool) -> None:
        self._usage = usage

    def opening(self, _head: dict[str, Any], _usage: Usage) -> Iterable[str]:
        """Nothing: the first chunk begins the stream."""
        return ()

    def ending(self, head: dict[str, Any], usage: Usage, timings: dict[str, float] | None) -> Iterable[str]:
        """A chunk without choices where there is something to add, and the mark of the end."""
        closing: dict[str, Any] = {}
        if self._usage:
            closing["usage"] = usage
        if timings is not None:
            closing["timings"] = timings
        if closing:
            yield self._closing(head, **closing)
        yield "data: [DONE]\n\n"

    @abstractmethod
    def _closing(self, head: dict[str, Any], **more: Any) -> str:
        """The last chunk, without choices."""


class ChatShape(_Chunks):
    """Chat completions."""

    def __init__(self, *, logprobs: bool, token_ids: bool, usage: bool) -> None:
        super().__init__(usage=usage)
        self._logprobs = logprobs
        self._token_ids = token_ids

    def chunk(self, head: dict[str, Any], part: ChunkChoice) -> str:
        """The event with this part of an answer."""
        return _event(ChatCompletionChunk(object="chat.completion.chunk", **head, choices=[part]))

    def _closing(self, head: dict[str, Any], **more: Any) -> str:
        return _event(ChatCompletionChunk(object="chat.completion.chunk", **head, choices=[], **more))

    def collector(self, stream: ChoiceStream) -> CompleteChoice:
        """Collects one of the answers."""
        return CompleteChoice(stream, logprobs=self._logprobs)

    def body(
        self,
        head: dict[str, Any],
        wholes: Sequence[CompleteChoice],
        usage: Usage,
        timings: dict[str, float] | None,
    ) -> list[bytes]:
        """JSON of all the answers, in pieces."""
        completion = ChatCompletion(
            **head,
            choices=[whole.choice(token_ids=self._token_ids) for whole in wholes],
            usage=usage,
            timings=timings,
        )
        body = completion.model_dump_json(exclude=_exclude(timings, self._token_ids)).encode()
        return with_logprobs(body, wholes) if self._logprobs else [body]


class TextShape(_Chunks):
    """Text completions. `echo`: the prompt of each answer, which its text begins with."""

    def __init__(
        self, *, logprobs: int | None, token_ids: bool, usage: bool, echo: Sequence[str] = ()
    ) -> None:
        super().__init__(usage=usage)
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._echo = dict(enumerate(echo))  # of the answers that have not begun
        self._offsets: dict[int, int] = {}

    def part(self, part: ChunkChoice) -> TextChoice:
        """What this part of an answer is here."""
        choice = TextChoice(
            index=part.index,
            text=self._echo.pop(part.index, "") + (part.delta.content or ""),
            logprobs=None if part.logprobs is None else self._entries(part),
            finish_reason=part.finish_reason,
        )
        if self._token_ids:
            choice.token_ids = part.token_ids
        return choice

    def _entries(self, part: ChunkChoice) -> TextLogprobs:
        """Of tokens with the same text the likeliest one is shown; the chosen one comes first."""
        assert part.logprobs is not None
        found = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if not self._logprobs:
            found.top_logprobs = None
        for entry in (*part.prompt, *part.logprobs.content):
            offset = self._offsets.get(part.index, 0)
            self._offsets[part.index] = offset + len(entry.token)
            found.tokens.append(entry.token)
            found.token_logprobs.append(None if math.isnan(entry.logprob) else entry.logprob)
            found.text_offset.append(offset)
            if found.top_logprobs is not None and math.isnan(entry.logprob):
                found.top_logprobs.append(None)
            elif found.top_logprobs is not None:
                top = {entry.token: entry.logprob}
                for other in entry.top_logprobs:
                    top[other.token] = max(other.logprob, top.get(other.token, other.logprob))
                found.top_logprobs.append(top)
        return found

    def chunk(self, head: dict[str, Any], part: ChunkChoice) -> str:
        """The event with this part of an answer."""
        return _event(TextCompletion(object="text_completion", **head, choices=[self.part(part)]))

    def _closing(self, head: dict[str, Any], **more: Any) -> str:
        return _event(TextCompletion(object="text_completion", **head, choices=[], **more))

    def collector(self, stream: ChoiceStream) -> _TextCollector:
        """Collects one of the answers."""
        return _TextCollector(self, stream.index)

    def body(
        self,
        head: dict[str, Any],
        wholes: Sequence[_TextCollector],
        usage: Usage,
        timings: dict[str, float] | None,
    ) -> list[bytes]:
        """JSON of all the answers, in pieces."""
        completion = TextCompletion(**head, choices=[], usage=usage, timings=timings)
        body = completion.model_dump_json(exclude=_exclude(timings, token_ids=True)).encode()
        before, after = body.split(_NO_CHOICES)
        pieces = [before, b'"choices":[']
        for number, whole in enumerate(wholes):
            pieces += [b"," if number else b"", *whole.pieces(token_ids=self._token_ids)]
        return [*pieces, b"]", after]


class _TextCollector:
    """One answer. Its log probabilities are kept as the JSON that they become, see `CompleteChoice`."""

    def __init__(self, shape: TextShape, index: int) -> None:
        self._shape = shape
        self._index = index
        self._text: list[str] = []
        self._token_ids = array("l")
        self._finish_reason: ApiFinishReason | None = None
        self._lists: dict[str, list[bytes] | None] = {}

    def add(self, part: ChunkChoice) -> None:
        """Take the next part of the answer."""
        choice = self._shape.part(part)
        self._text.append(choice.text)
        self._token_ids.extend(choice.token_ids or ())
        self._finish_reason = choice.finish_reason or self._finish_reason
        if choice.logprobs is not None:
            for name in TextLogprobs.model_fields:
                items = getattr(choice.logprobs, name)
                if items is None:
                    self._lists[name] = None
                elif items:
                    found = self._lists.setdefault(name, [])
                    assert found is not None
                    found += [b"," if found else b"", to_json(items, inf_nan_mode="null")[1:-1]]
                else:
                    self._lists.setdefault(name, [])

    def pieces(self, *, token_ids: bool) -> list[bytes]:
        """Its JSON."""
        choice = TextChoice(index=self._index, text="".join(self._text), finish_reason=self._finish_reason)
        if token_ids:
            choice.token_ids = self._token_ids.tolist()
        exclude = {"logprobs"} if token_ids else {"logprobs", "token_ids"}
        begin = choice.model_dump_json(exclude=exclude)[:-1].encode()
        if not self._lists:
            return [begin, b',"logprobs":null}']
        pieces = [begin, b',"logprobs":{']
        for number, (name, items) in enumerate(self._lists.items()):
            pieces.append(f'{"," if number else ""}"{name}":'.encode())
            pieces += [b"null"] if items is None else [b"[", *items, b"]"]
        return [*pieces, b"}}"]


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
        self.finish_reason: ApiFinishReason | None = None
        self.stop: str | None = None

    def add(self, part: ChunkChoice) -> None:
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

    def end(self, part: ChunkChoice) -> None:
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

    def chunk(self, _head: dict[str, Any], part: ChunkChoice) -> str:
        """The events with this part of the answer; empty where it has neither reasoning nor text nor calls."""
        self._streamed.end(part)
        return "".join(event for piece in part.pieces for event in self._piece(piece))

    def collector(self, _stream: ChoiceStream) -> WholeAnswer:
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


_NO_CHOICES = b'"choices":[]'


def _event(chunk: ChatCompletionChunk | TextCompletion) -> str:
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


def _exclude(timings: dict[str, float] | None, token_ids: bool) -> dict[str, Any]:
    exclude: dict[str, Any] = {}
    if timings is None:
        exclude["timings"] = True
    if not token_ids:
        exclude["choices"] = {"__all__": {"token_ids"}}
    return exclude
