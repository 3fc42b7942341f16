"""Each architecture against `generate`, and its log probabilities against the native engine's.

Where vLLM is known to differ, the test says how, and fails when that changes. `docs/measurements/vllm-architectures.md` has the table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mmd_workers.media.choice import SamplingChoice
from mmd_workers.model import __file__ as model_package
from support.oracles import model_zoo as zoo
from tests.vllm_engine import cores

LONG = "tell me which of these is the larger one, and what else you see there"
TEXT = "tell me what you know of this and of that and of all the rest"
ARCHITECTURES = [
    "llava",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "internvl",
    "gemma3",
    "qwen2_audio",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "idefics3",
    "smolvlm",
    "qwen2_5_omni",
    "audioflamingo3",
]
OTHER_POSITIONS = [("qwen2_5_vl", "video")]
"""vLLM counts the text after a video from the last time of a frame on, this transformers from the last row or column."""
CAUSAL_IMAGES = [("gemma3", "image"), ("gemma3", "images")]
"""vLLM's attention on CPUs is causal within an image, too, where the model's looks at the whole image."""
DIFFERENT = [*OTHER_POSITIONS, *(CAUSAL_IMAGES if cores.DEVICE.type == "cpu" else [])]
TOLERANCE = 1e-4


def cases(arch):
    takes = ("image", "video", "audio") if arch == "demo" else zoo.MODALITIES[arch]
    yield "text", [TEXT]
    if "image" in takes:
        yield "image", [zoo.image(100, 64, 1), LONG]
        yield "images", ["first", zoo.image(60, 60, 4), "and then the next", zoo.image(150, 40, 5), LONG]
    if "video" in takes:
        yield "video", [zoo.video(64, 80, 12, 6.0, 2), "tell me what moves"]
    if "audio" in takes:
        yield "audio", ["what is this?", zoo.audio(20000, 3), "tell me what sounds"]


@pytest.mark.parametrize("arch", ["demo", *ARCHITECTURES])
def test_an_architecture_answers_as_generate_does(arch, tmp_path):
    folder = Path(model_package).parent / "demo" if arch == "demo" else cores.checkpoint(arch, tmp_path)
    asked = {kind: cores.question(folder, *parts) for kind, parts in cases(arch)}
    answers = {kind: one.answer(zoo.NEW_TOKENS) for kind, one in asked.items()}
    native = {kind: cores.native(one, zoo.NEW_TOKENS)[1] for kind, one in asked.items()}
    # vLLM changes the classes of transformers whose models it runs: what they answer comes first.
    core = cores.make(folder, chunk_tokens=128)
    for kind, one in asked.items():
        outcome = cores.run(core, one, one.with_(logprobs=3))
        expected = answers[kind], native[kind]
        if (arch, kind) in DIFFERENT:
            assert outcome.logprobs["a"] != pytest.approx(expected[1], abs=TOLERANCE), "take it off the list"
            expected = cores.native(one, zoo.NEW_TOKENS, as_vllm(core, arch, kind, one))
        assert outcome.tokens["a"] == expected[0], kind
        assert outcome.logprobs["a"] == pytest.approx(expected[1], abs=TOLERANCE), kind
    cores.assert_empty(core)


def test_media_that_a_request_sampled_otherwise_are_answered_as_generate_does(tmp_path):
    folder = cores.checkpoint("qwen2_vl", tmp_path)
    choices = [SamplingChoice(max_pixels=9 * 28 * 28), SamplingChoice(num_frames=6)]
    parts = [zoo.image(150, 110, 3), "then", zoo.video(40, 44, 60, 6.0, 2), LONG]
    asked = cores.question(folder, *parts, choices=choices)
    plain = cores.question(folder, *parts)
    assert all(
        one.num_tokens < other.num_tokens
        for one, other in zip(asked.layout.media, plain.layout.media, strict=True)
    )
    expected, logprobs = asked.answer(zoo.NEW_TOKENS), cores.native(asked, zoo.NEW_TOKENS)[1]
    core = cores.make(folder, chunk_tokens=128)
    outcome = cores.run(core, asked, asked.with_(logprobs=3))
    assert outcome.tokens["a"] == expected
    assert outcome.logprobs["a"] == pytest.approx(logprobs, abs=TOLERANCE)


def as_vllm(core, arch, kind, asked):
    """The prompt with the one thing that vLLM does otherwise."""
    prompt = zoo.lowered(asked.served, asked.layout, asked.media)
    if (arch, kind) in CAUSAL_IMAGES:
        prompt.atomic_ranges = []
        return prompt
    made = core._builder.build("probe", asked.request, [], 1)
    positions, delta = core._model.get_mrope_input_positions(made.prompt_token_ids, made.mm_features)
    prompt.positions, prompt.next_position = positions.long(), positions.shape[1] + int(delta)
    return prompt
