"""Whatever happens to sequences and in which order, afterwards all blocks are free and the shelf of features is empty."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmd_api.contract.errors import CapacityError, CountMismatchError, OverloadedError
from mmd_workers.prefill.kv_sender import prefix_of
from mmd_workers.vllm_engine.core import VllmCore
from support.oracles import model_zoo as zoo

from . import cores

NAMES = ["a", "b", "c", "d"]
KINDS = ["text", "image", "images"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cores.checkpoint("llava", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def asked(folder):
    """Prompts of three to six blocks, two of which have a medium in common."""
    long = (
        "tell me which of these is the larger one, and what else you see there, and then all the rest of it"
    )
    one, two = zoo.image(100, 64, 1), zoo.image(60, 60, 4)
    return {
        "text": cores.question(folder, long),
        "image": cores.question(folder, "what is this? " + long, one, long, max_tokens=40),
        "images": cores.question(folder, one, "and", two, long, max_tokens=20),
    }


@pytest.fixture(scope="module", params=[True, False], ids=["prefix cache", "no prefix cache"])
def core(folder, request):
    """Room for two or three of the sequences: reservations are refused and sequences preempted."""
    return cores.make(
        folder, blocks=12, max_model_len=8 * cores.BLOCK, max_sequences=3, prefix_cache=request.param
    )


@pytest.fixture(scope="module")
def source(folder):
    return cores.make(folder)


@pytest.fixture(scope="module")
def kv(source, asked):
    """What a prefill of each prompt leaves: its KV and its first token."""
    made = {}
    for kind, one in asked.items():
        source.add(kind, one.request, stop_after_prefill=True)
        cores.supply(source, kind, one)
        outcome = cores.step(source, until=lambda o, kind=kind: o.tokens.get(kind))
        made[kind] = source.read_kv(kind, 0, len(one.request.token_ids)), outcome.tokens[kind]
        source.abort(kind)
    return made


@pytest.fixture(scope="module")
def alone(source, asked):
    """The tokens of each prompt when nothing else happens."""
    found = {}
    for kind, one in asked.items():
        found[kind] = cores.ask(source, one)
        assert found[kind] == one.answer(one.request.sampling.max_tokens)
    return found


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(NAMES), st.sampled_from(KINDS), st.booleans()),
    st.tuples(st.just("fill"), st.sampled_from(NAMES), st.integers(0, 1)),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.sampled_from(NAMES)),
    st.tuples(st.just("reserve"), st.sampled_from(NAMES), st.sampled_from(KINDS)),
    st.tuples(st.just("write"), st.sampled_from(NAMES), st.integers(1, 100)),
    st.tuples(st.just("attach"), st.sampled_from(NAMES)),
    st.tuples(st.just("read"), st.sampled_from(NAMES)),
    st.tuples(st.just("forget")),
)


class Driver:
    """Does what a role may do, in any order, and notes what each sequence is."""

    def __init__(self, core: VllmCore, asked, kv) -> None:
        self.core, self.asked, self.kv = core, asked, kv
        self.kinds: dict[str, str] = {}
        self.written: dict[str, int] = {}
        self.outcome = cores.Outcome()
        self.results: list[tuple[str, list[int]]] = []

    def add(self, name, kind, stop):
        if name not in self.kinds:
            self.core.add(name, self.asked[kind].request, stop_after_prefill=stop)
            self.kinds[name] = kind

    def fill(self, name, medium):
        kind = self.kinds.get(name, "text")
        if medium < len(self.asked[kind].features):
            self.core.fill(name, medium, self.asked[kind].features[medium])

    def step(self, times):
        for _ in range(times):
            if self.core.has_work():
                output = self.core.step()
                self.outcome.take(output)
                asked = {name: self.asked[kind] for name, kind in self.kinds.items()}
                cores.bring_again(self.core, output, self.outcome, asked)
        for name in list(self.kinds):
            if name in self.outcome.failed or self.outcome.reasons.get(name):
                self.results.append((self.kinds[name], self.outcome.tokens.get(name, [])))
                self.abort(name)

    def abort(self, name):
        self.core.abort(name)
        self.kinds.pop(name, None)
        self.written.pop(name, None)
        for noted in (self.outcome.tokens, self.outcome.reasons, self.outcome.failed, self.outcome.ready):
            noted.pop(name, None)

    def reserve(self, name, kind):
        if name in self.kinds:
            return
        request = self.asked[kind].request
        try:
            cached = self.core.reserve(name, len(request.token_ids), 20, prefix_of(request, cores.IDENTITY))
        except (OverloadedError, CapacityError):
            return
        self.kinds[name], self.written[name] = kind, cached

    def write(self, name, tokens):
        if name in self.written:
            start, whole = self.written[name], self.kv[self.kinds[name]][0]
            end = min(start + tokens, whole[0].shape[1])
            if end > start:
                self.core.write_kv(name, start, [layer[:, start:end] for layer in whole])
                self.written[name] = end

    def attach(self, name):
        if name not in self.written:
            return
        kind = self.kinds[name]
        whole, first = self.kv[kind]
        try:
            self.core.attach(name, self.asked[kind].request, first)
        except CountMismatchError:
            assert self.written[name] < whole[0].shape[1]
        else:
            del self.written[name]
            self.outcome.tokens[name] = list(first)

    def read(self, name):
        spans = self.outcome.ready.get(name)
        if spans and name in self.kinds:
            read = self.core.read_kv(name, 0, spans[-1][1])
            for layer, expected in zip(read, self.kv[self.kinds[name]][0], strict=True):
                assert (layer - expected[:, : spans[-1][1]]).abs().max() < 1e-3

    def forget(self):
        if not self.kinds:
            self.core.forget_prefixes()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=st.lists(ACTIONS, min_size=5, max_size=40))
def test_any_order_of_commands_leaves_nothing_and_disturbs_no_answer(core, asked, kv, alone, actions):
    driver = Driver(core, asked, kv)
    try:
        for action, *arguments in actions:
            getattr(driver, action)(*arguments)
        for kind, tokens in driver.results:
            assert tokens == alone[kind][: len(tokens)]
    finally:
        for name in NAMES:
            core.abort(name)
        while core.has_work():
            core.step()
    cores.assert_empty(core)


def test_every_request_ends_in_a_pool_that_is_too_small_for_all(core, asked, alone):
    outcome, every = cores.Outcome(), {f"{number}": asked[KINDS[number % 3]] for number in range(9)}
    for number in range(9):
        kind = KINDS[number % 3]
        request = replace(asked[kind].request, arrived=float(number))
        core.add(f"{number}", request, stop_after_prefill=False)
        if number % 2:
            cores.supply(core, f"{number}", asked[kind])
        output = core.step()
        outcome.take(output)
        cores.bring_again(core, output, outcome, every)
    for number in range(0, 9, 2):
        cores.supply(core, f"{number}", asked[KINDS[number % 3]])
    cores.step(core, outcome, asked=every)
    assert not outcome.failed
    for number in range(9):
        assert outcome.tokens[f"{number}"] == alone[KINDS[number % 3]]
    cores.assert_empty(core)
