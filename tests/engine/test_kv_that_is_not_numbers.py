"""KV that is not numbers stays with the sequence that it belongs to, whatever kernel computes attention and wherever the blocks go."""

from __future__ import annotations

import functools

import pytest
import torch

from mmd_api.contract.errors import BadLogitsError
from mmd_workers.engine import attention
from mmd_workers.engine.profile import activation_bytes
from support.oracles.engine_oracle import (
    SMALL,
    TEXT_MODELS,
    Outcome,
    TextModel,
    generate,
    greedy,
    llama,
    make_engine,
    prompt_of,
    run,
    text_input,
)

NEW_TOKENS = 12
BAD_TOKEN = 199
LENGTHS = [3, 50, 17, 8, 33, 1, 24, 12]
KERNELS = ["torch", "selected"]


@functools.cache
def prompts_and_answers(name):
    prompts = [prompt_of(length, length) for length in LENGTHS]
    return prompts, [generate(TEXT_MODELS[name](), prompt, NEW_TOKENS) for prompt in prompts]


def engine_with(model, kernel, **settings):
    """An engine of 40 blocks of 8 tokens; with the kernel "torch" as on GPUs, in half precision and without a compiler."""
    engine = make_engine(model, blocks=40, **{"fused_layers": kernel != "torch"} | settings)
    if kernel == "torch":
        engine.model_runner.kernel = attention.torch_kernel
    return engine


def model_with_a_bad_token(name="llama"):
    """A model in which one token has no numbers."""
    model = TextModel(TEXT_MODELS[name]())
    embed = model.embed

    def bad_embed(token_ids):
        embeds, extras = embed(token_ids)
        bad = (token_ids.to(embeds.device) == BAD_TOKEN)[:, None]
        return embeds.masked_fill(bad, float("nan")), extras

    model.embed = bad_embed
    return model


def bad_prompt(length, place=-1):
    prompt = prompt_of(length, 1000 + length)
    prompt[place] = BAD_TOKEN
    return prompt


def spoil_free_blocks(engine):
    """Leave NaN in every block that nobody holds."""
    free = list(engine.blocks._free)
    for tensor in (*engine.kv.keys, *engine.kv.values):
        tensor[free] = 0xFF if tensor.dtype == torch.uint8 else float("nan")


def assert_others_are_answered(engine, name="llama", at_once=4):
    prompts, answers = prompts_and_answers(name)
    for first in range(0, len(prompts), at_once):
        for number in range(first, first + at_once):
            engine.add(text_input(engine.model, str(number), prompts[number], NEW_TOKENS))
        outcome = run(engine)
        assert outcome.tokens == {str(n): answers[n] for n in range(first, first + at_once)}
    zeros = [tensor[engine.kv.zero_block] for tensor in (*engine.kv.keys, *engine.kv.values)]
    assert not any(block.any() for block in zeros), "something was written to the block of zeros"


@pytest.mark.parametrize(
    "settings", [{}, {"draft_tokens": 3}, {"chunk_tokens": 8}, {"kv_dtype": "Int8"}], ids=str
)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_answers_do_not_depend_on_what_free_blocks_hold(name, kernel, settings):
    engine = engine_with(TextModel(TEXT_MODELS[name]()), kernel, **settings)
    if "kv_dtype" not in settings:
        spoil_free_blocks(engine)
        assert_others_are_answered(engine, name)
        return
    outcomes = []
    for spoiled in (False, True):
        engine = engine_with(TextModel(TEXT_MODELS[name]()), kernel, **settings)
        if spoiled:
            spoil_free_blocks(engine)
        for number, prompt in enumerate(prompts_and_answers(name)[0]):
            engine.add(text_input(engine.model, str(number), prompt, NEW_TOKENS))
        outcomes.append(run(engine).tokens)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_answers_in_half_precision_do_not_depend_on_free_blocks(dtype):
    outcomes = []
    for spoiled in (False, True):
        engine = engine_with(TextModel(llama().to(dtype)), "selected")
        if spoiled:
            spoil_free_blocks(engine)
        for number, prompt in enumerate(prompts_and_answers("llama")[0]):
            engine.add(text_input(engine.model, str(number), prompt, NEW_TOKENS))
        outcomes.append(run(engine).tokens)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kernel", KERNELS)
def test_requests_after_a_bad_one_are_answered(kernel):
    engine = engine_with(model_with_a_bad_token(), kernel)
    engine.add(text_input(engine.model, "bad", bad_prompt(20), NEW_TOKENS))
    ((name, error),) = engine.step().failed
    assert name == "bad"
    assert isinstance(error, BadLogitsError)
    assert_others_are_answered(engine)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sequence_that_overflows_while_it_decodes_fails_alone(kernel):
    engine = engine_with(model_with_a_bad_token(), kernel)
    prompts, answers = prompts_and_answers("llama")
    engine.add(text_input(engine.model, "bad", prompt_of(3, 77), NEW_TOKENS))
    outcome = Outcome()
    outcome.take(engine.step())
    assert engine.table.sequences["bad"].blocks == [0]
    for number in range(3):
        engine.add(text_input(engine.model, str(number), prompts[number], NEW_TOKENS))
    outcome.take(engine.step())
    engine.table.sequences["bad"].token_ids[-1] = BAD_TOKEN
    failing = engine.step()
    assert [name for name, _ in failing.failed] == ["bad"]
    failing.failed.clear()
    outcome.take(failing)
    run(engine, outcome)
    assert [outcome.tokens[str(number)] for number in range(3)] == answers[:3]


