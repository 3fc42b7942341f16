"""Calls and reasoning in answers: the gateway's parsers beside those that vLLM has for the same forms, which serve as a reference.

The gateway parses for both engines, so what it makes of an answer must be what users of vLLM get. Answers come to it in pieces of any number of
tokens; vLLM's parsers read them whole, and in the same pieces where they do not depend on how an answer is cut. Where both differ on
purpose, a row of a table has what each makes of the answer, and why.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mmd_workers.gateway.output.call_parser import CallParser
from mmd_workers.gateway.output.detokenizer import IncrementalDetokenizer
from mmd_workers.gateway.output.reasoning_parser import ReasoningParser
from mmd_workers.model.call_forms import FORMS, MAY_BE_TOKENS, Spelling
from mmd_workers.model.reasoning import BLANK, MARKERS, Reasoning
from mmd_workers.vllm_engine.setup.environment import prepare_environment
from support.oracles import random_model

prepare_environment()

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.reasoning import ReasoningParserManager  # noqa: E402
from vllm.tool_parsers import ToolParserManager  # noqa: E402

NAMES = ("add", "get-weather", "now_2")
HERMES, MISTRAL, ARGS, LLAMA = "Hermes", "Mistral", "Mistral with [ARGS]", "Llama 3"
HUNYUAN, INTERN, KIMI, DEEPSEEK, DEEPSEEK_31 = (
    "Hunyuan",
    "InternLM",
    "Kimi K2",
    "DeepSeek-V3",
    "DeepSeek-V3.1",
)
QWEN_CODER, GLM, MINIMAX = "Qwen3-Coder", "GLM", "MiniMax-M2"
PARSERS = {
    HERMES: "hermes",
    MISTRAL: "mistral",
    ARGS: "mistral",
    LLAMA: "llama3_json",
    HUNYUAN: "hunyuan_a13b",
}
PARSERS |= {INTERN: "internlm", KIMI: "kimi_k2", DEEPSEEK: "deepseek_v3", DEEPSEEK_31: "deepseek_v31"}
"""vLLM's, by our name of the form."""
ELEMENTS = {QWEN_CODER: "qwen3_coder", GLM: "glm45", MINIMAX: "minimax_m2"}
"""The same of forms whose arguments are elements."""
UNREAD = {"MiniMax-M1", "Nemotron", "Command R7B"}
"""Forms for which vLLM has no parser that reads a whole answer."""
TYPES = {"a": "integer", "s": "string", "b": "boolean", "o": "object", "n": "number", "l": "array"}
ELEMENTS = {"Qwen3-Coder": "qwen3_coder", "GLM": "glm45", "MiniMax-M2": "minimax_m2"}
"""The same of the forms whose arguments are elements."""
THINK, _, MAGISTRAL = MARKERS
REASONING = {"deepseek_r1": THINK, "qwen3": THINK, "glm45": THINK, "kimi_k2": THINK, "mistral": MAGISTRAL}
"""By vLLM's name its markers. It has no parser for `◁think▷`."""
WHOLE_ONLY = {"deepseek_r1"}
"""Those that leave a marker in the text of a piece that has more tokens."""
REQUEST = ChatCompletionRequest.model_validate(
    {
        "messages": [{"role": "user", "content": "what?"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "parameters": {
                        "type": "object",
                        "properties": {key: {"type": value} for key, value in TYPES.items()},
                    },
                },
            }
            for name in NAMES
        ],
        "tool_choice": "auto",
    }
)


@pytest.fixture(autouse=True, scope="module")
def few_lines():
    """vLLM's parsers log each answer that they cannot read."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@functools.cache
def tokenizer(*absent):
    """A byte-level one with the markers as tokens, but for those that are `absent`."""
    markers = {*MAY_BE_TOKENS, *THINK, *MAGISTRAL} - {*absent}
    recipe = random_model.Recipe(random_model.Size(), extra_tokens=sorted(markers))
    recipe.make_tokenizer()
    return recipe.tokenizer


def of_form(form):
    """What a model that writes this form has: vLLM takes the form of Mistral from whether `[ARGS]` is a token."""
    return tokenizer("[THINK]", "[/THINK]", *(["[ARGS]"] if form == MISTRAL else []))


@dataclass
class Read:
    """What a parser makes of an answer: content, calls with their arguments, and reasoning."""

    content: str = ""
    calls: list[tuple[str, object]] = field(default_factory=list)
    reasoning: str = ""


def streamed(tokens, ids, cuts) -> Iterator[tuple[list[int], str, list[str]]]:
    """Tokens that come at once, the text of all of them, and of each. The pieces end before the tokens `cuts`."""
    detokenizer = IncrementalDetokenizer(lambda part: tokens.decode(part, skip_special_tokens=False))
    for first, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        texts = [detokenizer.push([token_id]) for token_id in ids[first:end]]
        if end == len(ids) and texts:
            texts[-1] += detokenizer.flush()
        yield ids[first:end], "".join(texts), texts


def loaded(arguments):
    """JSON, or the text that is none: both are what an answer that is cut has."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def joined(parts):
    """Calls of (index, name, arguments) that come in parts."""
    found = []
    for index, name, arguments in parts:
        if index == len(found):
            found.append(["", ""])
        found[index][0] += name or ""
        found[index][1] += arguments or ""
    return [(name, loaded(arguments)) for name, arguments in found]


