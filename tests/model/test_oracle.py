"""The split model answers as the whole one: greedy tokens equal `generate`, for every architecture and medium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import model_zoo as zoo
import pytest
import torch

pytestmark = pytest.mark.models

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


@pytest.mark.parametrize(("arch", "case"), ORACLE, ids=[f"{a}-{c}" for a, c in ORACLE])
def test_greedy_tokens_of_the_split_model_equal_generate(
    arch: str, case: str, checkpoint: Callable[[str], Path]
) -> None:
    served = zoo.serve(checkpoint(arch))
    parts = CASES[case][1]()
    messages = zoo.conversation(*parts)
    media = [p for p in parts if isinstance(p, zoo.Medium)]

    layout = served.frontend.layout(messages, [m.info for m in media])
    inputs = zoo.hf_inputs(served, messages, media, layout)
    assert layout.token_ids == inputs["input_ids"][0].tolist()

    expected = zoo.generate(served, inputs)
    assert zoo.greedy(served, zoo.lowered(served, layout, media)) == expected
    assert len(set(expected)) > 2, "a model that repeats itself proves nothing"

    carried = expected[:5]  # a sequence that moved here after five tokens
    resumed = zoo.lowered(served, layout, media, carried)
    assert carried + zoo.greedy(served, resumed, zoo.NEW_TOKENS - 5) == expected
    assert torch.equal(
        resumed.positions[:, : len(layout.token_ids)], zoo.lowered(served, layout, media).positions
    )
