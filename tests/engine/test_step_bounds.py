"""How long steps are, and what text and media get of them: as tables, as timelines in simulated time, and for whatever comes in whatever order."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from mmd_workers.engine.interface import StepOutput
from mmd_workers.engine.pace import FIRST_ROWS, MIN_PROMPT_TOKENS, SAMPLES, Pace
from mmd_workers.engine.scheduler import StepPlan
from mmd_workers.engine.sequence import Sequence
from tests.support.scheduler_bench import Bench

BOUND = 0.1


def ran(prefill: int, seconds: float, decodes: int = 0, *, failed: bool = False) -> StepOutput:
    return StepOutput(
        sequences=1,
        prefill_tokens=prefill,
        decode_sequences=decodes,
        duration_seconds=seconds,
        failed=[("a", ValueError())] if failed else [],
    )


def learned(*steps: StepOutput, bound: float = BOUND, max_rows: int = 512) -> int:
    pace = Pace(bound, max_rows)
    for step in steps:
        pace.add(step)
    return pace.rows


# --- the pace ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "rows"),
    [
        pytest.param([], FIRST_ROWS, id="nothing measured"),
        pytest.param([ran(64, 0.064)], 100, id="one step"),
        pytest.param([ran(54, 0.064, decodes=10)], 100, id="decodes are rows too"),
        pytest.param([ran(64, 0.001)], 512, id="no more than the chunk"),
        pytest.param([ran(64, 64.0)], 1, id="no less than one"),
        pytest.param([ran(31, 0.0031)], FIRST_ROWS, id="less than half full"),
        pytest.param([ran(32, 0.0032)], 512, id="half full"),
        pytest.param([ran(8, 0.2)], 4, id="small, and too long"),
        pytest.param([ran(0, 0.5, decodes=64)], FIRST_ROWS, id="no prompts"),
        pytest.param([ran(64, 0.064, failed=True)], FIRST_ROWS, id="the model failed"),
        pytest.param([ran(64, 0.0)], FIRST_ROWS, id="no time passed"),
    ],
)
def test_a_step_has_as_many_rows_as_fit_by_what_full_steps_took(steps: list[StepOutput], rows: int) -> None:
    assert learned(*steps) == rows


@pytest.mark.parametrize("outliers", [1, 2])
@pytest.mark.parametrize("seconds", [30.0, 1e-6])
def test_one_or_two_steps_that_took_unusually_long_or_short_change_nothing(
    outliers: int, seconds: float
) -> None:
    usual = [ran(100, 0.1)] * SAMPLES
    assert learned(*usual, *[ran(100, seconds)] * outliers) == 100
    assert learned(*usual, *[ran(100, seconds)] * outliers, *usual) == 100


def test_a_machine_that_stays_slower_is_followed_within_three_steps() -> None:
    usual = [ran(100, 0.1)] * SAMPLES
    assert learned(*usual, *[ran(100, 0.2)] * 3) == 50
    assert learned(*usual, *[ran(100, 0.2)] * 3, *[ran(50, 0.05)] * 3) == 100


@pytest.mark.parametrize("bound", [0.02, 0.1, 1.0])
@pytest.mark.parametrize("fixed", [0.0, 0.005, 0.015])
def test_steps_come_to_take_as_long_as_they_may_whatever_each_costs_besides_its_rows(
    bound: float, fixed: float
) -> None:
    pace = Pace(bound, 100_000)
    for _ in range(60):
        rows = pace.rows
        pace.add(ran(rows, fixed + 0.0001 * rows))
    assert 0.9 * bound <= fixed + 0.0001 * pace.rows <= bound


# --- what of a step text and media get --------------------------------------------------------------------------------


def media(bench: Bench, name: str, tokens: int, **more) -> Sequence:
    return bench.add(name, tokens, spans=[(0, tokens - 1, name)], **more)


def started(bench: Bench, rows: int | None = None) -> dict[str, tuple[int, int]]:
    """The prompts of one step."""
    plan = bench.scheduler.schedule(0, rows)
    for work in plan.decodes + plan.prefills:
        samples = work.samples
        bench.scheduler.finish_chunk(work)
        if samples:
            work.sequence.token_ids.append(7)
    return {work.sequence.sequence_id: (work.start, work.end) for work in plan.prefills}


@pytest.mark.parametrize(
    ("rows", "decodes", "tokens"),
    [
        (50, 0, 50),
        (50, 4, 46),
        (34, 4, MIN_PROMPT_TOKENS),
        (1, 0, MIN_PROMPT_TOKENS),
        (900, 0, 64),
        (None, 4, 64),
    ],
)
def test_prompts_have_the_rows_that_decodes_leave_within_their_bounds(
    rows: int | None, decodes: int, tokens: int
) -> None:
    bench = Bench(chunk_tokens=64)
    for number in range(decodes):
        bench.add(f"decodes-{number}", 2)
    bench.step()
    bench.add("long", 300)
    plan = bench.scheduler.schedule(0, rows)
    assert len(plan.decodes) == decodes
    assert [(work.start, work.end) for work in plan.prefills] == [(0, tokens)]


def test_text_has_its_share_of_a_step_before_media_that_waited_longer() -> None:
    bench = Bench(blocks=1000, chunk_tokens=64, text_percent=25)
    media(bench, "image", 400)
    started(bench)
    bench.add("text", 800)
    assert started(bench) == {"text": (0, 16), "image": (64, 112)}


def test_a_short_text_runs_whole_in_the_next_step_and_leaves_media_the_rest() -> None:
    bench = Bench(blocks=1000, chunk_tokens=64)
    media(bench, "image", 400)
    started(bench)
    bench.add("text", 10)
    assert started(bench) == {"text": (0, 10), "image": (64, 118)}


def test_media_have_their_share_however_much_text_comes() -> None:
    bench = Bench(blocks=1000, chunk_tokens=64, max_sequences=100, text_percent=75)
    image = media(bench, "image", 400)
    for number in range(10):
        bench.add(f"text-{number}", 64)
    for _ in range(6):
        assert "image" in started(bench)
    assert image.computed >= 96


def test_a_prompt_whose_media_have_their_kv_is_text() -> None:
    bench = Bench(blocks=1000, chunk_tokens=64, text_percent=50)
    ready = bench.add("ready", 300, spans=[(0, 64, "cat")])
    started(bench)
    assert ready.computed == 64
    media(bench, "image", 200)
    assert started(bench) == {"ready": (64, 96), "image": (0, 32)}


def test_media_that_wait_for_features_leave_text_the_whole_step() -> None:
    bench = Bench(blocks=1000, chunk_tokens=64)
    media(bench, "waits", 200, missing={0: (0, 199)})
    media(bench, "unit", 200, missing={0: (40, 199)}, atomic=[(0, 199)])
    bench.add("text", 300)
    assert started(bench) == {"text": (0, 64)}


def test_an_atomic_range_longer_than_its_share_runs_beside_text_as_often_as_its_share_pays_for() -> None:
    bench = Bench(blocks=2000, chunk_tokens=64, text_percent=50)
    media(bench, "image", 1000, atomic=[(0, 150), (150, 300), (300, 450)])
    bench.add("text", 4000)
    steps = [started(bench) for _ in range(15)]
    ran_in = [number for number, step in enumerate(steps) if "image" in step]
    assert ran_in == [4, 9, 14], "150 tokens are nearly five steps of 32"
    assert [steps[number]["image"] for number in ran_in] == [(0, 150), (150, 300), (300, 450)]
    assert all("text" in step for step in steps)


def test_what_stops_before_an_atomic_range_saves_the_rest_of_its_share_for_it() -> None:
    bench = Bench(blocks=2000, chunk_tokens=64, text_percent=50)
    media(bench, "image", 1000, atomic=[(8, 56)])
    bench.add("text", 4000)
    assert started(bench) == {"text": (0, 56), "image": (0, 8)}
    assert started(bench)["image"] == (8, 56)


def test_text_has_what_media_do_not_use_of_their_share() -> None:
    bench = Bench(blocks=1000, chunk_tokens=64, text_percent=50)
    media(bench, "image", 10)
    bench.add("text", 300)
    assert started(bench) == {"text": (0, 54), "image": (0, 10)}


def test_an_atomic_range_that_runs_alone_waits_for_nothing() -> None:
    bench = Bench(blocks=2000, chunk_tokens=64)
    media(bench, "image", 1000, atomic=[(0, 150)])
    assert started(bench) == {"image": (0, 150)}


class Sides(RuleBasedStateMachine):
    """Texts, media, atomic ranges and missing features, with budgets that change from step to step."""

    @initialize(text_percent=st.integers(10, 90), chunk_tokens=st.integers(16, 300))
    def begin(self, text_percent: int, chunk_tokens: int) -> None:
        self.bench = Bench(
            blocks=100_000, chunk_tokens=chunk_tokens, max_sequences=1000, text_percent=text_percent
        )
        self.owed = 0  # to media: tokens of their share that others had while they were ready
        self.longest = 1

    @rule(tokens=st.integers(1, 700))
    def text(self, tokens: int) -> None:
        self.bench.add(f"text-{self.bench.arrivals}", tokens)

    @rule(
        lead=st.integers(0, 40), size=st.integers(1, 400), tail=st.integers(1, 80), count=st.integers(1, 3),
        atomic=st.booleans(), missing=st.booleans(),
    )  # fmt: skip
    def media(self, lead: int, size: int, tail: int, count: int, atomic: bool, missing: bool) -> None:
        ranges = [(lead + n * (size + lead), lead + n * (size + lead) + size) for n in range(count)]
        if atomic:
            self.longest = max(self.longest, size)
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

    @rule(rows=st.integers(1, 400), count=st.integers(1, 12))
    def steps(self, rows: int, count: int) -> None:
        for _ in range(count):
            self.step(rows)

    def step(self, rows: int) -> None:
        scheduler = self.bench.scheduler
        plan = scheduler.schedule(0, rows)
        self.check(plan, min(scheduler.chunk_tokens, max(MIN_PROMPT_TOKENS, rows - len(plan.decodes))))
        for work in plan.decodes + plan.prefills:
            samples = work.samples
            scheduler.finish_chunk(work)
            if samples:
                scheduler.remove(work.sequence)

    def check(self, plan: StepPlan, budget: int) -> None:
        """Nothing has been computed yet, so each sequence is as the scheduler saw it."""
        own = max(1, budget * self.bench.scheduler.text_percent // 100)
        todo = {
            s: s.computable_until() - s.computed
            for s in self.bench.scheduler.running
            if not s.decoding and s.computable_until() > s.computed
        }
        given = {work.sequence: work.end - work.start for work in plan.prefills}
        assert len(given) == len(plan.prefills), "one piece of each"
        large = {s for s in todo if s.media_ahead}
        for work in plan.prefills:
            assert work.end <= work.sequence.computable_until()
            assert not any(start < work.end < stop for start, stop in work.sequence.atomic_ranges)
        assert sum(given.values()) <= budget + (0 if not large else self.longest)
        assert bool(given) == bool(todo), "what can run does"
        of_text = sum(tokens for s, tokens in given.items() if s not in large)
        of_media = sum(given.values()) - of_text
        assert of_text >= min(sum(todo[s] for s in todo if s not in large), own - own // 2)
        if large and len(large) < len(todo):
            share = min(sum(todo[s] for s in large), (budget - own) - (budget - own) // 2)
            self.owed = max(0, self.owed + share - of_media)
            assert self.owed <= self.longest + 300, "media do not fall behind their share for good"
        else:
            self.owed = 0

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.features_arrive()
        scheduler = self.bench.scheduler
        left = sum(s.remaining for s in scheduler.running + scheduler.waiting)
        sequences = len(scheduler.running) + len(scheduler.waiting)
        for _ in range(left // 4 + 40 * sequences + 1):
            if not scheduler.running and not scheduler.waiting:
                return
            self.step(1)
        raise AssertionError("not every prompt ends")


TestSides = Sides.TestCase
TestSides.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


# --- timelines --------------------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """Runs steps in simulated time: each costs `fixed` seconds and `per_row` for each row, twice as much until `slow_until`. `turn`
    seconds pass before each, in which another engine of the machine steps."""

    bench: Bench
    pace: Pace | None
    fixed: float = 0.02
    per_row: float = 0.001
    turn: float = 0.0
    now: float = 0.0
    slow_until: float = 0.0
    arrived: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    prefilled: Counter[str] = field(default_factory=Counter)

    def step(self) -> None:
        self.now += self.turn
        plan = self.bench.scheduler.schedule(0, self.pace.rows if self.pace else None)
        prefill = sum(work.end - work.start for work in plan.prefills)
        rows = prefill + len(plan.decodes)
        seconds = (self.fixed + self.per_row * rows) * (2.0 if self.now < self.slow_until else 1.0)
        self.now += seconds if rows else 0.001
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
        if self.pace:
            self.pace.add(ran(prefill, seconds, len(plan.decodes)))

    def serve(self, until: float, texts_every: float, media_at_once: int) -> None:
        """Texts of 20 to 55 tokens come one by one; so many media prompts of 1150 tokens are always here."""
        chance = random.Random(5)
        next_text = self.now
        while self.now < until:
            while next_text <= self.now:
                name = f"text-{len(self.arrived)}"
                self.arrived[name] = next_text
                self.bench.add(name, chance.randint(20, 55))
                next_text += texts_every * chance.uniform(0.5, 1.5)
            queue = self.bench.scheduler.running + self.bench.scheduler.waiting
            for _ in range(media_at_once - sum(bool(s.media_spans) and not s.decoding for s in queue)):
                name = f"media-{len(self.arrived)}"
                self.arrived[name] = self.now
                media(self.bench, name, 1150)
            self.step()

    def text_waits(self, since: float = 0.0) -> list[float]:
        return [
            seconds
            for name, seconds in self.waited.items()
            if name.startswith("text") and self.arrived[name] >= since
        ]


def machine(*, bounded: bool, **more) -> Machine:
    bench = Bench(blocks=4000, block_tokens=16, chunk_tokens=512, max_sequences=64)
    return Machine(bench, Pace(BOUND, 512 + 64) if bounded else None, **more)


def test_texts_beside_a_flood_of_media_wait_for_two_steps_and_media_still_advance() -> None:
    bounded, unbounded = machine(bounded=True), machine(bounded=False)
    for one in (bounded, unbounded):
        one.serve(60.0, texts_every=0.4, media_at_once=4)
        assert len(one.text_waits()) > 120
    assert max(bounded.text_waits(since=2.0)) <= 2.2 * BOUND
    assert max(unbounded.text_waits(since=2.0)) > 8 * BOUND, "what the bound is for"
    assert bounded.prefilled["media"] > 0.7 * unbounded.prefilled["media"]
    assert any(name.startswith("media") for name in bounded.waited)


def test_a_flood_of_texts_leaves_media_their_share() -> None:
    one = machine(bounded=True)
    one.serve(60.0, texts_every=0.02, media_at_once=1)
    assert len(one.bench.scheduler.waiting) > 500, "more than the machine can do"
    tokens = sum(one.prefilled.values())
    assert tokens > 30_000
    assert one.prefilled["media"] > 0.2 * tokens
    assert sum(name.startswith("media") for name in one.waited) > 3


def test_a_machine_that_is_half_as_fast_for_a_while_has_shorter_chunks_and_steps_as_long() -> None:
    one = machine(bounded=True, fixed=0.01)
    one.serve(20.0, texts_every=0.4, media_at_once=2)
    assert one.pace is not None
    usual = one.pace.rows
    one.slow_until = 40.0
    one.serve(40.0, texts_every=0.4, media_at_once=2)
    assert one.pace.rows < usual / 1.9
    one.serve(60.0, texts_every=0.4, media_at_once=2)
    assert 0.9 * usual < one.pace.rows < 1.1 * usual
    assert max(one.text_waits(since=22.0)) <= 3.2 * BOUND, (
        "three times, for texts longer than a slow step's part"
    )


@pytest.mark.parametrize("turn", [0.02, BOUND])
def test_texts_of_a_pod_that_takes_turns_wait_for_two_steps_and_two_turns(turn: float) -> None:
    one = machine(bounded=True, turn=turn)
    one.serve(60.0, texts_every=0.4, media_at_once=4)
    assert max(one.text_waits(since=2.0)) <= 2.2 * BOUND + 2 * turn