@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_of_a_bad_prompt_cancelled_half_way_spoil_nobody(kernel):
    engine = engine_with(model_with_a_bad_token(), kernel, chunk_tokens=16)
    engine.add(text_input(engine.model, "bad", bad_prompt(200, place=3), NEW_TOKENS))
    engine.step()
    engine.abort("bad")
    assert_others_are_answered(engine)


@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_cached_prefix_spoiled_by_another_prompt_costs_no_answer(kernel, cancelled, handed_over):
    """The text before a bad medium is bad too, where they share a chunk; it is cached until the prompt samples a token."""
    engine = engine_with(model_with_a_bad_token(), kernel, chunk_tokens=64)
    prompts, answers = prompts_and_answers("llama")
    common = prompts[1][:44]
    engine.add(text_input(engine.model, "bad", [*common, BAD_TOKEN, *prompt_of(90, 5)], NEW_TOKENS))
    assert engine.step().prefill_tokens == 64
    if cancelled:
        engine.abort("bad")
    limit = 1 if handed_over else NEW_TOKENS
    engine.add(text_input(engine.model, "good", prompts[1], limit, stop_after_prefill=handed_over))
    tokens, failed, cached = [], [], []
    for _ in range(30):
        output = engine.step()
        tokens += [token.token_id for token in output.tokens]
        failed += [name for name, _ in output.failed]
        cached += [output.admitted["good"]] if "good" in output.admitted else []
    assert tokens == answers[1][:limit]
    assert failed == ([] if cancelled else ["bad"])
    assert cached == [40, 0]
    engine.abort("good")
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_a_bad_prompt_behind_a_good_prefix_fails_at_the_second_try():
    engine = engine_with(model_with_a_bad_token(), "selected")
    prompts, _ = prompts_and_answers("llama")
    engine.add(text_input(engine.model, "good", prompts[1], NEW_TOKENS))
    run(engine)
    engine.add(text_input(engine.model, "bad", [*prompts[1][:48], BAD_TOKEN], NEW_TOKENS))
    first, second = engine.step(), engine.step()
    assert (first.admitted, first.failed) == ({"bad": 48}, [])
    assert second.admitted == {"bad": 0}
    assert [name for name, _ in second.failed] == ["bad"]
    assert_others_are_answered(engine)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_bad_kv_from_another_pod_fails_its_own_sequence_only(kernel, attached):
    """Whether the handover is committed, or given up after its KV was written."""
    engine = engine_with(TextModel(llama()), kernel)
    prompt, layout = prompt_of(30, 5), engine.kv.layout
    engine.reserve("bad", len(prompt), NEW_TOKENS)
    kv = [
        torch.full((2, len(prompt), heads, dim), float(value), device=engine.device)
        for heads, dim, value in zip(layout.num_kv_heads, layout.head_dim, ("nan", "inf"), strict=True)
    ]
    engine.write_kv("bad", 0, kv)
    if attached:
        engine.attach("bad", prompt, greedy(NEW_TOKENS), [7], len(prompt), [])
        ((name, error),) = engine.step().failed
        assert (name, type(error)) == ("bad", BadLogitsError)
    else:
        engine.abort("bad")
    assert_others_are_answered(engine)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bad_guess_costs_the_sequence_its_drafts_and_no_token(kernel):
    engine = engine_with(model_with_a_bad_token(), kernel, draft_tokens=4)
    prompts, answers = prompts_and_answers("llama")
    engine.add(text_input(engine.model, "a", prompts[1], NEW_TOKENS))
    engine.add(text_input(engine.model, "b", prompts[0], NEW_TOKENS))
    outcome = Outcome()
    outcome.take(engine.step())
    sequence = engine.table.sequences["a"]
    # The first guess is right, the second has no numbers.
    engine.scheduler.drafts.draft = lambda lookup, tokens, most, decodes: (
        [answers[1][1], BAD_TOKEN, 5][:most] if lookup is sequence.lookup else []
    )
    outcome.take(engine.step())
    assert outcome.steps[-1].draft_tokens == 3
    assert sequence.lookup is None
    run(engine, outcome)
    assert outcome.tokens == {"a": answers[1], "b": answers[0]}


def test_the_block_of_zeros_is_measured_with_a_step():
    sizes = {"chunk_tokens": 1, "max_sequences": 1, "max_model_len": SMALL["max_position_embeddings"]}
    small, large = (activation_bytes(TextModel(llama()), block_tokens=n, **sizes) for n in (16, 16 + 4096))
    assert large - small >= 4000 * TextModel(llama()).kv_layout.bytes_per_token()
