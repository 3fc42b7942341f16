"""A model that is split across ranks: what becomes of a pod and its requests when the process of one of them ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from support.harness.processes import children
from support.harness.waiting import wait_until
from support.serving.engines import needs_vllm
from support.serving.local_deployment import Deployment, write

from .random_media import KV, content, png
from .redundant import busy, text_of

pytestmark = [needs_vllm, pytest.mark.processes, pytest.mark.alone, pytest.mark.timeout(600)]
SPEC = {
    "engine": {"type": "VLLM", "decode": {"tensorParallelSize": 2}},
    "decode": {"replicas": 2, **KV},
}
QUESTION = [("image", png(1, 84, 84)), "What is this?"]
TOKENS = 150


def stream(deployment: Deployment) -> Iterator[str]:
    """The texts of a long answer."""
    chunks = deployment.client().chat.completions.create(
        model=deployment.local.model,
        messages=[{"role": "user", "content": content(QUESTION)}],  # type: ignore[typeddict-item,arg-type]
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return map(text_of, chunks)


def ranks(pod: int) -> list[int]:
    """Processes that a pod has spawned and that wait for vLLM's messages."""
    return [child for child in children(pod) if os.getsid(child) == child]


def test_a_stream_continues_when_a_rank_of_its_pod_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    spec = SPEC | {"model": {"id": str(checkpoint), "dtype": "Float32"}}
    with Deployment(write(tmp_path / "ranks.yaml", spec, name="ranks")) as deployment:
        undisturbed = "".join(stream(deployment))
        answer = stream(deployment)
        text = "".join(islice(answer, 20))
        pod = busy(deployment, "decode", "decode_running")
        before = deployment.pid(pod)
        assert before is not None
        mine = ranks(before)
        assert len(mine) == 2
        os.kill(mine[1], signal.SIGKILL)
        assert text + "".join(answer) == undisturbed
        wait_until(lambda: deployment.pid(pod) not in (before, None), f"{pod.name} starts again")
        assert deployment.logged(
            "rank 1 of vLLM was killed (SIGKILL), perhaps for its memory; the pod restarts"
        )
        assert not any(Path(f"/proc/{rank}").exists() for rank in mine)
        deployment.wait_ready(pod)
