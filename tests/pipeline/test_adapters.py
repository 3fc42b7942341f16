"""LoRA adapters through a whole deployment: requests for several at once, and one whose pod is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mmd_api.faults import InvalidDeploymentError
from mmd_cli.local import supervisor, up
from support.harness.waiting import wait_until
from support.oracles import adapters, oracle
from support.serving.engines import needs_vllm
from support.serving.local_deployment import Deployment, write

from .random_media import CPU, KV, TOKENS, content, png
from .redundant import busy, send, text_of

pytestmark = [needs_vllm, pytest.mark.processes, pytest.mark.xdist_group("demo"), pytest.mark.timeout(900)]
LONG_TOKENS = 400
TEXT: oracle.Question = ["how many red squares move to the left? " * 3]
IMAGE: oracle.Question = [("image", png(1, 84, 84)), "What is this, and how many of it do you see?"]


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the checkpoint."""
    whole, folder = oracle.served(checkpoint).model, tmp_path_factory.mktemp("adapters")
    return {
        "one": adapters.write(folder / "one", whole, seed=1, rank=8),
        "two": adapters.write(folder / "two", whole, seed=2, rank=4, targets=adapters.ALL_LINEAR),
    }


@pytest.fixture(scope="module")
def deployment(
    checkpoint: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Every hand over there is: features from an encoder, KV from prefill to one of two decode pods."""
    spec = {
        "engine": {"type": "VLLM", "adapters": [{"name": n, "id": str(f)} for n, f in folders.items()]},
        "model": {"id": str(checkpoint), "dtype": "Float32"},
        "transfer": {"kv": {"backend": "Gloo"}},
        "encoder": {"replicas": 1, **CPU},
        "prefill": {"replicas": 1, **KV},
        "decode": {"replicas": 2, "localPrefillTokens": 0, **KV},
    }
    file = tmp_path_factory.mktemp("adapters") / "adapters.yaml"
    with Deployment(write(file, spec, name="adapters")) as running:
        yield running


def ask(deployment: Deployment, name: str, question: oracle.Question, tokens: int, **more: Any) -> Any:
    return deployment.client().chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": content(question)}],  # type: ignore[list-item,misc]
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
        **more,
    )


def test_concurrent_requests_for_adapters_answer_as_the_merged_models_do(
    deployment: Deployment, checkpoint: Path, folders: dict[str, Path]
) -> None:
    """Again: from the prefix cache, which has the same prompt of all three."""
    base = deployment.local.model
    assert [model.id for model in deployment.client().models.list().data] == [base, "one", "two"]
    asked = [(name, question) for question in (TEXT, IMAGE) for name in (base, *folders)]
    expected = [oracle.answer(checkpoint, q, TOKENS, True, folders.get(name)) for name, q in asked]
    assert len(set(expected)) == len(expected)
    with ThreadPoolExecutor(len(asked)) as threads:

        def all_are_cached() -> bool:
            answers = list(threads.map(lambda one: ask(deployment, *one, TOKENS), asked))
            if [answer.choices[0].message.content for answer in answers] != expected:
                raise RuntimeError(f"not {expected}: {answers}")
            return all(answer.usage.prompt_tokens_details.cached_tokens > 0 for answer in answers)

        # A picture's request may find the beginning that it shares with a text's before it. What was cached is
        # reported after the handover, and may miss the answer.
        all_are_cached()
        wait_until(all_are_cached, "all answers are of prompts that were cached")


def test_a_stream_of_an_adapter_continues_when_its_decode_pod_is_killed(
    deployment: Deployment, checkpoint: Path, folders: dict[str, Path]
) -> None:
    expected = oracle.answer(checkpoint, IMAGE, LONG_TOKENS, True, folders["two"])
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(busy, deployment, "decode", "decode_running")
        answer = map(text_of, ask(deployment, "two", IMAGE, LONG_TOKENS, stream=True))
        text = next(filter(None, answer))
        pod = found.result()
    send(deployment, pod, signal.SIGSTOP)
    deployment.kill(pod)
    assert text + "".join(answer) == expected
    deployment.wait_ready(pod)


# --- what does not fit --------------------------------------------------------------------------------------------


def test_up_starts_nothing_with_an_adapter_of_a_kind_that_vllm_refuses(
    checkpoint: Path, tmp_path: Path
) -> None:
    bad = adapters.write(tmp_path / "bad", oracle.served(checkpoint).model, seed=1, use_dora=True)
    lines: list[str] = []
    with pytest.raises(
        InvalidDeploymentError, match=r"spec\.engine\.adapters\[bad\]: .* not yet support DoRA"
    ):
        asyncio.run(started(checkpoint, bad, tmp_path, lines))
    assert not lines


def test_an_adapter_of_a_tower_ends_its_pod_naming_the_tensor(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MAX_FUTILE_STARTS", 1)
    tensor = f"{adapters.PREFIX}model.visual.blocks.0.attn.proj.lora_A.weight"
    also = {tensor: torch.zeros(8, 8)}
    bad = adapters.write(tmp_path / "bad", oracle.served(checkpoint).model, seed=1, also=also)
    lines: list[str] = []
    with pytest.raises(supervisor.GaveUpError, match="before it became Ready") as gave_up:
        asyncio.run(started(checkpoint, bad, tmp_path, lines))
    for part in (
        "cannot serve (engine_settings): spec.engine.adapters[bad]: ",
        tensor,
        "; set id to another",
    ):
        assert part in gave_up.value.message


async def started(checkpoint: Path, adapter: Path, folder: Path, decode_lines: list[str]) -> None:
    """Run a deployment with an adapter until it is ready; its path is relative to the file."""
    spec = {
        "engine": {"type": "VLLM", "adapters": [{"name": "bad", "id": f"./{adapter.relative_to(folder)}"}]},
        "model": {"id": str(checkpoint), "dtype": "Float32"},
        "decode": {"replicas": 1, **KV},
    }

    def log(pod: str, line: str) -> None:
        if "decode" in pod:
            decode_lines.append(line)

    file = write(folder / "refused.yaml", spec, name="refused")
    async with up.running(up.load(file), threads=1, log_line=log):
        pass
