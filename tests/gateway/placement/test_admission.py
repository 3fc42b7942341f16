"""When requests of tenants start, wait and are refused, with pools that exist only as numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from mmd_api.contract.errors import MmdError, OverloadedError, RateLimitError, TooManyRequestsError
from mmd_api.spec.observability import SloSpec
from mmd_api.tenants import Tenant
from mmd_workers.gateway.access.keys import Access
from mmd_workers.gateway.api.request_records import kept_promises
from mmd_workers.gateway.placement.admission import (
    MAX_QUEUE_SECONDS,
    NEWCOMER_SECONDS,
    Admission,
    EndedAnswer,
    FairAdmission,
)
from mmd_workers.gateway.placement.decode_claim import PATIENCE_SECONDS
from mmd_workers.gateway.placement.dispatcher import ServedSequence, _out_of_time
from mmd_workers.gateway.placement.router import RouteRequest
from mmd_workers.gateway.placement.sequence_state import SequenceSpec
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.gateway.placement.work import REQUESTS_PER_POD, Capacity, Encoders, Size
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.messages.message_parts import Sampling
from support.harness.waiting import DEADLINE_SECONDS, until

ONE_POD = Capacity(
    encoders=Encoders(1),
    prefill_pods=1,
    prefill_tokens_per_second=1000.0,
    decode_pods=1,
    sequences=64,
    step_seconds=0.001,
)
TEXT = Size(prompt_tokens=1000, output_tokens=0)
"""A second of work."""
AT_ONCE = REQUESTS_PER_POD["text"]


class Door:
    """A gateway's admission, its tenants, and a clock that a test sets."""

    def __init__(self, *tenants: dict, gateways: int = 1, max_bytes: int = 1 << 30) -> None:
        self.metrics, self.now, self.capacity = Metrics(("gateway",)), 0.0, ONE_POD
        self.access = Access(self.metrics, lambda: gateways)
        self.access.take([Tenant.model_validate({"keys": [], **tenant}) for tenant in tenants])
        self.tenants = {known.name: known for known in self.access.tenants()}
        self.admissions = FairAdmission(
            self.access, lambda: self.capacity, max_bytes, 600.0, self.metrics, lambda: self.now
        )

    def ask(self, name: str, size: Size = TEXT, num_bytes: int = 0, deadline: float = 600.0) -> Admission:
        return self.admissions.ask(self.tenants[name], size, num_bytes, deadline, Timeline("r", arrived=0.0))

    def until_started(self, wanted: Admission, flood: list[Admission], most_seconds: float = 60.0) -> float:
        """Seconds in which `wanted` starts beside a flood that always has something waiting: requests like those in `flood`, each of
        which ends a second or two after its start.
        """
        first, size, name = self.now, flood[0].size, flood[0].known.name
        ends = {one: self.now + 0.1 * number for number, one in enumerate(flood) if not one.is_waiting}
        while wanted.is_waiting and self.now < first + most_seconds:
            while not self.admissions._queue.work_seconds(name):
                flood.append(self.ask(name, size))
            for number, one in enumerate(flood):
                if not one.is_waiting and one not in ends:
                    one.first_token()
                    ends[one] = self.now + 1.0 + 0.1 * (number % 7)
            for one in [one for one, at in ends.items() if at <= self.now]:
                del ends[one]
                flood.remove(one)
                one.release()
            self.now += 0.05
        assert not wanted.is_waiting, f"it still waits after {most_seconds} s"
        return self.now - first

    def fill(self, name: str, seconds: float) -> list[Admission]:
        """Work of a tenant that starts or waits, until so many seconds of it wait."""
        asked = []
        while self.admissions._queue.work_seconds(name) < seconds:
            asked.append(self.ask(name))
        return asked


@pytest.fixture
async def door() -> Door:
    return Door({"name": "flood"}, {"name": "quiet"})


def refusal(asked: Callable[[], Admission]) -> OverloadedError:
    with pytest.raises(OverloadedError) as error:
        asked()
    return error.value


