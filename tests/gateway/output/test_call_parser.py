"""Calls in the text of an answer: what is a call and what is content, however the text is cut into pieces."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmd_workers.gateway.output.call_parser import MAX_TOOL_CALLS, CallParser
from mmd_workers.model.call_forms import FORMS, Spelling

NAMES = frozenset({"add", "now"})
HERMES, MISTRAL, ARGS, LLAMA = "Hermes", "Mistral", "Mistral with [ARGS]", "Llama 3"
QWEN_CODER, GLM, MINIMAX = "Qwen3-Coder", "GLM", "MiniMax-M2"
TYPES = {"add": {"a": frozenset({"integer"}), "s": frozenset({"string"})}}
"""Of the arguments that are elements."""
Call = tuple[str, str]  # name, arguments


def parser(form: str, most: int = MAX_TOOL_CALLS) -> CallParser:
    return CallParser(Spelling(FORMS[form], "", "", "", "", ""), NAMES, most=most, types=TYPES)


def parsed(reader: CallParser, pieces: list[str]) -> tuple[str, list[Call]]:
    """Content and calls, once the answer has ended."""
    content, calls = "", list[Call]()
    for found in [*map(reader.push, pieces), reader.flush()]:
        content += found.content
        for part in found.calls:
            if part.name is not None:
                assert (part.index, part.id is None) == (len(calls), False)
                calls.append((part.name, ""))
            assert part.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    assert reader.num_calls == len(calls)
    return content, calls


def hermes(name: str, arguments: str = '{"a": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ADD = ("add", '{"a": 1}')
NOW = ("now", "{}")
TRICKY = '{"a": "}</tool_call>\\"{", "b": [{}, "]"], "c": {"d": -1.5e3}}'
BROKEN = '<tool_call>{"name": "add", "arguments": '


def qwen_coder(name: str, **arguments: str) -> str:
    elements = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{elements}</function>\n</tool_call>"


def glm(name: str, **arguments: str) -> str:
    elements = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{''.join(elements)}</tool_call>"


def minimax(*made: tuple[str, dict[str, str]]) -> str:
    calls = [
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in made
    ]
    return f"<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>"


LINES = 'a "line"\n\n  <b>\\ </param'
WITH_LINES = ("add", json.dumps({"a": 1, "s": LINES}))

CASES: list[tuple[str, str, str, str, list[Call]]] = [
    ("text", HERMES, "the red circle", "the red circle", []),
    ("nothing", HERMES, "", "", []),
    ("white space alone", HERMES, " \n ", " \n ", []),
    ("white space around text", HERMES, "\n a \n", "\n a \n", []),
    ("a call", HERMES, hermes("add"), "", [ADD]),
    ("a call on one line", HERMES, '<tool_call>{"name":"add","arguments":{"a": 1}}</tool_call>', "", [ADD]),
    ("a call with parameters", HERMES, '<tool_call>{"name": "now", "parameters": {}}</tool_call>', "", [NOW]),
    ("white space around calls", HERMES, f"\n\n{hermes('add')}\n{hermes('now', '{}')}\n\n", "", [ADD, NOW]),
    ("text before a call", HERMES, "Well.\n" + hermes("add"), "Well.\n", [ADD]),
    ("text after a call", HERMES, hermes("add") + "\nDone.", "\nDone.", [ADD]),
    ("text between calls", HERMES, hermes("add") + " and " + hermes("now", "{}"), " and ", [ADD, NOW]),
    ("arguments with brackets and tags in strings", HERMES, hermes("add", TRICKY), "", [("add", TRICKY)]),
    ("the tool of nobody", HERMES, hermes("sub"), hermes("sub"), []),
    ("a tag in text", HERMES, "use <tool_call> so", "use <tool_call> so", []),
    ("a tag at the end", HERMES, "use <tool_call>", "use <tool_call>", []),
    ("half a tag at the end", HERMES, "use <tool_", "use <tool_", []),
    ("a tag before a call", HERMES, "<tool_call>" + hermes("add"), "<tool_call>", [ADD]),
    ("a call that ends in its name", HERMES, '<tool_call>\n{"name": "ad', '<tool_call>\n{"name": "ad', []),
    ("a name that does not end", HERMES, f'<tool_call>{{"name": "{"a" * 99}', f'<tool_call>{{"name": "{"a" * 99}', []),
    ("arguments that are text", HERMES, BROKEN + '"a"}</tool_call>', BROKEN + '"a"}</tool_call>', []),
    ("arguments without a name", HERMES, '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ("no JSON in a tag", HERMES, "<tool_call>add(1)</tool_call> x", "<tool_call>add(1)</tool_call> x", []),
    ("arguments that are cut", HERMES, BROKEN + '{"a": "b', "", [("add", '{"a": "b')]),
    ("arguments that are no JSON", HERMES, BROKEN + '{"a": </tool_call> x', "</tool_call> x", [("add", '{"a": ')]),
    ("a call without its end", HERMES, BROKEN + '{"a": 1}}\n</tool', "", [ADD]),
    ("a call with another end", HERMES, BROKEN + '{"a": 1}]\n x', "]\n x", [ADD]),
    ("arguments with another bracket", HERMES, BROKEN + '{"a": [1}}</tool_call>', "}}</tool_call>", [("add", '{"a": [1')]),
    ("a call with another field", HERMES, BROKEN + '{"a": 1}, "b": {"c": ["}"]}}\n</tool_call>', "", [ADD]),
    ("a call with another field and text", HERMES, BROKEN + '{"a": 1} , "b": 1}</tool_call> x', " x", [ADD]),
    ("a call that is cut in another field", HERMES, BROKEN + '{"a": 1}, "b": "', "", [ADD]),
    ("a call with another field that is no JSON", HERMES, BROKEN + '{"a": 1}, "b": ] x', "] x", [ADD]),
    ("a list with another field", MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "b": 1, "id": "a"}, {"name": "now", "arguments": {}}]', "", [ADD, NOW]),
    ("an object with another field", LLAMA, '{"name": "add", "parameters": {"a": 1}, "type": "function"}', "", [ADD]),
    ("a call after a broken one", HERMES, BROKEN + "{!" + hermes("now", "{}"), "!", [("add", "{"), NOW]),
    ("a list", MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "", [ADD]),
    ("a list of two with ids", MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "a1"}, {"name": "now", "arguments": {}}]', "", [ADD, NOW]),
    ("text around a list", MISTRAL, 'a [TOOL_CALLS][{"name": "now", "arguments": {}}] b', "a  b", [NOW]),
    ("a list without its end", MISTRAL, '[TOOL_CALLS][{"name": "now", "arguments": {}},', "", [NOW]),
    ("a list with the tool of nobody", MISTRAL, '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "sub", "arguments": {}}]', ', {"name": "sub", "arguments": {}}]', [NOW]),
    ("a list that breaks off", MISTRAL, '[TOOL_CALLS][{"name": "now", "arguments": {}} x', " x", [NOW]),
    ("no list", MISTRAL, '[TOOL_CALLS]{"name": "now", "arguments": {}}', '[TOOL_CALLS]{"name": "now", "arguments": {}}', []),
    ("a call with [ARGS]", ARGS, '[TOOL_CALLS]add[ARGS]{"a": 1}', "", [ADD]),
    ("two calls with [ARGS]", ARGS, '[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', "", [ADD, NOW]),
    ("text around [ARGS]", ARGS, "a[TOOL_CALLS]now[ARGS]{}b", "ab", [NOW]),
    ("no [ARGS]", ARGS, "[TOOL_CALLS]now{}", "[TOOL_CALLS]now{}", []),
    ("an object", LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
    ("an object after a tag", LLAMA, '<|python_tag|>{"name": "now", "parameters": {}}\n', "", [NOW]),
    ("an object after a tag of Llama 4", LLAMA, '<|python_start|>{"name": "now", "parameters": {}}', "", [NOW]),
    ("an object after tags", LLAMA, '<|python_start|><|python_end|>{"name": "now", "parameters": {}}', "", [NOW]),
    ("an object and text", LLAMA, '{"name": "now", "parameters": {}}; more', "; more", [NOW]),
    ("a second object", LLAMA, '{"name": "now", "parameters": {}}{"name": "now", "parameters": {}}', '{"name": "now", "parameters": {}}', [NOW]),
    ("an object after text", LLAMA, 'So {"name": "now", "parameters": {}}', 'So {"name": "now", "parameters": {}}', []),
    ("an object that begins with its type", LLAMA, '{"type": "function", "name": "add", "parameters": {"a": 1}}', "", [ADD]),
    ("a list of objects that begin with their type", MISTRAL, '[TOOL_CALLS][{"type": "function", "name": "add", "arguments": {"a": 1}}, {"type":"function","name": "now", "arguments": {}}]', "", [ADD, NOW]),
    ("an object of another type", LLAMA, '{"type": "text", "name": "add", "parameters": {}}', '{"type": "text", "name": "add", "parameters": {}}', []),
    ("a call that begins with an id", HERMES, '<tool_call>{"id": "call_0", "name": "now", "arguments": {}}</tool_call>', "", [NOW]),
    ("a call that begins with its type and an id", HERMES, '<tool_call>{"type": "function", "id": "a-1", "name": "now", "arguments": {}}</tool_call>', "", [NOW]),
    ("elements in lines", QWEN_CODER, qwen_coder("add", a="1", s=LINES), "", [WITH_LINES]),
    ("two calls of elements", QWEN_CODER, "So.\n" + qwen_coder("add", a="1") + "\n" + qwen_coder("now") + " x", "So.\n x", [ADD, NOW]),
    ("elements on one line", QWEN_CODER, "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>", "", [ADD]),
    ("an empty text", QWEN_CODER, qwen_coder("add", s=""), "", [("add", '{"s": ""}')]),
    ("a line break alone", QWEN_CODER, qwen_coder("add", s="\n"), "", [("add", r'{"s": "\n"}')]),
    ("elements of the tool of nobody", QWEN_CODER, qwen_coder("sub", a="1"), qwen_coder("sub", a="1"), []),
    ("elements that are cut in a text", QWEN_CODER, qwen_coder("add", s="red").partition("</parameter>")[0][:-1], "", [("add", '{"s": "red')]),
    ("elements that are cut between two", QWEN_CODER, qwen_coder("add", a="1").partition("</function>")[0], "", [("add", '{"a": 1')]),
    ("elements that are cut in a number", QWEN_CODER, "<tool_call><function=add><parameter=a>\n12", "", [("add", '{"a": 12')]),
    ("text among elements", QWEN_CODER, "<tool_call><function=add><parameter=a>1</parameter>so", "so", [ADD]),
    ("elements without their end", QWEN_CODER, "<tool_call><function=add><parameter=a>1</parameter></function>", "", [ADD]),
    ("elements that are cut in their end", QWEN_CODER, "<tool_call><function=add><parameter=a>1</parameter></func", "", [("add", '{"a": 1')]),
    ("keys and values", GLM, glm("add", a="1", s=LINES), "", [WITH_LINES]),
    ("keys and values on one line", GLM, "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "", [ADD]),
    ("two calls of keys and values", GLM, glm("add", a="1") + "\n" + glm("now"), "", [ADD, NOW]),
    ("a name alone", GLM, "<tool_call>now</tool_call>", "", [NOW]),
    ("a name that does not end a line", GLM, "<tool_call>now what</tool_call>", "<tool_call>now what</tool_call>", []),
    ("a list of calls with elements", MINIMAX, "So. " + minimax(("add", {"a": "1", "s": LINES}), ("now", {})) + "x", "So. x", [WITH_LINES, NOW]),
    ("a list with elements of the tool of nobody", MINIMAX, minimax(("now", {}), ("sub", {})), '\n<invoke name="sub">\n</invoke>\n</minimax:tool_call>', [NOW]),
    ("a section", "MiniMax-M1", 'So <tool_calls>\n{"name": "add", "arguments": {"a": 1}}\n{"name": "now", "arguments": {}}\n</tool_calls>x', "So x", [ADD, NOW]),
    ("a list in a section", "Hunyuan", '<tool_calls>[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]</tool_calls>x', "x", [ADD, NOW]),
    ("a list in capital letters", "Nemotron", '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>x', "x", [NOW]),
    ("actions", "InternLM", '<|action_start|><|plugin|>\n{"name": "add", "parameters": {"a": 1}}<|action_end|><|action_start|> <|plugin|>{"name": "now", "parameters": {}}<|action_end|>', "", [ADD, NOW]),
    ("numbered calls", "Command R7B", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>', "", [ADD, NOW]),
    ("ids with names", "Kimi K2", 'x<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>', "x", [ADD, NOW]),
    ("an id without a group", "Kimi K2", '<|tool_calls_section_begin|><|tool_call_begin|>now:12<|tool_call_argument_begin|>{}<|tool_call_end|>', "", [NOW]),
    ("fenced calls", "DeepSeek-V3", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", [ADD, NOW]),
    ("calls without fences", "DeepSeek-V3.1", 'x<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "x", [ADD, NOW]),
    ("another object", LLAMA, '{"named": 1}', '{"named": 1}', []),
]  # fmt: skip


def test_every_form_has_cases() -> None:
    assert {form for _, form, *_ in CASES} == set(FORMS)


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_calls_and_content_are_told_apart(form: str, text: str, content: str, calls: list[Call]) -> None:
    assert parsed(parser(form), [text]) == (content, calls)
    assert parsed(parser(form), list(text)) == (content, calls)


def tokens_read(form: str, tokens: list[tuple[str, bool]], together: int) -> tuple[str, list[Call]]:
    """What comes of these texts, each of which is the token of the form's marker or other ones; so many are read at once."""
    reader = CallParser(Spelling(FORMS[form], "", "", "", "", "", {FORMS[form].marker: 7}), NAMES)
    pieces = []
    for text, is_marker in tokens:
        reader.expect(7 if is_marker else 1, text)
        pieces.append(text)
    joined = "".join(pieces)
    return parsed(reader, [joined[at : at + together] for at in range(0, len(joined), together)])


