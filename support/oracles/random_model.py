"""Write a complete Hugging Face checkpoint of any served architecture, small and with random weights, without a network.

    python support/oracles/random_model.py qwen2_5_vl ./checkpoints/qwen2_5_vl --seed 1 --hidden 64 --layers 2

The folder holds what a hub repository holds: config, safetensors, tokenizer, processor settings, chat template. Its answers mean
nothing, but they vary from token to token, so that two servers that disagree are seen to disagree.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = """What is in this picture? Describe the image, the video and the sound in one short sentence.
How many red, green and blue shapes move from the left to the right? A small yellow square stands above a large white circle.
The tone rises, then it falls. You are a helpful assistant. Answer with a single word: yes or no. 0 1 2 3 4 5 6 7 8 9 10 20 30"""

PLACE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% elif c['type'] == 'video' %}VIDEO{% elif c['type'] == 'audio' %}AUDIO"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_template(image: str = "", video: str = "", audio: str = "") -> str:
    """A ChatML template with this model's markers in place of media."""
    return PLACE.replace("IMAGE", image).replace("VIDEO", video).replace("AUDIO", audio)


@dataclass(frozen=True)
class Size:
    """Size of the random model.

    `hidden` is a multiple of `heads`. Only llava takes `image_pixels`, the side of its square images.
    """

    hidden: int = 64
    layers: int = 2
    vision_hidden: int = 32
    vision_layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    feed_forward_ratio: int = 2
    image_pixels: int = 56


@dataclass
class Recipe:
    """A recipe for one architecture: its special tokens, its model and its processor."""

    size: Size
    names: dict[str, str] = field(default_factory=dict)  # tokenizer attribute -> token
    extra_tokens: list[str] = field(default_factory=list)
    embedding_std: float = 1.0
    linear_std: float = 0.3
    tokenizer: Any = None

    def make_tokenizer(self, pad_to: int = 0) -> None:
        """Train the byte-level BPE tokenizer, unless one is given; special tokens come first, so that ids are known."""
        if self.tokenizer is not None:
            return
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *self.names.values(), *self.extra_tokens]
        if pad_to:
            last_token = special.pop()
            special += [f"<|reserved_{i}|>" for i in range(pad_to - len(special))] + [last_token]
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=256 + 60 + len(special),
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        raw.train_from_iterator(CORPUS.splitlines(), trainer)
        self.tokenizer = hf.PreTrainedTokenizerFast(
            tokenizer_object=raw,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            extra_special_tokens=dict(self.names),
            model_max_length=4096,
        )

    def id(self, token: str) -> int:
        """The id of a special token."""
        return int(self.tokenizer.convert_tokens_to_ids(token))

    def text(self, **more: Any) -> dict[str, Any]:
        """Settings of the language model."""
        hidden = self.size.hidden
        return {
            "vocab_size": len(self.tokenizer),
            "hidden_size": hidden,
            "intermediate_size": self.size.feed_forward_ratio * hidden,
            "num_hidden_layers": self.size.layers,
            "num_attention_heads": self.size.heads,
            "num_key_value_heads": self.size.kv_heads,
            "max_position_embeddings": 4096,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        } | more

    def clip(self, **more: Any) -> dict[str, Any]:
        """Settings of a square vision tower: 56 x 56 pixels in patches of 14."""
        return {
            "hidden_size": self.size.vision_hidden,
            "intermediate_size": 2 * self.size.vision_hidden,
            "num_hidden_layers": self.size.vision_layers,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
        } | more

    def whisper(self, **more: Any) -> dict[str, Any]:
        """Settings of an audio tower."""
        width = self.size.vision_hidden
        return {
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 2 * width,
            "d_model": width,
        } | more


SQUARE = {"height": 56, "width": 56}
PINPOINTS = [[56, 112], [112, 56], [112, 112]]
Built = tuple[Any, Any]


def mrope(hidden: int, heads: int = 4) -> dict[str, Any]:
    """Rotary settings with three axes; the sections add up to half of a head."""
    half = hidden // (2 * heads)
    first = half // 4
    rest = (half - first) // 2
    return {
        "rope_type": "default",
        "mrope_section": [first, rest, half - first - rest],
        "rope_theta": 10000.0,
    }


