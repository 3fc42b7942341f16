"""Plans the sampling of each medium of a prompt, and counts its tokens. Independent of conversations and tokenizers.

Counts come from dry runs: the model's own processor works on tensors that have a shape but no data.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.video_utils import VideoMetadata

from mmd_api.contract.errors import UnsupportedInputError
from mmd_api.contract.pools import Modality
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media.choice import FoundFrame, SamplingChoice, thinned
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.reduction import MediaAmount
from mmd_workers.model import inputs as media_inputs
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.frame_pooling import grouped
from mmd_workers.model.inputs import PROCESSOR_ERRORS, MediaInputs
from mmd_workers.model.probe_cache import Probe, ProbeCache
from mmd_workers.model.prompt import SamplingPlan

PROBES_BYTES = 64 << 20  # budget for the probes of media sizes seen before
LOW_DETAIL_SIDE = 512  # pixels of an image's side, as OpenAI documents it
_ROUNDED_UP = 1 + 1e-9
"""Processors truncate the product of a rate and a duration to a number of frames."""


class SamplingPlanner:
    """Plans how the media of prompts are sampled, for one model and its processor. Thread safe."""

    def __init__(
        self,
        processor: Any,
        adapter: Adapter,
        inputs: MediaInputs,
        placeholders: Mapping[Modality, str],
        policy: MediaPolicy,
        pooled_frames: int,
    ) -> None:
        """`inputs`: computes shapes only. `placeholders`: the token of each modality that the model takes.

        `pooled_frames`: number of successive frames of a video that become one.
        """
        self._processor = processor
        self._adapter = adapter
        self._inputs = inputs
        self._placeholders = placeholders
        self._policy = policy
        self._pooled_frames = pooled_frames
        self._cached = ProbeCache(self._dry_run, PROBES_BYTES)

    def plan(self, number: int, info: MediumInfo, choice: SamplingChoice) -> SamplingPlan:
        """Plan the sampling of a medium. `number`: its index among the request's media.

        Raises:
            UnsupportedInputError: the model cannot take this medium or choice; the message names the remedy.
        """
        if info.modality == "video":
            try:
                if choice.searches:
                    plan = self._plan_of_found(number, choice)
                else:
                    plan = SamplingPlan(frame_indices=self._frame_indices(number, info, choice))
            except PROCESSOR_ERRORS as error:
                raise UnsupportedInputError(
                    f"medium {number} (video, {info.num_frames} frames): this model's processor cannot sample it: {error}; request another "
                    "number of frames"
                ) from error
            return self._with_frame_size(number, info, choice, grouped(plan, self._pooled_frames))
        if info.modality == "audio":
            rate = int(self._processor.feature_extractor.sampling_rate)
            samples = _samples(info, rate)
            limit = self._adapter.max_audio_samples(self._processor)
            if limit and samples > limit:
                if self._policy.audio.too_long == "Reject":
                    raise UnsupportedInputError(
                        f"medium {number} (audio) lasts {samples / rate:.1f} s, but this model accepts at most {limit / rate:.1f} s; send a "
                        "shorter clip or several clips, or set spec.gateway.media.audio.tooLong to Truncate"
                    )
                samples = limit
            return SamplingPlan(sample_rate_hz=rate, num_samples=samples, of_video=info.of_video)
        return replace(self._image_plan(number, info, choice), page=info.page)

    def amount(self, number: int, info: MediumInfo, choice: SamplingChoice) -> MediaAmount:
        """Return the frames and pixels of a medium that can be reduced. Raises as `plan` does."""
        if info.modality == "audio":
            return MediaAmount()
        plan = self.plan(number, info, choice)
        frames = len(plan.frame_indices)
        is_video = info.modality == "video"
        resizer = self._processor.video_processor if is_video else self._processor.image_processor
        shares_pixels = is_video and self._adapter.frames_share_pixels(resizer)
        if not (self._adapter.bounds_pixels(resizer) or shares_pixels):
            return MediaAmount(frames)
        pixels = _pixels(self.probe(number, info, plan), resizer)
        side = int(resizer.patch_size) * int(getattr(resizer, "merge_size", 1))
        return MediaAmount(frames, pixels, least_pixels=side**2)

    def probe(self, number: int, info: MediumInfo, plan: SamplingPlan) -> Probe:
        """Run the model's processor on the shape of a medium. Results are cached by shape.

        Raises:
            UnsupportedInputError: the processor rejects the medium, or yields no token.
        """
        try:
            probe = self._cached(
                info.modality,
                info.width,
                info.height,
                tuple(plan.timed_indices),
                info.fps,
                info.num_frames,
                plan.num_samples,
                tuple(sorted(plan.size.items())),
            )
        except PROCESSOR_ERRORS as error:
            what = (
                f"{info.num_samples} samples"
                if info.modality == "audio"
                else f"{info.width} x {info.height} pixels"
            )
            raise UnsupportedInputError(
                f"medium {number} ({info.modality}, {what}): the model's processor rejected it: {error}; send a different size"
            ) from error
        if not probe.replacement.count(self._placeholders[info.modality]):
            others = [p for m, p in self._placeholders.items() if m != info.modality]
            if any(other in probe.replacement for other in others):
                raise UnsupportedInputError(
                    f"medium {number} ({info.modality}): this model's processor marks {info.modality} with tokens other than "
                    f"{self._placeholders[info.modality]}, and no adapter defines them; send another modality, or report the model"
                )
            raise UnsupportedInputError(
                f"medium {number} ({info.modality}) is too short or too small to yield a token"
            )
        return probe

    def _image_plan(self, number: int, info: MediumInfo, choice: SamplingChoice) -> SamplingPlan:
        """The plan of an image. If the choice changes nothing, it is the plan without one."""
        plain = SamplingPlan()
        if choice.min_pixels is None and choice.max_pixels is None and not choice.low_detail:
            return plain
        images = self._processor.image_processor
        default = {name: int(edge) for name, edge in dict(images.size).items() if edge}
        if not self._adapter.bounds_pixels(images):
            if choice.min_pixels is not None or choice.max_pixels is not None:
                raise UnsupportedInputError(
                    f"medium {number} (image): min_pixels and max_pixels: this model's processor takes no number of pixels; omit them"
                )
            lower = set(default) == {"longest_edge"} and default["longest_edge"] > LOW_DETAIL_SIDE
            plan = SamplingPlan(size={"longest_edge": LOW_DETAIL_SIDE}) if lower else plain
            same = self.probe(number, info, plan) == self.probe(number, info, plain)
            return plain if same else plan
        for name, pixels in (("min_pixels", choice.min_pixels), ("max_pixels", choice.max_pixels)):
            if pixels is not None and pixels > default["longest_edge"]:
                raise UnsupportedInputError(
                    f"medium {number} (image): {name}: {pixels} are more than this model's processor makes of an image, which is "
                    f"{default['longest_edge']}; request fewer"
                )
        most = choice.max_pixels or default["longest_edge"]
        if choice.low_detail:
            most = min(most, LOW_DETAIL_SIDE**2)
        least = min(most, choice.min_pixels or default["shortest_edge"])
        plan = SamplingPlan(size={"shortest_edge": least, "longest_edge": most})
        probe = self.probe(number, info, plan)
        if probe == self.probe(number, info, plain):
            return plain
        # Rounding may exceed the maximum for an image far from square.
        if (pixels := _pixels(probe, images)) > default["longest_edge"]:
            raise UnsupportedInputError(
                f"medium {number} (image): min_pixels: this model's processor would make {pixels} pixels of {info.width}x{info.height}, more "
                f"than its maximum of {default['longest_edge']}; request fewer"
            )
        return plan

    def _with_frame_size(
        self, number: int, info: MediumInfo, choice: SamplingChoice, plain: SamplingPlan
    ) -> SamplingPlan:
        """The plan of a video with bounded frames. If the bound changes nothing, it is the plan without one."""
        videos = self._processor.video_processor
        shares_pixels = self._adapter.frames_share_pixels(videos)
        if choice.max_frame_pixels is None or not (self._adapter.bounds_pixels(videos) or shares_pixels):
            return plain
        most, default = choice.max_frame_pixels, self._inputs.video_size
        if shares_pixels:
            frames, group = len(plain.frame_indices), int(getattr(videos, "temporal_patch_size", None) or 1)
            most *= frames + -frames % group
        if most >= default["longest_edge"]:
            return plain
        size = {"shortest_edge": min(most, default["shortest_edge"]), "longest_edge": most}
        plan = replace(plain, size=size)
        same = self.probe(number, info, plan) == self.probe(number, info, plain)
        return plain if same else plan

    def _frame_indices(self, number: int, info: MediumInfo, choice: SamplingChoice) -> list[int]:
        """Frames chosen by the model's own video processor for this choice, thinned evenly to the limit."""
        chooser, total = self._processor.video_processor, info.num_frames
        if total < 1 or info.fps <= 0:
            raise UnsupportedInputError(
                f"medium {number} (video) has no frames or no frame rate; re-encode the file"
            )
        group, most, limit = self._frame_limits(choice)
        is_requested = choice.fps is not None or choice.num_frames is not None
        least = min(total, group if is_requested else 2 * group)
        if total == least:
            return thinned(range(total), limit)
        options = self._frames_wished(number, info, choice, group, least, most)
        if (
            choice.max_frames is not None
            and "max_frames" in inspect.signature(chooser.sample_frames).parameters
        ):
            options["max_frames"] = max(group, limit)
        metadata = VideoMetadata(
            total_num_frames=total,
            fps=info.fps,
            duration=total / info.fps,
            width=info.width,
            height=info.height,
        )
        chosen = {min(total - 1, max(0, int(i))) for i in chooser.sample_frames(metadata=metadata, **options)}
        return thinned(sorted(chosen), limit)

    def _frame_limits(self, choice: SamplingChoice) -> tuple[int, int, int]:
        """Frames of a group (a temporal patch, or frames to be pooled), the most of a video, and the most in whole groups."""
        group = int(getattr(self._processor.video_processor, "temporal_patch_size", None) or 1)
        group = max(group, self._pooled_frames)
        most = self._policy.video.max_frames
        if choice.max_frames is not None:
            most = min(most, max(group, choice.max_frames))
        return group, most, max(1, most - most % group)

    def _plan_of_found(self, number: int, choice: SamplingChoice) -> SamplingPlan:
        """The plan of the frames found in the video, thinned evenly to the limit.

        Nothing is added to frames of timestamps. Others are filled up as the model needs: whole temporal patches, and two of them.
        """
        assert choice.found is not None
        chooser, frames_found = self._processor.video_processor, choice.found.frames
        group, most, limit = self._frame_limits(choice)
        if choice.timestamps is not None:
            if len(frames_found) > limit and choice.max_frames is None:
                raise UnsupportedInputError(
                    f"medium {number} (video): timestamps: {len(frames_found)} frames are more than the {limit} that this model takes of at most {most}; "
                    "request fewer, or raise spec.gateway.media.video.maxFrames"
                )
            return _plan_of(thinned(frames_found, limit), group)
        for maximum in (getattr(chooser, "num_frames", None), getattr(chooser, "max_frames", None)):
            limit = min(limit, max(group, maximum - maximum % group)) if maximum else limit
        frames = thinned(frames_found, limit)
        whole = -(-len(frames) // group) * group
        return _plan_of(choice.found.filled(frames, min(limit, max(2 * group, whole))), group)

    def _frames_wished(
        self, number: int, info: MediumInfo, choice: SamplingChoice, group: int, least: int, most: int
    ) -> dict[str, Any]:
        """The arguments with which the model's video processor samples frames.

        `group`: frames of a temporal patch. `least`, `most`: frames of this video. A processor with its own number of frames uses that
        number and not a rate, unless it takes both; a requested rate is converted to the number that it would give otherwise.
        """
        chooser, total = self._processor.video_processor, info.num_frames
        parameters = inspect.signature(chooser.sample_frames).parameters
        whole = total - total % group
        if choice.num_frames is not None:
            if "num_frames" not in parameters:
                raise UnsupportedInputError(
                    f"medium {number} (video): num_frames: this model's processor samples by rate alone; use fps"
                )
            return {"num_frames": min(max(choice.num_frames, group), whole)}
        rate = choice.fps or self._policy.video.frames_per_second_milli / 1000
        rate = min(max(rate, _ROUNDED_UP * least * info.fps / total), info.fps)
        own_frames = getattr(chooser, "num_frames", None)
        if own_frames is None:
            return {"fps": rate}
        if "skip_secs" in parameters:
            return {"fps": rate, "num_frames": min(own_frames, most)}
        if choice.fps is not None:
            return {"num_frames": min(max(least, int(total / info.fps * rate)), whole)}
        return {"num_frames": min(own_frames, most, total)}

    def _dry_run(
        self,
        modality: Modality,
        width: int,
        height: int,
        indices: tuple[int, ...],
        fps: float,
        num_frames: int,
        num_samples: int,
        size: tuple[tuple[str, int], ...],
    ) -> Probe:
        if modality == "audio":
            if num_samples < 1:
                raise ValueError("it has no samples")
            processed = self._adapter.audio(self._inputs, np.broadcast_to(np.float32(0), (num_samples,)))
        elif width < 1 or height < 1:
            raise ValueError("it has no pixels")
        elif modality == "image":
            pixels = torch.empty(3, height, width, dtype=torch.uint8, device="meta")
            processed = self._adapter.image(self._inputs, pixels, dict(size))
        else:
            frames = torch.empty(len(indices), 3, height, width, dtype=torch.uint8, device="meta")
            processed = self._adapter.video(self._inputs, frames, list(indices), fps, num_frames, dict(size))
        facts = media_inputs.geometry(processed.outputs)
        inputs = media_inputs.tensors(processed.outputs)
        work = self._adapter.work(inputs, facts)
        if modality == "video":
            facts |= {"source_fps": fps, "source_num_frames": num_frames}
        input_bytes = sum(tensor.numel() * tensor.element_size() for tensor in inputs.values())
        return Probe(processed.replacement, facts, work, input_bytes)


def _plan_of(chosen: Sequence[FoundFrame], group: int) -> SamplingPlan:
    """The plan of these frames. The last one is repeated up to a whole temporal patch, as processors do if they take fewer."""
    frames = [*chosen, *[chosen[-1]] * (group - len(chosen))]
    indices, nominal = [frame.index for frame in frames], [frame.nominal for frame in frames]
    return SamplingPlan(frame_indices=indices, nominal_indices=[] if nominal == indices else nominal)


def _pixels(probe: Probe, processor: Any) -> int:
    """Pixels of an image, or of each frame of a video, after such a processor has resized it."""
    (grid,) = next(value for name, value in probe.geometry.items() if name.endswith("grid_thw"))
    return int(grid[-2] * grid[-1] * int(processor.patch_size) ** 2)


def truncated_seconds(info: MediumInfo, plan: SamplingPlan) -> float:
    """Seconds of a sound that its plan leaves out."""
    if info.modality != "audio":
        return 0.0
    return (_samples(info, plan.sample_rate_hz) - plan.num_samples) / plan.sample_rate_hz


def _samples(info: MediumInfo, rate: int) -> int:
    """Number of samples of a whole sound at the model's rate."""
    return (info.num_samples * rate + info.sample_rate_hz - 1) // max(info.sample_rate_hz, 1)
