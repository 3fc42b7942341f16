"""Sends media files with damage of every kind through the sandbox.

Each gives what the file holds, or an error that names its fault, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import psutil

from mmd_api.contract.errors import BadMediaError, MmdError
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media import decode
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.sandbox import DecodePool

MEDIA = Path(__file__).parents[2] / "tests" / "media"
FILES, DOCUMENTS = MEDIA / "files", MEDIA / "documents"
POLICY = MediaPolicy()
SAMPLE_RATE_HZ = 16_000
MAX_FRAMES = 8
MAX_PAGES = 3
SEARCHES = (SamplingChoice(sampling="scene_changes"), SamplingChoice(timestamps=(0.0, 0.5)))
GROWN_MEBIBYTES = 256  # growth that a decode process may have after its first files
SETTLED_AFTER = 200  # first files, after which growth counts
EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
SentAs = Literal["image", "video", "audio", "document"]
SENT_AS: tuple[SentAs, ...] = get_args(SentAs)
FAULTS = re.compile("the decoder (crashed|hung|returned)|took longer|unknown decode job")


@dataclass
class Report:
    """The results of the files by format, and what must not have happened."""

    decoded: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    mebibytes: dict[int, tuple[int, int]] = field(default_factory=dict)


def originals() -> dict[str, bytes]:
    """The undamaged files by name."""
    others = {".py", ".sh", ".md", ".json"}
    paths = [
        path
        for folder in (FILES, DOCUMENTS)
        for path in sorted(folder.iterdir())
        if path.suffix not in others
    ]
    return {path.name: path.read_bytes() for path in paths}


async def kinds(pool: DecodePool, files: Mapping[str, bytes]) -> list[tuple[str, SentAs]]:
    """Names of the files, each with a kind that it may be sent as. A video with sound is there as both."""
    pairs: list[tuple[str, SentAs]] = []
    for name, data in files.items():
        for kind in SENT_AS:
            try:
                await _probe(pool, data, kind)
            except BadMediaError:
                continue
            pairs.append((name, kind))
    return pairs


def mutant(files: Mapping[str, bytes], name: str, seed: int, number: int) -> bytes:
    """A damaged copy of a file, the same for the same numbers."""
    rng = np.random.default_rng([seed, number])
    data = bytearray(files[name])
    for _ in range(rng.integers(1, 5)):
        _damage(data, files, rng)
        if not data:
            return b"\0"
    if name.endswith(".png") and rng.integers(2):
        _with_checksums(data)
    return bytes(data)


def _damage(data: bytearray, files: Mapping[str, bytes], rng: np.random.Generator) -> None:
    size = len(data)
    near = min(size, 512) if rng.integers(2) else size  # most fields are in headers
    at = int(rng.integers(near)) if near else 0
    span = int(min(size - at, 1 << rng.integers(1, 10)))
    match rng.integers(9):
        case 0:
            for place in rng.integers(0, size, rng.integers(1, 9)):
                data[place] ^= 1 << rng.integers(8)
        case 1 | 2:
            _write_extreme(data, at, rng)
        case 3:  # the size or the first fields of a part with a name of four letters
            names = [match.start() for match in re.finditer(rb"[A-Za-z0-9 ]{4}", data)]
            if names:
                _write_extreme(data, max(0, int(rng.choice(names)) + int(rng.integers(-4, 16))), rng)
        case 4:
            del data[at:]
        case 5:
            del data[at : at + span]
        case 6:
            data[at:at] = bytes(data[at : at + span]) * int(rng.integers(1, 64))
        case 7:
            data[at : at + span] = rng.bytes(span) if rng.integers(2) else bytes(span)
        case 8:
            other = files[str(rng.choice(sorted(files)))]
            data[at:] = other[int(rng.integers(len(other))) :]


def _write_extreme(data: bytearray, at: int, rng: np.random.Generator) -> None:
    width = int(rng.choice([1, 2, 4, 8]))
    value = int(rng.choice(EXTREMES)) & ((1 << 8 * width) - 1)
    data[at : at + width] = value.to_bytes(width, "big" if rng.integers(2) else "little")[: len(data) - at]


def _with_checksums(png: bytearray) -> None:
    at = 8
    while at + 12 <= len(png):
        end = at + 8 + int.from_bytes(png[at : at + 4], "big")
        if end + 4 > len(png):
            return
        png[end : end + 4] = zlib.crc32(png[at + 4 : end]).to_bytes(4, "big")
        at = end + 4


async def check(pool: DecodePool, data: bytes, kind: SentAs) -> MediumInfo:
    """Probe and decode a medium: a video at given and at searched frames, a document's first pages.

    Returns what it is, or its first page.

    Raises:
        BadMediaError: it was refused.
        AssertionError: the result is not what the probe promised.
    """
    infos = await _probe(pool, data, kind)
    for info in infos:
        await _decode(pool, data, info)
    return infos[0]


async def _probe(pool: DecodePool, data: bytes, kind: SentAs) -> list[MediumInfo]:
    if kind == "document":
        return (await pool.probe_pages(data, "", POLICY))[:MAX_PAGES]
    return [await pool.probe(data, kind, POLICY)]


async def _decode(pool: DecodePool, data: bytes, info: MediumInfo) -> None:
    if info.modality == "image":
        shape, promised = (await pool.decode_image(data, info)).pixels.shape, decode.image_shape(info)
    elif info.modality == "video":
        step = max(1, info.num_frames // MAX_FRAMES)
        indices = [*range(0, info.num_frames, step)][:MAX_FRAMES]
        shape = (await pool.decode_video(data, info, indices)).frames.shape
        promised = decode.video_shape(info, indices)
        for search in SEARCHES:
            await pool.find_frames(data, info, search)
    else:
        waveform = (await pool.decode_audio(data, info, SAMPLE_RATE_HZ, SAMPLE_RATE_HZ)).waveform
        shape, promised = waveform.shape, (SAMPLE_RATE_HZ,)
        assert np.isfinite(waveform).all(), "the waveform has samples that are no numbers"
        assert np.abs(waveform).max() <= 1, "the waveform leaves its range"
    assert shape == promised, f"{shape} came where {promised} was promised"


async def run(files: Mapping[str, bytes], count: int, seed: int, pool: DecodePool) -> Report:
    """Send `count` damaged files through a pool that was started, and close it.

    As many files are sent at once as the pool has processes.
    """
    report = Report()
    held_before = media_memory()
    sent = await kinds(pool, files)
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            name, kind = sent[number % len(sent)]
            if number == SETTLED_AFTER:
                report.mebibytes = {pid: (_mebibytes(pid), 0) for pid in pool.process_ids}
            await _send(pool, mutant(files, name, seed, number), kind, f"{name} {number}", report)

    before = pool.process_ids
    try:
        await asyncio.gather(*(worker() for _ in range(pool.processes)))
        after = pool.process_ids
        if set(before) != set(after):
            report.failures.append(f"decode processes {before} became {after}")
        report.mebibytes = {
            pid: (was, _mebibytes(pid)) for pid, (was, _) in report.mebibytes.items() if pid in after
        }
        report.failures += [
            f"decode process {pid} grew from {was} to {now} MiB"
            for pid, (was, now) in report.mebibytes.items()
            if now - was > GROWN_MEBIBYTES
        ]
        report.failures += [
            f"decode process {pid} holds {len(open_files)} files: {open_files}"
            for pid in after
            if len(open_files := opened(pid)) > 4
        ]
    finally:
        await pool.close()
    report.failures += [f"decode process {pid} runs after the end" for pid in after if psutil.pid_exists(pid)]
    gc.collect()
    if held := media_memory() - held_before:
        report.failures.append(f"memory of {len(held)} media is held")
    return report


async def _send(pool: DecodePool, data: bytes, sent_as: SentAs, name: str, report: Report) -> None:
    kind = f"{name.split(' ', maxsplit=1)[0].rpartition('.')[2]} {sent_as}"
    start = time.monotonic()
    try:
        await check(pool, data, sent_as)
        report.decoded[kind] += 1
    except BadMediaError as error:
        report.refused[kind] += 1
        if FAULTS.search(error.message) or "; " not in error.message:
            report.failures.append(f"{name} ({sent_as}): {error.message}")
    except (MmdError, AssertionError) as error:
        report.failures.append(f"{name} ({sent_as}): {error}")
    report.slowest = max(report.slowest, (time.monotonic() - start, name))


def _mebibytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss) >> 20


def media_memory() -> set[int]:
    """The inodes of the shared memory of media that this process has open, such as that of earlier tests."""
    inodes = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if "mmd-media" in os.readlink(path):
                inodes.add(path.stat().st_ino)
    return inodes


def opened(pid: int) -> list[str]:
    """Everything that a process has open, by the kernel's names."""
    names = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.append(os.readlink(path))
        except OSError:  # closed meanwhile
            continue
    return names
