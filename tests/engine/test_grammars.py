"""Answers match their grammar, greedy or sampled, and are the same tokens however the work is cut, batched, preempted, moved or resumed."""

import asyncio
import functools
import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import jsonschema
import pydantic_core
import pytest
import tokenizers
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

import mmd_workers.model
from mmd_api.contract.answers import Grammar
from mmd_api.contract.errors import GrammarFailedError
from mmd_workers.engine.choosing.masks import FEWEST_IN_PARALLEL, Masks
from mmd_workers.engine.choosing.sampler import Draw, sample
from mmd_workers.model import grammar as grammar_module
from mmd_workers.model.grammar import Grammars, load_tokenizer
from support.harness.waiting import DEADLINE_SECONDS
from support.oracles.composites import CALLS
from support.oracles.engine_oracle import (
    SMALL,
    Outcome,
    TextModel,
    make_engine,
    prompt_of,
    run,
    text_input,
    vary,
)

EOS = 2
MODEL_VOCAB = 560  # more than the tokenizer's 543
MOST = 60
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "kind": {"enum": ["cat", "dog", None]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
            "required": ["children"],
            "additionalProperties": False,
        }
    },
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "recursive": Grammar("json_schema", json.dumps(TREE)),
    "object": Grammar("json_schema", '{"type":"object"}'),
    "regex": Grammar("regex", "[a-f]{3,8}(-[0-9]+)?"),
    "choice": Grammar("regex", "yes|no\\\n|maybe\\ ä"),
    "composite": Grammar("composite", json.dumps(CALLS)),
}
FORMS = {"schema": SCHEMA, "recursive": TREE, "object": {"type": "object"}}


@functools.cache
def tokenizer():
    return load_tokenizer(Path(mmd_workers.model.__file__).parent / "demo")


@functools.cache
def model():
    config = transformers.LlamaConfig(**{**SMALL, "vocab_size": MODEL_VOCAB})
    made = TextModel(vary(transformers.LlamaForCausalLM(config)))
    made.eos_token_ids = frozenset({EOS})
    return made


@functools.cache
def grammars():
    return Grammars(tokenizer, MODEL_VOCAB, [EOS])


def text_of(tokens):
    return tokenizer().decode(tokens, skip_special_tokens=True)


def constrained(name, grammar, prompt, *, outputs=(), max_tokens=MOST, temperature=0.0, **more):
    """A sequence with a grammar, as `NativeEngine` begins it."""
    item = text_input(model(), name, [*prompt, *outputs], max_tokens, output_token_ids=list(outputs), **more)
    item.sampling = replace(item.sampling, temperature=temperature, seed=7)
    item.constraint = grammars().begin(grammar, outputs) if grammar is not None else None
    return item


@functools.cache
def alone(name, temperature, max_tokens=MOST):
    """Tokens and finish reason of a request that runs in one step each, with nobody beside it."""
    engine = make_engine(model())
    engine.add(
        constrained("a", GRAMMARS.get(name), prompt_of(20, 1), max_tokens=max_tokens, temperature=temperature)
    )
    outcome = run(engine)
    return outcome.tokens["a"], outcome.steps[-1].tokens[-1].finish_reason


def check_matches(tokens, reason, schema):
    text = text_of(tokens)
    if reason == "stop":
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    else:
        assert reason == "length"
        pydantic_core.from_json(text, allow_partial="trailing-strings")


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("name", FORMS)
def test_an_answer_is_valid_or_cut_by_its_length(name, temperature):
    check_matches(*alone(name, temperature), FORMS[name])


