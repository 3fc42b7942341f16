"""The common part of all architectures, as far as Hugging Face exposes it. Independent of tokenizer state and the KV pool.

An architecture that Hugging Face handles in the usual way needs no file here. Any other overrides the methods in which it differs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from mmd_api.contract.errors import UnsupportedModelError
from mmd_api.contract.pools import MODALITIES, Modality
from mmd_workers.model.inputs import MediaInputs, Processed, processor_modalities
from mmd_workers.model.prompt import MediumLayout
from mmd_workers.model.runs import TowerRun

TOKEN_TYPES: dict[str, int] = {"image": 1, "video": 2, "audio": 3}  # as transformers numbers them
EMBEDDINGS = "embeddings"


class Adapter:
    """One architecture's answers. Stateless apart from its configuration."""

    # Where `atomic_ranges` lets tokens see later ones.
    bidirectional: Literal["nothing", "media", "prompt"] = "nothing"

    interleaves_sound = False  # True: a video's sound is interleaved, by time, with its frames' tokens

    def __init__(self, config: Any) -> None:
        self.config = config

    # Frontend and encoder

    def prepare_processor(self, processor: Any, folder: Path) -> Any:
        """Adjust a processor's settings after it was loaded."""
        del folder
        return processor

    def modalities(self, processor: Any) -> frozenset[Modality]:
        """The modalities that the model takes."""
        return frozenset(m for m in processor_modalities(processor) if self.placeholder_id(m) is not None)

    def placeholder_id(self, modality: Modality) -> int | None:
        """Id of the token whose embedding a feature's row replaces. A video without its own id is a row of images."""
        for name in (f"{modality}_token_id", f"{modality}_token_index"):
            token_id = getattr(self.config, name, None)
            if token_id is not None:
                return int(token_id)
        return self.placeholder_id("image") if modality == "video" else None

    def placeholder_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Tokens of a vocabulary of this size that stand for media: they must never be sampled."""
        ids = {self.placeholder_id(modality) for modality in MODALITIES}
        return tuple(sorted(i for i in ids if i is not None and i < vocab_size))

    def render(
        self,
        processor: Any,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        begins_answer: bool = True,
        **variables: Any,
    ) -> str:
        """Render chat messages and tools to text, with one marker per medium.

        `begins_answer`: the text ends with the beginning of an answer. `variables`: further variables of the template.
        """
        return str(
            processor.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=begins_answer,
                **variables,
            )
        )

    def expand(
        self, processor: Any, text: str, replacements: Mapping[str, list[str]]
    ) -> tuple[str, list[Modality]]:
        """Replace the markers by the texts of their media. Returns the text and the modality of each marker in order."""
        texts, spans = processor.get_text_with_replacements(
            [text],
            replacements.get("image", []),
            replacements.get("video", []),
            replacements.get("audio", []),
        )
        return texts[0], [span["type"] for span in (spans[0] if spans else [])]

    def image(
        self, inputs: MediaInputs, pixels: torch.Tensor, size: Mapping[str, int] | None = None
    ) -> Processed:
        """Process one image. `size` replaces the processor's own setting."""
        return inputs.image(pixels, size)

    def bounds_pixels(self, processor: Any) -> bool:
        """Whether `shortest_edge` and `longest_edge` of an image or video processor are the least and the most pixels."""
        options = getattr(processor, "valid_kwargs", None)
        return "min_pixels" in getattr(options, "__annotations__", {})

    def video(
        self,
        inputs: MediaInputs,
        frames: torch.Tensor,
        indices: list[int],
        fps: float,
        num_frames: int,
        size: Mapping[str, int] | None = None,
    ) -> Processed:
        """Process the sampled frames of one video. `size` replaces the processor's own setting."""
        return inputs.video(frames, indices, fps, num_frames, size)

    def frames_share_pixels(self, video_processor: Any) -> bool:
        """Whether `shortest_edge` and `longest_edge` of a video processor bound the pixels of all frames together, not of each."""
        resize = getattr(sys.modules[type(video_processor).__module__], "smart_resize", None)
        return resize is not None and "num_frames" in inspect.signature(resize).parameters

    def video_with_sound(self, inputs: MediaInputs, video: Mapping[str, Any], audio_tokens: int) -> str:
        """The text for a video and its sound, if `interleaves_sound`; see `MediaInputs.video_with_sound`."""
        return inputs.video_with_sound(video, audio_tokens)

    def audio(self, inputs: MediaInputs, waveform: Any) -> Processed:
        """Process one waveform."""
        return inputs.audio(waveform)

    def max_audio_samples(self, processor: Any) -> int:
        """Samples after which the model's processor truncates a sound.

        0: it never does, as with a feature extractor without a window.
        """
        if (seconds := getattr(processor, "max_audio_len", None)) is not None:
            return int(seconds * processor.feature_extractor.sampling_rate)
        truncates = getattr(processor, "audio_kwargs", {}).get("truncation", True)
        return int(getattr(processor.feature_extractor, "n_samples", 0)) if truncates else 0

    def work(self, processed: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> int:
        """Encoder work of one medium: patches of the vision tower, or mel frames."""
        if "input_features" in processed:
            if "audio_feature_lengths" in facts:
                return int(sum(facts["audio_feature_lengths"]))
            return int(processed["input_features"].shape[0] * processed["input_features"].shape[-1])
        patch = getattr(getattr(self.config, "vision_config", None), "patch_size", 14)
        side = patch[0] if isinstance(patch, (list, tuple)) else patch
        pixels = sum(t.numel() for name, t in processed.items() if name.startswith("pixel_values"))
        return max(1, int(pixels // (3 * side * side)))

    # The whole model, for `mmd check`

    def unsplit_inputs(
        self, processor: Any, given: Mapping[str, Any], media: Sequence[MediumLayout]
    ) -> dict[str, Any]:
        """Inputs of the whole model for a rendered prompt (`text`) with its media, made by transformers' own processor."""
        del media
        return dict(processor(**given))

    # Encoder

    def tower_run(self, modality: Modality) -> TowerRun:
        """The rules by which media of a modality share a run, and one medium is divided between runs."""
        del modality
        return TowerRun()

    def features(self, model: Any, modality: Modality, batch: Mapping[str, Any]) -> Any:
        """Run tower and projector on inputs joined by `tower_run`; returns the result of transformers' `get_*_features`."""
        method = getattr(model.base_model, f"get_{modality}_features", None)
        inputs = dict(batch)
        if method is None and modality == "video":  # frames are images to this model
            method = getattr(model.base_model, "get_image_features", None)
            if "pixel_values_videos" in inputs:
                inputs["pixel_values"] = inputs.pop("pixel_values_videos").flatten(0, 1)
        if method is None:
            raise UnsupportedModelError(
                f"spec.model.id: {self.config.model_type} cannot encode {modality} separately from its language model"
            )
        names = inspect.signature(method).parameters
        return method(**{name: value for name, value in inputs.items() if name in names}, return_dict=True)

    def extra_names(self) -> list[str]:
        """Names of the tensors that a feature carries besides its embeddings, of the same shape."""
        levels = getattr(getattr(self.config, "vision_config", None), "deepstack_visual_indexes", None) or []
        return [f"deepstack.{level}" for level in range(len(levels))]

    # Language model

    def provides_deepstack(self) -> bool:
        """Whether features carry the rows that the model adds to its first layers, if it adds any."""
        return hasattr(getattr(self.config, "vision_config", None), "deepstack_visual_indexes")

    def positions(
        self, model: Any, token_ids: torch.Tensor, media: Sequence[MediumLayout], ranges: torch.Tensor
    ) -> torch.Tensor:
        """Rotary positions [axes, tokens] of a prompt. `ranges` [tokens]: 0 text, 1 image, 2 video, 3 audio.

        Multi-axis models compute their own, with `get_rope_index`, from the grids of the media.
        """
        index = rope_index(model)
        tokens = token_ids.shape[0]
        if index is None:
            return torch.arange(tokens).unsqueeze(0)
        if not media:
            return torch.arange(tokens).unsqueeze(0).expand(3, -1).contiguous()
        facts = joined_geometry(media)
        offered: dict[str, Any] = {
            "input_ids": token_ids.unsqueeze(0),
            "attention_mask": torch.ones(1, tokens, dtype=torch.long),
            "mm_token_type_ids": ranges.unsqueeze(0),
            "image_grid_thw": facts.get("image_grid_thw"),
            "video_grid_thw": facts.get("video_grid_thw"),
            "second_per_grid_ts": facts.get("second_per_grid_ts"),
            "second_per_grids": facts.get("video_second_per_grid"),
            "audio_seqlens": facts.get("audio_feature_lengths"),
            "use_audio_in_video": any(medium.sampling.of_video for medium in media),
        }
        names = inspect.signature(index).parameters
        positions, _ = index(**{k: v for k, v in offered.items() if k in names and v is not None})
        # Rounding restores whole numbers that were computed in float32, such as 20.999998.
        return positions[:, 0].round().to(torch.long)  # type: ignore[no-any-return]

    def atomic_ranges(self, prompt_tokens: int, media: Sequence[MediumLayout]) -> list[tuple[int, int]]:
        """[start, end) token ranges in which attention runs both ways."""
        del prompt_tokens, media
        return []

    def atomic_tokens_of_media(self) -> int:
        """Tokens of the longest atomic range that only a medium's tokens are in; 0 if media have none."""
        return 0

    def scale_features(self, features: torch.Tensor) -> torch.Tensor:
        """Scale features as the model does between the projector and the language model."""
        return features


def rope_index(model: Any) -> Any:
    """The model's own `get_rope_index`, or None if its positions have one axis."""
    return getattr(model.base_model, "get_rope_index", None) or getattr(model, "get_rope_index", None)


def joined_geometry(media: Sequence[MediumLayout]) -> dict[str, torch.Tensor]:
    """Geometry of several media, one row per medium in prompt order, as tensors for transformers."""
    rows: dict[str, list[Any]] = {}
    for medium in media:
        for name, value in medium.geometry.items():
            if isinstance(value, list):
                rows.setdefault(name, []).extend(value)
    return {name: torch.tensor(value) for name, value in rows.items()}
