"""Requests that agents and benchmark clients have sent, each answered as its client needs it.

`recorded/CLIENT.json` has the bodies with placeholders for texts: `{"$tool_set": i}` stands for an entry of `tool_sets`, and `lengths` has
the characters of texts that were long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from support.oracles.tokens import with_context
from tests.gateway.running import Launch

DEMO = Path(str(resources.files("mmd_workers.model") / "demo"))
RECORDED = Path(__file__).with_name("recorded")
MODEL = "local-model"
CONTEXT_TOKENS = 200_000
VOCABULARY_TOKENS = 6_016  # the recorded prompts of token ids are those of a larger tokenizer than the demo's
ENDS = {
    "/v1/chat/completions": ("data: [DONE]\n\n",),
    "/v1/completions": ("data: [DONE]\n\n",),
    "/v1/messages": ('data: {"type":"message_stop"}\n\n',),
    "/v1/responses": ("event: response.completed\n", "event: response.incomplete\n"),
}

REFUSED: frozenset[str] = frozenset()
"""Names of requests that are still refused, each with a field and a remedy."""


@dataclass(frozen=True)
class Recording:
    name: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def num_images(self) -> int:
        return json.dumps(self.body).count("image/png")


def recordings() -> Iterator[Recording]:
    for file in sorted(RECORDED.glob("*.json")):
        recorded = json.loads(file.read_text())
        for number, request in enumerate(recorded["requests"]):
            body = request["body"]
            if "tools" in body:
                body["tools"] = recorded["tool_sets"][body["tools"]["$tool_set"]]
            body = json.loads(json.dumps(body))
            for place, length in request["lengths"].items():
                lengthen(body, place, length)
            name = f"{file.stem}-{number}-{request['variant']}"
            yield Recording(name, request["path"], request["headers"], body)


def lengthen(body: Any, place: str, length: int) -> None:
    """Replace a placeholder by a text of this length."""
    *path, last = [int(key) if key.isdigit() else key for key in re.findall(r"\w+", place)]
    for key in path:
        body = body[key]
    assert isinstance(body[last], str)
    body[last] = ("red circle " * (length // 11 + 1))[:length]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with room for what agents send."""
    return with_context(DEMO, tmp_path_factory.mktemp("model") / "demo", CONTEXT_TOKENS, VOCABULARY_TOKENS)


def test_every_recording_has_its_own_name() -> None:
    names = [recording.name for recording in recordings()]
    assert len(set(names)) == len(names) == 66
    assert set(names) >= REFUSED


async def test_recorded_requests_of_agents_are_answered(launch: Launch, model: Path, subtests: Any) -> None:
    gateway = await launch({"id": str(model), "servedName": [MODEL]})
    worker = await gateway.worker("the red circle")
    for recording in recordings():
        with subtests.test(recording.name):
            before = len(worker.requests)
            response = await gateway.http.post(recording.path, json=recording.body, headers=recording.headers)
            if recording.name in REFUSED:
                assert response.status_code == 400
                continue
            assert response.status_code == 200, response.text
            sent = worker.requests[before:]
            assert [len(request.features) for request in sent] == [recording.num_images] * len(sent)
            if recording.body.get("stream"):
                ends = ENDS[recording.path.partition("?")[0]]
                assert any(end in response.text for end in ends)
                assert "error" not in re.findall(r"^event: (\w+)$", response.text, re.MULTILINE)
