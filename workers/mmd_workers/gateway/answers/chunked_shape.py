"""The common part of OpenAI's chat completions and text completions: streams of chunks with an end mark.

Independent of HTTP and workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel

from mmd_workers.gateway.answers.answer_part import AnswerPart
from mmd_workers.gateway.answers.usage import Usage


class ChunkedShape(ABC):
    """Writes OpenAI's completions as streams of chunks.

    `usage`: the last chunk has the token counts. `continuous`: each chunk has those so far.
    """

    keeps_text = False
    waiting = ": waiting\n\n"

    def __init__(self, *, usage: bool, continuous: bool) -> None:
        self._usage = usage
        self._continuous = continuous

    def opening(self, _head: dict[str, Any], _usage: Usage) -> Iterable[str]:
        """No events: the first chunk begins the stream."""
        return ()

    def ending(self, head: dict[str, Any], usage: Usage, timings: dict[str, float] | None) -> Iterable[str]:
        """A chunk without choices if there is usage or timing to add, then the end mark."""
        closing: dict[str, Any] = {}
        if self._usage:
            closing["usage"] = usage
        if timings is not None:
            closing["timings"] = timings
        if closing:
            yield self._closing(head, **closing)
        yield "data: [DONE]\n\n"

    def chunk(self, head: dict[str, Any], part: AnswerPart, usage: Callable[[], Usage]) -> str:
        """The event that carries this part of an answer."""
        more = {"usage": usage()} if self._continuous else {}
        return self._event(head, [self._choice(part)], **more)

    def _closing(self, head: dict[str, Any], **more: Any) -> str:
        """The last chunk, without choices."""
        return self._event(head, [], **more)

    @abstractmethod
    def _choice(self, part: AnswerPart) -> BaseModel:
        """This part of an answer as a choice of the API."""

    @abstractmethod
    def _event(self, head: dict[str, Any], choices: list[Any], **more: Any) -> str:
        """A chunk with these choices."""


def chunk_event(chunk: BaseModel) -> str:
    """The server-sent event for a chunk, with only the fields that were set."""
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


def left_out(timings: dict[str, float] | None, token_ids: bool) -> dict[str, Any]:
    """The fields of a completion that its request did not ask for, in the form of pydantic's `exclude`."""
    fields: dict[str, Any] = {}
    if timings is None:
        fields["timings"] = True
    if not token_ids:
        fields["choices"] = {"__all__": {"token_ids"}}
    return fields
