"""More clients that people already use, each installed from its registry into an environment of its own: OpenAI's for Node, Vercel's AI SDK,
Instructor, and `llm`, against a real deployment, with answers equal to `generate`."""

from __future__ import annotations

import base64
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mmd_cli.samples import draw
from support.oracles import oracle
from support.serving import other_clients
from support.serving.local_deployment import Deployment

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("demo"), pytest.mark.timeout(900)]

DEMO = Path(str(resources.files("mmd_workers.model") / "demo"))
MODEL = "builtin/demo"
QUESTION = "What color is the shape?"
PICTURE = draw("image", 31)
COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}, "sides": {"enum": [3, 4]}},
    "required": ["color", "sides"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def expected() -> str:
    """What the whole model answers to `QUESTION`."""
    return oracle.answer(DEMO, [QUESTION], 24)


@pytest.fixture(scope="module")
def seen() -> str:
    """What it answers about `PICTURE`."""
    return oracle.answer(DEMO, [("image", PICTURE.bytes), QUESTION], 24)


def request_to(demo: Deployment) -> dict[str, Any]:
    picture = f"data:{PICTURE.mime};base64,{base64.b64encode(PICTURE.bytes).decode()}"
    return {
        "url": f"{demo.gateway_url}/v1",
        "model": MODEL,
        "question": QUESTION,
        "picture": picture,
        "schema": COLOR,
    }


def test_openais_client_for_node(demo: Deployment, expected: str, seen: str) -> None:
    found = other_clients.node("node_clients.mjs", "openai", request=request_to(demo))
    assert found["texts"] == [expected] * 4
    assert min(found["counts"]) > 2
    assert found["seen"] == seen
    assert found["call"]["name"] == "draw"
    jsonschema.validate(json.loads(found["call"]["arguments"]), COLOR)
    assert len(set(found["ids"])) == 1
    assert (found["refused"]["name"], found["refused"]["status"]) == ("NotFoundError", 404)
    assert "makes no embeddings" in found["refused"]["message"]
    assert MODEL in found["names"]


def test_vercels_ai_sdk(demo: Deployment, expected: str, seen: str) -> None:
    found = other_clients.node("node_clients.mjs", "vercel", request=request_to(demo))
    assert found["texts"] == [expected] * 2
    assert found["counts"][0] > 2
    assert found["seen"] == seen
    assert found["call"]["name"] == "draw"
    jsonschema.validate(found["call"]["arguments"], COLOR)
    assert found["results"] == 1
    jsonschema.validate(found["formed"], COLOR)
    assert found["usage"]["outputTokens"] > 0


def test_instructor(demo: Deployment) -> None:
    found = other_clients.python("with_instructor.py", request=request_to(demo))
    assert len(found) == 4
    for shape in found.values():
        jsonschema.validate(shape, COLOR)


def test_llm(demo: Deployment, expected: str, seen: str, tmp_path: Path) -> None:
    program = other_clients.environment() / "llm"
    model = {
        "model_id": "demo",
        "model_name": MODEL,
        "api_base": f"{demo.gateway_url}/v1",
        "vision": True,
        "supports_schema": True,
    }
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump([model]))
    picture = tmp_path / "picture.png"
    picture.write_bytes(PICTURE.bytes)

    def llm(*arguments: object) -> str:
        options = ("-m", "demo", "--no-log", "--key", "none", "-o", "temperature", 0)
        return other_clients.program(program, "prompt", *options, *arguments, LLM_USER_PATH=str(tmp_path))

    few = ("-o", "max_tokens", 24)
    assert llm(*few, QUESTION).rstrip("\n") == expected.rstrip("\n")
    assert llm(*few, "--no-stream", QUESTION).rstrip("\n") == expected.rstrip("\n")
    assert llm(*few, "-a", picture, QUESTION).rstrip("\n") == seen.rstrip("\n")
    shape = llm("-o", "max_tokens", 160, "--schema", json.dumps(COLOR), "Draw something.")
    jsonschema.validate(json.loads(shape), COLOR)
