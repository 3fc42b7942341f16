"""Pieces of text join to the whole, whatever the cuts; stop strings are found across cuts and nothing of them gets out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mmd_workers.gateway.output.detokenizer import REPLACEMENT, IncrementalDetokenizer, StopScanner

CORPUS = [
    "the red circle is left of the blue square",
    "größer 日本語 😀👩‍🚀 naïve café — ok",
    "1 + 1 = 2\n\n",
]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<eos>", "<image>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A metaspace vocabulary with byte fallback and Llama's decoder, which drops a text's leading space."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "▁red", "▁circle", "s", "a", "b"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def cuts(ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    at = 0
    while at < len(ids):
        for size in sizes or [1]:
            yield ids[at : at + size]
            at += size


@pytest.mark.parametrize("before", [1, 2, 5])
def test_a_sequence_that_continues_a_text_keeps_the_space_between_them(
    byte_fallback: Tokenizer, before: int
) -> None:
    """A decoder that drops the leading space of a text drops it of no later piece."""
    ids = [
        byte_fallback.token_to_id(piece)
        for piece in ("▁the", "▁red", "▁circle", "s", "a", "▁the", "▁red", "b")
    ]
    detokenizer = IncrementalDetokenizer(byte_fallback.decode, ids[:before])
    text = detokenizer.push(ids[before:]) + detokenizer.flush()
    assert byte_fallback.decode(ids[:before]) + text == byte_fallback.decode(ids)


@given(ids=st.lists(st.integers(0, 319), max_size=80), sizes=st.lists(st.integers(1, 5), max_size=4))
@settings(max_examples=400, deadline=None)
def test_pieces_of_random_ids_join_to_the_decoding_of_the_full_sequence(
    byte_level: Tokenizer, ids, sizes
) -> None:
    ids = [i for i in ids if i < byte_level.get_vocab_size()]
    detokenizer = IncrementalDetokenizer(byte_level.decode)
    text = "".join(detokenizer.push(chunk) for chunk in cuts(ids, sizes)) + detokenizer.flush()
    assert text == byte_level.decode(ids)


@given(text=st.text(max_size=60), sizes=st.lists(st.integers(1, 3), max_size=3))
@settings(max_examples=300, deadline=None)
def test_valid_text_never_shows_a_replacement_character_on_the_way(
    byte_level: Tokenizer, text, sizes
) -> None:
    text = text.replace(REPLACEMENT, "")
    ids = byte_level.encode(text, add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(byte_level.decode)
    pieces = [detokenizer.push(chunk) for chunk in cuts(ids, sizes)]
    assert REPLACEMENT not in "".join(pieces)
    assert "".join(pieces) + detokenizer.flush() == byte_level.decode(ids)


def test_bytes_of_one_character_come_out_together(byte_level: Tokenizer) -> None:
    alphabet = {chr(c) for c in range(33, 127)}
    assert alphabet
    ids = [i for ch in "😀" for i in byte_level.encode(ch).ids]
    assert len(ids) > 1
    detokenizer = IncrementalDetokenizer(byte_level.decode)
    assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["😀"]


def test_an_unfinished_character_comes_out_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("😀").ids[:-1]
    detokenizer = IncrementalDetokenizer(byte_level.decode)
    assert "".join(detokenizer.push([i]) for i in ids) == ""
    assert detokenizer.flush() == byte_level.decode(ids)


def test_the_window_stays_small_even_when_no_byte_is_ever_valid(byte_level: Tokenizer) -> None:
    broken = byte_level.token_to_id("å")  # the byte 0xE5: begins a character that never ends
    detokenizer = IncrementalDetokenizer(byte_level.decode)
    text = "".join(detokenizer.push([broken]) for _ in range(500)) + detokenizer.flush()
    assert text == byte_level.decode([broken] * 500)
    assert len(detokenizer._window) < 64


def test_words_of_a_metaspace_vocabulary_keep_their_spaces_and_bytes_their_characters(
    byte_fallback: Tokenizer,
) -> None:
    byte = {b: byte_fallback.token_to_id(f"<0x{b:02X}>") for b in range(256)}
    words = [byte_fallback.token_to_id(w) for w in ("▁the", "▁red", "s", "▁circle")]
    ids = words * 9 + [byte[b] for b in "€😀ü".encode()] + words * 5
    detokenizer = IncrementalDetokenizer(byte_fallback.decode)
    pieces = [detokenizer.push([i]) for i in ids]
    assert REPLACEMENT not in "".join(pieces)
    assert "".join(pieces) + detokenizer.flush() == byte_fallback.decode(ids)


def earliest_complete(text: str, stops: list[str]) -> str:
    found = [(text.find(s) + len(s), text.find(s)) for s in stops if s and s in text]
    return text[: min(found)[1]] if found else text


@given(
    text=st.text(alphabet="abc", max_size=40),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
@settings(max_examples=500, deadline=None)
def test_text_ends_at_its_first_complete_stop_string_however_cut(text, stops, sizes) -> None:
    scanner = StopScanner(stops)
    out = "".join(scanner.push("".join(map(chr, chunk))) for chunk in cuts([ord(c) for c in text], sizes))
    out += scanner.flush()
    assert out == earliest_complete(text, stops)
    assert (scanner.matched is not None) == any(s in text for s in stops)


@given(
    pieces=st.lists(st.text(alphabet="ab]^-\\\n", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab]^-\\\n", min_size=1, max_size=6), max_size=64),
)
@settings(max_examples=400, deadline=None)
def test_the_longest_beginning_of_any_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += scanner.push(piece)
        if scanner.matched is not None:
            break
        assert text.startswith(shown)
        begun = [stop[:n] for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert text[len(shown) :] == max(begun, key=len, default="")


def test_no_more_is_held_back_than_may_begin_a_stop_string() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("the E") == "the "
    assert scanner.push("N") == ""
    assert scanner.push("d") == "ENd"
    assert scanner.push("EN") == ""
    assert scanner.push("D and more") == ""
    assert scanner.matched == "END"
    assert scanner.flush() == ""


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.integers(0, 12),
)
@settings(max_examples=400, deadline=None)
def test_a_stop_string_counts_where_it_is_complete_after_the_least_tokens(pieces, stops, least) -> None:
    scanner = StopScanner(stops)
    shown = "".join([scanner.push(piece, stops=number >= least) for number, piece in enumerate(pieces)])
    text, start = "".join(pieces), len("".join(pieces[:least]))
    found = [
        (at + len(stop), at)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > start
    ]
    if found:
        assert shown == text[: min(found)[1]]
        assert scanner.matched is not None
    else:
        assert shown + scanner.flush() == text
        assert scanner.matched is None
