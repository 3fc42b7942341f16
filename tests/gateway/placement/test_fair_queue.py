"""Which waiting request starts next, and which is refused: the queue alone, by tables and random timelines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmd_workers.gateway.placement.fair_queue import (
    LOOKED_AT,
    MAX_DEBT_SECONDS,
    QUANTUM_SECONDS,
    RESENT_BYTES_PER_SECOND,
    WEIGHTS,
    FairQueue,
    Lane,
    Need,
    Waiting,
    loss_seconds,
)

NEVER = math.inf


def waiting(
    tenant: str,
    seconds: float = 0.1,
    *,
    weight: int = 4,
    lane: Lane = "text",
    num_bytes: int = 0,
    arrived: float = 0.0,
    deadline: float = 600.0,
) -> Waiting:
    return Waiting(tenant, weight, lane, seconds, num_bytes, arrived, deadline)


def nothing(_: Waiting) -> Need | None:
    return None


def all_but(lane: Lane) -> Callable[[Waiting], Need | None]:
    """Room for everything that is not of this lane."""
    return lambda entry: lane if entry.lane == lane else None


def started(queue: FairQueue, count: int, lacks=nothing) -> list[Waiting]:
    found = [queue.next(lacks) for _ in range(count)]
    return [one for one in found if one is not None]


def filled(*entries: Waiting) -> FairQueue:
    queue = FairQueue()
    for entry in entries:
        queue.add(entry)
    return queue


def test_a_newcomer_does_not_wait_behind_a_flood() -> None:
    queue = filled(*(waiting("flood", 0.5) for _ in range(100)))
    started(queue, 3)
    queue.add(waiting("quiet", 0.01))
    assert "quiet" in [one.tenant for one in started(queue, 2)]


def test_one_tenant_alone_is_served_in_the_order_of_arrival() -> None:
    entries = [waiting("only", 0.1 * (1 + number % 3)) for number in range(20)]
    assert started(filled(*entries), 20) == entries


@pytest.mark.parametrize("other", ["High", "Low"])
def test_work_is_shared_by_weight(other: str) -> None:
    weights = {"normal": WEIGHTS["Normal"], "other": WEIGHTS[other]}
    sizes = {"normal": 0.03, "other": 0.11}
    queue = FairQueue()
    work: Counter[str] = Counter()
    for tenant, weight in weights.items():
        for _ in range(4):
            queue.add(waiting(tenant, sizes[tenant], weight=weight))
    while math.fsum(work.values()) < 100:
        (one,) = started(queue, 1)
        work[one.tenant] += one.work_seconds
        queue.add(waiting(one.tenant, sizes[one.tenant], weight=one.weight))
    assert work["other"] / work["normal"] == pytest.approx(weights["other"] / weights["normal"], rel=0.03)


def test_of_a_tenants_requests_the_earliest_deadline_starts_first() -> None:
    late, soon, middle = (waiting("one", deadline=at) for at in (30.0, 5.0, 10.0))
    assert started(filled(late, soon, middle), 3) == [soon, middle, late]


def test_a_deadline_passes_no_other_tenants_turn() -> None:
    queue = filled(waiting("a", 1.0), waiting("b", 1.0))
    first, second = started(queue, 2)
    queue.add(waiting(first.tenant, 1.0))
    queue.add(waiting(second.tenant, 1.0))
    queue.add(waiting(second.tenant, 1.0, deadline=1.0))
    assert [one.tenant for one in started(queue, 2)] == [first.tenant, second.tenant]


def test_media_without_room_hold_up_no_text_of_their_tenant() -> None:
    video, text = waiting("one", 2.0, lane="media"), waiting("one", 0.1)
    queue = filled(video, text)
    assert started(queue, 2, all_but("media")) == [text]
    assert started(queue, 1) == [video]


def test_smaller_requests_pass_one_that_only_decode_has_no_room_for() -> None:
    entries = [waiting("one", 1.0), waiting("one", 0.5), waiting("one", 0.1)]

    def large_lack(need: Need) -> Callable[[Waiting], Need | None]:
        return lambda entry: need if entry.work_seconds > 0.2 else None

    assert started(filled(*entries), 1, large_lack("text")) == []
    assert started(filled(*entries), 1, large_lack("decode")) == [entries[2]]
    behind = [waiting("one", 1.0) for _ in range(LOOKED_AT)]
    assert started(filled(*behind, entries[2]), 1, large_lack("decode")) == []


def test_a_tenant_served_out_of_turn_gets_that_much_less_later() -> None:
    queue = filled(*(waiting("a", 0.1) for _ in range(60)), *(waiting("b", 0.1) for _ in range(60)))
    early = waiting("a", 2.0)
    queue.add(early)
    queue.take(early)
    found = Counter(one.tenant for one in started(queue, 40))
    assert found["b"] - found["a"] == pytest.approx(20, abs=3)


def test_overestimated_work_repays_a_debt_but_saves_up_nothing() -> None:
    queue = filled(waiting("a", 0.1))
    (line,) = queue._lines.values()
    for seconds, left in ((2.0, -2.0), (-1.5, -0.5), (-1.0, 0.0), (-1.0, 0.0), (1000.0, -MAX_DEBT_SECONDS)):
        queue.charge("a", seconds)
        assert line.deficit_seconds == pytest.approx(left)


def test_a_tenant_without_room_saves_up_no_turns() -> None:
    queue = filled(*(waiting("media", 0.1, lane="media") for _ in range(200)))
    for _ in range(200):
        queue.add(waiting("text", 0.1))
    started(queue, 100, all_but("media"))
    assert Counter(one.tenant for one in started(queue, 40))["media"] <= 22


def test_a_tenant_that_has_waited_for_nothing_saves_up_no_turns() -> None:
    queue = filled(*(waiting("busy", 0.1) for _ in range(200)), waiting("idle", 0.1))
    assert queue.remove(next(one for one in queue.entries() if one.tenant == "idle"))
    started(queue, 100)
    for _ in range(50):
        queue.add(waiting("idle", 0.1))
    assert Counter(one.tenant for one in started(queue, 40))["idle"] <= 22


def test_a_request_that_is_taken_out_never_starts() -> None:
    entries = [waiting("one") for _ in range(3)]
    queue = filled(*entries)
    assert queue.remove(entries[1])
    assert not queue.remove(entries[1])
    assert started(queue, 3) == [entries[0], entries[2]]
    assert queue.length == 0
    assert queue.work_seconds() == 0


def test_nothing_is_refused_within_the_bounds() -> None:
    assert filled(waiting("a", 5.0, num_bytes=5), waiting("b", 5.0)).excess(10.0, 5, 0.0) is None


def test_the_tenant_with_the_most_work_for_its_weight_is_refused() -> None:
    high = [waiting("high", 1.0, weight=16) for _ in range(8)]
    low = [waiting("low", 1.0, weight=1) for _ in range(2)]
    refused = filled(*high, *low).excess(9.0, 1 << 30, 0.0)
    assert refused in low


def test_where_bytes_are_short_the_tenant_with_the_most_bytes_is_refused() -> None:
    long, large = waiting("long", 20.0), waiting("large", 1.0, num_bytes=100)
    assert filled(long, large).excess(60.0, 99, 0.0) is large


def test_a_tenant_is_refused_the_request_that_loses_least_time() -> None:
    megabytes = int(5 * RESENT_BYTES_PER_SECOND)
    old, new = waiting("one", 9.0, arrived=0.0), waiting("one", 9.0, arrived=4.0)
    new_and_large = waiting("one", 9.0, arrived=4.5, num_bytes=megabytes)
    queue = filled(old, new, new_and_large)
    order = []
    while (refused := queue.excess(1.0, 1 << 40, 5.0)) is not None:
        order.append(refused)
        queue.remove(refused)
    assert order == [new, old]  # of the last two, the old one has waited 5 s, and the other would take 5.5 s
    assert loss_seconds(new_and_large, 5.0) == pytest.approx(5.5)


def test_a_request_that_is_larger_than_the_queue_may_wait_alone() -> None:
    assert filled(waiting("one", 1000.0)).excess(1.0, 1, 0.0) is None


ENTRIES = st.lists(
    st.tuples(
        st.sampled_from("abcd"), st.floats(0.001, 20.0), st.sampled_from(["text", "media"]), st.booleans()
    ),
    max_size=60,
)
WEIGHT = {"a": 1, "b": 4, "c": 4, "d": 16}


@given(entries=ENTRIES)
def test_everything_that_waits_starts_once_or_is_taken_out(entries) -> None:
    queue = FairQueue()
    kept = []
    for tenant, seconds, lane, stays in entries:
        entry = waiting(tenant, seconds, weight=WEIGHT[tenant], lane=lane)
        queue.add(entry)
        if stays:
            kept.append(entry)
        else:
            queue.remove(entry)
    found = started(queue, len(entries) + 1)
    assert len(found) == len(kept)
    assert set(map(id, found)) == set(map(id, kept))


@given(entries=ENTRIES, open_lanes=st.lists(st.sets(st.sampled_from(["text", "media"])), max_size=40))
def test_a_deficit_is_below_the_largest_request_and_a_quantum(entries, open_lanes) -> None:
    queue = FairQueue()
    largest = 0.0
    for tenant, seconds, lane, _ in entries:
        queue.add(waiting(tenant, seconds, weight=WEIGHT[tenant], lane=lane))
        largest = max(largest, seconds)
    for lanes in open_lanes:
        queue.next(lambda entry, lanes=lanes: None if entry.lane in lanes else entry.lane)
        for name, line in queue._lines.items():
            assert -1e-6 <= line.deficit_seconds < largest + WEIGHT[name] * QUANTUM_SECONDS + 1e-6


@given(sizes=st.lists(st.floats(0.01, 5.0), min_size=40, max_size=80), quiet=st.floats(0.01, 1.0))
def test_a_quiet_tenant_waits_at_most_its_work_and_two_quanta(sizes, quiet) -> None:
    """Of equal weight: what starts before it is at most what it asks for, and a quantum at each end."""
    queue = FairQueue()
    for size in sizes:
        queue.add(waiting("flood", size))
    started(queue, 5)
    entry = waiting("quiet", quiet)
    queue.add(entry)
    before = 0.0
    while (one := queue.next(nothing)) is not entry:
        assert one is not None
        before += one.work_seconds
    assert before <= quiet + 2 * 4 * QUANTUM_SECONDS + 1e-6


@given(data=st.data())
def test_no_tenant_starves_whatever_comes(data) -> None:
    """A low tenant's request starts although high ones always wait: each of its rounds gives it a quantum."""
    seconds = data.draw(st.floats(0.01, 1.0))
    queue = FairQueue()
    entry = waiting("low", seconds, weight=WEIGHTS["Low"])
    queue.add(entry)
    work = 0.0
    for _ in range(3):
        queue.add(waiting("high", data.draw(st.floats(0.01, 1.0)), weight=WEIGHTS["High"]))
    while (one := queue.next(nothing)) is not entry:
        assert one is not None
        work += one.work_seconds
        queue.add(waiting("high", one.work_seconds, weight=WEIGHTS["High"]))
        assert work <= 16 * (seconds + QUANTUM_SECONDS) + 3.0
