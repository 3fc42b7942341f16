"""Throughput and busy time of the stages of encoding, on a separate clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mmd_api.contract.pools import Modality
from mmd_workers.basics.overtaking import MAX_OVERTAKEN
from mmd_workers.encoder.budget import ByteBudget
from mmd_workers.encoder.shares import FairShares
from mmd_workers.encoder.stages import (
    BUSY_WINDOW_SECONDS,
    EncodeStage,
    Stages,
    decoders_for,
    processors_beside,
)
from support.harness.waiting import DEADLINE_SECONDS


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


def stage(
    name: str, servers: int, clock: Clock, ends: list[float] | None = None, spare: int = 0
) -> EncodeStage:
    return EncodeStage(
        *(name, servers, lambda _, seconds: (ends if ends is not None else []).append(seconds), clock),
        spare=spare,
    )


@pytest.mark.parametrize(
    ("cores", "media_mebibytes", "decoders", "processors"),
    [
        pytest.param(1, 2048, 2, 1, id="a long video holds up nobody"),
        pytest.param(2, 2048, 2, 1, id="two cores"),
        pytest.param(6, 16384, 6, 1, id="each core decodes"),
        pytest.param(8, 16384, 8, 2, id="a processor for four decoders"),
        pytest.param(96, 2048, 2, 1, id="no more than the default budget holds"),
        pytest.param(96, 12288, 12, 3, id="no more than a larger one holds"),
        pytest.param(96, 65536, 16, 4, id="no more than media are encoded at once"),
        pytest.param(16, 16, 2, 1, id="the smallest budget"),
    ],
)
def test_stages_before_the_tower_have_servers_by_cores_and_bytes(
    cores: int, media_mebibytes: int, decoders: int, processors: int
) -> None:
    assert decoders_for(cores, media_mebibytes << 20, 16) == decoders
    assert processors_beside(decoders) == processors


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


async def in_turn(servers: int, arrivals: list[tuple[str, str, float]]) -> list[str]:
    """Names in the order in which they get a server; all but the first `servers` wait. An arrival: name, modality, seconds."""
    clock, order = Clock(), list[str]()
    decode = stage("decode", servers, clock)

    async def take(name: str, modality: str, seconds: float) -> None:
        async with decode.run(modality, 1):
            order.append(name)
            await asyncio.sleep(0)
            clock.now += seconds

    await asyncio.gather(*(take(*arrival) for arrival in arrivals))
    return order


async def test_an_image_waits_for_running_videos_but_not_for_waiting_ones() -> None:
    videos = [(f"video {number}", "video", 3.0) for number in range(6)]
    images = [(f"image {number}", "image", 1.0) for number in range(2)]
    order = await in_turn(1, [*videos, *images])
    assert order[:4] == ["video 0", "image 0", "image 1", "video 1"]


async def test_modalities_that_wait_have_a_stage_for_the_same_time() -> None:
    videos = [(f"video {number}", "video", 4.0) for number in range(4)]
    images = [(f"image {number}", "image", 1.0) for number in range(16)]
    order = await in_turn(1, [*videos, *images])
    for end in range(5, len(order)):
        seconds = {
            kind: sum(s for n, k, s in [*videos, *images] if k == kind and n in order[:end])
            for kind in ("video", "image")
        }
        assert abs(seconds["video"] - seconds["image"]) <= 4.0, order[:end]


def test_a_pause_earns_a_modality_nothing() -> None:
    shares = FairShares()
    for _ in range(100):
        assert shares.in_turn(["video"]) == ["video"]
        shares.add("video", 10.0)
    chosen = []
    for _ in range(10):
        chosen.append(shares.in_turn(["video", "image"])[0])
        shares.add(chosen[-1], 10.0)
    assert chosen.count("video") == 5


async def test_who_gives_up_waiting_takes_no_server_along() -> None:
    clock = Clock()
    decode = stage("decode", 1, clock)
    release, entered = asyncio.Event(), list[str]()

    async def take(name: str) -> None:
        async with decode.run("image", 1):
            entered.append(name)
            await release.wait()

    tasks = [asyncio.create_task(take(name)) for name in ("first", "leaves", "leaves late", "last")]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    release.set()
    while "leaves late" not in entered:
        await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert entered == ["first", "leaves late", "last"]
    async with asyncio.timeout(DEADLINE_SECONDS), decode.run("image", 1):
        entered.append("another")
    assert entered[-1] == "another"


async def test_who_is_cancelled_as_its_turn_comes_hands_it_on() -> None:
    clock = Clock()
    decode = stage("decode", 1, clock)
    entered: list[str] = []

    async def take(name: str) -> None:
        async with decode.run("image", 1):
            entered.append(name)

    async with decode.run("image", 1):
        tasks = [asyncio.create_task(take(name)) for name in ("leaves", "last")]
        await asyncio.sleep(0)
    tasks[0].cancel()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await asyncio.wait(tasks)
    assert entered == ["last"]


async def test_an_image_waits_for_the_bytes_of_only_one_video() -> None:
    budget, order = ByteBudget(100, "spec.encoder.mediaMebibytes"), list[str]()

    async def hold(name: str, modality: str, num_bytes: int) -> None:
        async with budget.hold(num_bytes, name, modality):
            order.append(name)
            await asyncio.sleep(0)

    videos = [hold(f"video {number}", "video", 60) for number in range(5)]
    images = [hold(f"image {number}", "image", 50) for number in range(2)]
    await asyncio.gather(*videos, *images)
    assert order == ["video 0", "image 0", "image 1", "video 1", "video 2", "video 3", "video 4"]
    assert budget.used_bytes == 0


@pytest.mark.parametrize("modality", ["image", "video"])
async def test_small_media_pass_a_large_one_only_so_often(modality: Modality) -> None:
    budget, got = ByteBudget(100, "spec.encoder.mediaMebibytes"), list[str]()

    async def hold(name: str, num_bytes: int, modality: Modality) -> None:
        async with budget.hold(num_bytes, name, modality):
            got.append(name)

    async with budget.hold(60, "first", "image"):
        large = asyncio.create_task(hold("large", 100, modality))
        await asyncio.sleep(0)
        smalls = [asyncio.create_task(hold("small", 40, "image")) for _ in range(3 * MAX_OVERTAKEN)]
        await asyncio.wait(smalls[:MAX_OVERTAKEN])
        await asyncio.sleep(0)
        assert got == ["small"] * MAX_OVERTAKEN
    await asyncio.wait([large, *smalls])
    assert got[MAX_OVERTAKEN] == "large"
    assert budget.used_bytes == 0


async def test_who_gives_up_waiting_for_bytes_holds_up_nobody() -> None:
    budget, got = ByteBudget(100, "spec.encoder.mediaMebibytes"), list[str]()

    async def hold(name: str, num_bytes: int) -> None:
        async with budget.hold(num_bytes, name, "video"):
            got.append(name)

    async with budget.hold(60, "first", "image"):
        large = asyncio.create_task(hold("large", 80))
        await asyncio.sleep(0)
        passing = [asyncio.create_task(hold("passing", 30)) for _ in range(MAX_OVERTAKEN)]
        await asyncio.wait(passing)
        small = asyncio.create_task(hold("small", 30))
        await asyncio.sleep(0)
        assert "small" not in got
        large.cancel()
        async with asyncio.timeout(DEADLINE_SECONDS):
            await small
    assert got == ["passing"] * MAX_OVERTAKEN + ["small"]
    assert budget.used_bytes == 0


async def test_a_modality_never_has_the_spare_servers_too() -> None:
    decode, entered, ended = stage("decode", 2, Clock(), spare=1), list[str](), asyncio.Event()

    async def take(name: str, modality: Modality) -> None:
        async with decode.run(modality, 1):
            entered.append(name)
            if modality == "video":
                await ended.wait()

    videos = [asyncio.create_task(take(f"video {number}", "video")) for number in range(4)]
    await asyncio.sleep(0)
    for number in range(3):
        async with asyncio.timeout(DEADLINE_SECONDS):
            await take(f"image {number}", "image")
    assert entered == ["video 0", "video 1", "image 0", "image 1", "image 2"]
    ended.set()
    await asyncio.wait(videos)
    assert decode._free == 3


async def test_a_stage_is_busy_at_most_all_the_time() -> None:
    clock = Clock()
    decode = stage("decode", 1, clock, spare=1)
    async with decode.run("video", 1), decode.run("image", 1):
        clock.now += BUSY_WINDOW_SECONDS
        assert decode.busy_fraction() == 1.0


async def test_a_modality_leaves_spare_bytes_to_the_others() -> None:
    budget, got = ByteBudget(100, "spec.encoder.mediaMebibytes", spare_bytes=10), list[str]()

    async def hold(name: str, num_bytes: int) -> None:
        async with budget.hold(num_bytes, name, "video"):
            got.append(name)

    async with budget.hold(60, "running", "video"):
        waiting = asyncio.create_task(hold("waiting", 40))
        for _ in range(2 * MAX_OVERTAKEN):  # it waits for its own modality, so this is no overtaking
            async with asyncio.timeout(DEADLINE_SECONDS), budget.hold(40, "image", "image"):
                assert got == []
    await waiting
    async with asyncio.timeout(DEADLINE_SECONDS):
        await hold("alone", 100)
    assert got == ["waiting", "alone"]
    assert budget.used_bytes == 0


async def test_media_that_run_long_have_had_that_time_before_they_end() -> None:
    clock = Clock()
    places = stage("pipeline", 2, clock)
    order, ended = list[str](), asyncio.Event()

    async def take(name: str, modality: str) -> None:
        async with places.run(modality, 1):
            order.append(name)
            if name == "long":
                await ended.wait()
            else:
                await asyncio.sleep(0)
                clock.now += 0.1

    tasks = [asyncio.create_task(take("long", "video"))]
    await asyncio.sleep(0)
    clock.now += 10.0
    names = [("image 0", "image"), ("video 1", "video"), ("image 1", "image"), ("image 2", "image")]
    tasks += [asyncio.create_task(take(*name)) for name in names]
    await asyncio.wait(tasks[1:])
    assert order == ["long", "image 0", "image 1", "image 2", "video 1"]
    ended.set()
    await asyncio.wait(tasks)
