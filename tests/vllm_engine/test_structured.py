"""Answers of vLLM match their grammar, and are the same tokens wherever and however they are continued."""

from __future__ import annotations

import json
import logging
import re
from concurrent.futures import Future
from dataclasses import replace

import jsonschema
import pydantic_core
import pytest

from mmd_api.contract.answers import Grammar
from mmd_api.contract.errors import GrammarFailedError, UnsupportedParameterError
from mmd_api.contract.sampling import Guidance, LogitRules
from mmd_workers.model import grammar as grammar_module
from mmd_workers.model.grammar import Grammars
from mmd_workers.vllm_engine.requests import RequestBuilder
from mmd_workers.vllm_engine.structured import StepMasks
from support.oracles.composites import CALLS

from . import cores

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "maximum": 999},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))
CHOICE = Grammar("regex", "yes|no|perhaps")
COMPOSITE = Grammar("composite", json.dumps(CALLS))
MOST = 64
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cores.checkpoint("llava", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def pair(folder):
    return [cores.make(folder), cores.make(folder)]


@pytest.fixture
def core(pair):
    yield pair[0]
    cores.clear(pair)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return cores.served(folder).frontend.tokenizer


def request_of(folder, temperature=0.0, grammar=GRAMMAR, **more):
    asked = cores.question(folder, "what is on the table, and how large is it? " * 2, max_tokens=MOST)
    wanted = {"ignore_eos": False, "temperature": temperature, "seed": 3, "grammar": grammar}
    return asked.with_(**wanted | more)


def add(core, name, request, **more):
    """As `VllmEngine` adds it."""
    grammar = request.sampling.grammar
    begun = core.grammars.begin(grammar, request.output_token_ids) if grammar is not None else None
    core.add(name, request, **{"stop_after_prefill": False, "constraint": begun} | more)


def answer(core, request):
    add(core, "a", request)
    outcome = cores.step(core)
    assert not outcome.failed, outcome.failed
    return outcome.tokens["a"], outcome.reasons["a"]


@TEMPERATURES
def test_an_answer_is_valid_or_cut_by_its_length(core, folder, tokenizer, temperature):
    for seed in range(3):
        tokens, reason = answer(core, request_of(folder, temperature, seed=seed))
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if reason == "stop":
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert reason == "length"
            pydantic_core.from_json(text, allow_partial="trailing-strings")
        cut, reason = answer(core, request_of(folder, temperature, seed=seed, max_tokens=4))
        assert (cut, reason) == (tokens[:4], "length")
    cores.assert_empty(core)


@TEMPERATURES
def test_an_answer_ends_where_nothing_can_follow(core, folder, tokenizer, temperature):
    tokens, reason = answer(core, request_of(folder, temperature, CHOICE))
    assert tokenizer.decode(tokens) in ("yes", "no", "perhaps")
    assert reason == "stop"
    cores.assert_empty(core)


@TEMPERATURES
def test_a_composite_begins_with_its_special_token_and_goes_on_anywhere(core, folder, tokenizer, temperature):
    request = request_of(folder, temperature, COMPOSITE)
    whole, reason = answer(core, request)
    assert whole[0] == 1
    assert reason == "stop"
    call = r'(f\(\{"a": ?("x"|1)\}\)|g\([a-f]{3,8}\))'
    assert re.fullmatch(f"{call}(, {call}){{0,2}}", tokenizer.decode(whole[1:], skip_special_tokens=True))
    for made in (1, len(whole) // 2):
        rest, _ = answer(core, replace(request, output_token_ids=whole[:made]))
        assert whole[:made] + rest == whole


@TEMPERATURES
def test_a_continued_request_has_the_tokens_of_one_that_was_not_interrupted(core, folder, temperature):
    request = request_of(folder, temperature)
    whole, reason = answer(core, request)
    for made in (1, 2, len(whole) // 2, len(whole) - 1):
        rest, ended = answer(core, replace(request, output_token_ids=whole[:made]))
        assert whole[:made] + rest == whole
        assert ended == reason


@TEMPERATURES
def test_prefill_here_and_decode_there_gives_the_same_tokens(core, pair, folder, temperature):
    source, target = pair
    request = request_of(folder, temperature)
    whole, _ = answer(source, request)
    cores.clear(pair)
    add(source, "a", request, stop_after_prefill=True)
    target.reserve("a", len(request.token_ids), MOST)
    outcome = cores.step(source, until=lambda o: o.tokens.get("a"))
    for first, end in outcome.ready["a"]:
        target.write_kv("a", first, source.read_kv("a", first, end))
    (first_token,) = outcome.tokens["a"]
    target.attach("a", request, [first_token], constraint=target.grammars.begin(GRAMMAR, [first_token]))
    assert [first_token, *cores.step(target).tokens["a"]] == whole


@TEMPERATURES
def test_neighbours_with_other_grammars_and_none_change_nothing(core, folder, temperature):
    wanted = {
        "json": request_of(folder, temperature),
        "choice": request_of(folder, temperature, CHOICE),
        "free": request_of(folder, temperature, None, max_tokens=24),
        "other": request_of(folder, temperature, None, max_tokens=24, seed=9),
    }
    alone = {name: answer(core, request)[0] for name, request in wanted.items()}
    outcome = cores.Outcome()
    for name, request in wanted.items():
        add(core, name, request)
        outcome.take(core.step())
    cores.step(core, outcome)
    assert outcome.tokens == alone


@TEMPERATURES
def test_each_sequence_of_a_batch_follows_its_own_grammar(core, folder, temperature):
    """vLLM moves the last row to the place of one that has ended."""
    lengths = {"a": 2, "b": 24, "c": 24, "d": 6}
    wanted = {
        letter: request_of(folder, temperature, Grammar("regex", f"{letter}{{40}}"), max_tokens=length)
        for letter, length in lengths.items()
    }
    alone = {name: answer(core, request)[0] for name, request in wanted.items()}
    for name, request in wanted.items():
        add(core, name, request)
    outcome = cores.step(core)
    assert not outcome.failed
    assert outcome.tokens == alone


def test_preemption_changes_no_token(folder, core):
    request = request_of(folder, grammar=Grammar("regex", "[a-z ]{200}"))
    whole, _ = answer(core, request)
    assert len(whole) == MOST
    small = cores.make(folder, blocks=8, max_model_len=8 * cores.BLOCK, prefix_cache=False)
    for number in range(3):
        add(small, str(number), request)
    outcome = cores.step(small)
    assert small.stats().preemptions > 0
    assert not outcome.failed
    assert set(map(tuple, outcome.tokens.values())) == {tuple(whole)}


def test_a_grammar_that_fails_ends_its_request_and_no_other(core, folder, tokenizer):
    free = request_of(folder, grammar=None, max_tokens=24)
    alone, _ = answer(core, free)
    add(core, "free", free)
    add(core, "bad", request_of(folder, grammar=CHOICE))
    (wrong,) = tokenizer.encode("z", add_special_tokens=False)[-1:]
    with pytest.raises(GrammarFailedError):  # as where a limit of the library is reached
        core.table.sequences["bad"].constraint.advance([wrong])
    outcome = cores.step(core)
    assert isinstance(outcome.failed.pop("bad"), GrammarFailedError)
    assert not outcome.failed
    assert outcome.tokens["free"] == alone
    cores.assert_empty(core)


def test_no_grammar_is_compiled_in_a_step_however_many_there_are(core, folder, monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_CACHED", 1)
    names = ["a", "b", "c"]
    for number, name in enumerate(names):
        add(core, name, request_of(folder, grammar=Grammar("regex", f"yes|no|perhaps {number}")))
    monkeypatch.setattr(Grammars, "_compile", lambda *_: pytest.fail("it is compiled again"))
    outcome = cores.step(core)
    assert not outcome.failed, outcome.failed
    assert set(outcome.reasons.values()) == {"stop"}


def test_what_vllm_logs_of_a_failed_step_has_nothing_of_the_grammar(core, folder, monkeypatch, caplog):
    def broken(*_, **__):
        failed = Future()
        failed.set_exception(RuntimeError("boom"))
        return failed

    add(core, "a", request_of(folder, grammar=Grammar("regex", "secret|hidden")))
    logger = logging.getLogger("vllm.logging_utils.dump_input")
    logger.addHandler(caplog.handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(core._core.model_executor, "execute_model", broken)
            assert core.step().failed
    finally:
        logger.removeHandler(caplog.handler)
        core._failure = None
    assert "NewRequestData(" in caplog.text, "vLLM logs the request"
    assert "secret" not in caplog.text


def test_a_request_gets_no_mask_before_its_prompt_is_computed(core, folder, monkeypatch):
    computed, made = [], StepMasks.of
    monkeypatch.setattr(
        StepMasks, "of", lambda found, device: computed.append([*found]) or made(found, device)
    )
    request = request_of(folder, grammar=CHOICE)
    whole, _ = answer(core, request)
    assert computed == len(whole) * [["a"]]
    chunks = -(-len(request.token_ids) // cores.CHUNK)
    assert chunks > 1


def test_masks_are_computed_while_the_model_runs(core, folder, monkeypatch):
    order, executor, masks_of = [], core._core.model_executor, StepMasks.of
    execute = executor.execute_model

    def launched(*args, **more):
        assert more["non_block"]
        order.append("launch")
        running = execute(*args, **more)
        result = running.result

        def awaited(*args):
            order.append("wait")
            return result(*args)

        monkeypatch.setattr(running, "result", awaited)
        return running

    monkeypatch.setattr(executor, "execute_model", launched)
    monkeypatch.setattr(StepMasks, "of", lambda *args: order.append("masks") or masks_of(*args))
    tokens, _ = answer(core, request_of(folder))
    steps = " ".join(order).split("launch ")[1:]
    masked = [step for step in steps if "masks" in step]
    assert len(masked) == len(tokens) > 5
    assert all(step.startswith("masks wait") for step in masked)


def test_speculative_decoding_refuses_what_it_would_leave_out(folder):
    builder = RequestBuilder(frozenset({2}), None, drafts=True)
    request = request_of(folder)
    free = replace(request.sampling, grammar=None)
    builder.build("a", replace(request, sampling=free), [], 4)
    for sampling in (
        request.sampling,
        replace(free, min_p=0.1),
        replace(free, rules=LogitRules(allowed_token_ids=[5])),
    ):
        with pytest.raises(UnsupportedParameterError, match="speculative"):
            builder.build("a", replace(request, sampling=sampling), [], 4)


def test_a_request_with_a_companion_is_refused(folder):
    request = replace(request_of(folder, grammar=None), guidance=Guidance(2.0, [5]))
    with pytest.raises(UnsupportedParameterError, match="guidance_scale"):
        RequestBuilder(frozenset({2}), None).build("a", request, [], 4)


@pytest.fixture(scope="module")
def wanted(folder):
    return {
        "json": request_of(folder),
        "choice": request_of(folder, 1.0, CHOICE),
        "free": request_of(folder, grammar=None, max_tokens=24),
    }


@pytest.fixture(scope="module")
def alone(pair, wanted):
    """What one process answers to each, found before a core with ranks ends, with which vLLM forgets its other groups of ranks."""
    found = {name: answer(pair[0], request)[0] for name, request in wanted.items()}
    cores.clear(pair)
    return found


def _no_grammars(worker):
    """In a rank: from now on a step in which it compiles a grammar, or loads a tokenizer for one, fails."""

    def forbidden(*_):
        raise AssertionError("a rank needs a grammar")

    Grammars._compile = Grammars._loaded = forbidden


@pytest.mark.alone
@pytest.mark.timeout(600)
@cores.needs_ranks
@pytest.mark.parametrize("how", ["tensorParallelSize", "pipelineParallelSize"])
def test_ranks_follow_grammars_without_having_them(folder, wanted, alone, how):
    split = cores.make(folder, vllm={how: 2})
    try:
        split._core.model_executor.collective_rpc(_no_grammars)
        outcome = cores.Outcome()
        for name, request in wanted.items():
            add(split, name, request)
            outcome.take(split.step())
        cores.step(split, outcome)
        assert not outcome.failed, outcome.failed
        assert outcome.tokens == alone
        cores.assert_empty(split)
    finally:
        for rank in split._core.model_executor.workers:
            rank.proc.kill()
        split.shut_down()
