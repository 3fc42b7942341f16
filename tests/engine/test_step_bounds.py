"""How long steps with media are, and what prompts get of them: as tables, as timelines in simulated time, and for whatever comes in whatever order."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from mmd_api.contract.steps import StepBound
from mmd_workers.engine.interface import StepOutput
from mmd_workers.engine.pacing.pace import Pace
from mmd_workers.engine.pieces import CONTEXT_DIVISOR
from mmd_workers.engine.scheduler import StepPlan
from mmd_workers.engine.sequence import Sequence
from support.oracles.scheduler_bench import Bench

BOUND = 0.1
CHUNK = 512
LEAST = 64  # an eighth of a chunk


def ran(prefill: int, seconds: float, decodes: int = 0, *, timed: bool = True) -> StepOutput:
    return StepOutput(
        sequences=1,
        prefill_tokens=prefill,
        decode_sequences=decodes,
        duration_seconds=seconds,
        timed=timed,
    )


def learned(*steps: StepOutput, bound: float = BOUND, chunk_tokens: int = CHUNK) -> Pace:
    pace = Pace(StepBound.of_chunks(bound, chunk_tokens))
    for step in steps:
        pace.add(step)
    return pace


def usual(fixed: float = 0.01, per_row: float = 0.0004, count: int = 24) -> list[StepOutput]:
    """Steps of many sizes, as traffic has them."""
    chance = random.Random(3)
    sizes = [chance.choice((1, 40, 100, 200, 350, 512)) for _ in range(count)]
    return [ran(size, fixed + per_row * size) for size in sizes]


# --- the pace ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "tokens"),
    [
        pytest.param([], LEAST, id="nothing measured"),
        pytest.param([ran(63, 63.0)], LEAST, id="one small step, however long it took"),
        pytest.param([ran(64, 64.0)], 96, id="one step of the least: half of that more"),
        pytest.param(
            [ran(301, 0.05), ran(300, 0.07)], 428, id="steps of one size: what fits without a fixed time"
        ),
        pytest.param([ran(200, 0.099)], 232, id="which differs enough to tell"),
        pytest.param([ran(200, BOUND)], 232, id="also where it took all the time there is"),
        pytest.param([ran(301, 0.05), ran(300, 0.11)], 150, id="or half, where they are too long"),
        pytest.param([ran(120, 0.12)], 152, id="more, where half is too few"),
        pytest.param([ran(300, 0.05), ran(300, 0.05), ran(200, 0.2)], 100, id="one is unlike and long"),
        pytest.param([ran(100, 0.06), ran(200, 0.11), ran(300, 0.16)], 180, id="all are unlike"),
        pytest.param([ran(3000, 0.05)], CHUNK, id="one step of several chunks"),
        pytest.param([ran(900, 0.05), ran(300, 0.05), ran(300, 0.05)], 512, id="no more than the chunk"),
        pytest.param([ran(100, 0.05), ran(200, 0.075)], 500, id="two sizes show what a step costs besides"),
        pytest.param([ran(80, 0.05, decodes=20), ran(200, 0.075)], 500, id="decodes are rows too"),
        pytest.param([ran(64, 64.0), ran(128, 128.0)], LEAST, id="no less than an eighth of it"),
        pytest.param([ran(0, 0.0102, decodes=1), ran(201, 0.0502)], 450, id="a step without prompts"),
        pytest.param([ran(100, 0.05), ran(131, 0.11)], 66, id="too alike in size to tell"),
        pytest.param([ran(100, 0.05), ran(132, 0.062)], 233, id="just different enough"),
        pytest.param([ran(64, 0.1), ran(256, 0.1)], 102, id="no slope"),
        pytest.param([ran(100, 0.1), ran(200, 0.05)], 160, id="a slope downwards"),
        pytest.param([ran(100, 0.02), ran(200, 0.08)], 333, id="less than nothing at no rows"),
        pytest.param([ran(63, 63.0), ran(64, 0.01), ran(95, 0.01)], 512, id="small steps say little of rows"),
        pytest.param([ran(100, 0.05, timed=False)], LEAST, id="its time is not its own"),
        pytest.param([ran(100, 0.0)], LEAST, id="no time passed"),
        pytest.param([ran(0, 0.5), ran(40, 0.01)], LEAST, id="no rows"),
    ],
)
def test_a_step_has_as_many_tokens_as_fit_by_what_steps_took(steps: list[StepOutput], tokens: int) -> None:
    assert learned(*steps).tokens() == pytest.approx(tokens, abs=1)


def test_decodes_leave_prompts_at_least_an_eighth_of_a_chunk() -> None:
    pace = learned(ran(100, 0.05), ran(200, 0.075))
    assert [pace.tokens(decodes) for decodes in (0, 1, 436, 437, 10_000)] == [500, 499, 64, 64, 64]


@pytest.mark.parametrize(
    ("prefill", "decodes", "seconds", "tokens"),
    [
        (112, 48, 0.05, 272),
        (400, 100, 0.12, 150),
        (100, 100, 0.12, 132),
        (480, 400, 0.12, 512),
        (512, 448, 0.12, 480),
    ],
)
def test_steps_of_one_size_are_followed_by_an_unlike_one_whatever_decodes(
    prefill: int, decodes: int, seconds: float, tokens: int
) -> None:
    assert learned(ran(prefill, seconds, decodes)).tokens(decodes) == tokens


@pytest.mark.parametrize("chunk_tokens", [1, 7, 8, 16])
def test_the_smallest_chunks_have_a_token_at_least(chunk_tokens: int) -> None:
    assert learned(chunk_tokens=chunk_tokens).tokens() == max(1, chunk_tokens // 8)


@pytest.mark.parametrize("outliers", [1, 3, 5])
@pytest.mark.parametrize("seconds", [30.0, 1e-6])
def test_a_few_steps_that_took_unusually_long_or_short_change_little(outliers: int, seconds: float) -> None:
    expected = learned(*usual()).tokens()
    assert expected == pytest.approx(225, abs=1)
    steps = [*usual(), *[ran(225, seconds)] * outliers]
    assert learned(*steps).tokens() == pytest.approx(expected, rel=0.05)


def test_two_steps_outvote_a_first_one_that_is_far_too_slow() -> None:
    first = ran(64, 64 * 0.4)
    assert learned(first).tokens() == LEAST + LEAST // 2
    assert learned(first, ran(96, 96 * 0.0004)).tokens() == LEAST
    assert learned(first, *[ran(size, size * 0.0004) for size in (96, 64)]).tokens() == 250


def test_the_pace_follows_a_change_of_speed_within_the_counted_steps() -> None:
    slow = usual(0.02, 0.0008)
    assert learned(*usual(), *slow).tokens() == learned(*slow).tokens() == pytest.approx(125, abs=1)
    assert learned(*usual(), *slow, *usual()).tokens() == pytest.approx(225, abs=1)


@pytest.mark.parametrize("sizes", [[512] * 30, [512] * 29 + [64]])
def test_steps_reach_the_bound_after_many_steps_of_one_size(sizes: list[int]) -> None:
    pace = learned(*(ran(size, 0.01 + 0.0004 * size) for size in sizes))
    for _ in range(60):
        rows = pace.tokens()
        pace.add(ran(rows, 0.01 + 0.0004 * rows))
    assert 0.01 + 0.0004 * pace.tokens() == pytest.approx(BOUND, rel=0.02)


@pytest.mark.parametrize("decodes", [0, 1, 8, 32, 48, 400])
def test_a_faster_machine_is_followed_while_the_same_sequences_decode(decodes: int) -> None:
    pace = learned()
    sizes = []
    for number in range(200):
        per_row = 0.002 if number < 100 else 0.0001
        rows = pace.tokens(decodes)
        sizes.append(rows)
        pace.add(ran(rows, 0.01 + per_row * (rows + decodes), decodes))
    assert min(sizes) >= LEAST
    assert sorted(sizes[140:])[30] == pytest.approx(min(CHUNK, 900 - decodes), abs=2)


@pytest.mark.parametrize("pause", [0.03, 0.08, 1.0])
def test_a_pause_in_the_only_unlike_step_causes_no_long_steps(pause: float) -> None:
    pace = learned(*[ran(512, 0.225)] * 23, ran(300, 0.14 + pause))
    for _ in range(30):
        rows = pace.tokens()
        assert 0.02 + 0.0004 * rows <= 1.5 * BOUND
        pace.add(ran(rows, 0.02 + 0.0004 * rows))


@pytest.mark.parametrize(
    ("fixed", "tokens"), [(0.01, 450), (0.016, 420), (0.017, 425), (0.02, 500), (0.2, CHUNK)]
)
def test_fixed_costs_take_at_most_a_sixth_even_beyond_the_bound(fixed: float, tokens: int) -> None:
    pace = learned(*(ran(size, fixed + 0.0002 * size) for size in (1, 100, 300, 512)))
    assert pace.tokens() == pytest.approx(tokens, abs=1)


def test_a_long_answer_does_not_displace_what_prompts_took() -> None:
    answer = [ran(0, 0.004, decodes=1)] * 1000
    assert learned(*usual(), *answer).tokens() == pytest.approx(learned(*usual()).tokens(), rel=0.1)
    assert learned(ran(200, 0.1), *answer, ran(210, 0.1)).tokens() == pytest.approx(205, rel=0.05)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 600), st.integers(0, 64), st.floats(0.0, 1e6)),
        max_size=40,
    ),
    st.sampled_from([1e-6, 0.005, 0.1, 60.0]),
)
def test_the_pace_stays_within_its_limits_and_recovers_after_any_steps(
    steps: list[tuple[int, int, float]], bound: float
) -> None:
    pace = learned(*(ran(prefill, seconds, decodes) for prefill, decodes, seconds in steps), bound=bound)
    assert LEAST <= pace.tokens(3) <= CHUNK
    for step in usual(count=60):
        pace.add(step)
    assert pace.tokens() == learned(*usual(count=60), bound=bound).tokens()


# --- what of a step prompts get ---------------------------------------------------------------------------------------


def pace_of(tokens: int, chunk_tokens: int = CHUNK) -> Pace:
    """One by which so many tokens fit into a step."""
    return learned(ran(9 * tokens, 9 * BOUND), ran(tokens, BOUND), chunk_tokens=chunk_tokens)


def text_comes(bench: Bench) -> None:
    """So that the next steps with media are bounded."""
    bench.scheduler.remove(bench.add("came", 1))


def bench_of(tokens: int, chunk_tokens: int = CHUNK, **more) -> Bench:
    """A text has come."""
    bench = Bench(
        **{"blocks": 4000, "max_sequences": 100, **more},
        chunk_tokens=chunk_tokens,
        pace=pace_of(tokens, chunk_tokens),
    )
    text_comes(bench)
    return bench


def media(bench: Bench, name: str, tokens: int, **more) -> Sequence:
    return bench.add(name, tokens, spans=[(0, tokens - 1, name)], **more)


def prefilled(bench: Bench) -> dict[str, tuple[int, int]]:
    """The prompts of one step, which end with it."""
    plan = bench.scheduler.schedule()
    for work in plan.decodes + plan.prefills:
        bench.scheduler.finish_chunk(work)
        if work.samples:
            bench.scheduler.remove(work.sequence)
    return {work.sequence.sequence_id: (work.start, work.end) for work in plan.prefills}


def test_a_step_with_media_fits_its_prompt_tokens_into_its_time() -> None:
    bench = bench_of(100)
    media(bench, "image", 400)
    assert [prefilled(bench) for _ in range(2)] == [{"image": (0, 100)}, {"image": (100, 200)}]


def test_decodes_take_their_rows_of_a_step_with_media() -> None:
    bench = bench_of(100)
    for number in range(8):
        bench.add(f"decodes-{number}", 2)
    bench.step()
    media(bench, "image", 400)
    assert bench.step()["image"] == (0, 92)


def test_without_a_bound_media_have_whole_chunks() -> None:
    bench = Bench(blocks=4000, chunk_tokens=64)
    media(bench, "image", 400)
    assert prefilled(bench) == {"image": (0, 64)}


def test_steps_of_text_alone_have_whole_chunks() -> None:
    bench = bench_of(100)
    bench.add("text", 1200)
    assert [prefilled(bench) for _ in range(2)] == [{"text": (0, 512)}, {"text": (512, 1024)}]


def test_a_prompt_whose_media_have_their_kv_is_text() -> None:
    bench = bench_of(100)
    bench.add("asks", 1000, spans=[(0, 64, "cat")])
    assert [prefilled(bench) for _ in range(2)] == [{"asks": (0, 100)}, {"asks": (100, 612)}]


def test_a_prompt_whose_media_are_cached_is_text() -> None:
    bench = bench_of(100, prefix_cache=True)
    bench.add("first", 64, spans=[(0, 60, "cat")])
    prefilled(bench)
    bench.add("again", 600, spans=[(0, 60, "cat")])
    assert prefilled(bench) == {"again": (64, 576)}


@pytest.mark.parametrize("atomic", [(), [(0, 199)]])
def test_media_that_wait_for_features_leave_text_whole_chunks(atomic: list[tuple[int, int]]) -> None:
    bench = bench_of(100)
    media(bench, "waits", 200, missing={0: (0, 199)})
    media(bench, "unit", 200, missing={0: (40, 199)}, atomic=[(0, 199)])
    bench.add("text", 700)
    assert prefilled(bench) == {"text": (0, 512)}


def test_a_short_text_runs_whole_in_the_next_step_beside_media() -> None:
    bench = bench_of(100)
    media(bench, "image", 600)
    prefilled(bench)
    bench.add("text", 10)
    assert prefilled(bench) == {"text": (0, 10), "image": (100, 190)}


def test_with_a_text_for_every_step_the_oldest_prompt_begins_each_fourth() -> None:
    bench = bench_of(100)
    media(bench, "image", 1000)
    steps = []
    for number in range(12):
        for half in "ab":
            bench.add(f"text-{number}{half}", 51)
        steps.append(prefilled(bench))
    assert [step.get("image") for step in steps] == [
        *(None, None, None, (0, 100), None, None, None, (100, 200)),
        *(None, None, None, (200, 300)),
    ]


def test_the_oldest_prompt_with_media_has_its_turn_among_others_with_media() -> None:
    bench = bench_of(100)
    media(bench, "old", 2000)
    prefilled(bench)
    for number in range(7):
        media(bench, f"image-{number}", 200)
    assert [step.get("old") for step in (prefilled(bench) for _ in range(8))] == [
        *(None, None, None, (100, 200), None, None, None, (200, 300))
    ]


def test_the_oldest_media_prompt_is_admitted_next_in_its_turn() -> None:
    bench = bench_of(100, max_sequences=1)
    for number in range(6):
        bench.add(f"text-{number}", 60)
    media(bench, "image", 100)
    media(bench, "next", 100)
    steps = [[*prefilled(bench)] for _ in range(8)]
    assert [steps[3], steps[7]] == [["image"], ["next"]]


def test_the_oldest_is_the_request_that_reached_its_gateway_first() -> None:
    bench = bench_of(100)
    media(bench, "here-first", 1000).arrived = 20.0
    media(bench, "older", 1000).arrived = 10.0
    steps = []
    for number in range(4):
        bench.add(f"text-{number}", 100).arrived = 5.0
        steps.append([*prefilled(bench)])
    assert steps[-1] == ["older"]


def test_the_oldest_prompt_has_a_turn_only_with_a_bound_and_media() -> None:
    for bench in (bench_of(100), Bench(blocks=4000, chunk_tokens=512)):
        old = bench.add("old", 2000)
        if bench.scheduler.pace is None:
            old._media_end = 1999
        for number in range(8):
            bench.add(f"text-{number}", 512)
            assert [*prefilled(bench)] == [f"text-{number}"]


def test_an_old_prompt_longer_than_a_chunk_has_its_turn_beside_media() -> None:
    bench = bench_of(100)
    bench.add("a chunk", CHUNK)
    bench.add("text", 2000)
    for number in range(7):
        media(bench, f"image-{number}", 400)
    given = [prefilled(bench).get("text") for _ in range(8)]
    assert given == [*(None, None, None, (0, 100), None, None, None, (100, 200))]


def test_a_turn_is_due_when_others_had_three_times_its_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(100)
    monkeypatch.setattr(Pace, "add", lambda pace, output: None)
    media(bench, "image", 1000)
    due = []
    for number in range(24):
        bench.add(f"text-{number}a", 51)
        bench.add(f"text-{number}b", 51)
        if "image" in prefilled(bench):
            due.append(number)
        # The image's own pieces take five times as long as a step of texts, all but the last, in which there was a pause.
        pieces = {1: 0.05, 2: 30.0}.get(len(due), 0.05) if due and due[-1] == number else 0.0101
        bench.scheduler.finish_step(ran(100, pieces))
    assert due == [3, 19]
    assert bench.scheduler._turn_seconds == pytest.approx(20 * BOUND), (
        "a pause delays a turn for a while only"
    )


def test_the_time_of_a_shared_step_is_divided_by_tokens() -> None:
    bench = bench_of(100)
    media(bench, "image", 1000)
    bench.add("text", 40)
    assert prefilled(bench) == {"text": (0, 40), "image": (0, 60)}
    bench.scheduler.finish_step(ran(100, 0.1))
    assert bench.scheduler._turn_seconds == pytest.approx(0.06)
    assert bench.scheduler._others_seconds == pytest.approx(0.04)


def test_a_shared_step_has_at_most_twice_the_tokens_of_its_bound() -> None:
    """A short text shares a step with a piece that reads a long context, or with an atomic range."""
    for context, shared in ((100 * CONTEXT_DIVISOR, True), (190 * CONTEXT_DIVISOR, False)):
        bench = bench_of(100, blocks=20_000)
        video = media(bench, "video", 9000)
        bench.scheduler.schedule()
        video.computed = context
        bench.add("text", 40)
        tokens = {name: end - start for name, (start, end) in prefilled(bench).items()}
        assert tokens == ({"text": 40, "video": 100} if shared else {"text": 40})
    bench = bench_of(100)
    media(bench, "image", 500, atomic=[(0, 150)])
    bench.add("text", 40)
    assert prefilled(bench) == {"text": (0, 40), "image": (0, 150)}


def test_waiting_media_are_not_looked_through_in_every_step() -> None:
    class Unread(list[tuple[int, int, str]]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            raise AssertionError("the spans of a prompt that only waits")

    bench = bench_of(100, max_sequences=1)
    media(bench, "here", 1000)
    prefilled(bench)
    waits = media(bench, "waits", 1000)
    waits.media_spans = Unread(waits.media_spans)
    for _ in range(8):
        prefilled(bench)
    assert waits.media_ahead


def test_a_long_atomic_range_runs_beside_texts_in_each_fourth_step() -> None:
    bench = bench_of(100)
    media(bench, "image", 1000, atomic=[(0, 150), (150, 300), (300, 450)])
    steps = []
    for number in range(12):
        bench.add(f"text-{number}", 90)
        steps.append(prefilled(bench))
    assert [step["image"] for step in steps if "image" in step] == [(0, 150), (150, 300), (300, 450)]
    assert sum(any(name.startswith("text") for name in step) for step in steps) == 9


def test_a_long_atomic_range_alone_waits_for_nothing() -> None:
    bench = bench_of(100)
    media(bench, "image", 1000, atomic=[(0, 150)])
    assert prefilled(bench) == {"image": (0, 150)}


def test_pieces_grow_with_the_context_that_each_of_them_reads() -> None:
    bench = bench_of(64, blocks=20_000)
    media(bench, "video", 40_000)
    pieces = []
    while bench.scheduler.running or bench.scheduler.waiting:
        pieces.append(prefilled(bench)["video"])
    assert all(end - start >= min(CHUNK, start // CONTEXT_DIVISOR) for start, end in pieces[:-1])
    assert [end - start for start, end in pieces if end <= 64 * CONTEXT_DIVISOR] == [64] * 32
    assert max(end - start for start, end in pieces) == CHUNK


def test_a_piece_too_short_for_its_context_waits_unless_it_is_last() -> None:
    bench = bench_of(100, blocks=20_000)
    for name, computed, ahead in (("long", 6400, 300), ("ends", 6400, 20)):
        sequence = media(bench, name, computed + ahead)
        bench.scheduler.schedule()
        sequence.computed, sequence.waited_steps = computed, 0
    bench.add("text", 5)
    assert [*prefilled(bench).items()] == [("text", (0, 5)), ("ends", (6400, 6420))]
    assert prefilled(bench) == {"long": (6400, 6600)}


def test_a_prompt_that_is_not_ready_lends_its_longer_piece_to_nobody() -> None:
    bench = bench_of(100, blocks=20_000)
    stuck = media(bench, "stuck", 6410, missing={0: (6400, 6405)})
    bench.scheduler.schedule()
    stuck.computed = 6400
    media(bench, "image", 1000)
    assert prefilled(bench) == {"image": (0, 100)}


def test_a_long_media_prompt_enters_a_full_pool_beside_endless_texts() -> None:
    bench = bench_of(100, blocks=300, max_sequences=8)
    holder = bench.add("holder", 800, missing={0: (0, 799)})
    bench.step()
    video = media(bench, "video", 1000)
    for number in range(100):
        bench.add(f"text-{number}", 60)
        if number == 10:
            bench.scheduler.remove(holder)
        prefilled(bench)
        if video.computed == 1000 or (not video.blocks and video.admitted):
            break
    assert number < 90


def test_a_prompt_that_is_preempted_is_bounded_again_and_ends() -> None:
    bench = bench_of(100, blocks=104)
    media(bench, "old", 200).arrived = 1.0
    young = media(bench, "young", 200)
    young.arrived = 2.0
    while not bench.scheduler.preemptions:
        bench.step()
    bench.scheduler.remove(bench.scheduler.running[0])
    again = []
    while young.remaining > 1:
        again.append(bench.step()["young"])
    assert again[:2] == [(0, 100), (100, 200)]
    assert bench.step() == {"young": (young.num_tokens - 2, young.num_tokens - 1)}


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_a_long_media_prompt_ends_although_texts_wait_for_every_place(slots: int) -> None:
    bench = bench_of(100, max_sequences=slots)
    video = media(bench, "video", 3000)
    number = 0
    while video in [*bench.scheduler.waiting, *bench.scheduler.running]:
        for _ in range(4):
            number += 1
            bench.add(f"text-{number}", 60)
        prefilled(bench)
        assert number < 4 * 400


class Prompts(RuleBasedStateMachine):
    """Texts, media, atomic ranges and missing features, with a pace that changes from step to step."""

    @initialize(chunk_tokens=st.integers(16, 300))
    def begin(self, chunk_tokens: int) -> None:
        self.bench = Bench(
            blocks=100_000,
            chunk_tokens=chunk_tokens,
            max_sequences=1000,
            pace=Pace(StepBound.of_chunks(BOUND, chunk_tokens)),
        )
        text_comes(self.bench)
        self.without_oldest = 0

    @rule(tokens=st.integers(1, 700))
    def text(self, tokens: int) -> None:
        self.bench.add(f"text-{self.bench.arrivals}", tokens)

    @rule(
        lead=st.integers(0, 40), size=st.integers(1, 400), tail=st.integers(1, 80), count=st.integers(1, 3),
        atomic=st.booleans(), missing=st.booleans(),
    )  # fmt: skip
    def media(self, lead: int, size: int, tail: int, count: int, atomic: bool, missing: bool) -> None:
        ranges = [(lead + n * (size + lead), lead + n * (size + lead) + size) for n in range(count)]
        self.bench.add(
            f"media-{self.bench.arrivals}",
            ranges[-1][1] + tail,
            spans=[(start, stop - start, "m") for start, stop in ranges],
            atomic=ranges if atomic else (),
            missing={0: ranges[-1]} if missing else None,
        )

    @rule()
    def features_arrive(self) -> None:
        for sequence in self.bench.scheduler.running + self.bench.scheduler.waiting:
            assert sequence.prompt is not None
            sequence.prompt.missing.clear()

    @rule(tokens=st.integers(1, 400), count=st.integers(1, 12))
    def steps(self, tokens: int, count: int) -> None:
        for _ in range(count):
            self.step(tokens)

    def step(self, tokens: int) -> None:
        scheduler = self.bench.scheduler
        scheduler.pace = pace_of(tokens, scheduler.chunk_tokens)
        plan = scheduler.schedule()
        self.check(plan)
        for work in plan.decodes + plan.prefills:
            samples = work.samples
            scheduler.finish_chunk(work)
            if samples:
                scheduler.remove(work.sequence)

    def check(self, plan: StepPlan) -> None:
        """Nothing has been computed yet, so each sequence is as the scheduler saw it."""
        scheduler = self.bench.scheduler
        ready = [s for s in scheduler.running if not s.decoding and s.ready]
        bounded = any(s.media_ahead for s in ready)
        given = {work.sequence: work.end - work.start for work in plan.prefills}
        assert len(given) == len(plan.prefills), "one piece of each"
        for work in plan.prefills:
            assert work.start < work.end <= work.sequence.computable_until()
            assert not any(start < work.end < stop for start, stop in work.sequence.atomic_ranges)
        assert scheduler.pace is not None
        budget = scheduler.pace.tokens(len(plan.decodes)) if bounded else scheduler.chunk_tokens
        *others, last = [0, *given.values()]
        if sum(others) + last > budget:
            longer = plan.prefills[-1]
            is_atomic = (longer.start, longer.end) in longer.sequence.atomic_ranges
            assert is_atomic or (bounded and last <= longer.start // CONTEXT_DIVISOR)
            shared = bounded and 2 * sum(others) < budget and sum(others) + last <= 2 * budget
            assert not sum(others) or shared
        assert bool(given) == bool(ready), "what can run does"
        if bounded:
            long = [s for s in ready if s.media_ahead or s.remaining > scheduler.chunk_tokens]
            oldest = min(long, key=lambda s: s.age)
            self.without_oldest = 0 if oldest in given else self.without_oldest + 1
            assert self.without_oldest <= 3
        else:
            self.without_oldest = 0

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.features_arrive()
        scheduler = self.bench.scheduler
        left = sum(s.remaining for s in scheduler.running + scheduler.waiting)
        for _ in range(left + 1):
            if not scheduler.running and not scheduler.waiting:
                return
            self.step(1)
        raise AssertionError("not every prompt ends")


TestPrompts = Prompts.TestCase
TestPrompts.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


# --- timelines --------------------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """Runs steps in simulated time: each costs `fixed` seconds, `per_row` for each row and `per_context` for each token that its prompts'
    pieces read anew, twice as much until `slow_until`, and every 50th a second more. `turn` seconds pass before each, in which another engine
    of the machine steps."""

    bench: Bench
    fixed: float = 0.015
    per_row: float = 0.001
    per_context: float = 0.0
    turn: float = 0.0
    pauses: bool = False
    now: float = 0.0
    slow_until: float = 0.0
    media_seconds: float = 0.0
    steps: list[float] = field(default_factory=list)
    most_prefilled: int = 0  # in one step
    arrived: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    prefilled: Counter[str] = field(default_factory=Counter)

    def step(self) -> None:
        self.now += self.turn
        plan = self.bench.scheduler.schedule()
        prefill = sum(work.end - work.start for work in plan.prefills)
        self.most_prefilled = max(self.most_prefilled, prefill)
        rows = prefill + len(plan.decodes)
        if not rows:
            self.now += 0.001
            return
        reads = sum(work.start for work in plan.prefills)
        seconds = self.fixed + self.per_row * rows + self.per_context * reads
        seconds *= 2.0 if self.now < self.slow_until else 1.0
        if self.pauses and len(self.steps) % 50 == 0:
            seconds += 1.0
        self.steps.append(seconds)
        self.now += seconds
        of_media = sum(work.tokens for work in plan.prefills if work.sequence.media_spans)
        self.media_seconds += seconds * of_media / max(1, prefill)
        for work in plan.decodes + plan.prefills:
            sequence, samples = work.sequence, work.samples
            if not sequence.decoding:
                self.prefilled["media" if sequence.media_spans else "text"] += work.end - work.start
            self.bench.scheduler.finish_chunk(work)
            if not samples:
                continue
            sequence.token_ids.append(7)
            sequence.num_outputs += 1
            self.waited.setdefault(sequence.sequence_id, self.now - self.arrived[sequence.sequence_id])
            if sequence.num_outputs == 8:
                self.bench.scheduler.remove(sequence)
        self.bench.scheduler.finish_step(ran(prefill, seconds, len(plan.decodes)))

    def ask(self, name: str, tokens: int, *, of_media: bool) -> Sequence:
        self.arrived[name] = self.now
        sequence = media(self.bench, name, tokens) if of_media else self.bench.add(name, tokens)
        sequence.arrived = self.now
        return sequence

    def serve(self, until: float, texts_every: float, media_at_once: int, media_tokens: int = 1150) -> None:
        """Texts of 20 to 55 tokens come one by one; so many media prompts are always here."""
        chance = random.Random(5)
        next_text = self.now
        while self.now < until:
            while next_text <= self.now:
                name = f"text-{len(self.arrived)}"
                self.ask(name, chance.randint(20, 55), of_media=False)
                self.arrived[name] = next_text
                next_text += texts_every * chance.uniform(0.5, 1.5)
            queue = self.bench.scheduler.running + self.bench.scheduler.waiting
            for _ in range(media_at_once - sum(bool(s.media_spans) and not s.decoding for s in queue)):
                self.ask(f"media-{len(self.arrived)}", media_tokens, of_media=True)
            self.step()

    def seconds_of(self, tokens: int) -> float:
        """From the arrival of a prompt with media that is alone but for a text before to its first token."""
        text_comes(self.bench)
        name = f"alone-{len(self.arrived)}"
        self.ask(name, tokens, of_media=True)
        while name not in self.waited:
            self.step()
        return self.waited[name]

    def text_waits(self, since: float = 0.0) -> list[float]:
        return [
            seconds
            for name, seconds in self.waited.items()
            if name.startswith("text") and self.arrived[name] >= since
        ]


def machine(*, bounded: bool, max_sequences: int = 64, **more) -> Machine:
    pace = Pace(StepBound.of_chunks(BOUND, CHUNK)) if bounded else None
    bench = Bench(blocks=40_000, block_tokens=16, chunk_tokens=CHUNK, max_sequences=max_sequences, pace=pace)
    return Machine(bench, **more)


def test_texts_beside_a_flood_of_media_mostly_wait_two_steps() -> None:
    bounded, unbounded = machine(bounded=True), machine(bounded=False)
    for one in (bounded, unbounded):
        one.serve(60.0, texts_every=0.4, media_at_once=4)
        assert len(one.text_waits()) > 120
    waits = bounded.text_waits(since=2.0)
    assert max(waits) <= 4 * BOUND
    assert quantiles(waits, n=10)[-1] <= 2.2 * BOUND
    assert max(unbounded.text_waits(since=2.0)) > 8 * BOUND, "what the bound is for"
    assert bounded.prefilled["media"] > 0.75 * unbounded.prefilled["media"]
    assert any(name.startswith("media") for name in bounded.waited)


@pytest.mark.parametrize("per_row", [0.0001, 0.001])
def test_a_bounded_step_has_at_most_a_chunk_of_prompt_tokens(per_row: float) -> None:
    """Memory is measured for a chunk."""
    one = machine(bounded=True, per_row=per_row)
    one.ask("video", 40_000, of_media=True)
    one.serve(60.0, texts_every=0.02, media_at_once=2)
    assert one.prefilled["media"] > 10_000, (
        "pieces that read a long context, which have more tokens than others"
    )
    assert one.most_prefilled <= CHUNK


def seconds_beside_images(one: Machine, sequence: Sequence, images: int = 2) -> float:
    """Until its next token, beside so many images of 600 tokens at any time."""
    begin, outputs = one.now, sequence.num_outputs
    while sequence.num_outputs == outputs:
        assert one.now - begin < 2000.0
        prompts = [s for s in one.bench.scheduler.running + one.bench.scheduler.waiting if s is not sequence]
        for _ in range(images - sum(bool(s.media_spans) and not s.decoding for s in prompts)):
            one.ask(f"media-{len(one.arrived)}", 600, of_media=True)
        one.step()
    return one.now - begin


@pytest.mark.parametrize("kind", ["text", "image first", "preempted"])
def test_a_long_prompt_beside_images_is_no_slower_than_with_whole_chunks(kind: str) -> None:
    seconds = []
    for bounded in (True, False):
        one = machine(bounded=bounded)
        one.serve(20.0, texts_every=1e9, media_at_once=2, media_tokens=600)
        one.arrived["long"] = one.now
        spans = [(0, 64, "cat")] if kind == "image first" else []
        sequence = one.bench.add("long", 3000, spans=spans)
        sequence.arrived = one.now
        if kind == "preempted":
            while not sequence.decoding:
                one.step()
            one.bench.scheduler._preempt(sequence)
        seconds.append(seconds_beside_images(one, sequence))
    assert seconds[0] <= 1.1 * seconds[1]


def test_beside_a_long_video_texts_wait_less_than_with_whole_chunks() -> None:
    waits, videos = [], []
    for bounded in (True, False):
        one = machine(bounded=bounded, per_row=0.0005, per_context=0.00001)
        one.serve(20.0, texts_every=0.05, media_at_once=0)
        one.ask("video", 30_000, of_media=True)
        one.serve(120.0, texts_every=0.05, media_at_once=0)
        waits.append(quantiles(one.text_waits(since=20.0), n=20)[-1])
        videos.append(one.waited["video"])
    assert waits[0] < 0.8 * waits[1]
    assert videos[0] < 1.4 * videos[1]


@pytest.mark.parametrize(
    ("per_row", "per_context", "texts_every", "tokens", "most"),
    [
        pytest.param(0.001, 0.0, 0.075, 3000, 2.0, id="six tenths of what the machine can do are texts"),
        pytest.param(0.001, 0.0, 0.1, 16_000, 1.5, id="a long one"),
        pytest.param(0.0005, 0.00002, 0.1, 16_000, 1.4, id="reading its context takes most of the time"),
        pytest.param(0.004, 0.0, 0.45, 3000, 1.5, id="a slow machine, whose steps are the shortest"),
        pytest.param(0.0001, 0.0, 0.01, 16_000, 1.2, id="a fast machine"),
    ],
)
def test_a_large_media_prompt_beside_texts_at_most_doubles_its_time(
    per_row: float, per_context: float, texts_every: float, tokens: int, most: float
) -> None:
    seconds = []
    for bounded in (True, False):
        one = machine(bounded=bounded, per_row=per_row, per_context=per_context)
        one.serve(10.0, texts_every=texts_every, media_at_once=0)
        one.ask("video", tokens, of_media=True)
        one.serve(120.0, texts_every=texts_every, media_at_once=0)
        seconds.append(one.waited["video"])
    assert seconds[0] <= most * seconds[1]


@pytest.mark.parametrize("per_context", [0.0, 0.00002])
def test_beside_a_flood_of_texts_videos_have_a_fourth_of_the_time(per_context: float) -> None:
    one = machine(bounded=True, per_row=0.0005, per_context=per_context)
    one.serve(40.0, texts_every=0.015, media_at_once=1, media_tokens=30_000)
    assert len(one.bench.scheduler.waiting) > 100, "more than the machine can do"
    assert 0.2 < one.media_seconds / one.now < 0.35


def test_media_beside_occasional_texts_keep_most_of_the_throughput() -> None:
    rates = []
    for bounded in (True, False):
        one = machine(bounded=bounded, per_row=0.0005)
        one.serve(60.0, texts_every=0.1, media_at_once=1, media_tokens=8000)
        rates.append(one.prefilled["media"])
    assert rates[0] > 0.8 * rates[1]


def test_pauses_of_a_second_change_nothing_for_the_steps_between_them() -> None:
    one = machine(bounded=True, pauses=True)
    one.serve(60.0, texts_every=0.4, media_at_once=4)
    assert len([seconds for seconds in one.steps if seconds > 1.0]) > 5
    assert max(seconds for seconds in one.steps[20:] if seconds < 1.0) <= 1.4 * BOUND


def test_a_flood_of_texts_leaves_media_nearly_a_fourth_of_the_steps() -> None:
    one = machine(bounded=True)
    one.serve(60.0, texts_every=0.02, media_at_once=1)
    assert len(one.bench.scheduler.waiting) > 500, "more than the machine can do"
    tokens = sum(one.prefilled.values())
    assert tokens > 30_000
    assert one.prefilled["media"] > 0.17 * tokens
    assert sum(name.startswith("media") for name in one.waited) > 3


@pytest.mark.parametrize("max_sequences", [2, 64])
def test_a_long_video_ends_beside_a_flood_of_texts(max_sequences: int) -> None:
    one = machine(bounded=True, max_sequences=max_sequences)
    one.serve(70.0, texts_every=0.03, media_at_once=1, media_tokens=3000)
    assert any(name.startswith("media") for name in one.waited)


@pytest.mark.parametrize("fixed", [0.02, 0.09, 0.3])
def test_media_keep_most_of_the_throughput_at_any_fixed_cost(fixed: float) -> None:
    rates = []
    for bounded in (True, False):
        one = machine(bounded=bounded, fixed=fixed, per_row=0.0005)
        one.serve(120.0, texts_every=1.0, media_at_once=4)
        rates.append(one.prefilled["media"])
    assert rates[0] > 0.75 * rates[1]


def test_a_prompt_of_twice_the_length_takes_about_twice_as_long() -> None:
    one = machine(bounded=True, per_context=0.00002, per_row=0.0005)
    one.seconds_of(8000)
    seconds = [one.seconds_of(tokens) for tokens in (2000, 4000, 8000, 16_000)]
    assert all(longer <= 2.6 * shorter for shorter, longer in pairwise(seconds))
    unbounded = machine(bounded=False, per_context=0.00002, per_row=0.0005)
    assert seconds[-1] <= 1.5 * unbounded.seconds_of(16_000)


Prompt = tuple[int, int, int, int, bool]
PROMPTS = st.tuples(
    st.integers(0, 60), st.integers(0, 40), st.integers(1, 900), st.integers(1, 90), st.booleans()
)


def timeline(prompts: list[Prompt], *, bounded: bool, of_media: bool, answers: int) -> list[object]:
    """All steps with prompts that come in some step: of media between two texts, or of as many tokens of text; each is answered."""
    pace = pace_of(100) if bounded else None
    bench = Bench(blocks=2000, block_tokens=16, chunk_tokens=CHUNK, max_sequences=6, pace=pace)
    come = [[p for p in prompts if p[0] == number] for number in range(61)]
    steps = list[object]()
    while len(steps) < len(come) or bench.scheduler.waiting or bench.scheduler.running:
        for _, lead, size, tail, atomic in come[len(steps)] if len(steps) < len(come) else []:
            spans = [(lead, size, "m")] if of_media else []
            ranges = [(lead, lead + size)] if of_media and atomic else []
            bench.add(f"{bench.arrivals}", lead + size + tail, spans=spans, atomic=ranges)
        plan = bench.scheduler.schedule()
        work = plan.decodes + plan.prefills
        steps.append([(one.sequence.sequence_id, one.start, one.end) for one in work])
        assert not plan.bounded
        for one in work:
            samples = one.samples
            bench.scheduler.finish_chunk(one)
            if samples:
                one.sequence.token_ids.append(7)
                one.sequence.num_outputs += 1
                if one.sequence.num_outputs == answers:
                    bench.scheduler.remove(one.sequence)
        bench.scheduler.finish_step(ran(sum(one.tokens for one in plan.prefills), 0.3, len(plan.decodes)))
    return steps


@settings(max_examples=60, deadline=None)
@given(st.lists(PROMPTS, min_size=1, max_size=20), st.integers(1, 9))
def test_text_alone_has_the_same_steps_with_a_bound_and_without(prompts: list[Prompt], answers: int) -> None:
    with_bound = timeline(prompts, bounded=True, of_media=False, answers=answers)
    assert with_bound == timeline(prompts, bounded=False, of_media=False, answers=answers)


@settings(max_examples=60, deadline=None)
@given(st.lists(PROMPTS, min_size=1, max_size=20))
def test_media_alone_run_the_same_steps_with_and_without_a_bound(prompts: list[Prompt]) -> None:
    with_bound = timeline(prompts, bounded=True, of_media=True, answers=1)
    assert with_bound == timeline(prompts, bounded=False, of_media=True, answers=1)


def test_media_requests_one_after_another_run_in_whole_chunks() -> None:
    counts = []
    for bounded in (True, False):
        one = machine(bounded=bounded)
        for number in range(6):
            one.ask(f"media-{number}", 1150, of_media=True)
            while one.bench.scheduler.running or one.bench.scheduler.waiting:
                one.step()
        counts.append(len(one.steps))
    assert counts == [60, 60], "three with the prompt and seven more for the answer"


def test_where_a_chunk_fits_the_bound_no_step_has_less() -> None:
    counts = []
    for bounded in (True, False):
        one = machine(bounded=bounded, fixed=0.02, per_row=0.0001)
        one.serve(60.0, texts_every=0.4, media_at_once=4)
        one.serve(120.0, texts_every=1e9, media_at_once=4)
        counts.append((len(one.steps), sum(one.prefilled.values())))
    (steps, tokens), (whole_steps, whole_tokens) = counts
    assert steps == pytest.approx(whole_steps, abs=8)
    assert tokens == pytest.approx(whole_tokens, abs=4 * CHUNK)


def test_steps_are_bounded_for_a_while_after_texts_and_beside_decodes() -> None:
    bench = bench_of(100, prefix_cache=True)
    media(bench, "image", 2000)
    bounded = []
    for _ in range(4):
        bounded.append(bench.scheduler.schedule().bounded)
        bench.scheduler.finish_step(ran(100, 10.0))
    assert bounded == [True, True, True, False]
    bench.scheduler.chunk_tokens = 4000
    bench.step()
    assert bench.scheduler.running[0].decoding
    media(bench, "next", 2000)
    assert bench.scheduler.schedule().bounded
    for sequence in [*bench.scheduler.running]:
        bench.scheduler.remove(sequence)
    bench.scheduler.finish_step(ran(100, 11.0))
    bench.add("again", 2010, spans=[(0, 1999, "image")])
    media(bench, "last", 2000)
    assert bench.scheduler.schedule().bounded, "its media are cached: it is text"


def test_a_slowed_machine_gets_shorter_chunks_and_equally_long_steps() -> None:
    one = machine(bounded=True, fixed=0.008, per_row=0.0003)
    pace = one.bench.scheduler.pace
    assert pace is not None
    one.serve(20.0, texts_every=0.4, media_at_once=2)
    fast = pace.tokens()
    one.slow_until = 40.0
    one.serve(40.0, texts_every=0.4, media_at_once=2)
    assert pace.tokens() < fast / 1.9
    one.serve(60.0, texts_every=0.4, media_at_once=2)
    assert 0.9 * fast < pace.tokens() < 1.1 * fast
    assert max(one.text_waits(since=24.0)) <= 3.2 * BOUND


@pytest.mark.parametrize("turn", [0.02, BOUND])
def test_texts_on_a_shared_machine_wait_at_most_four_steps_and_turns(turn: float) -> None:
    one = machine(bounded=True, turn=turn)
    one.serve(60.0, texts_every=0.4, media_at_once=4)
    assert max(one.text_waits(since=2.0)) <= 4.2 * BOUND + 4 * turn
