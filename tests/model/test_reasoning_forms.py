"""How models reason, found in templates as checkpoints have them and in the tokens that their tokenizers add."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmd_workers.model.call_forms import probed_call
from mmd_workers.model.reasoning import Begin, Reasoning, Render, found_reasoning, with_reasoning

TEXT = "{% for p in m.content %}{{ p.text }}{% endfor %}"
TURNS = "{% for m in messages %}<|{{ m.role }}|>REASONING" + TEXT + "{% endfor %}"
BEGIN = "{% if add_generation_prompt %}<|assistant|>\n"
AFTER_QUESTION = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index %}{% endif %}{% endfor %}"
    + TURNS.replace(
        "REASONING",
        "{% if m.reasoning_content is defined and loop.index > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}",
    )
)
ALWAYS = TURNS.replace("REASONING", "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}")
PARTS = TURNS.replace(
    TEXT,
    TEXT.replace(
        "{{ p.text }}",
        "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}",
    ),
)
PLAIN = TURNS.replace("REASONING", "")

QWEN_THINKING = AFTER_QUESTION + BEGIN + "<think>\n{% endif %}"
QWEN_HYBRID = (
    AFTER_QUESTION + BEGIN
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)  # fmt: skip
GLM_HYBRID = (
    ALWAYS.replace(TEXT, TEXT + "{% if m.role == 'user' and enable_thinking is defined and not enable_thinking %}/nothink{% endif %}")
    + BEGIN + "{% if enable_thinking is defined and not enable_thinking %}<think></think>\n{% endif %}{% endif %}"
)  # fmt: skip
DEEPSEEK_HYBRID = ALWAYS + BEGIN + "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
MAGISTRAL = "Draft: [THINK]thoughts[/THINK]" + PARTS.replace("REASONING", "")
KIMI = PLAIN + BEGIN + "{% endif %}{# ◁think▷ ◁/think▷ #}"
BOTH = {"<think>": 5, "</think>": 6}


def renderer(template: str) -> Render:
    compiled = ImmutableSandboxedEnvironment().from_string(template)

    def render(messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        try:
            return compiled.render(messages=messages, add_generation_prompt=True, **variables)
        except TemplateError:
            return ""

    return render


def found(template: str, tokens: dict[str, int]) -> Reasoning | None:
    return found_reasoning([template], tokens, renderer(template), probed_call())


CASES: list[tuple[str, str, dict[str, int], Reasoning | None]] = [
    ("a prompt that begins it", QWEN_THINKING, BOTH, Reasoning("<think>", "</think>", BOTH, True, "", "reasoning_content")),
    ("a switch", QWEN_HYBRID, BOTH, Reasoning("<think>", "</think>", BOTH, True, "enable_thinking", "reasoning_content")),
    ("a switch that questions show", GLM_HYBRID, {}, Reasoning("<think>", "</think>", {}, True, "enable_thinking", "reasoning")),
    ("a switch that is off", DEEPSEEK_HYBRID, {}, Reasoning("<think>", "</think>", {}, True, "thinking", "reasoning")),
    ("parts", MAGISTRAL, {"[THINK]": 1, "[/THINK]": 2}, Reasoning("[THINK]", "[/THINK]", {"[THINK]": 1, "[/THINK]": 2}, True, "", "part")),
    ("text that is no token", KIMI, {}, Reasoning("◁think▷", "◁/think▷", {}, True, "")),
    ("tokens alone", PLAIN, BOTH, Reasoning("<think>", "</think>", BOTH, False, "")),
    ("the template before the tokenizer", KIMI, BOTH, Reasoning("◁think▷", "◁/think▷", {}, True, "")),
    ("parts that are written as they are", PLAIN.replace(TEXT, "{{ m.content }}"), BOTH, Reasoning("<think>", "</think>", BOTH, False, "")),
    ("one of two tokens", PLAIN, {"<think>": 5}, None),
    ("none", PLAIN, {}, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "tokens", "reasoning"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_the_form_is_found_in_template_and_tokenizer(
    template: str, tokens: dict[str, int], reasoning: Reasoning | None
) -> None:
    assert found(template, tokens) == reasoning


def test_a_template_that_raises_on_probing_still_has_its_markers() -> None:
    refusing = "{{ raise_exception('no') }}</think>"
    assert found(refusing, {}) == Reasoning("<think>", "</think>", {}, True, "")


def test_a_switch_works_where_there_is_one() -> None:
    hybrid, fixed = found(DEEPSEEK_HYBRID, {}), found(QWEN_THINKING, BOTH)
    assert hybrid is not None
    assert fixed is not None
    assert [hybrid.variables(on) for on in (True, False, None)] == [
        {"thinking": True},
        {"thinking": False},
        {},
    ]
    assert [fixed.variables(on) for on in (True, False)] == [{}, {}]


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


ASKED, ASKED_OFF = [said("user", "2+2? <think>")], [said("user", "2+2? /no_think")]
CALLED = [*ASKED, said("assistant", "add"), said("tool", "4</think>")]
NEMOTRON = (
    PLAIN + BEGIN
    + "{% if '/no_think' in messages[-1].content[0].text %}<think></think>{% else %}<think>\n{% endif %}{% endif %}"
)  # fmt: skip
DEEPSEEK_R1 = (
    PLAIN + "{# </think> #}<|end|>"
    + "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|assistant|><think>\n{% endif %}"
)  # fmt: skip
BEGINS: list[tuple[str, str, dict[str, Any], list[dict[str, Any]], Begin]] = [
    ("always", QWEN_THINKING, {}, ASKED, "inside"),
    ("a switch as it is", QWEN_HYBRID, {}, ASKED, "before"),
    ("a switch that is on", QWEN_HYBRID, {"enable_thinking": True}, ASKED, "before"),
    ("a switch that is off", QWEN_HYBRID, {"enable_thinking": False}, ASKED, "after"),
    ("a switch that questions show, off", GLM_HYBRID, {"enable_thinking": False}, ASKED, "after"),
    ("a switch that is off, as it is", DEEPSEEK_HYBRID, {}, ASKED, "after"),
    ("a switch that is off, turned on", DEEPSEEK_HYBRID, {"thinking": True}, ASKED, "inside"),
    ("a message that leaves it on", NEMOTRON, {}, ASKED, "inside"),
    ("a message that turns it off", NEMOTRON, {}, ASKED_OFF, "after"),
    ("a question", DEEPSEEK_R1, {}, ASKED, "inside"),
    ("the result of a tool", DEEPSEEK_R1, {}, CALLED, "before"),
    ("no marker", KIMI, {}, ASKED, "before"),
]


@pytest.mark.parametrize(
    ("template", "variables", "messages", "begins"), [b[1:] for b in BEGINS], ids=[b[0] for b in BEGINS]
)
def test_each_prompt_shows_where_its_reasoning_is(
    template: str, variables: dict[str, Any], messages: list[dict[str, Any]], begins: Begin
) -> None:
    reasoning = found(template, {})
    assert reasoning is not None
    assert reasoning.begin_after(renderer(template)(messages, variables)) == begins


def test_reasoning_goes_where_the_template_looks_for_it() -> None:
    content = [{"type": "text", "text": "red"}]
    message = {"role": "assistant", "content": content, "reasoning_content": "so"}
    rest = {"role": "assistant", "content": content}
    assert with_reasoning(message, "reasoning") == {**rest, "reasoning": "so"}
    assert with_reasoning(message, "part")["content"] == [{"type": "thinking", "thinking": "so"}, *content]
    assert with_reasoning(message, "") == with_reasoning(rest, "part") == rest