def test_a_model_without_a_grammar_produces_no_json():
    """So a valid answer in the other tests is due to the grammar and not to the model."""
    tokens, _ = alone("free", 0.0)
    with pytest.raises(ValueError, match=r"Expecting|Extra|control"):
        json.loads(text_of(tokens))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_regexes_and_choices_are_matched_and_end_by_themselves(temperature):
    tokens, reason = alone("choice", temperature)
    assert text_of(tokens) in ("yes", "no\n", "maybe ä")
    assert reason == "stop"
    assert EOS not in tokens, "nothing can follow: no step is spent on the end"
    tokens, reason = alone("regex", temperature)
    assert reason in ("stop", "length")
    assert re.fullmatch("[a-f]{0,8}(-[0-9]*)?", text_of(tokens))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_composite_begins_with_its_special_token_and_follows_its_parts(temperature):
    (first, *tokens), reason = alone("composite", temperature)
    assert first == 1
    text = text_of(tokens)
    calls = re.split(r"(?<=\)), ", text)
    complete = r'f\(\{"a": ?("x"|1)\}\)|g\([a-f]{3,8}\)'
    whole, last = (calls, []) if reason == "stop" else (calls[:-1], calls[-1:])
    assert 1 <= len(calls) <= 3
    assert all(re.fullmatch(complete, call) for call in whole), calls
    assert all(call[:2] in ("", "f", "g", "f(", "g(") for call in last)


def test_an_optional_end_is_the_models_choice():
    engine = make_engine(model())
    engine.add(constrained("a", Grammar("regex", "[a-z]{1,400}"), prompt_of(9, 3), temperature=2.0))
    outcome = run(engine)
    assert text_of(outcome.tokens["a"]).isalpha()
    ended = outcome.steps[-1].tokens[-1].finish_reason == "stop"
    assert (outcome.tokens["a"][-1] == EOS) == ended


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["schema", "recursive"])
def test_max_tokens_cut_an_answer_to_a_prefix_of_the_whole(name, temperature):
    whole, _ = alone(name, temperature)
    cut, reason = alone(name, temperature, 5)
    assert cut == whole[:5]
    assert reason == "length"


def test_the_last_token_that_fits_completes_the_answer():
    whole, reason = alone("choice", 0.0)
    assert reason == "stop"
    assert alone("choice", 0.0, len(whole)) == (whole, "stop")


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_depend_on_neither_chunks_nor_batch_mates(chunk_tokens, temperature):
    free = [(f"free {n}", None, prompt_of(10 + n, n)) for n in range(3)]
    bound = [(name, grammar, prompt_of(20, 1)) for name, grammar in GRAMMARS.items()]
    engine, outcome = make_engine(model(), chunk_tokens=chunk_tokens), Outcome()
    for name, grammar, prompt in [x for pair in zip(bound, free, strict=False) for x in pair]:
        engine.add(constrained(name, grammar, prompt, temperature=temperature))
        outcome.take(engine.step())
    for name, grammar, prompt in bound[3:]:
        engine.add(constrained(name, grammar, prompt, temperature=temperature))
    run(engine, outcome)
    for name in GRAMMARS:
        assert outcome.tokens[name] == alone(name, temperature)[0], name
    for name, _, prompt in free:
        single = make_engine(model())
        single.add(constrained(name, None, prompt, temperature=temperature))
        assert outcome.tokens[name] == run(single).tokens[name], name


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption_changes_no_token(temperature):
    engine = make_engine(model(), blocks=21, block_tokens=4, chunk_tokens=16, prefix_cache=False)
    for number in range(3):
        for name in FORMS:
            item = constrained(f"{name} {number}", GRAMMARS[name], prompt_of(20, 1), temperature=temperature)
            engine.add(item)
    outcome = run(engine)
    assert engine.stats().preemptions > 0
    for name, tokens in outcome.tokens.items():
        assert tokens == alone(name.split()[0], temperature)[0], name


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prefill_here_and_decode_there_gives_the_same_tokens(temperature):
    prompt, name = prompt_of(20, 1), "schema"
    prefill, decode = make_engine(model(), chunk_tokens=16), make_engine(model(), block_tokens=5)
    prefill.add(constrained("a", GRAMMARS[name], prompt, temperature=temperature, stop_after_prefill=True))
    outcome = run(prefill)
    first = outcome.tokens["a"]
    assert text_of(first)[0] == "{", "the prefill pod's token matches the grammar too"
    decode.reserve("a", len(prompt), MOST)
    decode.write_kv("a", 0, prefill.read_kv("a", 0, len(prompt)))
    sampling = constrained("a", None, prompt, temperature=temperature).sampling
    begun = grammars().begin(GRAMMARS[name], first)
    decode.attach("a", prompt, sampling, first, len(prompt), [], constraint=begun)
    assert run(decode, outcome).tokens["a"] == alone(name, temperature)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["schema", "recursive", "composite"])
