"""One decode process: takes a medium and a result buffer as file descriptors, fills the buffer, answers one line. Started by
`sandbox.DecodePool` alone; it holds no secret and needs no network, no model and no files.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import resource
import socket
import sys
import time
from typing import Any

import numpy as np
from PIL import Image

from mmd_workers.errors import BadMediaError
from mmd_workers.media import decode
from mmd_workers.media.types import MediumInfo

MAX_MESSAGE_BYTES = 1 << 17
MAX_OPEN_FILES = 32


def main() -> None:
    """Serve jobs until the other end of the socket is closed."""
    os.setpgid(0, 0)  # Ctrl-C reaches the worker, which stops its decoders itself
    control = socket.socket(fileno=int(sys.argv[1]))
    timeout_seconds, memory_bytes = int(sys.argv[2]), int(sys.argv[3])
    Image.init()  # loads Pillow's plugins while files may still be opened freely
    _limit(memory_bytes)
    control.send(b'{"ready": true}')
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 2)
        if not message:
            return
        control.send(b'{"started": true}')
        cpu_seconds = math.ceil(time.process_time() + timeout_seconds * decode.DECODE_THREADS + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, resource.RLIM_INFINITY))
        try:
            reply = _serve(json.loads(message), *descriptors)
        except BadMediaError as error:
            reply = {"bad_media": error.message}
        except MemoryError:
            reply = {
                "bad_media": f"decoding needs more than the {memory_bytes >> 20} MiB it may use; send a smaller one"
            }
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        control.send(json.dumps(reply).encode())


def _limit(memory_bytes: int) -> None:
    """Address space: what the idle process maps plus `memory_bytes`. No file may grow, no core is written."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))


def _serve(job: dict[str, Any], source: int, result: int) -> dict[str, Any]:
    with mmap.mmap(source, 0, prot=mmap.PROT_READ) as mapped:
        data = bytes(mapped)
    if job["kind"] == "probe":
        return _probe(data, job)
    info = MediumInfo(**job["info"])
    # Memory of an earlier result: its pages are mapped at once, and not by a fault each.
    populate = mmap.MAP_POPULATE if os.fstat(result).st_blocks else 0
    buffer = mmap.mmap(result, job["result_bytes"], flags=mmap.MAP_SHARED | populate)
    if job["kind"] == "image":
        shape = decode.image_shape(info)
        decode.decode_image(data, info, np.frombuffer(buffer, np.uint8).reshape(shape))
    elif job["kind"] == "video":
        indices = job["frame_indices"]
        shape4 = decode.video_shape(info, indices)
        decode.decode_video(data, info, indices, np.frombuffer(buffer, np.uint8).reshape(shape4))
    else:
        rate, count = job["sample_rate_hz"], job["num_samples"]
        decode.decode_audio(data, info, rate, count, np.frombuffer(buffer, np.float32))
    return {"done": True}


def _probe(data: bytes, job: dict[str, Any]) -> dict[str, Any]:
    # Only processes that are asked to measure pay for the policy's package.
    from dataclasses import asdict

    from mmd_api.spec import MediaPolicy
    from mmd_workers.media.probe import probe

    return {"info": asdict(probe(data, job["modality"], MediaPolicy.model_validate(job["policy"])))}


if __name__ == "__main__":
    main()
