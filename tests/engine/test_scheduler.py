"""What the scheduler chooses, as tables: budgets, order, missing features, atomic ranges, admission and preemption."""

import pytest
import torch

from mmd_workers.engine.blocks import BlockPool
from mmd_workers.engine.scheduler import Scheduler
from mmd_workers.engine.sequence import Sequence, State
from mmd_workers.engine.types import SamplingParams
from mmd_workers.model.types import LoweredPrompt

NOTHING = torch.empty(0)


class Bench:
    def __init__(self, blocks=100, block_tokens=4, **settings):
        self.pool = BlockPool(blocks, block_tokens)
        defaults = {"max_sequences": 8, "chunk_tokens": 16, "prefix_cache": False}
        self.scheduler = Scheduler(self.pool, **{**defaults, **settings})
        self.arrivals = 0

    def add(self, name, tokens, missing=None, atomic=(), spans=()):
        self.arrivals += 1
        ids = list(range(tokens)) if isinstance(tokens, int) else tokens
        prompt = LoweredPrompt(ids, NOTHING, len(ids), NOTHING, {}, dict(missing or {}), list(atomic))
        sequence = Sequence(
            name, self.arrivals, list(ids), len(ids), len(ids), SamplingParams(99), list(spans), prompt
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self, reserved=0):
        """One step as the engine would run it: {name: (start, end)}."""
        schedule = self.scheduler.schedule(reserved)
        done = {}
        for work in schedule.decodes + schedule.prefills:
            done[work.sequence.sequence_id] = (work.start, work.end)
            samples = work.samples
            self.scheduler.finish_chunk(work)
            if samples:
                work.sequence.token_ids.append(7)
                work.sequence.num_outputs += 1
        return done


def test_a_long_prompt_is_cut_into_chunks_of_the_budget():
    bench = Bench()
    bench.add("a", 40)
    assert [bench.step() for _ in range(4)] == [
        {"a": (0, 16)},
        {"a": (16, 32)},
        {"a": (32, 40)},
        {"a": (40, 41)},
    ]


def test_all_decoding_sequences_run_beside_a_full_chunk():
    bench = Bench()
    bench.add("a", 4)
    bench.add("b", 5)
    bench.step()
    bench.add("long", 100)
    assert bench.step() == {"a": (4, 5), "b": (5, 6), "long": (0, 16)}


def test_a_short_prompt_overtakes_a_long_one_and_leaves_it_the_rest_of_the_budget():
    bench = Bench()
    bench.add("long", 100)
    bench.step()
    bench.add("short", 6)
    assert bench.step() == {"short": (0, 6), "long": (16, 26)}


def test_a_prompt_is_not_begun_with_the_scraps_of_a_budget_that_would_only_hold_others_up():
    bench = Bench()
    bench.add("first", 12)
    bench.add("second", 13)
    assert bench.step() == {"first": (0, 12)}
    assert bench.step() == {"first": (12, 13), "second": (0, 13)}


def test_what_fits_into_the_scraps_of_a_budget_runs_there():
    bench = Bench()
    bench.add("long", 10)
    bench.add("short", 4)
    bench.add("waits", 9, missing={0: (2, 8)})
    assert bench.step() == {"short": (0, 4), "waits": (0, 2), "long": (0, 10)}


def test_a_long_prompt_is_not_starved_by_an_endless_row_of_short_ones():
    bench = Bench(blocks=1000, max_sequences=500)
    long = bench.add("long", 64)
    for number in range(400):
        bench.add(f"s{number}", 16)
        bench.step()
        if long.remaining <= 1:
            break
    assert number < 60


def test_prefill_stops_before_the_first_missing_feature_and_goes_on_when_it_is_there():
    bench = Bench()
    sequence = bench.add("a", 30, missing={0: (10, 14), 1: (20, 24)})
    assert (sequence.remaining, sequence.blocked) == (30, 20)
    assert bench.step() == {"a": (0, 10)}
    assert bench.step() == {}
    assert (sequence.remaining, sequence.blocked) == (20, 20)
    del sequence.prompt.missing[0]
    assert bench.step() == {"a": (10, 20)}
    del sequence.prompt.missing[1]
    assert (sequence.remaining, sequence.blocked) == (10, 0)
    assert bench.step() == {"a": (20, 30)}


def test_a_sequence_that_waits_for_its_feature_does_not_hold_others_up():
    bench = Bench()
    bench.add("image", 8, missing={0: (0, 6)})
    bench.add("text", 12)
    assert bench.step() == {"text": (0, 12)}


