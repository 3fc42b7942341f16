"""One checkpoint, four role layouts, many requests at once: wherever a role runs, the answer is that of `generate`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import oracle
from tests.support.local_deployment import Deployment, write

from .random_media import CPU, KV, TOKENS, content, mp4, png

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("demo"), pytest.mark.timeout(600)]

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
                model=deployment.local.model,
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
