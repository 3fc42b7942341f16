"""How answers are written: what each API implements. Independent of HTTP and workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from mmd_workers.gateway.answers.answer_part import AnswerPart
from mmd_workers.gateway.answers.usage import Usage


class Collector(Protocol):
    """One of the answers as it is collected to be sent in one piece."""

    def add(self, part: AnswerPart) -> None:
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

    def chunk(self, head: dict[str, Any], part: AnswerPart) -> str:
        """The event with this part of an answer."""
        ...

    def ending(self, head: dict[str, Any], usage: Usage, timings: dict[str, float] | None) -> Iterable[str]:
        """Events that end a stream."""
        ...

    def collector(self, index: int) -> Collector:
        """Collects one of the answers."""
        ...

    def body(
        self, head: dict[str, Any], wholes: Sequence[Any], usage: Usage, timings: dict[str, float] | None
    ) -> list[bytes]:
        """JSON of all the answers, in pieces."""
        ...
