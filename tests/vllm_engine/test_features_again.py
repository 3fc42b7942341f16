"""A pod that prefills and decodes with vLLM: media take room in its store only until the first token, and a prompt that is preempted after
that gets them once more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmd_workers.engine.interface import StepOutput
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.features.store import FeatureStore
from mmd_workers.model.prompt import Feature
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.prefill.prefill_service import PrefillService
from mmd_workers.sequences.token_publisher import SequenceBook
from mmd_workers.vllm_engine.host import VllmEngine
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.message_parts import FeatureRef
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.harness.waiting import until
from support.oracles import model_zoo as zoo

from . import cores

pytest_plugins = ["support.servers.nats_fixture"]

Connect = Callable[[str], Awaitable[Bus]]
LONG, SHORT = 200, 4  # answers, in tokens
SECONDS = 60


class Source:
    """Features that come at once; which ones were asked for is kept."""

    def __init__(self, store: FeatureStore, questions: dict[str, cores.Question]) -> None:
        self.store = store
        self.features: dict[str, Feature] = {
            ref.feature_id: feature
            for one in questions.values()
            for ref, feature in zip(one.request.features, one.features, strict=True)
        }
        self.asked: list[str] = []

    def request(self, ref: FeatureRef, request: GenerateRequest) -> None:
        self.asked.append(ref.feature_id)
        asyncio.get_running_loop().call_soon(
            self.store.deliver, ref.feature_id, self.features[ref.feature_id]
        )

    def times(self, feature_id: str) -> dict[str, float]:
        return {}


class Pod:
    """The parts of a pod between its placements and its outputs. Its store has room for the media of one request."""

    def __init__(self, bus: Bus, core: Any, questions: dict[str, cores.Question]) -> None:
        self.questions, self.metrics = questions, Metrics()
        self.runner = EngineRunner(core, self.take)
        engine = VllmEngine(self.runner, core.grammars, core.kv_layout, core.feature_row_bytes)
        self.book = SequenceBook(bus, "p-0", self.metrics, Tracing("t", "t", "t", None))
        room = max(feature.num_bytes for one in questions.values() for feature in one.features)
        self.store = FeatureStore(room, lambda *_: None)
        self.source = Source(self.store, questions)
        self.tokens: dict[str, list[int]] = {}
        self.done = {f"{name}#0": asyncio.Event() for name in questions}
        self.grown = asyncio.Event()
        self.service = PrefillService(
            bus,
            "p-0",
            engine,
            self.store,
            self.source,
            self.book,
            None,
            max_waiting=8,
            max_in_engine=8,
            overlap_tokens=4,
            metrics=self.metrics,
        )

    def take(self, output: StepOutput) -> None:
        for sequence, cached in output.admitted.items():
            self.service.on_admitted(sequence, cached)
        for token in output.tokens:
            self.tokens.setdefault(token.sequence_id, []).append(token.token_id)
            self.service.on_token(token)
            if token.finish_reason is not None:
                self.book.forget(token.sequence_id)
                self.done[token.sequence_id].set()
        assert not output.failed, output.failed
        self.grown.set()
        self.runner.taken()

    async def place(self, name: str) -> None:
        now = time.time()
        request = replace(
            self.questions[name].request, request_id=name, gateway="g", deadline=now + SECONDS, arrived=now
        )
        assert (await self.service._place(request)).accepted

    async def until_it_has(self, name: str, tokens: int) -> None:
        await until(lambda: len(self.tokens.get(f"{name}#0", ())) >= tokens, changed=self.grown)

    async def answer(self, name: str) -> list[int]:
        async with asyncio.timeout(SECONDS):
            await self.done[f"{name}#0"].wait()
        return self.tokens[f"{name}#0"]

    async def preempt(self, name: str) -> int:
        return await self.runner.call(lambda core: cores.preempt(core, f"{name}#0"))

    @property
    def late(self) -> float:
        return float(self.metrics.late_features._value.get())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cores.checkpoint("llava", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def questions(folder: Path) -> dict[str, cores.Question]:
    """Two about images of the same size."""
    return {
        "long": cores.question(folder, "what is this?", zoo.image(100, 64, 1), "tell me", max_tokens=LONG),
        "short": cores.question(folder, "and this?", zoo.image(100, 64, 2), "say", max_tokens=SHORT),
    }


@pytest.fixture
def core(folder: Path) -> Any:
    """Without a prefix cache: what is preempted is computed again entirely."""
    return cores.make(folder, prefix_cache=False)


@pytest.fixture
async def pod(connect: Connect, core: Any, questions: dict[str, cores.Question]) -> AsyncIterator[Pod]:
    pod = Pod(await connect("p-0"), core, questions)
    pod.runner.start()
    yield pod
    assert await pod.runner.stop(10)
    cores.assert_empty(core)


def ids(questions: dict[str, cores.Question]) -> tuple[str, str]:
    return tuple(questions[name].request.features[0].feature_id for name in ("long", "short"))  # type: ignore[return-value]


async def test_a_preempted_prompt_gets_its_features_from_the_store(
    pod: Pod, questions: dict[str, cores.Question]
) -> None:
    await pod.place("long")
    made = 0
    for _ in range(2):
        await pod.until_it_has("long", made + 1)
        made = await pod.preempt("long")
    assert await pod.answer("long") == questions["long"].answer(LONG)
    assert pod.source.asked == [ids(questions)[0]], "nothing is encoded twice"
    assert pod.late == 2


async def test_a_long_answer_yields_its_room_and_survives_a_preemption(
    pod: Pod, questions: dict[str, cores.Question]
) -> None:
    long, short = ids(questions)
    await pod.place("long")
    await pod.until_it_has("long", 1)
    await pod.place("short")
    assert await pod.answer("short") == questions["short"].answer(SHORT)
    assert not pod.done["long#0"].is_set(), "the other one waited for its room"
    assert pod.store.newest(9) == [short]
    await pod.preempt("long")
    assert await pod.answer("long") == questions["long"].answer(LONG)
    assert pod.source.asked == [long, short, long]
    assert pod.late == 1
