"""Every KV block at every step: who holds it, whatever is added, offered, attached, cancelled, expired, moved or preempted."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mmd_api.contract.errors import (
    CapacityError,
    CountMismatchError,
    LeaseError,
    OverloadedError,
    PreemptedError,
)
from mmd_workers.engine.blocks import extend_identities
from mmd_workers.kv.leases import LeaseTable
from tests.support.engine_oracle import TextModel, greedy, llama, make_engine, prompt_of, text_input

BLOCKS, BLOCK_TOKENS = 14, 4
LEASE_SECONDS = 5.0
MODEL = TextModel(llama())
MODEL.forward = lambda embeds, positions, extras: (
    embeds
)  # whose block is whose does not depend on the arithmetic
lengths = st.integers(1, 40)
outputs = st.integers(1, 30)
prompts = st.integers(0, 3)  # few different ones, so that prefixes are shared


class Blocks(RuleBasedStateMachine):
    """An engine with a small pool, and beside it what a decode service keeps: a lease for every reservation."""

    sequences = Bundle("sequences")
    offers = Bundle("offers")

    def __init__(self) -> None:
        super().__init__()
        self.engine = make_engine(
            MODEL, blocks=BLOCKS, block_tokens=BLOCK_TOKENS, max_sequences=5, chunk_tokens=16
        )
        self.leases = LeaseTable()
        self.now = 0.0
        self.count = 0
        self.wanted: dict[str, int] = {}  # outputs that an open sequence is still to bring
        self.travelling: set[str] = set()  # prefilled here, decoded elsewhere

    def name(self) -> str:
        self.count += 1
        return str(self.count)

    @rule(
        target=sequences,
        length=lengths,
        limit=outputs,
        seed=prompts,
        arrived=st.integers(0, 9),
        travels=st.booleans(),
    )
    def add(self, length, limit, seed, arrived, travels):
        name = self.name()
        item = text_input(MODEL, name, prompt_of(40, seed)[:length], limit, stop_after_prefill=travels)
        item.arrived = float(arrived)
        try:
            self.engine.add(item)
        except CapacityError:
            assert length + limit > BLOCKS * BLOCK_TOKENS
            return name
        self.wanted[name] = 1 if travels else limit
        if travels:
            self.travelling.add(name)
        return name

    @rule(target=offers, length=lengths, limit=outputs, seed=prompts, arrived=st.integers(0, 9))
    def offer(self, length, limit, seed, arrived):
        name, tokens, prefix = self.name(), prompt_of(40, seed)[:length], list[bytes]()
        extend_identities(prefix, tokens, [], BLOCK_TOKENS, length // BLOCK_TOKENS)
        pool = self.engine.blocks
        before, found = pool.available, pool.find(prefix)
        in_use = sum(pool._references[block] > 0 for block in found)
        try:
            cached = self.engine.reserve(name, length, limit, prefix)
        except CapacityError:
            assert length + limit > BLOCKS * BLOCK_TOKENS
        except OverloadedError:
            assert self.engine.blocks.available == before
        else:
            assert cached == len(found) * BLOCK_TOKENS
            assert before - pool.available == -(-(length + 1) // BLOCK_TOKENS) - in_use, (
                "the output is reserved too"
            )
            self.leases.grant(name, "prefill-0", "i1", name, (), self.now, LEASE_SECONDS)
        return name, tokens, limit, float(arrived)

    @rule(target=sequences, offer=consumes(offers))
    def commit(self, offer):
        name, tokens, limit, arrived = offer
        length = len(tokens)
        try:
            self.leases.commit(name, self.now)
        except LeaseError:
            self.engine.abort(name)
            self.leases.release(name)
            return name
        layout = MODEL.kv_layout
        cached = self.engine._reservations[name].shared * BLOCK_TOKENS
        kv = [
            torch.zeros(2, length - cached, heads, dim, device=MODEL.device)
            for heads, dim in zip(layout.num_kv_heads, layout.head_dim, strict=True)
        ]
        if cached:
            with pytest.raises(CountMismatchError):
                self.engine.write_kv(name, cached - 1, [layer[:, :1] for layer in kv])
        if cached < length:
            self.engine.write_kv(name, cached, kv)
        self.engine.attach(name, tokens, greedy(limit + 1), [7], length, [], arrived)
        self.wanted[name] = limit
        return name

    @rule(offer=consumes(offers))
    def give_back(self, offer):
        self.leases.release(offer[0])
        self.engine.abort(offer[0])

    @rule(seconds=st.floats(0.1, 10.0))
    def time_passes(self, seconds):
        self.now += seconds
        for lease in self.leases.expire(self.now):
            self.engine.abort(lease.lease_id)

    @rule(name=consumes(sequences))
    def cancel(self, name):
        self.engine.abort(name)
        self.wanted.pop(name, None)

    @rule(steps=st.integers(1, 12))
    def run(self, steps):
        for _ in range(steps):
            self.step()
            self.every_block_is_accounted_for()

    def step(self):
        output = self.engine.step()
        for name, error in output.failed:
            assert isinstance(error, PreemptedError)
            del self.wanted[name]
        for token in output.tokens:
            self.wanted[token.sequence_id] -= 1
            if not self.wanted[token.sequence_id]:
                del self.wanted[token.sequence_id]
                if token.sequence_id in self.travelling:  # its KV has arrived elsewhere
                    self.engine.abort(token.sequence_id)
        return bool(output.prefill_tokens or output.decode_sequences or output.failed)

    @invariant()
    def every_block_is_accounted_for(self):
        engine, pool = self.engine, self.engine.blocks
        held = Counter(block for sequence in engine._sequences.values() for block in sequence.blocks)
        for name, reservation in engine._reservations.items():
            own = reservation.blocks[reservation.shared :]
            assert not held.keys() & set(own), "a reserved block belongs to somebody else"
            assert self.leases.get(name, self.now)
            held.update(reservation.blocks)
        assert [held[block] for block in range(BLOCKS)] == pool._references
        shared = [block for block, references in held.items() if references > 1]
        assert all(block in pool._hash_of for block in shared), "only cached prefixes are shared"
        free, cached = list(pool._free), set(pool._cached)
        assert len(free) == len(set(free))
        assert sorted([*free, *cached, *held]) == list(range(BLOCKS))
        assert pool._block_of == {identity: block for block, identity in pool._hash_of.items()}
        for sequence in engine._sequences.values():
            waiting = sequence in engine.scheduler.waiting
            assert bool(sequence.blocks) != waiting
            assert len(sequence.blocks) * BLOCK_TOKENS >= sequence.computed
        stats = engine.stats()
        assert stats.blocks_free == len(free) + len(cached)
        own = Counter(block for r in engine._reservations.values() for block in r.blocks[r.shared :])
        assert stats.blocks_reserved == own.total()
        assert stats.blocks_total - stats.blocks_free >= stats.blocks_reserved
        assert set(engine._sequences) == set(self.wanted)

    def teardown(self):
        """What is still open ends, and the pool is as empty as at the beginning."""
        for lease in self.leases.drop_owner("prefill-0", "i1"):
            self.engine.abort(lease.lease_id)
        for _ in range(1000):
            if not self.wanted:
                break
            assert self.step(), f"{len(self.wanted)} sequences stand still"
            self.every_block_is_accounted_for()
        assert not self.wanted
        assert self.engine.stats().blocks_free == BLOCKS


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
