"""One checkpoint, four role layouts, many requests at once: wherever a role runs, the answer is that of `generate`."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import numpy as np
import oracle
import pytest
import random_model
from local_deployment import Deployment, write
from PIL import Image

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("demo"), pytest.mark.timeout(600)]

CPU = {"gpus": 0}
KV = {"kvCacheMebibytes": 64, **CPU}
LAYOUTS: dict[str, dict[str, Any]] = {
    "monolithic": {"decode": {"replicas": 1, **KV}},
    "E-PD": {"encoder": {"replicas": 1, **CPU}, "decode": {"replicas": 1, **KV}},
    "EP-D": {"prefill": {"replicas": 1, **KV}, "decode": {"replicas": 1, **KV}},
    "E-P-D": {
        "encoder": {"replicas": 2, **CPU},
        "prefill": {"replicas": 2, **KV, "chunkTokens": 64},
        "decode": {"replicas": 2, **KV},
    },
}
TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen2_5_vl"
    random_model.build("qwen2_5_vl", folder, seed=3)
    return folder


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


def question(number: int) -> oracle.Question:
    """A mixed load: text short and long, one image, two images, a video, an image and a video."""
    text = f"Request {number}: " + "how many red squares move to the left? " * (1 + number % 5)
    image = ("image", png(number, 56 + 28 * (number % 3), 84))
    kinds: list[oracle.Question] = [
        [text],
        [image, text],
        ["First look:", image, "then this:", ("image", png(1000 + number, 112, 56)), text],
        [("video", mp4(number)), text],
        [text, image, ("video", mp4(number)), "What changed?"],
        [text * 4],
    ]
    return kinds[number % len(kinds)]


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_32_mixed_requests_at_once_equal_generate(layout: str, checkpoint: Path, tmp_path: Path) -> None:
    spec = {
        "model": {"id": str(checkpoint), "dtype": "Float32"},
        "transfer": {"kv": {"backend": "Gloo"}},
        **LAYOUTS[layout],
    }
    questions = [question(number) for number in range(32)]
    with Deployment(write(tmp_path / "layout.yaml", spec, name="layouts")) as deployment:
        client = deployment.client()

        def ask(parts: oracle.Question) -> str:
            answer = client.chat.completions.create(
                model=str(checkpoint),
                messages=[{"role": "user", "content": content(parts)}],  # type: ignore[typeddict-item]
                max_tokens=TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            return str(answer.choices[0].message.content)

        with ThreadPoolExecutor(32) as threads:
            answers = list(threads.map(ask, questions))
    expected = [oracle.answer(checkpoint, parts, TOKENS, ignore_eos=True) for parts in questions]
    assert answers == expected
