"""What the scheduler chooses, as tables: budgets, order, missing features, atomic ranges, admission and preemption."""

import pytest

from mmd_workers.engine.interface import SamplingParams
from mmd_workers.engine.memory.blocks import block_hash
from mmd_workers.engine.scheduler import MAX_OVERTAKEN, MAX_PASSED
from mmd_workers.engine.sequence import Sequence, SequenceState
from support.oracles.scheduler_bench import Bench


def test_a_long_prompt_is_cut_into_chunks_of_the_budget():
    bench = Bench()
    bench.add("a", 40)
    assert [bench.step() for _ in range(4)] == [
        {"a": (0, 16)},
        {"a": (16, 32)},
        {"a": (32, 40)},
        {"a": (40, 41)},
    ]


def test_all_decoding_sequences_run_together_with_a_full_chunk():
    bench = Bench()
    bench.add("a", 4)
    bench.add("b", 5)
    bench.step()
    bench.add("long", 100)
    assert bench.step() == {"a": (4, 5), "b": (5, 6), "long": (0, 16)}


def test_a_short_prompt_overtakes_a_long_one_which_gets_the_rest():
    bench = Bench()
    bench.add("long", 100)
    bench.step()
    bench.add("short", 6)
    assert bench.step() == {"short": (0, 6), "long": (16, 26)}


def test_a_prompt_larger_than_the_scraps_of_a_budget_waits():
    """A part of it would only hold others up."""
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


def test_endless_short_prompts_do_not_starve_a_long_one():
    bench = Bench(blocks=1000, max_sequences=500)
    long = bench.add("long", 64)
    for number in range(400):
        bench.add(f"s{number}", 16)
        bench.step()
        if long.remaining <= 1:
            break
    assert number < 60


def test_a_waiting_step_counts_one_token_where_chunks_have_under_eight():
    bench = Bench(max_sequences=30, chunk_tokens=4)
    bench.add("long", 10)
    steps = []
    while "long" not in steps[-1:]:
        bench.add(f"s{len(steps)}", 4)
        steps += [name for name, (start, end) in bench.step().items() if end - start > 1]
    assert len(steps) == 7


def test_prefill_stops_before_the_first_missing_feature_and_continues_when_it_arrives():
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
        ([(4, 16)], [(0, 16), (16, 32), (32, 40)]),  # ends where the chunk does
        ([(4, 40)], [(0, 4), (4, 40)]),  # ends where the prompt does
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


def test_an_atomic_range_larger_than_the_remaining_budget_waits():
    bench = Bench()
    bench.add("short", 10)
    bench.add("image", 30, atomic=[(0, 12)])
    assert bench.step() == {"short": (0, 10)}
    assert bench.step() == {"short": (10, 11), "image": (0, 16)}


def test_an_atomic_range_waits_even_with_half_of_the_budget_left():
    bench = Bench()
    bench.add("short", 6)
    bench.add("image", 30, atomic=[(0, 12)])
    assert bench.step() == {"short": (0, 6)}
    assert bench.step() == {"short": (6, 7), "image": (0, 16)}


def test_an_atomic_range_with_a_missing_feature_waits_as_a_unit():
    bench = Bench()
    sequence = bench.add("a", 40, atomic=[(4, 24)], missing={0: (20, 24)})
    assert bench.step() == {"a": (0, 4)}
    assert bench.step() == {}
    del sequence.prompt.missing[0]
    assert bench.step() == {"a": (4, 24)}


@pytest.mark.parametrize(("ahead", "begun"), [(8, {"long": (0, 8)}), (9, {})])
def test_a_long_prompt_is_begun_with_at_least_half_a_budget(ahead, begun):
    bench = Bench()
    bench.add("short", ahead)
    bench.add("long", 30)
    assert bench.step() == {"short": (0, ahead), **begun}


@pytest.mark.parametrize(("waited", "first"), [(7, "short"), (8, "long")])
def test_each_waiting_step_ranks_a_prompt_an_eighth_of_a_chunk_shorter(waited, first):
    bench = Bench(max_sequences=1, chunk_tokens=64)
    holder = bench.add("holder", 4, missing={0: (0, 4)})
    bench.step()
    bench.add("long", 79)
    for _ in range(waited):
        bench.step()
    bench.add("short", 16)
    bench.scheduler.remove(holder)
    assert list(bench.step()) == [first]


def test_each_step_that_passes_over_a_running_prompt_ranks_it_shorter():
    bench = Bench(blocks=1000, max_sequences=100)
    bench.add("long", 40)
    for passed_over in range(30):
        bench.add(f"short-{passed_over}", 16)
        if "long" in bench.step():
            break
    assert passed_over == 12  # 40 - 12 * 2 is as long as the short one, which came later


