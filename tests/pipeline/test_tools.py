"""Forced calls of tools from pools of either engine, whose answers move from prefill to decode: their schemas are matched, and both engines agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from support.oracles.tokens import with_template
from support.serving.engines import needs_vllm
from support.serving.local_deployment import Deployment, write

from .random_media import KV, content, png

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("demo"), pytest.mark.timeout(600)]

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "move": {
        "type": "object",
        "properties": {
            "to": {"enum": ["left", "right"]},
            "steps": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
        },
        "required": ["to", "steps"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}},
}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
QUESTIONS = [["Where to?"], [("image", png(1, 56, 84)), "Where to?"], ["Where to? " * 20]]
Calls = list[tuple[str, str]]


@pytest.fixture(scope="module")
def with_tools(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a template that has tools."""
    return with_template(checkpoint, tmp_path_factory.mktemp("models") / "with_tools", TEMPLATE)


def calls_of(engine: str, model: Path, folder: Path) -> list[Calls]:
    """The calls in a deployment's answers, each the same in a stream."""
    spec = {
        "engine": {"type": engine},
        "model": {"id": str(model), "dtype": "Float32"},
        "transfer": {"kv": {"backend": "Gloo"}},
        "prefill": {"replicas": 1, **KV},
        "decode": {"replicas": 1, **KV},
    }
    found: list[Calls] = []
    with Deployment(write(folder / "tools.yaml", spec, name="tools")) as deployment:
        client = deployment.client()
        for more in ({"temperature": 0}, {"temperature": 1.5, "seed": 4}):
            for parts in QUESTIONS:
                asked: dict[str, Any] = {
                    "model": deployment.local.model,
                    "messages": [{"role": "user", "content": content(parts)}],
                    "tools": TOOLS,
                    "tool_choice": "required",
                    "parallel_tool_calls": False,
                    **more,
                }
                (choice,) = client.chat.completions.create(**asked).choices
                assert choice.finish_reason == "tool_calls"
                calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
                with client.chat.completions.stream(**asked) as stream:
                    streamed = stream.get_final_completion().choices[0].message.tool_calls
                assert [(c.function.name, c.function.arguments) for c in streamed] == calls
                found.append(calls)
    return found


def check(calls: list[Calls]) -> None:
    for ((name, arguments),) in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.fixture(scope="module")
def native(with_tools: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Calls]:
    return calls_of("Native", with_tools, tmp_path_factory.mktemp("native"))


def test_forced_calls_match_their_schemas(native: list[Calls]) -> None:
    check(native)
    assert len({calls[0] for calls in native}) > 1


@needs_vllm
def test_forced_calls_of_vllm_match_schemas_and_the_native_engine(
    native: list[Calls], with_tools: Path, tmp_path: Path
) -> None:
    found = calls_of("VLLM", with_tools, tmp_path)
    check(found)
    assert found[: len(QUESTIONS)] == native[: len(QUESTIONS)]  # greedy