def _llava(r: Recipe) -> Built:
    pixels = r.size.image_pixels
    r.names = {"image_token": "<image>"}
    r.make_tokenizer()
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**r.text()),
        vision_config=hf.CLIPVisionConfig(**r.clip(image_size=pixels)),
        image_token_id=r.id("<image>"),
        image_seq_length=(pixels // 14) ** 2,
    )
    return hf.LlavaForConditionalGeneration(config), llava_processor(r)


def llava_processor(r: Recipe) -> Any:
    """The processor of LLaVA and its relatives, for one square of `image_pixels`."""
    pixels = r.size.image_pixels
    return hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessor(
            size={"shortest_edge": pixels}, crop_size={"height": pixels, "width": pixels}
        ),
        tokenizer=r.tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template(image="<image>\n"),
    )


def _llava_next(r: Recipe) -> Built:
    r.names = {"image_token": "<image>"}
    r.make_tokenizer()
    config = hf.LlavaNextConfig(
        text_config=hf.LlamaConfig(**r.text()),
        vision_config=hf.CLIPVisionConfig(**r.clip()),
        image_token_id=r.id("<image>"),
        image_grid_pinpoints=PINPOINTS,
    )
    processor = hf.LlavaNextProcessor(
        image_processor=hf.LlavaNextImageProcessor(
            size={"shortest_edge": 56}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS
        ),
        tokenizer=r.tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template(image="<image>\n"),
    )
    return hf.LlavaNextForConditionalGeneration(config), processor


def _llava_onevision(r: Recipe) -> Built:
    r.names = {"image_token": "<image>", "video_token": "<video>"}
    r.make_tokenizer()
    config = hf.LlavaOnevisionConfig(
        text_config=hf.Qwen2Config(**r.text()),
        vision_config=hf.SiglipVisionConfig(**r.clip(vision_use_head=False)),
        image_token_id=r.id("<image>"),
        video_token_id=r.id("<video>"),
        image_grid_pinpoints=PINPOINTS,
    )
    processor = hf.LlavaOnevisionProcessor(
        image_processor=hf.LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=PINPOINTS),
        video_processor=hf.LlavaOnevisionVideoProcessor(size=SQUARE),
        tokenizer=r.tokenizer,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=chat_template(image="<image>\n", video="<video>\n"),
    )
    return hf.LlavaOnevisionForConditionalGeneration(config), processor


def _video_llava(r: Recipe) -> Built:
    r.names = {"image_token": "<image>", "video_token": "<video>"}
    r.make_tokenizer()
    config = hf.VideoLlavaConfig(
        text_config=hf.LlamaConfig(**r.text()),
        vision_config=hf.CLIPVisionConfig(**r.clip()),
        image_token_index=r.id("<image>"),
        video_token_index=r.id("<video>"),
    )
    sizes = {"size": {"shortest_edge": 56}, "crop_size": SQUARE}
    processor = hf.VideoLlavaProcessor(
        image_processor=hf.VideoLlavaImageProcessor(**sizes),
        video_processor=hf.VideoLlavaVideoProcessor(**sizes),
        tokenizer=r.tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template(image="<image>\n", video="<video>\n"),
    )
    return hf.VideoLlavaForConditionalGeneration(config), processor


QWEN_NAMES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
QWEN_STEMS = {"2": "Qwen2VL", "2.5": "Qwen2_5_VL", "3": "Qwen3VL"}
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
QWEN_PIXELS = {"shortest_edge": 4 * 28 * 28, "longest_edge": 36 * 28 * 28}


