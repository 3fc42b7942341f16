"""How much work requests are, and when the pools have room for them: tables, without pods."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mmd_api.contract.load import PodLoad
from mmd_workers.gateway.placement.fair_queue import WEIGHTS
from mmd_workers.gateway.placement.work import (
    REQUESTS_PER_POD,
    RESERVED_DIVISOR,
    WINDOW_SECONDS,
    Capacity,
    Encoders,
    Room,
    Shares,
    Size,
    Started,
)
from mmd_workers.wire.messages.every_pod import Heartbeat

ONE_OF_EACH = Capacity(
    encoders=Encoders(1, {"video": 1000.0}),
    prefill_pods=1,
    prefill_tokens_per_second=2000.0,
    sequences=32,
    kv_tokens=32_000,
    step_seconds=0.01,
)
ALONE = Shares({"one": 4})
BOTH = Shares({"one": 4, "two": 4})


def beat(pod: str, roles: list[str], **load) -> Heartbeat:
    return Heartbeat(
        pod=pod,
        pool="any",
        roles=roles,
        incarnation="one",
        revision="r1",
        state="ready",
        http_endpoint="127.0.0.1:1",
        sent=0.0,
        load=PodLoad(**load),
    )


def started(tenant: str = "one", lane: str = "text", seconds: float = 0.01, share: float = 0.0) -> Started:
    return Started(tenant, lane, seconds, share)


def until_full(room: Room, asked, capacity=ONE_OF_EACH, gateways=1, shares=ALONE) -> tuple[int, str | None]:
    """How many more start, and what the next one lacks."""
    for count in range(10_000):
        if (lacks := room.lacks(request := asked(), capacity, gateways, shares)) is not None:
            return count, lacks
        room.add(request)
    raise AssertionError("it is never full")


def test_capacity_is_the_sum_of_what_pods_measure() -> None:
    pods = [
        beat("e-0", ["encode"], encode_work_per_second={"video": 300.0}),
        beat("e-1", ["encode"], encode_work_per_second={"video": 500.0, "image": 100.0}),
        beat("p-0", ["prefill"], prefill_tokens_per_second=5000.0),
        beat(
            "d-0",
            ["decode"],
            decode_max_sequences=16,
            kv_blocks_total=10,
            kv_block_tokens=16,
            itl_seconds=0.03,
        ),
        beat(
            "d-1",
            ["decode"],
            decode_max_sequences=16,
            kv_blocks_total=10,
            kv_block_tokens=16,
            itl_seconds=0.01,
        ),
    ]
    capacity = Capacity.of(pods)
    assert (capacity.encoders.pods, capacity.prefill_pods) == (2, 1)
    assert capacity.encoders.per_second == {
        "video": 800.0,
        "image": 2100.0,
    }  # an unmeasured rate is the default
    assert capacity.prefill_tokens_per_second == 5000.0
    assert (capacity.sequences, capacity.kv_tokens) == (32, 320)
    assert capacity.step_seconds == pytest.approx(0.02)


def test_work_is_what_each_pool_does_in_its_own_seconds() -> None:
    size = Size(prompt_tokens=400, output_tokens=64, encode_work={"video": 500})
    assert size.encode_seconds(ONE_OF_EACH) == 0.5
    assert size.prefill_seconds(ONE_OF_EACH) == pytest.approx(0.2)
    assert size.work_seconds(ONE_OF_EACH) == pytest.approx(0.5 + 0.2 + 64 * 0.01 / 32)
    assert size.first_token_seconds(ONE_OF_EACH) == 0.5


def test_small_media_have_the_towers_of_prefill_pods_too() -> None:
    tower = beat("p-0", ["prefill"], encode_work_per_second={"image": 300.0})
    pods = [
        beat("e-0", ["encode"], encode_work_per_second={"image": 100.0}),
        replace(tower, encodes_small_media=True),
        beat("p-1", ["prefill"]),
        beat("d-0", ["decode"]),
    ]
    small, large = (
        Size(prompt_tokens=80, output_tokens=1, encode_work={"image": 200}, media_tokens=tokens)
        for tokens in (64, 65)
    )
    capacity = Capacity.of(pods, 64)
    assert (small.encode_seconds(capacity), large.encode_seconds(capacity)) == (0.5, 2.0)
    assert (small.first_pods(capacity), large.first_pods(capacity)) == (2, 1)
    assert small.encode_seconds(Capacity.of(pods)) == 2.0, "it is switched off"
    suspected = replace(small, encoders_only=True)
    assert (suspected.lane(capacity), suspected.encode_seconds(capacity)) == ("media", 2.0)
    without_encoders = Capacity.of(pods[1:], 64)
    assert small.is_served(without_encoders)
    assert not large.is_served(without_encoders)


def test_small_media_never_take_the_places_of_large_ones() -> None:
    pods = [
        beat("e-0", ["encode"], encode_work_per_second={"image": 100.0}),
        replace(beat("p-0", ["prefill"], encode_work_per_second={"image": 100.0}), encodes_small_media=True),
        beat("d-0", ["decode"], decode_max_sequences=1000),
    ]
    capacity, room = Capacity.of(pods, 64), Room()

    def asked(tenant: str, tokens: int) -> Started:
        size = Size(prompt_tokens=80, output_tokens=1, encode_work={"image": 100}, media_tokens=tokens)
        seconds = size.first_token_seconds(capacity)
        return Started(tenant, size.lane(capacity), seconds, 0.001, size.first_pods(capacity))

    count, lacks = until_full(room, lambda: asked("one", 64), capacity, shares=BOTH)
    assert (count, lacks) == (2 * REQUESTS_PER_POD["small_media"], "small_media")
    assert room.lacks(asked("two", 65), capacity, 1, BOTH) is None
    assert room.lacks(asked("one", 65), capacity, 1, BOTH) is None


def test_a_request_needs_a_pod_of_each_of_its_roles() -> None:
    pods = [beat("e-0", ["encode"]), beat("p-0", ["prefill"]), beat("d-0", ["decode"])]
    text = Size(prompt_tokens=10, output_tokens=1)
    image = Size(prompt_tokens=80, output_tokens=1, encode_work={"image": 200}, media_tokens=64)
    for served, needed in ((text, "pd"), (image, "epd")):
        for gone in pods:
            left = Capacity.of([pod for pod in pods if pod is not gone])
            assert served.is_served(left) == (gone.pod[0] not in needed)


def test_several_answers_are_several_times_the_work_of_one() -> None:
    once = Size(prompt_tokens=400, output_tokens=64)
    thrice = Size(prompt_tokens=400, output_tokens=192, answers=3)
    assert thrice.work_seconds(ONE_OF_EACH) == pytest.approx(3 * once.work_seconds(ONE_OF_EACH))
    assert thrice.decode_share(ONE_OF_EACH) == pytest.approx(3 / 32)


def test_a_companion_takes_what_another_sequence_takes() -> None:
    alone = Size(prompt_tokens=400, output_tokens=64, answers=2)
    guided = Size(prompt_tokens=400, output_tokens=64, answers=2, companion_tokens=400)
    assert guided.sequences == alone.sequences
    assert guided.work_seconds(ONE_OF_EACH) == pytest.approx(2 * alone.work_seconds(ONE_OF_EACH))
    assert guided.decode_share(ONE_OF_EACH) == pytest.approx(2 * alone.decode_share(ONE_OF_EACH))


def test_long_sequences_take_kv_and_short_ones_slots() -> None:
    assert Size(prompt_tokens=10, output_tokens=10).decode_share(ONE_OF_EACH) == 1 / 32
    assert Size(prompt_tokens=7900, output_tokens=100).decode_share(ONE_OF_EACH) == 0.25


def test_without_pods_a_few_requests_start_and_the_gateway_holds_them() -> None:
    count, lacks = until_full(Room(), lambda: started(seconds=1.0), Capacity())
    assert (count, lacks) == (REQUESTS_PER_POD["text"], "text")


def test_texts_fill_a_window_of_work_and_not_more() -> None:
    count, lacks = until_full(Room(), started)
    assert lacks == "text"
    assert count == pytest.approx(WINDOW_SECONDS["text"] / 0.01 * (1 - 1 / RESERVED_DIVISOR), abs=1)


def test_media_take_no_room_of_texts() -> None:
    room = Room()
    _, lacks = until_full(room, lambda: started(lane="media", seconds=1.0))
    assert lacks == "media"
    assert room.lacks(started(), ONE_OF_EACH, 1, ALONE) is None


def test_a_newcomer_finds_room_beside_one_that_has_taken_all_it_may() -> None:
    for lane, seconds in (("text", 0.01), ("text", 1.0), ("media", 0.1), ("media", 9.0)):
        room = Room()
        until_full(room, lambda lane=lane, seconds=seconds: started("one", lane, seconds), shares=BOTH)
        assert room.lacks(started("two", lane, seconds), ONE_OF_EACH, 1, BOTH) is None
        assert room.lacks(started("one", lane, seconds), ONE_OF_EACH, 1, BOTH) == lane


def test_decode_keeps_a_part_of_its_slots_for_newcomers() -> None:
    room = Room()

    def running(tenant: str = "one") -> Started:
        return Started(tenant, "text", 0.0, 1 / 32, awaits_token=False)

    count, lacks = until_full(room, running, shares=BOTH)
    assert (count, lacks) == (28, "decode")
    count, lacks = until_full(room, lambda: running("two"), shares=BOTH)
    assert (count, lacks) == (4, "decode")


def test_a_first_token_and_an_end_make_room() -> None:
    room = Room()
    first = started(seconds=10.0, share=0.9)
    room.add(first)
    others = [started(seconds=10.0, share=0.05) for _ in range(3)]
    for other in others:
        room.add(other)
    assert room.lacks(started(share=0.05), ONE_OF_EACH, 1, ALONE) is not None
    for one in (first, *others):
        room.first_token(one)
    assert room.lacks(started(share=0.05), ONE_OF_EACH, 1, ALONE) == "decode"
    room.remove(first)
    assert room.lacks(started(share=0.05), ONE_OF_EACH, 1, ALONE) is None


def test_a_request_larger_than_all_room_starts_alone() -> None:
    assert Room().lacks(started(seconds=100.0, share=3.0), ONE_OF_EACH, 1, ALONE) is None


def test_gateways_share_the_room() -> None:
    def asked() -> Started:
        return started(seconds=0.001, share=1 / 32)

    alone, _ = until_full(Room(), asked)
    shared, _ = until_full(Room(), asked, gateways=2)
    assert shared == alone // 2


@pytest.mark.parametrize("gateways", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("slots", [8, 16, 32, 64])
def test_a_tenant_alone_may_use_every_slot_at_any_number_of_gateways(slots: int, gateways: int) -> None:
    alone, capacity = Shares({"one": 4}, is_alone=True), replace(ONE_OF_EACH, sequences=slots)

    def running() -> Started:
        return Started("one", "text", 0.0, 1 / slots, awaits_token=False)

    count, lacks = until_full(Room(), running, capacity, gateways, alone)
    assert (count, lacks) == (math.ceil(slots / gateways), "decode")


def test_a_share_leaves_some_for_one_more_of_normal_priority() -> None:
    assert Shares({"one": WEIGHTS["Normal"]}).of("one") == 0.5
    assert Shares({"one": WEIGHTS["Low"]}).of("one") == 0.2
    two = Shares({"one": WEIGHTS["High"], "two": WEIGHTS["Normal"]})
    assert two.of("one") == pytest.approx(16 / 24)
    assert two.of_others("one") == pytest.approx(4 / 24)
