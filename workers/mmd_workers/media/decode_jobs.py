"""The jobs of a decode process: map the bytes, probe or decode them, write the result. Independent of sockets and limits."""

from __future__ import annotations

import importlib
import mmap
import os
import pkgutil
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
from PIL import Image

from mmd_api.contract.errors import BadMediaError
from mmd_workers.media import decode
from mmd_workers.media.frames import find_frames
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.probe import probe, probe_pages


def load() -> None:
    """Load everything that the libraries would load on first use: later no file can be opened."""
    Image.init()
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if not module.name.startswith(("av.__main__", "av.datasets")):
            importlib.import_module(module.name)
    for metadata_encoding in ("ascii", "latin_1", "utf_16", "utf_16_be", "utf_16_le", "cp1252"):
        importlib.import_module(f"encodings.{metadata_encoding}")


def serve(job: dict[str, Any], source: int, result: int) -> dict[str, Any]:
    """Do a job; `source` and `result` are descriptors of shared memory. Raises BadMediaError."""
    with mmap.mmap(source, 0, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ) as mapped:
        data = bytes(mapped)
    if job["kind"] == "probe":
        limits: Any = _limits(job["policy"])
        known_digest, page, of_video = job["digest"], job["page"], job["of_video"]
        return {"info": asdict(probe(data, job["modality"], limits, known_digest, page, of_video))}
    if job["kind"] == "pages":
        policy: Any = _limits(job["policy"])
        infos = probe_pages(data, job["pages"], job["most"], policy)
        return {"pages": [(info.page, info.width, info.height) for info in infos]}
    info = MediumInfo(**job["info"])
    if job["kind"] == "frames":
        search = find_frames(data, info, job["sampling"], job["timestamps"])
        pairs = [[[frame.index, frame.nominal] for frame in group] for group in (search.frames, search.spare)]
        return {"frames": pairs[0], "spare": pairs[1]}
    # Memory of an earlier result has pages, which are mapped at once instead of by a fault each.
    populate = mmap.MAP_POPULATE if os.fstat(result).st_blocks else 0
    buffer = mmap.mmap(result, job["result_bytes"], flags=mmap.MAP_SHARED | populate)
    if job["kind"] == "image":
        shape = decode.image_shape(info)
        decode.decode_image(data, info, np.frombuffer(buffer, np.uint8).reshape(shape))
    elif job["kind"] == "video":
        indices = job["frame_indices"]
        shape4 = decode.video_shape(info, indices)
        decode.decode_video(data, info, indices, np.frombuffer(buffer, np.uint8).reshape(shape4))
    elif job["kind"] == "audio":
        rate, count = job["sample_rate_hz"], job["num_samples"]
        decode.decode_audio(data, info, rate, count, np.frombuffer(buffer, np.float32))
    else:
        raise BadMediaError(f"unknown decode job {job['kind']}")
    return {"done": True}


def _limits(policy: dict[str, Any]) -> SimpleNamespace:
    """A MediaPolicy's fields without its package, which would cost every decode process memory and time to start."""
    return SimpleNamespace(
        **{name: _limits(value) if isinstance(value, dict) else value for name, value in policy.items()}
    )