@pytest.mark.parametrize("together", [1, 3, 1000])
def test_text_that_spells_a_token_marker_is_no_call(together: int) -> None:
    rest = '{"name": "add", "arguments": {"a": 1}}</tool_call>'
    spelled = [("<tool", False), ("_call>", False), (rest, False)]
    token = [("<tool_call>", True), (rest, False)]
    assert tokens_read(HERMES, spelled, together) == ("<tool_call>" + rest, [])
    assert tokens_read(HERMES, token, together) == ("", [ADD])
    assert tokens_read(HERMES, [*spelled, *token], together) == ("<tool_call>" + rest, [ADD])
    assert tokens_read(HERMES, [*token, *spelled], together) == ("<tool_call>" + rest, [ADD])
    assert tokens_read(HERMES, [(" ", False), ("<tool_call>", True), *spelled], together) == (
        " <tool_call><tool_call>" + rest, []
    )  # fmt: skip
    listed = '[{"name": "now", "arguments": {}}]'
    assert tokens_read(MISTRAL, [("[TOOL_CALLS]", False), (listed, False)], together)[1] == []
    assert tokens_read(MISTRAL, [("[TOOL_CALLS]", True), (listed, False)], together) == ("", [NOW])


def test_calls_are_found_after_text_that_is_skipped() -> None:
    rest = '{"name": "add", "arguments": {"a": 1}}</tool_call>'
    before, marker = [(1, "so "), (7, "<tool_call>"), (1, " so")], (7, "<tool_call>")
    for begin, read in ((marker, ("", [ADD])), ((1, "<tool_call>"), ("<tool_call>" + rest, []))):
        reader = CallParser(Spelling(FORMS[HERMES], "", "", "", "", "", {"<tool_call>": 7}), NAMES)
        for token_id, text in (*before, begin, (1, rest)):
            reader.expect(token_id, text)
        reader.skip(sum(len(text) for _, text in before))
        assert parsed(reader, ["<tool_call>" + rest]) == read


