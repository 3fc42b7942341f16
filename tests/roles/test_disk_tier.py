"""Features on disk: found again by another process, never damaged ones, within the budget, and off while the disk fails."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mmd_workers.features import disk
from mmd_workers.features.cache import FeatureCache
from mmd_workers.features.disk import DiskTier
from mmd_workers.features.held import HeldFeatures, feature_identity
from mmd_workers.features.tensors import buffers_of, feature_of
from mmd_workers.model.prompt import Feature
from mmd_workers.observe.metrics import Metrics
from support.harness.waiting import until

BUDGET = 1 << 20
ROWS, WIDTH = 64, 16
SIZE = 2 * ROWS * WIDTH
ON_DISK = 4096  # with its header


def feature(value: float = 1.0) -> Feature:
    return Feature("image", {"embeddings": torch.full((ROWS, WIDTH), value, dtype=torch.bfloat16)})


class Tier:
    """A tier of its own process, with what it reports and counts."""

    def __init__(self, folder: Path, revision: str = "r1", budget: int = BUDGET) -> None:
        self.held, self.metrics = HeldFeatures(), Metrics()
        self.disk = DiskTier(folder, revision, budget, self.held, self.metrics)

    def count(self, outcome: str) -> float:
        value: float = self.metrics.disk_features.labels(outcome)._value.get()
        return value

    def reports(self, feature_id: str) -> bool:
        return feature_identity(feature_id) in self.held.changes

    async def keep(self, *names: str) -> None:
        before = self.count("written")
        for n, name in enumerate(names):
            self.disk.keep(name, feature(float(n)))
            await until(lambda n=n: self.count("written") == before + n + 1)  # type: ignore[misc]

    def is_empty(self) -> bool:
        one = self.disk
        return not (one._files or one._waiting or one.used_bytes or one.waiting_bytes or self.held._places)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of one pod, in a volume."""
    made = tmp_path / "pod-0"
    made.mkdir()
    return made


@asynccontextmanager
async def tier(folder: Path, revision: str = "r1", budget: int = BUDGET) -> AsyncIterator[Tier]:
    made = Tier(folder, revision, budget)
    running = asyncio.create_task(made.disk.run())
    await until(lambda: made.disk.is_on or running.done())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    made.disk.close()


async def test_a_feature_is_read_as_it_was_written_by_an_earlier_process(folder: Path) -> None:
    received = feature_of("video", [header for header, _ in two_tensors()], joined())
    async with tier(folder) as first:
        first.disk.keep("received", received)
        await until(lambda: first.count("written") == 1)
    async with tier(folder) as second:
        assert second.reports("received")
        found = await second.disk.read("received")
        assert found is not None
        assert found.modality == "video"
        assert found.tensors.keys() == received.tensors.keys()
        for name, tensor in received.tensors.items():
            assert found.tensors[name].dtype == tensor.dtype
            assert torch.equal(found.tensors[name], tensor)
        assert await second.disk.read("unknown") is None
        lookups = second.metrics.cache
        assert [lookups.labels("disk", end)._value.get() for end in ("hit", "miss")] == [1, 1]


def two_tensors() -> list:  # type: ignore[type-arg]
    both = {"embeddings": torch.rand(4, 8), "deepstack.0": torch.rand(4, 8).to(torch.bfloat16)}
    return buffers_of(Feature("video", both))


def joined() -> bytearray:
    """As it comes over the wire: tensors of one feature in one buffer."""
    return bytearray(b"".join(bytes(data) for _, data in two_tensors()))


@pytest.mark.parametrize(
    "damage", ["cut", "flipped", "empty", "of another feature", "a list", "of no format"]
)
async def test_a_damaged_file_is_a_miss_and_removed(folder: Path, damage: str) -> None:
    async with tier(folder) as made:
        await made.keep("a", "b")
        (file,) = folder.glob("*/a.safetensors")
        data = file.read_bytes()
        file.write_bytes(
            {
                "cut": data[:-1],
                "flipped": data[:-1] + bytes([data[-1] ^ 1]),
                "empty": b"",
                "of another feature": file.with_name("b.safetensors").read_bytes(),
                "a list": (2).to_bytes(8, "little") + b"[]",
                "of no format": bytes(range(256)) * 9,
            }[damage]
        )
        assert await made.disk.read("a") is None
        assert not file.exists()
        assert "a" not in made.disk
        assert not made.reports("a")
        assert made.count("damaged") == 1
        assert made.disk.is_on
        assert await made.disk.read("b") is not None


