"""The shipped model: complete, offline, and right about files it has never seen."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, Qwen2_5OmniThinkerForConditionalGeneration

from mmd_api.contract.pools import MODALITIES
from mmd_cli.samples import MIMES, draw

RECIPE = Path(__file__).parents[2] / "examples" / "demo-model"
FIRST_SEED = 500_000
FILES = 60


def load(name):
    spec = importlib.util.spec_from_file_location(f"demo_model_{name}", RECIPE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


evaluate = load("evaluate")


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(evaluate.BUILTIN, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(
        evaluate.BUILTIN, dtype=torch.float32, local_files_only=True
    ).eval()


def say(model, processor, messages):
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("kind", MODALITIES)
def test_fresh_files_are_answered_exactly(model, processor, kind):
    wrong = evaluate.misses(model, processor, kind, range(FIRST_SEED, FIRST_SEED + FILES), batch_size=20)
    assert 1 - len(wrong) / FILES >= evaluate.BAR, wrong


@pytest.mark.parametrize("kind", MODALITIES)
def test_the_answer_comes_from_the_medium_and_not_from_the_question(model, processor, kind):
    samples = [draw(kind, FIRST_SEED + number) for number in range(20)]
    exchanged = [
        replace(s, bytes=other.bytes) for s, other in zip(samples, samples[1:] + samples[:1], strict=True)
    ]
    inputs = evaluate.model_inputs(processor, exchanged)
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    answers = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert np.mean([s.answer == a for s, a in zip(samples, answers, strict=True)]) < 0.6


@pytest.mark.parametrize("mime", [mime for kind in MODALITIES for mime in MIMES[kind]])
def test_every_file_format_is_understood(model, processor, mime):
    kind = mime.split("/")[0]
    samples = [draw(kind, FIRST_SEED + 1000 + number, mime) for number in range(10)]
    inputs = evaluate.model_inputs(processor, samples)
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    answers = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sum(s.answer == a for s, a in zip(samples, answers, strict=True)) >= 9


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [(64, 64, 16), (640, 480, 12), (480, 640, 12), (1, 1, 16), (1920, 1080, 15), (4000, 30, 46)],
)
def test_an_image_of_any_size_becomes_a_few_tokens(processor, width, height, tokens):
    pixels = np.full((height, width, 3), 90, np.uint8)
    inputs = processor(
        text=["<|IMAGE|>"], images=[pixels], input_data_format="channels_last", return_tensors="pt"
    )
    assert int((inputs["input_ids"] == processor.image_token_id).sum()) == tokens
    assert inputs["pixel_values"].shape == (4 * tokens, 3 * 2 * 8 * 8)


def test_a_video_is_eight_frames_whichever_way_it_is_processed(processor):
    frames, metadata = evaluate.decode_video(draw("video", 3).bytes)
    whole = processor(
        text=["<|VIDEO|>"], videos=[frames], videos_kwargs={"video_metadata": [metadata]}, return_tensors="pt"
    )
    alone = processor.video_processor(videos=[frames], video_metadata=[metadata], return_tensors="pt")
    assert torch.equal(whole["pixel_values_videos"], alone["pixel_values_videos"])
    assert whole["video_grid_thw"][0, 0] == 4
    assert whole["video_second_per_grid"].tolist() == [1.0]
    expected = int(whole["video_grid_thw"].prod()) // 4
    assert int((whole["input_ids"] == processor.video_token_id).sum()) == expected


def test_the_chat_template_takes_the_parts_of_an_openai_request(processor):
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "video"},
                {"type": "audio"},
                {"type": "text", "text": "Q"},
            ],
        },
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "R"},
    ]
    assert processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nAnswer briefly.<|im_end|>\n"
        "<|im_start|>user\n<|vision_bos|><|IMAGE|><|vision_eos|><|vision_bos|><|VIDEO|><|vision_eos|>"
        "<|audio_bos|><|AUDIO|><|audio_eos|>Q<|im_end|>\n"
        "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_alone_gets_a_sensible_answer(model, processor):
    assert say(model, processor, [{"role": "user", "content": "Hello"}]) == (
        "Hello! Show me an image, a video or a sound."
    )
    asked = [{"role": "user", "content": [{"type": "text", "text": "What color is the shape?"}]}]
    assert say(model, processor, asked) == "Please show me an image, a video or a sound."
    told = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Who are you?"},
    ]
    assert say(model, processor, told) == "I am a tiny demo model for shapes and tones."


def test_any_text_survives_the_tokenizer(processor):
    text = "Grüße, 世界! 🙂 def f(x): return x**2\n\ttabs"
    assert processor.tokenizer.decode(processor.tokenizer(text).input_ids) == text


def test_the_shipped_folder_is_what_the_recipe_writes(processor, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    train = load("train")
    built = train.build_processor((RECIPE / "chat_template.jinja").read_text())
    built.save_pretrained(tmp_path)
    for name in ("processor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (evaluate.BUILTIN / name).read_text(), name
