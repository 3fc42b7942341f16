"""A request may choose how its media are sampled: the model gets what its own processor makes of the same option, and the counts are exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.video_utils import VideoMetadata

from mmd_api.contract.errors import UnsupportedInputError
from mmd_api.spec.media import MediaPolicy, VideoPolicy
from mmd_api.spec.model import ModelSpec
from mmd_workers.media.choice import NO_CHOICE, FoundFrame, FoundFrames, SamplingChoice, thinned
from mmd_workers.media.reduction import MediaShare
from mmd_workers.model import sampling_plans
from mmd_workers.model.frontend import load_frontend
from mmd_workers.model.inputs import MediaInputs
from mmd_workers.model.prompt import PromptLayout
from support.oracles import model_zoo as zoo

pytestmark = pytest.mark.models

Checkpoint = Callable[[str], Path]
WATCHING = [a for a, takes in zoo.MODALITIES.items() if "video" in takes]
MAX_FRAMES_OF_ITS_OWN = ["qwen2_vl", "qwen2_5_vl", "video_llama_3", "qwen2_5_omni", "qwen3_omni_moe"]
SEEING = [a for a, takes in zoo.MODALITIES.items() if "image" in takes]
BOUNDING_PIXELS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "video_llama_3", "qwen2_5_omni", "qwen3_omni_moe"]
BOUNDING_EDGES = ["idefics3", "smolvlm", "mistral3"]
OPTIONS: list[dict[str, Any]] = [{"fps": 1.0}, {"fps": 1.7}, {"num_frames": 6}, {"num_frames": 7}]


def film() -> zoo.Medium:
    return zoo.video(40, 44, 60, 6.0, 2)


def lay_out(served: zoo.Served, medium: zoo.Medium, choice: SamplingChoice) -> PromptLayout:
    return served.frontend.layout(zoo.conversation(medium, "go"), [medium.info], choices=[choice])


def sampled_by_the_processor(served: zoo.Served, medium: zoo.Medium, option: dict[str, Any]) -> Any:
    """What the model's own video processor makes of all frames and an option."""
    processor = copy.copy(served.processor.video_processor)
    if "skip_secs" not in processor.sample_frames.__code__.co_varnames:  # it takes a number or a rate
        setattr(processor, "num_frames" if "fps" in option else "fps", None)
    info = medium.info
    metadata = VideoMetadata(
        total_num_frames=info.num_frames,
        fps=info.fps,
        width=info.width,
        height=info.height,
        duration=info.num_frames / info.fps,
    )
    return processor(
        videos=[torch.from_numpy(medium.source).permute(0, 3, 1, 2)],
        video_metadata=[metadata],
        do_sample_frames=True,
        return_metadata=True,
        return_tensors="pt",
        **option,
    )


def assert_as_the_processor(
    served: zoo.Served, option: dict[str, Any], choice: SamplingChoice | None = None
) -> None:
    medium = film()
    (laid,) = lay_out(served, medium, choice or SamplingChoice(**option)).media
    made = sampled_by_the_processor(served, medium, option)
    assert laid.sampling.frame_indices == [int(i) for i in made["video_metadata"][0].frames_indices]
    assert served.encoder is not None
    processed = served.encoder.process(zoo.decoded(medium, laid.sampling.frame_indices, 0), laid)
    pixels = processed.tensors["pixel_values_videos" if "pixel_values_videos" in made else "pixel_values"]
    assert torch.equal(pixels, made.get("pixel_values_videos", made.get("pixel_values")))


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("arch", WATCHING)
def test_chosen_frames_equal_those_of_the_models_processor(
    arch: str, option: dict[str, Any], checkpoint: Checkpoint
) -> None:
    assert_as_the_processor(zoo.serve(checkpoint(arch)), option)


@pytest.mark.parametrize("arch", MAX_FRAMES_OF_ITS_OWN)
def test_a_processor_that_takes_a_maximum_gets_it(arch: str, checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint(arch))
    assert_as_the_processor(served, {"fps": 1.5, "max_frames": 8})
    assert_as_the_processor(served, {"fps": 2.0, "max_frames": 8}, SamplingChoice(max_frames=8))