def qwen_vision(r: Recipe, version: str) -> dict[str, Any]:
    """Settings of the vision tower of Qwen2-VL, 2.5-VL or 3-VL."""
    width = r.size.vision_hidden
    common = {"depth": r.size.vision_layers, "num_heads": 4, "patch_size": 14}
    if version == "2":
        return common | {"embed_dim": width, "hidden_size": r.size.hidden, "mlp_ratio": 2}
    common |= {"hidden_size": width, "out_hidden_size": r.size.hidden, "intermediate_size": 2 * width}
    if version == "3":
        return common | {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return common | {"window_size": 56, "fullatt_block_indexes": [1]}


def _qwen_vl(r: Recipe, version: str) -> Built:
    r.names = dict(QWEN_NAMES)
    r.make_tokenizer()
    stem = QWEN_STEMS[version]
    text = r.text(rope_parameters=mrope(r.size.hidden, r.size.heads))
    if version == "3":
        text["head_dim"] = r.size.hidden // r.size.heads
        text["rope_parameters"]["mrope_interleaved"] = True  # as published: vLLM reads it
    config = getattr(hf, stem + "Config")(
        text_config=text,
        vision_config=qwen_vision(r, version),
        image_token_id=r.id("<|image_pad|>"),
        video_token_id=r.id("<|video_pad|>"),
        vision_start_token_id=r.id("<|vision_start|>"),
        vision_end_token_id=r.id("<|vision_end|>"),
    )
    return getattr(hf, stem + "ForConditionalGeneration")(config), qwen_processor(r, version)


def qwen_processor(r: Recipe, version: str) -> Any:
    """The processor of Qwen2-VL, 2.5-VL or 3-VL."""
    video_size = dict(QWEN_PIXELS)
    if version == "3":  # this processor bounds the pixels of the whole video
        video_size = {"shortest_edge": 16 * 28 * 28, "longest_edge": 144 * 28 * 28}
    video_class = hf.Qwen3VLVideoProcessor if version == "3" else hf.Qwen2VLVideoProcessor
    return getattr(hf, QWEN_STEMS[version] + "Processor")(
        image_processor=hf.Qwen2VLImageProcessor(size=QWEN_PIXELS, **PATCHES),
        video_processor=video_class(size=video_size, cap_pixels_per_frame=False, **PATCHES),
        tokenizer=r.tokenizer,
        chat_template=chat_template(
            image=QWEN_IMAGE, video="<|video_pad|>" if version == "3" else QWEN_VIDEO
        ),
    )


def _qwen2_vl(r: Recipe) -> Built:
    return _qwen_vl(r, "2")


def _qwen2_5_vl(r: Recipe) -> Built:
    return _qwen_vl(r, "2.5")


def _qwen3_vl(r: Recipe) -> Built:
    return _qwen_vl(r, "3")


def _video_llama_3(r: Recipe) -> Built:
    r.names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    r.make_tokenizer()
    config = hf.VideoLlama3Config(
        text_config=hf.Qwen2Config(**r.text()),
        vision_config=hf.VideoLlama3VisionConfig(
            hidden_size=r.size.vision_hidden,
            intermediate_size=2 * r.size.vision_hidden,
            num_hidden_layers=r.size.vision_layers,
            num_attention_heads=4,
            patch_size=14,
        ),
        image_token_id=r.id("<|image_pad|>"),
        video_token_id=r.id("<|video_pad|>"),
    )
    processor = hf.VideoLlama3Processor(
        image_processor=hf.VideoLlama3ImageProcessor(size=QWEN_PIXELS),
        video_processor=hf.VideoLlama3VideoProcessor(
            size={"shortest_edge": 16 * 28 * 28, "longest_edge": 144 * 28 * 28}
        ),
        tokenizer=r.tokenizer,
        chat_template=chat_template(image="<|image_pad|>", video="<|video_pad|>"),
    )
    return hf.VideoLlama3ForConditionalGeneration(config), processor


def _internvl(r: Recipe) -> Built:
    r.names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    r.make_tokenizer()
    config = hf.InternVLConfig(
        text_config=hf.Qwen2Config(**r.text()),
        vision_config=hf.InternVLVisionConfig(**r.clip(image_size=[56, 56], patch_size=[14, 14])),
        image_token_id=r.id("<IMG_CONTEXT>"),
    )
    processor = hf.InternVLProcessor(
        image_processor=hf.GotOcr2ImageProcessor(
            size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4
        ),
        video_processor=hf.InternVLVideoProcessor(size=SQUARE),
        tokenizer=r.tokenizer,
        image_seq_length=4,
        chat_template=chat_template(image="<IMG_CONTEXT>\n", video="<video>\n"),
    )
    return hf.InternVLForConditionalGeneration(config), processor


def _idefics(r: Recipe, stem: str) -> Built:
    r.names = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    r.names |= {"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"}
    if stem == "SmolVLM":
        r.names |= {"video_token": "<video>"}
    r.extra_tokens = [f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)]
    r.make_tokenizer()
    config = getattr(hf, stem + "Config")(
        text_config=hf.LlamaConfig(**r.text()),
        vision_config=r.clip(),
        image_token_id=r.id("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    parts = {
        "image_processor": getattr(hf, stem + "ImageProcessor")(**sizes),
        "tokenizer": r.tokenizer,
        "image_seq_len": 4,
        "chat_template": chat_template(image="<image>", video="<video>"),
    }
    if stem == "SmolVLM":
        video = hf.SmolVLMVideoProcessor(**sizes, num_frames=8, fps=2)
        parts["video_processor"] = video
    return getattr(hf, stem + "ForConditionalGeneration")(config), getattr(hf, stem + "Processor")(**parts)


def _idefics3(r: Recipe) -> Built:
    return _idefics(r, "Idefics3")


def _smolvlm(r: Recipe) -> Built:
    return _idefics(r, "SmolVLM")


LINE_BREAKS = ["\n", "\n\n", "\n\n\n", "\n\n\n\n"]
"""Tokens of Gemma's vocabulary that vLLM looks for."""


def _gemma3(r: Recipe) -> Built:
    r.names = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    r.embedding_std = 0.02
    r.make_tokenizer()
    r.tokenizer.add_tokens(LINE_BREAKS)
    layers = ["sliding_attention", "full_attention"] * r.size.layers
    text = r.text(
        head_dim=r.size.hidden // 4,
        query_pre_attn_scalar=1,
        sliding_window=16,
        layer_types=layers[: r.size.layers],
    )
    config = hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(**text),
        vision_config=hf.SiglipVisionConfig(**r.clip(vision_use_head=False)),
        image_token_id=r.id("<image_soft_token>"),
        boi_token_id=r.id("<start_of_image>"),
        eoi_token_id=r.id("<end_of_image>"),
        mm_tokens_per_image=4,
    )
    processor = hf.Gemma3Processor(
        image_processor=hf.Gemma3ImageProcessor(size=SQUARE),
        tokenizer=r.tokenizer,
        image_seq_length=4,
        chat_template=chat_template(image="<start_of_image>"),
    )
    return hf.Gemma3ForConditionalGeneration(config), processor


