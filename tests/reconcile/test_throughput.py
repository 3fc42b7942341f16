"""What one replica does, measured once: it stands in the status, and an operator that starts anew decides with it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from mmd_api.status import LARGEST_MILLI, PoolThroughput
from mmd_operator.explain import lines

from .answering_pods import Words, scaling, spec, status, tick


def test_measured_throughput_is_in_the_status_and_in_the_message():
    words = Words(
        encoder={"encode_work_per_second": {"video": 60000.0, "image": 1.5}, "encode_busy_fraction": 0.1},
        prefill={"prefill_tokens_per_second": 1200.0},
    )
    made = scaling(words)
    tick(made, 0, spec())
    found = status(made)
    kept = found["pools"]["encoder"]["throughput"]
    assert (kept["videoMilli"], kept["imageMilli"]) == (60_000_000, 1500)
    assert "audioMilli" not in kept
    assert found["pools"]["prefill"]["throughput"]["tokensMilli"] == 1_200_000
    assert "throughput" not in found["pools"]["decode"]
    said = "\n".join(lines(found))
    assert "one replica processes 2 image work/s, 60,000 video work/s" in said
    assert "one replica processes 1,200 tokens/s" in said


def test_a_restarted_operator_uses_it_until_a_fresh_load_arrives():
    deployment = spec()
    before = scaling(Words(encoder={"encode_work_per_second": {"video": 100.0}}))
    tick(before, 0, deployment)

    words = Words()  # pods that have measured nothing since
    words.queued = 700.0
    anew = scaling(words)
    anew.remember(status(before))
    tick(anew, 10, deployment)
    decision = anew.decisions["encoder"]
    assert decision.signal is not None
    assert decision.signal.seconds == pytest.approx(7.0)
    assert not any("throughput" in what for what in decision.missing)
    assert status(anew)["pools"]["encoder"]["throughput"] == status(before)["pools"]["encoder"]["throughput"]

    words.loads["encoder"] = {"encode_work_per_second": {"video": 350.0}}
    tick(anew, 12, deployment)
    signal = anew.decisions["encoder"].signal
    assert signal is not None
    assert signal.seconds == pytest.approx(2.0)
    assert status(anew)["pools"]["encoder"]["throughput"]["videoMilli"] == 350_000

    words = Words()
    words.queued = 700.0
    unknown = scaling(words)
    tick(unknown, 10, deployment)
    assert "no throughput measured for video" in unknown.decisions["encoder"].missing


def test_small_changes_are_not_written_and_large_ones_are():
    words = Words(encoder={"encode_work_per_second": {"video": 100.0}})
    made, deployment = scaling(words), spec()
    tick(made, 0, deployment)
    first = made.report.throughput["encoder"]
    words.loads["encoder"] = {"encode_work_per_second": {"video": 109.0, "made up": 5.0}}
    assert not tick(made, 2, deployment)
    assert made.report.throughput["encoder"] == first
    words.loads["encoder"] = {"encode_work_per_second": {"video": 111.0}}
    assert tick(made, 4, deployment)
    assert made.report.throughput["encoder"].rates == {"video": 111.0}


def test_a_rate_that_cannot_be_written_is_cut_to_what_can():
    assert PoolThroughput.of({"video": 1e15, "tokens": 1e-5}, datetime.now(UTC)).rates == {
        "video": LARGEST_MILLI / 1000
    }


def test_status_from_a_newer_release_is_dropped_and_the_rest_restored():
    before = scaling(Words(encoder={"encode_work_per_second": {"video": 100.0}}))
    tick(before, 0, spec())
    written = status(before)
    newer = written["pools"]["encoder"]
    newer["lastDecision"] = {"futureField": 1}
    newer["lastChange"] = newer["lastDecision"]
    written["pools"]["prefill"]["throughput"] = {"futureMilli": 1}
    anew = scaling(Words())
    anew.remember(written)
    assert anew.report.throughput.keys() == {"encoder"}
    assert not anew.report.decisions
    assert not anew.report.changes
