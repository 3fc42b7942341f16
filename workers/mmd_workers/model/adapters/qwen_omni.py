"""Qwen omni thinkers. The processor class has a video size that hides the checkpoint's own, and truncates sounds."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmd_api.contract.pools import Modality
from mmd_workers.model.adapters.packed import PackedAdapter
from mmd_workers.model.inputs import MediaInputs, Processed
from mmd_workers.model.prompt import MediumLayout
from mmd_workers.model.runs import Inputs, TowerRun

LEAST_FRAMES = 3  # mel frames that make a row of Qwen 2.5
CHUNK_TOKENS = 13  # tokens that transformers makes of a chunk of Qwen 3


class _Sounds(TowerRun):
    """Mel frames [1, mels, frames] up to where a mask ends, joined as [mels, frames], with the number of frames of each sound.

    Nothing crosses from one window to the next. A last window that is too short to be computed alone belongs to the part before.
    """

    def __init__(self, window_frames: int, window_tokens: int, least_frames: int) -> None:
        """`least_frames`: minimum for a window that is a part of its own."""
        self._window_frames = window_frames
        self._window_tokens = window_tokens
        self._least_frames = least_frames

    def key(self, inputs: Inputs, num_tokens: int) -> Hashable:
        """The key does not depend on the number of frames."""
        del num_tokens
        return int(inputs["input_features"].shape[1])

    def join(self, media: Sequence[Inputs]) -> dict[str, Any]:
        """Join the sounds without the processor's padding."""
        lengths = [_frames(inputs) for inputs in media]
        mel = [m["input_features"][0, :, :length] for m, length in zip(media, lengths, strict=True)]
        return {"input_features": torch.cat(mel, 1), "feature_lens": torch.tensor(lengths)}

    def part_tokens(self, inputs: Inputs, num_tokens: int) -> tuple[int, ...]:
        """Each window has the same number of rows; the last part has the rest."""
        others = [self._window_tokens] * (self._parts(inputs) - 1)
        return *others, num_tokens - sum(others)

    def part(self, inputs: Inputs, first: int, last: int) -> dict[str, Any]:
        """Views of the frames and their mask."""
        end = _frames(inputs) if last == self._parts(inputs) else last * self._window_frames
        frames = slice(first * self._window_frames, end)
        return {name: inputs[name][..., frames] for name in ("input_features", "feature_attention_mask")}

    def _parts(self, inputs: Inputs) -> int:
        full, rest = divmod(_frames(inputs), self._window_frames)
        return max(1, full + (rest >= self._least_frames))


class _Chunks(_Sounds):
    """Sounds of Qwen 3, which pads a chunk to the longest of a run and convolves it with the padding.

    The padding must be the same as alone.
    """

    def key(self, inputs: Inputs, num_tokens: int) -> Hashable:
        """Sounds of one whole chunk or more have the same key; shorter ones only if they have the same number of frames."""
        return super().key(inputs, num_tokens), min(_frames(inputs), self._least_frames)


def _frames(inputs: Inputs) -> int:
    return int(inputs["feature_attention_mask"].sum())


class QwenOmniAdapter(PackedAdapter):
    """A video size that a checkpoint sets in processor_config.json overrides the class's default.

    The tower reads sound in windows, however long it is: the processor need not truncate it.
    """

    interleaves_sound = True

    def prepare_processor(self, processor: Any, folder: Path) -> Any:
        """Let the checkpoint's video size override the class's."""
        settings = folder / "processor_config.json"
        if settings.is_file() and "size" in json.loads(settings.read_text()).get("video_processor", {}):
            processor.videos_kwargs = {k: v for k, v in type(processor).videos_kwargs.items() if k != "size"}
        processor.audio_kwargs = {**type(processor).audio_kwargs, "truncation": False}
        return processor

    def tower_run(self, modality: Modality) -> TowerRun:
        """Sounds are divided by their windows."""
        return self._sounds() if modality == "audio" else super().tower_run(modality)

    def _sounds(self) -> TowerRun:
        half = self.config.audio_config.n_window
        return _Sounds(4 * half, half, LEAST_FRAMES)  # two windows: whole rows, whatever half of one is

    def features(self, model: Any, modality: Modality, batch: Mapping[str, Any]) -> Any:
        """Run sounds without `get_audio_features`, which takes them padded to the longest."""
        if modality != "audio":
            return super().features(model, modality, batch)
        tower = model.base_model.audio_tower
        return tower(batch["input_features"], feature_lens=batch["feature_lens"], return_dict=True)

    def positions(
        self, model: Any, token_ids: torch.Tensor, media: Sequence[MediumLayout], ranges: torch.Tensor
    ) -> torch.Tensor:
        """Rotary positions; if only some videos have sound, they are computed for each video and each other medium by itself.

        `get_rope_index` takes all videos of a call to have sound, or none. The positions continue from one medium to the next as in
        `get_rope_index`.
        """
        sounds = sum(medium.sampling.of_video for medium in media)
        if sounds in (0, sum(medium.modality == "video" for medium in media)):
            return super().positions(model, token_ids, media, ranges)
        groups = _with_their_sounds(media)
        pieces, start, following = [], 0, 0
        for group in groups:
            last = max(sum(medium.ranges[-1]) for medium in group)
            # Two tokens end a video with its sound, one token ends any other medium.
            end = len(token_ids) if group is groups[-1] else last + len(group)
            piece = super().positions(model, token_ids[start:end], group, ranges[start:end]) + following
            pieces.append(piece)
            start, following = end, int(piece[:, -1].max()) + 1
        return torch.cat(pieces, 1)


def _with_their_sounds(media: Sequence[MediumLayout]) -> list[list[MediumLayout]]:
    """Each video with its sound, and each other medium alone, in the order of the prompt."""
    groups: list[list[MediumLayout]] = []
    for medium in media:
        if medium.sampling.of_video:
            groups[-1].append(medium)
        else:
            groups.append([medium])
    return groups


class Qwen3OmniAdapter(QwenOmniAdapter):
    """Rounds the seconds per grid of videos: otherwise its `get_rope_index` would give them fractions of positions."""

    def _sounds(self) -> TowerRun:
        audio = self.config.audio_config
        chunk = 2 * audio.n_window
        chunks = max(1, audio.n_window_infer // chunk)
        return _Chunks(chunks * chunk, chunks * CHUNK_TOKENS, chunk)

    def video(
        self,
        inputs: MediaInputs,
        frames: torch.Tensor,
        indices: list[int],
        fps: float,
        num_frames: int,
        size: Mapping[str, int] | None = None,
    ) -> Processed:
        """Process the sampled frames of one video."""
        result = super().video(inputs, frames, indices, fps, num_frames, size)
        per_second = self.config.position_id_per_seconds
        seconds = [
            max(1, round(s * per_second)) / per_second for s in result.outputs["video_second_per_grid"]
        ]
        return Processed(result.replacement, result.outputs | {"video_second_per_grid": seconds})

    def unsplit_inputs(
        self, processor: Any, given: Mapping[str, Any], media: Sequence[MediumLayout]
    ) -> dict[str, Any]:
        """Inputs of the whole model, with the same whole positions that `video` gives to videos."""
        inputs = super().unsplit_inputs(processor, given, media)
        if seconds := [m.geometry["video_second_per_grid"] for m in media if m.modality == "video"]:
            inputs["video_second_per_grid"] = torch.tensor(seconds).flatten()
        return inputs
