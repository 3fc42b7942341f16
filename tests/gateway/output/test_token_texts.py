"""The bytes of single tokens join to the text of an answer, with the vocabularies that models have."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mmd_workers.gateway.output.detokenizer import IncrementalDetokenizer
from mmd_workers.gateway.output.token_texts import DecodedToken, TokenTexts


class Vocabulary:
    """What `TokenTexts` needs of a frontend."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=special_tokens)

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=not special_tokens)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return self.tokenizer.convert_ids_to_tokens(list(ids))

    def ids(self, *tokens: str) -> list[int]:
        return self.tokenizer.convert_tokens_to_ids(list(tokens))


def byte_level() -> Vocabulary:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the red circle is left of größer 日本語 😀"], trainer)
    return Vocabulary(tokenizer)


def metaspace() -> Vocabulary:
    """With byte fallback and Llama's decoder, which drops a text's leading space."""
    words = ("▁", "▁the", "▁red", "▁circle", "s", "a", "▁a", "<eos>")
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Vocabulary(tokenizer)


VOCABULARIES = {"byte level": byte_level(), "metaspace": metaspace()}


def texts_of(vocabulary: Vocabulary, ids: list[int], **more: bool) -> list[DecodedToken]:
    texts, begins, found = TokenTexts(vocabulary, **more), True, list[DecodedToken]()
    for token_id in ids:
        found.append(texts.of(token_id, begins=begins))
        begins = begins and found[-1].is_special
    return found


@pytest.mark.parametrize("kind", VOCABULARIES)
@given(data=st.data())
def test_bytes_of_any_tokens_join_to_their_text(kind: str, data: st.DataObject) -> None:
    vocabulary = VOCABULARIES[kind]
    ids = data.draw(st.lists(st.integers(0, len(vocabulary.tokenizer) - 1), max_size=30))
    whole = vocabulary.decode(ids)
    joined = b"".join(text.data for text in texts_of(vocabulary, ids))
    detokenizer = IncrementalDetokenizer(vocabulary.decode)
    if "\ufffd" not in whole:
        assert joined.decode() == whole == detokenizer.push(ids) + detokenizer.flush()


def test_words_keep_their_spaces_and_parts_of_characters_have_their_bytes() -> None:
    vocabulary = VOCABULARIES["metaspace"]
    ids = vocabulary.ids("▁the", "▁red", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁circle", "s", "<eos>")
    found = texts_of(vocabulary, ids)
    assert [text.data for text in found] == [
        *(b"the", b" red", b"\xf0", b"\x9f", b"\x98", b"\x80"),
        *(b" circle", b"s", b""),
    ]
    assert [text.characters for text in found] == [3, 4, 1, 0, 0, 0, 7, 1, 0]
    assert [text.text for text in found][:3] == ["the", " red", "\ufffd"]
    assert (found[-1].text, found[-1].is_special) == ("<eos>", True)


def test_special_tokens_are_text_where_the_answer_has_them() -> None:
    vocabulary = VOCABULARIES["metaspace"]
    found = texts_of(vocabulary, vocabulary.ids("<eos>", "▁red"), special_tokens=True)
    assert b"".join(text.data for text in found).decode() == vocabulary.decode(
        vocabulary.ids("<eos>", "▁red"), special_tokens=True
    )
