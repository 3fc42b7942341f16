"""What only a GPU has: CUDA graphs, attention in half precision, and KV that moves on the device. Answers are compared with those of
`generate` in float32, and in half precision, where rounding decides between tokens, with those of one core that does everything."""

from __future__ import annotations

import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.oracles import adapters, engine_oracle
from support.oracles import model_zoo as zoo

from . import cores

pytestmark = pytest.mark.skipif(cores.DEVICE.type == "cpu", reason="there is no GPU")
LONG = "tell me which of these is the larger one, and what else you see there, and then all the rest of it"
TOKENS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {arch: cores.checkpoint(arch, folder) for arch in ("llava", "qwen2_vl")}


@pytest.fixture(scope="module")
def asked(models):
    """Each `generate` is asked before vLLM changes what it needs."""
    images = [zoo.image(100, 64, 1), zoo.image(60, 60, 4)]
    made = {
        arch: [
            cores.question(folder, LONG),
            cores.question(folder, "what is this? " + LONG, images[0], LONG),
            cores.question(folder, *images, "which of them?"),
        ]
        for arch, folder in models.items()
    }
    return {arch: [(one, one.answer(TOKENS)) for one in questions] for arch, questions in made.items()}


@pytest.mark.parametrize("arch", ["llava", "qwen2_vl"])
def test_cuda_graphs_change_no_answer_however_many_sequences_share_a_step(models, asked, arch):
    core = cores.make(models[arch], compiled=True)
    for one, answer in asked[arch]:
        assert cores.ask(core, one) == answer
    expected = {}
    for number in range(5):  # a number for which no graph was captured
        one, answer = asked[arch][number % len(asked[arch])]
        core.add(f"{number}", one.request, stop_after_prefill=False)
        cores.supply(core, f"{number}", one)
        expected[f"{number}"] = answer
    outcome = cores.step(core)
    assert outcome.tokens == expected
    assert max(step.decode_sequences for step in outcome.steps) == len(expected)
    cores.assert_empty(core)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "CUDA graphs"])
@pytest.mark.parametrize("arch", ["llava", "qwen2_vl"])
def test_half_precision_kv_moves_without_changing_the_answer(models, asked, arch, compiled):
    settings: dict[str, Any] = {"dtype": "BFloat16", "compiled": compiled, "prefix_cache": False}
    source, target = (cores.make(models[arch], **settings) for _ in range(2))
    assert source.kv_layout.dtype == "bfloat16"
    for one, _ in asked[arch]:
        alone = cores.ask(source, one)
        assert len(alone) == TOKENS
        assert cores.hand_over(source, target, one) == alone
    prompt = engine_oracle.prompt_of(4 * cores.BLOCK + 5, 3)
    source.add("a", cores.text_request(prompt), stop_after_prefill=True)
    cores.step(source, until=lambda o: o.tokens.get("a"))
    target.reserve("a", len(prompt), 8)
    read = source.read_kv("a", 0, len(prompt))
    assert {tensor.device.type for tensor in read} == {"cuda"}
    for core in (source, target):
        core.abort("a")
        core.step()
        cores.assert_empty(core)


def test_a_feature_that_comes_late_holds_up_nothing_else(models, asked):
    core = cores.make(models["llava"], compiled=True)
    (text, answer), (image, late) = asked["llava"][:2]
    core.add("late", image.request, stop_after_prefill=False)
    core.add("text", text.request, stop_after_prefill=False)
    outcome = cores.step(core, until=lambda o: o.reasons.get("text"))
    assert outcome.tokens == {"text": answer}
    cores.supply(core, "late", image)
    cores.step(core, outcome)
    assert outcome.tokens["late"] == late
    cores.assert_empty(core)


def test_drafts_change_no_answer_however_many_sequences_share_a_step(models, asked):
    """The model repeats itself, so drafts of what came before are accepted."""
    drafts = {"method": "ngram", "numSpeculativeTokens": 3}
    core = cores.make(models["qwen2_vl"], vllm={"speculative": drafts})
    for number, (one, _) in enumerate(asked["qwen2_vl"]):
        core.add(f"{number}", one.request, stop_after_prefill=False)
        cores.supply(core, f"{number}", one)
    outcome = cores.step(core)
    assert outcome.tokens == {f"{n}": answer for n, (_, answer) in enumerate(asked["qwen2_vl"])}
    cores.assert_empty(core)


def scores_of(one: cores.Question, adapter: Path | None) -> tuple[list[int], torch.Tensor]:
    """The greedy tokens of the whole model in float32 with an adapter, and what it thought of each token there."""
    inputs = zoo.hf_inputs(one.served, one.messages, one.media, one.layout)
    if hasattr(one.served.model.base_model, "rope_deltas"):
        one.served.model.base_model.rope_deltas = None
    with adapters.merged(one.served.model, adapter), torch.no_grad():
        made = one.served.model.generate(
            **inputs,
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=list(one.served.language.suppress_token_ids) or None,
            output_scores=True,
            return_dict_in_generate=True,
        )
    return made.sequences[0, -TOKENS:].tolist(), torch.cat(made.scores).float()


@pytest.mark.parametrize("arch", ["llava", "qwen2_vl"])
def test_in_half_precision_adapters_give_the_likeliest_tokens_up_to_rounding(arch, tmp_path):
    """In steps that sequences of many lengths share. Each token follows those of float32, so that no difference adds up."""
    folder = cores.checkpoint(arch, tmp_path)
    asked = [cores.question(folder, LONG), cores.question(folder, "what is it", zoo.image(100, 64, 1), LONG)]
    whole = asked[0].served.model
    weak = {"strength": 0.5}  # strong ones multiply what rounding changes
    loras = {
        "one": adapters.write(tmp_path / "one", whole, seed=1, rank=8, **weak),
        "two": adapters.write(tmp_path / "two", whole, seed=2, rank=16, targets=adapters.ALL_LINEAR, **weak),
    }
    names = ["", *loras]
    exact = {(n, name): scores_of(one, loras.get(name)) for n, one in enumerate(asked) for name in names}
    for number in range(len(asked)):
        assert len({tuple(exact[number, name][0]) for name in names}) == len(names), "adapters change nothing"
    core = cores.make(folder, adapters=loras, dtype="BFloat16", blocks=256, prefix_cache=False)
    for (number, name), (tokens, scores) in exact.items():
        for length in range(TOKENS):
            request = replace(asked[number].by(name), output_token_ids=tokens[:length])
            core.add(f"{length}", request, stop_after_prefill=False)
            cores.supply(core, f"{length}", asked[number])
        made = cores.step(core).tokens
        first = [made[f"{length}"][0] for length in range(TOKENS)]
        missing = scores.amax(-1) - scores.gather(-1, torch.tensor(first)[:, None])[:, 0]
        assert missing.max() < 0.5 * scores[scores.isfinite()].std(), (number, name, missing)
        assert sum(map(operator.eq, first, tokens)) >= 0.75 * TOKENS, (number, name, first, tokens)
    cores.assert_empty(core)
