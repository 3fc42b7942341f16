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
from mmd_api.contract.sampling import Guidance
from mmd_workers.engine import attention
from mmd_workers.engine.memory.blocks import extend_identities
from mmd_workers.kv.leases import LeaseTable
from support.oracles.engine_oracle import TextModel, greedy, llama, make_engine, prompt_of, text_input

BLOCKS, BLOCK_TOKENS, WINDOW, CHUNK = 14, 4, 6, 8
LEASE_SECONDS = 5.0
MODEL = TextModel(llama())
MODEL.forward = lambda embeds, positions, extras: (
    embeds
)  # whose block is whose does not depend on the arithmetic
WINDOWED = TextModel(llama())
WINDOWED.forward = lambda embeds, positions, extras: (attention.current().visible(WINDOW), embeds)[1]
lengths = st.integers(1, 40)
outputs = st.integers(1, 30)
prompts = st.integers(0, 3)  # few different ones, so that prefixes are shared
companions = st.sampled_from([0, 0, 1, 5, 14])  # tokens of a negative prompt; 0: there is none


def guidance_of(length, seed):
    return Guidance(2.0, prompt_of(40, seed)[:length]) if length else None


def fits(length, companion, limit):
    return sum(-(-(prompt + limit) // BLOCK_TOKENS) for prompt in (length, companion) if prompt) <= BLOCKS


class Blocks(RuleBasedStateMachine):
    """An engine with a small pool, and beside it what a decode service keeps: a lease for every reservation."""

    model = MODEL
    sequences = Bundle("sequences")
    offers = Bundle("offers")

    def __init__(self) -> None:
        super().__init__()
        self.engine = make_engine(
            self.model, blocks=BLOCKS, block_tokens=BLOCK_TOKENS, max_sequences=5, chunk_tokens=CHUNK
        )
        self.engine.warm_up()  # so that it knows the window
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
        companion=companions,
    )
    def add(self, length, limit, seed, arrived, travels, companion):
        name = self.name()
        item = text_input(MODEL, name, prompt_of(40, seed)[:length], limit, stop_after_prefill=travels)
        item.arrived, item.guidance = float(arrived), guidance_of(companion, seed)
        try:
            self.engine.add(item)
        except CapacityError:
            assert not fits(length, companion, limit)
            return name
        self.wanted[name] = 1 if travels else limit
        if travels:
            self.travelling.add(name)
        return name

    @rule(
        target=offers,
        length=lengths,
        limit=outputs,
        seed=prompts,
        arrived=st.integers(0, 9),
        companion=companions,
    )
    def offer(self, length, limit, seed, arrived, companion):
        name, tokens, prefix = self.name(), prompt_of(40, seed)[:length], list[bytes]()
        extend_identities(prefix, tokens, [], BLOCK_TOKENS, length // BLOCK_TOKENS)
        pool = self.engine.blocks
        before, found = pool.available, pool.find(prefix)
        in_use = sum(pool._references[block] > 0 for block in found)
        try:
            cached = self.engine.reserve(name, length, limit, prefix, companion)
        except CapacityError:
            assert not fits(length, companion, limit)
        except OverloadedError:
            assert self.engine.blocks.available == before
        else:
            assert cached == len(found) * BLOCK_TOKENS
            both = [prompt + 1 for prompt in (length, companion) if prompt]
            assert before - pool.available == sum(-(-tokens // BLOCK_TOKENS) for tokens in both) - in_use, (
                "the output is reserved too"
            )
            self.leases.grant(name, "prefill-0", "i1", name, self.now, LEASE_SECONDS)
        return name, tokens, limit, float(arrived), guidance_of(companion, seed)

    @rule(target=sequences, offer=consumes(offers))
    def commit(self, offer):
        name, tokens, limit, arrived, guidance = offer
        length = len(tokens)
        try:
            self.leases.commit(name, self.now)
        except LeaseError:
            self.engine.abort(name)
            self.leases.release(name)
            return name
        layout = MODEL.kv_layout
        cached = self.engine.table.reservations[name].shared * BLOCK_TOKENS
        kv = [
            torch.zeros(2, length - cached, heads, dim, device=MODEL.device)
            for heads, dim in zip(layout.num_kv_heads, layout.head_dim, strict=True)
        ]
        if cached:
            with pytest.raises(CountMismatchError):
                self.engine.write_kv(name, cached - 1, [layer[:, :1] for layer in kv])
        if cached < length:
            self.engine.write_kv(name, cached, kv)
        sampling = greedy(limit + 1)
        self.engine.attach(name, tokens, sampling, [7], length, [], arrived, guidance=guidance)
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
        parts = [part for sequence in engine.table.sequences.values() for part in sequence.parts]
        held = Counter(block for part in parts for block in part.held_blocks)
        for name, reservation in engine.table.reservations.items():
            own = [*reservation.blocks[reservation.shared :], *reservation.companion_blocks]
            assert not held.keys() & set(own), "a reserved block belongs to somebody else"
            assert self.leases.get(name, self.now)
            held.update([*reservation.blocks, *reservation.companion_blocks])
        assert [held[block] for block in range(BLOCKS)] == pool._references
        shared = [block for block, references in held.items() if references > 1]
        assert all(block in pool._hash_of for block in shared), "only cached prefixes are shared"
        free, cached = list(pool._free), set(pool._cached)
        assert len(free) == len(set(free))
        assert sorted([*free, *cached, *held]) == list(range(BLOCKS))
        assert pool._block_of == {identity: block for block, identity in pool._hash_of.items()}
        for sequence in engine.table.sequences.values():
            waiting = sequence in engine.scheduler.waiting
            for part in sequence.parts:
                assert bool(part.blocks) != waiting, "both have blocks, or neither"
                assert len(part.blocks) * BLOCK_TOKENS >= part.computed
                self.only_blocks_within_the_window_are_held(part)
                self.the_next_chunk_has_blocks(part, alone=len(sequence.parts) == 1)
        stats = engine.stats()
        assert stats.blocks_free == len(free) + len(cached)
        reserved = [[*r.blocks[r.shared :], *r.companion_blocks] for r in engine.table.reservations.values()]
        assert stats.blocks_reserved == sum(map(len, reserved))
        assert stats.running_sequences + stats.reserved_sequences <= stats.max_sequences
        assert stats.blocks_total - stats.blocks_free >= stats.blocks_reserved
        assert set(engine.table.sequences) == set(self.wanted)

    def only_blocks_within_the_window_are_held(self, sequence):
        window = self.engine.scheduler.window
        if window is None or sequence.stop_after_prefill:
            return
        seen = max(0, sequence.computed + 1 - window) // BLOCK_TOKENS
        assert sequence.dropped == (min(seen, len(sequence.blocks) - 1) if sequence.blocks else 0)

    def the_next_chunk_has_blocks(self, sequence, *, alone):
        if sequence.blocks and not sequence.decoding:
            known = min(sequence.num_tokens, sequence.computed + CHUNK)
            assert len(sequence.blocks) * BLOCK_TOKENS >= known
            if self.engine.scheduler.window is not None and not sequence.stop_after_prefill and alone:
                own = len(sequence.blocks) - max(sequence.dropped, sequence.shared)
                assert own <= -(-(WINDOW - 1 + CHUNK) // BLOCK_TOKENS) + 1

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


class WindowedBlocks(Blocks):
    """The same where all layers have a window."""

    model = WINDOWED


TestWindowedBlocks = WindowedBlocks.TestCase
TestWindowedBlocks.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
