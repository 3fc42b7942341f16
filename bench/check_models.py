"""Run `mmd check` on architectures without a test or a line of code of their own; prints the table of docs/measurements/models.md.

    python -m bench.check_models [ARCHITECTURE ...] [--json FILE]

Every model is built from a small configuration with random weights, as `support/oracles/random_model.py` does it, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from mmd_api.contract.errors import MmdError
from mmd_api.spec.model import ModelSpec
from mmd_cli.check.compare import check
from support.oracles import random_model as rm


def _llava_like(r: rm.Recipe, config_class: Any, model_class: Any, **settings: Any) -> rm.Built:
    r.names = {"image_token": "<image>"}
    r.make_tokenizer()
    config = config_class(
        text_config=hf.LlamaConfig(**r.text()),
        vision_config=hf.CLIPVisionConfig(**r.clip(num_hidden_layers=4)),
        image_token_id=r.id("<image>"),
        **settings,
    )
    return model_class(config), rm.llava_processor(r)


def _vipllava(r: rm.Recipe) -> rm.Built:
    layers = [-2, -3, 1]
    return _llava_like(
        r, hf.VipLlavaConfig, hf.VipLlavaForConditionalGeneration, vision_feature_layers=layers
    )


def _llava_layers(r: rm.Recipe) -> rm.Built:
    layers = [-2, -3, 1]
    return _llava_like(r, hf.LlavaConfig, hf.LlavaForConditionalGeneration, vision_feature_layer=layers)


def _aya_vision(r: rm.Recipe) -> rm.Built:
    r.names = {
        "image_token": "<image>",
        "img_patch": "<|IMG_PATCH|>",
        "start": "<|START_OF_IMG|>",
        "end": "<|END_OF_IMG|>",
        "line": "<|IMG_LINE_BREAK|>",
        "tile": "TILE",
        "global": "TILE_GLOBAL",
    }
    r.make_tokenizer()
    config = hf.AyaVisionConfig(
        text_config=hf.Cohere2Config(**r.text(layer_types=["sliding_attention", "full_attention"])),
        vision_config=hf.SiglipVisionConfig(**r.clip(vision_use_head=False)),
        image_token_index=r.id("<|IMG_PATCH|>"),
        downsample_factor=2,
        tie_word_embeddings=False,
    )
    processor = hf.AyaVisionProcessor(
        image_processor=hf.GotOcr2ImageProcessor(size=rm.SQUARE, crop_to_patches=True, max_patches=4),
        tokenizer=r.tokenizer,
        patch_size=14,
        img_size=56,
        downsample_factor=2,
        chat_template=rm.chat_template(image="<image>"),
    )
    return hf.AyaVisionForConditionalGeneration(config), processor


def _cohere2_vision(r: rm.Recipe) -> rm.Built:
    r.names = {
        "image_token": "<|IMG_PATCH|>",
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    }
    r.make_tokenizer()
    config = hf.Cohere2VisionConfig(
        text_config=hf.Cohere2Config(**r.text(layer_types=["sliding_attention", "full_attention"])),
        vision_config=hf.SiglipVisionConfig(**r.clip(vision_use_head=False)),
        image_token_id=r.id("<|IMG_PATCH|>"),
        alignment_intermediate_size=64,
        tie_word_embeddings=False,
    )
    images = hf.Cohere2VisionImageProcessor(size=rm.SQUARE, max_patches=4, patch_size=2)
    processor = hf.Cohere2VisionProcessor(
        image_processor=images,
        tokenizer=r.tokenizer,
        chat_template=rm.chat_template(image="<|IMG_PATCH|>"),
    )
    return hf.Cohere2VisionForConditionalGeneration(config), processor


def _lighton_ocr(r: rm.Recipe) -> rm.Built:
    r.names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    r.make_tokenizer()
    config = hf.LightOnOcrConfig(
        text_config=hf.Qwen3Config(**r.text(head_dim=r.size.hidden // 4)),
        vision_config=hf.PixtralVisionConfig(**r.clip(image_size=112)),
        image_token_id=r.id("[IMG]"),
        tie_word_embeddings=False,
    )
    processor = hf.LightOnOcrProcessor(
        image_processor=hf.PixtralImageProcessor(size={"longest_edge": 112}, patch_size=28),
        tokenizer=r.tokenizer,
        chat_template=rm.chat_template(image="[IMG]"),
    )
    return hf.LightOnOcrForConditionalGeneration(config), processor


def _deepseek_vl(r: rm.Recipe) -> rm.Built:
    r.names = {"image_token": "<image_placeholder>"}
    r.make_tokenizer()
    config = hf.DeepseekVLConfig(
        text_config=hf.LlamaConfig(**r.text()),
        vision_config=hf.SiglipVisionConfig(**r.clip(vision_use_head=False)),
        image_token_id=r.id("<image_placeholder>"),
        tie_word_embeddings=False,
    )
    processor = hf.DeepseekVLProcessor(
        image_processor=hf.DeepseekVLImageProcessor(size=rm.SQUARE, min_size=14),
        tokenizer=r.tokenizer,
        num_image_tokens=16,
        chat_template=rm.chat_template(image="<image_placeholder>"),
    )
    return hf.DeepseekVLForConditionalGeneration(config), processor


def _llava_next_video(r: rm.Recipe) -> rm.Built:
    r.names = {"image_token": "<image>", "video_token": "<video>"}
    r.make_tokenizer()
    config = hf.LlavaNextVideoConfig(
        text_config=hf.LlamaConfig(**r.text()),
        vision_config=hf.CLIPVisionConfig(**r.clip()),
        image_token_id=r.id("<image>"),
        video_token_id=r.id("<video>"),
        image_grid_pinpoints=rm.PINPOINTS,
    )
    sizes = {"size": {"shortest_edge": 56}, "crop_size": rm.SQUARE}
    processor = hf.LlavaNextVideoProcessor(
        image_processor=hf.LlavaNextImageProcessor(**sizes, image_grid_pinpoints=rm.PINPOINTS),
        video_processor=hf.LlavaNextVideoVideoProcessor(**sizes),
        tokenizer=r.tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=rm.chat_template(image="<image>\n", video="<video>\n"),
    )
    return hf.LlavaNextVideoForConditionalGeneration(config), processor


GLM_TOKENS = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}


def _glm(r: rm.Recipe, stem: str, **text: Any) -> rm.Built:
    r.names = dict(GLM_TOKENS)
    r.make_tokenizer()
    rope = rm.mrope(r.size.hidden) | {"partial_rotary_factor": 1.0}
    width = r.size.vision_hidden
    config = getattr(hf, stem + "Config")(
        text_config=r.text(rope_parameters=rope) | text,
        vision_config={
            "depth": 2,
            "hidden_size": width,
            "num_heads": 4,
            "image_size": 56,
            "patch_size": 14,
            "out_hidden_size": r.size.hidden,
            "intermediate_size": 2 * width,
        },
        **{name + "_id": r.id(token) for name, token in GLM_TOKENS.items()},
    )
    pixels = {"shortest_edge": 16 * 28 * 28, "longest_edge": 144 * 28 * 28}
    family = "Glm46V" if stem == "Glm46V" else "Glm4v"
    processor = getattr(hf, family + "Processor")(
        image_processor=getattr(hf, family + "ImageProcessor")(size=pixels, **rm.PATCHES),
        video_processor=getattr(hf, family + "VideoProcessor")(size=pixels, **rm.PATCHES),
        tokenizer=r.tokenizer,
        chat_template=rm.chat_template(
            image="<|begin_of_image|><|image|><|end_of_image|>",
            video="<|begin_of_video|><|video|><|end_of_video|>",
        ),
    )
    return getattr(hf, stem + "ForConditionalGeneration")(config), processor


def _glm4v(r: rm.Recipe) -> rm.Built:
    return _glm(r, "Glm4v")


def _glm46v(r: rm.Recipe) -> rm.Built:
    return _glm(r, "Glm46V", model_type="glm4v_text")


def _glm4v_moe(r: rm.Recipe) -> rm.Built:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return _glm(r, "Glm4vMoe", head_dim=r.size.hidden // 4, **experts)


def _qwen3_vl_moe(r: rm.Recipe) -> rm.Built:
    r.names = dict(rm.QWEN_NAMES)
    r.make_tokenizer()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    ids = {name + "_id": r.id(token) for name, token in rm.QWEN_NAMES.items()}
    text = r.text(rope_parameters=rm.mrope(r.size.hidden), head_dim=r.size.hidden // 4, **experts)
    config = hf.Qwen3VLMoeConfig(text_config=text, vision_config=rm.qwen_vision(r, "3"), **ids)
    return hf.Qwen3VLMoeForConditionalGeneration(config), rm.qwen_processor(r, "3")


def _qwen3_5(r: rm.Recipe) -> rm.Built:
    r.names = dict(rm.QWEN_NAMES)
    r.make_tokenizer()
    ids = {name + "_id": r.id(token) for name, token in rm.QWEN_NAMES.items()}
    text = r.text(rope_parameters=rm.mrope(r.size.hidden), head_dim=r.size.hidden // 4) | {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    config = hf.Qwen3_5Config(
        text_config=text,
        vision_config=rm.qwen_vision(r, "3") | {"deepstack_visual_indexes": []},
        **ids,
    )
    return hf.Qwen3_5ForConditionalGeneration(config), rm.qwen_processor(r, "3")


def _ernie4_5_vl_moe(r: rm.Recipe) -> rm.Built:
    r.names = dict(rm.QWEN_NAMES)
    r.make_tokenizer()
    width = r.size.vision_hidden
    ids = {
        "image_token_id": r.id("<|image_pad|>"),
        "video_token_id": r.id("<|video_pad|>"),
        "image_start_token_id": r.id("<|vision_start|>"),
        "image_end_token_id": r.id("<|vision_end|>"),
        "video_start_token_id": r.id("<|vision_start|>"),
        "video_end_token_id": r.id("<|vision_end|>"),
    }
    config = hf.Ernie4_5_VLMoeConfig(
        text_config=r.text(
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=[32, 32],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
        ),
        vision_config={"depth": 2, "hidden_size": width, "num_heads": 4, "intermediate_size": 2 * width},
        tie_word_embeddings=False,
        **ids,
    )
    return hf.Ernie4_5_VLMoeForConditionalGeneration(config), rm.qwen_processor(r, "2")


def _gemma3n(r: rm.Recipe) -> rm.Built:
    r.make_tokenizer()
    r.tokenizer.chat_template = rm.chat_template()
    text = r.text(
        head_dim=r.size.hidden // 4,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=len(r.tokenizer),
        num_kv_shared_layers=0,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * r.size.layers,
    )
    return hf.Gemma3nForCausalLM(hf.Gemma3nTextConfig(**text)), r.tokenizer


def _mllama(r: rm.Recipe) -> rm.Built:
    r.names = {"image_token": "<|image|>"}
    r.make_tokenizer()
    width = r.size.vision_hidden
    config = hf.MllamaConfig(
        text_config=r.text(cross_attention_layers=[1], bos_token_id=1),
        vision_config={
            "hidden_size": width,
            "attention_heads": 4,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "intermediate_size": 2 * width,
            "vision_output_dim": 2 * width,
            "image_size": 56,
            "patch_size": 14,
            "intermediate_layers_indices": [0],
            "max_num_tiles": 4,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        image_token_index=r.id("<|image|>"),
    )
    processor = hf.MllamaProcessor(
        image_processor=hf.MllamaImageProcessor(size=rm.SQUARE, max_image_tiles=4),
        tokenizer=r.tokenizer,
        chat_template=rm.chat_template(image="<|image|>"),
    )
    return hf.MllamaForConditionalGeneration(config), processor


def _glmasr(r: rm.Recipe) -> rm.Built:
    r.names = {"audio_token": "<|pad|>"}
    r.make_tokenizer()
    width = r.size.vision_hidden
    config = hf.GlmAsrConfig(
        text_config=r.text(model_type="llama"),
        audio_config={
            "num_mel_bins": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 4 * width,
            "hidden_size": width,
            "max_position_embeddings": 1500,
        },
        audio_token_id=r.id("<|pad|>"),
    )
    processor = hf.GlmAsrProcessor(
        feature_extractor=rm.mel_features(30),
        tokenizer=r.tokenizer,
        chat_template=rm.chat_template(audio="<|pad|>"),
    )
    return hf.GlmAsrForConditionalGeneration(config), processor


def _qwen3(r: rm.Recipe) -> rm.Built:
    return rm.text_model(r, "Qwen3", head_dim=r.size.hidden // 4)


def _gemma2(r: rm.Recipe) -> rm.Built:
    r.embedding_std = 0.02
    return rm.text_model(r, "Gemma2", head_dim=r.size.hidden // 4, sliding_window=16)


BUILDERS: dict[str, Callable[[rm.Recipe], rm.Built]] = {
    "vipllava": _vipllava,
    "llava (several feature layers)": _llava_layers,
    "aya_vision": _aya_vision,
    "cohere2_vision": _cohere2_vision,
    "lighton_ocr": _lighton_ocr,
    "deepseek_vl": _deepseek_vl,
    "llava_next_video": _llava_next_video,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v_moe,
    "glm46v": _glm46v,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "glmasr": _glmasr,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "ernie4_5_vl_moe": _ernie4_5_vl_moe,
    "qwen3_5": _qwen3_5,
    "gemma3n_text": _gemma3n,
    "mllama": _mllama,
}


def build(name: str, folder: Path) -> Path:
    """Write the checkpoint of an architecture."""
    rm.ARCHITECTURES.setdefault(name, BUILDERS[name])
    return rm.build(name, folder)


def row(name: str, folder: Path) -> dict[str, Any]:
    """What `mmd check` finds."""
    spec = ModelSpec(id=str(build(name, folder / "model")), dtype="Float32")
    try:
        report = check(spec, torch.device("cpu"))
    except MmdError as error:
        return {"architecture": name, "verdict": "refused", "reason": error.message}
    cases = {
        case.name: {
            "verdict": case.verdict,
            "features": case.features,
            "logits": case.logits,
            "reason": " ".join([case.refused, case.failed, *case.wrong]).strip(),
        }
        for case in report.cases
    }
    return {"architecture": name, "verdict": report.verdict, "cases": cases}


def table_of(rows: list[dict[str, Any]]) -> list[str]:
    """The table of docs/measurements/models.md. A tick: the prompt with this modality alone agrees."""
    prompts = ("text", "image", "video", "audio")
    lines = [f"| architecture | {' | '.join(prompts)} | largest error of logits | not compared |"]
    lines.append("|---" * (len(prompts) + 3) + "|")
    for found in rows:
        name, cases = found["architecture"], found.get("cases", {})
        if found["verdict"] == "refused":
            reason = re.split("; choose|, which the split", found["reason"])[0].removeprefix(
                "spec.model.id: "
            )
            lines.append(f"| {name} | refused: {reason} |" + " |" * (len(prompts) + 1))
            continue
        verdicts = {prompt: case["verdict"] for prompt, case in cases.items()}
        ticks = ["✓" if verdicts.get(prompt) == "agrees" else verdicts.get(prompt, "") for prompt in prompts]
        largest = max(case["logits"] for case in cases.values() if case["logits"] is not None)
        left = [
            prompt for prompt, verdict in verdicts.items() if verdict != "agrees" and prompt not in prompts
        ]
        lines.append(f"| {name} | {' | '.join(ticks)} | {largest:.0e} | {', '.join(left)} |")
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("architectures", nargs="*", default=list(BUILDERS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    hf.logging.set_verbosity_error()
    rows = []
    for name in args.architectures:
        with tempfile.TemporaryDirectory() as folder:
            found = row(name, Path(folder))
        rows.append(found)
        sys.stdout.write(f"{name}: {found['verdict']} {found.get('reason', '')}\n")
        for case, seen in found.get("cases", {}).items():
            sys.stdout.write(f"  {case}: {seen}\n")
        sys.stdout.flush()
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
        sys.stdout.write("\n".join(table_of(rows)) + "\n")
    sys.exit(any(found["verdict"] == "differs" for found in rows))


if __name__ == "__main__":
    main()
