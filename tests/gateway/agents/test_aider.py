"""aider as people install it, without a network: it writes what a pod streams to the file that it edits."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from support.harness import namespace
from support.harness.namespace import run_without_outside
from support.serving.other_clients import AIDER
from tests.gateway.agents.agents import KEY, MODEL, URL
from tests.gateway.running import Launch

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(namespace.missing()), reason=namespace.missing()),
]

OPTIONS = ("--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--yes-always")
EDIT = "number.py\n```\nnumber = 2\n```\n"
RUN_SECONDS = 120.0


async def test_aider_edits_a_file(launch: Launch, tmp_path: Path) -> None:
    gateway = await launch({"servedName": [MODEL]})
    worker = await gateway.worker(EDIT)
    file = tmp_path / "number.py"
    file.write_text("number = 1\n")
    installed, url = AIDER.install(), httpx.URL(gateway.url)
    assert url.port is not None
    ended = await run_without_outside(
        [installed / "aider", "--model", f"openai/{MODEL}", *OPTIONS, "--message", "Make it 2.", file.name],
        server=(url.host, url.port),
        environment={
            "HOME": str(tmp_path),
            "PATH": f"{installed}:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "OPENAI_API_BASE": f"{URL}/v1",
            "OPENAI_API_KEY": KEY,
        },
        folder=tmp_path,
        seconds=RUN_SECONDS,
    )
    assert ended.status == 0, ended.text[-4000:]
    assert file.read_text() == "number = 2\n"
    assert "number = 1" in gateway.tokenizer.decode(worker.requests[0].token_ids)
