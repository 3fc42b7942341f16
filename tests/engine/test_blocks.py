"""Block bookkeeping: nothing leaks, nothing is freed twice, nothing is handed out twice, whatever the order of events."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mmd_api.contract.errors import OverloadedError
from mmd_workers.engine.memory.blocks import (
    BlockPool,
    block_hash,
    extend_identities,
    leading_identities,
    prompt_root,
)


class PoolMachine(RuleBasedStateMachine):
    """Random owners allocate, share by match, register and release; a plain model keeps count beside it."""

    @initialize(blocks=st.integers(1, 12))
    def make(self, blocks):
        self.pool = BlockPool(blocks, 4)
        self.owners: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.serial = 0

    def references(self):
        return [sum(owner.count(block) for owner in self.owners) for block in range(self.pool.num_blocks)]

    @rule(count=st.integers(0, 5))
    def allocate(self, count):
        available = self.pool.available
        if count > available:
            with pytest.raises(OverloadedError):
                self.pool.allocate(count)
            assert self.pool.available == available
            return
        before = self.references()
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert all(before[block] == 0 for block in blocks)
        for block in blocks:
            self.content.pop(block, None)
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def register(self, data):
        owner = data.draw(st.sampled_from([o for o in self.owners if o]))
        block = data.draw(st.sampled_from(owner))
        if block not in self.content:
            self.serial += 1
            self.content[block] = self.serial.to_bytes(8, "little")
            self.pool.register(block, self.content[block])

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def match(self, data):
        block = data.draw(st.sampled_from(sorted(self.content)))
        found = self.pool.find([self.content[block], b"never registered"])
        assert found == [block]
        beside = self.pool.available_beside(found)
        self.pool.share(found)
        assert self.pool.available == beside
        self.owners.append(found)

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "pool"):
            unreferenced = sum(count == 0 for count in self.references())
            assert self.pool.available == unreferenced
            assert list(self.references()) == self.pool._references


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_releasing_a_block_twice_is_an_error():
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_eviction_takes_the_least_recently_used_block_and_tails_before_heads():
    pool = BlockPool(4, 4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block in (*old, *new):
        pool.register(block, bytes([block]))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.find([bytes([old[1]])]) == []
    assert pool.find([bytes([old[0]])]) == [old[0]]
    pool.share([old[0]])
    assert pool.allocate(2) == [new[1], new[0]]


def test_a_prefix_ends_at_the_first_block_that_is_not_known():
    pool = BlockPool(3, 4)
    first, _, third = pool.allocate(3)
    pool.register(first, b"first")
    pool.register(third, b"third")
    assert pool.find([b"first", b"second", b"third"]) == [first]


def test_a_block_is_identified_by_its_complete_prefix():
    chains = []
    for past in ([1, 2, 3, 4], [1, 2, 9, 4]):
        identities: list[bytes] = []
        extend_identities(identities, past, [], 1, 3)
        extend_identities(identities, past, [], 1, 4)
        chains.append(identities)
    same = [a == b for a, b in zip(*chains, strict=True)]
    assert same == [True, True, False, False]


def test_a_forgotten_block_is_not_found_again_and_its_neighbour_is():
    pool = BlockPool(3, 4)
    first, second, private = pool.allocate(3)
    pool.register(first, b"first")
    pool.register(second, b"second")
    pool.forget([b"second", b"unknown"])
    assert pool.find([b"first", b"second"]) == [first]
    pool.release([first, second, private])
    assert pool.allocate(2) == [private, second]  # free, and handed out before the cached one


def test_a_block_hash_covers_tokens_prefix_and_overlapping_media():
    base = block_hash(b"", [1, 2, 3, 4], 4, [(6, 2, "cat")])
    assert base == block_hash(b"", [1, 2, 3, 4], 4, [(6, 2, "cat"), (8, 2, "dog"), (0, 4, "fox")])
    others = [
        block_hash(b"x", [1, 2, 3, 4], 4, [(6, 2, "cat")]),
        block_hash(b"", [1, 2, 3, 5], 4, [(6, 2, "cat")]),
        block_hash(b"", [1, 2, 3, 4], 4, [(6, 2, "dog")]),
        block_hash(b"", [1, 2, 3, 4], 4, [(2, 6, "cat")]),
        block_hash(b"", [1, 2, 3, 4], 4, []),
        block_hash(b"", [1, 2, 3, 4], 4, [(2, 3, "cat")]),  # its last token is the first of the block
        block_hash(b"", [1, 2, 3, 4], 4, [(7, 9, "cat")]),  # its first token is the last of the block
    ]
    assert len({base, *others}) == 8


@pytest.mark.parametrize("bidirectional", [False, True])
def test_blocks_of_a_bidirectional_prompt_stand_for_all_of_it(bidirectional):
    def first_block(tokens, spans, root=b""):
        root = prompt_root(root, tokens, spans, bidirectional=bidirectional)
        return leading_identities(tokens, spans, root, 4)[0]

    tokens, cat = list(range(20)), (1, 8, "cat")
    prompts = [
        (tokens, [cat]),
        (tokens[:-1], [cat]),
        ([*tokens[:-1], 99], [cat]),
        (tokens, [cat, (18, 1, "dog")]),
        (tokens, [cat, (18, 1, "fox")]),
    ]
    assert len({first_block(*prompt) for prompt in prompts}) == (len(prompts) if bidirectional else 1)
    assert first_block(*prompts[0]) == first_block(tuple(tokens), [cat])
    assert first_block(*prompts[0]) != first_block(tokens, [cat], b"another salt")