def our_calls(form, text, cuts=()):
    """What the gateway's parser makes of it."""
    tokens = of_form(form)
    ids = {marker: tokens.convert_tokens_to_ids(marker) for marker in MAY_BE_TOKENS}
    spelling = Spelling(FORMS[form], "", "", "", "", "", {m: i for m, i in ids.items() if i is not None})
    types = {name: {key: frozenset({value}) for key, value in TYPES.items()} for name in NAMES}
    reader, read, parts = CallParser(spelling, frozenset(NAMES), types=types), Read(), []

    def take(parsed):
        read.content += parsed.content
        parts.extend((part.index, part.name, part.arguments) for part in parsed.calls)

    for piece, all_text, texts in streamed(tokens, tokens.encode(text), cuts):
        for token_id, one in zip(piece, texts, strict=True):
            reader.expect(token_id, one)
        take(reader.push(all_text))
    take(reader.flush())
    read.calls = joined(parts)
    return read


def vllm_calls(form, text):
    """What vLLM's parser makes of the whole answer."""
    parser = ToolParserManager.get_tool_parser({**PARSERS, **ELEMENTS}[form])(of_form(form), REQUEST.tools)
    found = parser.extract_tool_calls(text, REQUEST)
    calls = [(call.function.name, loaded(call.function.arguments)) for call in found.tool_calls]
    return Read(found.content or "", calls)


def deltas(parse, tokens, text, cuts):
    """What one of vLLM's parsers returns for each piece."""
    before, ids = "", []
    for piece, added, _ in streamed(tokens, tokens.encode(text), cuts):
        yield parse(before, before + added, added, ids, ids + piece, piece)
        before, ids = before + added, ids + piece


def vllm_streamed_calls(form, text, cuts):
    """What vLLM's parser makes of it piece by piece."""
    tokens = of_form(form)
    parser, read, parts = ToolParserManager.get_tool_parser(PARSERS[form])(tokens), Read(), []
    parse = functools.partial(parser.extract_tool_calls_streaming, request=REQUEST)
    made = [*deltas(parse, tokens, text, cuts)]
    if finish := getattr(parser, "finish_streaming", None):
        made.append(finish())
    for delta in filter(None, made):
        read.content += delta.content or ""
        parts += [(c.index, c.function.name, c.function.arguments) for c in delta.tool_calls or []]
    read.calls = joined(parts)
    return read


def our_reasoning(markers, text, inside, cuts=()):
    """What the gateway's parser makes of it."""
    tokens, read = tokenizer(), Read()
    ids = {marker: tokens.convert_tokens_to_ids(marker) for marker in markers}
    reader = ReasoningParser(Reasoning(*markers, ids, in_template=True), inside=inside)

    def take(runs):
        for kind, part in runs:
            read.reasoning += part if kind == "reasoning" else ""
            read.content += part if kind == "content" else ""

    for piece, all_text, texts in streamed(tokens, tokens.encode(text), cuts):
        for token_id, one in zip(piece, texts, strict=True):
            reader.expect(token_id, one)
        take(reader.push(all_text))
    take(reader.flush())
    return read


def vllm_reasoning(parser, text):
    """What vLLM's parser makes of the whole answer."""
    made = ReasoningParserManager.get_reasoning_parser(parser)(tokenizer())
    reasoning, content = made.extract_reasoning(text, REQUEST)
    return Read(content or "", reasoning=reasoning or "")


def vllm_streamed_reasoning(parser, text, cuts):
    """What vLLM's parser makes of it piece by piece."""
    tokens, read = tokenizer(), Read()
    made = ReasoningParserManager.get_reasoning_parser(parser)(tokens)
    found = [*deltas(made.extract_reasoning_streaming, tokens, text, cuts)]
    if finish := getattr(made, "finish_streaming", None):
        found.append(finish())
    for delta in filter(None, found):
        read.reasoning += delta.reasoning or ""
        read.content += delta.content or ""
    return read


