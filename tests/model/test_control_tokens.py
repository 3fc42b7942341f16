"""Control tokens in texts of users: found and marked in pieces as in one, however long the text."""

from __future__ import annotations

import re
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import mark_control_tokens

from mmd_workers.model import control_tokens
from mmd_workers.model.control_tokens import PIECE_CHARACTERS, ControlTokens
from support.harness.waiting import DEADLINE_SECONDS

TOKENS = ["<a>", "<a><b>", "b>c", "<"]
START, END = mark_control_tokens("<a>", re.compile("<a>")).split("<a>")
SNIPPETS = [*TOKENS, ">", "a", "b", START, END]


def in_one(text: str, tokens: list[str]) -> str:
    return mark_control_tokens(text, re.compile("|".join(map(re.escape, sorted(tokens, key=len)[::-1]))))


@given(st.lists(st.sampled_from(SNIPPETS), max_size=20), st.integers(1, 7), st.integers(1, len(TOKENS)))
def test_a_text_in_pieces_is_marked_as_in_one(snippets: list[str], size: int, count: int) -> None:
    text, tokens = "".join(snippets), TOKENS[:count]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_tokens, "PIECE_CHARACTERS", size)
        known = ControlTokens(tokens)
        assert known.marked(text) == in_one(text, tokens)
        assert known.appear_in(text) == any(token in text for token in tokens)


def test_a_token_at_the_end_of_a_piece_is_found() -> None:
    known = ControlTokens(["<think>"])
    for before in range(PIECE_CHARACTERS - 8, PIECE_CHARACTERS + 2):
        assert known.appear_in("x" * before + "<think>")
        assert known.marked("x" * before + "<think>") == f"{'x' * before}{START}<think>{END}"


def test_a_tokenizer_without_added_tokens_has_none() -> None:
    assert not ControlTokens([]).appear_in("<think>")
    assert ControlTokens([]).marked(f"a{START}b") == "ab"


@pytest.mark.parametrize("text", ["<" * (8 << 20), "<" * (8 << 20) + "<0>"], ids=["no token", "a token"])
def test_other_threads_run_while_a_long_text_is_searched(text: str) -> None:
    known = ControlTokens(f"{first}{number}>" for number in range(8) for first in "<[{")
    started, ended, ticks = threading.Event(), threading.Event(), list[float]()

    def tick() -> None:
        while not ended.is_set():
            ticks.append(time.perf_counter())
            started.set()
            time.sleep(0.001)

    ticking = threading.Thread(target=tick)
    ticking.start()
    assert started.wait(DEADLINE_SECONDS)
    begun = time.perf_counter()
    try:
        assert known.appear_in(text) == text.endswith(">")
        known.marked(text)
        over = time.perf_counter()
    finally:
        ended.set()
        ticking.join(DEADLINE_SECONDS)
    assert len([tick for tick in ticks if begun < tick < over]) > 3
