"""The phase that a request is in while it is answered."""

from __future__ import annotations

import pytest

from mmd_workers.gateway.placement.timeline import Attempt, Timeline
from mmd_workers.wire.messages.message_parts import Phase


def attempt(sequence: int = 0, number: int = 0, **more: object) -> Attempt:
    decode_pods = list(more.pop("decode_pods", ["decode-0"]))  # type: ignore[call-overload]
    return Attempt(sequence, number, "prefill-0", decode_pods, 1.0, **more)  # type: ignore[arg-type]


PREFILLED = {"ttft_seconds": 0.1}


@pytest.mark.parametrize(
    ("attempts", "moved", "phase"),
    [
        pytest.param([], [], "placement", id="not placed"),
        pytest.param([attempt()], [], "prefill", id="placed"),
        pytest.param([attempt(**PREFILLED)], [], "kv_transfer", id="it has its first token"),
        pytest.param([attempt(**PREFILLED)], [(0, 0)], "decode", id="and its KV has moved"),
        pytest.param(
            [attempt(**PREFILLED, decode_pods=[])], [], "decode", id="it decodes where it prefilled"
        ),
        pytest.param([attempt(**PREFILLED, lost="gone")], [(0, 0)], "placement", id="its pod is lost"),
        pytest.param(
            [attempt(**PREFILLED, lost="gone"), attempt(number=1)], [(0, 0)], "prefill", id="placed again"
        ),
        pytest.param(
            [attempt(**PREFILLED, lost="gone"), attempt(number=1, **PREFILLED)],
            [(0, 0)],
            "kv_transfer",
            id="the KV of the first attempt had moved",
        ),
        pytest.param([attempt(**PREFILLED, ended=2.0)], [(0, 0)], "generate", id="it has its last token"),
        pytest.param(
            [attempt(**PREFILLED, ended=2.0), attempt(sequence=1)], [(0, 0)], "prefill", id="the last of two"
        ),
    ],
)
def test_a_request_is_in_the_phase_of_its_slowest_sequence(
    attempts: list[Attempt], moved: list[tuple[int, int]], phase: str
) -> None:
    timeline = Timeline("one", arrived=0.5, attempts=attempts, at_gateway="placement")
    for sequence, number in moved:
        timeline.add("decode-0", [Phase("kv_transfer", 1.0, 1.1)], sequence, number)
    assert timeline.live_phase() == timeline.summary()["phase"] == timeline.to_json()["phase"] == phase
    timeline.end(3.0)
    assert timeline.live_phase() == ""


def test_gateway_time_after_the_last_token_is_its_own_phase() -> None:
    timeline = Timeline("one", arrived=0.5, last_token=2.0)
    timeline.end(2.25)
    assert timeline.to_json()["phases"] == [
        {
            "pod": "gateway",
            "sequence": 0,
            "attempt": 0,
            "name": "generate",
            "start": 2.0,
            "end": 2.25,
            "detail": {},
        }
    ]
    failed = Timeline("other", arrived=0.5)
    failed.end(2.25)
    assert failed.phases == []
