"""Finds the frames that a request chooses by the content of a video. Independent of prompts.

The search runs in the sandbox. Scene searches use all of its processes but one, so that probes never wait for them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import replace

from mmd_api.contract.errors import InvalidValueError, OverloadedError
from mmd_api.spec.media import VideoPolicy
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.content.parts import MediaSource
from mmd_workers.media.choice import FoundFrames, FrameSampling, SamplingChoice
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.sandbox import DecodePool

KEPT_VIDEOS = 256
"""Videos whose scene changes are kept, at most 25 KiB each. A conversation resends its video every turn, and each search decodes it."""
_SAMPLINGS: dict[str, FrameSampling] = {
    "Uniform": "uniform",
    "KeyFrames": "keyframes",
    "SceneChanges": "scene_changes",
}


def default_choice(policy: VideoPolicy) -> SamplingChoice:
    """The choice for videos for which a request chooses nothing."""
    return SamplingChoice(sampling=_SAMPLINGS[policy.sampling])


class FrameSearch:
    """Finds the frames of choices that depend on the file. Not thread-safe."""

    def __init__(self, sandbox: DecodePool) -> None:
        self._sandbox = sandbox
        self._scene_turns = asyncio.Semaphore(max(1, sandbox.processes - 1))
        self._scenes: OrderedDict[str, FoundFrames] = OrderedDict()  # by digest, the newest last

    async def resolved(
        self,
        data: bytes,
        info: MediumInfo,
        choice: SamplingChoice,
        source: MediaSource,
        timeout_seconds: float,
    ) -> SamplingChoice:
        """The choice with the frames it selects in this medium, if it selects by content.

        Raises:
            ApiError: a timestamp is beyond the end of the video; names the field.
            BadMediaError, OverloadedError: the frames cannot be found, or not in time.
        """
        if info.modality != "video" or not choice.searches:
            return choice
        _check_timestamps(info, choice, source)
        by_scenes = choice.sampling == "scene_changes"
        if by_scenes and info.digest in self._scenes:
            self._scenes.move_to_end(info.digest)
            return replace(choice, found=self._scenes[info.digest])
        try:
            async with asyncio.timeout(timeout_seconds), self._scene_turns if by_scenes else nullcontext():
                frames = await self._sandbox.find_frames(data, info, choice)
        except TimeoutError as error:
            raise OverloadedError(
                f"the frames of this video were not found within {timeout_seconds:.0f} s, because others are searched; retry later, or omit sampling"
            ) from error
        if by_scenes:
            self._scenes[info.digest] = frames
            if len(self._scenes) > KEPT_VIDEOS:
                self._scenes.popitem(last=False)
        return replace(choice, found=frames)


def _check_timestamps(info: MediumInfo, choice: SamplingChoice, source: MediaSource) -> None:
    for number, seconds in enumerate(choice.timestamps or ()):
        if seconds > info.duration_seconds:
            param = f"{source.part}.timestamps[{number}]"
            beyond = InvalidValueError(
                f"{param}: {seconds:g} s is beyond the end of the video, which lasts {info.duration_seconds:.3f} s; request seconds within it"
            )
            raise ApiError(beyond, param=param)
