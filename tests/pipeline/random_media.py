"""Random media for a model with random weights, sent as a client would."""

from __future__ import annotations

import base64
import io
from typing import Any

import av
import numpy as np
from PIL import Image

from support.oracles import oracle

CPU = {"gpus": 0}
KV = {"kvCacheMebibytes": 64, **CPU}
TOKENS = 12


def png(seed: int, width: int, height: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def mp4(seed: int, frames: int = 10) -> bytes:
    rng = np.random.default_rng(seed)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 84, 56, "yuv420p"
        for _ in range(frames):
            pixels = np.kron(rng.integers(0, 256, (7, 6, 3), dtype=np.uint8), np.ones((8, 14, 1), np.uint8))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def content(parts: oracle.Question) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            made.append({"type": "text", "text": part})
        else:
            kind, data = part
            mime = {"image": "image/png", "video": "video/mp4"}[kind]
            made.append(
                {
                    "type": f"{kind}_url",
                    f"{kind}_url": {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"},
                }
            )
    return made
