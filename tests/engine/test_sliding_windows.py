"""Where all layers have a window, a sequence holds the blocks that a row may still see, and answers as `generate` does."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.contract.errors import BadLogitsError, CountMismatchError
from mmd_workers.engine import attention
from mmd_workers.engine.memory.blocks import extend_identities
from support.oracles.engine_oracle import (
    TEXT_MODELS,
    Outcome,
    TextModel,
    generate,
    make_engine,
    prompt_of,
    run,
    text_input,
)
from support.oracles.scheduler_bench import Bench

WINDOW, BLOCK, NEW_TOKENS = 8, 4, 40
MOST_HELD = 3  # blocks of 4 over the 7 tokens before a row, and its own
PROMPT = prompt_of(64, 3)


@functools.cache
def served(name):
    return TextModel(TEXT_MODELS[name]()), generate(TEXT_MODELS[name](), PROMPT, NEW_TOKENS)


def spoil_unreferenced(engine):
    """Overwrite what nobody may read any more."""
    unheld = [block for block, count in enumerate(engine.blocks._references) if not count]
    for tensor in (*engine.kv.keys, *engine.kv.values):
        tensor.index_fill_(0, torch.tensor(unheld, device=tensor.device), 1e4)


def held(engine):
    return engine.stats().blocks_total - engine.stats().blocks_free


@pytest.mark.parametrize(
    ("chunk_tokens", "kernel"), [(1, None), (7, None), (64, None), (7, attention.torch_kernel)]
)
def test_blocks_outside_the_window_are_freed_and_not_read(chunk_tokens, kernel):
    model, answer = served("mistral")
    if kernel is not None:
        model = TextModel(TEXT_MODELS["mistral"]())
    engine = make_engine(
        model, block_tokens=BLOCK, chunk_tokens=chunk_tokens, prefix_cache=False, fused_layers=kernel is None
    )
    engine.model_runner.kernel = kernel or engine.model_runner.kernel
    engine.add(text_input(model, "a", PROMPT, NEW_TOKENS))
    outcome, counts = Outcome(), []
    while engine.has_work():
        outcome.take(engine.step())
        counts.append(held(engine))
        spoil_unreferenced(engine)
    assert outcome.tokens["a"] == answer
    steps = -(-len(PROMPT) // chunk_tokens)
    assert counts[:steps] == sorted(counts[:steps], reverse=True), (
        "a chunk gives back what later ones do not see"
    )
    assert max(counts[steps - 1 :]) <= MOST_HELD


def test_sequences_share_a_pool_that_would_not_hold_all_of_their_tokens():
    model, answer = served("mistral")
    engine = make_engine(model, blocks=30, block_tokens=BLOCK, prefix_cache=False)
    outcome = Outcome()
    for name in "abcd":
        engine.add(text_input(model, name, PROMPT, NEW_TOKENS))
        outcome.take(engine.step())
        spoil_unreferenced(engine)
    assert 4 * (len(PROMPT) + NEW_TOKENS) > 30 * BLOCK
    assert len(engine.scheduler.running) == 4
    assert run(engine, outcome).tokens == dict.fromkeys("abcd", answer)
    assert engine.stats().preemptions == 0
    assert engine.stats().blocks_free == 30


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_prompt_needs_and_reuses_blocks_for_a_window_and_a_chunk(prefix_cache):
    model, answer = served("mistral")
    engine = make_engine(model, blocks=30, block_tokens=BLOCK, chunk_tokens=8, prefix_cache=prefix_cache)
    engine.warm_up()
    outcome, names = Outcome(), "abcdef"
    for number, name in enumerate(names):
        prompt = PROMPT if name in "af" else [number, *PROMPT[1:]]
        engine.add(text_input(model, name, prompt, NEW_TOKENS))
    most = (WINDOW - 1 + 8 + BLOCK - 1) // BLOCK + 1
    outcome.take(engine.step())
    assert len(engine.scheduler.running) == 5, "the sixth would leave no spare blocks"
    assert held(engine) <= 5 * most < 2 * len(PROMPT) // BLOCK
    while engine.has_work():
        assert all(len(s.held_blocks) <= most for s in engine.scheduler.running)
        spoil_unreferenced(engine) if not prefix_cache else None
        outcome.take(engine.step())
    assert outcome.tokens["a"] == outcome.tokens["f"] == answer
    assert {len(tokens) for tokens in outcome.tokens.values()} == {NEW_TOKENS}
    assert engine.stats().preemptions == 0
    assert engine.stats().blocks_free == 30


def test_a_prompt_that_is_handed_over_asks_for_all_of_its_blocks():
    model, _ = served("mistral")
    engine = make_engine(model, block_tokens=BLOCK, chunk_tokens=8, prefix_cache=False)
    engine.warm_up()
    engine.add(text_input(model, "a", PROMPT, NEW_TOKENS, stop_after_prefill=True))
    engine.step()
    assert held(engine) == len(PROMPT) // BLOCK


def test_a_sequence_that_gave_blocks_back_is_preempted_and_computed_again():
    model, _ = served("mistral")
    prompt = PROMPT[:3]
    engine, outcome = make_engine(model, blocks=64, block_tokens=1, prefix_cache=False), Outcome()
    engine.add(text_input(model, "newest", prompt, NEW_TOKENS, arrived=9.0))
    for _ in range(20):
        outcome.take(engine.step())
    assert engine.table.sequences["newest"].dropped > WINDOW
    for number in range(10):
        engine.add(text_input(model, str(number), prompt, NEW_TOKENS, arrived=float(number) / 9))
    while engine.has_work():
        outcome.take(engine.step())
        spoil_unreferenced(engine)
    assert engine.stats().preemptions > 0
    assert list(outcome.tokens.values()) == [generate(TEXT_MODELS["mistral"](), prompt, NEW_TOKENS)] * 11
    assert engine.stats().blocks_free == 64


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_a_layer_that_sees_everything_keeps_all_blocks(name):
    model, answer = served(name)
    engine = make_engine(model, block_tokens=BLOCK, prefix_cache=False)
    engine.add(text_input(model, "a", PROMPT, NEW_TOKENS))
    outcome, most = Outcome(), 0
    while engine.has_work():
        outcome.take(engine.step())
        most = max(most, held(engine))
    assert outcome.tokens["a"] == answer
    assert most == -(-(len(PROMPT) + NEW_TOKENS - 1) // BLOCK)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_prompt_keeps_its_blocks_for_a_decoder_which_gives_them_back(prefix_cache):
    model, answer = served("mistral")
    engines = [
        make_engine(model, block_tokens=BLOCK, chunk_tokens=16, prefix_cache=prefix_cache) for _ in "pd"
    ]
    prefill, decode = engines
    for engine in engines:
        engine.warm_up()
    for name in "ab":
        item = text_input(model, name, PROMPT, NEW_TOKENS, stop_after_prefill=True)
        prefill.add(item)
        outcome = run(prefill)
        assert held(prefill) == len(PROMPT) // BLOCK
        identities: list[bytes] = []
        extend_identities(identities, PROMPT, [], BLOCK, len(PROMPT) // BLOCK)
        cached = decode.reserve(name, len(PROMPT), NEW_TOKENS, identities)
        assert cached == (len(PROMPT) if prefix_cache and name == "b" else 0)
        if cached < len(PROMPT):
            decode.write_kv(name, cached, prefill.read_kv(name, cached, len(PROMPT)))
        prefill.abort(name)
        decode.attach(name, PROMPT, item.sampling, outcome.tokens[name], len(PROMPT), [])
        assert held(decode) <= MOST_HELD
        with pytest.raises(CountMismatchError, match="left the model's window"):
            decode.read_kv(name, 0, 4)
        assert run(decode, outcome).tokens[name] == answer
    assert [engine.stats().blocks_free for engine in engines] == [64, 64]


def test_a_conversation_finds_the_blocks_that_left_the_window():
    model, answer = served("mistral")
    engine = make_engine(model, block_tokens=BLOCK)
    engine.add(text_input(model, "a", PROMPT, NEW_TOKENS))
    run(engine)
    turn = [*PROMPT, *answer, *prompt_of(5, 9)]
    engine.add(text_input(model, "b", turn, 6))
    outcome = Outcome()
    outcome.take(engine.step())
    assert outcome.steps[0].admitted == {"b": (len(PROMPT) + NEW_TOKENS - 1) // BLOCK * BLOCK}
    assert held(engine) <= MOST_HELD, "of a cached prefix too"
    assert run(engine, outcome).tokens["b"] == generate(TEXT_MODELS["mistral"](), turn, 6)


def test_the_beginning_of_a_conversation_is_evicted_last():
    """Its blocks left the window first, and were given back before the others."""
    model, _ = served("mistral")
    engine = make_engine(model, blocks=40, block_tokens=BLOCK)
    engine.add(text_input(model, "a", PROMPT, 20))
    run(engine)
    known: list[bytes] = []
    extend_identities(known, PROMPT, [], BLOCK, len(PROMPT) // BLOCK)
    before = len(engine.blocks.find(known))
    assert before == len(PROMPT) // BLOCK
    engine.add(text_input(model, "b", prompt_of(64, 9), NEW_TOKENS))
    run(engine)
    found = len(engine.blocks.find(known))
    assert 0 < found < before, "some are evicted, from the end"


def test_blocks_of_broken_logits_are_forgotten_also_those_that_left_the_window():
    model = TextModel(TEXT_MODELS["mistral"]())
    engine = make_engine(model, block_tokens=BLOCK, chunk_tokens=16)
    engine.add(text_input(model, "a", PROMPT, NEW_TOKENS))
    for _ in range(3):
        engine.step()
    identities: list[bytes] = []
    extend_identities(identities, PROMPT, [], BLOCK, len(PROMPT) // BLOCK)
    assert len(engine.blocks.find(identities)) == 48 // BLOCK
    model.logits = lambda hidden: torch.full(
        (len(hidden), model.vocab_size), float("nan"), device=hidden.device
    )
    ((_, error),) = engine.step().failed
    assert isinstance(error, BadLogitsError)
    assert engine.blocks.find(identities) == []
    assert len(engine.blocks._free) == 64


@settings(deadline=None, max_examples=40)
@given(
    window=st.integers(1, 24),
    chunk_tokens=st.integers(1, 24),
    block_tokens=st.integers(1, 4),
    lengths=st.lists(st.integers(20, 80), min_size=2, max_size=4),
    common=st.integers(20, 80),
    gaps=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    takes=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_prompts_with_common_prefixes_never_run_out_of_blocks(
    window, chunk_tokens, block_tokens, lengths, common, gaps, takes
):
    """It does not matter who takes the blocks that leave their windows."""
    bench = Bench(blocks=1000, block_tokens=block_tokens, chunk_tokens=chunk_tokens, prefix_cache=True)
    scheduler, pool = bench.scheduler, bench.pool
    scheduler.window = window
    come = [sum((gaps * len(lengths))[:number]) for number in range(len(lengths))]
    for step in range(sum(lengths) + come[-1] + 1):
        for number in [number for number, at in enumerate(come) if at == step]:
            own = (number + 1) * 1000
            bench.add(str(number), [at if at < common else own + at for at in range(lengths[number])])
        plan = scheduler.schedule()
        taken = pool.allocate(pool.available) if takes[step % len(takes)] else []
        for sequence in scheduler.running:
            ahead = min(sequence.num_tokens, sequence.computed + chunk_tokens)
            assert len(sequence.blocks) * block_tokens >= ahead
            own = len(sequence.blocks) - max(sequence.dropped, sequence.shared)
            assert own <= pool.blocks_for(window - 1 + chunk_tokens) + 1
        for work in plan.decodes + plan.prefills:
            samples = work.samples
            scheduler.finish_chunk(work)
            if samples:
                scheduler.remove(work.sequence)
        pool.release(taken)
    assert not scheduler.running
    assert not scheduler.waiting
    assert pool.available == pool.num_blocks
