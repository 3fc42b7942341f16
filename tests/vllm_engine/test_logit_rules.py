"""Rules of logits equal what vLLM's own sampler does with the same parameters."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_workers.vllm_engine.setup.environment import prepare_environment

prepare_environment()

from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessors  # noqa: E402
from vllm.v1.sample.logits_processor.builtin import (  # noqa: E402
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.logits_processor.interface import BatchUpdate  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402

from mmd_api.contract.sampling import LogitRules  # noqa: E402
from mmd_workers.engine.choosing.logit_rules import RuleState, apply_rules  # noqa: E402

VOCAB = 40
CPU = torch.device("cpu")
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
some = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30, unique=True)
rules = st.builds(
    LogitRules,
    allowed_token_ids=st.just([]) | some,
    bad_words=st.lists(tokens.filter(bool).map(lambda word: word[:3]), max_size=4),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4).map(
        lambda biases: list(biases.items())
    ),
    repetition_penalty=st.just(1.0) | st.floats(0.1, 5),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    presence_penalty=st.just(0.0) | st.floats(-2, 2),
)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**31), rules, tokens, tokens, st.integers(0, 6), st.sets(st.integers(0, VOCAB - 1)))
def test_logits_are_those_of_vllms_sampler(seed, rule, prompt, outputs, least, ends):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    params = SamplingParams(
        temperature=0.0,
        logit_bias=dict(rule.logit_bias),
        min_tokens=least,
        max_tokens=99,
        stop_token_ids=sorted(ends),
    )
    processors = [
        MinTokensLogitsProcessor(None, CPU, False),  # type: ignore[arg-type]
        LogitBiasLogitsProcessor(None, CPU, False),
    ]
    for processor in processors:
        processor.update_state(BatchUpdate(1, (), [(0, params, prompt, outputs)], ()))
    mask = None
    if rule.allowed_token_ids:
        mask = torch.ones(1, VOCAB, dtype=torch.bool)
        mask[0, rule.allowed_token_ids] = False
    metadata = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=False,
        prompt_token_ids=torch.tensor([prompt or [VOCAB]]),
        frequency_penalties=torch.tensor([rule.frequency_penalty]),
        presence_penalties=torch.tensor([rule.presence_penalty]),
        repetition_penalties=torch.tensor([rule.repetition_penalty]),
        output_token_ids=[outputs],
        allowed_token_ids_mask=mask,
        bad_words_token_ids={0: rule.bad_words} if rule.bad_words else {},
        logitsprocs=LogitsProcessors(processors),
    )
    expected = Sampler().apply_logits_processors(logits.clone(), metadata, predict_bonus_token=False)
    state = RuleState(rule, least, ends, prompt)
    state.follow(outputs)
    apply_rules(logits, [(0, state)])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)
