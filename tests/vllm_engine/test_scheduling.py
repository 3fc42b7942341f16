"""What vLLM's scheduler puts into a step: room for short prompts beside long ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmd_api.contract.errors import CapacityError
from mmd_workers.prefill.kv_sender import prefix_of
from support.oracles import engine_oracle
from support.oracles import model_zoo as zoo

from . import cores
from .cores import BLOCK, CHUNK, Outcome, assert_empty, step

LONG = 7 * CHUNK
SHORT = 8
IMAGE = 16  # tokens of an image of this model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cores.checkpoint("llava", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def shared(folder):
    return [cores.make(folder, blocks=96), cores.make(folder, blocks=96)]


@pytest.fixture
def core(shared):
    yield shared[0]
    cores.clear(shared)


@pytest.fixture
def other(shared):
    return shared[1]


def first_steps(outcome: Outcome) -> dict[str, int]:
    """The number of the step in which each sequence got its first token, from 1."""
    found: dict[str, int] = {}
    for number, output in enumerate(outcome.steps, 1):
        for token in output.tokens:
            found.setdefault(token.sequence_id, number)
    return found


def add(core, name, tokens, seed, **request):
    prompt = engine_oracle.prompt_of(tokens, seed)
    core.add(name, cores.text_request(prompt, **request), stop_after_prefill=False)


def test_a_short_prompt_does_not_wait_for_a_long_one_that_runs(core):
    add(core, "long", LONG, 1)
    outcome = Outcome()
    outcome.take(core.step())
    add(core, "short", SHORT, 2)
    first = first_steps(step(core, outcome))
    assert first["short"] == 2
    assert first["long"] == 8, "one step more than alone"
    assert_empty(core)


def test_a_short_prompt_waits_for_none_of_many_long_ones(core):
    for number in range(6):
        add(core, f"long {number}", LONG, number)
    outcome = Outcome()
    for _ in range(9):  # the first is complete, and the second has begun
        outcome.take(core.step())
    add(core, "short", SHORT, 9)
    first = first_steps(step(core, outcome))
    assert first["short"] == 10
    longs = [first[f"long {number}"] for number in range(6)]
    assert longs == sorted(longs), "in the order of their arrival"
    assert_empty(core)


def test_a_long_prompt_goes_on_while_short_ones_keep_coming(core):
    add(core, "long", LONG, 1)
    outcome = Outcome()
    while "long" not in outcome.tokens:
        for number in range(4):
            name = f"short {len(outcome.steps)} {number}"
            add(core, name, SHORT, 100 * len(outcome.steps) + number, max_tokens=1)
        outcome.take(core.step())
        assert len(outcome.steps) <= 2 * LONG // CHUNK
    step(core, outcome)
    assert_empty(core)


def test_a_long_prompt_whose_beginning_is_cached_counts_as_short(core):
    prompt = engine_oracle.prompt_of(3 * CHUNK, 1)
    core.add("turn 1", cores.text_request(prompt), stop_after_prefill=False)
    step(core)
    add(core, "long", LONG, 2)
    outcome = Outcome()
    outcome.take(core.step())
    core.add("turn 2", cores.text_request([*prompt, 5, 6, 7]), stop_after_prefill=False)
    assert first_steps(step(core, outcome))["turn 2"] == 2
    assert_empty(core)


def test_a_sequence_decodes_in_every_step_beside_a_long_prompt(core):
    add(core, "long", LONG, 1)
    outcome = Outcome()
    outcome.take(core.step())
    add(core, "short", SHORT, 2, max_tokens=5)
    step(core, outcome)
    made = [sum(token.sequence_id == "short" for token in output.tokens) for output in outcome.steps]
    assert made[:6] == [0, 1, 1, 1, 1, 1]


def test_handed_over_sequences_decode_in_every_step_beside_a_long_prompt(core, other):
    request = cores.text_request(engine_oracle.prompt_of(SHORT, 3), max_tokens=5)
    other.add("moved", request, stop_after_prefill=True)
    made = step(other, until=lambda o: o.tokens.get("moved"))
    kv = other.read_kv("moved", 0, SHORT)
    add(core, "long", LONG, 1)
    outcome = Outcome()
    outcome.take(core.step())
    cached = core.reserve("moved", SHORT, 5, prefix_of(request, cores.IDENTITY))
    core.write_kv("moved", cached, kv)
    core.attach("moved", request, made.tokens["moved"])
    other.abort("moved")
    step(core, outcome)
    tokens = [sum(token.sequence_id == "moved" for token in output.tokens) for output in outcome.steps]
    assert tokens[1:5] == [1, 1, 1, 1]


def test_long_prompts_have_whole_steps_while_what_waits_lacks_a_feature(core, folder):
    asked = cores.question(folder, zoo.image(100, 64, 1), "what?")
    add(core, "long", LONG, 1)
    core.add("late", replace(asked.request, arrived=0.0), stop_after_prefill=False)
    outcome = step(core, until=lambda o: o.tokens.get("long"))
    assert len(outcome.steps) == LONG // CHUNK
    cores.supply(core, "late", asked)
    step(core, outcome)
    assert_empty(core)


def test_a_threshold_of_the_spec_holds_beside_it(folder):
    core = cores.make(folder, blocks=32, vllm={"extraArgs": ["--long-prefill-token-threshold=8"]})
    add(core, "long", LONG, 1)
    add(core, "other", 3 * CHUNK, 2)
    core.step()
    assert {r.num_computed_tokens for r in core._scheduler.running} == {8}


# --- media that are never cut -------------------------------------------------------------------------------------


class Pieces:
    """The parts in which a core computes its prompts, by sequence."""

    def __init__(self, core):
        self.core, self.ends, self.runs, planned = core, {}, {}, core._shelf.on_plan

        def note(plan):
            planned(plan)
            for name, tokens in plan.num_scheduled_tokens.items():
                request = core._scheduler.requests[name]
                self.ends.setdefault(name, []).append(request.num_computed_tokens + tokens)

        core._shelf.on_plan = note

    def cuts(self) -> dict[str, list[int]]:
        """Ends of parts within a run of a medium's tokens."""
        return {
            name: [end for end in ends for start, count in self.runs[name] if start < end < start + count]
            for name, ends in self.ends.items()
            if name in self.runs
        }

    def ask(self, **asked) -> None:
        self.runs = {
            name: [run for ref in one.request.features for run in ref.ranges] for name, one in asked.items()
        }
        for name, one in asked.items():
            self.core.add(name, one.request, stop_after_prefill=False)
            cores.supply(self.core, name, one)


