"""How a step is divided between texts and prompts with media: as tables, and for whatever comes in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.contract.steps import StepBound
from mmd_api.contract.text_share import TextShare
from mmd_workers.engine.interface import StepOutput
from mmd_workers.engine.pacing.pace import Pace
from mmd_workers.engine.scheduler import StepPlan
from mmd_workers.engine.sequence import Sequence
from support.oracles.scheduler_bench import Bench

CHUNK = 100


def bench_of(percent: int | None = 30, chunk_tokens: int = CHUNK, **more) -> Bench:
    share = None if percent is None else TextShare(percent)
    settings = {"blocks": 100_000, "max_sequences": 1000, **more}
    return Bench(chunk_tokens=chunk_tokens, text_share=share, **settings)


def media(bench: Bench, name: str, tokens: int, **more) -> Sequence:
    return bench.add(name, tokens, spans=[(0, tokens - 1, name)], **more)


def finish(bench: Bench, plan: StepPlan) -> None:
    """Run the step; prompts end with it."""
    for work in plan.decodes + plan.prefills:
        samples = work.samples
        bench.scheduler.finish_chunk(work)
        if samples:
            bench.scheduler.remove(work.sequence)


def prefilled(bench: Bench) -> dict[str, int]:
    """The tokens of the prompts in one step, which end with it."""
    plan = bench.scheduler.schedule()
    finish(bench, plan)
    return {work.sequence.sequence_id: work.tokens for work in plan.prefills}


def test_a_guided_prompt_that_waits_for_its_medium_is_owed_nothing() -> None:
    """The last token of its companion can be computed with its own last one only."""
    bench = bench_of(50)
    waiting = media(bench, "g", 500, missing={0: (0, 499)})
    waiting.companion = Bench().add("g", 1)
    bench.add("text", 5000)
    for _ in range(3):
        assert prefilled(bench) == {"text": 100}
    assert bench.scheduler.text_share.owed_hundredths == 0


@pytest.mark.parametrize(
    ("percent", "owed", "text", "media", "first", "quota"),
    [
        pytest.param(30, 0, 900, 900, "text", 30, id="its part"),
        pytest.param(30, 1000, 900, 900, "text", 40, id="what it is owed besides"),
        pytest.param(30, 20_000, 900, 900, "text", 100, id="all of the step at most"),
        pytest.param(30, 0, 900, 20, "text", 80, id="what media do not want"),
        pytest.param(30, -1000, 900, 900, "media", 80, id="media first where they are owed some"),
        pytest.param(30, -20_000, 900, 900, "media", 100, id="and all of the step at most"),
        pytest.param(30, -1, 10, 900, "media", 90, id="what text does not want"),
        pytest.param(1, 49, 900, 900, "text", 1, id="a fraction of a token is owed"),
        pytest.param(33, 99, 900, 900, "text", 33, id="until it is a token"),
    ],
)
def test_the_quota_of_the_first_side_includes_debts_and_leftovers(
    percent: int, owed: int, text: int, media: int, first: str, quota: int
) -> None:
    share = TextShare(percent, owed)
    assert share.text_first == (first == "text")
    assert share.quota(100, text, media) == quota


@pytest.mark.parametrize(
    ("had", "wants", "owed"),
    [
        pytest.param((30, 70), (True, True), 0, id="both had their part"),
        pytest.param((0, 100), (True, True), 3000, id="text had nothing"),
        pytest.param((0, 100), (False, True), 0, id="text wants nothing"),
        pytest.param((100, 0), (True, True), -7000, id="media had nothing"),
        pytest.param((100, 0), (True, False), 0, id="media want nothing"),
        pytest.param((0, 9000), (True, True), 50_000, id="no more than so many tokens"),
        pytest.param((9000, 0), (True, True), -50_000, id="to either side"),
    ],
)
def test_excess_is_owed_to_the_other_side_while_it_wants_it(
    had: tuple[int, int], wants: tuple[bool, bool], owed: int
) -> None:
    share = TextShare(30)
    share.add(*had, text_wants=wants[0], media_want=wants[1], most=500)
    assert share.owed_hundredths == owed


def test_what_is_owed_is_kept_while_smaller_steps_follow() -> None:
    share = TextShare(30, 50_000)
    share.add(10, 0, text_wants=True, media_want=True, most=100)
    assert share.owed_hundredths == 49_300
    share.add(0, 10, text_wants=True, media_want=True, most=100)
    assert share.owed_hundredths == 49_300, "but no more of it"


def test_a_text_keeps_its_share_although_shorter_media_keep_coming() -> None:
    steps = []
    for percent in (30, None):
        bench = bench_of(percent)
        bench.add("text", 10_000)
        for number in range(4):
            media(bench, f"image-{number}", CHUNK)
            steps.append(prefilled(bench).get("text", 0))
    assert steps == [30, 30, 30, 30, 0, 0, 0, 0]


def test_media_have_the_rest_of_each_step_although_short_texts_fill_it() -> None:
    steps = []
    for percent in (30, None):
        bench = bench_of(percent)
        media(bench, "video", 10_000)
        for number in range(4):
            for half in "ab":
                bench.add(f"text-{number}{half}", 50)
            steps.append(prefilled(bench).get("video", 0))
    assert steps == [70, 70, 70, 70, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "image", "expected"),
    [
        pytest.param(10, 500, {"text": 10, "image": 90}, id="text"),
        pytest.param(500, 40, {"text": 60, "image": 40}, id="media"),
        pytest.param(500, 0, {"text": 100}, id="no media"),
        pytest.param(0, 500, {"image": 100}, id="no text"),
    ],
)
def test_what_one_side_does_not_need_the_other_has(text: int, image: int, expected: dict[str, int]) -> None:
    bench = bench_of()
    if text:
        bench.add("text", text)
    if image:
        media(bench, "image", image)
    assert prefilled(bench) == expected


def test_media_without_their_features_leave_text_the_step() -> None:
    bench = bench_of()
    media(bench, "waits", 500, missing={0: (0, 499)})
    bench.add("text", 500)
    assert prefilled(bench) == {"text": 100}


def test_the_text_after_media_is_text() -> None:
    bench = bench_of()
    bench.add("asks", 400, spans=[(0, 70, "cat")])
    bench.add("text", 1000)
    assert [prefilled(bench) for _ in range(2)] == [{"text": 30, "asks": 70}, {"asks": 100}]


def test_a_prompt_is_begun_wherever_the_part_of_the_others_ends() -> None:
    bench = bench_of(50)
    for name in "abc":
        bench.add(name, 20)
    media(bench, "image", 500)
    assert prefilled(bench) == {"a": 20, "b": 20, "c": 10, "image": 50}


def test_an_atomic_image_runs_whole_and_text_is_compensated_afterwards() -> None:
    bench = bench_of(50)
    bench.add("text", 5000)
    media(bench, "image", 800, atomic=[(80 * number, 80 * number + 80) for number in range(10)])
    steps = [prefilled(bench) for _ in range(10)]
    assert all(step.get("image", 80) == 80 for step in steps)
    of_text = sum(step.get("text", 0) for step in steps)
    of_image = sum(step.get("image", 0) for step in steps)
    assert abs(of_text - of_image) <= 80


def test_a_bounded_step_is_divided_and_gives_the_oldest_its_turn() -> None:
    pace = Pace(StepBound.of_chunks(0.1, CHUNK))
    for tokens in (9 * 40, 40):
        pace.add(StepOutput(sequences=1, prefill_tokens=tokens, duration_seconds=0.1 * tokens / 40))
    bench = bench_of(25, pace=pace)
    media(bench, "old", 2000).arrived = 1.0
    for number in range(8):
        media(bench, f"image-{number}", 30).arrived = 2.0
    bench.add("text", 1000).arrived = 3.0
    steps = [prefilled(bench) for _ in range(8)]
    assert [step["text"] for step in steps] == [10] * 8
    assert [step.get("old") for step in steps[:4]] == [None, None, None, 30]


@settings(deadline=None)
@given(
    percent=st.integers(1, 99),
    chunk_tokens=st.integers(1, 300),
    prompts=st.lists(st.tuples(st.booleans(), st.integers(1, 400)), max_size=12),
    steps=st.integers(1, 30),
)
def test_each_step_keeps_the_text_share_whatever_prompts_compete(
    percent: int, chunk_tokens: int, prompts: list[tuple[bool, int]], steps: int
) -> None:
    bench = bench_of(percent, chunk_tokens)
    bench.add("text", 30 * chunk_tokens)
    media(bench, "media", 30 * chunk_tokens)
    for number in range(steps):
        for place, (with_media, tokens) in enumerate(prompts):
            name = f"{number}-{place}"
            if with_media:
                media(bench, name, tokens + 1)
            else:
                bench.add(name, tokens)
        plan = bench.scheduler.schedule()
        of_text = sum(work.tokens for work in plan.prefills if not work.sequence.media_ahead)
        assert sum(work.tokens for work in plan.prefills) == chunk_tokens
        assert of_text >= percent * chunk_tokens // 100
        assert chunk_tokens - of_text >= (100 - percent) * chunk_tokens // 100
        finish(bench, plan)


@settings(deadline=None, max_examples=60)
@given(
    percent=st.integers(20, 80),
    chunk_tokens=st.integers(16, 200),
    fits=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    images=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 250), st.booleans()), min_size=1, max_size=4
    ),
    texts=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    text_floods=st.booleans(),
)
def test_neither_side_starves_beside_an_endless_row_of_the_other(
    percent: int,
    chunk_tokens: int,
    fits: list[int],
    images: list[tuple[int, int, bool]],
    texts: list[int],
    text_floods: bool,
) -> None:
    """Images that may not be cut, and steps of a time in which another number of tokens fits each time."""
    bench = bench_of(percent, chunk_tokens)
    scheduler = bench.scheduler
    share = scheduler.text_share
    assert share is not None

    def add(number: int, *, of_media: bool) -> Sequence:
        name = f"prompt-{bench.arrivals}"
        if not of_media:
            return bench.add(name, texts[number % len(texts)])
        lead, size, atomic = images[number % len(images)]
        ranges = [(lead, lead + size), (2 * lead + size, 2 * lead + 2 * size)]
        spans = [(start, stop - start, name) for start, stop in ranges]
        return bench.add(name, ranges[-1][1] + 1, spans=spans, atomic=ranges if atomic else ())

    wanted = [add(number, of_media=text_floods) for number in range(len(images if text_floods else texts))]
    flood = list[Sequence]()
    largest = max(chunk_tokens, *(size for _, size, _ in images))
    left, of_text, total, number = sum(s.remaining for s in wanted), 0, 0, 0
    part = (100 - percent if text_floods else percent) * max(1, chunk_tokens // 8)
    most_steps = 20 + 100 * (4 * left + 4 * largest) // part
    while wanted := [s for s in wanted if s.remaining]:
        number += 1
        assert number <= most_steps
        flood = [s for s in flood if s.remaining]
        flood += [add(number + place, of_media=not text_floods) for place in range(4 - len(flood))]
        tokens = fits[number % len(fits)]
        scheduler.pace = Pace(StepBound.of_chunks(0.1, chunk_tokens))
        for rows in (9 * tokens, tokens):
            scheduler.pace.learn(rows, 0.1 * rows / tokens)
        plan = scheduler.schedule()
        assert plan.prefills, "what can run does"
        of_text += sum(work.tokens for work in plan.prefills if not work.sequence.media_ahead)
        total += sum(work.tokens for work in plan.prefills)
        finish(bench, plan)
        if not text_floods and share.owed_hundredths > 0:
            assert percent * total - 100 * of_text <= 100 * (largest + chunk_tokens)
