"""A pod that prefills and decodes, with features from the test."""

from __future__ import annotations

import asyncio
from typing import Any

from mmd_workers.engine.interface import StepOutput
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.features.store import FeatureStore
from mmd_workers.model.grammar import Grammars
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.prefill.prefill_service import PrefillService
from mmd_workers.sequences.native import NativeEngine
from mmd_workers.sequences.token_publisher import SequenceBook
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.message_parts import FeatureRef
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.oracles.engine_oracle import generate, llama, make_engine

from .media_model import NEW_TOKENS, TOKENS, MediaModel, request_of


class Source:
    """Features come at once; which ones were asked for is kept."""

    def __init__(self, model: MediaModel, store: FeatureStore) -> None:
        self.model, self.store = model, store
        self.asked: list[str] = []

    def request(self, ref: FeatureRef, request: GenerateRequest) -> None:
        self.asked.append(ref.feature_id)
        ((start, length),) = ref.ranges
        asyncio.get_running_loop().call_soon(
            self.store.deliver, ref.feature_id, self.model.feature(start, length)
        )

    def times(self, feature_id: str) -> dict[str, float]:
        return {}


class Pod:
    """A pod that prefills and decodes, as the worker joins its parts."""

    def __init__(self, bus: Bus, sender: Any = None, max_waiting: int = 8, **engine: Any) -> None:
        self.metrics = metrics = Metrics()
        self.model = MediaModel(llama())
        self.runner = EngineRunner(make_engine(self.model, **engine), self.take)
        self.book = SequenceBook(bus, "p-0", metrics, Tracing("t", "t", "t", None))
        self.store = FeatureStore(1 << 20, lambda *_: None)
        self.source = Source(self.model, self.store)
        self.tokens: dict[str, list[int]] = {}
        self.done: dict[str, asyncio.Event] = {}
        self.failed: list[Any] = []
        self.service = PrefillService(
            *(
                bus,
                "p-0",
                NativeEngine(self.runner, self.model, Grammars(lambda: None, 0, ())),
                self.store,
                self.source,
                self.book,
                sender,
            ),  # type: ignore[arg-type]
            max_waiting=max_waiting,
            max_in_engine=8,
            overlap_tokens=4,
            metrics=metrics,
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
        self.failed += output.failed
        self.runner.taken()

    async def serve(self, name: str, max_tokens: int = NEW_TOKENS, *, media: bool = True) -> list[int]:
        sequence = f"{name}#0"
        self.done[sequence] = asyncio.Event()
        assert (await self.service._place(request_of(name, max_tokens, media=media))).accepted
        async with asyncio.timeout(25):
            await self.done[sequence].wait()
        return self.tokens[sequence]

    def forget_features(self) -> None:
        """What the store keeps as cache would hide what the prefix cache saves."""
        for feature in list(self.store._entries):
            self.store._discard(feature)


def answer(max_tokens: int = NEW_TOKENS) -> list[int]:
    return generate(llama(), TOKENS, max_tokens)
