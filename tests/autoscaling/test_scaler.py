"""What pods say, read with suspicion; and the moves from a pool as it stands to the size that was decided."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmd_operator.autoscaling import (
    Decision,
    DeploymentPolicy,
    History,
    PodFacts,
    PoolFacts,
    PoolPolicy,
    ReportError,
    Scaler,
    gateway_report,
    worker_report,
)
from mmd_operator.autoscaling.reports import WorkerReport
from mmd_operator.autoscaling.types import PodLoad

RULES = PoolPolicy("encoder", ("encode",), gpus=0, min_replicas=0, max_replicas=8)
NOW = 1000.0


def answer(**changes: Any) -> bytes:
    body = {"pod": "e-0", "revision": "r", "state": "ready", "load": {"encode_busy_fraction": 0.5}, **changes}
    return json.dumps(body).encode()


def test_a_true_report_is_read_and_what_is_new_in_it_is_left_out():
    report = worker_report(
        answer(of_a_newer_version=[1, 2], load={"encode_queued_work": {"video": 7}, "novel": 1}), "e-0", "r"
    )
    assert report.state == "ready"
    assert report.load.encode_queued_work == {"video": 7}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "garbage"),
        (b"[]", "garbage"),
        (b"\xff\xfe", "garbage"),
        (answer(state="asleep"), "state"),
        (answer(load={"decode_running": "many"}), "load.decode_running"),
        (answer(pod="e-1"), "answers as pod e-1"),
        (answer(revision="old"), "revision old"),
        (answer(load={"decode_running": -1}), "cannot be"),
        (b'{"pod": "e-0", "revision": "r", "state": "ready", "load": {"itl_seconds": NaN}}', "cannot be"),
        (answer(load={"kv_blocks_total": 1, "kv_blocks_free": 2}), "kv_blocks_free is 2 of 1"),
        (answer(padding="x" * 300_000), "more than"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_what_is_not_this_pods_report_is_refused_by_name(body: bytes, words: str):
    with pytest.raises(ReportError) as refused:
        worker_report(body, "e-0", "r")
    assert "e-0" in str(refused.value)
    assert words in str(refused.value)


def gateway_answer(work: dict[str, float] | None = None, held: int = 0) -> bytes:
    queue = None if work is None else {"age_seconds": 0.2, "waiting_work": work}
    ttft = {"window_seconds": 30.0, "requests": 4, "seconds": 0.4}
    return json.dumps(
        {"pod": "g-0", "revision": "r", "held": {"encode": held}, "queue": queue, "ttft": ttft}
    ).encode()


def scaler() -> Scaler:
    made = Scaler(DeploymentPolicy({"encoder": RULES}))
    made.gateway_heard("g-0", NOW, gateway_report(gateway_answer({}), "g-0", "r"))
    return made


def pool(replicas: int, **asked_at: float) -> PoolFacts:
    """A pool of so many ready pods; `e1=990.0`: that one was asked to drain then."""
    pods = tuple(
        PodFacts(f"e-{n}", n, 0.0, ready=True, asked=f"e{n}" in asked_at, asked_at=asked_at.get(f"e{n}"))
        for n in range(replicas)
    )
    return PoolFacts(replicas, pods, drain_seconds=60.0)


def heard(made: Scaler, **states: str) -> Scaler:
    for pod, state in states.items():
        report = WorkerReport(state, PodLoad())  # type: ignore[arg-type]
        made.heard(pod.replace("e", "e-"), NOW, report)
    return made


def decided(current: int, replicas: int, act: bool = True) -> Decision:
    return Decision(
        pool="encoder", at=NOW, spec_replicas=current, current=current, ready=current, wanted=replicas,
        replicas=replicas, reason="LoadFell", limited_by=None, valid=True, act=act, minimum=0, signal=None,
        signals=(), missing=(), panicking=False, idle=False, foreign_replicas=None, observed=History(),
    )  # fmt: skip


def test_the_last_pods_drain_first_and_the_size_waits_for_them():
    moves = heard(scaler(), e0="ready", e1="ready", e2="ready").moves(NOW, decided(3, 1), pool(3))
    assert moves.drain == ("e-1", "e-2")
    assert moves.replicas is None


def test_the_size_follows_the_pods_that_are_empty_from_the_end():
    made = heard(scaler(), e0="ready", e1="draining", e2="drained")
    moves = made.moves(NOW, decided(3, 1), pool(3, e1=990.0, e2=990.0))
    assert (moves.replicas, moves.drain) == (2, ())


def test_an_empty_pod_in_the_middle_waits_for_the_one_after_it():
    made = heard(scaler(), e0="ready", e1="drained", e2="draining")
    assert made.moves(NOW, decided(3, 1), pool(3, e1=990.0, e2=990.0)).replicas is None


def test_pods_that_never_took_work_go_at_once():
    facts = PoolFacts(
        3, (*pool(1).pods, PodFacts("e-1", 1, NOW), PodFacts("e-2", 2, NOW, unschedulable=True))
    )
    assert heard(scaler(), e0="ready").moves(NOW, decided(3, 1), facts).replicas == 1


def test_a_pod_that_does_not_become_empty_goes_at_its_deadline():
    made = heard(scaler(), e0="ready", e1="draining")
    assert made.moves(NOW, decided(2, 1), pool(2, e1=NOW - 59)).replicas is None
    moves = made.moves(NOW, decided(2, 1), pool(2, e1=NOW - 61))
    assert (moves.replicas, moves.overdue) == (1, ("e-1",))


def test_a_drained_pod_that_is_wanted_again_is_renewed_and_one_that_still_drains_is_left_to_it():
    made = heard(scaler(), e0="ready", e1="drained", e2="draining")
    moves = made.moves(NOW, decided(3, 4), pool(3, e1=990.0, e2=990.0))
    assert moves.renew == ("e-1",)
    assert (moves.replicas, moves.drain) == (4, ())


def test_shadow_moves_nothing():
    made = heard(scaler(), e0="ready", e1="ready")
    moves = made.moves(NOW, decided(2, 1, act=False), pool(2))
    assert (moves.drain, moves.replicas, moves.renew) == ((), None, ())


def test_a_gateway_that_is_silent_or_cannot_read_its_queue_keeps_the_pool_as_it_is():
    for gateways, work in ((frozenset({"g-0", "g-1"}), {}), (frozenset({"g-0"}), None), (frozenset(), {})):
        made = scaler()
        made.gateway_heard("g-0", NOW, gateway_report(gateway_answer(work), "g-0", "r"))
        heard(made, e0="ready", e1="ready")
        decision = made.tick(NOW, {"encoder": pool(2)}, gateways).decisions["encoder"]
        assert not decision.valid
        assert decision.replicas == 2
        assert "the queue before the pool" in str(decision)


def test_work_that_only_the_queue_knows_wakes_a_pool_at_zero():
    made = scaler()
    made.gateway_heard("g-0", NOW, gateway_report(gateway_answer({"video": 5.0}), "g-0", "r"))
    decision = made.tick(NOW, {"encoder": PoolFacts(0)}, frozenset({"g-0"})).decisions["encoder"]
    assert (decision.replicas, decision.reason) == (1, "Woken")


def test_what_is_remembered_is_bounded_by_the_pods_that_exist():
    made = scaler()
    for number in range(500):
        made.heard(f"e-{number}", NOW, WorkerReport("ready", PodLoad()))
    made.tick(NOW, {"encoder": pool(2)}, frozenset({"g-0"}))
    assert len(made._workers) == 2
