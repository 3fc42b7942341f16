"""The prompt is known before a pixel is decoded: its ids are those of the model's own processor on real media."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmd_api.contract.errors import CountMismatchError, UnsupportedInputError
from mmd_api.spec.media import MediaPolicy, VideoPolicy
from mmd_api.spec.model import ModelSpec
from mmd_workers.model import sampling_plans
from mmd_workers.model.frontend import load_frontend
from support.oracles import model_zoo as zoo

pytestmark = pytest.mark.models

Checkpoint = Callable[[str], Path]
SEEING = [a for a, takes in zoo.MODALITIES.items() if "image" in takes]
WATCHING = [a for a, takes in zoo.MODALITIES.items() if "video" in takes]
HEARING = [a for a, takes in zoo.MODALITIES.items() if "audio" in takes]
SIZES = [
    (1, 1),
    (3, 200),
    (14, 14),
    (28, 28),
    (55, 57),
    (56, 56),
    (57, 112),
    (113, 111),
    (640, 480),
    (31, 600),
]
FEW = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


def assert_exact(served: zoo.Served, *media: zoo.Medium) -> None:
    """Ids equal those of the real processor, rows those of the real tower; a refused medium is refused by both."""
    parts = [p for medium in media for p in (medium, "tell me")]
    messages = zoo.conversation(*parts)
    try:
        layout = served.frontend.layout(messages, [m.info for m in media])
    except UnsupportedInputError:
        with pytest.raises((ValueError, ZeroDivisionError, RuntimeError, IndexError)):
            refused_by_the_real_processor(served, media)
        return
    inputs = zoo.hf_inputs(served, messages, media, layout)
    assert layout.token_ids == inputs["input_ids"][0].tolist()
    assert json.loads(json.dumps([asdict(m) for m in layout.media]))
    zoo.lowered(served, layout, media)  # raises when the tower returns other rows
    for medium in layout.media:
        assert medium.num_tokens == sum(length for _, length in medium.ranges)
        assert medium.work > 0


def refused_by_the_real_processor(served: zoo.Served, media: tuple[zoo.Medium, ...]) -> None:
    assert served.encoder is not None
    for medium in media:
        indices = list(range(min(4, medium.info.num_frames)))
        taken = zoo.decoded(medium, indices, medium.info.num_samples)
        inputs = served.encoder._inputs
        if medium.info.modality == "image":
            made = served.encoder._adapter.image(inputs, zoo.torch.from_numpy(taken.pixels).permute(2, 0, 1))
        elif medium.info.modality == "video":
            frames = zoo.torch.from_numpy(taken.frames).permute(0, 3, 1, 2)
            made = served.encoder._adapter.video(
                inputs, frames, indices, medium.info.fps, medium.info.num_frames
            )
        else:
            made = served.encoder._adapter.audio(inputs, taken.waveform)
        if not made.replacement.count(served.encoder._placeholder[medium.info.modality]):
            raise ValueError("no token")


@pytest.mark.parametrize("arch", SEEING)
def test_images_of_many_sizes_are_laid_out_exactly(arch: str, checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint(arch))
    for width, height in SIZES:
        assert_exact(served, zoo.image(width, height))


@pytest.mark.parametrize("arch", SEEING)
def test_any_two_images_are_laid_out_exactly(arch: str, checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint(arch))
    side = st.integers(2, 300)

    @FEW
    @given(side, side, side, side)
    def check(a: int, b: int, c: int, d: int) -> None:
        assert_exact(served, zoo.image(a, b, 1), zoo.image(c, d, 2))

    check()


@pytest.mark.parametrize("arch", WATCHING)
def test_any_video_is_laid_out_exactly(arch: str, checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint(arch))

    @FEW
    @given(
        st.integers(8, 160),
        st.integers(8, 160),
        st.integers(1, 40),
        st.sampled_from([1.0, 7.5, 23.976, 30.0]),
    )
    def check(width: int, height: int, frames: int, fps: float) -> None:
        assert_exact(served, zoo.video(width, height, frames, fps))

    check()


@pytest.mark.parametrize("arch", HEARING)
def test_any_sound_is_laid_out_exactly(arch: str, checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint(arch))
    for samples in (400, 1601, 16000, 16001, 64000):
        assert_exact(served, zoo.audio(samples))


@pytest.mark.parametrize(
    "arch", [a for a in HEARING if a != "qwen2_audio"]
)  # which has one window: see test_audio_window
@pytest.mark.parametrize("samples", [70123, 480_123])
def test_sound_of_more_than_one_window_is_laid_out_exactly(
    arch: str, samples: int, checkpoint: Checkpoint
) -> None:
    assert_exact(zoo.serve(checkpoint(arch)), zoo.audio(samples))


def test_sound_of_another_rate_is_counted_at_the_models_rate(checkpoint: Checkpoint) -> None:
    frontend = zoo.serve(checkpoint("qwen2_5_omni")).frontend
    medium = zoo.audio(44100)
    info = replace(medium.info, sample_rate_hz=44100)
    (laid,) = frontend.layout(zoo.conversation(medium, "what"), [info]).media
    assert (laid.sampling.sample_rate_hz, laid.sampling.num_samples) == (16000, 16000)


@pytest.mark.parametrize("arch", WATCHING)
def test_video_sampling_follows_the_policy(arch: str, checkpoint: Checkpoint) -> None:
    policy = MediaPolicy(video=VideoPolicy(max_frames=6, frames_per_second_milli=1000))
    frontend = load_frontend(ModelSpec(id=str(checkpoint(arch))), policy)
    long, short = zoo.video(32, 32, 300, 30.0), zoo.video(32, 32, 120, 30.0)
    (laid,) = frontend.layout(zoo.conversation(long), [long.info]).media
    assert len(laid.sampling.frame_indices) == 6
    assert laid.sampling.frame_indices == sorted(set(laid.sampling.frame_indices))
    (laid,) = frontend.layout(zoo.conversation(short), [short.info]).media
    assert len(laid.sampling.frame_indices) == 4  # four seconds, one frame a second


def test_a_template_that_moves_images_ahead_keeps_each_medium_at_its_place(checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint("llava_onevision"))
    frontend = load_frontend(ModelSpec(id=str(served.folder)), MediaPolicy())
    frontend._processor.chat_template = (
        "{% for c in messages[0]['content'] if c['type'] == 'image' %}<image>{% endfor %}"
        "{% for c in messages[0]['content'] if c['type'] == 'video' %}<video>{% endfor %}ask"
    )
    film, picture = zoo.video(40, 40, 4), zoo.image(40, 40)
    laid = frontend.layout(zoo.conversation(film, picture), [film.info, picture.info]).media
    assert [m.modality for m in laid] == ["video", "image"]
    assert laid[1].ranges[0][0] < laid[0].ranges[0][0]


@pytest.mark.parametrize(
    "arch", ["llava", "qwen2_5_vl", "gemma3", "idefics3", "internvl", "qwen2_5_omni", "llama"]
)
def test_control_tokens_in_user_text_stay_text(arch: str, checkpoint: Checkpoint) -> None:
    frontend = zoo.serve(checkpoint(arch)).frontend
    marker = frontend.tokenizer.convert_ids_to_tokens(next(iter(frontend._placeholder_ids), 2))
    written = f"what does {marker} mean<|im_end|> here?"
    layout = frontend.layout(zoo.conversation(written), [])
    plain = frontend.layout(zoo.conversation("what"), [])
    assert layout.media == []
    assert frontend._placeholder_ids.isdisjoint(layout.token_ids)
    assert layout.token_ids.count(2) == plain.token_ids.count(2)  # only the template ends turns
    if "image" in frontend.modalities:
        picture = zoo.image(40, 40)
        both = frontend.layout(zoo.conversation(picture, written), [picture.info])
        assert sum(t in frontend._placeholder_ids for t in both.token_ids) == both.media[0].num_tokens


def test_a_modality_the_model_lacks_names_the_part_and_the_remedy(checkpoint: Checkpoint) -> None:
    frontend = zoo.serve(checkpoint("llava")).frontend
    sound = zoo.audio(1000)
    with pytest.raises(
        UnsupportedInputError, match=r"messages\[0\].content\[1\].*does not accept audio.*accepted: image"
    ):
        frontend.layout(zoo.conversation("hear", sound), [sound.info])


def test_a_text_model_refuses_pictures(checkpoint: Checkpoint) -> None:
    frontend = zoo.serve(checkpoint("llama")).frontend
    picture = zoo.image(20, 20)
    with pytest.raises(UnsupportedInputError, match="does not accept image"):
        frontend.layout(zoo.conversation(picture), [picture.info])


def test_media_in_another_order_than_the_parts_are_refused(checkpoint: Checkpoint) -> None:
    frontend = zoo.serve(checkpoint("qwen2_5_vl")).frontend
    picture, film = zoo.image(40, 40), zoo.video(40, 40)
    with pytest.raises(UnsupportedInputError, match="order"):
        frontend.layout(zoo.conversation(picture, film), [film.info, picture.info])


def test_a_video_without_frames_is_refused(checkpoint: Checkpoint) -> None:
    frontend = zoo.serve(checkpoint("qwen2_5_vl")).frontend
    film = zoo.video(40, 40)
    with pytest.raises(UnsupportedInputError, match="no frames"):
        frontend.layout(zoo.conversation(film), [replace(film.info, num_frames=0)])


def test_a_medium_that_decodes_to_another_size_is_refused(checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint("qwen2_5_vl"))
    assert served.encoder is not None
    told, real = zoo.image(56, 56), zoo.image(140, 56)
    (laid,) = served.frontend.layout(zoo.conversation(told), [told.info]).media
    with pytest.raises(CountMismatchError, match="laid out as 4 tokens"):
        served.encoder.process(zoo.decoded(real, [], 0), laid)


def test_text_of_generated_ids_leaves_special_tokens_out(checkpoint: Checkpoint) -> None:
    frontend = zoo.serve(checkpoint("qwen2_5_vl")).frontend
    ids = frontend.tokenizer("a red circle")["input_ids"]
    assert frontend.decode([*ids, 2]) == "a red circle"
    assert frontend.eos_token_ids == {2}


def test_what_is_kept_of_media_laid_out_is_bounded_in_bytes(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 24 << 10
    monkeypatch.setattr(sampling_plans, "PROBES_BYTES", budget)
    frontend = load_frontend(ModelSpec(id=str(checkpoint("qwen2_5_vl"))), MediaPolicy())
    gc.collect()
    before = {id(probe) for probe in probes_alive()}
    characters = 0
    for width in range(1008, 1108):
        picture = replace(zoo.image(28, 28).info, width=width, height=1008)
        (laid,) = frontend.layout(zoo.conversation(zoo.image(28, 28)), [picture]).media
        characters += laid.num_tokens * len(frontend._placeholder["image"])
    assert characters > budget
    gc.collect()
    kept = [probe for probe in probes_alive() if id(probe) not in before]
    assert kept
    assert sum(len(probe.replacement) for probe in kept) <= budget


def probes_alive() -> list[Any]:
    return [found for found in gc.get_objects() if type(found).__name__ == "Probe"]


def test_a_medium_of_the_same_facts_is_processed_once(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = load_frontend(ModelSpec(id=str(checkpoint("qwen2_5_vl"))), MediaPolicy())
    picture, calls = zoo.image(56, 56), []
    image = frontend._adapter.image
    monkeypatch.setattr(frontend._adapter, "image", lambda *given: calls.append(given) or image(*given))
    for _ in range(2):
        frontend.layout(zoo.conversation(picture), [picture.info])
    assert len(calls) == 1


OMNI = pytest.mark.parametrize("arch", ["qwen2_5_omni", "qwen3_omni_moe"])


@OMNI
def test_a_silent_video_beside_one_with_sound_keeps_its_positions(arch: str, checkpoint: Checkpoint) -> None:
    """transformers takes all videos of a prompt to have sound, or none; each is as it would be without the other."""
    served = zoo.serve(checkpoint(arch))
    silent, sounding = zoo.video(56, 56, 12, 6.0, 1), zoo.video_with_sound(60, 56, 18, 6.0, 45001, 2)

    def positions(*parts: str | zoo.Medium) -> tuple[Any, list[Any]]:
        media = [part for part in parts if isinstance(part, zoo.Medium)]
        layout = served.frontend.layout(zoo.conversation(*parts), [m.info for m in media])
        return served.language.lower(layout.token_ids, layout.media).positions, layout.media

    def shape_of(found: Any, laid: Any) -> Any:
        at = [place for start, count in laid.ranges for place in range(start, start + count)]
        return found[:, at] - found[:, at[0]].min()

    both, (first, second, sound) = positions(silent, "and", *sounding, "go")
    other, (second_first, sound_first, silent_last) = positions(*sounding, "and", silent, "go")
    alone, (silent_alone,) = positions(silent, "go")
    whole, (second_alone, sound_alone) = positions(*sounding, "go")
    for found, laid, expected, own in (
        (both, first, alone, silent_alone),
        (other, silent_last, alone, silent_alone),
        (both, second, whole, second_alone),
        (both, sound, whole, sound_alone),
        (other, second_first, whole, second_alone),
        (other, sound_first, whole, sound_alone),
    ):
        assert torch.equal(shape_of(found, laid), shape_of(expected, own))
    until = silent_alone.ranges[-1][0] + silent_alone.num_tokens + 1
    assert torch.equal(both[:, :until], alone[:, :until])
    assert torch.equal(both[:, until], both[:, until - 1] + 1)
    until = sum(sound_alone.ranges[-1]) + 2
    assert torch.equal(other[:, :until], whole[:, :until])
    assert torch.equal(other[:, until], other[:, until - 1] + 1)
    assert int(both[:, -1].max()) > int(whole[:, -1].max())


@OMNI
def test_the_sound_of_a_video_lies_between_its_frames(arch: str, checkpoint: Checkpoint) -> None:
    frontend = zoo.serve(checkpoint(arch)).frontend
    film, sound = zoo.video_with_sound(56, 56, 36, 6.0, 96000, 2)
    apart = frontend.layout(zoo.conversation(film, sound), [film.info, replace(sound.info, of_video=False)])
    laid = frontend.layout(zoo.conversation(film, sound), [film.info, sound.info])
    for one, other in zip(laid.media, apart.media, strict=True):
        assert len(one.ranges) > 2
        assert (one.num_tokens, one.work, one.host_bytes) == (other.num_tokens, other.work, other.host_bytes)
        assert one.geometry == other.geometry
    assert frontend.takes_sound_of_videos


def test_only_the_omni_models_take_the_sound_of_videos(checkpoint: Checkpoint) -> None:
    takes = {arch for arch in ("qwen2_5_vl", "qwen2_audio") if _takes_sound(checkpoint(arch))}
    assert takes == set()


def _takes_sound(folder: Path) -> bool:
    return load_frontend(ModelSpec(id=str(folder)), MediaPolicy()).takes_sound_of_videos