def test_a_request_goes_on_on_another_pod_after_any_of_its_tokens(name, temperature):
    whole, reason = alone(name, temperature)
    for made in range(1, len(whole), 3):
        engine = make_engine(model())
        engine.add(
            constrained("a", GRAMMARS[name], prompt_of(20, 1), outputs=whole[:made], temperature=temperature)
        )
        outcome = run(engine)
        assert whole[:made] + outcome.tokens["a"] == whole
        assert outcome.steps[-1].tokens[-1].finish_reason == reason


def test_log_probabilities_are_finite_and_the_models_own():
    engine = make_engine(model())
    item = constrained("a", GRAMMARS["schema"], prompt_of(20, 1), max_tokens=4)
    item.sampling = replace(item.sampling, logprobs=20)
    engine.add(item)
    free = constrained("b", None, prompt_of(20, 1), max_tokens=1)
    free.sampling = replace(free.sampling, logprobs=20)
    engine.add(free)
    tokens = [token for step in run(engine).steps for token in step.tokens]
    bound = [token for token in tokens if token.sequence_id == "a"]
    assert all(pair[1] > -1000 for token in bound for pair in token.top_logprobs)
    (other,) = (token for token in tokens if token.sequence_id == "b")
    assert dict(bound[0].top_logprobs) == pytest.approx(dict(other.top_logprobs))
    assert bound[0].logprob < other.logprob


def test_a_grammar_that_fails_ends_its_request_and_no_other(monkeypatch):
    expected = alone("schema", 0.0)[0]  # within the usual limits
    limits = {"step_lexer_fuel": 2, "step_max_items": 30}
    monkeypatch.setattr(grammar_module, "LIMITS", LLParserLimits(verbose_errors=False, **limits))
    monkeypatch.setattr(grammar_module, "_follow", lambda matcher: None)
    limited = Grammars(tokenizer, MODEL_VOCAB, [EOS])
    engine = make_engine(model())
    item = constrained("bad", None, prompt_of(20, 1))
    item.constraint = limited.begin(Grammar("regex", "(.*a.{30}|.*b.{31}|.*c.{29})"))
    engine.add(item)
    engine.add(constrained("schema", GRAMMARS["schema"], prompt_of(20, 1)))
    outcome, failed = Outcome(), {}
    while engine.has_work():
        output = engine.step()
        failed |= dict(output.failed)
        output.failed.clear()
        outcome.take(output)
    assert isinstance(failed.pop("bad"), GrammarFailedError)
    assert not failed
    assert outcome.tokens["schema"] == expected
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_tokens_that_do_not_match_cannot_be_continued():
    with pytest.raises(GrammarFailedError):
        grammars().begin(GRAMMARS["schema"], [10, 11, 12])


def test_a_constraint_that_has_failed_says_so_without_a_new_token():
    constraint = grammars().begin(GRAMMARS["schema"])
    constraint.advance([])
    with pytest.raises(GrammarFailedError):
        constraint.advance([10, 11, 12])
    with pytest.raises(GrammarFailedError):
        constraint.advance([])


