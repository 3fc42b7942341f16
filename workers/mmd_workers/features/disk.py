"""A disk tier of evicted features, in files: found by identity and pipeline revision, checked by digest, bounded in bytes.

Each feature is one safetensors file, in a folder of its revision. There is no index beside the files, so that the two cannot differ after
a crash: files are listed at the start. (diskcache would keep an index in SQLite and pickle the values.) A file with any fault is a miss and
is removed. Any fault of the disk turns the tier off for `OFF_SECONDS`; no request fails for it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from safetensors import SafetensorError

from mmd_api.contract.pools import MODALITIES
from mmd_workers.engine.memory.cache_changes import MOST_REPORTED
from mmd_workers.features.held import HeldFeatures
from mmd_workers.features.tensors import buffers_of
from mmd_workers.model.prompt import Feature
from mmd_workers.observe.metrics import Metrics

OFF_SECONDS = 60.0
# A read may take READ_SECONDS, plus its time on the slowest disk that is faster than encoding again.
READ_SECONDS = 2.0
SLOWEST_BYTES_PER_SECOND = 32 << 20
WRITE_SECONDS = 30.0
GONE_SECONDS = 86_400.0  # a pod of this revision whose folder is unused for so long is not expected back
LOCK_TRIES = 3
MOST_WAITING_BYTES = 64 << 20  # features to be written, on top of the cache; a larger one waits alone
MOST_FILES = MOST_REPORTED // 2  # the rest is for features in memory
SUFFIX, PART, LOCK = ".safetensors", ".part", "mmd-features.lock"
FOLDER = "features-"  # followed by the revision
_BLOCK_BYTES = 4096
_LENGTH_BYTES = 8  # a file begins with the length of its header
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")

log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class DamagedError(Exception):
    """A file does not hold what it should."""


@dataclass(frozen=True, slots=True)
class _File:
    feature_id: str
    num_bytes: int


class DiskTier:
    """Belongs to one event loop; files are read and written on two threads of its own."""

    def __init__(
        self, folder: Path, revision: str, budget_bytes: int, held: HeldFeatures, metrics: Metrics
    ) -> None:
        """`folder`: folder of this pod alone, beside those of its deployment's other pods. `held`: notes which features come and go."""
        self._root = folder
        self._folder = folder / f"{FOLDER}{revision}"
        self._revision = revision
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.waiting_bytes = 0
        self.is_on = False
        self._is_reported = False  # whether the present turn-off was logged
        self._was_full = False  # whether the disk was full when the tier was turned off
        self._skipped: set[str] = set()  # folders that could not be removed, reported once
        self._lock: int | None = None  # a descriptor that shows other processes that this one lives
        self._closing = threading.Lock()  # the lock is taken on a thread
        self._closed = False
        self._held = held
        self._metrics = metrics
        self._files: OrderedDict[str, int] = OrderedDict()  # bytes by feature id, least recently used first
        self._waiting: OrderedDict[str, Feature] = OrderedDict()  # features to be written
        self._wake = asyncio.Event()
        self._reading = asyncio.Lock()
        self._reads: dict[str, asyncio.Task[Feature | None]] = {}  # by feature id, for all who ask meanwhile
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-features")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write-features")

    # --- what a cache calls -------------------------------------------------------------------------------------------

    def __contains__(self, feature_id: str) -> bool:
        return feature_id in self._files or feature_id in self._waiting

    def keep(self, feature_id: str, feature: Feature) -> None:
        """Write a feature soon, unless the disk is off or too much waits for it already."""
        if feature_id in self._files:
            self._files.move_to_end(feature_id)
            return
        num_bytes = feature.num_bytes
        if not self.is_on or feature_id in self._waiting or not _NAME.fullmatch(feature_id):
            return
        if num_bytes > self.budget_bytes:
            self._count("too_large")
            return
        if self._waiting and self.waiting_bytes + num_bytes > MOST_WAITING_BYTES:
            self._count("dropped")
            return
        self._waiting[feature_id] = feature
        self.waiting_bytes += num_bytes
        self._held.add(feature_id)
        self._wake.set()

    async def read(self, feature_id: str) -> Feature | None:
        """The feature; None if it is missing or cannot be read."""
        if (feature := self._waiting.get(feature_id)) is None:
            if (task := self._reads.get(feature_id)) is None:
                task = self._reads[feature_id] = asyncio.create_task(
                    self._read_in_turn(feature_id), name=f"read-{feature_id[:12]}"
                )
                task.add_done_callback(lambda _: self._reads.pop(feature_id))
            feature = await asyncio.shield(task)
        self._metrics.cache.labels("disk", "hit" if feature is not None else "miss").inc()
        return feature

    async def _read_in_turn(self, feature_id: str) -> Feature | None:
        async with self._reading:  # the time limit of a read does not cover other reads
            return await self._read(feature_id)

    async def _read(self, feature_id: str) -> Feature | None:
        if feature_id not in self._files:
            return None
        try:
            read = partial(load, self._path(feature_id), feature_id, self._revision)
            seconds = READ_SECONDS + self._files[feature_id] / SLOWEST_BYTES_PER_SECOND
            feature = await self._run(self._reader, read, seconds)
        except FileNotFoundError:  # evicted meanwhile, or removed by somebody else
            await self._remove(feature_id)
        except DamagedError as error:
            log.warning("feature %s on disk is damaged and removed: %s", feature_id[:16], error)
            self._count("damaged")
            await self._remove(feature_id)
        except OSError as error:
            self._turn_off(error)
        else:
            if feature_id in self._files:
                self._files.move_to_end(feature_id)
            return feature
        return None

    # --- the life of the tier -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Find the files that an earlier process of this pod left, and write evicted features, until cancelled."""
        while True:
            try:
                await self._find()
                while self.is_on:
                    await self._write_waiting()
                    self._wake.clear()
                    if not self._waiting and self.is_on:
                        await self._wake.wait()
            except OSError as error:
                self._turn_off(error)
            except Exception as error:  # a defect here must not end a pod that serves without it
                log.exception("the disk tier failed")
                self._turn_off(error)
            await asyncio.sleep(OFF_SECONDS)

    def close(self) -> None:
        """Leave the threads and the folder; features that wait to be written are lost, written ones stay."""
        for threads in (self._reader, self._writer):
            threads.shutdown(wait=False, cancel_futures=True)
        with self._closing:
            self._closed = True
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    async def _find(self) -> None:
        """Tidy and list the folder. No step has a deadline: none delays anybody, and an abandoned step would begin again."""
        self._show()
        unused_seconds = 0.0 if self._was_full else GONE_SECONDS
        self._report(await self._run(self._writer, partial(remove_gone, self._folder, unused_seconds), None))
        if self._lock is None:
            await self._run(self._writer, self._take_lock, None)
        self._report(await self._run(self._writer, partial(remove_other_revisions, self._folder), None))
        files = await self._run(self._writer, partial(tidy, self._folder), None)
        for file in files:
            self._files[file.feature_id] = file.num_bytes
            self.used_bytes += file.num_bytes
        for feature_id in reversed(self._files):  # the most recently used is reported first
            self._held.add(feature_id)
        self.is_on = True
        await self._make_room(0, 0)
        if not self.is_on:
            return
        self._is_reported = self._was_full = False
        self._show()
        log.info("features on disk: %d, %d bytes of %d", len(self._files), self.used_bytes, self.budget_bytes)

    def _take_lock(self) -> None:
        """Take the lock, on a thread, so that a lock that comes late is not lost."""
        descriptor = lock(self._root)
        with self._closing:
            if self._closed:
                os.close(descriptor)
            else:
                self._lock = descriptor

    def _report(self, failed: dict[str, OSError]) -> None:
        for name, error in failed.items():
            if name not in self._skipped:
                self._skipped.add(name)
                log.warning(
                    "folder %s on the volume of spec.encoder.cache.disk cannot be removed: %s: %s; remove it by hand",
                    *(name, type(error).__name__, error),
                )

    async def _write_waiting(self) -> None:
        while self.is_on and self._waiting:
            feature_id, feature = next(iter(self._waiting.items()))
            data = await self._run(
                self._writer, partial(packed, feature_id, self._revision, feature), WRITE_SECONDS
            )
            if fits := _taken(len(data)) <= self.budget_bytes:
                await self._make_room(1, _taken(len(data)))
                seconds = WRITE_SECONDS + len(data) / SLOWEST_BYTES_PER_SECOND
                await self._run(self._writer, partial(write, self._path(feature_id), data), seconds)
            if self._waiting.pop(feature_id, None) is None:
                return  # turned off meanwhile
            self.waiting_bytes -= feature.num_bytes
            self._count("written" if fits else "too_large")
            if fits:
                self._files[feature_id] = _taken(len(data))  # it was reported when it began to wait
                self.used_bytes += _taken(len(data))
            else:
                self._held.remove(feature_id)
            self._show()

    async def _make_room(self, files: int, num_bytes: int) -> None:
        while self._files and (
            self.used_bytes + num_bytes > self.budget_bytes or len(self._files) + files > MOST_FILES
        ):
            await self._remove(next(iter(self._files)))
            self._metrics.cache_evictions.labels("disk").inc()

    async def _remove(self, feature_id: str) -> None:
        if (num_bytes := self._files.pop(feature_id, None)) is None:
            return
        self.used_bytes -= num_bytes
        self._held.remove(feature_id)
        self._show()
        try:
            unlink = partial(self._path(feature_id).unlink, missing_ok=True)
            await self._run(self._writer, unlink, WRITE_SECONDS)
        except OSError as error:
            self._turn_off(error)

    def _turn_off(self, error: Exception) -> None:
        """Turn the tier off and forget everything; files are found again after `OFF_SECONDS`."""
        if not self._is_reported:
            self._is_reported = True
            log.warning(
                "spec.encoder.cache.disk is off for %.0f s: %s: %s; features are encoded again meanwhile; check the volume's free space "
                "and health",
                *(OFF_SECONDS, type(error).__name__, error),
            )
        self._was_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        self.is_on = False
        for feature_id in (*self._files, *self._waiting):
            self._held.remove(feature_id)
        self._files.clear()
        self._waiting.clear()
        self.used_bytes = self.waiting_bytes = 0
        self._count("failed")
        self._show()
        self._wake.set()

    # --- helpers ------------------------------------------------------------------------------------------------------

    async def _run(
        self, threads: ThreadPoolExecutor, work: Callable[[], _Result], seconds: float | None
    ) -> _Result:
        """Run work in a thread. A disk that hangs raises an `OSError` (TimeoutError is one)."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(seconds):
            return await loop.run_in_executor(threads, work)

    def _path(self, feature_id: str) -> Path:
        return self._folder / f"{feature_id}{SUFFIX}"

    def _count(self, outcome: str) -> None:
        self._metrics.disk_features.labels(outcome).inc()

    def _show(self) -> None:
        self._metrics.cache_bytes.labels("disk").set(self.used_bytes)
        self._metrics.disk_off.set(not self.is_on)


def _taken(num_bytes: int) -> int:
    """Bytes that a file of this length takes on most disks."""
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


# --- files, on a thread -------------------------------------------------------------------------------------------


def lock(folder: Path) -> int:
    """Lock a pod's folder; returns the lock's descriptor. The lock is free again when its process ends.

    Raises:
        OSError: another process has it, or the disk fails.
    """
    for _ in range(LOCK_TRIES):  # an empty folder may be removed meanwhile
        _make(folder)
        try:
            descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.lstat(folder / LOCK)):
                os.utime(descriptor)
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise BlockingIOError(errno.EWOULDBLOCK, "the folder is being removed", str(folder))


def remove_gone(folder: Path, unused_seconds: float) -> dict[str, OSError]:
    """Remove the folders of pods that are gone; returns the folders where this failed.

    All folders of other revisions are removed, and those of this revision that nobody has used for `unused_seconds`. A folder without our
    lock file is not ours, and no lock file is made in it.
    """
    failed: dict[str, OSError] = {}
    own_folder, volume = folder.parent, folder.parent.parent
    if not volume.is_dir():
        return failed
    for pod in list(os.scandir(volume)):
        try:
            if pod.name != own_folder.name and pod.is_dir(follow_symlinks=False):
                _remove_gone(Path(pod.path), folder.name, unused_seconds)
        except (FileNotFoundError, BlockingIOError):
            continue  # not ours, or that pod still serves
        except OSError as error:
            failed[pod.name] = error
    return failed


def _remove_gone(pod: Path, revision: str, unused_seconds: float) -> None:
    descriptor = os.open(pod / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for entry in _revisions(pod):
            used = max(os.fstat(descriptor).st_mtime, entry.stat(follow_symlinks=False).st_mtime)
            if entry.name != revision or time.time() - used >= unused_seconds:
                shutil.rmtree(entry.path)
        if os.listdir(pod) == [LOCK]:
            os.unlink(pod / LOCK)
            os.rmdir(pod)
    finally:
        os.close(descriptor)


def remove_other_revisions(folder: Path) -> dict[str, OSError]:
    """Remove other revisions of this pod, whose lock is held; returns the folders where this failed."""
    failed: dict[str, OSError] = {}
    for entry in _revisions(folder.parent):
        if entry.name != folder.name:
            try:
                shutil.rmtree(entry.path)
            except OSError as error:
                failed[f"{folder.parent.name}/{entry.name}"] = error
    return failed


def _revisions(pod: Path) -> list[os.DirEntry[str]]:
    return [
        entry
        for entry in os.scandir(pod)
        if entry.name.startswith(FOLDER) and entry.is_dir(follow_symlinks=False)
    ]


def tidy(folder: Path) -> list[_File]:
    """Remove incomplete files; returns the files of this revision, least recently used first."""
    _make(folder)
    files = []
    for entry in os.scandir(folder):
        name = entry.name.removesuffix(SUFFIX)
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name == name or not _NAME.fullmatch(name) or entry.is_symlink():
            os.unlink(entry.path)
        else:
            state = entry.stat()
            files.append((state.st_mtime_ns, _File(name, _taken(state.st_size))))
    return [file for _, file in sorted(files, key=lambda item: item[0])]


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "a symbolic link is not followed", str(folder))


def packed(feature_id: str, revision: str, feature: Feature) -> bytes:
    """The content of a feature's file."""
    metadata = {
        "feature": feature_id,
        "revision": revision,
        "modality": feature.modality,
        "digest": digest_of(feature),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in feature.tensors.items()}
    if len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) < len(tensors):
        # The tensors of a received feature lie in one buffer, which safetensors refuses.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    data: bytes = safetensors.torch.save(tensors, metadata)
    return data


