"""The index of prefixes: what pods report, in any order with losses and restarts, and which pods have how much of a prompt."""

from __future__ import annotations

from collections import Counter, defaultdict
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mmd_workers.caches import index as cache_index
from mmd_workers.caches.index import FEW, CacheIndex
from mmd_workers.engine.memory import blocks
from mmd_workers.engine.memory.blocks import leading_identities
from mmd_workers.engine.memory.cache_changes import CacheChanges
from mmd_workers.wire.messages.every_pod import CacheReport
from support.serving.cached import BLOCK_TOKENS as SIZE
from support.serving.cached import held_by

PODS = ["p-0", "p-1", "p-2"]
MOST, MOST_IN_ALL = 6, 14
SHARE = MOST_IN_ALL // len(PODS)
IDENTITIES = [bytes([number]) for number in range(9)]


def report(pod: str, number: int, added: str = "", evicted: str = "", **more) -> CacheReport:
    """Identities are letters."""
    return CacheReport(
        pod=pod,
        incarnation=more.pop("incarnation", "i"),
        number=number,
        block_tokens=more.pop("block_tokens", SIZE),
        added=[letter.encode() for letter in added],
        evicted=[letter.encode() for letter in evicted],
        **more,
    )


def letters(index: CacheIndex, pod: str) -> str:
    alphabet = [bytes([code]) for code in b"abcdefghijklmnopqrstuvwxyz"]
    return b"".join(sorted(held_by(index, pod, alphabet))).decode()


def cached(index: CacheIndex, pod: str, prompt: str, block_tokens: int = SIZE) -> float:
    tokens = index.cached_tokens({block_tokens: [letter.encode() for letter in prompt]})
    return float(tokens[index.slot(pod)])


class Reporting:
    """A pod: its cache, and what of its reports is on the way."""

    def __init__(self, most: int) -> None:
        self.incarnation = 0
        self.begin(most)

    def begin(self, most: int) -> None:
        self.incarnation += 1
        self.changes = CacheChanges(most)
        self.has: set[bytes] = set()
        self.number = 0
        self.on_the_way: list[CacheReport] = []


class IndexMachine(RuleBasedStateMachine):
    """Pods gain and lose blocks, report, restart and report everything; reports are lost and come late."""

    @initialize(most=st.integers(1, 12))
    def make(self, most: int) -> None:
        self.most = most
        self.index = CacheIndex(MOST, MOST_IN_ALL)
        self.pods = {name: Reporting(most) for name in PODS}

    @rule(name=st.sampled_from(PODS), identity=st.sampled_from(IDENTITIES))
    def add(self, name: str, identity: bytes) -> None:
        self.pods[name].changes.add(identity)
        self.pods[name].has.add(identity)

    @rule(name=st.sampled_from(PODS), identity=st.sampled_from(IDENTITIES))
    def evict(self, name: str, identity: bytes) -> None:
        self.pods[name].changes.remove(identity)
        self.pods[name].has.discard(identity)

    @rule(name=st.sampled_from(PODS), limit=st.integers(1, 5))
    def publish(self, name: str, limit: int) -> None:
        pod = self.pods[name]
        delta = pod.changes.take(limit)
        if delta.empty:
            return
        pod.number += 1
        pod.on_the_way.append(
            CacheReport(
                name,
                f"i{pod.incarnation}",
                pod.number,
                SIZE,
                delta.added,
                delta.evicted,
                delta.begins,
                delta.complete,
            )
        )

    @rule(name=st.sampled_from(PODS))
    def arrive(self, name: str) -> None:
        if self.pods[name].on_the_way:
            self.index.take(self.pods[name].on_the_way.pop(0))

    @rule(name=st.sampled_from(PODS))
    def lose(self, name: str) -> None:
        if self.pods[name].on_the_way:
            self.pods[name].on_the_way.pop(0)

    @rule(name=st.sampled_from(PODS))
    def restart_pod(self, name: str) -> None:
        self.pods[name].begin(self.most)

    @rule(name=st.sampled_from(PODS))
    def is_gone(self, name: str) -> None:
        self.index.forget(name)
        assert held_by(self.index, name, IDENTITIES) == set()

    @rule(most=st.integers(1, 3))
    def tidy(self, most: int) -> None:
        self.index.tidy(most)

    @rule(name=st.sampled_from(PODS))
    def report_everything(self, name: str) -> None:
        """A gateway has asked, this one or another."""
        self.pods[name].changes.restart()

    @invariant()
    def is_bounded(self) -> None:
        if hasattr(self, "index"):
            assert all(len(held_by(self.index, name, IDENTITIES)) <= MOST for name in PODS)
            held = sum(len(held_by(self.index, name, IDENTITIES)) for name in PODS)
            assert held <= self.index.num_blocks <= MOST_IN_ALL

    @invariant()
    def finds_what_it_holds(self) -> None:
        if not hasattr(self, "index"):
            return
        tokens = self.index.cached_tokens({SIZE: IDENTITIES})
        for name in PODS:
            held = held_by(self.index, name, IDENTITIES)
            depth = next(
                (n for n, identity in enumerate(IDENTITIES) if identity not in held), len(IDENTITIES)
            )
            assert tokens[self.index.slot(name)] == depth * SIZE

    def deliver_all(self, name: str) -> None:
        pod = self.pods[name]
        while True:
            while pod.on_the_way:
                self.arrive(name)
            self.publish(name, 4)
            if not pod.on_the_way:
                return

    def teardown(self) -> None:
        """Nothing is lost any more, and who is not followed reports everything: then the index knows the truth."""
        if not hasattr(self, "index"):
            return
        for name, pod in self.pods.items():
            self.deliver_all(name)
            if not self.index.follows(name, f"i{pod.incarnation}", pod.number):
                pod.changes.restart()
                self.deliver_all(name)
            assert self.index.follows(name, f"i{pod.incarnation}", pod.number)
        while self.index.tidy():
            pass
        for name, pod in self.pods.items():
            if self.index.has_room_again(name):
                pod.changes.restart()
                self.deliver_all(name)
            while self.index.tidy():
                pass
            assert not self.index.has_room_again(name)
            held = held_by(self.index, name, IDENTITIES)
            assert held <= pod.has
            if self.most <= SHARE:
                assert name not in self.index.cut_pods
            if name not in self.index.cut_pods:
                assert len(held) == min(len(pod.has), self.most)
            else:
                assert 4 * len(held) >= 3 * SHARE
        assert self.index.num_blocks == sum(len(held_by(self.index, name, IDENTITIES)) for name in PODS)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_pod_is_followed_report_by_report() -> None:
    index = CacheIndex()
    index.take(report("p", 1, "ab"))
    index.take(report("p", 2, "c", "a"))
    assert letters(index, "p") == "bc"
    assert index.follows("p", "i", 2)
    assert not index.follows("p", "i", 3)