async def test_a_file_that_somebody_removed_is_a_miss(folder: Path) -> None:
    async with tier(folder) as made:
        await made.keep("a")
        next(folder.glob("*/a.*")).unlink()
        assert await made.disk.read("a") is None
        assert made.is_empty()
        assert made.disk.is_on


async def test_a_folder_belongs_to_one_process(folder: Path) -> None:
    async with tier(folder) as first:
        await first.keep("a")
        second = Tier(folder)
        running = asyncio.create_task(second.disk.run())
        await until(lambda: second.count("failed") == 1)
        running.cancel()
        assert second.is_empty()
        assert await first.disk.read("a") is not None


async def test_a_new_revision_clears_gone_pods_files_from_a_shared_volume(
    tmp_path: Path,
) -> None:
    async with tier(tmp_path / "old-0", "r1") as gone:
        await gone.keep("a")
    async with tier(tmp_path / "old-1", "r1") as alive:
        await alive.keep("b")
        async with tier(tmp_path / "new-0", "r2"), tier(tmp_path / "old-2", "r1"):
            assert not (tmp_path / "old-0").exists()
            assert (tmp_path / "new-0" / "features-r2").exists()
            assert await alive.disk.read("b") is not None


async def test_data_of_others_on_a_claim_is_left_alone(tmp_path: Path) -> None:
    for made in (tmp_path / "old-0", tmp_path / "elsewhere" / "old-0"):
        async with tier(made) as gone:
            await gone.keep("a")
    theirs = tmp_path / "ml-team" / "features-2024"
    theirs.mkdir(parents=True)
    (theirs / "data.parquet").write_text("precious")
    (tmp_path / "old-0" / "features-linked").symlink_to(theirs)
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere" / "old-0")
    async with tier(tmp_path / "new-0", "r2") as new:
        assert new.disk.is_on
        assert (theirs / "data.parquet").read_text() == "precious"
        assert not (tmp_path / "ml-team" / disk.LOCK).exists()
        assert not (tmp_path / "old-0" / "features-r1").exists()
        assert list(tmp_path.glob("elsewhere/old-0/*/a.*")), "of another deployment"


async def test_an_unremovable_folder_is_reported_once_and_the_tier_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "OFF_SECONDS", 0.02)
    (folder.parent / "broken" / disk.LOCK).mkdir(parents=True)
    async with tier(folder) as made:
        made.disk._turn_off(OSError("for a moment"))
        await until(lambda: made.disk.is_on)
        (warning,) = [one for one in caplog.records if "cannot be removed" in one.message]
        assert "folder broken" in warning.message


async def test_pods_of_this_revision_may_come_back_until_the_disk_is_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "OFF_SECONDS", 0.02)
    async with tier(folder.parent / "gone-0") as gone:
        await gone.keep("a")
    async with tier(folder) as made:
        assert list(folder.parent.glob("gone-0/*/a.*"))
        with no_file_larger_than(100):
            made.disk.keep("b", feature())
            await until(lambda: made.count("failed") == 1)
        await until(lambda: made.disk.is_on)
        assert list(folder.parent.glob("gone-0/*/a.*")), "it was another error"
        made.disk._turn_off(OSError(errno.ENOSPC, "No space left on device"))
        await until(lambda: made.disk.is_on)
        assert not (folder.parent / "gone-0").exists()


