"""Where each rule of one pool begins and ends, to the replica and to the second: the edges that the timelines pass over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmd_api.contract.load import PodLoad
from mmd_api.resource import API_VERSION, KIND, MultimodalDeployment
from mmd_operator.autoscaling import (
    Decision,
    Demand,
    History,
    Latency,
    PodSample,
    PoolPolicy,
    PoolSamples,
    Window,
    decide,
)
from mmd_operator.autoscaling.history import GAP_SECONDS, Extremes

from .autoscaling_timeline import (
    DECODE,
    ENCODER,
    PREFILL,
    START,
    Pool,
    decode_load,
    encode_load,
    prefill_load,
    ready_pods,
)

CALM = replace(ENCODER, panic_window_seconds=0.0)
AT_ONCE = replace(CALM, scale_down_stabilization_seconds=0.0, scale_down_cooldown_seconds=0.0)


def wanting(pods: float):
    """Work that takes so many pods, shared among those that are ready."""
    return lambda now, ready: encode_load(1000.0 * pods / max(ready, 1))


def outcome(decision: Decision) -> tuple[int, str, str | None]:
    return decision.replicas, decision.reason, decision.limited_by


# --- growth ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "wanted", "expected"),
    [
        (1, 2, (2, "LoadRose", None)),  # one more is always allowed
        (4, 8, (8, "LoadRose", None)),
        (4, 9, (8, "LoadRose", "RateLimit")),
        (4, 4, (4, "Steady", None)),
        (15, 20, (20, "LoadRose", None)),  # all that there may be is no limit
        (15, 21, (20, "LoadRose", "MaxReplicas")),
        (15, 40, (20, "LoadRose", "MaxReplicas")),
        (20, 21, (20, "Steady", "MaxReplicas")),
    ],
)
def test_a_pool_grows_to_a_limit_and_names_it(size, wanted, expected):
    assert outcome(Pool(CALM, wanting(wanted), replicas=size).tick()) == expected


def test_a_small_share_still_lets_a_pool_grow_by_one():
    slow = replace(CALM, max_scale_up=0.1)
    assert outcome(Pool(slow, wanting(9), replicas=4).tick()) == (5, "LoadRose", "RateLimit")
    assert outcome(Pool(slow, wanting(40), replicas=10).tick()) == (11, "LoadRose", "RateLimit")


def test_needs_are_rounded_up_except_for_floating_point_errors():
    assert [Pool(CALM, wanting(n), replicas=2).tick().wanted for n in (2.0000001, 2.001, 2.999)] == [2, 3, 3]


def test_a_pool_below_its_minimum_or_above_its_maximum_is_brought_back():
    assert outcome(Pool(replace(CALM, min_replicas=3), wanting(9), replicas=2).tick()) == (
        3,
        "OutOfBounds",
        None,
    )
    above = Pool(replace(CALM, max_replicas=3), wanting(2), replicas=4).tick()
    assert outcome(above) == (3, "OutOfBounds", "MaxReplicas")
    fixed = replace(CALM, min_replicas=2, max_replicas=2)
    assert outcome(Pool(fixed, wanting(9), replicas=2).tick()) == (2, "Steady", None)
    assert outcome(Pool(fixed, wanting(9), replicas=3).tick()) == (2, "OutOfBounds", None)


def test_an_opened_schedule_is_named_and_an_ordinary_minimum_is_not():
    window = Window("* * * * *", 60.0, 3)
    opened = replace(CALM, schedules=(window,))
    assert outcome(Pool(opened, wanting(1), replicas=2).tick()) == (3, "ScheduleOpened", None)
    assert outcome(Pool(opened, wanting(1), replicas=3).tick()) == (3, "Steady", "Schedule")
    assert outcome(Pool(replace(CALM, min_replicas=3), wanting(1), replicas=3).tick()) == (
        3,
        "Steady",
        "MinReplicas",
    )


def test_a_schedule_is_open_until_the_second_it_ends():
    window = Window("0 * * * *", 90.0, 3)
    hour = START - START % 3600
    assert [window.is_open(hour + s) for s in (0.0, 89.9, 90.0)] == [True, True, False]


# --- panic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "panics"), [(3, False), (4, True), (5, True)])
def test_a_window_that_asks_for_twice_the_size_is_panic(wanted, panics):
    held = replace(ENCODER, scale_up_stabilization_seconds=100.0)
    decisions = Pool(held, wanting(wanted), replicas=2).run(8)
    assert [d.panicking for d in decisions] == [False] * 6 + [panics] * 2
    assert decisions[-1].reason == ("Panic" if panics and decisions[-1].current == 2 else "Steady")


def test_a_pool_of_one_panics_at_twice_its_size():
    held = replace(ENCODER, scale_up_stabilization_seconds=100.0)
    assert Pool(held, wanting(2), replicas=1).run(8)[-1].panicking


def test_panic_ends_ten_windows_after_the_last_tick_that_called_for_it():
    load = lambda now, ready: wanting(4 if now - START <= 6 else 2)(now, ready)  # noqa: E731
    decisions = Pool(replace(ENCODER, max_replicas=2), load, replicas=2).run(70)
    assert [n for n, d in enumerate(decisions) if d.panicking] == list(range(6, 66))


# --- the way down ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "wanted", "expected"),
    [
        (8, 4, (4, "LoadFell", None)),
        (8, 3, (4, "LoadFell", "RateLimit")),
        (9, 1, (5, "LoadFell", "RateLimit")),
        (2, 1, (1, "LoadFell", None)),
        (3, 2, (2, "LoadFell", None)),
        (1, 1, (1, "Steady", None)),
    ],
)
def test_a_pool_shrinks_by_at_most_half(size, wanted, expected):
    assert outcome(Pool(replace(AT_ONCE, min_replicas=0), wanting(wanted), replicas=size).tick()) == expected


def test_a_small_share_still_lets_a_pool_shrink_by_one():
    slow = replace(AT_ONCE, max_scale_down=0.1)
    assert outcome(Pool(slow, wanting(1), replicas=4).tick()) == (3, "LoadFell", "RateLimit")


def test_a_pool_shrinks_to_its_minimum_and_names_it():
    assert outcome(Pool(replace(AT_ONCE, min_replicas=3), wanting(2), replicas=4).tick()) == (
        3,
        "LoadFell",
        "MinReplicas",
    )
    scheduled = replace(AT_ONCE, schedules=(Window("* * * * *", 60.0, 3),))
    assert outcome(Pool(scheduled, wanting(2), replicas=4).tick()) == (3, "LoadFell", "Schedule")


def test_a_window_is_over_at_its_last_second():
    policy = replace(AT_ONCE, scale_down_stabilization_seconds=20.0)
    limits = [d.limited_by for d in Pool(policy, wanting(2), replicas=3).run(21)]
    assert limits[:20] == ["WindowNotSeen"] * 20
    assert limits[20] is None


def test_a_pool_shrinks_to_the_largest_size_wanted_in_the_window():
    policy = replace(AT_ONCE, scale_down_stabilization_seconds=20.0)
    load = lambda now, ready: wanting(3 if now - START == 10 else 2)(now, ready)  # noqa: E731
    decisions = Pool(policy, load, replicas=4).run(32)
    assert [d.replicas for d in decisions] == [4] * 20 + [3] * 11 + [2]
    assert {d.limited_by for d in decisions[20:31]} == {"Stabilization"}


@pytest.mark.parametrize("direction", ["after growing", "after shrinking"])
def test_the_cooldown_ends_at_its_last_second(direction):
    policy = replace(AT_ONCE, scale_down_cooldown_seconds=30.0)
    first = 4 if direction == "after growing" else 2
    load = lambda now, ready: wanting(first if now == START else 1)(now, ready)  # noqa: E731
    size = 2 if direction == "after growing" else 4
    decisions = Pool(policy, load, replicas=size).run(32)
    then = decisions[0].replicas
    assert [d.replicas for d in decisions[:30]] == [then] * 30
    assert {d.limited_by for d in decisions[1:30]} == {"Cooldown"}
    assert decisions[30].replicas < then


def test_growth_cools_down_to_the_last_second():
    policy = replace(CALM, scale_up_cooldown_seconds=30.0)
    decisions = Pool(policy, wanting(16)).run(31)
    assert [d.replicas for d in decisions] == [2] * 30 + [4]
    assert {d.limited_by for d in decisions[1:30]} == {"Cooldown"}


# --- zero -----------------------------------------------------------------------------------------------------


def test_an_idle_pool_goes_to_zero_in_the_very_second():
    policy = replace(AT_ONCE, min_replicas=0, scale_to_zero_after_seconds=20.0)
    decisions = Pool(policy, wanting(0)).run(21)
    assert [d.replicas for d in decisions] == [1] * 20 + [0]
    assert outcome(decisions[-1]) == (0, "Idle", None)


def test_work_restarts_the_time_to_zero():
    policy = replace(AT_ONCE, min_replicas=0, scale_to_zero_after_seconds=20.0)
    load = lambda now, ready: wanting(0.5 if now - START == 10 else 0)(now, ready)  # noqa: E731
    sizes = Pool(policy, load).sizes(40)
    assert sizes == [1] * 31 + [0] * 9


def test_a_pool_is_woken_at_once():
    policy = replace(
        CALM, min_replicas=0, scale_up_stabilization_seconds=100.0, scale_up_cooldown_seconds=100.0
    )
    woken = Pool(policy, wanting(0), replicas=0, demand=lambda now: Demand(now, {"video": 1.0})).tick()
    assert (woken.replicas, woken.reason) == (1, "Woken")


# --- pods that do not serve yet -------------------------------------------------------------------------------


def with_stuck(stuck: int, ready: int, wanted: float) -> Decision:
    """A pool of which `stuck` pods should have been ready an hour ago."""
    pool = Pool(CALM, wanting(wanted), replicas=ready)
    samples = pool.samples()
    late = tuple(PodSample(f"late-{n}", "starting", START - 3600) for n in range(stuck))
    pool.samples = lambda: replace(samples, replicas=ready + stuck, pods=samples.pods + late)
    return pool.tick()


@pytest.mark.parametrize(
    ("stuck", "ready", "wanted", "asked", "limited"),
    [
        (1, 3, 4, 5, False),
        (2, 3, 5, 7, False),
        (3, 3, 3, 5, False),  # what is ready suffices
        (3, 3, 4, 6, True),
        (3, 3, 9, 11, True),
        (2, 0, 0, 0, False),
    ],
)
def test_at_most_two_pods_replace_those_that_do_not_start(stuck, ready, wanted, asked, limited):
    decision = with_stuck(stuck, ready, wanted)
    assert (decision.stuck, decision.wanted) == (stuck, asked)
    assert (decision.limited_by == "PodsNotStarting") is limited


# --- signals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        (decode_load(running=96), 2),  # 96 of 64 * 0.75
        (decode_load(running=90, waiting=7), 3),
        (decode_load(kv_used=0.75), 1),
        (decode_load(kv_used=0.76), 2),
        (PodLoad(), 0),
    ],
)
def test_a_decode_pool_asks_for_the_places_and_blocks_in_use(load, wanted):
    assert Pool(DECODE, lambda *_: load).tick().wanted == wanted


@pytest.mark.parametrize(
    ("ttft", "queued", "size", "wanted"),
    [
        (0.7, 10_000, 2, 1),  # well within: the backlog alone counts
        (0.8, 10_000, 2, 1),
        (0.81, 10_000, 2, 2),  # near: nothing is taken away
        (1.0, 10_000, 2, 2),
        (1.2, 10_000, 2, 3),  # missed: two pods and a fifth
        (9.0, 10_000, 4, 6),  # however far it was missed, half more at most
        (9.0, 4_999, 2, 1),  # less than a quarter of the time is spent in the queue: more pods would not help
        (9.0, 5_000, 2, 3),
    ],
)
def test_a_missed_ttft_asks_for_a_step_where_more_pods_help(ttft, queued, size, wanted):
    policy = replace(PREFILL, ttft_slo_seconds=1.0, panic_window_seconds=0.0)
    pool = Pool(
        policy,
        lambda now, ready: prefill_load(queued / ready),
        replicas=size,
        latency=lambda now: Latency(now, requests=5, ttft_seconds=ttft, window_seconds=30.0),
        history=History(last_tick=START - 1, ready=size, ready_since=START - 30, observed_since=START - 30),
    )
    decision = pool.tick()
    assert decision.wanted == wanted
    assert {s.full for s in decision.signals if s.metric == "TtftSeconds"} <= {0.0}  # time is never used up


def test_a_ttft_that_pods_of_before_have_made_asks_for_no_step():
    policy = replace(PREFILL, ttft_slo_seconds=1.0)
    for since, wanted in ((29.0, 2), (30.0, 3)):
        before = History(last_tick=START - 1, ready=2, ready_since=START - since, observed_since=START - 60)
        latency = lambda now: Latency(now, requests=5, ttft_seconds=9.0, window_seconds=30.0)  # noqa: E731
        pool = Pool(policy, lambda *_: prefill_load(5000.0), replicas=2, latency=latency, history=before)
        assert pool.tick().wanted == wanted


@pytest.mark.parametrize(
    ("running", "itl", "since", "wanted"),
    [
        (8, 0.06, 10.0, 3),
        (8, 0.06, 9.9, 2),  # pods of before have made that measurement: nothing is taken away yet
        (8, 0.05, 10.0, 2),
        (8, 0.04, 10.0, 1),
        (7, 0.06, 10.0, 1),  # a batch so small is slow by itself
        (8, 9.0, 10.0, 3),
    ],
)
def test_a_missed_itl_asks_for_a_step_if_batches_cause_it(running, itl, since, wanted):
    before = History(last_tick=START - 1, ready=2, ready_since=START - since, observed_since=START - 60)
    policy = replace(DECODE, itl_slo_seconds=0.05, panic_window_seconds=0.0)
    load = lambda now, ready: decode_load(running=running / ready, itl=itl)  # noqa: E731
    assert Pool(policy, load, replicas=2, history=before).tick().wanted == wanted


@pytest.mark.parametrize(("age", "missing"), [(2.5, False), (2.6, True), (-2.5, False), (-2.6, True)])
def test_a_report_is_fresh_up_to_its_age_limit_in_either_direction(age, missing):
    pool = Pool(CALM, wanting(1))
    fresh = pool.samples()
    late = replace(fresh.pods[0], received_at=START - age)
    pool.samples = lambda: replace(fresh, pods=(late,))
    assert bool(pool.tick().missing) is missing
    queue = Pool(CALM, wanting(1), demand=lambda now: Demand(now - age))
    assert bool(queue.tick().missing) is missing


@pytest.mark.parametrize(("state", "missing"), [("ready", True), ("starting", False), ("draining", False)])
def test_only_a_ready_pod_is_missed_when_it_is_silent(state, missing):
    pool = Pool(CALM, wanting(1))
    fresh = pool.samples()
    silent = PodSample("silent", state, START - 10)
    pool.samples = lambda: replace(fresh, replicas=2, pods=(*fresh.pods, silent))
    assert bool(pool.tick().missing) is missing


def test_throughput_is_the_mean_of_the_replicas_that_measured_it():
    rates = iter([1000.0, 500.0, 0.0])
    pool = Pool(CALM, lambda *_: encode_load(1000.0), replicas=3)
    fresh = pool.samples()
    measured = tuple(replace(p, load=encode_load(1000.0, rate=next(rates))) for p in fresh.pods)
    pool.samples = lambda: replace(fresh, pods=measured)
    decision = pool.tick()
    assert decision.next_history.throughput == {"video": 750.0}
    assert decision.wanted == 4  # 3000 patches at 750 a second


# --- memory ---------------------------------------------------------------------------------------------------


def test_a_window_remembers_its_extreme_to_the_second():
    high = Extremes(1).push(0.0, 5, 10.0).push(4.0, 3, 10.0).push(10.0, 1, 10.0)
    assert high.extreme == 5
    assert high.push(10.5, 1, 10.0).extreme == 3
    low = Extremes(-1).push(0.0, 1, 10.0).push(4.0, 3, 10.0)
    assert (low.extreme, low.push(11.0, 4, 10.0).extreme) == (1, 3)


def test_a_window_holds_one_entry_of_a_value_that_stays():
    window = Extremes(1)
    for now in range(100):
        window = window.push(float(now), 7, 50.0)
    assert window.entries == ((99.0, 7),)


@pytest.mark.parametrize(
    ("now", "seen_since"), [(START + GAP_SECONDS, 0.0), (START + GAP_SECONDS + 0.1, None), (START, 0.0), (START - 0.1, None)]
)  # fmt: skip
def test_windows_restart_after_a_gap_and_after_a_clock_set_back(now, seen_since):
    before = History(last_tick=START, ready=2, idle_since=1.0, last_up=START + 50, last_down=START - 50)
    after = before.begin_tick(now, 2)
    assert after.observed_since == (now if seen_since is None else seen_since)
    assert after.idle_since == (None if seen_since is None else 1.0)
    assert after.last_up == (min(now, START + 50) if seen_since is None else START + 50)
    assert after.last_down == START - 50


def test_the_time_since_which_pods_are_ready_changes_with_their_number():
    before = History(last_tick=START, ready=2, ready_since=5.0)
    assert before.begin_tick(START + 1, 2).ready_since == 5.0
    assert before.begin_tick(START + 1, 3).ready_since == START + 1
    assert before.begin_tick(START + 1, 1).ready_since == START + 1


@pytest.mark.parametrize(
    ("written", "found", "expected"),
    [
        (None, 4, (4, False)),
        ((2, 4), 2, (4, False)),
        ((2, 4), 3, (4, False)),
        ((2, 4), 4, (4, False)),
        ((2, 4), 1, (1, True)),
        ((2, 4), 5, (5, True)),
        ((4, 2), 3, (2, False)),
        ((4, 2), 5, (5, True)),
    ],
)
def test_a_size_between_old_and_new_is_our_change_in_progress(written, found, expected):
    assert History(written=written).size_now(found) == expected


def test_an_action_notes_its_direction():
    before = History(last_up=1.0, last_down=2.0)
    times = [(h.last_up, h.last_down) for h in (before.acted(9.0, 3, 3, n) for n in (2, 3, 4))]
    assert times == [(1.0, 9.0), (1.0, 2.0), (9.0, 2.0)]


def test_work_of_unknown_throughput_needs_one_pod():
    known = PodLoad(encode_queued_work={"video": 100.0}, encode_work_per_second={"video": 1000.0})
    assert Pool(CALM, lambda now, ready: known).tick().signal.need == pytest.approx(0.1)
    unknown = replace(known, encode_queued_work={"video": 100.0, "image": 1.0})
    assert Pool(CALM, lambda now, ready: unknown).tick().signal.need == 1.0


def test_a_pod_that_starts_hides_no_other_pods_load():
    pods = (PodSample("pod-1", "starting", START), *ready_pods(START, [encode_load(3000.0)]))
    decision = decide(START, CALM, PoolSamples(2, pods, Demand(START)), History())
    assert decision.signal is not None
    assert decision.signal.need == pytest.approx(3.0)


def test_a_policy_converts_percentages_and_defaults_to_one_replica():
    spec = MultimodalDeployment.parse(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": "demo"},
            "spec": {
                "model": {"id": "builtin/demo"},
                "encoder": {
                    "gpus": 0,
                    "autoscaling": {"maxReplicas": 8, "maxScaleUpPercent": 150, "maxScaleDownPercent": 25},
                },
                "decode": {"gpus": 0},
                "transfer": {"kv": {"backend": "Gloo"}},
            },
        }
    ).spec
    encoder, decode = PoolPolicy.of(spec, "encoder"), PoolPolicy.of(spec, "decode")
    assert (encoder.max_replicas, encoder.max_scale_up, encoder.max_scale_down) == (8, 1.5, 0.25)
    assert (decode.min_replicas, decode.max_replicas) == (1, 1)


def test_a_decision_names_the_signal_that_asks_for_most():
    decision = Pool(
        replace(DECODE, panic_window_seconds=0.0), lambda now, ready: decode_load(16, kv_used=0.9)
    ).tick()
    assert {s.metric for s in decision.signals} == {"Sequences", "KvUtilization"}
    assert decision.signal is not None
    assert decision.signal.metric == "KvUtilization"


def test_unschedulable_pods_of_a_fixed_pool_are_reported_too():
    waits = PodSample("waits", "unschedulable", START - 9000, waiting_since=START - 9000)
    pods = (*ready_pods(START, [encode_load(2000.0)] * 3), waits)
    fixed = replace(CALM, min_replicas=4, max_replicas=4)
    decision = decide(START, fixed, PoolSamples(4, pods, Demand(START)), History())
    assert (decision.replicas, decision.limited_by) == (4, "Unschedulable")
