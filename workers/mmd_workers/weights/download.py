"""Fills a cache with downloads, each in its own folder.

A folder gets its final name once every file in it has been verified. If a download ends early, the next one resumes its partial
files, provided the expected digest is the same. A lock keeps two downloads from filling one folder at once, also those of
deployments that share a claim.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mmd_api.contract.weights import WeightsError
from mmd_api.weights import Download
from mmd_workers.basics.backoff import Backoff
from mmd_workers.weights.cache import MANIFEST, PARTIAL, CachedFiles
from mmd_workers.weights.names import PART
from mmd_workers.weights.progress import DownloadProgress
from mmd_workers.weights.sources import RemoteFile, RemoteFolder, look_up, named

log = logging.getLogger(__name__)

PIECE_BYTES = 64 * 2**20
"""Size of one request; four pieces at a time are in memory."""
READ_BYTES = 2**20
FILES_AT_ONCE = 4
TRIES = 5
"""Attempts to fetch one piece before the download ends."""
PAUSE_SECONDS = (0.5, 15.0)
LOCK_SECONDS = 6 * 3600.0
LOCK_POLL_SECONDS = 0.5
SPARE_BYTES = 64 * 2**20
"""Space that a download leaves free."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def prefetch(downloads: Sequence[Download], root: Path, progress: DownloadProgress, claim: str = "") -> None:
    """Bring all downloads into the cache at `root`. `claim`: name and size of the volume as messages state them.

    Raises:
        WeightsError: a download cannot be completed; the message names its field and the remedy.
    """
    with _written(root, claim):
        root.mkdir(parents=True, exist_ok=True)
        manifests = {download: CachedFiles.of(root / download.folder) for download in downloads}
    sources = {download: look_up(download) for download, manifest in manifests.items() if manifest is None}
    progress.expect(
        sum(manifest.total_bytes for manifest in manifests.values() if manifest)
        + sum(source.total_bytes for source in sources.values())
    )
    progress.enter("Downloading")
    for manifest in filter(None, manifests.values()):
        progress.present(manifest.total_bytes)
    for source in sources.values():
        with _written(root, claim):
            _fill(source, root, progress, claim)
    progress.enter("Complete")


def _fill(source: RemoteFolder, root: Path, progress: DownloadProgress, claim: str) -> None:
    """Download one source, unless another process has done so meanwhile."""
    folder, partial = root / source.download.folder, root / PARTIAL / source.download.folder
    partial.parent.mkdir(exist_ok=True)
    with _locked(partial.with_name(f"{partial.name}.lock"), source.download, progress, claim):
        if CachedFiles.of(folder) is not None:
            progress.present(source.total_bytes)
            return
        if folder.exists() and not partial.exists():  # a file was removed from it
            folder.rename(partial)
        partial.mkdir(exist_ok=True)
        present_bytes = _left_over(source, partial)
        progress.present(present_bytes)
        missing = source.total_bytes - present_bytes
        needed = missing + SPARE_BYTES if missing > 0 else 0
        if needed > (free := shutil.disk_usage(root).free):
            _discard_abandoned(partial, needed - free)
        if needed > (free := shutil.disk_usage(root).free):
            raise _too_large(source.download, missing, free, claim)
        files = {file.name: (file.size, file.digest) for file in source.files}
        CachedFiles(source.download.url, source.version, files).write(partial)
        _download_all(source, partial, progress)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        log.info("%s: %d bytes in %s", source.download.url, source.total_bytes, folder)