def test_after_a_gap_old_knowledge_lasts_until_a_full_report() -> None:
    index = CacheIndex()
    index.take(report("p", 1, "ab"))
    index.take(report("p", 3, "d", "a"))
    assert letters(index, "p") == "bd"
    assert not index.follows("p", "i", 3)
    index.take(report("p", 4, "a", begins=True, complete=False))
    assert index.follows("p", "i", 4), "it is on its way: nobody needs to ask again"
    index.take(report("p", 5, "d"))
    index.tidy()
    assert letters(index, "p") == "ad"


def test_while_a_pod_reports_everything_again_the_index_keeps_what_it_knew() -> None:
    """Another gateway has asked."""
    index = CacheIndex()
    index.take(report("p", 1, "ab"))
    index.take(report("p", 2, "a", begins=True, complete=False))
    assert letters(index, "p") == "ab"
    index.take(report("p", 3, "c", "a", complete=False))
    index.take(report("p", 4, "d"))
    index.tidy()
    assert letters(index, "p") == "cd"


def test_a_full_index_loses_nothing_when_all_pods_report_everything_again() -> None:
    """Another gateway has started, and asked them all."""
    index = CacheIndex(most_in_all=12)
    for pod in ("p", "q", "r"):
        for number, letter in enumerate("abcd", start=1):
            index.take(report(pod, number, letter))
    for number, letter in enumerate("abcd", start=5):
        for pod in ("p", "q", "r"):
            index.take(report(pod, number, letter, begins=number == 5, complete=number == 8))
    while index.tidy():
        pass
    assert [letters(index, pod) for pod in ("p", "q", "r")] == ["abcd"] * 3
    assert index.cut_pods == []


def test_a_full_index_takes_in_a_content_that_has_changed_wholly() -> None:
    index = CacheIndex(most_in_all=4)
    index.take(report("p", 1, "abcd"))
    index.take(report("p", 2, "wx", begins=True, complete=False))
    index.take(report("p", 3, "yz"))
    assert letters(index, "p") == "wxyz"
    assert index.cut_pods == []


def test_a_gap_in_a_report_of_everything_is_a_gap() -> None:
    index = CacheIndex()
    index.take(report("p", 1, "ab"))
    index.take(report("p", 2, "a", begins=True, complete=False))
    index.take(report("p", 4, "c"))
    index.tidy()
    assert letters(index, "p") == "abc", "what has not been reported again may have been in the lost report"
    assert not index.follows("p", "i", 4)


