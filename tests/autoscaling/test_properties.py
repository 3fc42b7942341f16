"""What holds for every load: bounds and budget, monotony, no shrinking without metrics, rest under constant load."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.contract.load import PodLoad
from mmd_operator.autoscaling import (
    Demand,
    DeploymentPolicy,
    History,
    PodSample,
    PoolPolicy,
    PoolSamples,
    coordinate,
    decide,
)

from .autoscaling_timeline import DECODE, ENCODER, PREFILL, START, Pool, changes, decode_load, encode_load

amounts = st.floats(0, 1e7)
any_number = st.one_of(st.floats(allow_nan=True, allow_infinity=True), amounts)
fractions = st.floats(0, 1)
sizes = st.integers(0, 30)


@st.composite
def loads(draw: st.DrawFn, number: st.SearchStrategy[float] = amounts) -> PodLoad:
    return PodLoad(
        encode_queued_work={"image": draw(number), "video": draw(number)},
        encode_work_per_second={"image": draw(st.floats(0, 1e5)), "video": 1000.0},
        encode_busy_fraction=draw(fractions),
        prefill_waiting_tokens=draw(number),
        prefill_blocked_tokens=draw(number),
        prefill_tokens_per_second=draw(st.floats(0, 1e5)),
        decode_running=draw(st.integers(0, 64)),
        decode_waiting=draw(st.integers(0, 1000)),
        decode_max_sequences=64,
        kv_blocks_total=1000,
        kv_blocks_free=draw(st.integers(0, 1000)),
        itl_seconds=draw(fractions),
    )


@st.composite
def samples(draw: st.DrawFn, now: float = START, number: st.SearchStrategy[float] = amounts) -> PoolSamples:
    replicas = draw(sizes)
    pods = []
    for n in range(draw(st.integers(0, min(replicas, 6)))):
        state = draw(
            st.sampled_from(["ready", "ready", "ready", "loading", "starting", "unschedulable", "draining"])
        )
        age = draw(st.sampled_from([0.0, 1.0, 30.0, -30.0]))
        pods.append(
            PodSample(
                f"p{n}", state, now - draw(st.sampled_from([1.0, 9000.0])), now - age, draw(loads(number))
            )
        )
    demand = draw(st.none() | st.builds(lambda w, h: Demand(now, {"video": w}, h), number, st.integers(0, 9)))
    return PoolSamples(replicas, tuple(pods), demand)


@st.composite
def policies(draw: st.DrawFn, base: PoolPolicy = ENCODER) -> PoolPolicy:
    low = draw(st.integers(0, 5))
    return replace(
        base,
        gpus=draw(st.integers(0, 4)),
        min_replicas=low,
        max_replicas=max(1, low + draw(st.integers(0, 20))),
        scale_down_stabilization_seconds=draw(st.sampled_from([0.0, 10.0])),
        scale_down_cooldown_seconds=draw(st.sampled_from([0.0, 10.0])),
        scale_up_stabilization_seconds=draw(st.sampled_from([0.0, 5.0])),
        max_scale_up=draw(st.sampled_from([0.1, 1.0, 10.0])),
        panic_window_seconds=draw(st.sampled_from([0.0, 3.0])),
        scale_to_zero_after_seconds=10.0,
        itl_slo_seconds=draw(st.none() | st.just(0.02)),
    )


BASES = st.sampled_from(
    [
        ENCODER,
        PREFILL,
        DECODE,
        replace(DECODE, roles=("encode", "prefill", "decode")),
        replace(DECODE, roles=("prefill", "decode")),
    ]
)


@given(BASES.flatmap(policies), st.lists(st.tuples(st.floats(-100, 100), st.data()), max_size=8))
@settings(max_examples=60, deadline=None)
def test_sizes_stay_within_bounds_whatever_is_measured_and_whatever_the_clock_does(policy, steps):
    history, now = History(), START
    for step, data in steps:
        now += step
        decision = decide(now, policy, data.draw(samples(now, any_number)), history)
        history = decision.next_history
        assert policy.min_replicas <= decision.replicas <= policy.max_replicas
        assert str(decision)
        assert decision.status().to_replicas == decision.replicas


@st.composite
def deployments(draw: st.DrawFn) -> DeploymentPolicy:
    pools = {
        "encoder": draw(policies(ENCODER)),
        "prefill": draw(policies(PREFILL)),
        "decode": draw(policies(DECODE)),
    }
    least = sum(p.min_replicas * p.gpus for p in pools.values())
    return DeploymentPolicy(pools, least + draw(st.integers(0, 40)))


@given(deployments(), st.data())
@settings(max_examples=60, deadline=None)
def test_the_pools_together_never_exceed_the_gpu_budget(policy, data):
    histories: dict = {}
    for step in range(3):
        now = START + 7 * step
        measured = {pool: data.draw(samples(now)) for pool in policy.pools}
        decided = coordinate(now, policy, measured, histories)
        histories = decided.histories
        used = sum(d.replicas * policy.pools[p].gpus for p, d in decided.decisions.items())
        assert used <= policy.gpu_budget
        for pool, d in decided.decisions.items():
            assert policy.pools[pool].min_replicas <= d.replicas <= policy.pools[pool].max_replicas


def _more(load: PodLoad, factor: float) -> PodLoad:
    return replace(
        load,
        encode_queued_work={k: v * factor for k, v in load.encode_queued_work.items()},
        encode_busy_fraction=min(1.0, load.encode_busy_fraction * factor),
        prefill_waiting_tokens=load.prefill_waiting_tokens * factor,
        decode_waiting=load.decode_waiting * factor,
        decode_running=load.decode_running * factor,
        kv_blocks_free=max(0.0, load.kv_blocks_total - (load.kv_blocks_total - load.kv_blocks_free) * factor),
        itl_seconds=load.itl_seconds * factor,
    )


@given(BASES.flatmap(policies), samples(), st.floats(1, 10), st.floats(0, 50))
@settings(max_examples=100, deadline=None)
def test_more_load_never_means_a_smaller_pool(policy, less, factor, watched):
    more = replace(less, pods=tuple(replace(p, load=_more(p.load, factor)) for p in less.pods))
    history = History(last_tick=START - 1, observed_since=START - watched)
    a, b = decide(START, policy, less, history), decide(START, policy, more, history)
    assert b.wanted >= a.wanted
    assert b.replicas >= a.replicas


@given(BASES.flatmap(policies), samples(number=any_number), st.floats(0, 1000))
@settings(max_examples=100, deadline=None)
def test_nothing_shrinks_on_missing_data(policy, measured, watched):
    history = History(last_tick=START - 1, observed_since=START - watched)
    decision = decide(START, policy, measured, history)
    if not decision.valid:
        assert decision.replicas >= min(measured.replicas, policy.max_replicas)


@given(
    st.floats(0, 30_000),
    st.integers(1, 20),
    st.floats(0, 200),
    st.sampled_from([0.0, 30.0, 300.0]),
)
@settings(max_examples=12, deadline=None)
def test_every_pool_settles_under_constant_load(work, replicas, start_seconds, window):
    def encode(now, ready):
        pods = max(ready, 1)
        return encode_load(work / pods, busy=min(1.0, work / 4000 / pods))

    def decode(now, ready):
        pods = max(ready, 1)
        return decode_load(work / 100 / pods, kv_used=min(1.0, work / 9000 / pods))

    for policy, load in ((ENCODER, encode), (DECODE, decode)):
        rules = replace(policy, scale_down_stabilization_seconds=window)
        pool = Pool(rules, load, replicas=replicas, start_seconds=start_seconds)
        pool.run(1800, step=10.0)
        settled = pool.sizes(600, step=10.0)
        assert changes(settled) == 0
        assert not math.isnan(settled[-1])
