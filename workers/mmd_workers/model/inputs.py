"""Runs a model's own Hugging Face processors on one medium: on real pixels, or on shapes alone. Independent of weights.

"Shapes alone" means tensors on the meta device: the processor's code runs as it is, resizing, tiling and counting, but there
are no pixels. So the gateway and the encoder count with the same code and cannot differ.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import BatchFeature
from transformers.processing_utils import OmniModalProcessorMixin, ProcessorMixin
from transformers.video_utils import VideoMetadata

from mmd_api.contract.pools import Modality

CHANNELS_FIRST = {"input_data_format": "channels_first", "return_tensors": "pt"}
LARGEST_FACT = 64  # a tensor of up to this many integers counts as a fact about a medium, not as data

PROCESSOR_ERRORS = (
    ValueError,
    ZeroDivisionError,
    RuntimeError,
    IndexError,
    TypeError,
    AttributeError,
    KeyError,
)
"""What processors raise about a medium or a conversation that they cannot take."""


@dataclass(frozen=True, slots=True)
class Processed:
    """One processed medium: the text in place of its marker, and the inputs of the tower."""

    replacement: str
    outputs: dict[str, Any]


class _ShapeOnly:
    """Wraps an image or video processor. It takes meta tensors and returns shapes filled with one shared zero."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> BatchFeature:
        outputs = self._inner(*args, **kwargs)
        return BatchFeature({name: _materialise(value) for name, value in outputs.items()})


def _materialise(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        return torch.zeros((), dtype=value.dtype).expand(value.shape)
    if isinstance(value, (list, tuple)):
        return [_materialise(v) for v in value]
    return value


class _WhisperShapes:
    """Wraps a Whisper feature extractor. It counts the mel frames of a waveform without computing them.

    A waveform of n samples covers ceil(n / hop) frames; padding and truncation follow `SequenceFeatureExtractor.pad`.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(
        self,
        raw_speech: list[npt.NDArray[np.float32]],
        padding: Any = "max_length",
        truncation: bool = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        **_: Any,
    ) -> BatchFeature:
        hop = self._inner.hop_length
        limit = max_length or self._inner.n_samples
        lengths = [min(len(wave), limit) if truncation else len(wave) for wave in raw_speech]
        padded = max(lengths) if padding in (True, "longest") else max(limit, *lengths)
        if pad_to_multiple_of:
            padded += -padded % pad_to_multiple_of
        frames = padded // hop
        mask = torch.zeros(len(lengths), frames, dtype=torch.int32)
        for row, length in enumerate(lengths):
            mask[row, : -(-length // hop)] = 1
        mel = torch.zeros(()).expand(len(lengths), self._inner.feature_size, frames)
        return BatchFeature({"input_features": mel, "attention_mask": mask})


class MediaInputs:
    """The model's processors, for one medium at a time. Thread safe: it keeps nothing between calls."""

    def __init__(self, processor: Any, *, shapes_only: bool) -> None:
        self.processor = copy.copy(processor)
        if shapes_only:
            for name, wrapper in (("image_processor", _ShapeOnly), ("video_processor", _ShapeOnly)):
                if getattr(processor, name, None) is not None:
                    setattr(self.processor, name, wrapper(getattr(processor, name)))
            if getattr(processor, "feature_extractor", None) is not None:
                self.processor.feature_extractor = _WhisperShapes(processor.feature_extractor)
        self._settings = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs)

    def image(self, pixels: torch.Tensor, size: Mapping[str, int] | None = None) -> Processed:
        """Process uint8 pixels [3, height, width]. `size` replaces the processor's own setting."""
        settings = self._settings["images_kwargs"] | CHANNELS_FIRST
        if size:
            settings["size"] = dict(size)
        outputs, texts = self.processor._process_images([pixels], **settings)
        return Processed(texts[0], dict(outputs))

    @property
    def video_size(self) -> dict[str, int]:
        """The processor's setting for resizing frames."""
        setting = self._settings["videos_kwargs"].get("size") or self.processor.video_processor.size
        return {name: int(edge) for name, edge in dict(setting).items() if edge}

    def video(
        self,
        frames: torch.Tensor,
        indices: list[int],
        fps: float,
        num_frames: int,
        size: Mapping[str, int] | None = None,
    ) -> Processed:
        """Process uint8 frames [frames, 3, height, width], which are `indices` of a source of `num_frames` at `fps`.

        `size` replaces the processor's own setting.
        """
        metadata = VideoMetadata(
            total_num_frames=num_frames,
            fps=fps,
            width=int(frames.shape[3]),
            height=int(frames.shape[2]),
            duration=num_frames / fps,
            frames_indices=list(indices),
        )
        videos = self._settings["videos_kwargs"] | CHANNELS_FIRST
        videos |= {"do_sample_frames": False, "return_metadata": True, "video_metadata": [metadata]}
        if size:
            videos["size"] = dict(size)
        if isinstance(self.processor, OmniModalProcessorMixin):  # asks for the rate instead of the metadata
            videos["fps"] = metadata.sampled_fps
            settings = self._settings | {"videos_kwargs": videos, "load_audio_from_video": False}
        else:
            settings = videos
        outputs, texts = self.processor._process_videos([frames], **settings)
        outputs.pop("video_metadata", None)
        return Processed(texts[0], dict(outputs))

    def video_with_sound(self, video: Mapping[str, Any], audio_tokens: int) -> str:
        """The text for a video and its sound, by the facts of the processed video (`geometry`) and the sound's number of tokens."""
        facts = {name: np.asarray(value) for name, value in video.items() if isinstance(value, list)}
        sound = {"num_audio_tokens": [audio_tokens]}
        return str(self.processor.replace_video_with_audio_token(facts, 0, sound, 0, **self._settings))

    def audio(self, waveform: npt.NDArray[np.float32]) -> Processed:
        """Process a mono waveform [samples] at the processor's own rate."""
        settings = self._settings["audio_kwargs"] | {"return_tensors": "pt"}
        settings["sampling_rate"] = self.processor.feature_extractor.sampling_rate
        outputs, texts = self.processor._process_audio([waveform], **settings)
        return Processed(texts[0], dict(outputs))