def test_a_processor_whose_number_of_frames_is_a_maximum_gets_it(checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint("smolvlm"))
    choice = SamplingChoice(fps=1.0, max_frames=4)
    assert_as_the_processor(served, {"fps": 1.0, "num_frames": 4}, choice)


@pytest.mark.parametrize("arch", [a for a in WATCHING if a not in [*MAX_FRAMES_OF_ITS_OWN, "smolvlm"]])
def test_elsewhere_frames_are_thinned_evenly_to_a_maximum(arch: str, checkpoint: Checkpoint) -> None:
    served, medium = zoo.serve(checkpoint(arch)), film()
    (whole,) = lay_out(served, medium, SamplingChoice(fps=1.0)).media
    (thinned,) = lay_out(served, medium, SamplingChoice(fps=1.0, max_frames=4)).media
    frames = thinned.sampling.frame_indices
    assert len(frames) == 4
    assert set(frames) < set(whole.sampling.frame_indices)


@pytest.mark.parametrize("choice", [SamplingChoice(fps=1.0), SamplingChoice(num_frames=6)], ids=str)
@pytest.mark.parametrize("arch", WATCHING)
def test_answers_about_chosen_frames_equal_generate(
    arch: str, choice: SamplingChoice, checkpoint: Checkpoint
) -> None:
    served, medium = zoo.serve(checkpoint(arch)), film()
    layout = lay_out(served, medium, choice)
    inputs = zoo.hf_inputs(served, zoo.conversation(medium, "go"), [medium], layout)
    assert layout.token_ids == inputs["input_ids"][0].tolist()
    assert zoo.greedy(served, zoo.lowered(served, layout, [medium])) == zoo.generate(served, inputs)


@pytest.mark.parametrize("arch", WATCHING)
@pytest.mark.parametrize("total", [2, 3, 5, 12])
def test_any_choice_is_served_for_a_short_video(arch: str, total: int, checkpoint: Checkpoint) -> None:
    served, medium = zoo.serve(checkpoint(arch)), zoo.video(40, 44, total, 23.976)
    choices = [
        SamplingChoice(fps=0.01),
        SamplingChoice(fps=2.0),
        SamplingChoice(num_frames=1),
        SamplingChoice(num_frames=64),
        SamplingChoice(max_frames=1),
        SamplingChoice(num_frames=9, max_frames=3),
    ]
    for choice in choices:
        layout = lay_out(served, medium, choice)
        (laid,) = layout.media
        most = max(2, choice.max_frames or total)  # a temporal patch of most models
        assert 1 <= len(laid.sampling.frame_indices) <= min(total, most)
        zoo.lowered(served, layout, [medium])  # raises when the tower returns other rows


@pytest.mark.parametrize("arch", WATCHING)
def test_no_choice_exceeds_the_resource(arch: str, checkpoint: Checkpoint) -> None:
    policy = MediaPolicy(video=VideoPolicy(max_frames=6))
    served = load_frontend(ModelSpec(id=str(checkpoint(arch))), policy)
    medium = film()
    for choice in (SamplingChoice(fps=2.0), SamplingChoice(num_frames=40), SamplingChoice(max_frames=50)):
        (laid,) = served.layout(zoo.conversation(medium), [medium.info], choices=[choice]).media
        assert len(laid.sampling.frame_indices) <= 6


@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_same_frames_are_the_same_plan_however_they_were_chosen(
    arch: str, checkpoint: Checkpoint
) -> None:
    served, medium = zoo.serve(checkpoint(arch)), film()
    (plain,) = lay_out(served, medium, NO_CHOICE).media
    frames = len(plain.sampling.frame_indices)
    for choice in (SamplingChoice(fps=2), SamplingChoice(num_frames=frames), SamplingChoice(max_frames=768)):
        (laid,) = lay_out(served, medium, choice).media
        assert laid.sampling == plain.sampling