@pytest.mark.parametrize(("tokens", "state"), [(12, SequenceState.RUNNING), (13, SequenceState.WAITING)])
def test_an_admission_leaves_one_spare_block_for_each_sequence_that_runs(tokens, state):
    bench = Bench(blocks=10)
    bench.add("running", 24)
    bench.step()
    second = bench.add("second", tokens)
    bench.step()
    assert second.state is state


def test_a_sequence_alone_may_have_every_block():
    bench = Bench(blocks=4)
    alone, larger = bench.add("alone", 16), bench.add("larger", 17)
    assert bench.step() == {"alone": (0, 16)}
    bench.scheduler.remove(alone)
    assert bench.step() == {}
    assert larger.state is SequenceState.WAITING


@pytest.mark.parametrize(("large", "admitted"), [(MAX_PASSED, True), (MAX_PASSED + 1, False)])
def test_a_step_skips_a_bounded_number_of_sequences_that_do_not_fit(large, admitted):
    bench = Bench(blocks=10, max_sequences=20)
    bench.add("running", 24, missing={0: (20, 24)})
    bench.step()
    for number in range(large):
        bench.add(f"large-{number}", 20).waited_steps = 1000
    small = bench.add("small", 4)
    bench.step()
    assert (small.state is SequenceState.RUNNING) is admitted


def test_hits_and_misses_of_the_prefix_cache_are_counted_in_tokens():
    bench = Bench(prefix_cache=True)
    bench.add("first", 9)
    bench.step()
    same = bench.add("same", 9)
    bench.step()
    assert len(same.blocks) == 3
    assert (bench.scheduler.prefix_hit_tokens, bench.scheduler.prefix_miss_tokens) == (8, 10)
    assert bench.scheduler.admitted == {"first": 0, "same": 8}


def test_admission_waits_until_the_full_prompt_has_blocks():
    bench = Bench(blocks=10)
    first = bench.add("first", 24)
    second = bench.add("second", 30)
    bench.step()
    assert (first.state, second.state) == (SequenceState.RUNNING, SequenceState.WAITING)
    bench.scheduler.remove(first)
    assert bench.step() == {"second": (0, 16)}


def test_a_sequence_that_does_not_fit_lets_those_behind_it_be_admitted():
    bench = Bench(blocks=10)
    bench.add("running", 24, missing={0: (20, 24)})
    bench.step()
    large = bench.add("large", 20)
    small = bench.add("small", 8)
    small.arrival, large.waited_steps = 99, 50  # large stands first in every order
    assert bench.step()["small"] == (0, 8)
    assert large.state is SequenceState.WAITING


def test_a_waiting_sequence_is_overtaken_a_bounded_number_of_times():
    bench = Bench(blocks=10)
    holder = bench.add("holder", 16, missing={0: (12, 16)})
    bench.step()
    large = bench.add("large", 28)
    large.waited_steps = 1000
    overtaken = []
    for number in range(3 * MAX_OVERTAKEN):
        small = bench.add(f"small-{number}", 4)
        if small.sequence_id in bench.step():
            overtaken.append(small)
        bench.scheduler.remove(small)
    assert len(overtaken) == MAX_OVERTAKEN
    bench.scheduler.remove(holder)
    assert "large" in bench.step()
    assert large.overtaken == 0


def test_a_prefix_match_without_admission_keeps_the_eviction_order():
    bench = Bench(blocks=6, prefix_cache=True)
    for number in (1, 2):
        cached = bench.add(f"prefix-{number}", [number] * 5)
        bench.step()
        bench.scheduler.remove(cached)
    bench.add("holder", [3] * 12, missing={0: (11, 12)})
    bench.step()
    waiting = bench.add("waiting", [1] * 4 + [4] * 16)  # its first block is cached, the rest does not fit
    bench.step()
    assert waiting.state is SequenceState.WAITING
    bench.pool.allocate(2)  # the free block, and the least recently used cached one
    assert [bool(bench.pool.find([block_hash(b"", [n] * 4, 0, [])])) for n in (1, 2)] == [False, True]


def test_no_more_than_max_sequences_run_and_reserved_places_stay_free():
    bench = Bench(max_sequences=3)
    for name in "abcd":
        bench.add(name, 2)
    assert set(bench.step(reserved=1)) == {"a", "b"}
    assert set(bench.step()) == {"a", "b", "c"}