def test_a_first_report_with_a_later_number_is_a_gap() -> None:
    index = CacheIndex()
    index.take(report("p", 7, "a"))
    assert not index.follows("p", "i", 7)
    assert index.follows("q", "i", 0), "a pod that has reported nothing has nothing"


def test_a_new_incarnation_starts_empty_and_ignores_reports_of_the_old() -> None:
    index = CacheIndex()
    index.take(report("p", 1, "ab"))
    index.take(report("p", 1, "c", incarnation="j"))
    assert letters(index, "p") == "c"
    assert not index.follows("p", "i", 1)
    index.take(report("p", 1, "c", incarnation="j"))
    assert letters(index, "p") == "c"


def test_reports_beyond_a_pods_share_do_not_grow_the_index() -> None:
    index = CacheIndex(most_blocks=3)
    index.take(report("p", 1, "abcdef"))
    assert letters(index, "p") == "abc"
    index.take(report("p", 2, "x", "ab"))
    assert letters(index, "p") == "cx"


def test_the_slot_of_a_departed_pod_carries_nothing_to_the_next() -> None:
    index = CacheIndex()
    index.take(report("p", 1, "ab"))
    slot, version = index.slot("p"), index.version
    index.forget("p")
    index.take(report("other", 1, "a"))
    assert index.slot("other") != slot, "blocks still have it"
    index.tidy()
    index.take(report("q", 1, "a"))
    assert index.slot("q") == slot
    assert index.version != version
    assert cached(index, "q", "ab") == SIZE


@pytest.mark.parametrize("pods", [1, FEW, FEW + 1, 200])
def test_a_pod_has_a_prompt_up_to_its_first_missing_block(pods: int) -> None:
    index = CacheIndex()
    for number in range(pods):
        index.take(report(f"even-{number}", 1, "abd"))
        index.take(report(f"odd-{number}", 1, "bcd"))
    index.take(report("all", 1, "abcd"))
    assert {cached(index, f"even-{number}", "abcd") for number in range(pods)} == {2 * SIZE}
    assert {cached(index, f"odd-{number}", "abcd") for number in range(pods)} == {0}
    assert cached(index, "all", "abcd") == 4 * SIZE
    assert cached(index, "nobody", "abcd") == 0


@given(
    changes=st.lists(
        st.tuples(st.integers(0, FEW + 4), st.integers(0, 12), st.integers(0, 12), st.booleans()), max_size=60
    )
)
@settings(max_examples=200, deadline=None)
def test_gains_and_losses_leave_each_pod_its_unbroken_prefix(
    changes: list[tuple[int, int, int, bool]],
) -> None:
    """Pod, first and last block, and whether it loses them."""
    index, prompt = CacheIndex(), [bytes([block]) for block in range(12)]
    numbers, held = Counter[str](), defaultdict[str, set[bytes]](set)
    for pod, start, end, loses in changes:
        name, part = f"p-{pod}", set(prompt[start:end])
        numbers[name] += 1
        gained, lost = (set(), part) if loses else (part, set())
        index.take(CacheReport(name, "i", numbers[name], SIZE, sorted(gained), sorted(lost)))
        held[name] = held[name] - lost | gained
        found = index.cached_tokens({SIZE: prompt})
        for other, kept in held.items():
            whole = next((n for n, block in enumerate(prompt) if block not in kept), len(prompt))
            assert found[index.slot(other)] == whole * SIZE


def test_each_pod_is_looked_up_in_its_own_block_size() -> None:
    index = CacheIndex()
    tokens = list(range(64))
    for pod, size in (("small", 16), ("large", 32)):
        first = leading_identities(tokens, [], b"", size)[:1]
        index.take(CacheReport(pod, "i", 1, size, first, []))
    prefix = index.prefix_of(tokens, [], b"")
    assert {size: len(list(named)) for size, named in prefix.items()} == {16: 4, 32: 2}
    found = index.cached_tokens(prefix)
    assert (found[index.slot("small")], found[index.slot("large")]) == (16, 32)


def test_hashing_a_long_prompt_stops_where_no_pod_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, hashed = CacheIndex(), list[int]()
    tokens = [number % 1000 for number in range(100_000)]
    identities = leading_identities(tokens, [], b"", SIZE)
    assert len(identities) == 6250
    index.take(CacheReport("p", "i", 1, SIZE, identities[:4000], []))
    index.take(CacheReport("p", "i", 2, SIZE, identities[4000:], []))
    index.take(CacheReport("q", "i", 1, SIZE, identities[:3000], []))

    def counted(*given: Any, **more: Any) -> Any:
        hashed.append(1)
        return blake2b(*given, **more)

    monkeypatch.setattr(blocks, "blake2b", counted)
    found = index.cached_tokens(index.prefix_of(tokens, [], b""))
    assert (found[index.slot("p")], found[index.slot("q")]) == (100_000, 48_000)
    assert len(hashed) == 6250
    hashed.clear()
    prefix = index.prefix_of([5, *tokens], [], b"")
    for _ in range(3):
        assert not index.cached_tokens(prefix).any()
    assert len(hashed) == blocks.HASHED_AT_ONCE, "nobody has the first block"
    hashed.clear()
    index.hash_cached(index.prefix_of([*tokens[:16_000], 5, *tokens], [], b""))
    assert len(hashed) == 1024, "the first 1000 blocks are known, and the 64 hashed together end at 1024"


