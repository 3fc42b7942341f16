"""The judgement over a storm: nothing lost, duplicated or wrong may look well."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.faults import Struck
from e2e.judge import compare, in_flight, judge, parse

RIGHT = [5, 6, 7, 2]
KILLED = Struck(began=105.0, ended=106.0, component="gateway", pod="g-1", killed=True)


def right(_kind: str, _seed: int) -> list[int]:
    return RIGHT


def sent(question: int, attempt: int = 0, at: float = 100.0) -> dict[str, Any]:
    return {"question": question, "kind": "text", "seed": 1, "attempt": attempt, "sent": at}


def ended(question: int, attempt: int = 0, **changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"question": question, "kind": "text", "seed": 1, "attempt": attempt}
    facts |= {
        "began": 100.0,
        "ended": 110.0,
        "tokens": RIGHT,
        "ends": 1,
        "error": "",
        "broken": False,
        "silent": False,
        "gateway": "",
    }
    return facts | changes


def broken(question: int, attempt: int = 0, **changes: Any) -> dict[str, Any]:
    facts = {"tokens": RIGHT[:2], "ends": 0, "error": "peer closed", "broken": True, "gateway": "g-1"}
    return ended(question, attempt, **(facts | changes))


def verdict(
    *lines: dict[str, Any],
    struck: tuple[Struck, ...] = (),
    total: int | None = 1,
    without_gateway: tuple[tuple[float, float], ...] = (),
) -> dict[str, int]:
    log = [*lines, *([{"questions": total}] if total is not None else [])]
    result = judge(log, struck, right, without_gateway)
    named = {"lost": result.lost, "duplicated": result.duplicated, "wrong": result.wrong, "cut": result.cut}
    return {name: len(found) for name, found in named.items() if found}


def test_a_correct_answer_is_not_a_finding() -> None:
    assert verdict(sent(0), ended(0)) == {}


@pytest.mark.parametrize(
    ("lines", "total"),
    [
        ((sent(0),), 1),
        ((sent(0), ended(0)), None),
        ((sent(0), ended(0)), 2),
        ((sent(0), ended(0, error="503 overloaded", ends=0, tokens=[])), 1),
        ((sent(0), ended(0, ends=0)), 1),
    ],
    ids=[
        "no end",
        "log without its last line",
        "log with a question missing",
        "an error",
        "no finish reason",
    ],
)
def test_what_has_no_answer_is_lost(lines: tuple[dict[str, Any], ...], total: int | None) -> None:
    assert verdict(*lines, total=total) == {"lost": 1}


def test_two_ends_in_a_stream_count_as_duplicated() -> None:
    assert verdict(sent(0), ended(0, ends=2)) == {"duplicated": 1}


@pytest.mark.parametrize("tokens", [[5, 7, 2], [5, 6, 6, 7, 2], [5, 6, 8, 2], [5, 6, 7], []])
def test_other_tokens_are_wrong(tokens: list[int]) -> None:
    assert verdict(sent(0), ended(0, tokens=tokens)) == {"wrong": 1}


def test_gaps_and_repeats_are_named_with_their_place() -> None:
    assert compare([5, 7, 2], RIGHT) == "gap of 1: 3 tokens, 4 expected, the first difference at index 1"
    assert (
        compare([5, 6, 6, 7, 2], RIGHT)
        == "repeat of 1: 5 tokens, 4 expected, the first difference at index 2"
    )
    assert (
        compare([5, 6, 8, 2], RIGHT) == "wrong token: 4 tokens, 4 expected, the first difference at index 2"
    )


def test_a_stream_cut_by_a_kill_counts_apart_if_repeated_correctly() -> None:
    lines = (sent(0), broken(0), sent(0, 1, 111.0), ended(0, 1))
    assert verdict(*lines, struck=(KILLED,)) == {"cut": 1}


@pytest.mark.parametrize(
    "struck",
    [
        (),
        (Struck(105.0, 106.0, "gateway", "g-1", killed=False),),
        (Struck(105.0, 106.0, "decode", "d-0", killed=True),),
        (Struck(80.0, 81.0, "gateway", "g-1", killed=True),),
        (Struck(120.0, 121.0, "gateway", "g-1", killed=True),),
    ],
    ids=["no fault", "a deleted gateway", "a killed decoder", "a kill long before", "a kill afterwards"],
)
def test_a_broken_stream_that_no_killed_gateway_explains_is_lost(struck: tuple[Struck, ...]) -> None:
    assert verdict(sent(0), broken(0), sent(0, 1), ended(0, 1), struck=struck) == {"lost": 1}


@pytest.mark.parametrize("tokens", [RIGHT[:2], []], ids=["a stream", "a stream before its first token"])
@pytest.mark.parametrize("gateway", ["g-2", ""], ids=["another", "unnamed"])
def test_a_broken_stream_of_a_surviving_gateway_is_lost(tokens: list[int], gateway: str) -> None:
    lines = (sent(0), broken(0, tokens=tokens, gateway=gateway), sent(0, 1), ended(0, 1))
    no_answer = not tokens and not gateway
    assert verdict(*lines, struck=(KILLED,)) == ({"cut": 1} if no_answer else {"lost": 1})


def refused(at: float) -> tuple[dict[str, Any], ...]:
    """A question whose connection is refused at a moment, and which is answered when it is sent again."""
    first = broken(0, began=at, ended=at + 0.1, tokens=[], gateway="")
    return sent(0), first, sent(0, 1, at + 1), ended(0, 1, began=at + 1, ended=at + 9)


def test_connections_refused_while_no_gateway_is_ready_after_a_kill_are_cut() -> None:
    assert verdict(*refused(130.0), struck=(KILLED,)) == {"lost": 1}
    assert verdict(*refused(130.0), struck=(KILLED,), without_gateway=((104.0, 129.0),)) == {"cut": 1}


@pytest.mark.parametrize(
    ("killed", "outages"),
    [
        (False, ((104.0, 131.0),)),
        (True, ((125.0, 131.0),)),
        (True, ((90.0, 131.0),)),
        (True, ((104.0, 112.0), (118.0, 131.0))),
        (True, ((115.0, 131.0),)),
    ],
    ids=[
        "one that a deletion began",
        "one long after the kill",
        "one that began before the kill",
        "a second one after that of the kill",
        "one within the time in which nodes still route to the dead one",
    ],
)
def test_an_outage_that_the_kill_did_not_begin_excuses_nothing(
    killed: bool, outages: tuple[tuple[float, float], ...]
) -> None:
    struck = Struck(105.0, 106.0, "gateway", "g-1", killed=killed)
    assert verdict(*refused(130.0), struck=(struck,), without_gateway=outages) == {"lost": 1}


def test_a_stream_that_breaks_long_after_a_kill_is_lost_unless_paced() -> None:
    late = broken(0, began=104.0, ended=160.0)
    again = (sent(0, 1, 161.0), ended(0, 1, began=161.0, ended=170.0))
    assert verdict(sent(0), late, *again, struck=(KILLED,)) == {"lost": 1}
    assert verdict(sent(0), late | {"kind": "long"}, *again, struck=(KILLED,)) == {"cut": 1}


@pytest.mark.parametrize(
    ("began", "ended_at"),
    [(104.0, 167.0), (107.0, 112.0)],
    ids=["later than what was sent can be read", "begun after the kill"],
)
def test_a_paced_stream_that_the_kill_cannot_have_broken_is_lost(began: float, ended_at: float) -> None:
    first = broken(0, began=began, ended=ended_at) | {"kind": "long"}
    again = (sent(0, 1, 170.0), ended(0, 1, began=170.0, ended=180.0))
    assert verdict(sent(0), first, *again, struck=(KILLED,)) == {"lost": 1}


@pytest.mark.parametrize("deleted", ["g-1", "g-2"], ids=["the killed gateway", "another gateway"])
@pytest.mark.parametrize(
    ("gateway", "found"), [("g-1", {"cut": 1}), ("g-2", {"lost": 1})], ids=["killed", "not killed"]
)
def test_a_deletion_after_a_kill_changes_nothing_about_whose_streams_may_break(
    deleted: str, gateway: str, found: dict[str, int]
) -> None:
    first = broken(0, began=104.0, ended=160.0, gateway=gateway) | {"kind": "long"}
    again = (sent(0, 1, 170.0), ended(0, 1, began=170.0, ended=180.0))
    deletion = Struck(109.0, 109.0, "gateway", deleted, killed=False)
    assert verdict(sent(0), first, *again, struck=(KILLED, deletion)) == found


@pytest.mark.parametrize(("began", "found"), [(104.0, {"cut": 1}), (111.0, {"lost": 1})])
def test_a_stream_without_tokens_from_the_restarted_container_is_lost(
    began: float, found: dict[str, int]
) -> None:
    first = broken(0, began=began, ended=116.0, tokens=[], gateway="g-1")
    again = (sent(0, 1, 117.0), ended(0, 1, began=117.0, ended=126.0))
    deletion = Struck(113.0, 113.0, "gateway", "g-1", killed=False)
    assert verdict(sent(0), first, *again, struck=(KILLED, deletion)) == found


@pytest.mark.parametrize(
    ("deleted_at", "component", "found"),
    [
        (113.0, "gateway", {"lost": 1}),
        (110.0, "gateway", {"cut": 1}),
        (117.0, "gateway", {"cut": 1}),
        (113.0, "decode", {"cut": 1}),
    ],
)
def test_a_request_without_headers_is_lost_where_a_gateway_was_deleted_meanwhile(
    deleted_at: float, component: str, found: dict[str, int]
) -> None:
    first = broken(0, began=111.0, ended=116.0, tokens=[], gateway="")
    again = (sent(0, 1, 117.0), ended(0, 1, began=117.0, ended=126.0))
    deletion = Struck(deleted_at, deleted_at, component, "g-2", killed=False)
    assert verdict(sent(0), first, *again, struck=(KILLED, deletion)) == found


@pytest.mark.parametrize("tokens", [RIGHT[:2], []], ids=["a stream", "a stream before its first token"])
@pytest.mark.parametrize(
    ("gateway", "ended_at", "found"),
    [("g-1", 225.0, {"cut": 1}), ("g-1", 227.0, {"lost": 1}), ("g-2", 170.0, {"lost": 1})],
    ids=["killed", "silent since long after the kill", "not killed"],
)
def test_a_silent_paced_stream_is_lost_unless_its_gateway_was_killed(
    tokens: list[int], gateway: str, ended_at: float, found: dict[str, int]
) -> None:
    silent = broken(0, began=104.0, ended=ended_at, tokens=tokens, gateway=gateway, silent=True)
    again = (sent(0, 1, 230.0), ended(0, 1, began=230.0, ended=240.0))
    assert verdict(sent(0), silent | {"kind": "long"}, *again, struck=(KILLED,)) == found


@pytest.mark.parametrize(("deleted", "found"), [("g-1", {"cut": 1}), ("g-2", {"lost": 1})])
def test_silence_without_a_head_blames_the_kill_unless_another_gateway_was_deleted(
    deleted: str, found: dict[str, int]
) -> None:
    silent = broken(0, began=104.0, ended=170.0, tokens=[], gateway="", silent=True) | {"kind": "long"}
    again = (sent(0, 1, 172.0), ended(0, 1, began=172.0, ended=180.0))
    deletion = Struck(120.0, 120.0, "gateway", deleted, killed=False)
    assert verdict(sent(0), silent, *again, struck=(KILLED, deletion)) == found


def test_a_timeout_is_not_excused_by_a_killed_gateway() -> None:
    lines = (sent(0), broken(0, broken=False), sent(0, 1), ended(0, 1))
    assert verdict(*lines, struck=(KILLED,)) == {"lost": 1}


def test_wrong_tokens_before_a_cut_are_wrong() -> None:
    lines = (sent(0), broken(0, tokens=[5, 8]), sent(0, 1), ended(0, 1))
    assert verdict(*lines, struck=(KILLED,)) == {"wrong": 1}


def test_requests_in_flight_are_counted_at_each_moment() -> None:
    assert in_flight([ended(0), ended(1, began=105.0, ended=120.0), sent(2)], [99.0, 107.0, 115.0]) == [
        0,
        2,
        1,
    ]


def test_a_log_that_ends_within_a_line_is_read_up_to_it() -> None:
    assert parse(json.dumps(sent(0)) + "\n" + '{"questi') == [sent(0)]
    with pytest.raises(json.JSONDecodeError):
        parse('{"questi\n' + json.dumps(sent(0)))