def _discard_abandoned(partial: Path, lacking: int) -> None:
    """Free `lacking` bytes by deleting other incomplete downloads, oldest first.

    Downloads that another process is continuing stay. Nothing is deleted if all of them together are too small.
    """
    others = [path for path in partial.parent.iterdir() if path.is_dir() and path != partial]
    sizes = {path: sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in others}
    if sum(sizes.values()) < lacking:
        return
    for folder in sorted(others, key=lambda path: path.stat().st_mtime):
        if lacking <= 0:
            return
        with folder.with_name(f"{folder.name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                log.info("%s stays: %s", folder, error)
                continue
            shutil.rmtree(folder)
            lacking -= sizes[folder]
            log.warning("the cache is full: deleted the incomplete download %s", folder)


def _download_all(source: RemoteFolder, folder: Path, progress: DownloadProgress) -> None:
    """Download every file. When one fails, the others end after their current piece."""
    stop = threading.Event()
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        futures = [pool.submit(_download, source, file, folder, progress, stop) for file in source.files]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    for future in done:
        future.result()


def _left_over(source: RemoteFolder, partial: Path) -> int:
    """Count the bytes that an earlier download left, and delete its files that this one cannot use.

    Those are not part of this download, or were to have another digest.
    """
    manifest = CachedFiles.listed(partial)
    earlier_files = manifest.files if manifest is not None else {}
    unchanged = [file for file in source.files if earlier_files.get(file.name) == (file.size, file.digest)]
    complete_sizes = {partial / file.name: file.size for file in unchanged}
    part_sizes = {_part(partial / file.name): file.size for file in unchanged}
    left_over_bytes = 0
    for path in [path for path in partial.rglob("*") if path.is_file() and path != partial / MANIFEST]:
        size = path.stat().st_size
        if complete_sizes.get(path) == size or (path in part_sizes and size <= part_sizes[path]):
            left_over_bytes += size
        else:
            path.unlink()
    return left_over_bytes


def _part(file: Path) -> Path:
    return file.with_name(f"{file.name}{PART}")


def _download(
    source: RemoteFolder, file: RemoteFile, folder: Path, progress: DownloadProgress, stop: threading.Event
) -> None:
    target = folder / file.name
    if target.is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _part(target)
    part.touch()
    with part.open("r+b") as content:
        for piece in _pieces(source, file, content.seek(0, os.SEEK_END), progress):
            content.write(piece)
            if stop.is_set():
                return
        _sync(content)
        digest = _digest(content, file, progress)
    wanted = file.digest.partition(":")[2]
    if digest != wanted:
        part.unlink()
        progress.present(-file.size)
        raise WeightsError(
            "WeightsDamaged",
            f"{source.download.field}: {source.download.url}: {file.name} has digest {digest} instead of {wanted}, and was "
            "deleted; if this happens again, the file at its source is damaged: upload it again",
        )
    part.rename(target)


def _digest(content: BinaryIO, file: RemoteFile, progress: DownloadProgress) -> str:
    """The digest of a file as the volume has it, in hex. A git object's digest also covers a header with its size."""
    if file.digest.startswith("sha256:"):
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    content.seek(0)
    for piece in iter(lambda: content.read(READ_BYTES), b""):
        digest.update(piece)
        progress.verified(len(piece))
    return digest.hexdigest()


def _pieces(
    source: RemoteFolder, file: RemoteFile, offset: int, progress: DownloadProgress
) -> Iterator[bytes]:
    """Fetch the rest of a file from `offset`. A piece that cannot be read is tried again."""
    if offset >= file.size:
        return
    with (
        named(source.download),
        source.filesystem.open(
            file.path, "rb", block_size=PIECE_BYTES, cache_type="none", size=file.size, **source.options
        ) as remote,
    ):
        while offset < file.size:
            piece = _tried(remote, offset, min(PIECE_BYTES, file.size - offset), source.download)
            offset += len(piece)
            progress.received(len(piece))
            yield piece


def _tried(remote: Any, offset: int, size: int, download: Download) -> bytes:
    pauses = Backoff(*PAUSE_SECONDS)
    for remaining_tries in reversed(range(TRIES)):
        try:
            with named(download):
                remote.seek(offset)
                piece: bytes = remote.read(size)
                if not piece:
                    raise EOFError(f"no byte at {offset}")
                return piece
        except EOFError as error:
            failed = WeightsError(
                "WeightsUnreachable", f"{download.field}: {download.url} ended early ({error})"
            )
        except WeightsError as error:
            failed = error
        if failed.reason != "WeightsUnreachable" or not remaining_tries:
            break
        pause = pauses.next()
        log.warning("%s; trying again in %.1f s", failed, pause)
        time.sleep(pause)
    raise failed


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _locked(path: Path, download: Download, progress: DownloadProgress, claim: str) -> Iterator[None]:
    with path.open("w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise WeightsError(
                        "WeightsUnreachable",
                        f"{download.field}: another process has held {path} for {LOCK_SECONDS / 3600:.0f} h; end it",
                    ) from None
                progress.enter("Waiting")
                time.sleep(LOCK_POLL_SECONDS)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                raise WeightsError(
                    "WeightsDenied",
                    f"{download.field}: {claim or path.parent} has no file locks ({error.strerror}), which keep two downloads apart; "
                    "use a volume with them, such as NFS 4 or CephFS",
                ) from error
        progress.enter("Downloading")
        yield


@contextmanager
def _written(root: Path, claim: str) -> Iterator[None]:
    """Turn errors of the volume into a WeightsError that names the remedy."""
    try:
        yield
    except OSError as error:
        where = claim or str(root)
        if error.errno in _FULL:
            raise WeightsError(
                "WeightsTooLarge",
                f"{where} is full ({error.strerror}); enlarge it or delete other models from it",
            ) from error
        if error.errno in _READ_ONLY:
            raise WeightsError(
                "WeightsDenied",
                f"{where} cannot be written to ({error}); it must be writable for group 65532, the fsGroup of the pod",
            ) from error
        raise WeightsError(
            "WeightsUnreachable", f"{where} cannot be used ({error}); check the volume and its server"
        ) from error


def _too_large(download: Download, missing: int, free: int, claim: str) -> WeightsError:
    return WeightsError(
        "WeightsTooLarge",
        f"{download.field}: {_gibibytes(missing)} of {download.url} are missing, and {claim or 'the cache'} has {_gibibytes(free)} left; "
        "enlarge it or delete other models from it",
    )


def _gibibytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
