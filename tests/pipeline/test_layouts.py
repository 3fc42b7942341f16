"""One checkpoint, four role layouts, two engines, many requests at once: wherever a role runs, the answer is that of `generate`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.oracles import oracle
from support.serving.engines import needs_vllm
from support.serving.local_deployment import Deployment, write

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


QUESTIONS = [question(number) for number in range(32)]


def answers_of(
    engine: str, layout: str, checkpoint: Path, folder: Path, settings: dict[str, Any] | None = None
) -> list[str]:
    """What a deployment answers to all questions at once. `settings`: of its engine."""
    spec = {
        "engine": {"type": engine} | (settings or {}),
        "model": {"id": str(checkpoint), "dtype": "Float32"},
        "transfer": {"kv": {"backend": "Gloo"}},
        **LAYOUTS[layout],
    }
    with Deployment(write(folder / "layout.yaml", spec, name="layouts")) as deployment:
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
            return list(threads.map(ask, QUESTIONS))


def has_video(parts: oracle.Question) -> bool:
    return any(part[0] == "video" for part in parts if not isinstance(part, str))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_32_mixed_requests_at_once_equal_generate(layout: str, checkpoint: Path, tmp_path: Path) -> None:
    drafts = {"promptLookupTokens": 6} if layout in ("monolithic", "EP-D") else {}
    answers = answers_of("Native", layout, checkpoint, tmp_path, drafts)
    assert answers == [oracle.answer(checkpoint, parts, TOKENS, ignore_eos=True) for parts in QUESTIONS]


@pytest.fixture(scope="module")
def monolith(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """vLLM's own answers: after a video its rotary positions go on from the largest, those of this transformers from the video's height
    or width, so that answers differ."""
    return answers_of("VLLM", "monolithic", checkpoint, tmp_path_factory.mktemp("monolith"))


@needs_vllm
def test_vllm_answers_like_generate_where_no_video_is_involved(checkpoint: Path, monolith: list[str]) -> None:
    still = [n for n, parts in enumerate(QUESTIONS) if not has_video(parts)]
    expected = [oracle.answer(checkpoint, QUESTIONS[n], TOKENS, ignore_eos=True) for n in still]
    assert [monolith[n] for n in still] == expected


@needs_vllm
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "monolithic"])
def test_vllm_in_pools_answers_like_one_vllm(
    layout: str, monolith: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    assert answers_of("VLLM", layout, checkpoint, tmp_path) == monolith


SETTINGS: dict[str, dict[str, Any]] = {
    "two ranks": {"tensorParallelSize": 2},
    "drafts": {"speculative": {"method": "ngram", "numSpeculativeTokens": 3}},
    "short steps": {"maxNumBatchedTokens": 64, "extraArgs": ["--max-logprobs=3", "--seed=7"]},
}


HOW = [
    ("two ranks", "E-PD"),
    ("drafts", "EP-D"),
    ("short steps", "E-PD"),
]


@needs_vllm
@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        pytest.param(
            SETTINGS[name],
            layout,
            marks=pytest.mark.alone if name == "two ranks" else [],
            id=f"{name}-{layout}",
        )
        for name, layout in HOW
    ],
)
def test_vllm_answers_the_same_however_it_computes(
    settings: dict[str, Any], layout: str, monolith: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    assert answers_of("VLLM", layout, checkpoint, tmp_path, {"decode": settings}) == monolith


@needs_vllm
def test_vllm_draws_beside_drafts(checkpoint: Path, tmp_path: Path) -> None:
    """Also where a prompt is computed in parts, and with a seed."""
    engine = {"type": "VLLM", "decode": {**SETTINGS["drafts"], **SETTINGS["short steps"]}}
    spec = {"engine": engine, "model": {"id": str(checkpoint), "dtype": "Float32"}, **LAYOUTS["monolithic"]}
    with Deployment(write(tmp_path / "layout.yaml", spec, name="layouts")) as deployment:
        client = deployment.client()
        for number, parts in enumerate(QUESTIONS[:6]):
            answer = client.chat.completions.create(
                model=deployment.local.model,
                messages=[{"role": "user", "content": content(parts)}],  # type: ignore[typeddict-item]
                max_tokens=TOKENS,
                temperature=0.8,
                seed=number,
                extra_body={"ignore_eos": True},
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == TOKENS
