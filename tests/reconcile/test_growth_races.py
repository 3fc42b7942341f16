"""A pass and a tick of the autoscaler that run at the same time, on a watch that lags: no free GPU is given to both."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.cluster.deployments import ANOTHER_MODEL

from .lagging_cluster import AUTOSCALING, Race

BUSY = 700.0


async def test_a_free_gpu_is_given_once_while_the_watch_lags():
    race = await begun(budget=4)
    await race.begin("tick")
    assert race.cluster.size("encoder") == 2
    race.change(decode={"gpus": 1, "replicas": 2})
    await race.begin("pass")
    assert race.cluster.gpus == 4


async def test_a_free_gpu_is_given_once_while_a_write_is_pending():
    race = await begun(budget=4)
    race.change(decode={"gpus": 1, "replicas": 2})
    race.cluster.holds = True
    await race.begin("tick")
    await race.release()
    assert race.cluster.size("encoder") == 1, "decided and not written yet"
    await race.begin("pass")
    while race.cluster.waiting:
        await race.release()
    assert race.cluster.gpus == 4


async def test_a_new_revision_takes_no_gpus_that_the_autoscaler_just_assigned():
    race = await begun(budget=6)
    await race.begin("tick")
    assert race.cluster.size("encoder") == 4
    race.change(**ANOTHER_MODEL)
    await race.begin("pass")
    assert race.cluster.gpus == 6


async def test_the_autoscaler_takes_no_gpus_that_a_new_revision_just_got():
    race = await begun(budget=6)
    race.change(**ANOTHER_MODEL)
    race.cluster.holds = True
    await race.begin("tick")
    await race.begin("pass")
    for _ in range(20):
        await race.release(-1)  # the pass overtakes the tick, whose reports are on their way
    race.cluster.show()
    while race.cluster.waiting:
        await race.release()
    assert race.cluster.gpus == 6


async def test_a_budget_that_is_lowered_while_reports_are_collected_holds():
    race = await begun(budget=6)
    await race.change_during_reports(lambda: race.change(gpuBudget=3))
    assert race.cluster.gpus == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda race: race.change(paused=True),
        lambda race: race.body["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"),
        lambda race: race.body["metadata"].update(uid="another"),
        lambda race: race.serve("aaaaaaaaaa"),
    ],
    ids=["paused", "deleted", "another deployment", "another revision"],
)
async def test_nothing_is_scaled_after_a_change_while_reports_are_collected(change):
    race = await begun(budget=6)
    await race.change_during_reports(lambda: change(race))
    assert race.cluster.gpus == 3


@pytest.mark.parametrize(("minimum", "size"), [(1, 4), (2, 4), (5, 5)])
async def test_a_pass_does_not_undo_growth_that_the_watch_does_not_show(minimum: int, size: int):
    race = await begun(budget=12)
    await race.finish("tick")
    assert race.cluster.size("encoder") == 4
    race.change(encoder={"gpus": 1, "autoscaling": AUTOSCALING | {"minReplicas": minimum, "maxReplicas": 5}})
    await race.finish("pass")
    assert race.cluster.size("encoder") == size


@pytest.mark.parametrize("order", [("pass", "tick"), ("tick", "pass")])
@pytest.mark.parametrize("released", [0, -1])
async def test_two_sizes_that_are_written_at_once_drop_no_pod(order: tuple[str, str], released: int):
    race = await begun(budget=12)
    race.change(encoder={"gpus": 1, "autoscaling": AUTOSCALING | {"minReplicas": 2}})
    race.cluster.holds = True
    for what in order:
        await race.begin(what)
    while race.cluster.waiting:
        await race.release(released)
    assert race.cluster.shrunk == []
    race.cluster.holds = False
    await race.finish("tick")
    assert race.cluster.size("encoder") == 4


async def test_a_new_revision_counts_however_long_the_watch_lags():
    race = await begun(budget=6)
    race.change(**ANOTHER_MODEL)
    await race.finish("pass")
    for _ in range(3):
        race.time_passes(61)
        await race.finish("pass")
        await race.finish("tick")
    assert race.cluster.gpus == 6


async def test_growth_of_the_autoscaler_counts_after_it_is_idle_again():
    race = await begun(budget=6)
    await race.finish("tick")
    assert race.cluster.gpus == 6
    race.reports.queued = 0.0
    race.time_passes(61)
    await race.finish("tick")
    race.change(decode={"gpus": 1, "replicas": 2})
    await race.finish("pass")
    assert race.cluster.gpus == 6


async def test_a_pool_created_without_an_answer_counts_when_found():
    race = await begun(budget=6)
    race.change(**ANOTHER_MODEL)
    await race.finish("pass")
    assert race.cluster.gpus == 6
    race.restart()
    await race.finish("pass")
    await race.finish("tick")
    assert race.cluster.gpus == 6


async def begun(budget: int) -> Race:
    """Three pods serve, and the encoder has more work than it can do."""
    race = Race(budget)
    await race.settle()
    assert race.cluster.gpus == 3
    race.reports.queued = BUSY
    return race


CHANGES = st.sampled_from(["busy", "idle", "decode", "model"])
ANSWERS = st.sampled_from(["refused", "lost", "unanswered"])
LATER = st.sampled_from(["minimum", "budget", "time", "gone"])
EVENTS = st.sampled_from(["pass", "tick"]) | st.just("show") | CHANGES | ANSWERS | LATER
CALLS = st.lists(st.integers(0, 3), max_size=12)


@settings(max_examples=100, deadline=None)
@given(spare=st.integers(0, 4), events=st.lists(st.tuples(EVENTS, CALLS), min_size=5, max_size=25))
@example(
    spare=1,
    events=[("tick", [0]), ("decode", []), ("pass", [0, 0, 0, 0]), ("show", [0, 0])],
)
@example(
    spare=1,
    events=[
        *[("pass", [])] * 6,
        ("decode", [0, 0]),
        ("gone", []),
        *[("pass", [])] * 2,
        ("pass", [0]),
        ("pass", []),
        ("show", []),
        ("minimum", []),
        ("decode", []),
    ],
)
def test_passes_and_ticks_at_once_keep_to_the_budget(spare: int, events: list[tuple[str, list[int]]]):
    asyncio.run(race_through(spare, events))


async def race_through(spare: int, events: list[tuple[str, list[int]]]) -> None:
    """Each event, and then the calls that go on: by their place among those that wait.

    A pool that another client has deleted comes back at its minimum at once, though pods that are ending may still hold its GPUs.
    """
    race = await begun(3 + spare)
    race.cluster.holds = True
    decode, minimum, dtypes = 1, 1, ["BFloat16", "Float32"]
    budgets = [3, 3 + spare]
    ceiling, returns = budgets[-1], 0
    for event, calls in events:
        match event:
            case "pass" | "tick":
                await race.begin(event)
            case "show":
                race.cluster.show()
            case "time":
                race.time_passes(61)
            case "gone":
                race.cluster.vanish("encoder")
                returns = 2
            case "busy" | "idle":
                race.reports.queued = BUSY if event == "busy" else 0.0
            case "decode":
                decode = 3 - decode
                race.change(decode={"gpus": 1, "replicas": decode})
            case "minimum":
                minimum = 3 - minimum
                race.change(encoder={"gpus": 1, "autoscaling": AUTOSCALING | {"minReplicas": minimum}})
            case "budget":
                budgets.reverse()
                race.change(gpuBudget=budgets[-1])
            case "model":
                race.change(model={"id": "builtin/demo", "dtype": dtypes[0]})
                dtypes.reverse()
            case outcome:
                race.cluster.outcomes.append(outcome)
        ceiling = max(ceiling, budgets[-1])
        for call in calls:
            await race.release(call)
            assert race.cluster.gpus <= ceiling + returns
            assert race.cluster.shrunk == []
        if not race.cluster.waiting:  # nothing is on its way that a larger budget allowed
            ceiling = max(budgets[-1], race.cluster.gpus)
            if race.cluster.size("encoder"):
                returns = 0
    race.cluster.outcomes.clear()
    await race.settle()
    assert race.cluster.gpus <= ceiling + returns
    await race.end()