async def test_what_gone_pods_have_left_is_removed_before_anything_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is full, nothing could be made before."""
    async with tier(folder.parent / "gone-0", "r0") as gone:
        await gone.keep("a")
    make = disk._make

    def on_a_full_disk(path: Path) -> None:
        if list(folder.parent.glob("gone-0/features-*")):
            raise OSError(errno.ENOSPC, "No space left on device")
        make(path)

    monkeypatch.setattr(disk, "_make", on_a_full_disk)
    async with tier(folder) as made:
        assert made.count("failed") == 0
        assert made.disk.is_on


async def test_a_lock_that_comes_late_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "WRITE_SECONDS", 0.05)
    monkeypatch.setattr(disk, "OFF_SECONDS", 0.02)
    lock = disk.lock

    def late(path: Path) -> int:
        time.sleep(0.2)
        return lock(path)

    monkeypatch.setattr(disk, "lock", late)
    async with tier(folder) as made:
        assert made.disk.is_on
        assert made.count("failed") == 0


async def test_a_disk_that_fails_while_making_room_at_start_stays_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tier(folder) as first:
        await first.keep("a", "b")
    made = Tier(folder, budget=ON_DISK)
    (run, failed) = made.disk._run, asyncio.Event()

    async def failing(threads: ThreadPoolExecutor, work: Any, seconds: float | None) -> Any:
        if seconds is not None:  # to remove a file
            failed.set()
            raise OSError("broken")
        return await run(threads, work, seconds)

    monkeypatch.setattr(made.disk, "_run", failing)
    await made.disk._find()
    assert failed.is_set()
    assert not made.disk.is_on
    assert made.is_empty()
    made.disk.close()


async def test_half_written_files_and_other_revisions_are_removed_at_start(
    folder: Path,
) -> None:
    async with tier(folder, "r1") as first:
        await first.keep("a")
    of_revision = folder / "features-r1"
    (of_revision / "b.part").write_bytes(b"half")
    (of_revision / "what is this.safetensors").write_bytes(b"")
    (folder / "not-ours").write_text("stays")
    async with tier(folder, "r1"):
        assert [file.name for file in of_revision.iterdir()] == ["a.safetensors"]
    async with tier(folder, "r2") as other:
        assert other.is_empty()
        assert sorted(file.name for file in folder.iterdir()) == ["features-r2", disk.LOCK, "not-ours"]


async def test_a_file_of_another_revision_under_this_ones_name_is_a_miss(folder: Path) -> None:
    async with tier(folder, "r1") as first:
        await first.keep("a")
    (folder / "features-r1").rename(folder / "features-r2")
    async with tier(folder, "r2") as second:
        assert await second.disk.read("a") is None


async def test_the_disk_budget_keeps_recently_read_features_across_a_restart(folder: Path) -> None:
    async with tier(folder, budget=3 * ON_DISK) as first:
        await first.keep("a", "b", "c")
        assert first.disk.used_bytes == 3 * ON_DISK
        assert await first.disk.read("a") is not None
        await first.keep("d")
        assert [name for name in "abcd" if name in first.disk] == ["a", "c", "d"]
        assert not first.reports("b")
        assert len(list(folder.glob("*/*"))) == 3
    async with tier(folder, budget=2 * ON_DISK) as second:
        assert second.disk.used_bytes == 2 * ON_DISK
        assert len(list(folder.glob("*/*"))) == 2
        assert "c" not in second.disk, "read and written before the others"


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_disk_that_takes_no_more_turns_off_and_comes_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "OFF_SECONDS", 0.1)
    async with tier(folder) as made:
        await made.keep("a")
        with no_file_larger_than(100):
            made.disk.keep("b", feature())
            made.disk.keep("c", feature())
            await until(lambda: made.count("failed") == 1)
            assert made.is_empty()
            assert await made.disk.read("a") is None, "a miss, not an error"
            await until(lambda: made.disk.is_on)
        (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
        assert "spec.encoder.cache.disk is off" in warning.message
        assert "free space" in warning.message
        assert not list(folder.glob("*/*.part"))
        assert await made.disk.read("a") is not None
        await made.keep("b")


async def test_a_disk_that_cannot_be_read_is_off(folder: Path) -> None:
    async with tier(folder) as made:
        await made.keep("a", "b")
        file = next(folder.glob("*/a.*"))
        file.unlink()
        file.mkdir()
        assert await made.disk.read("a") is None
        assert made.is_empty()
        assert made.metrics.disk_off._value.get() == 1
        made.disk.keep("c", feature())
        assert made.is_empty(), "nothing is kept for a disk that is off"


async def test_a_disk_that_hangs_is_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr(disk, "READ_SECONDS", 0.1)
    monkeypatch.setattr(disk, "load", lambda *_: ends.wait(30))
    async with tier(folder) as made:
        await made.keep("a")
        assert await made.disk.read("a") is None
        assert not made.disk.is_on
        ends.set()


async def test_a_folder_that_cannot_be_made_leaves_the_tier_off(folder: Path) -> None:
    (folder / "file").write_text("")
    made = Tier(folder / "file" / "below")
    running = asyncio.create_task(made.disk.run())
    await until(lambda: made.count("failed") == 1)
    assert not running.done()
    running.cancel()


async def test_what_waits_to_be_written_is_bounded_and_can_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MOST_WAITING_BYTES", 2 * SIZE)
    made = Tier(folder)
    made.disk.is_on = True  # and nobody writes
    for name in "abc":
        made.disk.keep(name, feature())
    assert made.disk.waiting_bytes == 2 * SIZE
    assert made.count("dropped") == 1
    assert await made.disk.read("b") is not None
    assert "c" not in made.disk


async def test_one_feature_larger_than_what_may_wait_is_written_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MOST_WAITING_BYTES", SIZE - 1)
    async with tier(folder) as made:
        made.disk.keep("a", feature())
        made.disk.keep("b", feature())
        assert made.count("dropped") == 1
        await until(lambda: made.count("written") == 1)
        assert await made.disk.read("a") is not None


async def test_a_feature_larger_than_the_budget_is_counted_as_too_large(folder: Path) -> None:
    async with tier(folder, budget=ON_DISK) as made:
        made.disk.keep("above-the-budget", feature_of_bytes(ON_DISK + 2))
        assert made.count("too_large") == 1
        made.disk.keep("with-its-header", feature_of_bytes(ON_DISK))
        await until(lambda: made.count("too_large") == 2)
        assert made.is_empty()


def feature_of_bytes(num_bytes: int) -> Feature:
    return Feature("image", {"embeddings": torch.zeros(1, num_bytes // 2, dtype=torch.bfloat16)})


async def test_the_number_of_features_is_bounded_and_the_newest_are_reported_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tier(folder) as first:
        await first.keep("a", "b", "c", "d")
    monkeypatch.setattr(disk, "MOST_FILES", 3)
    async with tier(folder) as second:
        assert [name for name in "abcd" if name in second.disk] == ["b", "c", "d"]
        added = second.held.changes.take(2).added
        assert added == [feature_identity(name) for name in "dc"]
        await second.keep("e")
        assert [name for name in "abcde" if name in second.disk] == ["c", "d", "e"]
        assert len(list(folder.glob("*/*.safetensors"))) == 3


async def test_simultaneous_requests_for_a_feature_share_one_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, load = 0, disk.load

    def counted(*what: Any) -> Feature:
        nonlocal reads
        reads += 1
        return load(*what)

    async with tier(folder) as made:
        await made.keep("a")
        monkeypatch.setattr(disk, "load", counted)
        leaves, *others = [asyncio.create_task(made.disk.read("a")) for _ in range(16)]
        await asyncio.sleep(0)
        leaves.cancel()
        assert all(await asyncio.gather(*others))
        assert reads == 1
        assert not made.disk._reads
        assert await made.disk.read("a") is not None
        assert reads == 2


async def test_a_cache_writes_what_it_evicts_and_finds_it_again(folder: Path) -> None:
    async with tier(folder) as made:
        cache = FeatureCache(SIZE, made.held, made.disk)
        cache.put("a", feature(1))
        cache.put("b", feature(2))
        assert made.reports("a"), "it can still be sent from here"
        assert cache.get("a") is None
        found = await cache.read_below("a")
        assert found is not None
        assert torch.equal(found.tensors["embeddings"], feature(1).tensors["embeddings"])
        await until(lambda: made.count("written") == 1)
        cache.put("a", found)
        assert all(name in cache for name in "ab")
        await until(lambda: made.count("written") == 2)
        cache.put("b", feature(2))
        assert made.count("written") == 2, "it is there already"