SNIPPETS = [
    ', "more": 1', ', "',
    "<tool_call>", "</tool_call>", '{"name": "add", "arguments": ', '{"name": "sub", "arguments": ', "[TOOL_CALLS]", "[", "]", ", ", "add[ARGS]", "{", "}",
    '{"a": "<tool_call>\\""}', '"', "\\", "\n", " ", "text", hermes("add"), hermes("now", "{}"), '{"name": "now", "parameters": {}}', "é", "<", "[TOOL",
    "<function=add>", "<parameter=s>", "<parameter=a>\n", "\n</parameter>", "</parameter>", "</function>", "<tool_call>add", "<arg_key>s</arg_key>", "<arg_value>",
    "</arg_value>", "<minimax:tool_call>", '<invoke name="add">', '<parameter name="z">', "</invoke>", "</minimax:tool_call>", "5", qwen_coder("add", s="a"),
    glm("add", z="1"), minimax(("add", {"a": "1"})), "<tool_calls>", "</tool_calls>", "functions.add:1", "<|tool_call_begin|>",
]  # fmt: skip


@given(st.sampled_from(list(FORMS)), st.lists(st.sampled_from(SNIPPETS), max_size=12), st.data())
def test_any_split_of_a_text_gives_the_same_calls_and_content(
    form: str, snippets: list[str], data: st.DataObject
) -> None:
    text = "".join(snippets)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(parser(form), pieces) == parsed(parser(form), [text])


