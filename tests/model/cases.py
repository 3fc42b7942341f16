"""The prompts that every architecture is asked, with the media that it takes."""

from __future__ import annotations

from collections.abc import Callable

from mmd_api.spec.media import MediaPolicy
from support.oracles import model_zoo as zoo

Case = Callable[[], list["str | zoo.Medium"]]


CASES: dict[str, tuple[set[str], Case]] = {
    "text": (set(), lambda: ["tell me what you know"]),
    "image": ({"image"}, lambda: [zoo.image(100, 64, 1), "tell me what this is"]),
    "video": ({"video"}, lambda: [zoo.video(64, 80, 12, 6.0, 2), "tell me what moves"]),
    "long video": ({"video"}, lambda: [zoo.video(40, 40, 60, 6.0, 2), "go"]),
    "audio": ({"audio"}, lambda: [zoo.audio(20001, 3), "tell me what sounds"]),
    "two images": (
        {"image"},
        lambda: [zoo.image(60, 60, 4), "and then", zoo.image(150, 40, 5), "tell me both"],
    ),
    "image and video": (
        {"image", "video"},
        lambda: [zoo.image(80, 60, 6), "then", zoo.video(56, 56, 8, 4.0, 7), "tell"],
    ),
    "two sounds": ({"audio"}, lambda: [zoo.audio(9600, 8), "then", zoo.audio(32000, 9), "tell me both"]),
    "video with sound": (
        {"video", "audio"},
        lambda: [*zoo.video_with_sound(64, 80, 12, 6.0, 30001, 2), "tell me what moves and sounds"],
    ),
    "video with a shorter sound": (
        {"video", "audio"},
        lambda: [*zoo.video_with_sound(84, 56, 12, 6.0, 4801, 3), "go"],
    ),
    "video with sound, another rate": (
        {"video", "audio"},
        lambda: [*zoo.video_with_sound(56, 84, 51, 3.7, 200_000, 5), "tell me what moves and sounds"],
    ),
    "everything, videos with sound": (
        {"image", "video", "audio"},
        lambda: [
            zoo.image(80, 60, 6),
            "x",
            *zoo.video_with_sound(56, 84, 30, 6.0, 81000, 7),
            zoo.audio(81000, 8),
            "y",
            zoo.image(30, 90, 6),
            *zoo.video_with_sound(60, 56, 18, 6.0, 81000, 9),
            "tell me all",
        ],
    ),
    "everything": (
        {"image", "video", "audio"},
        lambda: [
            zoo.audio(9600, 8),
            "x",
            zoo.video(56, 84, 7, 5.0, 7),
            "y",
            zoo.image(30, 90, 6),
            "tell me all",
        ],
    ),
}


# What transformers' own processors or models refuse, or make depend on the other media of a request (qwen3_omni_moe pads
# sounds to the longest before the spectrum): there is nothing to compare with.
ALONE = {
    "audioflamingo3": {"two sounds"},
    "paligemma": {"text"},
    "qwen3_omni_moe": {"two sounds"},
    "smolvlm": {"image and video"},
}


ORACLE = [
    (arch, name)
    for arch, takes in zoo.MODALITIES.items()
    for name, (needs, _) in CASES.items()
    if needs <= set(takes) and name not in ALONE.get(arch, ())
]


def small_media() -> MediaPolicy:
    """Limits such that the largest media are run in a moment."""
    policy = MediaPolicy()
    return MediaPolicy(
        image=policy.image.model_copy(update={"max_pixels": 500_000}),
        video=policy.video.model_copy(update={"max_frames": 16}),
        audio=policy.audio.model_copy(update={"max_duration_seconds": 30, "too_long": "Truncate"}),
    )
