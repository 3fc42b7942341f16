"""What became of every request of the storm, from the client's log, the faults that struck and the answers that are right. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from e2e.faults import Struck
from e2e.storm_client import SILENCE_SECONDS

Line = dict[str, Any]
Span = tuple[float, float]
"""From one moment to another, Unix seconds."""
RETURN_SECONDS = 15.0
"""How long connections may be refused after a gateway was killed: until nodes stop routing to it."""
LOOK_SECONDS = 5.0
"""How far apart a kill and the outage that it began may be seen: the watch looks every few seconds."""
NOTICE_SECONDS = 60.0
"""How long after a gateway was killed a client that reads slowly may still read what was sent before: its node keeps that."""
PACED = "long"
"""The kind that is read at a pace: its break is noticed once all that was sent before has been read, within `NOTICE_SECONDS`."""
LONG_SECONDS = 120.0


@dataclass(slots=True)
class Judgement:
    """Questions by number, each in at most one list."""

    questions: int = 0
    lost: list[Line] = field(default_factory=list)
    """No answer, an error, or a broken connection that no killed gateway explains."""
    duplicated: list[Line] = field(default_factory=list)
    """More than one end in a stream."""
    wrong: list[Line] = field(default_factory=list)
    """Tokens that are not those of `generate`; `difference` names the first."""
    cut: list[Line] = field(default_factory=list)
    """Cut off by a killed gateway, and answered correctly when sent again."""
    answers: list[Line] = field(default_factory=list)
    """The last attempt of every question that was answered, right or wrong."""

    @property
    def long_streams(self) -> list[float]:
        """Seconds of the streams longer than two minutes."""
        seconds = [a["ended"] - a["began"] for a in self.answers]
        return sorted(round(s, 1) for s in seconds if s > LONG_SECONDS)


def judge(
    lines: Iterable[Line],
    struck: Sequence[Struck],
    right: Callable[[str, int], list[int]],
    without_gateway: Sequence[Span] = (),
) -> Judgement:
    """Judge every question that the log says was sent.

    `right`: the tokens of the answer, by kind and seed. `without_gateway`: when no gateway was Ready; connections are refused for
    as long if a kill began it.
    """
    lines = list(lines)
    sent: dict[int, list[Line]] = {}
    ended: dict[tuple[int, int], Line] = {}
    for line in lines:
        if "sent" in line:
            sent.setdefault(line["question"], []).append(line)
        elif "ended" in line:
            ended[line["question"], line["attempt"]] = line
    gateways = [s for s in struck if s.component == "gateway"]
    kills, deletions = [s for s in gateways if s.killed], [s for s in gateways if not s.killed]
    result = Judgement(questions=len(sent))
    total = next((line["questions"] for line in lines if "questions" in line), None)
    if total is None or total != len(sent):
        result.lost.append(
            {"error": f"the log is incomplete: it has {len(sent)} questions and its last line says {total}"}
        )
    for number, attempts in sent.items():
        ends = [ended.get((number, attempt["attempt"])) for attempt in attempts]
        last = ends[-1]
        if last is None or any(end is None for end in ends):
            result.lost.append({**attempts[-1], "error": "sent, and the log does not say how it ended"})
            continue
        *broken, last = [end for end in ends if end is not None]
        unexplained = [
            end
            for end in broken
            if not any(_explains(kill, deletions, without_gateway, end) for kill in kills)
        ]
        if unexplained or last["error"] or last["ends"] == 0:
            result.lost.append((unexplained or [last])[0])
            continue
        result.answers.append(last)
        if last["ends"] > 1:
            result.duplicated.append(last)
        elif difference := compare(last["tokens"], right(last["kind"], last["seed"])):
            result.wrong.append({**last, "difference": difference})
        elif any(begun := [_partly_wrong(end, right) for end in broken]):
            result.wrong.append({**last, "difference": next(d for d in begun if d)})
        elif broken:
            result.cut.append(last)
    return result


def _partly_wrong(end: Line, right: Callable[[str, int], list[int]]) -> str:
    expected = right(end["kind"], end["seed"])
    return compare(end["tokens"], expected[: len(end["tokens"])])


def compare(tokens: Sequence[int], expected: Sequence[int]) -> str:
    """The first difference between two token sequences, named by what it looks like; empty if they are equal."""
    if list(tokens) == list(expected):
        return ""
    index = next(
        (i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b),
        min(len(tokens), len(expected)),
    )
    where = f"{len(tokens)} tokens, {len(expected)} expected, the first difference at index {index}"
    missing = len(expected) - len(tokens)
    if missing > 0 and list(tokens[index:]) == list(expected[index + missing :]):
        return f"gap of {missing}: {where}"
    if missing < 0 and list(tokens[index - missing :]) == list(expected[index:]):
        return f"repeat of {-missing}: {where}"
    return f"wrong token: {where}"


def in_flight(lines: Iterable[Line], moments: Sequence[float]) -> list[int]:
    """How many requests were in flight at each moment."""
    spans = [(line["began"], line["ended"]) for line in lines if "ended" in line]
    return [sum(began <= moment <= ended for began, ended in spans) for moment in moments]


def longest_after(answers: Iterable[Line], moment: float) -> float:
    """Seconds that the longest of the streams in flight at a moment went on after it; 0 without one."""
    return max((a["ended"] - moment for a in answers if a["began"] <= moment <= a["ended"]), default=0.0)


def _explains(kill: Struck, deletions: Sequence[Struck], without_gateway: Sequence[Span], end: Line) -> bool:
    """Whether a killed gateway may have broken this connection.

    A stream that was in flight ends with the process of its gateway, whatever is deleted since, and its client notices soon. A stream
    of another gateway, which may drain since it was deleted, breaks by none of that, and no stream that began after the kill: the
    container that replaces the killed one has the name of the same pod. A request that found no gateway is refused until nodes no
    longer route to the dead one, or until one is Ready again if this kill left none; where one was deleted during the request, that
    may have been its gateway. Silence without a response's head is that of the killed pod, also where the same pod was deleted.
    """
    if not end["broken"] or end["ended"] + 1 < kill.began:
        return False
    if end["tokens"] or end["gateway"]:
        if end["gateway"] != kill.pod or end["began"] > kill.ended:
            return False
    elif any(
        end["began"] <= deletion.ended and deletion.began <= end["ended"]
        for deletion in deletions
        if not (end["silent"] and deletion.pod == kill.pod)
    ):
        return False
    routed = kill.ended + RETURN_SECONDS
    if end["tokens"] or end["silent"]:
        noticed = kill.ended + (NOTICE_SECONDS if end["kind"] == PACED else RETURN_SECONDS)
        return bool(end["ended"] <= noticed + (SILENCE_SECONDS if end["silent"] else 0.0))
    began = (kill.began - LOOK_SECONDS, kill.ended + LOOK_SECONDS)
    outages = [to + RETURN_SECONDS for since, to in without_gateway if began[0] <= since <= began[1]]
    return bool(end["ended"] <= max([routed, *outages]))


def parse(output: str) -> list[Line]:
    """The client's log. A last line that was cut off is left out: the question it was about then has no end."""
    lines = output.splitlines()
    parsed = []
    for number, line in enumerate(lines):
        try:
            parsed.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise
    return parsed