def processor_modalities(processor: Any) -> frozenset[Modality]:
    """Modalities that a processor takes: it has their sub-processor, and a replacement for their marker."""
    parts: list[tuple[Modality, str, str]] = [
        ("image", "image_processor", "replace_image_token"),
        ("video", "video_processor", "replace_video_token"),
        ("audio", "feature_extractor", "replace_audio_token"),
    ]
    return frozenset(
        modality
        for modality, part, method in parts
        if getattr(processor, part, None) is not None
        and getattr(type(processor), method, None) is not getattr(ProcessorMixin, method)
    )


def geometry(outputs: dict[str, Any]) -> dict[str, Any]:
    """The facts of a processed medium as JSON: grids, sizes, tile counts, frame counts of masks."""
    facts: dict[str, Any] = {}
    for name, value in outputs.items():
        if name.endswith("_features_mask") or name == "feature_attention_mask":
            facts["audio_feature_lengths"] = torch.as_tensor(value).sum(-1).tolist()
        elif isinstance(value, torch.Tensor):
            if not value.is_floating_point() and value.numel() <= LARGEST_FACT:
                facts[name] = value.tolist()
        elif isinstance(value, (list, tuple)):
            plain = np.asarray(value)
            if plain.dtype.kind in "iuf" and plain.size <= LARGEST_FACT:
                facts[name] = plain.tolist()
    return facts


def tensors(outputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a processed medium; lists of one tensor per item are stacked."""
    by_name: dict[str, torch.Tensor] = {}
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            by_name[name] = value
        elif isinstance(value, np.ndarray):
            by_name[name] = torch.from_numpy(value)
        elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            by_name[name] = torch.stack(value)
    return by_name
