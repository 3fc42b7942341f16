"""Whoever takes the changes of a prefix cache knows what it holds, whatever happened in between and however little is taken at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_workers.engine.memory.blocks import BlockPool
from mmd_workers.engine.memory.cache_changes import CacheChanges

IDENTITIES = [bytes([number]) for number in range(12)]


class Reader:
    """Keeps what was reported, as a gateway would."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.pending: set[bytes] | None = None

    def take(self, changes: CacheChanges, limit: int) -> bool:
        """As if empty steps were not sent."""
        delta = changes.take(limit)
        assert len(delta.added) + len(delta.evicted) <= limit
        if delta.empty:
            return True
        if delta.begins:
            self.pending = set()
        content = self.held if self.pending is None else self.pending
        content.difference_update(delta.evicted)
        content.update(delta.added)
        if self.pending is not None and delta.complete:
            self.held, self.pending = self.pending, None
        return delta.complete


actions = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "remove"]), st.sampled_from(IDENTITIES)),
        st.tuples(st.just("take"), st.integers(1, 4)),
        st.tuples(st.sampled_from(["clear", "restart"]), st.none()),
    ),
    max_size=60,
)


@given(actions)
@settings(max_examples=300, deadline=None)
def test_a_reader_ends_with_what_the_cache_holds(done: list[tuple[str, bytes | int | None]]) -> None:
    changes, truth, reader = CacheChanges(), set[bytes](), Reader()
    for action, argument in done:
        if action == "take":
            reader.take(changes, argument)
        elif action in ("add", "remove"):
            getattr(changes, action)(argument)
            (truth.add if action == "add" else truth.discard)(argument)
        else:
            getattr(changes, action)()
            if action == "clear":
                truth.clear()
        assert all((identity in changes) == (identity in truth) for identity in IDENTITIES)
    while not reader.take(changes, 3):
        pass
    assert reader.held == truth
    assert reader.pending is None
    assert changes.take(100).empty


@given(actions, st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_reports_stay_within_the_bound_and_name_only_held_blocks(
    done: list[tuple[str, bytes | int | None]], most: int
) -> None:
    changes, reader = CacheChanges(most), Reader()
    for action, argument in done:
        if action == "take":
            reader.take(changes, argument)
        else:
            getattr(changes, action)(*() if argument is None else (argument,))
        assert len(reader.held) <= most
        assert reader.pending is None or len(reader.pending) <= most
    while not reader.take(changes, 3):
        pass
    held = {identity for identity in IDENTITIES if identity in changes}
    assert reader.held <= held
    assert len(reader.held) == min(most, len(held))


def test_a_block_that_came_and_went_is_not_reported() -> None:
    changes = CacheChanges()
    changes.add(b"a")
    changes.remove(b"a")
    assert changes.take(10).empty
    changes.add(b"b")
    assert changes.take(10).added == [b"b"]
    changes.remove(b"b")
    changes.add(b"b")
    assert changes.take(10).empty


def test_a_full_report_ends_even_when_its_rest_is_evicted() -> None:
    changes = CacheChanges()
    for identity in (b"a", b"b", b"c"):
        changes.add(identity)
    changes.restart()
    assert not changes.take(2).complete
    changes.remove(b"c")
    last = changes.take(2)
    assert last.complete
    assert not last.empty, "else nobody would be sent the end of it"
    assert changes.take(2).empty


def test_a_pool_reports_cached_blocks_that_it_gains_and_loses() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3)
    for block, identity in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.register(block, identity)
    pool.release(blocks)
    assert set(pool.changes.take(10).added) == {b"a", b"b", b"c"}
    again = pool.allocate(2)
    assert set(pool.changes.take(10).evicted) == {b"b", b"c"}, "the last blocks of a sequence go first"
    pool.release(again)
    pool.share(pool.find([b"a"]))
    pool.forget([b"a"])
    assert pool.changes.take(10).evicted == [b"a"]


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_only_the_last_step_of_a_full_report_is_complete(limit: int) -> None:
    changes = CacheChanges()
    for identity in IDENTITIES:
        changes.add(identity)
    while not changes.take(5).complete:
        pass
    changes.restart()
    steps = []
    while not steps or not steps[-1].complete:
        steps.append(changes.take(limit))
    assert len(steps) == -(-len(IDENTITIES) // limit)
    assert [step.begins for step in steps] == [True, *[False] * (len(steps) - 1)]
    assert {identity for step in steps for identity in step.added} == set(IDENTITIES)
