"""The prefill role: takes placed requests, gathers their features, runs the prompt, and hands the sequence to a decoder.

On a pod that also holds the decode role the sequence simply stays in the engine; on one that holds the encode role features
come from the tower next door instead of the queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Protocol

from mmd_workers.decode.params import media_spans_of, sampling_of
from mmd_workers.decode.tokens import SequenceBook, Tracked, sequence_id
from mmd_workers.encoder.pipeline import steps_of
from mmd_workers.encoder.refs import layout_of
from mmd_workers.engine.engine import Engine
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.engine.types import KvReady, SampledToken, SequenceInput
from mmd_workers.errors import DeadlineError, MmdError
from mmd_workers.model.types import Feature, LanguageModel, LoweredPrompt
from mmd_workers.observe.metrics import Metrics
from mmd_workers.prefill.features import FeatureStore
from mmd_workers.prefill.handoff import Finished, KvSender, Ranges
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages import FeatureRef, GenerateRequest, Phase, Placed

log = logging.getLogger(__name__)


class FeatureSource(Protocol):
    """Where features come from: the queue and an encoder pod, or the tower of this process."""

    encodes_here: bool  # else whoever encodes reports that phase

    def request(self, ref: FeatureRef, request: GenerateRequest) -> None:
        """Have the feature made; it arrives in the store, or its failure does."""
        ...

    def times(self, feature_id: str) -> dict[str, float]:
        """Unix times of the steps of a feature that has arrived; empty when it was here already."""
        ...


class PrefillService:
    """One task per request from placement to hand-over."""

    def __init__(
        self,
        bus: Bus,
        pod: str,
        runner: EngineRunner,
        model: LanguageModel,
        store: FeatureStore,
        source: FeatureSource,
        book: SequenceBook,
        sender: KvSender | None,
        max_waiting: int,
        max_in_engine: int,
        overlap_tokens: int,
        metrics: Metrics,
    ) -> None:
        self._bus = bus
        self._pod = pod
        self._runner = runner
        self._model = model
        self._store = store
        self._source = source
        self._book = book
        self._sender = sender
        self._max_waiting = max_waiting
        self._overlap_tokens = overlap_tokens
        self._metrics = metrics
        self._engine_slots = asyncio.Semaphore(max_in_engine)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._needs_encoders: set[str] = set()
        self._ranges: dict[str, Ranges] = {}
        self._first_token: dict[str, asyncio.Future[SampledToken]] = {}
        self._cached_tokens: dict[str, int] = {}
        self._draining = False

    async def start(self) -> None:
        """Take requests from now on."""
        await self._bus.serve(self._bus.subjects.prefill(self._pod), GenerateRequest, self._place)

    @property
    def active(self) -> int:
        """Requests between placement and hand-over."""
        return len(self._tasks)

    def waiting_tokens(self) -> int:
        """Prompt tokens of requests that have not reached the engine yet."""
        return self._prompt_tokens(name for name in self._tasks if name not in self._first_token)

    def blocked_tokens(self) -> int:
        """Those of them that wait for media to be encoded: work for the encoders, not yet for this pod."""
        return self._prompt_tokens(self._needs_encoders)

    def _prompt_tokens(self, names: Iterable[str]) -> int:
        found = (self._book.get(name) for name in names)
        return sum(len(tracked.request.token_ids) for tracked in found if tracked is not None)

    def drain(self) -> None:
        """Take no more requests."""
        self._draining = True

    async def _place(self, request: GenerateRequest) -> Placed:
        def refuse(code: str, message: str) -> Placed:
            return Placed(request.request_id, accepted=False, code=code, message=message)

        if self._draining:
            return refuse("draining", "this pod is draining")
        if len(self._tasks) >= self._max_waiting:
            return refuse("overloaded", f"{len(self._tasks)} requests wait here already")
        if self._book.was_cancelled(request.request_id, request.attempt):
            return refuse("cancelled", "its cancellation came first")
        name = sequence_id(request.request_id, request.attempt)
        if name not in self._tasks:
            tracked = self._book.open(request)
            task = asyncio.create_task(self._run(name, tracked), name=f"prefill-{name}")
            self._tasks[name] = task
            task.add_done_callback(lambda _: self._tasks.pop(name, None))
        return Placed(request.request_id, accepted=True)

    def cancel(self, name: str) -> None:
        """Stop work on a sequence, wherever it is; its task frees what it holds."""
        if (task := self._tasks.get(name)) is not None:
            task.cancel()

    def hands_over(self, name: str) -> bool:
        """Whether the sequence is on its way to a decoder: then this service closes its book."""
        tracked = self._book.get(name)
        return name in self._tasks and tracked is not None and bool(tracked.request.decode_pods)

    def on_admitted(self, sequence: str, cached_tokens: int) -> None:
        """The engine runs the prompt now, but for what it found in its prefix cache."""
        if sequence in self._first_token:
            self._cached_tokens[sequence] = cached_tokens

    def on_kv_ready(self, event: KvReady) -> None:
        """The engine has completed the KV of a range."""
        if (ranges := self._ranges.get(event.sequence_id)) is not None:
            ranges.ready.append((event.start, event.end))
            ranges.changed.set()

    def on_token(self, token: SampledToken) -> None:
        """The engine has sampled a token: the first one ends the prefill."""
        if (first := self._first_token.get(token.sequence_id)) is not None and not first.done():
            first.set_result(token)

    def on_failed(self, sequence: str, error: MmdError) -> bool:
        """The engine gave the sequence up. True if it was this service's to report."""
        if (first := self._first_token.get(sequence)) is None or first.done():
            return False
        first.set_exception(error)
        return True

    async def _run(self, name: str, tracked: Tracked) -> None:
        request = tracked.request
        try:
            async with asyncio.timeout(max(0.0, request.deadline - time.time())):
                await self._serve(name, tracked)
        except TimeoutError:
            await self._give_up(
                name, DeadlineError("the request's deadline passed before its prefill was done")
            )
        except MmdError as error:
            await self._give_up(name, error)
        except asyncio.CancelledError:
            self._book.forget(name)
            await self._runner.call(lambda engine: engine.abort(name))
            raise
        except Exception as error:  # the request must not vanish, whatever went wrong
            log.exception("prefill of %s crashed", name)
            await self._give_up(name, MmdError(f"internal error in prefill: {type(error).__name__}: {error}"))
        finally:
            self._store.release(name)
            self._ranges.pop(name, None)
            self._first_token.pop(name, None)
            self._cached_tokens.pop(name, None)

    async def _give_up(self, name: str, error: MmdError) -> None:
        await self._runner.call(lambda engine: engine.abort(name))
        await self._book.fail(name, error)

    async def _serve(self, name: str, tracked: Tracked) -> None:
        request = tracked.request
        placed = time.time()
        self._needs_encoders.add(name)
        try:
            arrivals = await self._gather_features(name, request)
            text_first = min((ref.ranges[0][0] for ref in request.features), default=0)
            if arrivals and text_first < self._overlap_tokens:
                # Too little text before the first medium to be worth a decoder's blocks while encoders work.
                await asyncio.gather(*map(asyncio.shield, arrivals))
        finally:
            self._needs_encoders.discard(name)
        async with self._engine_slots:
            await self._prefill(name, tracked, arrivals, placed)

    async def _prefill(
        self, name: str, tracked: Tracked, arrivals: list[asyncio.Future[Feature]], placed: float
    ) -> None:
        request = tracked.request
        decoder = self._sender if request.decode_pods else None
        reservation = await decoder.reserve(request) if decoder else None
        ranges = self._ranges[name] = Ranges()
        first = self._first_token[name] = asyncio.get_running_loop().create_future()
        handing: asyncio.Task[None] | None = None
        if decoder and reservation:
            handing = asyncio.create_task(decoder.hand_over(request, name, reservation, ranges))
        filling: asyncio.Future[list[None]] | None = None
        try:
            prompt, added = await self._runner.call(
                lambda engine: self._begin(engine, name, request, hands_over=decoder is not None)
            )
            filling = asyncio.gather(
                *(
                    self._fill(name, number, ref, arrival)
                    for number, (ref, arrival) in enumerate(zip(request.features, arrivals, strict=True))
                )
            )
            _, token = await asyncio.gather(filling, first)
            self._note_phases(tracked, placed, added, self._cached_tokens.get(name, 0))
            if handing is None:
                return  # the sequence decodes here; the book closes it at its last token
            if token.finish_reason is None:
                output = [*request.output_token_ids, token.token_id]
                ranges.finished = Finished(output, prompt.next_position)
                ranges.changed.set()
                await handing
            await self._runner.call(lambda engine: engine.release(name))
            await self._book.close(name)
        finally:
            left = [task for task in (filling, handing) if task is not None]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _begin(
        self, engine: Engine, name: str, request: GenerateRequest, *, hands_over: bool
    ) -> tuple[LoweredPrompt, float]:
        """Lower the prompt and queue it, in one turn between two steps: a second turn would come a step of others later.

        Returns the prompt and the unix time at which the engine had it.
        """
        prompt = self._model.lower(
            request.token_ids, [layout_of(ref) for ref in request.features], request.output_token_ids
        )
        added = time.time()
        engine.add(
            SequenceInput(
                sequence_id=name,
                prompt=prompt,
                sampling=sampling_of(request, self._model),
                media_spans=media_spans_of(request),
                output_token_ids=request.output_token_ids,
                stop_after_prefill=hands_over,
            )
        )
        return prompt, added

    def _note_phases(self, tracked: Tracked, placed: float, added: float, cached_tokens: int) -> None:
        encoded = self._feature_phases(tracked.request, placed)
        waited = max([placed, *(phase.end for phase in encoded if phase.end < added)])
        sizes = {"tokens": len(tracked.request.token_ids), "cached_tokens": cached_tokens}
        tracked.phases += [
            *encoded,
            Phase("queue", waited, added, {"for": "prefill"}),
            Phase("prefill", added, time.time(), sizes),
        ]

    async def _gather_features(self, name: str, request: GenerateRequest) -> list[asyncio.Future[Feature]]:
        """Admit the request's features and have the new ones made."""
        if not request.features:
            return []
        needs = {
            ref.feature_id: self._model.feature_bytes(ref.modality, ref.num_tokens)
            for ref in request.features
        }
        new = set(await self._store.admit(name, needs))
        self._metrics.cache.labels("store", "miss").inc(len(new))
        self._metrics.cache.labels("store", "hit").inc(len(needs) - len(new))
        arrivals = [self._store.arrival(ref.feature_id) for ref in request.features]
        for ref in request.features:
            if ref.feature_id in new:
                new.discard(ref.feature_id)
                self._store.encoding(ref.feature_id)
                self._source.request(ref, request)
        return arrivals

    async def _fill(self, name: str, number: int, ref: FeatureRef, arrival: asyncio.Future[Feature]) -> None:
        feature = await asyncio.shield(arrival)
        await self._runner.call(lambda engine: engine.fill(name, number, feature))
        self._store.merged(ref.feature_id)

    def _feature_phases(self, request: GenerateRequest, placed: float) -> list[Phase]:
        """What happened to the media of a request since it was placed; nothing for those that were here already."""
        phases = []
        for ref in request.features:
            times = self._source.times(ref.feature_id)
            detail = {"modality": ref.modality, "tokens": ref.num_tokens, "feature": ref.feature_id[:12]}
            if "start" in times and "encoded" in times:
                phases.append(Phase("queue", placed, max(placed, times["start"]), {"for": "encode"} | detail))
                if self._source.encodes_here:
                    phases.append(Phase("encode", times["start"], times["encoded"], detail | steps_of(times)))
            if "encoded" in times and "arrived" in times:
                phases.append(Phase("embedding_transfer", times["encoded"], times["arrived"], detail))
        return phases