def test_masks_are_computed_while_the_model_runs(monkeypatch):
    order = []

    class Hidden(torch.Tensor):
        """What the model computes: on an accelerator, whoever uses it waits, or queues work behind it."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                if function != torch.Tensor.device.__get__:
                    order.append("use")
                    args = torch.utils._pytree.tree_map_only(cls, lambda t: t.as_subclass(torch.Tensor), args)
                return function(*args, **(kwargs or {}))

    def noted(name, function, result=lambda made: made):
        def call(*args, **more):
            order.append(name)
            return result(function(*args, **more))

        return call

    engine = make_engine(model())
    forward = noted("launch", engine.model.forward, lambda made: made.as_subclass(Hidden))
    monkeypatch.setattr(engine.model, "forward", forward)
    monkeypatch.setattr(Masks, "of", noted("masks", Masks.of))
    engine.add(constrained("a", GRAMMARS["schema"], prompt_of(20, 1)))
    engine.add(constrained("b", None, prompt_of(30, 2)))
    run(engine)
    steps = " ".join(order).split("launch ")[1:]
    masked = [step for step in steps if "masks" in step]
    assert len(masked) > 5
    assert all(step.startswith("masks use") for step in masked)


def test_masks_leave_other_rows_and_forbid_tokens_outside_the_tokenizer():
    logits = torch.zeros(3, MODEL_VOCAB)
    two = {0: grammars().begin(GRAMMARS["choice"]), 2: grammars().begin(GRAMMARS["regex"])}
    Masks.of(two, logits.device).apply(logits)
    assert torch.isfinite(logits[1]).all()
    assert not torch.isfinite(logits[[0, 2], 543:]).any()
    first = {text_of([token])[0] for token in torch.isfinite(logits[0]).nonzero().flatten().tolist()}
    assert first == {"y", "n", "m"}


@pytest.mark.parametrize("vocab", [2048, 2043])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.5, 0.998, 1.0])
def test_exactly_what_a_mask_allows_is_left_however_much_that_is(share: float, vocab: int):
    draw = torch.Generator().manual_seed(1)
    wanted = torch.rand(3, 2048, generator=draw) < share
    packed = (wanted.view(3, -1, 8) * (1 << torch.arange(8))).sum(-1).to(torch.uint8)
    logits = torch.randn(4, vocab, generator=draw)
    expected = logits.clone()
    expected[[0, 1, 3]] = expected[[0, 1, 3]].masked_fill(~wanted[:, :vocab], -torch.inf)
    for masked in (logits.clone(), logits.to(torch.bfloat16), logits.t().contiguous().t()):
        Masks([0, 1, 3], packed).apply(masked)
        assert torch.equal(masked, expected.to(masked.dtype))


def test_a_row_that_is_not_finite_is_found_below_a_mask():
    masks = Masks.of({0: grammars().begin(GRAMMARS["choice"])}, torch.device("cpu"))
    draws = [Draw(constrained("a", None, [1]).sampling, 0)]
    assert sample(torch.full((1, MODEL_VOCAB), torch.nan), draws, masks) == [None]


def test_masks_of_many_rows_are_those_of_each_row():
    many = {
        number: grammars().begin(list(GRAMMARS.values())[number % len(GRAMMARS)])
        for number in range(2 * FEWEST_IN_PARALLEL)
    }
    together = Masks.of(many, torch.device("cpu"))
    for number, constraint in many.items():
        assert torch.equal(together.bits[number], Masks.of({0: constraint}, torch.device("cpu")).bits[0])


def pieces_with_bytes():
    """A tokenizer as Llama's was: pieces begin with a mark for a space, and what no piece has is spelled in bytes."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [
        "▁",
        '"',
        '▁"',
        '{"',
        "{",
        "▁{",
        "}",
        "[",
        "]",
        '":',
        ":",
        ",",
        "▁true",
        "true",
        "a",
        "▁a",
        "1",
        "12",
    ]
    vocab = {piece: number for number, piece in enumerate([*special, *pieces])}
    raw = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    raw.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def test_pieces_with_marks_and_bytes_match_by_their_decoded_text():
    small = pieces_with_bytes()
    made, logits = Grammars(lambda: small, len(small) + 5, [EOS]), torch.Generator().manual_seed(0)
    complete = 0
    for _ in range(60):
        constraint, tokens = made.begin(GRAMMARS["schema"]), []
        while not constraint.complete and len(tokens) < 200:
            row = torch.rand(1, len(small) + 5, generator=logits)
            Masks.of({0: constraint}, row.device).apply(row)
            tokens.append(int(row.argmax()))
            constraint.advance(tokens[-1:])
        if constraint.complete:
            jsonschema.validate(json.loads(small.decode(tokens)), SCHEMA)
            complete += 1
    assert complete > 30


