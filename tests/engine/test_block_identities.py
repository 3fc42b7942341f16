"""Identities of blocks: those of the plain definition, however they are computed. Pods of other versions compute them too."""

import hashlib
import struct

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmd_workers.engine.memory.blocks import (
    LeadingIdentities,
    block_hash,
    completed_identities,
    extend_identities,
    prompt_root,
    root_of,
)

TOKENS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 300), max_size=90)
SPANS = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 40), st.text(max_size=3)), max_size=12)
ROOTS = st.binary(max_size=16)
SIZES = st.integers(1, 20)


def plain(tokens, spans, size, root):
    """Every block is hashed by itself, and looks at every span."""
    identities, parent = [], root
    for start in range(0, len(tokens) // size * size, size):
        digest = hashlib.blake2b(
            parent + struct.pack(f"<{size}q", *tokens[start : start + size]), digest_size=16
        )
        for span_start, length, feature_id in spans:
            if span_start < start + size and span_start + length > start:
                digest.update(f"|{span_start - start}:{length}:{feature_id}".encode())
        parent = digest.digest()
        identities.append(parent)
    return identities


@settings(max_examples=300, deadline=None)
@given(TOKENS, SPANS, SIZES, ROOTS, st.lists(st.integers(0, 90), max_size=4))
@example([7] * 64, [(3, 40, "a"), (0, 64, "b"), (63, 1, "c"), (20, 2, "d")], 16, b"", [1, 3])
def test_identities_are_those_of_the_plain_definition_wherever_hashing_pauses(
    tokens, spans, size, root, pauses
):
    expected = plain(tokens, spans, size, root)
    extended: list[bytes] = []
    for blocks in [*sorted(min(pause, len(expected)) for pause in pauses), len(expected)]:
        extend_identities(extended, tokens, spans, size, blocks, root)
        assert extended == expected[:blocks]
    assert list(LeadingIdentities(tokens, spans, root, size)) == expected
    for number, identity in enumerate(expected):
        start = number * size
        parent = expected[number - 1] if number else root
        assert block_hash(parent, tokens[start : start + size], start, spans) == identity


@settings(max_examples=200, deadline=None)
@given(TOKENS, SPANS, SIZES, SIZES, ROOTS)
def test_identities_from_a_peer_are_completed_and_those_of_another_block_size_are_not_used(
    tokens, spans, size, other_size, root
):
    expected = plain(tokens, spans, size, root)
    for leading in (
        expected,
        expected[: len(expected) // 2],
        [*expected, b"of an output that is not here"],
        plain(tokens, spans, other_size, root),
        plain(tokens, spans, size, root + b"x"),
        [b""] * 3,
    ):
        assert completed_identities(leading, tokens, spans, size, root) == expected


def test_identities_of_a_long_video_are_bit_for_bit_those_of_earlier_releases():
    """Pods of both releases serve during an upgrade, and each looks for what the other has."""
    tokens = [(number * 7919) % 152_064 for number in range(16_384)]
    spans = [(number * 21, 20, f"feature-{number // 64}") for number in range(768)]
    root = root_of("sql", "tenant")
    extended: list[bytes] = []
    extend_identities(extended, tokens, spans, 16, 1024, root)
    assert extended == plain(tokens, spans, 16, root)
    assert (extended[0].hex(), extended[-1].hex()) == (
        "b6f6af1b98a5d549f77cd4c990675ae1",
        "1b0bd1791b91c9b6ea11f0b85b46e975",
    )
    assert prompt_root(root, tokens, spans, bidirectional=True).hex() == "e1b7a1e7b965bfad4cb7a2644df7d587"
