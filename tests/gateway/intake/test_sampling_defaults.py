"""A request that leaves a parameter out gets what the checkpoint recommends in its generation_config.json."""

from __future__ import annotations

import json
import logging
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from mmd_workers.model import source
from tests.gateway.running import Launch

DEMO = Path(str(resources.files("mmd_workers.model") / "demo"))
MODEL = "builtin/demo"
RECOMMENDED = {"temperature": 0.1, "top_p": 0.001, "top_k": 1, "min_p": 0.05, "repetition_penalty": 1.05}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "where?"}]}
PATHS: dict[str, dict] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "red"},
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/v1/responses": {"model": MODEL, "input": "where?"},
}


def recommending(folder: Path, **values: object) -> Path:
    """The demo model with these values beside those of its generation_config.json."""
    folder.mkdir()
    for file in DEMO.iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "generation_config.json"
    values = {**json.loads(config.read_text()), **values}
    config.unlink()
    config.write_text(json.dumps(values))
    return folder


def drawn(sampling: Any) -> dict[str, float]:
    rules = sampling.rules
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0 if rules is None else rules.repetition_penalty,
    }


@pytest.mark.parametrize("path", PATHS)
async def test_what_the_checkpoint_recommends_holds_unless_the_request_says_otherwise(
    launch: Launch, tmp_path: Path, path: str
) -> None:
    folder = recommending(tmp_path / "model", **RECOMMENDED)
    gateway = await launch(model={"id": str(folder), "servedName": [MODEL]})
    worker = await gateway.worker()
    answer = await gateway.http.post(path, json=PATHS[path])
    assert answer.status_code == 200, answer.text
    assert drawn(worker.requests[-1].sampling) == RECOMMENDED
    if path == "/v1/responses":
        assert (answer.json()["temperature"], answer.json()["top_p"]) == (0.1, 0.001)
    own = {"temperature": 1, "top_p": 1}
    answer = await gateway.http.post(path, json={**PATHS[path], **own})
    assert answer.status_code == 200, answer.text
    assert drawn(worker.requests[-1].sampling) == {**RECOMMENDED, **own}


async def test_a_request_can_turn_every_recommendation_off(launch: Launch, tmp_path: Path) -> None:
    folder = recommending(tmp_path / "model", **RECOMMENDED)
    gateway = await launch(model={"id": str(folder), "servedName": [MODEL]})
    worker = await gateway.worker()
    off = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    answer = await gateway.http.post("/v1/chat/completions", json={**CHAT, **off})
    assert answer.status_code == 200, answer.text
    assert drawn(worker.requests[-1].sampling) == off
    assert worker.requests[-1].sampling.rules is None


async def test_beside_drafts_only_what_works_with_them_is_used(launch: Launch, tmp_path: Path) -> None:
    folder = recommending(tmp_path / "model", **RECOMMENDED)
    engine = {"type": "VLLM", "decode": {"speculative": {"method": "ngram", "numSpeculativeTokens": 2}}}
    gateway = await launch(model={"id": str(folder), "servedName": [MODEL]}, engine=engine)
    worker = await gateway.worker()
    answer = await gateway.http.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200, answer.text
    usable = {"temperature": 0.1, "top_p": 0.001, "top_k": 1}
    assert drawn(worker.requests[-1].sampling) == {
        **RECOMMENDED,
        "min_p": 0,
        "repetition_penalty": 1,
        **usable,
    }


def test_values_that_no_request_could_have_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {"temperature": 5, "top_p": "0.9", "top_k": -1, "min_p": True, "repetition_penalty": None}
    folder = recommending(tmp_path / "model", **wrong)
    with caplog.at_level(logging.WARNING):
        assert source.sampling_defaults(folder) == {}
    named = [record.getMessage().split()[0] for record in caplog.records]
    assert named == ["temperature", "top_p", "top_k", "min_p"]
    assert source.sampling_defaults(DEMO) == {}