def test_compiled_grammars_are_bounded_in_number_and_size():
    kept = Grammars(tokenizer, MODEL_VOCAB, [EOS])
    for number in range(grammar_module.MAX_CACHED + 5):
        kept.begin(Grammar("regex", f"a{{{number + 1}}}"))
    assert len(kept._compiled) == grammar_module.MAX_CACHED
    assert Grammar("regex", "a{1}") not in kept._compiled
    long = grammar_module.MAX_CACHED_CHARACTERS // 20
    for number in range(25):
        kept.begin(Grammar("regex", f"{number}" + "b" * long))
    assert sum(len(grammar.source) for grammar in kept._compiled) <= grammar_module.MAX_CACHED_CHARACTERS


def test_grammars_that_took_long_to_compile_make_room_for_others(monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_CACHED_CPU_SECONDS", 1e-9)
    kept = Grammars(tokenizer, MODEL_VOCAB, [EOS])
    for grammar in GRAMMARS.values():
        kept.begin(grammar)
        assert list(kept._compiled) == [grammar]


async def test_a_compiled_grammar_does_not_wait_for_a_compilation():
    kept, begun, end = Grammars(tokenizer, MODEL_VOCAB, [EOS]), threading.Event(), threading.Event()
    kept.begin(GRAMMARS["schema"])
    compiling = asyncio.get_running_loop().run_in_executor(
        kept._thread, lambda: begun.set() or end.wait(DEADLINE_SECONDS)
    )
    other = asyncio.create_task(kept.begin_aside(GRAMMARS["regex"]))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await asyncio.to_thread(begun.wait)
        await kept.begin_aside(GRAMMARS["schema"], alone("schema", 0.0)[0][:5])
    assert not other.done()
    assert GRAMMARS["regex"] not in kept
    end.set()
    await other
    assert await compiling
    assert GRAMMARS["regex"] in kept


LEAVES = st.one_of(
    st.builds(lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n}, st.integers(-99, 99), st.integers(0, 99)),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 8)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "^[a-c]{2,4}$"}, {"type": "string", "format": "date"}]),
    st.builds(lambda values: {"enum": values}, st.lists(st.one_of(st.integers(-(2**53), 2**53), st.text(max_size=5), st.booleans()), min_size=1, max_size=4, unique_by=repr)),
)  # fmt: skip
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 3)
        ),
        st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in properties if name in required],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b b", "ü", "d"]), inner, max_size=4),
            st.sets(st.sampled_from(["a", "b b", "ü", "d"])),
        ),
        st.builds(lambda first, second: {"anyOf": [first, second]}, inner, inner),
    ),
    max_leaves=6,
)


@given(st.lists(SCHEMAS, min_size=1, max_size=6), st.sampled_from([0.0, 1.0]))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_to_any_schemas_match_them(schemas, temperature):
    engine = make_engine(model(), chunk_tokens=32)
    for number, schema in enumerate(schemas):
        grammar = Grammar("json_schema", json.dumps(schema))
        engine.add(constrained(str(number), grammar, prompt_of(5, number), temperature=temperature))
    outcome = run(engine)
    reasons = {t.sequence_id: t.finish_reason for step in outcome.steps for t in step.tokens}
    for number, schema in enumerate(schemas):
        check_matches(outcome.tokens[str(number)], reasons[str(number)], schema)
