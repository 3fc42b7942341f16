"""Reasoning before answers from pools of either engine, whose answers move from prefill to decode: forms begin after it, and both engines agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest

from support.oracles.tokens import with_template, with_tokens
from support.serving.engines import needs_vllm
from support.serving.local_deployment import Deployment, write

from .random_media import KV, content, png

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("demo"), pytest.mark.timeout(600)]

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "[assistant]{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
END = 1  # </think>
MAX_TOKENS = 96
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"to": {"enum": ["left", "right"]}, "steps": {"enum": [1, 2]}},
    "required": ["to", "steps"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "move", "schema": SCHEMA}}
QUESTIONS = [["Where to?"], [("image", png(1, 56, 84)), "Where to?"]]
SAMPLED = [{"temperature": 1.0, "seed": seed, "logit_bias": {str(END): 4}} for seed in range(6)]
Answer = tuple[str | None, str | None, str, int]  # reasoning, content, finish reason, tokens of the reasoning


@pytest.fixture(scope="module")
def with_reasoning(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with markers of reasoning as tokens, and a template that begins it."""
    folder = with_template(checkpoint, tmp_path_factory.mktemp("models") / "with_reasoning", TEMPLATE)
    with_tokens(folder, "<think>", "</think>", special=True)
    return folder


def answers_of(engine: str, model: Path, folder: Path) -> list[Answer]:
    """A deployment's answers, greedy ones first, each the same in a stream."""
    spec = {
        "engine": {"type": engine},
        "model": {"id": str(model), "dtype": "Float32"},
        "transfer": {"kv": {"backend": "Gloo"}},
        "prefill": {"replicas": 1, **KV},
        "decode": {"replicas": 1, **KV},
    }
    found: list[Answer] = []
    with Deployment(write(folder / "reasoning.yaml", spec, name="reasoning")) as deployment:
        client = deployment.client()
        for more in (
            {"temperature": 0},
            {"temperature": 0, "logit_bias": {str(END): 100}},
            {"temperature": 0, "reasoning_effort": "none"},
            *SAMPLED,
        ):
            for parts in QUESTIONS:
                asked: dict[str, Any] = {
                    "model": deployment.local.model,
                    "messages": [{"role": "user", "content": content(parts)}],
                    "response_format": FORM,
                    "max_tokens": MAX_TOKENS,
                    **more,
                }
                made = client.chat.completions.create(**asked)
                (choice,) = made.choices
                reasoning = (choice.message.model_extra or {}).get("reasoning_content")
                chunks = list(client.chat.completions.create(**asked, stream=True))
                deltas = [chunk.choices[0].delta for chunk in chunks]
                assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
                thoughts = [(delta.model_extra or {}).get("reasoning_content") for delta in deltas]
                assert "".join(filter(None, thoughts)) == (reasoning or "")
                count = made.usage.completion_tokens_details.reasoning_tokens
                found.append((reasoning, choice.message.content, choice.finish_reason, count))
        claude = anthropic.Anthropic(base_url=deployment.gateway_url, api_key="none", timeout=120)
        message = claude.messages.create(
            model=deployment.local.model,
            max_tokens=8,
            messages=[{"role": "user", "content": "Where to?"}],
            thinking={"type": "enabled", "budget_tokens": 1024},
            extra_body={"temperature": 0},
        )
        assert [block.type for block in message.content] == ["thinking"]
        assert message.stop_reason == "max_tokens"
    return found


def check(answers: list[Answer]) -> None:
    for reasoning, said, reason, count in answers:
        if reason == "length":
            assert (said is None) == (count == MAX_TOKENS)
        else:
            assert reason == "stop"
            jsonschema.validate(json.loads(said or ""), SCHEMA)
        assert bool(reasoning) <= (count > 0)
    cut, ended, off = answers[0], answers[len(QUESTIONS)], answers[2 * len(QUESTIONS)]
    assert (cut[1], cut[3]) == (None, MAX_TOKENS)
    assert (ended[0], ended[3]) == (None, 1)
    assert (off[0], off[3]) == (None, 0)
    assert any(reasoning and reason == "stop" for reasoning, _, reason, _ in answers)


@pytest.fixture(scope="module")
def native(with_reasoning: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    return answers_of("Native", with_reasoning, tmp_path_factory.mktemp("native"))


def test_answers_match_their_schema_after_the_reasoning(native: list[Answer]) -> None:
    check(native)


@needs_vllm
def test_vllm_answers_after_reasoning_match_schemas_and_the_native_engine(
    native: list[Answer], with_reasoning: Path, tmp_path: Path
) -> None:
    found = answers_of("VLLM", with_reasoning, tmp_path)
    check(found)
    assert found[: 3 * len(QUESTIONS)] == native[: 3 * len(QUESTIONS)]  # greedy
