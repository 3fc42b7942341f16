"""Reports of pods, checked on arrival; and the actions from a pool as it stands to the size that was decided."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from mmd_api.contract.load import PodLoad, WorkerStatus
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

RULES = PoolPolicy("encoder", ("encode",), gpus=0, min_replicas=0, max_replicas=8)
NOW = 1000.0


def answer(**changes: Any) -> bytes:
    body = {"pod": "e-0", "revision": "r", "state": "ready", "load": {"encode_busy_fraction": 0.5}, **changes}
    return json.dumps(body).encode()


def test_unknown_fields_of_a_valid_report_are_ignored():
    report = worker_report(
        answer(of_a_newer_version=[1, 2], load={"encode_queued_work": {"video": 7}, "novel": 1}), "e-0", "r"
    )
    assert report.state == "ready"
    assert report.load.encode_queued_work == {"video": 7}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "invalid report"),
        (b"[]", "invalid report"),
        (b"\xff\xfe", "invalid report"),
        (answer(state="asleep"), "state"),
        (answer(load={"decode_running": "many"}), "load.decode_running"),
        (answer(pod="e-1"), "identifies itself as pod e-1"),
        (answer(revision="old"), "revision old"),
        (answer(load={"decode_running": -1}), "invalid load report"),
        (
            b'{"pod": "e-0", "revision": "r", "state": "ready", "load": {"itl_seconds": NaN}}',
            "invalid load report",
        ),
        (
            answer(load={"kv_blocks_total": 1, "kv_blocks_free": 2}),
            "kv_blocks_free is 2, more than kv_blocks_total 1",
        ),
        (answer(padding="x" * 300_000), "more than"),
        (answer(pod="x" * 100_000), "pod"),
        (answer(load={"encode_work_per_second": {"smell": 1.0}}), "encode_work_per_second.smell"),
        (answer(load={"encode_queued_work": {"x" * 100_000: 1}}), "encode_queued_work.xxx"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_what_is_not_this_pods_report_is_refused_by_name(body: bytes, words: str):
    with pytest.raises(ReportError) as refused:
        worker_report(body, "e-0", "r")
    assert "e-0" in str(refused.value)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"ttft": {"window_seconds": 30.0, "requests": 1, "seconds": math.inf}}, "ttft.seconds"),
        ({"ttft": {"window_seconds": 30.0, "requests": 1, "seconds": math.nan}}, "ttft.seconds"),
        ({"ttft": {"window_seconds": -1.0, "requests": 1, "seconds": 0.1}}, "ttft.window_seconds"),
        ({"queue": {"age_seconds": math.inf, "waiting_work": {}}}, "queue.age_seconds"),
        ({"queue": {"age_seconds": 0.1, "waiting_work": {"smell": 1.0}}}, "queue.waiting_work.smell"),
    ],
)
def test_a_gateways_report_with_impossible_numbers_is_refused_by_name(found: dict[str, Any], words: str):
    body = {**json.loads(gateway_answer()), **found}
    with pytest.raises(ReportError, match="invalid report") as refused:
        gateway_report(json.dumps(body).encode(), body["pod"], body["revision"])
    assert words in str(refused.value)


def gateway_answer(work: dict[str, float] | None = None, held: int = 0) -> bytes:
    queue = None if work is None else {"age_seconds": 0.2, "waiting_work": work}
    ttft = {"window_seconds": 30.0, "requests": 4, "seconds": 0.4}
    return json.dumps(
        {"pod": "g-0", "revision": "r", "held": {"encode": held}, "queue": queue, "ttft": ttft}
    ).encode()


def scaler() -> Scaler:
    made = Scaler(DeploymentPolicy({"encoder": RULES}))
    made.record_gateway_report("g-0", NOW, gateway_report(gateway_answer({}), "g-0", "r"))
    return made


def pool(replicas: int, **asked_at: float) -> PoolFacts:
    """A pool of so many ready pods; `e1=990.0`: that one was asked to drain then."""
    pods = tuple(
        PodFacts(
            f"e-{n}",
            n,
            0.0,
            ready=True,
            drain_requested=f"e{n}" in asked_at,
            drain_requested_at=asked_at.get(f"e{n}"),
        )
        for n in range(replicas)
    )
    return PoolFacts(replicas, pods, drain_seconds=60.0)


def reporting(made: Scaler, **states: str) -> Scaler:
    for pod, state in states.items():
        report = WorkerStatus(pod=pod, revision="r", state=state, load=PodLoad())
        made.record_report(pod.replace("e", "e-"), NOW, report)
    return made


def decided(current: int, replicas: int, act: bool = True) -> Decision:
    return Decision(
        pool="encoder", at=NOW, spec_replicas=current, current=current, ready=current, wanted=replicas,
        replicas=replicas, reason="LoadFell", effects=(), valid=True, act=act, minimum=0, signal=None,
        signals=(), missing=(), panicking=False, idle=False, foreign_replicas=None, history=History(),
    )  # fmt: skip


def test_the_last_pods_drain_first_and_the_size_waits_for_them():
    actions = reporting(scaler(), e0="ready", e1="ready", e2="ready").actions(NOW, decided(3, 1), pool(3))
    assert actions.drain == ("e-1", "e-2")
    assert actions.replicas is None


def test_the_size_follows_the_pods_that_are_empty_from_the_end():
    made = reporting(scaler(), e0="ready", e1="draining", e2="drained")
    actions = made.actions(NOW, decided(3, 1), pool(3, e1=990.0, e2=990.0))
    assert (actions.replicas, actions.drain) == (2, ())


def test_an_empty_pod_in_the_middle_waits_for_the_one_after_it():
    made = reporting(scaler(), e0="ready", e1="drained", e2="draining")
    assert made.actions(NOW, decided(3, 1), pool(3, e1=990.0, e2=990.0)).replicas is None


def test_pods_that_never_took_work_go_at_once():
    facts = PoolFacts(
        3,
        (
            *pool(1).pods,
            PodFacts("e-1", 1, NOW),
            PodFacts("e-2", 2, NOW, unschedulable=True, waiting_since=NOW),
        ),
    )
    assert reporting(scaler(), e0="ready").actions(NOW, decided(3, 1), facts).replicas == 1


def test_a_pod_that_does_not_become_empty_goes_at_its_deadline():
    made = reporting(scaler(), e0="ready", e1="draining")
    assert made.actions(NOW, decided(2, 1), pool(2, e1=NOW - 59)).replicas is None
    actions = made.actions(NOW, decided(2, 1), pool(2, e1=NOW - 61))
    assert (actions.replicas, actions.overdue) == (1, ("e-1",))


def test_an_overdue_pod_stays_while_a_later_pod_drains():
    made = reporting(scaler(), e0="ready", e1="draining", e2="draining")
    actions = made.actions(NOW, decided(3, 1), pool(3, e1=NOW - 61, e2=NOW - 10))
    assert (actions.replicas, actions.overdue) == (None, ())


def test_pods_of_dead_nodes_do_not_keep_drained_pods_before_them():
    """Their StatefulSet removes them as soon as their nodes are back or deleted."""
    made = reporting(scaler(), e0="ready", e1="drained", e2="drained", e3="ready")
    facts = pool(4, e1=NOW - 50, e2=NOW - 50)
    leaving = replace(facts.pods[3], deleting=True)
    assert made.actions(NOW, decided(4, 1), replace(facts, pods=(*facts.pods[:3], leaving))).replicas is None
    lost = replace(leaving, lost=True)
    assert made.actions(NOW, decided(4, 1), replace(facts, pods=(*facts.pods[:3], lost))).replicas == 1


def test_a_report_of_an_earlier_pod_of_the_name_counts_nothing():
    """It may have been drained; its successor takes work, and is drained before it leaves."""
    made = reporting(scaler(), e0="ready", e1="drained")
    facts = pool(2)
    successor = replace(facts.pods[1], created_at=NOW + 1)
    actions = made.actions(NOW + 2, decided(2, 1), replace(facts, pods=(facts.pods[0], successor)))
    assert (actions.drain, actions.replicas) == (("e-1",), None)


def test_the_newest_gateway_queue_counts_and_the_oldest_report_dates_it():
    made = scaler()
    for gateway, at, work in (("g-0", NOW - 1.0, {"video": 1.0}), ("g-1", NOW, {"video": 7.0})):
        body = {**json.loads(gateway_answer(work)), "pod": gateway}
        made.record_gateway_report(gateway, at, gateway_report(json.dumps(body).encode(), gateway, "r"))
    demand = made._demand(NOW, RULES, frozenset({"g-0", "g-1"}))
    assert demand is not None
    assert (demand.received_at, demand.encode_work) == (NOW - 1.0, {"video": 7.0})


def test_what_waits_at_gateways_is_demand_of_the_pool_that_lacks_room():
    made, body = scaler(), json.loads(gateway_answer({"video": 7.0}))
    for number in range(2):
        waiting = {"encode_work": {"video": 100.0, "image": 3.0}, "prompt_tokens": 50, "sequences": 4}
        pod = f"g-{number}"
        answered = json.dumps({**body, "pod": pod, "waiting": waiting}).encode()
        made.record_gateway_report(pod, NOW, gateway_report(answered, pod, "r"))
    gateways = frozenset({"g-0", "g-1"})
    encode, prefill, decode = (
        made._demand(NOW, replace(RULES, roles=(role,)), gateways) for role in ("encode", "prefill", "decode")
    )
    assert encode is not None
    assert encode.encode_work == {"video": 207.0, "image": 6.0}
    assert (encode.prompt_tokens, encode.sequences) == (0, 0)
    assert prefill is not None
    assert (prefill.prompt_tokens, prefill.sequences, prefill.encode_work) == (100, 0, {})
    assert decode is not None
    assert (decode.prompt_tokens, decode.sequences, decode.encode_work) == (0, 8, {})


def test_a_wanted_drained_pod_is_renewed_and_a_draining_one_is_not():
    made = reporting(scaler(), e0="ready", e1="drained", e2="draining")
    actions = made.actions(NOW, decided(3, 4), pool(3, e1=990.0, e2=990.0))
    assert actions.renew == ("e-1",)
    assert (actions.replicas, actions.drain) == (4, ())


def test_a_pod_that_was_drained_before_shadow_mode_is_renewed():
    made = reporting(scaler(), e0="ready", e1="drained", e2="draining")
    actions = made.actions(NOW, decided(3, 1, act=False), pool(3, e1=990.0, e2=990.0))
    assert (actions.drain, actions.replicas, actions.renew) == ((), None, ("e-1",))


def test_shadow_moves_nothing():
    made = reporting(scaler(), e0="ready", e1="ready")
    actions = made.actions(NOW, decided(2, 1, act=False), pool(2))
    assert (actions.drain, actions.replicas, actions.renew) == ((), None, ())


@pytest.mark.parametrize(
    ("absent", "size"),
    [((), 3), ((0,), 4), ((3,), 3), ((0, 3), 3)],
)
def test_a_pool_that_shrinks_keeps_the_pods_it_needs_beside_those_without_a_node(
    absent: tuple[int, ...], size: int
):
    """Four pods with the work of two and a half: the last one may go, unless too few of the others are on nodes."""
    rules = replace(
        RULES, scale_down_stabilization_seconds=0, scale_down_cooldown_seconds=0, panic_window_seconds=0,
        pool="decode", roles=("decode",), min_replicas=1, target_utilization=0.7,
    )  # fmt: skip
    made = Scaler(DeploymentPolicy({"decode": rules}))
    made.record_gateway_report("g-0", NOW, gateway_report(gateway_answer({}), "g-0", "r"))
    facts = pool(4)
    pods = tuple(
        replace(one, ready=False, unschedulable=True, waiting_since=0.0) if one.ordinal in absent else one
        for one in facts.pods
    )
    running = 132 // (4 - len(absent))
    for one in pods:
        if one.ready:
            load = PodLoad(
                decode_running=running, decode_max_sequences=64, kv_blocks_total=10, kv_blocks_free=10
            )
            made.record_report(
                one.name, NOW, WorkerStatus(pod=one.name, revision="r", state="ready", load=load)
            )
    decision = made.tick(NOW, {"decode": replace(facts, pods=pods)}, frozenset({"g-0"})).decisions["decode"]
    assert decision.wanted == 3
    assert decision.replicas == size
    if absent == (0,):
        assert decision.limited_by == "Unschedulable"


@pytest.mark.parametrize("last_seen", [None, NOW - 60.0])
def test_a_silent_gateway_keeps_no_pool_from_waking(last_seen: float | None):
    """Its report may be missing from the start, or may have become old."""
    made = scaler()
    made.record_gateway_report("g-0", NOW, gateway_report(gateway_answer({"video": 5.0}), "g-0", "r"))
    if last_seen is not None:
        body = json.dumps({**json.loads(gateway_answer({})), "pod": "g-1"}).encode()
        made.record_gateway_report("g-1", last_seen, gateway_report(body, "g-1", "r"))
    decision = made.tick(NOW, {"encoder": PoolFacts(0)}, frozenset({"g-0", "g-1"})).decisions["encoder"]
    assert (decision.replicas, decision.reason, decision.valid) == (1, "Woken", False)
    assert "no report from gateway g-1" in str(decision)


def test_requests_that_one_gateway_holds_wake_a_pool_while_another_is_silent():
    made = Scaler(DeploymentPolicy({"decode": replace(RULES, pool="decode", roles=("decode",))}))
    body = json.dumps({**json.loads(gateway_answer({})), "held": {"decode": 5}}).encode()
    made.record_gateway_report("g-0", NOW, gateway_report(body, "g-0", "r"))
    decision = made.tick(NOW, {"decode": PoolFacts(0)}, frozenset({"g-0", "g-1"})).decisions["decode"]
    assert (decision.replicas, decision.reason) == (1, "Woken")


def test_a_gateway_without_a_queue_report_keeps_the_pool_size():
    cases = (
        (frozenset({"g-0", "g-1"}), {}, "no report from gateway g-1"),
        (frozenset({"g-0"}), None, "no queue report"),
        (frozenset(), {}, "no queue report"),
    )
    for gateways, work, words in cases:
        made = scaler()
        made.record_gateway_report("g-0", NOW, gateway_report(gateway_answer(work), "g-0", "r"))
        reporting(made, e0="ready", e1="ready")
        decision = made.tick(NOW, {"encoder": pool(2)}, gateways).decisions["encoder"]
        assert not decision.valid
        assert decision.replicas == 2
        assert words in str(decision)


def test_a_queue_report_that_is_late_is_named_with_its_age():
    made = reporting(scaler(), e0="ready")
    later = NOW + 5.0
    made.record_report("e-0", later, WorkerStatus(pod="e-0", revision="r", state="ready", load=PodLoad()))
    decision = made.tick(later, {"encoder": pool(1)}, frozenset({"g-0"})).decisions["encoder"]
    assert "no queue report for 5.0 s" in str(decision)


def test_work_that_is_only_in_the_queue_wakes_a_pool_at_zero():
    made = scaler()
    made.record_gateway_report("g-0", NOW, gateway_report(gateway_answer({"video": 5.0}), "g-0", "r"))
    decision = made.tick(NOW, {"encoder": PoolFacts(0)}, frozenset({"g-0"})).decisions["encoder"]
    assert (decision.replicas, decision.reason) == (1, "Woken")


def test_what_is_remembered_is_bounded_by_the_pods_that_exist():
    made = scaler()
    for number in range(500):
        made.record_report(
            f"e-{number}", NOW, WorkerStatus(pod=f"e-{number}", revision="r", state="ready", load=PodLoad())
        )
    made.tick(NOW, {"encoder": pool(2)}, frozenset({"g-0"}))
    assert len(made._workers) == 2


def test_capacity_is_what_can_be_expected_to_serve():
    assert decided(3, 2).capacity == 2
    assert decided(3, 2, act=False).capacity == 3
    assert replace(decided(3, 2), unplaced=1, stuck=1).capacity == 0
    assert replace(decided(3, 2), unplaced=2, stuck=1).capacity == 0
