"""Protocols for writing answers, implemented by each API. Independent of HTTP and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from mmd_workers.gateway.answers.answer_part import AnswerPart
from mmd_workers.gateway.answers.usage import Usage


class Collector(Protocol):
    """Collects one answer that is sent in one piece."""

    def add(self, part: AnswerPart) -> None:
        """Take the next part of the answer."""
        ...


class AnswerShape(Protocol):
    """Writes the answers to one request in the form of one API.

    `head`: id, created, model. `keeps_text`: True if a stream repeats its text at the end. `waiting`: event of a stream with nothing new to send.
    """

    keeps_text: bool
    waiting: str

    def opening(self, head: dict[str, Any], usage: Usage) -> Iterable[str]:
        """The events that begin a stream."""
        ...

    def chunk(self, head: dict[str, Any], part: AnswerPart, usage: Callable[[], Usage]) -> str:
        """The event that carries this part of an answer. `usage`: counts the tokens so far."""
        ...

    def ending(self, head: dict[str, Any], usage: Usage, timings: dict[str, float] | None) -> Iterable[str]:
        """The events that end a stream."""
        ...

    def collector(self, index: int) -> Collector:
        """A collector for the answer with this index."""
        ...

    def body(
        self, head: dict[str, Any], wholes: Sequence[Any], usage: Usage, timings: dict[str, float] | None
    ) -> list[bytes]:
        """The JSON of all answers, in pieces."""
        ...