def test_a_prompt_is_not_hashed_while_no_pod_has_anything() -> None:
    index = CacheIndex()
    assert index.prefix_of(list(range(64)), [], b"") == {}
    index.take(report("p", 1, "a"))
    assert index.prefix_of(list(range(64)), [], b"") != {}
    index.take(report("p", 2, "", "a"))
    assert index.prefix_of(list(range(64)), [], b"") == {}


def test_a_report_that_makes_no_sense_is_ignored() -> None:
    index = CacheIndex()
    for size in (0, -16):
        index.take(report("p", 1, "a", block_tokens=size))
    assert index.pods == []
    assert index.prefix_of(list(range(64)), [], b"") == {}


def test_there_are_no_more_pods_than_a_deployment_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_index, "MAX_PODS", 2)
    index = CacheIndex()
    for name in ("p", "q", "r"):
        index.take(report(name, 1, "a"))
    assert index.pods == ["p", "q"]
    index.forget("p")
    index.take(report("r", 1, "a"))
    assert index.pods == ["q", "r"]


def test_a_new_pod_takes_its_equal_share_from_pods_with_more() -> None:
    index = CacheIndex(most_in_all=6)
    index.take(report("p", 1, "abcdefgh"))
    assert letters(index, "p") == "abcdef"
    assert index.cut_pods == ["p"]
    index.take(report("q", 1, "uvwx"))
    assert (letters(index, "p"), letters(index, "q")) == ("abc", "uvw"), "the newest ones make room"
    assert index.cut_pods == ["p", "q"]
    index.take(report("p", 2, "y", "a"))
    assert (letters(index, "p"), index.num_blocks) == ("bcy", 6)


def test_a_pod_with_omitted_blocks_is_due_again_once_room_returns() -> None:
    index = CacheIndex(most_in_all=8)
    index.take(report("p", 1, "abcdef"))
    index.take(report("q", 1, "uvwx"))
    while index.tidy():
        pass
    assert (letters(index, "p"), letters(index, "q")) == ("abcd", "uvwx")
    assert index.cut_pods == ["p"]
    assert not index.has_room_again("p")
    index.forget("q")
    assert index.has_room_again("p")
    index.take(report("p", 2, "abcdef", begins=True))
    while index.tidy():
        pass
    assert (letters(index, "p"), index.cut_pods) == ("abcdef", [])
    assert not index.has_room_again("p")


@pytest.mark.parametrize("most_at_once", [1, 3, 100])
def test_what_is_removed_is_removed_in_parts(most_at_once: int) -> None:
    index = CacheIndex()
    alphabet = "abcdefghij"
    for pod in ("p", "q", "r"):
        index.take(report(pod, 1, alphabet))
    index.forget("p")
    index.forget("q")
    index.take(report("r", 2, "z", begins=True))
    assert index.num_blocks == 30, "no more has been removed than came"
    assert letters(index, "p") == letters(index, "q") == ""
    parts = []
    while index.num_blocks > 1:
        before = index.num_blocks
        index.tidy(most_at_once)
        parts.append(before - index.num_blocks)
    assert set(parts[:-1]) <= {most_at_once}
    assert letters(index, "r") == "z"
    assert not index.tidy()


@pytest.mark.parametrize("pods", [1, FEW, FEW + 1, 40])
def test_the_holders_of_a_feature_are_pods_with_an_engine_and_without(pods: int) -> None:
    index = CacheIndex()
    for number in range(pods):
        index.take(CacheReport(f"p{number}", "i", 1, [1, SIZE][number % 2], [b"f", b"%d" % number], []))
    index.take(CacheReport("other", "i", 1, 1, [b"g"], []))
    holders = index.flags(index.holders(b"f"))
    assert [bool(holders[index.slot(f"p{n}")]) for n in range(pods)] == [True] * pods
    assert not holders[index.slot("other")]
    assert not holders[index.slot("nobody")]
    assert not index.holders(b"h")
    index.take(CacheReport("p0", "i", 2, 1, [], [b"f"]))
    left = index.flags(index.holders(b"f"))
    assert not left[index.slot("p0")]
    assert left.sum() == pods - 1