def without_blanks(read):
    """White space beside markers counts for neither: some parsers of vLLM leave it there, and others take away all that Unicode has."""
    return Read(read.content.strip(), read.calls, read.reasoning.strip())


# --- answers ------------------------------------------------------------------------------------------------------

LETTERS = st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="[]<>\ufffd")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(LETTERS | st.sampled_from('{}[]"\\\n\t,:'), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(LETTERS, max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(LETTERS, max_size=8), VALUES, max_size=4)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
WORDS = st.text(LETTERS.filter(lambda letter: letter not in "{}"), min_size=1, max_size=30).filter(str.strip)
NEARLY = st.lists(
    WORDS | st.sampled_from(["<", "<tool_", "[TOOL", "[", "</", "<|python", "_CALLS]"]), min_size=1
).map("".join)
"""What may be the beginning of a call for a while."""
JSON_FORMS = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "separators": st.sampled_from([(", ", ": "), (",", ":")]),
        "indent": st.sampled_from([None, 1]),
    }
)


def written(form, calls, how, typed=False):
    """Calls as a model writes them. `typed`: each begins with its type, where it is an object."""

    def one(name, arguments, key="arguments", **more):
        first = {"type": "function"} if typed else {}
        return json.dumps({**first, "name": name, key: arguments, **more}, **how)

    if form == HERMES:
        return "\n".join(f"<tool_call>\n{one(*call)}\n</tool_call>" for call in calls)
    if form == MISTRAL:
        listed = ", ".join(one(*call, id=f"abcdefgh{number}") for number, call in enumerate(calls))
        return f"[TOOL_CALLS][{listed}]"
    if form == ARGS:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(found, **how)}" for name, found in calls)
    if form == HUNYUAN:
        return f"<tool_calls>[{', '.join(one(*call) for call in calls)}]</tool_calls>"
    if form == INTERN:
        return f"<|action_start|><|plugin|>\n{one(*calls[0], key='parameters')}<|action_end|>"
    if form == KIMI:
        made = (
            f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{json.dumps(found, **how)}<|tool_call_end|>"
            for number, (name, found) in enumerate(calls)
        )
        return f"<|tool_calls_section_begin|>{''.join(made)}<|tool_calls_section_end|>"
    if form == DEEPSEEK:
        made = (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(found, **how)}\n```<｜tool▁call▁end｜>"
            for name, found in calls
        )
        return f"<｜tool▁calls▁begin｜>{chr(10).join(made)}<｜tool▁calls▁end｜>"
    if form == DEEPSEEK_31:
        made = (
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(found, **how)}<｜tool▁call▁end｜>"
            for name, found in calls
        )
        return f"<｜tool▁calls▁begin｜>{''.join(made)}<｜tool▁calls▁end｜>"
    return one(*calls[0], key="parameters")


def written_as_elements(form, calls):
    """The same where arguments are elements."""

    def value(found):
        return found if isinstance(found, str) else json.dumps(found)

    if form == QWEN_CODER:
        return "\n".join(
            f"<tool_call>\n<function={name}>\n"
            + "".join(f"<parameter={key}>\n{value(one)}\n</parameter>\n" for key, one in found.items())
            + "</function>\n</tool_call>"
            for name, found in calls
        )
    if form == GLM:
        return "\n".join(
            f"<tool_call>{name}\n"
            + "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{value(one)}</arg_value>\n"
                for key, one in found.items()
            )
            + "</tool_call>"
            for name, found in calls
        )
    made = (
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{value(one)}</parameter>\n' for key, one in found.items())
        + "</invoke>\n"
        for name, found in calls
    )
    return f"<minimax:tool_call>\n{''.join(made)}</minimax:tool_call>"


def cut(data, form_tokens, text):
    """Where pieces end."""
    most = len(form_tokens.encode(text))
    return sorted(data.draw(st.sets(st.integers(1, max(1, most - 1)), max_size=12))) if most > 1 else []


many = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def test_every_form_is_compared_or_has_no_parser():
    assert {*PARSERS, *ELEMENTS, *UNREAD} == set(FORMS)


@pytest.mark.parametrize("form", PARSERS)
@many
@given(calls=CALLS, how=JSON_FORMS, typed=st.booleans(), before=st.just("") | WORDS, data=st.data())
def test_calls_are_those_that_vllm_reads(form, calls, how, typed, before, data):
    calls = calls[:1] if form in (LLAMA, INTERN) else calls
    before = "" if form == LLAMA else before
    how = (
        {**how, "indent": None} if form in (DEEPSEEK, DEEPSEEK_31) else how
    )  # vLLM reads arguments on one line alone
    text = before + written(form, calls, how, typed)
    cuts = cut(data, of_form(form), text)
    ours = our_calls(form, text, cuts)
    assert ours.calls == calls
    assert without_blanks(ours) == without_blanks(vllm_calls(form, text))
    if form == HERMES:
        assert without_blanks(ours) == without_blanks(vllm_streamed_calls(form, text, cuts))


ELEMENT_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "a": st.integers(-(2**53), 2**53),
        "s": st.text(LETTERS | st.sampled_from('{}[]"\\\n\t,:'), max_size=12),
        "b": st.booleans(),
        "o": st.dictionaries(st.text(LETTERS, max_size=6), VALUES, max_size=3),
        "n": st.floats(allow_nan=False, allow_infinity=False),
        "l": st.lists(VALUES, max_size=3),
    },
)


@pytest.mark.parametrize("form", ELEMENTS)
@many
@given(
    calls=st.lists(st.tuples(st.sampled_from(NAMES), ELEMENT_ARGUMENTS), min_size=1, max_size=3),
    before=st.just("") | WORDS,
    data=st.data(),
)
def test_arguments_in_elements_are_those_that_vllm_reads(form, calls, before, data):
    text = before + written_as_elements(form, calls)
    cuts = cut(data, of_form(form), text)
    ours = our_calls(form, text, cuts)
    assert ours.calls == calls
    assert without_blanks(ours) == without_blanks(vllm_calls(form, text))


@pytest.mark.parametrize("form", [*PARSERS, *ELEMENTS])
@many
@given(text=NEARLY, data=st.data())
def test_an_answer_without_calls_is_content_to_both(form, text, data):
    assume("[TOOL_CALLS]" not in text)  # see below
    ours = our_calls(form, text, cut(data, of_form(form), text))
    assert ours == vllm_calls(form, text) == Read(text)


@pytest.mark.parametrize("parser", REASONING)
@pytest.mark.parametrize("begun", ["in the answer", "in the prompt"])
@many
@given(
    reasoning=WORDS,
    gap=st.sampled_from(["", "\n", "\n\n"]),
    content=st.just("") | WORDS,
    closed=st.booleans(),
    data=st.data(),
)
def test_reasoning_and_content_are_those_that_vllm_reads(
    parser, begun, reasoning, gap, content, closed, data
):
    if parser == "mistral" and begun == "in the prompt":
        pytest.skip("Mistral's templates begin no reasoning")
    begin, end = REASONING[parser]
    text = ("" if begun == "in the prompt" else begin) + gap + reasoning
    text += gap + end + gap + content if closed else ""
    cuts = cut(data, tokenizer(), text)
    ours = our_reasoning((begin, end), text, begun == "in the prompt", cuts)
    assert ours == Read(content.lstrip(BLANK) if closed else "", reasoning=reasoning.strip(BLANK))
    assert without_blanks(ours) == without_blanks(vllm_reasoning(parser, text))
    if parser not in WHOLE_ONLY:
        assert without_blanks(ours) == without_blanks(vllm_streamed_reasoning(parser, text, cuts))


# --- differences --------------------------------------------------------------------------------------------------

CALL, ADD = '{"name": "add", "arguments": {"a": 1}}', ("add", {"a": 1})
CALLED = f"<tool_call>{CALL}</tool_call>"
BROKEN = CALLED.replace("1", "'x'")
OTHER = CALLED.replace("add", "sub")
TURNED = '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'
QUOTED = CALLED.replace("1", '"</tool_call>"')
DIFFERENT_CALLS = {
    "text after a call is an answer's text, which vLLM drops": (HERMES, CALLED + "Done.", Read("Done.", [ADD]), Read("", [ADD])),
    "a marker without a call is an answer's text": (MISTRAL, "[TOOL_CALLS]", Read("[TOOL_CALLS]"), Read("")),
    "text after a list": (MISTRAL, f"[TOOL_CALLS][{CALL}]Done.", Read("Done.", [ADD]), Read("", [ADD])),
    "text after arguments": (ARGS, '[TOOL_CALLS]add[ARGS]{"a": 1}Done.', Read("Done.", [ADD]), Read("", [ADD])),
    "text after an object": (LLAMA, CALL + "Done.", Read("Done.", [ADD]), Read("", [ADD])),
    "a tool that the request does not have cannot be called by its client": (HERMES, OTHER, Read(OTHER), Read("", [("sub", {"a": 1})])),
    "the end of a call inside a string ends no call": (HERMES, QUOTED, Read("", [("add", {"a": "</tool_call>"})]), Read(QUOTED)),
    "a stream has sent the call before the answer shows that its arguments are no JSON": (
        HERMES, BROKEN, Read(BROKEN[BROKEN.index("'") :], [("add", '{"a": ')]), Read(BROKEN)
    ),
    "a stream has sent the call before the answer is cut": (HERMES, CALLED[:-14], Read("", [("add", '{"a": 1')]), Read(CALLED[:-14])),
    "no argument can be sent before the name, and vLLM's own stream of it has broken ones": (HERMES, TURNED, Read(TURNED), Read("", [ADD])),
    "both words for arguments are taken in every form": (
        HERMES, CALLED.replace("arguments", "parameters"), Read("", [ADD]), Read(CALLED.replace("arguments", "parameters"))
    ),
    "arguments are an object, as in OpenAI's API": (
        HERMES, CALLED.replace('{"a": 1}', "null"), Read(CALLED.replace('{"a": 1}', "null")), Read("", [("add", None)])
    ),
    "an id between name and arguments is no part of the name": (
        ARGS, '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}', Read("", [ADD]), Read("", [("add[CALL_ID]abc", {"a": 1})])
    ),
    "a call has the form of the template": (
        ARGS, '[TOOL_CALLS]add{"a": 1}', Read('[TOOL_CALLS]add{"a": 1}'), Read("", [ADD])
    ),
    "a second list is one, too": (MISTRAL, f"[TOOL_CALLS][{CALL}]" * 2, Read("", [ADD, ADD]), Read("", [ADD])),
    "Llama 3 makes one call, as its template says": (LLAMA, f"{CALL}; {CALL}", Read(f"; {CALL}", [ADD]), Read("", [ADD, ADD])),
    "a stream has sent elements before the answer is cut": (
        QWEN_CODER, "<tool_call><function=add><parameter=s>re", Read("", [("add", '{"s": "re')]), Read("", [("add", {})])
    ),
    "an argument that is cut between two has no end": (
        QWEN_CODER, "<tool_call><function=add><parameter=s>re</parameter>", Read("", [("add", '{"s": "re"')]), Read("", [("add", {"s": "re"})])
    ),
    "text that a stream has sent begins no call": (LLAMA, f"So {CALL}", Read(f"So {CALL}"), Read("", [ADD])),
}  # fmt: skip
"""By the reason: form, answer, what the gateway makes of it, and what vLLM does."""

DIFFERENT_REASONING = {
    "the prompt says where an answer begins, not the model's name": ("qwen3", False, "red", ("", "red"), ("red", "")),
    "so it does for other models": ("deepseek_r1", False, "red", ("", "red"), ("red", "")),
    "a marker of the beginning in the reasoning is its text": ("qwen3", True, "a<think>b</think>red", ("a<think>b", "red"), ("ab", "red")),
    "a marker in the content is its text": ("qwen3", True, "so</think>a</think>b", ("so", "a</think>b"), ("so", "ab")),
    "reasoning begins with the answer or not at all": ("mistral", False, "a[THINK]b[/THINK]c", ("", "a[THINK]b[/THINK]c"), ("b", "ac")),
    "a call that the model only thinks of is not made": ("qwen3", True, "so" + CALLED, ("so" + CALLED, ""), ("so", CALLED)),
}  # fmt: skip
"""By the reason: vLLM's parser, whether the prompt has begun the reasoning, the answer, and reasoning and content of the gateway and of vLLM."""


@pytest.mark.parametrize("reason", DIFFERENT_CALLS)
def test_calls_differ_from_those_of_vllm_only_for_a_reason(reason):
    form, text, ours, theirs = DIFFERENT_CALLS[reason]
    assert ours != theirs
    assert our_calls(form, text) == ours
    assert our_calls(form, text, range(1, len(of_form(form).encode(text)))) == ours
    assert vllm_calls(form, text) == theirs


@pytest.mark.parametrize("reason", DIFFERENT_REASONING)
def test_reasoning_differs_from_that_of_vllm_only_for_a_reason(reason):
    parser, inside, text, ours, theirs = DIFFERENT_REASONING[reason]
    assert ours != theirs
    for cuts in ((), range(1, len(tokenizer().encode(text)))):
        found = our_reasoning(REASONING[parser], text, inside, cuts)
        assert (found.reasoning, found.content) == ours
    found = vllm_reasoning(parser, text)
    assert (found.reasoning, found.content) == theirs