@pytest.mark.parametrize(
    ("atomic", "chunks"),
    [
        ([(12, 20)], [(0, 12), (12, 28), (28, 40)]),  # would be cut: postponed
        ([(16, 32)], [(0, 16), (16, 32), (32, 40)]),  # exactly a chunk
        ([(4, 30)], [(0, 4), (4, 30), (30, 40)]),  # larger than a chunk: runs alone, over budget
        ([(0, 8), (8, 20)], [(0, 8), (8, 20), (20, 36), (36, 40)]),  # (8, 24) fits up to 24
    ],
)
def test_an_atomic_range_is_never_cut(atomic, chunks):
    bench = Bench()
    bench.add("a", 40, atomic=atomic)
    got = []
    while not got or got[-1][1] < 40:
        got.append(bench.step()["a"])
    assert all(not (start < cut < stop) for _, cut in got for start, stop in atomic)
    if atomic != [(0, 8), (8, 20)]:
        assert got == chunks


def test_an_atomic_range_larger_than_the_rest_of_the_budget_waits_for_the_next_step():
    bench = Bench()
    bench.add("short", 10)
    bench.add("image", 30, atomic=[(0, 12)])
    assert bench.step() == {"short": (0, 10)}
    assert bench.step() == {"short": (10, 11), "image": (0, 16)}


def test_admission_waits_until_the_whole_prompt_has_blocks():
    bench = Bench(blocks=10)
    first = bench.add("first", 24)
    second = bench.add("second", 30)
    bench.step()
    assert (first.state, second.state) == (State.RUNNING, State.WAITING)
    bench.scheduler.remove(first)
    assert bench.step() == {"second": (0, 16)}


def test_no_more_than_max_sequences_run_and_reserved_places_stay_free():
    bench = Bench(max_sequences=3)
    for name in "abcd":
        bench.add(name, 2)
    assert set(bench.step(reserved=1)) == {"a", "b"}
    assert set(bench.step()) == {"a", "b", "c"}


def test_when_decode_runs_out_of_blocks_the_youngest_waits_and_keeps_its_tokens():
    bench = Bench(blocks=5, block_tokens=4)
    old = bench.add("old", 8)
    young = bench.add("young", 7)
    bench.step()
    assert set(bench.step()) == {"old", "young"}
    assert set(bench.step()) == {"old"}
    assert young.state is State.WAITING
    assert young.blocks == []
    assert young.num_tokens == 9
    bench.scheduler.remove(old)
    assert bench.step() == {"young": (0, 9)}
    assert bench.scheduler.preemptions == 1


def test_sequences_attached_from_elsewhere_are_never_preempted():
    bench = Bench(blocks=5, block_tokens=4)
    attached = Sequence(
        "there", 99, list(range(9)), 8, 8, SamplingParams(9), [], None, 1, blocks=bench.pool.allocate(3)
    )
    bench.scheduler.start(attached)
    attached.computed = 8
    local = bench.add("here", 7)
    for _ in range(3):
        bench.step()
    assert local.state is State.WAITING
    assert attached.state is State.RUNNING


def test_a_prefill_whose_kv_has_been_announced_is_never_preempted():
    bench = Bench(blocks=6, block_tokens=4, chunk_tokens=4)
    local = bench.add("here", 3)
    bench.step()
    travelling = bench.add("travels", 12, missing={0: (8, 12)})
    travelling.stop_after_prefill = True
    for _ in range(30):
        bench.step()
    assert travelling.state is State.RUNNING
    assert travelling.computed == 8
    assert bench.scheduler.preemptions > 0
    assert local.num_tokens > 8


def test_cached_blocks_are_skipped_but_never_the_last_token_nor_a_part_of_an_atomic_range():
    bench = Bench(prefix_cache=True)
    spans = [(6, 8, "cat")]
    bench.add("a", 16, spans=spans, atomic=[(6, 14)])
    assert bench.step() == {"a": (0, 16)}
    bench.add("same", 16, spans=spans, atomic=[(6, 14)])
    bench.add("plain", 16, spans=spans)
    bench.add("other", 16, spans=[(6, 8, "dog")])
    step = {}
    while len(step) < 4:
        step = {**bench.step(), **step}
    assert step["same"][0] == 4
    assert step["plain"][0] == 12
    assert step["other"][0] == 4


def test_a_cached_medium_needs_no_feature():
    bench = Bench(prefix_cache=True)
    bench.add("a", 16, spans=[(4, 4, "cat")])
    bench.step()
    bench.add("again", 16, spans=[(4, 4, "cat")], missing={0: (4, 8)})
    assert bench.step()["again"] == (12, 16)