@pytest.fixture(scope="module")
def small(folder):
    """Steps of twice an image's tokens, of which seven sequences that decode leave 25."""
    return cores.make(folder, blocks=96, chunk_tokens=2 * IMAGE)


@pytest.fixture
def pieces(small, monkeypatch):
    """Of a core as vLLM's CUDA platform sets it for models that read an image in both directions."""
    planned = small._shelf.on_plan
    monkeypatch.setattr(small._scheduler.scheduler_config, "disable_chunked_mm_input", True)
    for number in range(7):
        add(small, f"decodes {number}", 2, number, max_tokens=100)
    small.step()
    yield Pieces(small)
    small._shelf.on_plan = planned
    cores.clear([small])


def picture(folder, before, seed=1, after=" and what else is there to see?"):
    """An image after 8 tokens and one for each of the letters before."""
    asked = cores.question(folder, before, zoo.image(100, 64, seed), after)
    ((_, count),) = asked.request.features[0].ranges
    assert count == IMAGE
    return asked


def test_an_image_waits_where_the_rest_of_a_step_is_shorter(pieces, folder):
    pieces.ask(image=picture(folder, "look at"))
    add(pieces.core, "text", 30, 9)
    step(pieces.core, until=lambda o: o.tokens.get("image"))
    assert pieces.runs["image"][0][0] in pieces.ends["image"], "it has stood at its image"
    assert pieces.cuts() == {"image": []}


def test_the_rest_of_an_image_that_is_cached_in_part_is_not_cut(pieces, folder):
    before = "look at all of this and then"
    pieces.ask(first=picture(folder, before))
    step(pieces.core, until=lambda o: o.tokens.get("first"))
    add(pieces.core, "text", 20, 9)
    second = picture(folder, before, after="why?")
    ((start, count),) = second.request.features[0].ranges
    assert start < BLOCK < start + count
    pieces.ask(second=second)
    step(pieces.core, until=lambda o: o.tokens.get("second"))
    assert pieces.cuts() == {"second": []}


@pytest.mark.parametrize("threshold", [0, 8], ids=["ours", "the spec's"])
def test_short_prompts_that_keep_coming_neither_cut_nor_stop_an_image(pieces, folder, monkeypatch, threshold):
    monkeypatch.setattr(pieces.core._scheduler, "_own_threshold", threshold)
    pieces.ask(image=picture(folder, "look at"))
    outcome = Outcome()
    while "image" not in outcome.tokens:
        for number in range(3):
            name = f"short {len(outcome.steps)} {number}"
            add(pieces.core, name, 12, 100 * len(outcome.steps) + number, max_tokens=1)
        outcome.take(pieces.core.step())
        assert len(outcome.steps) <= 10
    assert pieces.cuts() == {"image": []}


def test_runs_of_a_medium_may_come_in_several_steps(pieces, folder):
    one = picture(folder, "look at")
    ref = one.request.features[0]
    tokens, start = one.request.token_ids, ref.ranges[0][0]
    tokens = [*tokens[: start + 10], 5, 5, *tokens[start + 10 :]]
    parts = replace(ref, ranges=[[start, 10], [start + 12, IMAGE - 10]])
    one.request = replace(one.request, token_ids=tokens, features=[parts])
    pieces.ask(image=one)
    add(pieces.core, "text", 30, 9)
    assert not step(pieces.core, until=lambda o: o.tokens.get("image")).failed
    assert pieces.cuts() == {"image": []}


def test_an_image_longer_than_a_step_is_refused(pieces, folder):
    one = picture(folder, "look at")
    ref = replace(one.request.features[0], num_tokens=33, ranges=[[11, 33]])
    with pytest.raises(CapacityError, match=r"image .* 33 tokens .* steps have 32: .* maxNumBatchedTokens"):
        pieces.core.add("a", replace(one.request, features=[ref]), stop_after_prefill=False)
