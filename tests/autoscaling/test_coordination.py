"""All pools together: coupling, the GPU budget, and which pool is the bottleneck."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmd_api.contract.load import PodLoad
from mmd_operator.autoscaling import (
    Decision,
    Demand,
    DeploymentDecision,
    DeploymentPolicy,
    History,
    PodSample,
    PoolSamples,
    coordinate,
)
from mmd_operator.autoscaling.coordinate import _gain

from .autoscaling_timeline import (
    DECODE,
    ENCODER,
    PREFILL,
    START,
    decode_load,
    encode_load,
    prefill_load,
    ready_pods,
)

SEEN = History(last_tick=START - 1, observed_since=START - 9000)
ALL = {"encoder": ENCODER, "prefill": PREFILL, "decode": DECODE}
FAST = {pool: replace(policy, max_scale_up=100.0) for pool, policy in ALL.items()}


def of(loads: list[PodLoad], held: int = 0) -> PoolSamples:
    return PoolSamples(len(loads), ready_pods(START, loads), Demand(START, held_requests=held))


def decided(policy: DeploymentPolicy, **samples: PoolSamples) -> DeploymentDecision:
    return coordinate(START, policy, samples, dict.fromkeys(policy.pools, SEEN))


def sizes(result: DeploymentDecision) -> dict[str, int]:
    return {pool: d.replicas for pool, d in result.decisions.items()}


QUIET = {
    "encoder": of([encode_load(100.0)]),
    "prefill": of([prefill_load(100.0)]),
    "decode": of([decode_load(5, kv_used=0.1)]),
}


# --- coupling -------------------------------------------------------------------------------------------------


def test_prefill_does_not_grow_while_decode_is_the_bottleneck():
    policy = DeploymentPolicy({**FAST, "decode": replace(DECODE, max_replicas=1)})
    full = of([decode_load(64, waiting=10, kv_used=0.99)])
    result = decided(policy, **{**QUIET, "prefill": of([prefill_load(90_000.0)]), "decode": full})
    prefill = result.decisions["prefill"]
    assert (prefill.replicas, prefill.limited_by) == (1, "DownstreamSaturated")
    assert result.bottleneck.pool == "decode"


def test_prefill_grows_together_with_a_decode_pool_that_grows_enough():
    full = of([decode_load(64, kv_used=0.99)])
    result = decided(
        DeploymentPolicy(FAST), **{**QUIET, "prefill": of([prefill_load(90_000.0)]), "decode": full}
    )
    assert sizes(result) == {"encoder": 1, "prefill": 9, "decode": 2}


def test_one_unschedulable_decode_pod_does_not_freeze_the_other_pools():
    pods = (
        *ready_pods(START, [decode_load(40, kv_used=0.9)]),
        PodSample("decode-1", "unschedulable", START - 3600),
    )
    decode = PoolSamples(2, pods, Demand(START))
    result = decided(
        DeploymentPolicy(FAST), **{**QUIET, "encoder": of([encode_load(5000.0)]), "decode": decode}
    )
    assert sizes(result) == {"encoder": 5, "prefill": 1, "decode": 2}


def test_unschedulable_pods_are_not_capacity_for_upstream():
    pods = (
        *ready_pods(START, [decode_load(64, kv_used=1.0)]),
        *(PodSample(f"decode-{n}", "unschedulable", START - 3600) for n in (1, 2)),
    )
    samples = {
        **QUIET,
        "prefill": of([prefill_load(90_000.0)]),
        "decode": PoolSamples(3, pods, Demand(START)),
    }
    result = decided(DeploymentPolicy(FAST), **samples)
    assert result.decisions["prefill"].limited_by == "DownstreamSaturated"
    coming = tuple(replace(pod, created_at=START - 10) for pod in pods)
    samples["decode"] = PoolSamples(3, coming, Demand(START))
    assert sizes(decided(DeploymentPolicy(FAST), **samples))["prefill"] == 9


def test_an_encoder_at_zero_wakes_whatever_is_saturated_downstream():
    policy = DeploymentPolicy(
        {
            "encoder": replace(ENCODER, min_replicas=0),
            "prefill": PREFILL,
            "decode": replace(DECODE, max_replicas=1),
        }
    )
    encoder = PoolSamples(0, (), Demand(START, {"video": 500.0}))
    result = decided(
        policy, encoder=encoder, prefill=QUIET["prefill"], decode=of([decode_load(64, kv_used=1.0)])
    )
    assert result.decisions["encoder"].replicas == 1


def test_decode_does_not_go_to_zero_below_a_busy_prefill_pool():
    policy = DeploymentPolicy(
        {
            pool: replace(rules, min_replicas=0, scale_to_zero_after_seconds=60.0)
            for pool, rules in ALL.items()
        }
    )
    idle = replace(SEEN, idle_since=START - 8000)
    samples = {
        "encoder": of([encode_load()]),
        "prefill": of([prefill_load(10.0)]),
        "decode": of([decode_load()]),
    }
    result = coordinate(START, policy, samples, dict.fromkeys(ALL, idle))
    assert sizes(result) == {"encoder": 0, "prefill": 1, "decode": 1}
    assert result.decisions["decode"].limited_by == "UpstreamBusy"


def test_a_pipeline_at_zero_wakes_for_one_request():
    zero = {pool: replace(rules, min_replicas=0) for pool, rules in ALL.items()}
    asleep = {pool: PoolSamples(0, (), Demand(START, held_requests=1)) for pool in ALL}
    asleep["encoder"] = PoolSamples(0, (), Demand(START, {"video": 500.0}, held_requests=1))
    assert sizes(decided(DeploymentPolicy(zero), **asleep)) == {"encoder": 1, "prefill": 1, "decode": 1}


# --- budget ---------------------------------------------------------------------------------------------------


def test_the_gpu_budget_goes_where_it_helps_most():
    policy = DeploymentPolicy(FAST, gpu_budget=8)
    result = decided(
        policy,
        encoder=of([encode_load(6000.0)]),
        prefill=of([prefill_load(60_000.0)]),
        decode=of([decode_load(30, kv_used=0.2)]),
    )
    assert sizes(result) == {"encoder": 4, "prefill": 3, "decode": 1}
    assert {d.limited_by for p, d in result.decisions.items() if p != "decode"} == {"GpuBudget"}


def test_a_gpu_is_weighed_by_what_a_replica_of_the_pool_costs():
    dear = {**FAST, "prefill": replace(FAST["prefill"], gpus=4)}
    result = decided(
        DeploymentPolicy(dear, gpu_budget=10),
        encoder=of([encode_load(2500.0)]),
        prefill=of([prefill_load(25_000.0)]),
        decode=of([decode_load(1)]),
    )
    assert sizes(result) == {"encoder": 3, "prefill": 1, "decode": 1}


def test_a_fully_used_budget_limits_no_pool_that_needs_no_more():
    pair = {**FAST, "encoder": replace(FAST["encoder"], gpus=2)}
    samples = {**QUIET, "encoder": of([encode_load(3000.0)])}
    for budget, encoders in ((9, 3), (8, 3), (7, 2), (6, 2), (5, 1), (4, 1)):
        decisions = decided(DeploymentPolicy(pair, gpu_budget=budget), **samples).decisions
        assert decisions["encoder"].replicas == encoders
        assert decisions["encoder"].limited_by == (None if encoders == 3 else "GpuBudget")
        assert {decisions[pool].limited_by for pool in ("prefill", "decode")} == {None}


def test_what_is_taken_back_for_the_budget_ends_at_the_minimum():
    at_least = {**ALL, "encoder": replace(ENCODER, min_replicas=2)}
    samples = {**QUIET, "encoder": of([encode_load(1000.0)] * 4)}
    sizes_of = {
        budget: sizes(decided(DeploymentPolicy(at_least, gpu_budget=budget), **samples))["encoder"]
        for budget in (6, 5, 4, 3)
    }
    assert sizes_of == {6: 4, 5: 3, 4: 2, 3: 2}


def test_what_coupling_takes_back_is_shared_out_again():
    """Prefill would win the last GPUs and then lose them to coupling, so decode gets them."""
    policy = DeploymentPolicy(FAST, gpu_budget=4)
    samples = {
        "encoder": of([encode_load(10.0)]),
        "prefill": of([prefill_load(900_000.0)]),
        "decode": of([decode_load(64, waiting=30, kv_used=0.99)]),
    }
    result = decided(policy, **samples)
    assert sizes(result) == {"encoder": 1, "prefill": 1, "decode": 2}


def test_gpus_of_pods_that_still_drain_are_in_use():
    policy = DeploymentPolicy(FAST, gpu_budget=6)
    draining = replace(SEEN, written=(4, 1))
    encoder = PoolSamples(4, ready_pods(START, [encode_load(1.0)]), Demand(START))
    samples = {**QUIET, "encoder": encoder, "prefill": of([prefill_load(90_000.0)])}
    result = coordinate(START, policy, samples, {"encoder": draining, "prefill": SEEN, "decode": SEEN})
    assert sizes(result) == {"encoder": 1, "prefill": 1, "decode": 1}


def test_a_lowered_budget_takes_from_the_pool_that_loses_least():
    policy = DeploymentPolicy(ALL, gpu_budget=6)
    result = decided(
        policy,
        encoder=of([encode_load(10.0)] * 4),
        prefill=of([prefill_load(9000.0)] * 3),
        decode=of([decode_load(60, kv_used=0.5)] * 2),
    )
    assert sizes(result) == {"encoder": 1, "prefill": 3, "decode": 2}
    assert result.decisions["encoder"].reason == "OverBudget"


def test_pools_without_gpus_take_none_of_the_budget():
    cpu = {pool: replace(rules, gpus=0) for pool, rules in FAST.items()}
    result = decided(DeploymentPolicy(cpu, gpu_budget=0), **{**QUIET, "encoder": of([encode_load(7000.0)])})
    assert result.decisions["encoder"].replicas == 7


def test_a_shadow_pool_takes_no_gpu_from_the_others():
    policy = DeploymentPolicy({**FAST, "encoder": replace(FAST["encoder"], shadow=True)}, gpu_budget=5)
    samples = {**QUIET, "encoder": of([encode_load(90_000.0)]), "prefill": of([prefill_load(30_000.0)])}
    result = decided(policy, **samples)
    assert result.decisions["prefill"].replicas == 3
    assert result.decisions["encoder"].replicas == 1


@pytest.mark.parametrize(
    ("need", "replicas", "gain"),
    [(6.0, 1, 3.0), (6.0, 2, 1.0), (6.0, 5, 0.2), (6.0, 6, 0.0), (0.5, 1, 0.0), (0.0, 0, 0.0)],
)
def test_the_gain_of_a_replica_is_the_excess_load_it_removes(need, replicas, gain):
    samples = {**QUIET, "encoder": of([encode_load(need * 1000.0)])}
    decision = decided(DeploymentPolicy(FAST), **samples).decisions["encoder"]
    assert _gain(decision, replicas) == pytest.approx(gain)


# --- bottleneck -----------------------------------------------------------------------------------------------


def test_the_bottleneck_reports_the_gain_of_one_more_replica():
    result = decided(DeploymentPolicy(ALL), **{**QUIET, "encoder": of([encode_load(3000.0)] * 2)})
    found = result.bottleneck
    assert (found.pool, found.ready, found.load, found.load_with_one_more) == ("encoder", 2, 3.0, 2.0)
    assert found.seconds_gained == 1.0
    assert "encoder is the bottleneck at 300% of its target load (2 ready)" in str(found)
    assert "clear the backlog 1.00 s sooner" in str(found)
    slight = decided(DeploymentPolicy(ALL), **{**QUIET, "encoder": of([encode_load(1200.0)])}).bottleneck
    assert "clear the backlog 0.60 s sooner" in str(slight)


def test_the_bottleneck_is_the_most_loaded_pool_until_one_is_used_up():
    samples = {**QUIET, "encoder": of([encode_load(1500.0)]), "prefill": of([prefill_load(25_000.0)])}
    assert decided(DeploymentPolicy(ALL), **samples).bottleneck.pool == "prefill"
    for running, pool in ((60, "prefill"), (61, "decode")):  # of 64, of which 95% is 60.8
        decoding = {**samples, "decode": of([decode_load(running)])}
        assert decided(DeploymentPolicy(ALL), **decoding).bottleneck.pool == pool


def test_without_a_pool_beyond_its_target_there_is_no_bottleneck():
    assert decided(DeploymentPolicy(ALL), **QUIET).bottleneck is None
    at_target = {**QUIET, "encoder": of([encode_load(1000.0)])}
    assert decided(DeploymentPolicy(ALL), **at_target).bottleneck is None


def test_limits_of_the_pool_itself_stay_in_the_message():
    decision: Decision = decided(
        DeploymentPolicy(FAST, gpu_budget=3), **{**QUIET, "encoder": of([encode_load(6000.0)])}
    ).decisions["encoder"]
    assert str(decision) == (
        "encoder stays at 1 replica (Steady); backlog is 6.00 s, target 1.00 s per replica (1 ready), "
        "which needs 6 replicas; limited by GpuBudget"
    )
