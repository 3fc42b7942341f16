"""Which prompts a request gets when its media cannot be encoded, with a model that exists only as numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mmd_api.contract.errors import ContextLengthError
from mmd_workers.gateway.intake.fallback import MOST_HALVINGS, Fallback, Policy, unread
from mmd_workers.gateway.intake.prompt_content import PromptContent
from mmd_workers.media.choice import NO_CHOICE, SamplingChoice
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.reduction import MediaAmount
from mmd_workers.model.prompt import MediumLayout, PromptLayout, SamplingPlan

FILM = MediumInfo("video", "film", 1, "mp4", num_frames=32)
PICTURE = MediumInfo("image", "picture", 1, "png")
MESSAGES = [
    {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "and"}, {"type": "image"}]},
    {"role": "user", "content": [{"type": "image"}]},
]


def amounts(infos: Sequence[MediumInfo], choices: Sequence[SamplingChoice]) -> list[MediaAmount]:
    """32 frames, or 4096 pixels, or less where the choice says so."""
    pairs = zip(infos, choices, strict=True)
    return [
        MediaAmount(frames=min(32, choice.max_frames or 32))
        if info.modality == "video"
        else MediaAmount(pixels=min(4096, choice.max_pixels or 4096), least_pixels=64)
        for info, choice in pairs
    ]


class Model:
    """Lays prompts out as their content; an id of a feature names the file and its amount."""

    def __init__(self, *media: MediumInfo, most_replaced: int = 9) -> None:
        choices = [NO_CHOICE] * len(media)
        self.content = PromptContent(MESSAGES, media, choices, choices)
        self.laid: list[PromptContent] = []
        self.most_replaced = most_replaced

    def ids(self, content: PromptContent) -> list[str]:
        made = amounts(content.infos, content.choices)
        return [f"{i.digest} {a.frames or a.pixels}" for i, a in zip(content.infos, made, strict=True)]

    async def lay_out(self, content: PromptContent) -> tuple[PromptContent, list[str]]:
        await asyncio.sleep(0)
        if content.replaced_media > self.most_replaced:
            raise ContextLengthError("too long")
        self.laid.append(content)
        return content, self.ids(content)

    def fallback(self, policy: Policy) -> Fallback[PromptContent]:
        return Fallback(policy, self.content, self.ids(self.content), amounts, self.lay_out)


@pytest.mark.parametrize(
    ("policy", "failures", "choices"),
    [
        ("DegradeFrames", ["film 32"], [SamplingChoice(max_frames=16), NO_CHOICE]),
        ("DegradeFrames", ["film 32", "film 16"], [SamplingChoice(max_frames=8), NO_CHOICE]),
        ("DegradeFrames", ["film 32", "film 16", "film 8"], None),
        ("DegradeFrames", ["picture 4096"], None),
        ("DegradeResolution", ["picture 4096"], [NO_CHOICE, SamplingChoice(max_pixels=2048)]),
        ("DegradeResolution", ["picture 4096"] * 2, [NO_CHOICE, SamplingChoice(max_pixels=2048)]),
        ("DegradeResolution", ["picture 4096", "film 32"], None),
        ("DegradeResolution", ["another"], None),
        ("TextOnly", ["film 32"], [NO_CHOICE]),
        ("TextOnly", ["film 32", "picture 4096"], []),
    ],
)
async def test_a_policy_leaves_out_what_it_says_and_no_more(
    policy: Policy, failures: list[str], choices: list[SamplingChoice] | None
) -> None:
    model = Model(FILM, PICTURE)
    fallback = model.fallback(policy)
    for failure in failures:
        found = await fallback.without(failure)
    assert (None if found is None else list(found.choices)) == choices


async def test_every_part_with_a_file_that_failed_has_less_of_it() -> None:
    found = await Model(FILM, PICTURE, PICTURE).fallback("DegradeResolution").without("picture 4096")
    assert found is not None
    assert [choice.max_pixels for choice in found.choices] == [None, 2048, 2048]


async def test_text_replaces_each_failed_part_and_the_request_is_unchanged() -> None:
    model = Model(FILM, PICTURE, PICTURE)
    fallback = model.fallback("TextOnly")
    found = await fallback.without("picture 4096")
    assert found is not None
    sentence = {"type": "text", "text": unread("image")}
    assert [message["content"] for message in found.messages] == [
        [{"type": "video"}, {"type": "text", "text": "and"}, sentence],
        [sentence],
    ]
    assert (list(found.infos), found.replaced_media) == ([FILM], 2)
    assert model.content.messages[0]["content"][2] == {"type": "image"}
    last = await fallback.without("film 32")
    assert last is not None
    assert last.messages[0]["content"][0] == {"type": "text", "text": unread("video")}
    assert last.replaced_media == 3


async def test_text_replaces_a_video_with_its_sound_or_a_sound_alone() -> None:
    film, sound = replace(FILM, has_sound=True), replace(PICTURE, modality="audio", of_video=True)
    model = Model(film, sound, PICTURE, FILM)
    parts = [{"type": "video"}, {"type": "audio"}, {"type": "text", "text": "and"}, {"type": "image"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "user", "content": [{"type": "video"}]},
    ]
    content = replace(model.content, messages=messages)
    both = content.with_text(0, "gone")
    gone = {"type": "text", "text": "gone"}
    assert both.messages[0]["content"] == [gone, *parts[2:]]
    assert both.messages[1] == messages[1]
    assert (both.infos, both.replaced_media) == ([PICTURE, FILM], 2)
    alone = content.with_text(1, "gone")
    assert alone.messages[0]["content"] == [parts[0], gone, *parts[2:]]
    assert (alone.infos, alone.replaced_media) == ([film, PICTURE, FILM], 1)


async def test_a_video_that_became_text_gives_up_its_sound() -> None:
    film, sound = replace(FILM, has_sound=True), replace(PICTURE, digest="sound", of_video=True)
    fallback = Model(film, sound, PICTURE).fallback("TextOnly")
    found = await fallback.without("film 32")
    assert found is not None
    assert await fallback.without("sound 4096") is found


async def test_answers_that_fail_on_the_same_medium_get_the_same_prompt() -> None:
    model = Model(FILM)
    fallback = model.fallback("DegradeFrames")
    found = await asyncio.gather(*(fallback.without("film 32") for _ in range(4)))
    assert all(one is model.laid[0] for one in found)
    assert len(model.laid) == 1


async def test_a_prompt_that_does_not_fit_with_the_sentence_is_none() -> None:
    fallback = Model(FILM, PICTURE, most_replaced=1).fallback("TextOnly")
    assert await fallback.without("film 32") is not None
    assert await fallback.without("picture 4096") is None
    assert await fallback.without("picture 4096") is None, "also for another answer to the request"


def test_halvings_are_bounded() -> None:
    assert MOST_HALVINGS == 2


def test_a_layout_reports_what_is_missing_by_all_causes() -> None:
    content = PromptContent(
        [], [FILM, PICTURE], [NO_CHOICE] * 2, [NO_CHOICE, SamplingChoice(max_pixels=1024)]
    )
    plan = SamplingPlan(frame_indices=list(range(4)))
    media = [
        MediumLayout("video", 8, [(0, 8)], {}, plan, 1, omitted_frames=4),
        MediumLayout("image", 8, [(8, 8)], {}, SamplingPlan(), 1),
    ]
    layout = PromptLayout([0] * 16, media, degraded_by=frozenset({"context"}))
    asked, taken = (amounts(content.infos, one) for one in (content.asked, content.choices))
    found = content.reported(layout, asked, taken, "load")
    assert [(one.omitted_frames, one.omitted_pixels) for one in found.media] == [(28, 0), (0, 3072)]
    assert found.degraded_by == {"context", "load"}
    unchanged = replace(content, choices=content.asked)
    assert unchanged.reported(layout, asked, asked, "load").degraded_by == {"context"}
    assert content.sampled_as(found).choices == [
        SamplingChoice(max_frames=4),
        SamplingChoice(max_pixels=1024),
    ]
