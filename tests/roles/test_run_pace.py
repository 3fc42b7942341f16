"""How much a tower run has beside an engine: as a table, and as a loop with towers of which the one has costly runs and the other costly media."""

from __future__ import annotations

from collections import Counter

import pytest

from mmd_workers.encoder.run_pace import RunPace, RunPaces

WORK = 576  # of a medium


def ran(*runs: tuple[int, float], max_seconds: float = 0.1, max_work: int = 8 * WORK) -> RunPace:
    pace = RunPace(max_seconds, max_work)
    for media, seconds in runs:
        pace.ran(media * WORK, media, seconds)
    return pace


@pytest.mark.parametrize(
    ("runs", "media"),
    [
        pytest.param([(1, 0.02)], 2, id="a medium more than the first run had"),
        pytest.param([(1, 0.5)], 2, id="also where that took too long, which may be the run's own time"),
        pytest.param([(3, 0.1)], 4, id="a medium more while runs of one size are in time"),
        pytest.param([(4, 0.11)], 2, id="half where they are not"),
        pytest.param([(8, 0.05)], 8, id="no more than a batch"),
        pytest.param([(1, 0.02), (2, 0.04)], 5, id="as many as fit"),
        pytest.param([(1, 0.06), (2, 0.065)], 8, id="more of them where the run itself takes long"),
        pytest.param([(1, 0.07), (2, 0.09)], 2.5, id="it takes half of a run at most"),
        pytest.param([(1, 0.2), (2, 0.4)], 1, id="one alone that takes too long"),
    ],
)
def test_a_run_has_as_many_media_as_fit_by_what_runs_took(
    runs: list[tuple[int, float]], media: float
) -> None:
    assert ran(*runs).tokens() == pytest.approx(media * WORK, abs=1)


def test_media_of_unlike_sizes_count_by_their_work() -> None:
    pace = RunPace(0.1, 4096)
    pace.ran(100, 3, 0.05)
    assert pace.tokens() == 134
    pace.ran(134, 1, 0.067)
    assert pace.tokens() == 200


@pytest.mark.parametrize(
    ("fixed", "each", "media"),
    [
        pytest.param(0.06, 0.005, 8, id="launches dominate"),
        pytest.param(0.3, 0.005, 8, id="a run alone exceeds the bound"),
        pytest.param(0.0, 0.04, 2, id="media dominate"),
        pytest.param(0.01, 0.03, 3, id="both"),
        pytest.param(0.02, 0.2, 1, id="a medium alone exceeds the bound"),
    ],
)
def test_runs_grow_to_what_fits_and_follow_a_changing_tower(fixed: float, each: float, media: int) -> None:
    pace = RunPace(0.1, 8 * WORK)
    for costs in ((fixed, each), (0.5, 0.5), (fixed, each)):
        sizes = []
        for _ in range(150):
            items = max(1, pace.tokens() // WORK)
            sizes.append(items)
            pace.ran(WORK * items, items, costs[0] + costs[1] * items)
    assert Counter(sizes[50:]).most_common(1)[0][0] == media
    assert max(sizes[50:]) <= media + 1


def test_runs_have_whole_batches_while_nobody_waits_for_the_engine() -> None:
    waits = [True]
    paces = RunPaces(0.1, 8 * WORK, lambda: waits[0])
    assert paces.max_work("image") == 1, "one medium, before anything has been measured"
    for media in (1, 2):
        paces.ran("image", media * WORK, media, 0.04 * media)
    assert paces.max_work("image") == pytest.approx(2.5 * WORK, abs=1)
    assert paces.max_work("video") == 1, "of another speed"
    waits[0] = False
    assert paces.max_work("image") == paces.max_work("video") == 8 * WORK