def _paligemma(r: Recipe) -> Built:
    r.names = {"image_token": "<image>"}
    r.embedding_std = 0.02
    r.make_tokenizer()
    r.tokenizer.add_tokens(LINE_BREAKS)
    r.tokenizer.add_special_tokens({"bos_token": "<|im_start|>"})
    config = hf.PaliGemmaConfig(
        text_config=hf.GemmaConfig(**r.text(head_dim=r.size.hidden // 4)),
        vision_config=hf.SiglipVisionConfig(**r.clip(vision_use_head=False, projection_dim=r.size.hidden)),
        image_token_id=r.id("<image>"),
        projection_dim=r.size.hidden,
        hidden_size=r.size.hidden,
    )
    images = hf.SiglipImageProcessor(size=SQUARE)
    images.image_seq_length = 16
    processor = hf.PaliGemmaProcessor(
        image_processor=images, tokenizer=r.tokenizer, chat_template=chat_template(image="<image>")
    )
    return hf.PaliGemmaForConditionalGeneration(config), processor


def _mistral3(r: Recipe) -> Built:
    r.names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    r.make_tokenizer()
    config = hf.Mistral3Config(
        text_config=hf.MistralConfig(**r.text(sliding_window=None, head_dim=r.size.hidden // 4)),
        vision_config=hf.PixtralVisionConfig(**r.clip(image_size=112)),
        image_token_id=r.id("[IMG]"),
        spatial_merge_size=2,
    )
    processor = hf.PixtralProcessor(
        image_processor=hf.PixtralImageProcessor(size={"longest_edge": 112}, patch_size=14),
        tokenizer=r.tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=chat_template(image="[IMG]"),
    )
    return hf.Mistral3ForConditionalGeneration(config), processor


def mel_features(seconds: int, mels: int = 16) -> Any:
    """The feature extractor of an audio tower with a window of `seconds`."""
    return hf.WhisperFeatureExtractor(
        feature_size=mels, sampling_rate=16000, hop_length=160, chunk_length=seconds
    )


def _qwen2_audio(r: Recipe) -> Built:
    r.names = {
        "audio_token": "<|AUDIO|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
    r.make_tokenizer()
    config = hf.Qwen2AudioConfig(
        text_config=hf.Qwen2Config(**r.text()),
        audio_config=r.whisper(model_type="qwen2_audio_encoder", max_source_positions=200),
        audio_token_id=r.id("<|AUDIO|>"),
    )
    processor = hf.Qwen2AudioProcessor(
        feature_extractor=mel_features(4),
        tokenizer=r.tokenizer,
        chat_template=chat_template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>"),
    )
    return hf.Qwen2AudioForConditionalGeneration(config), processor


def _voxtral(r: Recipe) -> Built:
    r.extra_tokens = ["[INST]", "[/INST]", "[BEGIN_AUDIO]", "[AUDIO]"]
    r.make_tokenizer(pad_to=24)  # the processor fixes the audio token at id 24
    width = r.size.vision_hidden
    config = hf.VoxtralConfig(
        text_config=r.text(model_type="llama"),
        audio_config={
            "num_mel_bins": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 4 * width,
            "hidden_size": width,
            "max_source_positions": 1500,
        },
        audio_token_id=24,
    )
    r.tokenizer.chat_template = chat_template(audio="[BEGIN_AUDIO][AUDIO]")
    processor = hf.VoxtralProcessor(feature_extractor=mel_features(30), tokenizer=r.tokenizer)
    return hf.VoxtralForConditionalGeneration(config), processor


def _audioflamingo3(r: Recipe) -> Built:
    r.names = {"audio_token": "<sound>"}
    r.make_tokenizer()
    width = r.size.vision_hidden
    config = hf.AudioFlamingo3Config(
        text_config=r.text(model_type="qwen2"),
        audio_config={
            "num_mel_bins": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 2 * width,
            "hidden_size": width,
            "max_source_positions": 1500,
        },
        audio_token_id=r.id("<sound>"),
    )
    processor = hf.AudioFlamingo3Processor(
        feature_extractor=mel_features(30),
        tokenizer=r.tokenizer,
        chat_template=chat_template(audio="<sound>"),
    )
    return hf.AudioFlamingo3ForConditionalGeneration(config), processor


OMNI_NAMES = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}


def _omni_parts(r: Recipe, audio: dict[str, Any], text: dict[str, Any], vision: str) -> dict[str, Any]:
    r.names = dict(OMNI_NAMES)
    r.make_tokenizer()
    ids = {
        name.replace("_token", "_token_id"): r.id(t) for name, t in OMNI_NAMES.items() if "bos" not in name
    }
    ids = {k: v for k, v in ids.items() if "eos" not in k}
    return ids | {
        "text_config": r.text(rope_parameters=mrope(r.size.hidden)) | text,
        "vision_config": qwen_vision(r, vision),
        "audio_config": r.whisper(max_source_positions=100, output_dim=r.size.hidden) | audio,
        "vision_start_token_id": r.id("<|vision_bos|>"),
        "vision_end_token_id": r.id("<|vision_eos|>"),
        "audio_start_token_id": r.id("<|audio_bos|>"),
        "audio_end_token_id": r.id("<|audio_eos|>"),
    }


def _omni_processor(r: Recipe, kind: Any, seconds: int) -> Any:
    return kind(
        image_processor=hf.Qwen2VLImageProcessor(size=QWEN_PIXELS, **PATCHES),
        video_processor=hf.Qwen2VLVideoProcessor(size=QWEN_PIXELS, cap_pixels_per_frame=False, **PATCHES),
        feature_extractor=mel_features(seconds),
        tokenizer=r.tokenizer,
        chat_template=chat_template(
            image="<|vision_bos|><|IMAGE|><|vision_eos|>",
            video="<|vision_bos|><|VIDEO|><|vision_eos|>",
            audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
        ),
    )


def _qwen2_5_omni(r: Recipe) -> Built:
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

    config = Qwen2_5OmniThinkerConfig(**_omni_parts(r, {"n_window": 20}, {}, "2.5"))
    model = hf.Qwen2_5OmniThinkerForConditionalGeneration(config)
    return model, _omni_processor(r, hf.Qwen2_5OmniProcessor, 4)


def _qwen3_omni_moe(r: Recipe) -> Built:
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

    audio = {"n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 16, "conv_chunksize": 50}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": r.size.hidden // 4,
    }
    config = Qwen3OmniMoeThinkerConfig(**_omni_parts(r, audio, experts, "3"))
    model = hf.Qwen3OmniMoeThinkerForConditionalGeneration(config)
    return model, _omni_processor(r, hf.Qwen3OmniMoeProcessor, 4)


def text_model(r: Recipe, stem: str, **settings: Any) -> Built:
    """A text-only model, by the stem of its classes' names."""
    r.make_tokenizer()
    r.tokenizer.chat_template = chat_template()
    config = getattr(hf, stem + "Config")(**r.text(**settings))
    return getattr(hf, stem + "ForCausalLM")(config), r.tokenizer


def _llama(r: Recipe) -> Built:
    return text_model(r, "Llama")


ARCHITECTURES: dict[str, Callable[[Recipe], Built]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "video_llava": _video_llava,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "video_llama_3": _video_llama_3,
    "internvl": _internvl,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "mistral3": _mistral3,
    "qwen2_audio": _qwen2_audio,
    "voxtral": _voxtral,
    "audioflamingo3": _audioflamingo3,
    "qwen2_5_omni": _qwen2_5_omni,
    "qwen3_omni_moe": _qwen3_omni_moe,
    "llama": _llama,
}


def _randomise(model: torch.nn.Module, recipe: Recipe, seed: int) -> None:
    """Widen the initial weights, so that greedy decoding does not fall onto one or two tokens.

    A wide model is widened less: its sums have more terms, and would amplify rounding until no two programs
    agree.
    """
    linear_std = recipe.linear_std * (64 / max(64, recipe.size.hidden)) ** 0.5
    generator = torch.Generator().manual_seed(seed)
    rows = len(recipe.tokenizer)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            is_embedding = "embed" in name and parameter.shape[0] == rows
            std = recipe.embedding_std if is_embedding else linear_std
            parameter.data = torch.randn(parameter.shape, generator=generator) * std
        elif "bias" in name and "norm" not in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02


def build(
    arch: str,
    path: str | Path,
    seed: int = 0,
    size: Size | None = None,
    shard_size: str = "5GB",
    dtype: torch.dtype = torch.float32,
    tokenizer: Any = None,
) -> Path:
    """Write a checkpoint of `arch` into folder `path` and return it.

    `dtype`: data type of its weights. `tokenizer`: for a text-only model; token 0 pads and token 2 ends an
    answer. None: a small one is trained.

    Raises:
        KeyError: no such architecture; the message lists the known ones.
    """
    if arch not in ARCHITECTURES:
        raise KeyError(f"unknown architecture {arch!r}; choose one of {', '.join(ARCHITECTURES)}")
    recipe = Recipe(size or Size(), tokenizer=tokenizer)
    torch.manual_seed(seed)
    model, processor = ARCHITECTURES[arch](recipe)
    _randomise(model, recipe, seed)
    model.generation_config = hf.GenerationConfig(eos_token_id=2, pad_token_id=0, do_sample=False)
    model.to(dtype)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=shard_size)
    processor.save_pretrained(folder)
    return folder


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arch", choices=sorted(ARCHITECTURES))
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=64, help="width of the language model")
    parser.add_argument("--layers", type=int, default=2, help="layers of the language model")
    args = parser.parse_args()
    folder = build(args.arch, args.path, args.seed, Size(hidden=args.hidden, layers=args.layers))
    total = sum(f.stat().st_size for f in folder.iterdir())
    sys.stdout.write(f"{args.arch}: {total / 2**20:.1f} MiB in {folder}\n")


if __name__ == "__main__":
    main()
