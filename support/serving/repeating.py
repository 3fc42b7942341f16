"""Sends a request with an idempotency key again, as clients do, and reports answers unlike the first."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Literal

import httpx

from support.serving.asking import Answer, Asked, ask

How = Literal["afterwards", "beside it", "other body", "resumed", "resumed while it runs", "other deadline"]
HOWS: tuple[How, ...] = (
    "afterwards",
    "beside it",
    "other body",
    "resumed",
    "resumed while it runs",
    "other deadline",
)
DEADLINES = ("0.01", "0.1", "0.5", "2")  # seconds, as clients ask for them
REPEATED_HEADER = "idempotent-replayed"
_ID = re.compile(rb"^id: (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Repeat:
    """A request with a key of its own, and how it is sent again.

    `at`: which part of its stream the client has then, 0 to 1. `deadline`: for the repeat with another
    deadline.
    """

    asked: Asked
    how: How
    at: float
    deadline: str

    @classmethod
    def drawn(cls, rng: random.Random, asked: Asked, key: str) -> Repeat:
        """Draw a random repeat."""
        headers = asked.headers | {"idempotency-key": key}
        return cls(replace(asked, headers=headers), rng.choice(HOWS), rng.random(), rng.choice(DEADLINES))

    def send(self, client: httpx.Client) -> list[Answer]:
        """Send the request, and send it again. Returns all answers."""
        match self.how:
            case "afterwards":
                first = ask(client, self.asked)
                return [first, _as_first(first, ask(client, self.asked))]
            case "beside it":
                return self._beside(client)
            case "other body":
                first = ask(client, self.asked)
                return [first, _refused(first, ask(client, self._with_other_body()))]
            case "resumed":
                first = ask(client, self.asked)
                head = _head(first.body, int(self.at * first.body.count(b"\n\n")))
                if not (first.is_retained and head):
                    return [first]
                return [first, _joined(head, self._resumed(client, head), first)]
            case "resumed while it runs":
                partial = ask(client, self.asked, most_events=1 + int(3 * self.at))
                head = _head(partial.body, partial.body.count(b"\n\n"))
                if not (partial.is_stream and head):
                    return [partial]
                rest, whole = self._resumed(client, head), ask(client, self.asked)
                return [partial, _joined(head, rest, whole), whole]
            case "other deadline":
                hurried = self._with({"x-request-timeout": self.deadline})
                first = ask(client, hurried)
                second = ask(client, self.asked)
                return [first, _as_first(first, second)]

    def _beside(self, client: httpx.Client) -> list[Answer]:
        with ThreadPoolExecutor(2) as threads:
            answer, other_answer = threads.map(lambda asked: ask(client, asked), (self.asked, self.asked))
        is_first = REPEATED_HEADER not in answer.headers
        return (
            [answer, _as_first(answer, other_answer)]
            if is_first
            else [other_answer, _as_first(other_answer, answer)]
        )

    def _resumed(self, client: httpx.Client, head: bytes) -> Answer:
        last = _ID.findall(head)[-1].decode()
        return ask(client, self._with({"last-event-id": last}))

    def _with(self, headers: dict[str, str]) -> Asked:
        return replace(self.asked, headers=self.asked.headers | headers)

    def _with_other_body(self) -> Asked:
        return replace(self.asked, content=self.asked.content + b" ")


def _as_first(first: Answer, second: Answer) -> Answer:
    """The second answer, marked as wrong if it does not repeat the first."""
    if second.wrong or not first.is_retained:
        return second
    if second.headers.get(REPEATED_HEADER) != "true":
        return replace(second, wrong=f"a repeat with status {second.status} that is not the retained answer")
    return second if second.body == first.body else replace(second, wrong=_differs(first.body, second.body))


def _refused(first: Answer, second: Answer) -> Answer:
    if second.wrong or not first.is_retained or second.status == HTTPStatus.UNPROCESSABLE_ENTITY:
        return second
    return replace(second, wrong=f"another body with the same key had status {second.status}")


def _joined(head: bytes, rest: Answer, whole: Answer) -> Answer:
    """The rest of a stream, marked as wrong if both parts together are not the whole."""
    if rest.wrong or not whole.is_retained:
        return rest
    if rest.status != HTTPStatus.OK:
        return replace(rest, wrong=f"a stream that is resumed had status {rest.status}: {rest.body[:200]!r}")
    joined = head + rest.body
    return rest if joined == whole.body else replace(rest, wrong=_differs(whole.body, joined))


def _differs(expected: bytes, actual: bytes) -> str:
    same = next(
        (at for at, pair in enumerate(zip(expected, actual, strict=False)) if pair[0] != pair[1]), None
    )
    at = min(len(expected), len(actual)) if same is None else same
    return f"a repeat that differs from byte {at} on: {actual[at : at + 100]!r} instead of {expected[at : at + 100]!r}"


def _head(body: bytes, most: int) -> bytes:
    """At most `most` parts of a stream, up to an event with an id; empty if there is none."""
    parts = body.split(b"\n\n")[:-1][:most]
    while parts and not _ID.search(parts[-1]):
        parts.pop()
    return b"".join(part + b"\n\n" for part in parts)
