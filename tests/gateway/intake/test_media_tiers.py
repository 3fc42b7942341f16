"""Tiers of quality under load, by timelines: they begin at once, end after calm, and follow load."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmd_api.contract.load import PodLoad
from mmd_api.contract.pools import Role
from mmd_api.spec.quality import QualityTier, UnderLoad
from mmd_workers.gateway.intake.media_tiers import MediaTiers, Pressure
from mmd_workers.media.choice import NO_CHOICE, SamplingChoice
from mmd_workers.media.reduction import MediaAmount, MediaShare
from mmd_workers.wire.messages.every_pod import Heartbeat

HOLD = 30
CALM, BETWEEN, MEDIUM, HIGH = (Pressure(memory) for memory in (0.1, 0.7, 0.85, 0.95))


def numbers(*timeline: tuple[float, Pressure], spec: UnderLoad | None = None) -> list[int]:
    tiers = MediaTiers(spec or UnderLoad())
    found = []
    for second, pressure in timeline:
        tiers.observe(pressure, second)
        found.append(tiers.number)
    return found


def test_a_tier_begins_with_the_first_observation_above_one_of_its_thresholds() -> None:
    assert numbers((0, CALM), (1, MEDIUM), (2, HIGH)) == [0, 1, 2]
    assert numbers((0, HIGH)) == [2]
    assert numbers((0, Pressure(0.8, 4.0))) == [0], "thresholds have to be exceeded"
    assert numbers((0, Pressure(0.0, 4.1)), (1, Pressure(0.0, 8.1))) == [1, 2]


def test_a_tier_ends_when_load_has_been_low_for_the_hold_time() -> None:
    assert numbers((0, MEDIUM), (1, CALM), (30, CALM), (31, CALM)) == [1, 1, 1, 0]


def test_load_between_both_thresholds_keeps_a_tier_but_does_not_begin_it() -> None:
    assert numbers((0, BETWEEN), (1, MEDIUM), (2, BETWEEN), (99, BETWEEN)) == [0, 1, 1, 1]


def test_every_return_of_load_begins_the_hold_time_anew() -> None:
    seen = numbers((0, MEDIUM), (1, CALM), (29, CALM), (30, BETWEEN), (31, CALM), (60, CALM), (61, CALM))
    assert seen == [1, 1, 1, 1, 1, 1, 0]


def test_load_during_calm_decides_which_tier_follows_the_highest() -> None:
    last = Pressure(0.66)  # above 80 % of 80, below 80 % of 90
    assert numbers((0, HIGH), (1, CALM), (15, last), (16, CALM), (31, CALM)) == [2, 2, 2, 2, 1]
    assert numbers((0, HIGH), (1, CALM), (31, CALM)) == [2, 2, 0]
    assert numbers((0, HIGH), (1, last), (31, last), (99, last)) == [2, 2, 1, 1]


def test_a_threshold_of_all_memory_never_begins_or_keeps_a_tier() -> None:
    spec = UnderLoad(tiers=[QualityTier(memory_percent=100, backlog_milliseconds=1000, frames_percent=50)])
    timeline = ((0, Pressure(1.0)), (1, Pressure(1.0, 2.0)), (2, Pressure(1.0)), (32, Pressure(1.0)))
    assert numbers(*timeline, spec=spec) == [0, 1, 1, 0]


timelines = st.lists(
    st.tuples(
        st.sampled_from([0.5, 1.0, 7.0, 29.0, 31.0]),
        st.floats(0, 1),
        st.floats(0, 12),
        st.floats(0, 1),
        st.floats(0, 12),
    ),
    max_size=40,
)


@given(timelines)
def test_more_load_never_means_a_lower_tier(steps: list[tuple[float, float, float, float, float]]) -> None:
    less, more, now = MediaTiers(UnderLoad()), MediaTiers(UnderLoad()), 0.0
    for seconds, memory, backlog, more_memory, more_backlog in steps:
        now += seconds
        less.observe(Pressure(memory, backlog), now)
        more.observe(Pressure(max(memory, more_memory), max(backlog, more_backlog)), now)
        assert more.number >= less.number


@given(timelines)
def test_no_tier_ends_within_the_hold_time_after_any_change(
    steps: list[tuple[float, float, float, float, float]],
) -> None:
    tiers, now, changed = MediaTiers(UnderLoad()), 0.0, []
    for seconds, memory, backlog, _, _ in steps:
        now, before = now + seconds, tiers.number
        tiers.observe(Pressure(memory, backlog), now)
        if tiers.number != before:
            changed.append((now, tiers.number < before))
    assert all(second - first >= HOLD for (first, _), (second, lower) in pairwise(changed) if lower)


def pod(*roles: Role, towers: bool = False, **load) -> Heartbeat:
    return Heartbeat(
        pod="-".join(roles),
        pool="decode",
        roles=list(roles),
        incarnation="i",
        revision="r1",
        state="ready",
        http_endpoint="",
        sent=0.0,
        load=PodLoad(**load),
        encodes_small_media=towers,
    )


def kv(used: int, total: int) -> dict[str, int]:
    return {"kv_blocks_total": total, "kv_blocks_free": total - used}


@pytest.mark.parametrize(
    ("pods", "memory"),
    [
        ([], 0.0),
        ([pod("prefill", **kv(10, 100)), pod("decode", **kv(60, 100))], 0.6),
        ([pod("decode", **kv(100, 100)), pod("decode", **kv(0, 300))], 0.25),
        ([pod("prefill", feature_bytes_used=90, feature_bytes_needed=70, feature_bytes_budget=100)], 0.7),
        ([pod("prefill", feature_bytes_needed=170, feature_bytes_budget=100)], 1.0),
        ([pod("encode", media_bytes_used=30, media_bytes_budget=40), pod("decode", **kv(10, 100))], 0.75),
    ],
    ids=["no pod", "KV of the fuller pool", "all of a pool", "no cache", "what waits", "media"],
)
def test_memory_is_what_is_scarcest(pods: list[Heartbeat], memory: float) -> None:
    assert Pressure.of(pods, {}).memory == pytest.approx(memory)


def test_backlog_is_all_that_waits_for_encoders_by_what_they_do_together() -> None:
    busy = pod(
        "encode", encode_queued_work={"image": 300}, encode_work_per_second={"image": 100, "video": 50}
    )
    idle = pod("encode", encode_work_per_second={"image": 200, "video": 50})
    assert Pressure.of([busy, idle], {"image": 300, "video": 100}).backlog_seconds == pytest.approx(2 + 1)


def test_work_that_waits_for_the_first_encoder_is_no_backlog() -> None:
    assert Pressure.of([pod("prefill"), pod("decode")], {"image": 10_000}).backlog_seconds == 0.0
    towers = pod("prefill", towers=True, encode_work_per_second={"image": 100})
    assert Pressure.of([towers, pod("decode")], {"image": 100}).backlog_seconds == 1.0


@pytest.mark.parametrize(
    ("share", "choice", "amount", "expected"),
    [
        (MediaShare(frames_percent=50), NO_CHOICE, MediaAmount(frames=9), SamplingChoice(max_frames=4)),
        (MediaShare(frames_percent=1), NO_CHOICE, MediaAmount(frames=9), SamplingChoice(max_frames=2)),
        (MediaShare(frames_percent=50), NO_CHOICE, MediaAmount(frames=1), NO_CHOICE),
        (MediaShare(max_frames=4), NO_CHOICE, MediaAmount(frames=9), SamplingChoice(max_frames=4)),
        (
            MediaShare(max_frames=4),
            SamplingChoice(num_frames=3),
            MediaAmount(frames=3),
            SamplingChoice(num_frames=3),
        ),
        (
            MediaShare(frames_percent=75),
            SamplingChoice(fps=2.0, max_frames=9),
            MediaAmount(frames=8),
            SamplingChoice(fps=2.0, max_frames=6),
        ),
        (
            MediaShare(pixels_percent=25),
            NO_CHOICE,
            MediaAmount(pixels=4096, least_pixels=64),
            SamplingChoice(max_pixels=1024),
        ),
        (
            MediaShare(pixels_percent=25),
            NO_CHOICE,
            MediaAmount(pixels=4096, least_pixels=2048),
            SamplingChoice(max_pixels=2048),
        ),
        (MediaShare(pixels_percent=25), NO_CHOICE, MediaAmount(pixels=1024, least_pixels=2048), NO_CHOICE),
        (MediaShare(pixels_percent=25), NO_CHOICE, MediaAmount(), NO_CHOICE),
        (
            MediaShare(pixels_percent=50),
            SamplingChoice(min_pixels=3000),
            MediaAmount(pixels=4096, least_pixels=64),
            SamplingChoice(min_pixels=3000, max_pixels=2048),
        ),
    ],
)
def test_a_share_lowers_a_choice_but_never_below_the_least(
    share: MediaShare, choice: SamplingChoice, amount: MediaAmount, expected: SamplingChoice
) -> None:
    assert share.of(choice, amount) == expected
