"""Reasoning in the text of an answer: what is reasoning and what is content, however the text is cut into tokens and pieces."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmd_workers.gateway.output.reasoning_parser import ReasoningParser
from mmd_workers.model.reasoning import MARKERS, Reasoning

QWEN, KIMI, MISTRAL = MARKERS
Read = tuple[str, str, int]  # reasoning, content, tokens of the reasoning


def parser(
    markers: tuple[str, str] = QWEN, *, inside: bool = False, tokens: bool = False, gap: bool = True
) -> ReasoningParser:
    begin, end = markers
    ids = {begin: 7, end: 8} if tokens else {}
    return ReasoningParser(Reasoning(begin, end, ids, in_template=True), inside=inside, gap=gap)


def read(
    reader: ReasoningParser, tokens: list[tuple[int, str]], cuts: list[int] | None = None, lag: int = 0
) -> Read:
    """What comes of an answer of these tokens, whose text arrives in pieces that end at `cuts`, and `lag` tokens late."""
    text = "".join(piece for _, piece in tokens)
    reasoning, content, at = "", "", 0
    ends = iter([*sorted(cuts or []), len(text)])
    end = next(ends)
    noted = ""
    waiting: list[str] = []

    def take(piece: str, *, final: bool = False) -> None:
        nonlocal reasoning, content
        for kind, part in [*reader.push(piece), *(reader.flush() if final else [])]:
            reasoning += part if kind == "reasoning" else ""
            content += part if kind == "content" else ""

    for token_id, piece in tokens:
        reader.expect(token_id, piece)
        noted += piece
        while end < len(noted):
            waiting.append(text[at:end])
            at, end = end, next(ends)
        while len(waiting) > lag:
            take(waiting.pop(0))
    take("".join(waiting) + text[at:], final=True)
    return reasoning, content, reader.num_tokens


def letters(text: str) -> list[tuple[int, str]]:
    return [(1, letter) for letter in text]


CASES: list[tuple[str, bool, str, str, str]] = [
    ("an answer", False, "the red circle", "", "the red circle"),
    ("nothing", False, "", "", ""),
    ("white space", False, " \n", "", " \n"),
    ("reasoning and an answer", False, "<think>\nso\n</think>\n\nred", "so", "red"),
    ("white space before the reasoning", False, "\n <think>so</think>red", "so", "red"),
    ("white space in both", False, "<think>\n a\n\n b \n</think>\n c \n", "a\n\n b", "c \n"),
    ("reasoning that the prompt has begun", True, "so\n</think>\n\nred", "so", "red"),
    ("reasoning that is begun twice", True, "\n<think>\nso</think>red", "so", "red"),
    ("empty reasoning", False, "<think>\n\n</think>\n\nred", "", "red"),
    ("empty reasoning that the prompt has begun", True, "</think>red", "", "red"),
    ("reasoning alone", False, "<think>so</think>", "so", ""),
    ("reasoning and white space", False, "<think>so</think>\n\n", "so", ""),
    ("an answer cut in its reasoning", False, "<think>so it \n", "so it", ""),
    ("one cut in reasoning that the prompt has begun", True, "so it", "so it", ""),
    ("one cut in the marker at the end", True, "so </thi", "so </thi", ""),
    ("one cut in the marker at the begin", False, "<thi", "", "<thi"),
    ("one cut in the second marker at the begin", True, " <thi", "<thi", ""),
    ("a marker in the answer", False, "<think>so</think>use <think> and </think>", "so", "use <think> and </think>"),
    ("a marker after text", False, "so <think>a</think>", "", "so <think>a</think>"),
    ("the end without a begin", False, "so</think>red", "", "so</think>red"),
    ("a marker in the reasoning", True, "so <think> <thin </thin", "so <think> <thin </thin", ""),
    ("another tag", False, "<thinking>so</thinking>", "", "<thinking>so</thinking>"),
    ("a second block", False, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
]  # fmt: skip


WHOLE_MARKERS = [case for case in CASES if "thi" not in case[2].replace("think>", "")]
SPELLED = [
    *((QWEN, *case) for case in CASES),
    *((markers, *case) for markers in (KIMI, MISTRAL) for case in WHOLE_MARKERS),
]


@pytest.mark.parametrize(
    ("markers", "inside", "text", "reasoning", "content"),
    [(case[0], *case[2:]) for case in SPELLED],
    ids=[f"{case[0][0]} {case[1]}" for case in SPELLED],
)
def test_reasoning_and_content_are_told_apart(
    markers: tuple[str, str], inside: bool, text: str, reasoning: str, content: str
) -> None:
    def spelled(written: str) -> str:
        for mine, other in zip(QWEN, markers, strict=True):
            written = written.replace(mine, other)
        return written

    wanted = (spelled(reasoning), spelled(content))
    assert read(parser(markers, inside=inside), [(1, spelled(text))])[:2] == wanted
    written = spelled(text)
    found = read(parser(markers, inside=inside), letters(written), [*range(1, len(written))])
    assert found[:2] == wanted


def tokens_of(text: str) -> list[tuple[int, str]]:
    """Letters, and the markers as tokens."""
    found: list[tuple[int, str]] = []
    while text:
        marker = next((m for m in QWEN if text.startswith(m)), None)
        found.append((1, text[0]) if marker is None else (7 + QWEN.index(marker), marker))
        text = text[len(marker or text[0]) :]
    return found


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_markers_that_are_tokens_are_read_alike(
    inside: bool, text: str, reasoning: str, content: str
) -> None:
    assert read(parser(inside=inside, tokens=True), tokens_of(text))[:2] == (reasoning, content)


def test_text_that_spells_a_token_marker_is_no_marker() -> None:
    end = (8, "</think>")
    spelled = letters("so </think> on")
    assert read(parser(inside=True, tokens=True), [*spelled, end, (1, "red")])[:2] == (
        "so </think> on",
        "red",
    )
    assert read(parser(tokens=True), letters("<think>so"))[:2] == ("", "<think>so")
    assert read(parser(inside=True, tokens=True), letters("<think>so"))[:2] == ("<think>so", "")


@pytest.mark.parametrize("tokens", [True, False])
def test_white_space_after_the_reasoning_is_content_where_there_is_no_gap(tokens: bool) -> None:
    for text, wanted in (
        ("so \n</think>\n yes", ("so", "\n yes")),
        ("</think> ", ("", " ")),
        ("so</think>", ("so", "")),
    ):
        for lag in (0, 3):
            reader = parser(inside=True, tokens=tokens, gap=False)
            found = read(reader, tokens_of(text) if tokens else letters(text), [*range(1, len(text))], lag)
            assert found[:2] == wanted


@pytest.mark.parametrize(
    ("inside", "tokens", "count"),
    [
        (False, [(7, "<think>"), (1, "so"), (1, " it"), (8, "</think>"), (1, "\n\n"), (1, "red")], 4),
        (True, [(1, "so"), (1, " it"), (8, "</think>"), (1, "\n\n"), (1, "red")], 3),
        (False, [(1, "\n"), (7, "<think>"), (1, "so")], 3),
        (False, [(1, "red"), (7, "<think>"), (1, "so")], 0),
        (True, [(8, "</think>"), (1, "red")], 1),
        (True, [(1, ""), (1, "so")], 2),
    ],
)
def test_tokens_of_the_reasoning_are_counted_with_its_markers(
    inside: bool, tokens: list[tuple[int, str]], count: int
) -> None:
    for as_tokens in (True, False):
        for lag in (0, 2, 9):
            cuts = [*range(1, len("".join(text for _, text in tokens)))]
            assert read(parser(inside=inside, tokens=as_tokens), tokens, cuts, lag)[2] == count


SNIPPETS = ["<think>", "</think>", "<think", "</", "think>", "\n", " ", "so", "é", "<", ">"]


@given(
    st.lists(st.sampled_from(SNIPPETS), max_size=12),
    st.booleans(),
    st.booleans(),
    st.integers(0, 4),
    st.data(),
)
def test_any_cut_of_a_text_gives_the_same_reasoning_and_content(
    snippets: list[str], inside: bool, as_tokens: bool, lag: int, data: st.DataObject
) -> None:
    text = "".join(snippets)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8, unique=True))
    tokens = tokens_of(text) if as_tokens else letters(text)
    one = read(parser(inside=inside, tokens=as_tokens), tokens)
    assert read(parser(inside=inside, tokens=as_tokens), tokens, cuts, lag) == one
    if not as_tokens:
        assert read(parser(inside=inside), [(1, text)])[:2] == one[:2]


@given(st.lists(st.sampled_from(SNIPPETS), max_size=12), st.booleans(), st.booleans())
def test_nothing_but_markers_and_white_space_beside_them_is_lost(
    snippets: list[str], inside: bool, as_tokens: bool
) -> None:
    text = "".join(snippets)
    tokens = tokens_of(text) if as_tokens else letters(text)
    reasoning, content, _ = read(parser(inside=inside, tokens=as_tokens), tokens)
    assert text.endswith(content)
    before = text[: len(text) - len(content)]
    assert re.fullmatch(rf"\s*(<think>)?\s*{re.escape(reasoning)}\s*(</think>)?\s*", before)
    if not inside and not before:
        assert content == text


def test_text_is_held_no_longer_than_it_may_be_a_marker() -> None:
    reader = parser()
    reader.expect(1, "<th")
    assert reader.push("<th") == []
    reader.expect(1, "e")
    assert reader.push("e") == [("content", "<the")]
    reader = parser(inside=True)
    reader.expect(1, "so </th")
    assert reader.push("so </th") == [("reasoning", "so")]
    reader.expect(1, "en")
    assert reader.push("en") == [("reasoning", " </then")]


@pytest.mark.parametrize("piece", [" ", "<think>", "<", "</think", "so", "\n"])
@pytest.mark.parametrize("inside", [True, False])
def test_long_texts_take_linear_time(piece: str, inside: bool) -> None:
    reader = parser(inside=inside)
    begun = time.process_time()
    for _ in range(50_000):
        reader.expect(1, piece * 16)
        reader.push(piece * 16)
    reader.flush()
    assert time.process_time() - begun < 10  # the square would take minutes