async def test_requests_start_at_once_while_there_is_room_and_wait_beyond(door: Door) -> None:
    asked = [door.ask("flood") for _ in range(AT_ONCE + 2)]
    assert [one.is_waiting for one in asked] == [False] * AT_ONCE + [True] * 2
    await asked[0].wait()


async def test_a_first_token_lets_the_next_one_start(door: Door) -> None:
    asked = [door.ask("flood") for _ in range(AT_ONCE + 1)]
    asked[0].first_token()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await asked[-1].wait()


async def test_of_several_sequences_the_last_first_token_makes_room(door: Door) -> None:
    several = Size(prompt_tokens=1000, output_tokens=0, answers=3)
    asked = [door.ask("flood", several) for _ in range(AT_ONCE + 1)]
    for _ in range(2):
        asked[0].first_token()
    assert asked[-1].is_waiting
    asked[0].first_token()
    assert not asked[-1].is_waiting


class Faulty:
    """The capacity of pods, which cannot be read the first `faults` times."""

    def __init__(self, faults: int) -> None:
        self.faults = faults

    def __call__(self) -> Capacity:
        self.faults -= 1
        if self.faults >= 0:
            raise LookupError("no such pod")
        return replace(ONE_POD, prefill_pods=2)


async def test_requests_that_wait_start_although_checks_have_failed(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [door.ask("flood") for _ in range(AT_ONCE + 1)]
    door.admissions._read_capacity = Faulty(3)
    door.now += 1.0
    await until(lambda: not asked[-1].is_waiting)
    assert door.metrics.errors.labels(MmdError.code)._value.get() == 3
    assert "starting waiting requests failed: LookupError: no such pod" in caplog.text
    await door.admissions.close()


async def test_a_fault_in_a_check_fails_no_request_whose_end_led_to_it(door: Door) -> None:
    asked = [door.ask("flood") for _ in range(AT_ONCE + 1)]
    door.admissions._read_capacity = Faulty(1)
    door.now += 1.0
    asked[0].release()
    assert asked[-1].is_waiting
    asked[1].first_token()
    assert not asked[-1].is_waiting


async def test_a_request_that_fails_while_it_is_queued_leaves_nothing(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> float:
        raise LookupError("no such pod")

    with monkeypatch.context() as patch:
        patch.setattr(door.admissions, "max_seconds", fails)
        with pytest.raises(LookupError):
            door.ask("flood")
    assert not door.admissions._admissions
    assert not door.admissions._requests_by_tenant
    assert door.admissions._room.is_empty


async def test_a_newcomer_starts_before_those_that_wait_of_a_flood(door: Door) -> None:
    flood = door.fill("flood", 20.0)
    quiet = [door.ask("quiet") for _ in range(2)]
    assert not quiet[0].is_waiting  # in the part that is kept for newcomers
    for one in flood[:3]:
        one.first_token()
    assert not quiet[1].is_waiting


SLOTS = Capacity(
    prefill_pods=1, prefill_tokens_per_second=1e6, decode_pods=1, sequences=16, step_seconds=0.02
)
ONE_SLOT = Size(prompt_tokens=10, output_tokens=64)


def slots(count: int) -> Size:
    return Size(prompt_tokens=10, output_tokens=64 * count, answers=count)


def until_full(door: Door, size: Size = ONE_SLOT) -> list[Admission]:
    """Requests of the flood, until one of them waits, in a gateway that another tenant has used lately."""
    door.ask("quiet", size).release()
    return until_one_waits(door, size)


def until_one_waits(door: Door, size: Size) -> list[Admission]:
    asked = [door.ask("flood", size)]
    while not asked[-1].is_waiting:
        asked[-1].first_token()
        asked.append(door.ask("flood", size))
    return asked


async def test_slots_a_flood_frees_go_to_a_tenant_within_its_share(door: Door) -> None:
    door.capacity = SLOTS
    flood = until_full(door)
    quiet = door.ask("quiet", slots(4))
    for one in flood[:2]:  # the two of the last eighth were free
        assert quiet.is_waiting
        one.release()
    assert not quiet.is_waiting
    assert flood[-1].is_waiting


async def test_a_small_request_passes_a_large_one_that_decode_cannot_hold(
    door: Door,
) -> None:
    door.capacity = SLOTS
    until_full(door)
    large, small = door.ask("quiet", slots(4)), door.ask("quiet", ONE_SLOT)
    assert large.is_waiting
    assert not small.is_waiting


async def test_while_slots_are_kept_for_one_tenant_others_within_their_share_start() -> None:
    door = Door({"name": "flood"}, {"name": "quiet"}, {"name": "third"})
    door.capacity = SLOTS
    until_full(door)
    large = door.ask("quiet", slots(4))
    assert not door.ask("third", ONE_SLOT).is_waiting
    assert large.is_waiting


@pytest.mark.parametrize("count", [2, 4, 8, 14, 16])
async def test_a_request_starts_beside_a_flood_however_many_slots_it_needs(door: Door, count: int) -> None:
    door.capacity = SLOTS
    flood = until_full(door)
    seconds = door.until_started(door.ask("quiet", slots(count)), flood)
    assert seconds < (2.0 if count <= 4 else 2.0 + PATIENCE_SECONDS)


async def test_a_tenants_own_small_requests_do_not_starve_its_large_one(door: Door) -> None:
    door.capacity = SLOTS
    flood = until_full(door)
    door.until_started(door.ask("flood", slots(14)), flood)


async def test_a_request_that_needs_much_of_the_kv_starts_beside_a_flood(door: Door) -> None:
    door.capacity = replace(SLOTS, sequences=256, kv_tokens=10_000)
    flood = until_full(door, Size(prompt_tokens=400, output_tokens=100))
    assert door.until_started(door.ask("quiet", Size(prompt_tokens=3000, output_tokens=100)), flood) < 2.0


async def test_decode_is_not_soon_emptied_again_for_requests_beyond_a_share(
    door: Door,
) -> None:
    door.capacity = SLOTS
    flood = until_full(door)
    first, second = (door.ask("quiet", slots(14)) for _ in range(2))
    door.until_started(first, flood)
    first.release()
    assert door.until_started(second, flood) >= PATIENCE_SECONDS


async def test_decode_keeps_room_for_newcomers_only_where_another_tenant_was_lately(door: Door) -> None:
    door.capacity = SLOTS
    assert len(until_one_waits(door, ONE_SLOT)) == 16 + 1
    door = Door({"name": "flood"}, {"name": "quiet"})
    door.capacity = SLOTS
    assert len(until_full(door)) == 14 + 1
    door.now = NEWCOMER_SECONDS
    assert len(until_one_waits(door, ONE_SLOT)) == 2  # with the one that waited, all 16 have started


async def test_a_claim_ends_with_the_request_that_has_it(door: Door) -> None:
    door.capacity = SLOTS
    flood = until_full(door)
    claimed = door.ask("quiet", slots(4))
    claimed.release()
    flood[0].release()
    assert not flood[-1].is_waiting
    assert door.admissions._claim.holder is None


async def test_a_request_that_is_given_up_while_it_waits_never_starts(door: Door) -> None:
    asked = [door.ask("flood") for _ in range(AT_ONCE + 2)]
    asked[-2].release()
    asked[0].first_token()
    assert asked[-2].started is None
    assert not asked[-1].is_waiting


async def test_everything_released_leaves_nothing(door: Door) -> None:
    for one in door.fill("flood", 5.0) + door.fill("quiet", 5.0):
        one.release()
        one.release()
    admissions = door.admissions
    assert (admissions.length, admissions.leaving) == (0, 0)
    assert not admissions._admissions
    assert not admissions._weights
    assert admissions._room.is_empty


async def test_an_ended_sequence_makes_room_before_its_client_has_read_it(door: Door) -> None:
    door.capacity = Capacity(decode_pods=1, prefill_pods=8, prefill_tokens_per_second=1e6, sequences=4)
    asked = [door.ask("flood") for _ in range(5)]
    assert asked[-1].is_waiting
    for one in asked[:2]:
        one.first_token()
        one.sequence_ended(0)
    assert not asked[-1].is_waiting


async def test_a_tenant_alone_may_fill_the_whole_queue_until_overload(
    door: Door,
) -> None:
    door.fill("flood", MAX_QUEUE_SECONDS)
    error = refusal(lambda: door.ask("flood"))
    assert (error.status, error.code) == (503, "overloaded")
    assert 60 <= error.retry_after_seconds <= 62
    assert "61 s of work would wait, and the gateway's queue takes 60" in error.message
    assert door.admissions.leaving == 0


async def test_only_the_tenant_beyond_its_share_is_refused_when_others_wait(door: Door) -> None:
    flood = door.fill("flood", MAX_QUEUE_SECONDS)
    quiet = door.fill("quiet", 5.0)
    shed = [one for one in flood if one.error is not None]
    assert len(shed) >= 4
    assert all(isinstance(one.error, TooManyRequestsError) for one in shed)
    assert kept_promises(
        Timeline("r", arrived=0.0, status=shed[0].error.status, code=shed[0].error.code),
        SloSpec(ttft_milliseconds=100),
    ) == {"ttft": False}  # the deployment had no room: no fault of the tenant's
    assert "its share of the gateway's queue is 30" in shed[0].error.message
    assert shed[0].error.retry_after_seconds > 60  # it gets half of the deployment
    assert not any(one.error for one in quiet)
    assert door.admissions.leaving == len(shed)
    with pytest.raises(MmdError):
        await shed[0].wait()


async def test_a_refusal_names_amounts_of_work_below_a_second() -> None:
    names = [f"quiet-{number}" for number in range(100)]
    door = Door({"name": "flood"}, *({"name": name} for name in names))
    flood = [door.ask("flood", Size(prompt_tokens=400, output_tokens=0)) for _ in range(AT_ONCE + 8)]
    for name in names:
        door.ask(name, Size(prompt_tokens=600, output_tokens=0))
    refused = [one.error.message for one in flood if one.error is not None]
    assert "share of the gateway's queue is 0.6" in refused[-1]


async def test_work_waiting_for_pods_on_their_way_is_not_refused(door: Door) -> None:
    door.capacity = Capacity(encoders=Encoders(1))
    door.fill("flood", 2 * MAX_QUEUE_SECONDS)
    assert not door.ask("quiet").error


async def test_the_newest_of_a_flood_is_refused_first(door: Door) -> None:
    flood = []
    for second in range(int(MAX_QUEUE_SECONDS) + AT_ONCE):
        door.now = float(second) / 1000
        flood.append(door.ask("flood"))
    door.now = 1.0
    door.fill("quiet", 1.0)
    refused = [number for number, one in enumerate(flood) if one.error is not None]
    assert refused
    assert refused == list(range(len(flood) - len(refused), len(flood)))


async def test_what_waits_is_bounded_in_bytes() -> None:
    door = Door({"name": "flood"}, max_bytes=100)
    for _ in range(AT_ONCE + 2):
        door.ask("flood", num_bytes=45)
    assert "135 bytes would wait" in refusal(lambda: door.ask("flood", num_bytes=45)).message


async def test_a_floods_waiting_request_gives_its_place_to_a_newcomer(door: Door) -> None:
    flood = door.fill("flood", 5.0)
    assert not door.admissions.make_place(door.tenants["flood"])
    assert door.admissions.has_place_for(door.tenants["quiet"], 1, door.admissions.length)
    assert not door.admissions.has_place_for(door.tenants["quiet"], 1, door.admissions.length + 1)
    assert not any(one.error for one in flood)  # until the newcomer has been read
    assert door.admissions.make_place(door.tenants["quiet"])
    (refused,) = (one for one in flood if one.error is not None)
    assert refused.error.status == 429
    assert "takes no more of all tenants" in refused.error.message


async def test_a_tenant_takes_no_place_from_an_equally_busy_one(door: Door) -> None:
    asked = door.fill("flood", 5.0)
    door.tenants["quiet"].usage.running = len(asked)
    assert not door.admissions.make_place(door.tenants["quiet"])


async def test_work_of_a_minute_is_limited_and_what_waits_counts() -> None:
    door = Door({"name": "one", "limits": {"workSecondsPerMinute": 10}})
    asked = [door.ask("one") for _ in range(10)]
    error = refusal(lambda: door.ask("one"))
    assert isinstance(error, RateLimitError)
    assert "workSecondsPerMinute is 10" in error.message
    for one in asked[AT_ONCE:]:
        one.release()
    assert not door.ask("one").error  # four have started, and none waits


async def test_gateways_share_a_limit_on_work() -> None:
    door = Door({"name": "one", "limits": {"workSecondsPerMinute": 10}}, gateways=2)
    for _ in range(5):
        door.ask("one")
    assert "5 at each of 2 gateways" in refusal(lambda: door.ask("one")).message


async def test_pods_that_come_let_requests_start_without_a_word(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmd_workers.gateway.placement.admission.TICK_SECONDS", 0.01)
    asked = [door.ask("flood") for _ in range(AT_ONCE + 1)]
    door.capacity = Capacity(decode_pods=1, prefill_pods=4, prefill_tokens_per_second=4000.0, sequences=8)
    door.now = 1.0
    async with asyncio.timeout(DEADLINE_SECONDS):
        await asked[-1].wait()


async def test_what_waits_is_demand_of_the_pool_that_lacks_room(door: Door) -> None:
    assert door.admissions.demand().prompt_tokens == 0
    for _ in range(AT_ONCE + 3):
        door.ask("flood")
    for _ in range(40):
        door.ask("quiet", Size(prompt_tokens=10, output_tokens=1, encode_work={"video": 100}))
    demand = door.admissions.demand()
    assert demand.prompt_tokens == 3000
    assert demand.encode_work["video"] > 0
    assert demand.sequences == 0


async def test_sequences_that_wait_for_decode_are_demand_of_decode_alone(door: Door) -> None:
    door.capacity = Capacity(decode_pods=1, prefill_pods=8, prefill_tokens_per_second=1e6, sequences=4)
    for _ in range(10):
        door.ask("flood")
    demand = door.admissions.demand()
    assert (demand.sequences, demand.prompt_tokens, demand.encode_work) == (6, 0, {})


async def test_a_tenants_answers_teach_how_long_its_next_ones_will_be(door: Door) -> None:
    usage = door.tenants["quiet"].usage
    before = usage.expected_output_tokens
    door.ask("quiet").release([EndedAnswer(before + 100, complete=True)])
    assert usage.expected_output_tokens == before + 20
    door.ask("quiet").release([EndedAnswer(before, complete=True)])
    assert usage.expected_output_tokens == before + 16


async def test_an_incomplete_answer_can_only_raise_the_expected_length(door: Door) -> None:
    usage = door.tenants["quiet"].usage
    before = usage.expected_output_tokens
    for _ in range(60):
        door.ask("quiet").release([EndedAnswer(1, complete=False)])
        door.ask("quiet").release()
    assert usage.expected_output_tokens == before
    door.ask("quiet").release([EndedAnswer(before + 100, complete=False)])
    assert usage.expected_output_tokens == before + 20


async def test_answers_that_are_longer_than_expected_count_when_they_end() -> None:
    door = Door({"name": "one", "limits": {"workSecondsPerMinute": 10}})
    door.capacity = SLOTS  # 1.25 ms a token
    for _ in range(5):
        asked = door.ask("one", Size(prompt_tokens=10, output_tokens=1))
        asked.first_token()
        asked.sequence_ended(1601)  # 2 s more than was estimated
    error = refusal(lambda: door.ask("one"))
    assert "10.0 s before that were not estimated" in error.message
    door.now = error.retry_after_seconds
    assert not door.ask("one").error


async def test_a_tenants_hourly_work_stays_within_its_limit_despite_wrong_estimates() -> None:
    door = Door({"name": "one", "limits": {"workSecondsPerMinute": 10}})
    door.capacity = SLOTS
    worked = 0.0
    while door.now < 3600.0:
        try:
            asked = door.ask("one", Size(prompt_tokens=10, output_tokens=1))
        except RateLimitError as error:
            door.now += error.retry_after_seconds
            continue
        asked.first_token()
        asked.sequence_ended(8000)
        worked += 10.0
        asked.release()
    assert worked <= 10.0 * 62


async def test_a_waiting_tenant_owes_others_the_work_beyond_its_estimate(
    door: Door,
) -> None:
    door.capacity = replace(ONE_POD, step_seconds=1.0)  # 64 tokens are a second of work
    expected = Size(prompt_tokens=1000, output_tokens=64)
    quiet, _ = ([door.ask(name, expected) for _ in range(AT_ONCE + 4)] for name in ("quiet", "flood"))
    quiet[0].first_token()
    quiet[0].sequence_ended(64)
    line = door.admissions._queue._lines["quiet"]
    assert line.deficit_seconds >= 0
    quiet[1].first_token()
    quiet[1].sequence_ended(64 + 640)
    assert line.deficit_seconds == pytest.approx(-10.0, abs=2.1)  # a turn of the flood has passed meanwhile


async def test_gauges_show_what_waits_of_each_tenant(door: Door) -> None:
    door.fill("flood", 3.0)
    door.admissions.sample()
    shown = door.metrics.expose()[0].decode()
    assert 'mmd_tenant_queued_requests{tenant="flood"} 3.0' in shown
    assert 'mmd_tenant_queued_seconds{tenant="flood"} 3.0' in shown
    assert 'mmd_tenant_queued_requests{tenant="quiet"}' not in shown


async def test_a_timed_out_sequence_is_told_what_it_waited_for(door: Door) -> None:
    door.fill("flood", 20.0)
    admission = door.ask("flood")
    spec = SequenceSpec("r.0", [1], [], Sampling(max_tokens=1), 0.0, 1.0)
    sequence = ServedSequence(spec, RouteRequest("r.0", 1, 1), Timeline("r", 0.0), asyncio.Event(), admission)
    error = _out_of_time(sequence)
    assert (error.status, error.code) == (503, "overloaded")
    assert "21.0 s of work of tenant flood waits" in error.message
    assert error.retry_after_seconds == 21.0
    admission.decided.set()
    assert _out_of_time(sequence).status == 504


async def test_a_prompt_that_is_laid_out_again_counts_as_it_is_then(door: Door) -> None:
    large = replace(TEXT, prompt_tokens=40_000, output_tokens=100)
    door.capacity = replace(ONE_POD, kv_tokens=50_000)
    first, second = door.ask("flood", large), door.ask("quiet", large)
    assert [first.is_waiting, second.is_waiting] == [False, True], "decode has KV for one of them"
    tokens = door.tenants["flood"].usage.tokens
    assert tokens.total() == 40_000
    first.resize(replace(large, prompt_tokens=600, companion_tokens=400))
    assert not second.is_waiting, "it needs so much less"
    first.release([EndedAnswer(100, complete=True)])
    second.release()
    tokens.add(38_900)
    assert tokens.total() == 40_000, (
        "1,000 of the prompt and its companion's, 100 of the answer, and the next 38,900"
    )
    assert door.admissions._room.is_empty


async def test_a_request_that_waits_is_admitted_as_it_is_laid_out_then(door: Door) -> None:
    asked = [door.ask("flood") for _ in range(AT_ONCE + 1)]
    asked[-1].resize(replace(TEXT, prompt_tokens=10))
    asked[0].release()
    assert not asked[-1].is_waiting
    assert door.tenants["flood"].usage.tokens.total() == AT_ONCE * 1000 + 10