def test_a_frame_count_is_refused_where_frames_are_sampled_by_rate(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = load_frontend(ModelSpec(id=str(checkpoint("qwen2_vl"))), MediaPolicy())
    chooser = type(served._processor.video_processor)
    by_rate = chooser.sample_frames
    monkeypatch.setattr(
        chooser, "sample_frames", lambda self, metadata, fps=None, **_: by_rate(self, metadata, fps=fps)
    )
    medium = film()
    with pytest.raises(UnsupportedInputError, match=r"medium 0 \(video\): num_frames: .* use fps"):
        served.layout(zoo.conversation(medium), [medium.info], choices=[SamplingChoice(num_frames=4)])


AREA = 28 * 28


def size_of(served: zoo.Served, **bounds: int) -> dict[str, int]:
    """The size of an image processor that bounds pixels, with these in place of its own."""
    own = served.processor.image_processor.size
    least, most = (
        bounds.get("min_pixels", own["shortest_edge"]),
        bounds.get("max_pixels", own["longest_edge"]),
    )
    return {"shortest_edge": least, "longest_edge": most}


def assert_resized(served: zoo.Served, choice: SamplingChoice, size: dict[str, int]) -> None:
    """The picture is what the model's processor makes of it with this size, and so is the answer."""
    assert served.encoder is not None
    picture = zoo.image(150, 110, 3)
    layout = lay_out(served, picture, choice)
    inputs = zoo.hf_inputs(served, zoo.conversation(picture, "go"), [picture], layout, size)
    assert layout.token_ids == inputs["input_ids"][0].tolist()
    (laid,) = layout.media
    processed = served.encoder.process(zoo.decoded(picture, [], 0), laid)
    assert torch.equal(processed.tensors["pixel_values"], inputs["pixel_values"])
    assert zoo.greedy(served, zoo.lowered(served, layout, [picture])) == zoo.generate(served, inputs)


@pytest.mark.parametrize(
    "bounds",
    [
        {"max_pixels": 9 * AREA},
        {"min_pixels": 30 * AREA},
        {"min_pixels": 25 * AREA, "max_pixels": 33 * AREA},
        {"max_pixels": 2 * AREA},
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", BOUNDING_PIXELS)
def test_bounded_image_pixels_equal_those_of_the_models_processor(
    arch: str, bounds: dict[str, int], checkpoint: Checkpoint
) -> None:
    served = zoo.serve(checkpoint(arch))
    plain = lay_out(served, zoo.image(150, 110, 3), NO_CHOICE)
    chosen = lay_out(served, zoo.image(150, 110, 3), SamplingChoice(**bounds))
    assert chosen.media[0].num_tokens != plain.media[0].num_tokens
    size = size_of(served, **bounds)
    size["shortest_edge"] = min(size.values())
    assert_resized(served, SamplingChoice(**bounds), size)


@pytest.mark.parametrize("arch", BOUNDING_PIXELS)
def test_low_detail_is_a_maximum_of_pixels(
    arch: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_plans, "LOW_DETAIL_SIDE", 84)
    served = zoo.serve(checkpoint(arch))
    assert_resized(served, SamplingChoice(low_detail=True), size_of(served, max_pixels=84 * 84))


@pytest.mark.parametrize("arch", BOUNDING_EDGES)
def test_low_detail_is_a_longest_edge_where_the_processor_has_one(
    arch: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_plans, "LOW_DETAIL_SIDE", 56)
    served = zoo.serve(checkpoint(arch))
    assert served.processor.image_processor.size["longest_edge"] > 56
    assert_resized(served, SamplingChoice(low_detail=True), {"longest_edge": 56})


@pytest.mark.parametrize("arch", [a for a in SEEING if a not in BOUNDING_PIXELS])
def test_bounds_of_pixels_are_refused_where_the_processor_takes_none(
    arch: str, checkpoint: Checkpoint
) -> None:
    served, picture = zoo.serve(checkpoint(arch)), zoo.image(150, 110, 3)
    with pytest.raises(
        UnsupportedInputError, match=r"medium 0 \(image\): min_pixels and max_pixels: .* omit them"
    ):
        lay_out(served, picture, SamplingChoice(max_pixels=AREA))
    if arch not in BOUNDING_EDGES:
        low = lay_out(served, picture, SamplingChoice(low_detail=True))
        assert low == lay_out(served, picture, NO_CHOICE), "low detail has no effect"


@pytest.mark.parametrize("arch", BOUNDING_PIXELS)
def test_more_pixels_than_the_processors_own_are_refused(arch: str, checkpoint: Checkpoint) -> None:
    served, picture = zoo.serve(checkpoint(arch)), zoo.image(150, 110, 3)
    for name in ("min_pixels", "max_pixels"):
        with pytest.raises(
            UnsupportedInputError, match=rf"medium 0 \(image\): {name}: 99999 .*28224; request fewer"
        ):
            lay_out(served, picture, SamplingChoice(**{name: 99_999}))


@pytest.mark.parametrize("arch", BOUNDING_PIXELS)
def test_an_image_that_bounds_do_not_change_is_the_same_plan(arch: str, checkpoint: Checkpoint) -> None:
    served, picture = zoo.serve(checkpoint(arch)), zoo.image(112, 84, 3)
    plain = lay_out(served, picture, NO_CHOICE)
    for choice in (
        SamplingChoice(max_pixels=36 * AREA),
        SamplingChoice(max_pixels=20 * AREA),
        SamplingChoice(min_pixels=5 * AREA),
        SamplingChoice(low_detail=True),
    ):
        assert lay_out(served, picture, choice) == plain


@pytest.mark.parametrize("arch", BOUNDING_PIXELS)
def test_no_image_becomes_larger_than_the_processors_own_maximum(arch: str, checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint(arch))
    with pytest.raises(
        UnsupportedInputError, match=r"min_pixels: .* more than its maximum of 28224; request fewer"
    ):
        lay_out(served, zoo.image(40, 30, 3), SamplingChoice(min_pixels=28_224))


def test_a_part_wins_over_the_request_and_a_rate_over_a_number() -> None:
    request = SamplingChoice(num_frames=8, max_frames=16)
    assert NO_CHOICE.or_else(request) == request
    assert SamplingChoice(fps=1).or_else(request) == SamplingChoice(fps=1, max_frames=16)
    assert SamplingChoice(num_frames=4).or_else(SamplingChoice(fps=2)) == SamplingChoice(num_frames=4)
    assert SamplingChoice(max_frames=4).or_else(request) == SamplingChoice(num_frames=8, max_frames=4)
    pixels = SamplingChoice(min_pixels=1, max_pixels=9)
    assert SamplingChoice(max_pixels=4).or_else(pixels) == SamplingChoice(min_pixels=1, max_pixels=4)
    assert SamplingChoice(low_detail=True).or_else(pixels) == SamplingChoice(
        min_pixels=1, max_pixels=9, low_detail=True
    )
    assert SamplingChoice(max_pixels=4).or_else(SamplingChoice(low_detail=True)) == SamplingChoice(
        max_pixels=4
    )


def found(*indices: int, total: int = 60, times: Callable[[int], int] = int) -> FoundFrames:
    """What a search has found in a video of so many frames."""
    frames = tuple(FoundFrame(index, times(index)) for index in indices)
    spare = tuple(FoundFrame(index, times(index)) for index in thinned(range(total), 16))
    return FoundFrames(frames, spare)


SEARCHES = {
    "key frames": SamplingChoice(sampling="keyframes", found=found(0, 12, 24, 31, 48)),
    "scenes": SamplingChoice(sampling="scene_changes", found=found(0, 7, 8, 40)),
    "one scene": SamplingChoice(sampling="scene_changes", found=found(0)),
    "no key frame": SamplingChoice(sampling="keyframes", found=found()),
    "every frame": SamplingChoice(sampling="keyframes", found=found(*range(60))),
    "one second": SamplingChoice(timestamps=(2.0,), found=found(12)),
    "three seconds": SamplingChoice(timestamps=(0.5, 2.0, 8.0), found=found(3, 12, 48)),
    "variable": SamplingChoice(
        timestamps=(0.5, 2.0, 8.0, 9.0), found=found(3, 12, 48, 50, times=lambda at: min(59, at + at // 8))
    ),
}


@pytest.mark.parametrize("choice", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("arch", WATCHING)
def test_answers_about_found_frames_equal_generate(
    arch: str, choice: SamplingChoice, checkpoint: Checkpoint
) -> None:
    served, medium = zoo.serve(checkpoint(arch)), film()
    layout = lay_out(served, medium, choice)
    inputs = zoo.hf_inputs(served, zoo.conversation(medium, "go"), [medium], layout)
    assert layout.token_ids == inputs["input_ids"][0].tolist()
    assert zoo.greedy(served, zoo.lowered(served, layout, [medium])) == zoo.generate(served, inputs)


@pytest.mark.parametrize("arch", WATCHING)
def test_found_frames_are_those_of_the_model_and_no_others(arch: str, checkpoint: Checkpoint) -> None:
    served, medium = zoo.serve(checkpoint(arch)), film()
    group = int(getattr(served.processor.video_processor, "temporal_patch_size", None) or 1)

    def frames(choice: SamplingChoice) -> list[int]:
        (laid,) = lay_out(served, medium, choice).media
        return laid.sampling.frame_indices

    assert frames(SEARCHES["three seconds"]) == [3, 12, 48]
    assert frames(SEARCHES["one second"]) == [12] * group
    scenes = frames(SEARCHES["scenes"])
    assert scenes == [0, 7, 8, 40]
    keys = frames(SEARCHES["key frames"])
    assert set(keys) >= {0, 12, 24, 31, 48}
    assert len(keys) == 5 + 5 % group, "whole temporal patches"
    few = frames(SEARCHES["one scene"])
    assert few[0] == 0
    assert len(few) == 2 * group, "filled up"
    assert few[-1] == 59, "over the whole video"
    assert frames(SEARCHES["no key frame"]) == few
    for choice in SEARCHES.values():
        assert len(frames(replace(choice, max_frames=2))) == min(2, len(frames(choice)))


def test_more_seconds_than_the_model_takes_in_whole_patches_are_refused(checkpoint: Checkpoint) -> None:
    policy = MediaPolicy(video=VideoPolicy(max_frames=5))
    served, medium = load_frontend(ModelSpec(id=str(checkpoint("qwen2_vl"))), policy), film()
    choice = SamplingChoice(timestamps=(1, 2, 3, 4, 5), found=found(6, 12, 18, 24, 30))
    refusal = r"medium 0 \(video\): timestamps: 5 frames are more than the 4 .* raise spec.gateway.media.video.maxFrames"
    with pytest.raises(UnsupportedInputError, match=refusal):
        served.layout(zoo.conversation(medium), [medium.info], choices=[choice])
    fewer = replace(choice, max_frames=4)
    (laid,) = served.layout(zoo.conversation(medium), [medium.info], choices=[fewer]).media
    assert laid.sampling.frame_indices == [6, 12, 24, 30], "a maximum leaves some out"


@pytest.mark.parametrize("arch", WATCHING)
@pytest.mark.parametrize("total", [1, 2, 3, 5])
def test_any_search_is_served_for_a_short_video(arch: str, total: int, checkpoint: Checkpoint) -> None:
    served, medium = zoo.serve(checkpoint(arch)), zoo.video(40, 44, total, 23.976)
    for indices in ([], [0], [total - 1], list(range(total))):
        for choice in (SamplingChoice(sampling="keyframes"), SamplingChoice(timestamps=(0.0,))):
            if choice.timestamps and not indices:
                continue
            layout = lay_out(served, medium, replace(choice, found=found(*indices, total=total)))
            zoo.lowered(served, layout, [medium])  # raises when the tower returns other rows


def test_prompt_times_match_the_frames_where_the_rate_varies(checkpoint: Checkpoint) -> None:
    served, medium = zoo.serve(checkpoint("qwen3_vl")), film()
    slow = found(3, 12, 20, 21, times=lambda at: min(59, 2 * at))  # 6 a second on average, at first 3
    (text,) = (
        served.frontend.decode(layout.token_ids)
        for layout in [lay_out(served, medium, SamplingChoice(timestamps=(1, 4, 6, 7), found=slow))]
    )
    assert "<2.5 seconds>" in text, text
    assert "<6.8 seconds>" in text, text


@pytest.mark.parametrize("arch", WATCHING)
def test_gateway_and_encoder_tell_the_processor_the_same_times(
    arch: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[int]] = []
    video = MediaInputs.video

    def recorded(self: MediaInputs, frames: Any, indices: list[int], *more: Any) -> Any:
        told.append(list(indices))
        return video(self, frames, indices, *more)

    monkeypatch.setattr(MediaInputs, "video", recorded)
    served, medium = zoo.serve(checkpoint(arch)), zoo.video(44, 48, 60, 6.0, 3)
    slow = found(3, 12, 20, 21, times=lambda at: min(59, 2 * at))
    layout = lay_out(served, medium, SamplingChoice(timestamps=(1, 4, 6, 7), found=slow))
    zoo.lowered(served, layout, [medium])
    assert told == [[6, 24, 40, 42]] * 2
    assert layout.media[0].sampling.frame_indices == [3, 12, 20, 21]


def test_a_choice_of_frames_is_of_one_kind() -> None:
    keys = SamplingChoice(sampling="keyframes")
    assert SamplingChoice(fps=1).or_else(keys) == SamplingChoice(fps=1), "a rate is uniform"
    assert SamplingChoice(max_frames=4).or_else(keys) == SamplingChoice(max_frames=4, sampling="keyframes")
    assert SamplingChoice(timestamps=(1.0,)).or_else(keys).sampling is None
    assert SamplingChoice(sampling="uniform").or_else(keys) == SamplingChoice(sampling="uniform")


SHARES = [MediaShare(pixels_percent=50), MediaShare(frames_percent=50), MediaShare(30, 50, max_frames=4)]


@pytest.mark.parametrize("share", SHARES, ids=["pixels", "frames", "both"])
@pytest.mark.parametrize("arch", BOUNDING_PIXELS)
def test_a_video_share_limits_pixels_and_frames_and_answers_equal_generate(
    arch: str, share: MediaShare, checkpoint: Checkpoint
) -> None:
    served, medium = zoo.serve(checkpoint(arch)), zoo.video(150, 110, 60, 6.0, 2)
    (before,) = served.frontend.amounts([medium.info], [NO_CHOICE])
    assert before.frames > 4
    choice = share.of(NO_CHOICE, before)
    (after,) = served.frontend.amounts([medium.info], [choice])
    assert after.pixels <= before.pixels * share.pixels_percent // 100, "of each frame, however few there are"
    assert after.frames <= max(2, before.frames * share.frames_percent // 100)
    assert after.pixels < before.pixels or share.pixels_percent == 100
    layout, whole = (lay_out(served, medium, one) for one in (choice, NO_CHOICE))
    (laid,) = layout.media
    assert len(laid.sampling.frame_indices) == after.frames
    assert laid.num_tokens < whole.media[0].num_tokens
    assert laid.work < whole.media[0].work
    inputs = zoo.hf_inputs(served, zoo.conversation(medium, "go"), [medium], layout)
    assert layout.token_ids == inputs["input_ids"][0].tolist()
    assert zoo.greedy(served, zoo.lowered(served, layout, [medium])) == zoo.generate(served, inputs)


@pytest.mark.parametrize("arch", SEEING)
def test_a_share_of_an_image_limits_pixels_where_the_processor_can(arch: str, checkpoint: Checkpoint) -> None:
    served, picture = zoo.serve(checkpoint(arch)), zoo.image(150, 110, 3)
    (before,) = served.frontend.amounts([picture.info], [NO_CHOICE])
    choice = MediaShare(pixels_percent=50).of(NO_CHOICE, before)
    (after,) = served.frontend.amounts([picture.info], [choice])
    whole, half = (lay_out(served, picture, one).media[0] for one in (NO_CHOICE, choice))
    if arch in BOUNDING_PIXELS:
        assert 0 < after.pixels <= before.pixels // 2
        assert half.num_tokens < whole.num_tokens
    else:
        assert (choice, half) == (NO_CHOICE, whole)
