"""Each rule of one pool as a timeline, with the failures that other autoscalers are known for as test names."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mmd_api.contract.load import PodLoad
from mmd_operator.autoscaling import Demand, Latency, PodSample, PoolSamples, Window, decide

from .autoscaling_timeline import (
    DECODE,
    ENCODER,
    PREFILL,
    START,
    Pool,
    changes,
    decode_load,
    encode_load,
    prefill_load,
)


def shared(total: float, make=encode_load):
    """A pool-wide amount that its ready pods share."""
    return lambda now, ready: make(total / max(ready, 1))


# --- growth ---------------------------------------------------------------------------------------------------


def test_backlog_asks_for_as_many_pods_as_clear_it_within_the_target():
    pool = Pool(replace(ENCODER, max_scale_up=100.0), shared(4200.0))  # 4.2 s of one pod's work, target 1 s
    decision = pool.tick()
    assert (decision.wanted, decision.replicas, decision.reason) == (5, 5, "LoadRose")


def test_an_absolute_signal_is_not_multiplied_by_replicas():
    pool = Pool(ENCODER, shared(4200.0), start_seconds=120)
    assert max(pool.sizes(100)) == 5


def test_work_of_several_modalities_adds_up_in_seconds():
    load = PodLoad(
        encode_queued_work={"video": 3000.0, "audio": 500.0},
        encode_work_per_second={"video": 1000.0, "audio": 250.0},
    )
    assert Pool(ENCODER, lambda *_: load).tick().wanted == 5


def test_jobs_that_no_pod_holds_yet_count():
    pool = Pool(ENCODER, lambda *_: encode_load(), demand=lambda now: Demand(now, {"video": 6000.0}))
    assert pool.tick().wanted == 6


def test_prompts_that_wait_for_encoders_do_not_grow_prefill():
    behind_media = PodLoad(
        prefill_waiting_tokens=150_000.0, prefill_blocked_tokens=147_000.0, prefill_tokens_per_second=1000.0
    )
    assert Pool(PREFILL, lambda *_: behind_media).tick().wanted == 3
    encodes_too = replace(PREFILL, roles=("encode", "prefill"), max_replicas=1000)
    assert Pool(encodes_too, lambda *_: behind_media).tick().wanted == 150


def test_small_media_that_wait_for_the_towers_of_prefill_pods_grow_prefill():
    load = PodLoad(encode_queued_work={"image": 3000.0}, encode_work_per_second={"image": 1000.0})
    assert Pool(replace(PREFILL, encodes_small_media=True), lambda *_: load).tick().wanted == 3
    assert Pool(PREFILL, lambda *_: load).tick().wanted == 0


def test_a_pool_that_is_busy_without_a_backlog_grows():
    pool = Pool(ENCODER, lambda *_: encode_load(busy=0.99), replicas=3)
    decision = pool.tick()
    assert decision.wanted == 4
    assert decision.signal.metric == "BusyFraction"


def test_growth_is_limited_to_a_share_of_the_size_fifteen_seconds_ago():
    pool = Pool(replace(ENCODER, panic_window_seconds=0.0), shared(20_000.0))
    sizes = pool.sizes(60)
    assert sizes[0] == 2
    assert sizes[14] == 2
    assert 4 in sizes
    assert sizes.index(4) in range(15, 18)
    assert sizes[-1] == 16


def test_a_burst_panics_past_the_rate_limit():
    pool = Pool(ENCODER, shared(16_000.0))
    decisions = pool.run(8)
    assert decisions[-1].replicas == 16
    assert any(d.reason == "Panic" for d in decisions)


def test_one_spike_shorter_than_the_window_does_not_cause_panic():
    spike = lambda now, ready: encode_load(16_000.0 / ready if now - START in (10.0, 11.0) else 10.0)  # noqa: E731
    decisions = Pool(ENCODER, spike).run(40)
    assert not any(d.panicking for d in decisions)
    assert max(d.replicas for d in decisions) == 2


def test_panic_is_held():
    load = lambda now, ready: encode_load(16_000.0 / ready if now - START < 8 else 0.0)  # noqa: E731
    pool = Pool(replace(ENCODER, scale_down_stabilization_seconds=0.0, scale_down_cooldown_seconds=0.0), load)
    pool.run(8)
    held = pool.run(58)
    assert {d.replicas for d in held} == {16}
    assert held[-1].limited_by == "PanicHold"
    assert pool.run(30)[-1].replicas < 16


def test_scale_up_waits_for_its_stabilisation_window():
    pool = Pool(
        replace(ENCODER, scale_up_stabilization_seconds=20.0, panic_window_seconds=0.0), shared(1900.0)
    )
    sizes = pool.sizes(30)
    assert sizes[:20] == [1] * 20
    assert sizes[20] == 2


def test_scale_up_cools_down():
    policy = replace(ENCODER, scale_up_cooldown_seconds=30.0, panic_window_seconds=0.0)
    sizes = Pool(policy, shared(20_000.0)).sizes(62)
    assert changes(sizes) == 2
    assert sizes[0] == 2


def test_bounds_win_over_everything():
    pool = Pool(replace(ENCODER, max_replicas=3), shared(1e9))
    assert max(pool.sizes(60)) == 3
    above = Pool(replace(ENCODER, max_replicas=3), shared(1e9), replicas=7, silent=7)
    assert (above.tick().replicas, above.run(1)[0].replicas) == (3, 3)
    below = Pool(replace(ENCODER, min_replicas=4), shared(0.0), replicas=1, silent=1)
    assert below.tick().replicas == 4


def test_a_fixed_pool_stays_as_it_is():
    fixed = replace(ENCODER, min_replicas=2, max_replicas=2)
    assert set(Pool(fixed, shared(1e9), replicas=2).sizes(60)) == {2}


# --- pods that do not serve yet -------------------------------------------------------------------------------


def test_slow_starters_are_capacity_in_flight():
    pool = Pool(replace(ENCODER, max_replicas=1000), shared(4000.0), start_seconds=550)
    sizes = pool.sizes(540)
    assert max(sizes) == 4, "elsewhere thousands of pods were started for those that were still starting"


def test_a_pod_that_never_starts_does_not_count_as_capacity():
    policy = replace(ENCODER, start_deadline_seconds=100.0)
    pods = (
        PodSample("a", "ready", START - 900, START, encode_load(1900.0)),
        PodSample("b", "starting", START - 200),
    )
    decision = decide(START, policy, PoolSamples(2, pods, Demand(START)), pool_history())
    assert (decision.wanted, decision.replicas) == (3, 3)


def test_a_restarted_container_gets_its_full_deadline_again():
    policy = replace(ENCODER, start_deadline_seconds=100.0)
    pods = (
        PodSample("a", "ready", START - 9000, START, encode_load(1900.0)),
        PodSample("b", "starting", START - 9000, waiting_since=START - 30),
    )
    decision = decide(START, policy, PoolSamples(2, pods, Demand(START)), pool_history())
    assert (decision.wanted, decision.replicas, decision.stuck) == (2, 2, 0)


def test_a_crash_looping_container_never_counts_as_capacity():
    pods = (
        PodSample("a", "ready", START - 9000, START, encode_load(1900.0)),
        PodSample("b", "starting", START - 9000, waiting_since=START - 3, failing=True),
    )
    decision = decide(START, ENCODER, PoolSamples(2, pods, Demand(START)), pool_history())
    assert (decision.replicas, decision.stuck) == (3, 1)


def test_pods_that_never_start_do_not_add_one_more_at_every_deadline():
    policy = replace(ENCODER, start_deadline_seconds=600.0)
    pool = Pool(policy, shared(1900.0), start_seconds=1e9)  # needs two
    decisions = pool.run(4 * 3600, step=10)
    assert decisions[-1].replicas == 4, "two, and two in place of those that did not start"
    assert (decisions[-1].hard_limit, decisions[-1].stuck) == ("PodsNotStarting", 3)
    assert "3 of its pods are not starting" in str(decisions[-1])


def test_growth_stops_when_no_pod_ever_starts():
    policy = replace(ENCODER, start_deadline_seconds=100.0)
    pods = (PodSample("a", "starting", START - 200),)
    demand = Demand(START, {"video": 9000.0})
    decision = decide(
        START, policy, PoolSamples(1, pods, demand), replace(pool_history(), throughput={"video": 1000.0})
    )
    assert (decision.replicas, decision.limited_by) == (1, "PodsNotStarting")


def pool_history():
    """That of a pool which has been watched for a long time."""
    return replace(Pool(ENCODER, shared(0.0)).history, last_tick=START - 1, observed_since=START - 9000)


def test_pods_that_wait_for_a_node_never_stop_growth():
    policy = replace(ENCODER, scheduling_deadline_seconds=900.0)
    pool = Pool(policy, shared(3000.0), start_seconds=1e9, unschedulable=99)
    decisions = pool.run(890)
    assert decisions[-1].replicas == 3
    assert {d.hard_limit for d in decisions} == {None}, "a cluster autoscaler may still be adding nodes"
    pool.run(30)
    decision = pool.tick()
    assert (decision.replicas, decision.hard_limit, decision.unplaced) == (3, "Unschedulable", 2)
    assert "2 of its pods cannot be scheduled" in str(decision)
    pool.load = shared(5000.0)
    assert pool.run(60)[-1].replicas == 5, "it grows after the deadline too"
    pool.load = shared(0.0)
    decisions = pool.run(700)
    assert decisions[-1].replicas == 1
    assert decisions[-1].hard_limit is None


def test_an_unneeded_unschedulable_pod_is_not_a_limit():
    pods = (
        PodSample("a", "ready", START - 9000, START, encode_load(100.0)),
        PodSample("b", "unschedulable", START - 9000),
    )
    decision = decide(START, ENCODER, PoolSamples(2, pods, Demand(START)), pool_history())
    assert (decision.hard_limit, decision.unplaced) == (None, 1)


def test_the_wait_for_a_node_begins_when_the_scheduler_finds_none():
    pods = (
        PodSample("a", "ready", START - 9000, START, encode_load(1900.0)),
        PodSample("b", "unschedulable", START - 9000, waiting_since=START - 100),
    )
    decision = decide(START, ENCODER, PoolSamples(2, pods, Demand(START)), pool_history())
    assert (decision.hard_limit, decision.unplaced) == (None, 0)


# --- shrinking ------------------------------------------------------------------------------------------------


def test_a_pool_shrinks_only_when_the_full_window_needed_less():
    pool = Pool(ENCODER, shared(3900.0), replicas=4)
    pool.run(400)
    pool.load = shared(100.0)
    sizes = pool.sizes(400)
    assert sizes[:299] == [4] * 299
    assert sizes[305] == 2, "half at a time"
    assert sizes[-1] == 1


def test_after_a_restart_nothing_shrinks_before_a_full_window():
    pool = Pool(ENCODER, shared(10.0), replicas=8)
    decisions = pool.run(300)
    assert {d.replicas for d in decisions} == {8}
    assert decisions[-1].limited_by == "WindowNotSeen"
    assert pool.run(5)[-1].replicas == 4


def test_shrinking_cools_down():
    policy = replace(ENCODER, scale_down_stabilization_seconds=10.0, scale_down_cooldown_seconds=120.0)
    pool = Pool(policy, shared(10.0), replicas=8)
    sizes = pool.sizes(125)
    assert sizes[-1] == 4
    assert pool.sizes(20)[-1] == 2


def test_a_load_that_crosses_a_threshold_back_and_forth_does_not_flap():
    wobble = lambda now, ready: encode_load((1900.0 if int(now) % 20 < 10 else 2100.0) / ready)  # noqa: E731
    sizes = Pool(ENCODER, wobble, replicas=2).sizes(3600)
    assert changes(sizes) == 1
    assert sizes[-1] == 3


def test_a_decode_pool_keeps_what_its_sequences_need():
    total = lambda now, ready: decode_load(running=144 / ready, kv_used=min(1.0, 1.2 / ready))  # noqa: E731
    pool = Pool(DECODE, total, replicas=8)
    assert pool.sizes(1200)[-1] == 3  # 144 of 64 * 0.75 a pod


# --- zero -----------------------------------------------------------------------------------------------------


def test_at_zero_load_nothing_changes_tick_after_tick():
    sizes = Pool(replace(ENCODER, min_replicas=1), shared(0.0)).sizes(3600)
    assert changes(sizes) == 0
    zero = Pool(replace(ENCODER, min_replicas=0), shared(0.0), replicas=0).sizes(3600)
    assert set(zero) == {0}


def test_an_idle_pool_goes_to_zero_after_its_time_and_not_before():
    policy = replace(ENCODER, min_replicas=0, scale_to_zero_after_seconds=400.0)
    pool = Pool(policy, shared(100.0))
    pool.run(500)
    pool.load = shared(0.0)
    sizes = pool.sizes(399)
    assert set(sizes) == {1}
    assert pool.run(3)[-1].replicas == 0
    assert changes(pool.sizes(600)) == 0


def test_a_short_time_to_zero_does_not_wait_for_the_stabilisation_window():
    policy = replace(ENCODER, min_replicas=0, scale_to_zero_after_seconds=60.0)
    pool = Pool(policy, shared(100.0))
    pool.run(500)
    pool.load = shared(0.0)
    assert pool.run(70)[-1].replicas == 0


def test_a_queued_job_wakes_a_pool_at_once():
    policy = replace(
        ENCODER, min_replicas=0, scale_up_stabilization_seconds=60.0, scale_up_cooldown_seconds=60.0
    )
    pool = Pool(policy, shared(0.0), replicas=0)
    pool.run(100)
    pool.demand = lambda now: Demand(now, {"video": 5.0})
    decision = pool.tick()
    assert (decision.replicas, decision.reason) == (1, "Woken")


def test_a_held_request_wakes_prefill_and_decode():
    for policy in (replace(PREFILL, min_replicas=0), replace(DECODE, min_replicas=0)):
        pool = Pool(
            policy, lambda *_: decode_load(), replicas=0, demand=lambda now: Demand(now, held_requests=1)
        )
        assert pool.tick().replicas == 1


def test_prompts_at_gateways_grow_prefill_like_those_in_pods():
    def needed(load, demand):
        return Pool(PREFILL, lambda *_: load, demand=lambda now: Demand(now, **demand)).tick().signal

    in_pods = needed(prefill_load(waiting=50_000), {})
    at_gateways = needed(prefill_load(), {"prompt_tokens": 50_000})
    assert at_gateways.metric == "BacklogSeconds"
    assert at_gateways.need == in_pods.need > 1


def test_sequences_waiting_at_gateways_count_as_a_full_decode_pool():
    pool = Pool(DECODE, lambda *_: decode_load(running=64), demand=lambda now: Demand(now, sequences=128))
    decision = pool.tick()
    assert decision.signal.metric == "Sequences"
    assert decision.signal.need > 3


def test_a_pool_at_zero_whose_queue_cannot_be_read_stays_at_zero():
    pool = Pool(replace(ENCODER, min_replicas=0), shared(0.0), replicas=0, demand=lambda now: None)
    decisions = pool.run(30)
    assert {d.replicas for d in decisions} == {0}
    assert not decisions[-1].valid


# --- metrics that are missing, late or impossible -------------------------------------------------------------


def test_one_silent_pod_keeps_the_pool_from_shrinking():
    pool = Pool(ENCODER, shared(10.0), replicas=6, silent=1)
    decisions = pool.run(900)
    assert {d.replicas for d in decisions} == {6}
    assert decisions[-1].reason == "MetricsMissing"
    assert "pod-0" in str(decisions[-1])


def test_missing_metrics_do_not_keep_a_pool_from_growing():
    pool = Pool(ENCODER, lambda now, ready: encode_load(2000.0), replicas=6, silent=1)
    assert pool.tick().replicas == 10


def test_a_missing_consumer_causes_no_runaway_growth():
    pool = Pool(ENCODER, shared(100.0), replicas=2, demand=lambda now: None)
    assert set(pool.sizes(3600)) == {2}


def test_recovered_metrics_must_be_observed_for_a_full_window():
    pool = Pool(ENCODER, shared(10.0), replicas=4)
    pool.silent = 1
    pool.run(600)
    pool.silent = 0
    assert set(pool.sizes(299)) == {4}
    assert pool.run(5)[-1].replicas == 2


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0])
def test_impossible_numbers_are_reported_and_hold(number):
    pool = Pool(ENCODER, lambda *_: encode_load(queued=number), replicas=3)
    decisions = pool.run(900)
    assert {d.replicas for d in decisions} == {3}
    assert "queued_work" in str(decisions[-1])


def test_more_free_blocks_than_blocks_is_invalid():
    load = replace(decode_load(), kv_blocks_free=2000)
    decision = Pool(DECODE, lambda *_: load).tick()
    assert not decision.valid


def test_a_nan_in_the_queue_holds():
    pool = Pool(ENCODER, shared(10.0), replicas=3, demand=lambda now: Demand(now, {"video": math.nan}))
    assert set(pool.sizes(900)) == {3}


def test_unknown_throughput_starts_one_pod_and_no_more():
    policy = replace(ENCODER, min_replicas=0)
    pool = Pool(
        policy, lambda *_: encode_load(rate=0.0), replicas=0, demand=lambda now: Demand(now, {"video": 1e6})
    )
    assert set(pool.sizes(120)) == {1}


def test_throughput_measured_before_counts_while_no_pod_is_ready():
    pool = Pool(ENCODER, shared(100.0))
    pool.run(5)
    pool.policy = replace(ENCODER, min_replicas=0)
    pool.created, pool.replicas = [pool.now], 1
    pool.start_seconds = 60.0
    pool.demand = lambda now: Demand(now, {"video": 8000.0})
    assert pool.run(20)[-1].replicas == 8


# --- clocks ---------------------------------------------------------------------------------------------------


def test_a_clock_set_forward_shrinks_nothing():
    pool = Pool(ENCODER, shared(3900.0), replicas=4)
    pool.run(400)
    pool.load = shared(10.0)
    pool.now += 86_400
    assert set(pool.sizes(299)) == {4}


def test_a_clock_set_back_shrinks_nothing_and_freezes_nothing():
    pool = Pool(ENCODER, shared(3900.0), replicas=4)
    pool.run(400)
    pool.load = shared(10.0)
    pool.now -= 86_400
    pool.created = [created - 86_400 for created in pool.created]
    assert set(pool.sizes(299)) == {4}
    assert pool.run(200)[-1].replicas < 4
    pool.load = shared(8000.0)
    assert pool.run(20)[-1].replicas == 8


def test_a_panic_does_not_outlive_a_clock_set_back():
    pool = Pool(ENCODER, shared(16_000.0))
    pool.run(20)
    pool.now -= 3600
    pool.load = shared(0.0)
    assert pool.run(700)[-1].replicas < 16


def test_load_stamped_in_the_future_is_not_fresh():
    pods = (PodSample("a", "ready", START - 900, START + 60, encode_load(1e6)),)
    assert decide(START, ENCODER, PoolSamples(1, pods, Demand(START)), pool_history()).replicas == 1


# --- schedules, other writers, shadow -------------------------------------------------------------------------


def test_a_schedule_raises_the_minimum_during_its_window():
    morning = 1_800_000_000.0 - 1_800_000_000.0 % 86_400 + 8 * 3600
    policy = replace(
        ENCODER, schedules=(Window("0 8 * * *", 3600.0, 5),), scale_down_stabilization_seconds=10.0
    )
    pool = Pool(policy, shared(0.0), now=morning - 60)
    pool.created = [morning - 9000]
    sizes = pool.sizes(3600 + 60 + 200)
    assert set(sizes[:60]) == {1}
    assert set(sizes[60 : 60 + 3600]) == {5}
    assert sizes[-1] < 5


def test_another_client_that_writes_replicas_is_noticed():
    pool = Pool(ENCODER, shared(2500.0), replicas=3)
    pool.run(10)
    pool.replicas, pool.created = 9, [START - 9000] * 9
    decision = pool.tick()
    assert decision.foreign_replicas == 9
    assert "another client set 9 replicas" in str(decision)
    assert pool.run(1)[0].foreign_replicas is None, "reported once, for it is the size now"


def test_our_own_change_in_progress_is_not_taken_for_another_client():
    pool = Pool(ENCODER, shared(1900.0), replicas=2)
    pool.run(400)
    pool.load = shared(100.0)
    pool.run(299)
    first = next(d for d in pool.ticks(10) if d.replicas == 1)
    draining = replace(pool.samples(), replicas=2)
    decision = decide(pool.now, pool.policy, draining, first.next_history)
    assert decision.foreign_replicas is None
    assert (decision.current, decision.replicas) == (1, 1)


def test_shadow_mode_decides_and_does_not_act():
    pool = Pool(replace(ENCODER, shadow=True), shared(9000.0))
    decisions = pool.run(60)
    assert pool.replicas == 1
    assert decisions[-1].replicas > 1
    assert not decisions[-1].act
    assert "would scale from 1 to" in str(decisions[-1])


# --- latencies ------------------------------------------------------------------------------------------------


def ttft(seconds: float):
    return lambda now: Latency(now, window_seconds=30.0, requests=100, ttft_seconds=seconds)


def test_ttft_beyond_the_slo_grows_prefill_step_by_step():
    policy = replace(PREFILL, ttft_slo_seconds=1.0, target_backlog_seconds=10.0)
    pool = Pool(policy, shared(4000.0, prefill_load), latency=ttft(3.0))
    sizes = pool.sizes(29)
    assert set(sizes) == {1}, "pods that were not measured for a whole window are not judged"
    assert pool.run(3)[-1].replicas == 2
    pool.start_seconds = 0.0
    assert set(pool.sizes(25)) == {2}


def test_ttft_lost_elsewhere_does_not_grow_prefill():
    policy = replace(PREFILL, ttft_slo_seconds=1.0)
    pool = Pool(policy, shared(100.0, prefill_load), latency=ttft(9.0))
    assert set(pool.sizes(300)) == {1}


def test_silent_gateways_keep_prefill_from_shrinking():
    pool = Pool(replace(PREFILL, ttft_slo_seconds=1.0), shared(1.0, prefill_load), replicas=4)
    assert set(pool.sizes(900)) == {4}


def test_itl_beyond_the_slo_grows_decode_only_if_batches_cause_it():
    policy = replace(DECODE, itl_slo_seconds=0.02)
    slow = lambda now, ready: decode_load(running=32 / ready, itl=0.01 + 0.03 / ready)  # noqa: E731
    grown = Pool(policy, slow).run(300)[-1]
    assert grown.replicas in (3, 4)
    never = Pool(policy, lambda now, ready: decode_load(running=32 / ready, itl=0.5))
    assert never.run(3600)[-1].replicas <= 9, "32 sequences in batches of no fewer than 4"


# --- what it says ---------------------------------------------------------------------------------------------


def test_every_decision_has_its_numbers_in_one_sentence():
    decision = Pool(replace(ENCODER, max_replicas=4, max_scale_up=100.0), shared(12_400.0)).tick()
    assert str(decision) == (
        "encoder scales from 1 to 4 replicas (LoadRose); backlog is 12.40 s, target 1.00 s per replica (1 ready), "
        "which needs 13 replicas; limited by MaxReplicas"
    )
    status = decision.status()
    assert (status.metric, status.observed_milli, status.target_milli) == ("BacklogSeconds", 12_400, 1000)
    assert (status.from_replicas, status.to_replicas, status.limited_by) == (1, 4, "MaxReplicas")


def test_a_decision_names_the_limits_in_the_order_in_which_they_applied():
    decision = Pool(replace(ENCODER, max_replicas=4, max_scale_up=2.0), shared(12_400.0), replicas=2).tick()
    assert (decision.replicas, decision.limits) == (4, ("RateLimit", "MaxReplicas"))
    assert str(decision).endswith("which needs 13 replicas; limited by RateLimit, then MaxReplicas")
    assert decision.status().limited_by == "MaxReplicas"
