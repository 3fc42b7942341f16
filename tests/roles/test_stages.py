"""Throughput and busy time of the stages of encoding, on a separate clock."""

from __future__ import annotations

from typing import Any

import pytest

from mmd_workers.encoder.stages import BUSY_WINDOW_SECONDS, EncodeStage, Stages


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def busy(
    stage: EncodeStage, clock: Clock, seconds: float, modality: str = "video", work: int = 100
) -> None:
    async with stage.run(modality, work):
        clock.now += seconds


def stage(name: str, servers: int, clock: Clock, ends: list[float] | None = None) -> EncodeStage:
    return EncodeStage(
        name, servers, lambda _, seconds: (ends if ends is not None else []).append(seconds), clock
    )


async def test_the_slowest_stage_of_a_modality_is_its_throughput() -> None:
    clock, stages = Clock(), Stages(lambda *_: None)
    decode, tower = stage("decode", 2, clock), stage("tower", 1, clock)
    stages.all += [decode, tower]
    await busy(decode, clock, 4.0)
    await busy(tower, clock, 0.5)
    await busy(decode, clock, 0.001, "image")
    await busy(tower, clock, 0.1, "image")
    assert stages.work_per_second() == pytest.approx({"video": 2 * 100 / 4.0, "image": 100 / 0.1})


async def test_busy_time_is_that_of_the_busiest_stage_over_all_its_servers() -> None:
    clock, stages = Clock(), Stages(lambda *_: None)
    decode, tower = stage("decode", 2, clock), stage("tower", 1, clock)
    stages.all += [decode, tower]
    await busy(decode, clock, 4.0)
    assert stages.busy_fraction() == 4.0 / (2 * BUSY_WINDOW_SECONDS)
    await busy(tower, clock, 3.0)
    assert stages.busy_fraction() == 3.0 / BUSY_WINDOW_SECONDS
    clock.now += 8.0
    assert stages.busy_fraction() == 2.0 / BUSY_WINDOW_SECONDS


async def test_a_run_in_progress_counts_as_busy_before_it_ends() -> None:
    clock = Clock()
    tower = stage("tower", 1, clock)
    async with tower.run("video", 100):
        clock.now += 25.0
        assert tower.busy_fraction() == 1.0
    clock.now += 5.0
    assert tower.busy_fraction() == 0.5


async def test_a_run_that_fails_is_busy_time_without_throughput() -> None:
    clock, ends = Clock(), []  # type: ignore[var-annotated]
    decode = stage("decode", 1, clock, ends)
    try:
        async with decode.run("video", 100):
            clock.now += 2.0
            raise ValueError
    except ValueError:
        pass
    assert decode.work_per_second == {}
    assert ends == [2.0]
    assert decode.busy_fraction() == 2.0 / BUSY_WINDOW_SECONDS


async def test_throughput_follows_a_change_smoothly() -> None:
    clock: Any = Clock()
    tower = stage("tower", 1, clock)
    await busy(tower, clock, 1.0)
    await busy(tower, clock, 2.0)
    assert tower.work_per_second == {"video": 100 + 0.2 * (50 - 100)}
