"""The differences between architectures. No other folder names an architecture."""

from __future__ import annotations

from typing import Any

from mmd_workers.model.adapters.audio_flamingo_3 import AudioFlamingo3Adapter
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.adapters.gemma3 import Gemma3Adapter
from mmd_workers.model.adapters.glm4v import Glm4vAdapter
from mmd_workers.model.adapters.llava_onevision import LlavaOnevisionAdapter
from mmd_workers.model.adapters.mistral3 import Mistral3Adapter
from mmd_workers.model.adapters.packed import PackedAdapter
from mmd_workers.model.adapters.paligemma import PaliGemmaAdapter
from mmd_workers.model.adapters.qwen2_audio import Qwen2AudioAdapter
from mmd_workers.model.adapters.qwen_omni import Qwen3OmniAdapter, QwenOmniAdapter
from mmd_workers.model.adapters.tiled import IdeficsAdapter, InternVlAdapter, LlavaNextAdapter
from mmd_workers.model.adapters.video_llama_3 import VideoLlama3Adapter
from mmd_workers.model.adapters.video_llava import VideoLlavaAdapter
from mmd_workers.model.adapters.voxtral import VoxtralAdapter

ADAPTERS: dict[str, type[Adapter]] = {
    "audioflamingo3": AudioFlamingo3Adapter,
    "gemma3": Gemma3Adapter,
    "glm46v": Glm4vAdapter,
    "glm4v": Glm4vAdapter,
    "glm4v_moe": Glm4vAdapter,
    "idefics3": IdeficsAdapter,
    "internvl": InternVlAdapter,
    "llava_next": LlavaNextAdapter,
    "llava_next_video": LlavaNextAdapter,
    "llava_onevision": LlavaOnevisionAdapter,
    "mistral3": Mistral3Adapter,
    "paligemma": PaliGemmaAdapter,
    "qwen2_5_omni_thinker": QwenOmniAdapter,
    "qwen2_5_vl": PackedAdapter,
    "qwen2_audio": Qwen2AudioAdapter,
    "qwen2_vl": PackedAdapter,
    "qwen3_omni_moe_thinker": Qwen3OmniAdapter,
    "qwen3_vl": PackedAdapter,
    "qwen3_vl_moe": PackedAdapter,
    "smolvlm": IdeficsAdapter,
    "video_llama_3": VideoLlama3Adapter,
    "video_llava": VideoLlavaAdapter,
    "voxtral": VoxtralAdapter,
}


def adapter_for(config: Any) -> Adapter:
    """The adapter of a configuration; the generic one if its architecture needs no other."""
    return ADAPTERS.get(config.model_type, Adapter)(config)