def write(path: Path, data: bytes) -> None:
    """Write a file so that a reader finds the whole file or none."""
    part = path.with_suffix(PART)
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def load(path: Path, feature_id: str, revision: str) -> Feature:
    """The feature in a file. The file is read, not mapped: in a mapping, an error of the disk would end the process.

    Raises:
        DamagedError: the file belongs to another feature or revision, or has been damaged.
        OSError: the disk fails.
    """
    data = path.read_bytes()
    try:
        metadata = _metadata(data)
        modality = next(name for name in MODALITIES if name == metadata["modality"])
        feature = Feature(modality, safetensors.torch.load(data))
        if (metadata["feature"], metadata["revision"]) != (feature_id, revision):
            raise DamagedError("it is of another feature or revision")
        if metadata["digest"] != digest_of(feature):
            raise DamagedError("its digest does not match")
    except (SafetensorError, ValueError, KeyError, TypeError, StopIteration, AttributeError) as error:
        raise DamagedError(f"{type(error).__name__}: {str(error)[:200]}") from error
    os.utime(path)
    os.utime(path.parent)  # see remove_gone
    return feature


def _metadata(data: bytes) -> dict[str, Any]:
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    metadata: dict[str, Any] = json.loads(data[_LENGTH_BYTES:end])["__metadata__"]
    return metadata


def digest_of(feature: Feature) -> str:
    """The digest of the bytes of all tensors with their names, dtypes and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for header, data in sorted(buffers_of(feature), key=lambda item: item[0].name):
        digest.update(f"{header.name} {header.dtype} {header.shape};".encode())
        digest.update(data)
    return digest.hexdigest()