def test_the_newest_sequence_waits_when_decode_runs_out_of_blocks():
    bench = Bench(blocks=5, block_tokens=4)
    old = bench.add("old", 8)
    young = bench.add("young", 7)
    bench.step()
    assert set(bench.step()) == {"old", "young"}
    assert set(bench.step()) == {"old"}
    assert young.state is SequenceState.WAITING
    assert young.blocks == []
    assert young.num_tokens == 9
    bench.scheduler.remove(old)
    assert bench.step() == {"young": (0, 9)}
    assert bench.scheduler.preemptions == 1
    assert bench.scheduler.prefix_miss_tokens == 8 + 7, "counted once"


def attached(bench, name, tokens, arrived):
    """A sequence whose KV of all but its last token came from elsewhere."""
    bench.arrivals += 1
    blocks = bench.pool.allocate(bench.pool.blocks_for(tokens))
    sequence = Sequence(
        name,
        bench.arrivals,
        list(range(tokens)),
        tokens - 1,
        tokens - 1,
        SamplingParams(99),
        [],
        None,
        arrived,
        1,
        blocks=blocks,
        computed=tokens - 1,
    )
    bench.scheduler.start(sequence)
    return sequence


def test_an_attached_sequence_that_is_the_newest_is_preempted_and_leaves():
    bench = Bench(blocks=5, block_tokens=4)
    old = attached(bench, "old", 8, arrived=20.0)
    older = attached(bench, "older", 8, arrived=10.0)  # the request is older, though it came here later
    while not bench.scheduler.preempted:
        bench.step()
    assert bench.scheduler.preempted == [old]
    assert (old.blocks, old.num_tokens, old.state) == ([], 9, SequenceState.HELD)
    assert old.computed == old.registered == 0
    assert bench.scheduler.running == [older]
    assert set(bench.step()) == {"older"}


def test_a_lone_sequence_waits_for_reserved_blocks_and_is_not_preempted():
    bench = Bench(blocks=5, block_tokens=4)
    alone = attached(bench, "alone", 7, arrived=10.0)
    reserved = bench.pool.allocate(3)
    assert bench.step() == {"alone": (6, 7)}
    assert bench.step() == {"alone": (7, 8)}
    assert bench.step() == {}
    assert (bench.scheduler.running, bench.scheduler.preempted) == ([alone], [])
    bench.pool.release(reserved)
    assert bench.step() == {"alone": (8, 9)}


def test_a_prefill_whose_kv_has_been_announced_is_never_preempted():
    bench = Bench(blocks=6, block_tokens=4, chunk_tokens=4)
    local = bench.add("here", 3)
    bench.step()
    travelling = bench.add("travels", 12, missing={0: (8, 12)})
    travelling.stop_after_prefill = True
    for _ in range(30):
        bench.step()
    assert travelling.state is SequenceState.RUNNING
    assert travelling.computed == 8
    assert bench.scheduler.preemptions > 0
    assert local.num_tokens > 8


def test_the_skipped_prefix_excludes_the_last_token_and_other_media():
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
    assert step["same"][0] == step["plain"][0] == 12
    assert step["other"][0] == 4


def test_the_rest_of_a_partly_cached_atomic_range_is_one_piece():
    """Whatever room a step has, unless it has other work."""
    bench = Bench(prefix_cache=True)
    spans, atomic = [(2, 36, "cat")], [(2, 38)]
    first = bench.add("first", 40, spans=spans, atomic=atomic)
    assert [bench.step()["first"] for _ in range(3)] == [(0, 2), (2, 38), (38, 40)]
    bench.pool.forget(first.identities[3:])
    bench.scheduler.remove(first)
    bench.add("short", 3)
    bench.add("same", 40, spans=spans, atomic=atomic)
    assert bench.step() == {"short": (0, 3)}
    assert bench.step() == {"short": (3, 4), "same": (12, 38)}


def test_a_partly_cached_atomic_range_keeps_its_blocks_whatever_the_window():
    bench = Bench(prefix_cache=True)
    spans, atomic = [(4, 32, "cat")], [(4, 36)]
    bench.add("first", 40, spans=spans, atomic=atomic)
    for _ in range(3):
        bench.step()
    bench.scheduler.window = 6
    sequence = bench.add("same", 36, spans=spans, atomic=atomic)
    bench.scheduler.schedule()
    assert (sequence.computed, sequence.dropped) == (32, 1), "its last rows see the range from its beginning"


def test_a_cached_medium_needs_no_feature():
    bench = Bench(prefix_cache=True)
    bench.add("a", 16, spans=[(4, 4, "cat")])
    bench.step()
    bench.add("again", 16, spans=[(4, 4, "cat")], missing={0: (4, 8)})
    assert bench.step()["again"] == (12, 16)
