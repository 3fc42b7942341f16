"""Searches for frames of videos take turns, so that probes and shorter ones never wait for all of them, and what they find is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from mmd_api.contract.errors import OverloadedError
from mmd_api.spec.media import MediaPolicy, VideoPolicy
from mmd_workers.gateway.content.parts import MediaSource
from mmd_workers.gateway.intake import frame_search
from mmd_workers.gateway.intake.frame_search import FrameSearch, default_choice
from mmd_workers.media.choice import NO_CHOICE, FoundFrames, SamplingChoice
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.probe import probe
from mmd_workers.media.sandbox import DecodePool

FILES = Path(__file__).parents[2] / "media" / "files"
VIDEOS = ("scenes.mp4", "scenes.avi", "scenes-variable.webm")
SCENES, KEYS = SamplingChoice(sampling="scene_changes"), SamplingChoice(sampling="keyframes")


def video(name: str) -> tuple[bytes, MediumInfo]:
    data = (FILES / name).read_bytes()
    return data, probe(data, "video", MediaPolicy())


class Watched(DecodePool):
    """A sandbox that counts its searches."""

    def __init__(self, processes: int) -> None:
        super().__init__(processes, 60)
        self.under_way: list[str] = []
        self.most: dict[str, int] = {}
        self.all = 0

    async def find_frames(self, data: bytes, info: MediumInfo, choice: SamplingChoice) -> FoundFrames:
        kind = str(choice.sampling)
        self.all += 1
        self.under_way.append(kind)
        self.most[kind] = max(self.most.get(kind, 0), self.under_way.count(kind))
        try:
            return await super().find_frames(data, info, choice)
        finally:
            self.under_way.remove(kind)


@pytest_asyncio.fixture
async def sandbox() -> AsyncIterator[Watched]:
    sandbox = Watched(2)
    await sandbox.start()
    yield sandbox
    await sandbox.close()


async def found(search: FrameSearch, name: str, choice: SamplingChoice, seconds: float = 60) -> list[int]:
    resolved = await search.resolved(
        *video(name), choice, MediaSource("video", "messages[0].content[0].video_url.url", ""), seconds
    )
    return [one.index for one in resolved.found.frames] if resolved.found else []


async def test_scenes_are_searched_in_one_process_fewer_than_there_are(sandbox: Watched) -> None:
    search = FrameSearch(sandbox)
    scenes = [found(search, name, SCENES) for name in VIDEOS]
    keys = [found(search, name, KEYS) for name in VIDEOS]
    answers = await asyncio.gather(*scenes, *keys)
    assert answers[:3] == [[0, 20, 40, 60]] * 3
    assert sandbox.most == {"scene_changes": 1, "keyframes": 3}


async def test_scenes_of_the_newest_videos_are_kept(
    sandbox: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_search, "KEPT_VIDEOS", 2)
    search = FrameSearch(sandbox)
    for name, searches in (
        (VIDEOS[0], 1), (VIDEOS[1], 2), (VIDEOS[0], 2), (VIDEOS[2], 3), (VIDEOS[0], 3), (VIDEOS[1], 4),
    ):  # fmt: skip
        assert await found(search, name, SCENES) == [0, 20, 40, 60]
        assert sandbox.all == searches
    await found(search, VIDEOS[0], KEYS)
    assert sandbox.all == 5, "key frames are other frames"


async def test_who_gets_no_turn_in_time_is_asked_to_come_again(sandbox: Watched) -> None:
    search = FrameSearch(sandbox)
    slots = [sandbox._free.get_nowait() for _ in range(sandbox.processes)]
    with pytest.raises(OverloadedError, match="were not found within 0 s"):
        await found(search, VIDEOS[0], SCENES, seconds=0.01)
    for slot in slots:
        sandbox._free.put_nowait(slot)
    assert await found(search, VIDEOS[0], SCENES) == [0, 20, 40, 60], "and its turn is free again"


async def test_nothing_is_searched_that_the_header_can_tell(sandbox: Watched) -> None:
    search = FrameSearch(sandbox)
    for choice in (NO_CHOICE, SamplingChoice(num_frames=4), default_choice(VideoPolicy())):
        assert await found(search, VIDEOS[0], choice) == []
    assert sandbox.all == 0
