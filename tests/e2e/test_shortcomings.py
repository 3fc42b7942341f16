"""What a failed storm prints: a log's tail must name the cause, not tokens."""

from __future__ import annotations

import json
from typing import Any

from e2e.judge import longest_after
from e2e.storm import STORM, Watch, shortcomings, weaknesses

FAULT = {"began": 100.0, "component": "gateway", "pod": "g-1", "killed": True, "requests_in_flight": 3}
FAULT |= {"long_streams_in_flight": 2}
LONG = {
    "question": 7,
    "kind": "long",
    "phase": "calm",
    "attempt": 0,
    "began": 90.0,
    "ended": 103.5,
    "ends": 0,
}


def body(**changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"lost": 0, "duplicated": 0, "wrong": 0, "examples": [], "largest": STORM.largest}
    facts |= {"seconds_without_gateway": [], "faults_while_recovering": 3}
    facts |= {"longest_stream_after_gateways_were_replaced_seconds": 165.0}
    return facts | {"faults": [FAULT] * 12, "streams_of_minutes_seconds": [130.0, 140.0]} | changes


def test_a_storm_without_a_finding_has_no_shortcoming() -> None:
    assert shortcomings(body()) == []
    assert weaknesses(body()) == []


def test_a_weak_draw_of_faults_fails_nothing() -> None:
    weak = body(faults=[FAULT], faults_while_recovering=0, streams_of_minutes_seconds=[], largest={})
    assert shortcomings(weak) == []
    assert len(weaknesses(weak)) == 5


def test_a_storm_without_a_fault_that_met_a_request_is_none() -> None:
    assert shortcomings(body(faults=[FAULT | {"requests_in_flight": 0}])) == [
        "there was no storm: no fault struck while requests were in flight"
    ]


def test_a_lost_stream_is_one_short_line_with_error_and_fault() -> None:
    example = LONG | {"error": "APIError: overloaded", "tokens": [381] * 2000, "text": "x" * 9000}
    count, line = shortcomings(body(lost=1, examples=[example | {"expected": [381] * 3900}]))
    assert count == "1 requests lost"
    assert line.startswith("APIError: overloaded: ")
    assert "gateway g-1 killed 3.5 s before the end" in line
    assert len(line) < 400


def test_an_incomplete_log_and_a_wrong_token_are_named() -> None:
    wrong = LONG | {"error": "", "tokens": [1], "difference": "wrong token: 1 tokens, 2 expected"}
    found = shortcomings(body(lost=1, wrong=1, examples=[{"error": "the log is incomplete"}, wrong]))
    assert [line.split(": ")[0] for line in found[2:]] == ["the log is incomplete", "wrong token"]


def test_gateways_are_missing_between_two_looks_that_find_one() -> None:
    watch = Watch(weather=STORM, kubectl=lambda *_: "", began=0.0)
    watch.gateways = [(2.0, 2), (4.0, 0), (6.0, 0), (8.0, 1), (10.0, 0)]
    assert watch.without_gateway() == [(2.0, 8.0)]


def test_a_stream_without_a_finish_reason_is_named_as_one() -> None:
    (_, line) = shortcomings(body(lost=1, examples=[LONG | {"error": "", "tokens": []}]))
    assert line.startswith("ended without a finish reason")


def test_a_minute_without_a_gateway_is_a_weakness() -> None:
    assert weaknesses(body(seconds_without_gateway=[4.0, 60.0])) == []
    assert weaknesses(body(seconds_without_gateway=[4.0, 61.0])) == ["no gateway was Ready for 61 s"]


def test_twelve_faults_must_meet_requests_and_twelve_must_meet_a_long_stream() -> None:
    idle, short = (
        FAULT | {"requests_in_flight": 0, "long_streams_in_flight": 0},
        FAULT | {"long_streams_in_flight": 0},
    )
    assert weaknesses(body(faults=[FAULT] * 12 + [idle])) == []
    assert weaknesses(body(faults=[FAULT] * 12 + [short])) == []
    assert weaknesses(body(faults=[FAULT] * 11 + [short])) == [
        "11 faults struck while a stream of minutes was under way, not 12"
    ]
    found = weaknesses(body(faults=[FAULT] * 11 + [idle] * 4))
    assert found[0] == "11 faults struck while requests were in flight, not 12"


def test_a_fault_must_strike_while_pods_recover_from_another() -> None:
    assert weaknesses(body(faults_while_recovering=1)) == []
    assert weaknesses(body(faults_while_recovering=0)) == [
        "no fault struck while pods recovered from another"
    ]


def test_gateways_and_nats_count_as_recovering() -> None:
    def item(kind: str, component: str, ready: int) -> dict[str, Any]:
        labels = {"app.kubernetes.io/component": component}
        return {
            "kind": kind,
            "metadata": {"labels": labels},
            "spec": {"replicas": 2},
            "status": {"readyReplicas": ready},
        }

    found = [
        item("Deployment", "gateway", 1),
        item("StatefulSet", "nats", 0),
        item("StatefulSet", "decode", 2),
    ]
    watch = Watch(weather=STORM, kubectl=lambda *_: json.dumps({"items": found}))
    assert watch.look()["decode"] == [2, 2]
    assert watch.recovering == ["gateway", "nats"]


def test_a_stream_must_go_on_for_minutes_after_its_gateway_was_replaced() -> None:
    (line,) = weaknesses(body(longest_stream_after_gateways_were_replaced_seconds=119.0))
    assert "119.0 s" in line
    answers = [{"began": 0.0, "ended": 195.0}, {"began": 21.0, "ended": 400.0}, {"began": 0.0, "ended": 19.0}]
    assert longest_after(answers, 20.0) == 175.0
    assert longest_after(answers, 500.0) == 0.0
