"""What becomes of the sequences of a step that fails in the engine's own code, which ends the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmd_api.contract.errors import DeviceLostError, StepFailedError, SuspectError
from support.oracles.devices import cpu_only
from support.oracles.engine_oracle import TextModel, llama, make_engine, prompt_of, text_input

BUG = AssertionError("blocks of nobody")


@pytest.fixture
def engine():
    return make_engine(TextModel(llama()))


def add(engine, *names, engine_failures=0):
    for seed, name in enumerate(names):
        item = text_input(engine.model, name, prompt_of(5, seed), 6)
        engine.add(replace(item, engine_failures=engine_failures))


def broken(error, only=""):
    def fail(item, *_):
        if only in ("", item.sequence.sequence_id):
            raise error

    return fail


def test_a_sequence_whose_result_breaks_the_engine_is_not_placed_again(engine, monkeypatch):
    add(engine, "good", "poison")
    monkeypatch.setattr(engine._results, "finish", broken(BUG, "poison"))
    [(name, error)] = engine.step().failed
    assert (name, type(error)) == ("poison", StepFailedError)
    assert "AssertionError: blocks of nobody" in error.message
    with pytest.raises(AssertionError, match="blocks of nobody"):
        engine.step()


@pytest.mark.parametrize("failures", [0, 1])
def test_sequences_beside_which_the_engine_failed_are_placed_again(engine, monkeypatch, failures):
    add(engine, "a", "b", engine_failures=failures)
    monkeypatch.setattr(engine.scheduler, "schedule", broken_schedule)
    output = engine.step()
    assert {name: type(error) for name, error in output.failed} == {"a": SuspectError, "b": SuspectError}
    assert output.changed, "the next step ends the engine at once"


def broken_schedule(*_):
    raise BUG


def test_a_sequence_ends_with_the_third_engine_that_fails_beside_it(engine, monkeypatch):
    add(engine, "fresh")
    add(engine, "moved", engine_failures=2)
    monkeypatch.setattr(engine.scheduler, "schedule", broken_schedule)
    failed = dict(engine.step().failed)
    assert {name: type(error) for name, error in failed.items()} == {
        "fresh": SuspectError,
        "moved": StepFailedError,
    }


def test_a_handed_over_sequence_ends_with_the_third_engine_too(engine, monkeypatch):
    prompt = prompt_of(5, 1)
    source = make_engine(TextModel(llama()))
    source.add(replace(text_input(source.model, "a", prompt, 6), stop_after_prefill=True))
    (token,) = source.step().tokens
    engine.reserve("a", len(prompt), 6)
    engine.write_kv("a", 0, source.read_kv("a", 0, len(prompt)))
    sampling = text_input(source.model, "a", prompt, 6).sampling
    engine.attach("a", prompt, sampling, [token.token_id], len(prompt), [], engine_failures=2)
    add(engine, "beside")
    monkeypatch.setattr(engine.scheduler, "schedule", broken_schedule)
    assert type(dict(engine.step().failed)["a"]) is StepFailedError


@cpu_only
def test_no_sequence_is_the_cause_of_a_lost_device(engine, monkeypatch):
    lost = torch.AcceleratorError("CUDA error: unspecified launch failure")
    add(engine, "a", engine_failures=2)
    monkeypatch.setattr(engine._results, "finish", broken(lost))
    with pytest.raises(DeviceLostError, match="unspecified launch failure"):
        engine.step()