@given(st.lists(st.sampled_from([*SNIPPETS, "add"]), max_size=12))
def test_no_letter_of_a_text_without_calls_is_lost(snippets: list[str]) -> None:
    text = "".join(snippets)
    for form in FORMS:
        content, calls = parsed(parser(form), [text])
        if not calls:
            assert content == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_any_arguments_are_read_to_their_end(arguments: dict, ascii_only: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    assert parsed(parser(HERMES), list(hermes("add", written))) == ("", [("add", written)])


FORMATS = {
    QWEN_CODER: lambda arguments: qwen_coder("add", **arguments),
    GLM: lambda arguments: glm("add", **arguments),
    MINIMAX: lambda arguments: minimax(("add", arguments)),
}
ELEMENT_KEY = st.text(st.sampled_from("abKEY_-.1é"), min_size=1, max_size=5)


@pytest.mark.parametrize("form", FORMATS)
@given(
    texts=st.dictionaries(ELEMENT_KEY, st.text(st.sampled_from('ab<>/parameter_"\\\n é{}'), max_size=20), max_size=4),
    others=st.dictionaries(ELEMENT_KEY, JSON.filter(lambda value: not isinstance(value, str) and "Infinity" not in json.dumps(value)), max_size=4),
    data=st.data(),
)  # fmt: skip
def test_arguments_in_elements_are_what_the_model_wrote(
    form: str, texts: dict, others: dict, data: st.DataObject
) -> None:
    arguments = {**others, **{k: v for k, v in texts.items() if FORMS[form].element.close not in v}}
    types = {k: frozenset({"string" if k in texts else "object"}) for k in arguments}
    text = FORMATS[form]({k: v if k in texts else json.dumps(v) for k, v in arguments.items()})
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    spelling = Spelling(FORMS[form], "", "", "", "", "")
    content, calls = parsed(CallParser(spelling, NAMES, types={"add": types}), pieces)
    assert content == ""
    assert [(name, json.loads(written)) for name, written in calls] == [("add", arguments)]


VALUES = [
    ("5", {"string"}, '"5"'),
    ("5", {"integer"}, "5"),
    ("5", {"string", "integer"}, "5"),
    ("5", {"number", "string"}, "5"),
    ("5.5", {"string", "integer"}, '"5.5"'),
    ("5", {"boolean"}, "5"),
    ("123456789012345678901234567890.10", {"number"}, "123456789012345678901234567890.10"),
    ("five", {"integer"}, '"five"'),
    ("null", {"string", "null"}, "null"),
    ("null", {"string"}, '"null"'),
    ("None", {"integer", "null"}, "null"),
    ("True", {"boolean"}, "true"),
    ("True", {"string"}, '"True"'),
    ("NaN", {"number"}, '"NaN"'),
    (' {"a": [1, "b"]} ', {"object"}, '{"a": [1, "b"]}'),
    ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
    ('"red"', {"string", "object"}, r'"\"red\""'),
    ('"red"', {"array"}, '"red"'),
    ("[" * 100_000, {"array"}, json.dumps("[" * 100_000)),
]


@pytest.mark.parametrize(
    ("written", "types", "expected"), VALUES, ids=[f"{w[:20]} of {sorted(t)}" for w, t, _ in VALUES]
)
def test_a_value_in_an_element_is_of_the_types_that_its_schema_permits(
    written: str, types: set[str], expected: str
) -> None:
    reader = CallParser(
        Spelling(FORMS[GLM], "", "", "", "", ""), NAMES, types={"add": {"a": frozenset(types)}}
    )
    assert parsed(reader, [glm("add", a=written)]) == ("", [("add", f'{{"a": {expected}}}')])


def test_a_value_without_a_schema_is_json_or_a_text() -> None:
    made = qwen_coder("now", n="5", t="red", b="true", o='{"a": 1}')
    assert parsed(parser(QWEN_CODER), [made])[1] == [
        ("now", '{"n": 5, "t": "red", "b": true, "o": {"a": 1}}')
    ]


def test_a_text_in_an_element_comes_as_it_is_written() -> None:
    reader = parser(QWEN_CODER)
    (begun,) = reader.push("<tool_call>\n<function=add>\n<parameter=s>\nthe ").calls
    assert (begun.name, begun.arguments) == ("add", '{"s": "the ')
    assert [part.arguments for part in reader.push('"red"\n').calls] == [r"\"red\""]
    assert [part.arguments for part in reader.push("circle</para").calls] == [r"\ncircle"]
    assert not reader.complete
    assert [part.arguments for part in reader.push("meter>\n</function>\n</tool_call>").calls] == ['"}']
    assert reader.complete


def test_a_name_and_arguments_come_as_soon_as_they_are_there() -> None:
    reader = parser(HERMES)
    assert reader.push('<tool_call>{"name": "add", "arguments": ').calls == []
    (begun,) = reader.push('{"a').calls
    assert (begun.index, begun.name, begun.arguments) == (0, "add", '{"a')
    assert re.fullmatch("[A-Za-z0-9]{9}", begun.id or "")
    (more,) = reader.push('": 1').calls
    assert (more.id, more.name, more.arguments) == (None, None, '": 1')
    assert not reader.complete
    assert [part.arguments for part in reader.push("}}</tool_call>").calls] == ["}"]
    assert reader.complete


def test_text_is_held_no_longer_than_it_may_be_a_call() -> None:
    assert parser(HERMES).push("a < b").content == "a < b"
    reader = parser(HERMES)
    assert reader.push("a <too").content == "a "
    assert reader.push("th").content == "<tooth"
    reader = parser(LLAMA)
    assert reader.push('{"n').content == ""
    assert reader.push("o").content == '{"no'
    assert parser(LLAMA).push("The").content == "The"


def test_calls_after_the_most_are_content() -> None:
    text = hermes("add") + hermes("now", "{}")
    assert parsed(parser(HERMES, most=1), [text]) == (hermes("now", "{}"), [ADD])
    listed = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]'
    assert parsed(parser(MISTRAL, most=1), [listed]) == (', {"name": "now", "arguments": {}}]', [ADD])


@pytest.mark.parametrize("piece", [" ", "<tool_call>", "<", '<tool_call>{"name": "', "\\", "[TOOL_CALLS]["])
def test_long_texts_take_linear_time(piece: str) -> None:
    reader, inside = parser(HERMES), parser(HERMES)
    inside.push(BROKEN + '{"')
    elements = [parser(QWEN_CODER), parser(QWEN_CODER)]
    for element, key in zip(elements, "sz", strict=True):
        element.push(f"<tool_call><function=add><parameter={key}>")
    begun = time.process_time()
    for _ in range(20_000):
        reader.push(piece)
        inside.push(piece)
        for element in elements:
            element.push(piece)
    reader.flush()
    assert time.process_time() - begun < 10  # the square would take minutes
