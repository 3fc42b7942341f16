"""The prefill role: takes placed requests, gathers their features, runs the prompt, and hands the sequence to a decoder.

On a pod that also holds the decode role, the sequence simply stays in the engine. On a pod that also holds the encode role, features
come from the tower in the same process instead of the queue: all of them, or those of small media.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Collection, Iterable

from mmd_api.contract.errors import (
    DeadlineError,
    DrainingError,
    MmdError,
    OverloadedError,
    RequestCancelledError,
)
from mmd_workers.engine.interface import KvReady, SampledToken
from mmd_workers.features.references import media_end
from mmd_workers.features.source import FeatureSource
from mmd_workers.features.store import FeatureStore
from mmd_workers.features.times import steps_of
from mmd_workers.model.prompt import Feature
from mmd_workers.observe.metrics import Metrics
from mmd_workers.prefill.kv_sender import Finished, KvSender, Ranges
from mmd_workers.sequences.engine import Added, SequenceEngine
from mmd_workers.sequences.sequence_events import SequenceOwner
from mmd_workers.sequences.token_publisher import SequenceBook, Tracked, sequence_id
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.message_parts import FeatureRef, Phase
from mmd_workers.wire.messages.prefill import GenerateRequest, Placed

log = logging.getLogger(__name__)

EARLY_SHARE = 0.25
"""Share of the engine's places, at least one, for prompts that begin before their media have come. A place is also one at a decoder."""


class PrefillService(SequenceOwner):
    """Runs one task per request, from placement to handover."""

    def __init__(
        self,
        bus: Bus,
        pod: str,
        engine: SequenceEngine,
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
        self._engine = engine
        self._store = store
        self._source = source
        self._book = book
        self._sender = sender
        self._max_waiting = max_waiting
        self._overlap_tokens = overlap_tokens
        self._metrics = metrics
        self._engine_slots = asyncio.Semaphore(max_in_engine)
        self._max_early = max(1, int(max_in_engine * EARLY_SHARE))
        self._early: set[str] = set()  # prompts that began before their media
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._needs_encoders: set[str] = set()
        self._ranges: dict[str, Ranges] = {}
        self._first_token: dict[str, asyncio.Future[SampledToken]] = {}
        self._added: dict[str, float] = {}  # when the engine got a sequence, in Unix seconds
        self._cached_tokens: dict[str, int] = {}
        self._filling: dict[str, asyncio.Future[list[None]]] = {}
        self._late: set[asyncio.Task[None]] = set()
        self._late_numbers = itertools.count()  # for tasks in `_late`: each has its own room in the store
        self._draining = False

    async def start(self) -> None:
        """Accept requests from now on."""
        await self._bus.serve(self._bus.subjects.prefill(self._pod), GenerateRequest, self._place)

    @property
    def active(self) -> int:
        """Requests between placement and handover."""
        return len(self._tasks)

    def waiting_tokens(self, sampled_at: float) -> int:
        """Prompt tokens of requests that wait for their first token and are missing from the engine's figures.

        `sampled_at`: when the engine's figures were sampled, in Unix seconds.
        """
        return self._prompt_tokens(
            name
            for name in self._tasks
            if self._added.get(name, math.inf) >= sampled_at
            and ((first := self._first_token.get(name)) is None or not first.done())
        )

    def blocked_tokens(self) -> int:
        """Prompt tokens of requests that wait for media to be encoded: work for the encoders, not yet for this pod."""
        return self._prompt_tokens(self._needs_encoders)

    def _prompt_tokens(self, names: Iterable[str]) -> int:
        """Prompt tokens to compute, without those that the engine found in its prefix cache or that are expected there."""
        return sum(
            tracked.tokens_to_compute(self._cached_tokens.get(name))
            for name in names
            if (tracked := self._book.get(name))
        )

    def drain(self) -> None:
        """Accept no more requests."""
        self._draining = True

    async def _place(self, request: GenerateRequest) -> Placed:
        def refuse(code: str, message: str) -> Placed:
            return Placed(request.request_id, accepted=False, code=code, message=message)

        if self._draining:
            return refuse(DrainingError.code, "this pod is draining")
        if len(self._tasks) >= self._max_waiting:
            return refuse(
                OverloadedError.code, f"{len(self._tasks)} requests are already waiting on this pod"
            )
        if self._book.was_cancelled(request.request_id, request.attempt):
            return refuse(RequestCancelledError.code, "its cancellation arrived first")
        name = sequence_id(request.request_id, request.attempt)
        if name not in self._tasks:
            tracked = self._book.open(request)
            task = asyncio.create_task(self._run(name, tracked), name=f"prefill-{name}")
            self._tasks[name] = task
            task.add_done_callback(lambda _: self._tasks.pop(name, None))
        return Placed(request.request_id, accepted=True)

    def cancel(self, sequence: str) -> None:
        """Stop work on a sequence, wherever it is; its task frees what it holds."""
        if (task := self._tasks.get(sequence)) is not None:
            task.cancel()
        for late in self._late:
            if late.get_name() == _late_name(sequence):
                late.cancel()

    def hands_over(self, sequence: str) -> bool:
        """Whether the sequence is on its way to a decoder: then this service closes its book."""
        tracked = self._book.get(sequence)
        return sequence in self._tasks and tracked is not None and bool(tracked.request.decode_pods)

    def on_admitted(self, sequence: str, cached_tokens: int) -> None:
        """The engine runs the prompt now, without the tokens found in its prefix cache.

        The cache may hold fewer tokens than when the media were looked up, or than at an admission before a preemption. Media that the
        engine lacks are then supplied after all, from the store or an encoder.
        """
        if sequence in self._first_token:
            self._cached_tokens[sequence] = cached_tokens
        if (tracked := self._book.get(sequence)) is None:
            return
        needed = {
            number
            for number in tracked.absent
            if media_end([tracked.request.features[number]]) > cached_tokens
        }
        if needed:
            tracked.absent -= needed
            self._metrics.late_features.inc(len(needed))
            late = asyncio.create_task(self._supply(sequence, tracked, needed), name=_late_name(sequence))
            self._late.add(late)
            late.add_done_callback(self._late.discard)

    def on_kv_ready(self, event: KvReady) -> None:
        """The engine has completed the KV of a range."""
        if (ranges := self._ranges.get(event.sequence_id)) is not None:
            ranges.ready.append((event.start, event.end))
            ranges.changed.set()

    def on_token(self, token: SampledToken) -> None:
        """The engine has sampled a token. The first one ends the prefill; with each, the engine may drop its features."""
        if not self._engine.keeps_features and (tracked := self._book.get(token.sequence_id)) is not None:
            tracked.absent = set(range(len(tracked.request.features)))
        if (first := self._first_token.get(token.sequence_id)) is not None and not first.done():
            first.set_result(token)

    def on_failed(self, sequence: str, error: MmdError) -> None:
        """End the sequence's prefill; the book reports the failure."""
        self._fail_prefill(sequence, error)

    def _fail_prefill(self, sequence: str, error: MmdError) -> bool:
        """End a prefill that waits for its first token; returns False if it does not wait for one."""
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
            await self._give_up(name, DeadlineError("request deadline exceeded before its prefill finished"))
        except MmdError as error:
            await self._give_up(name, error)
        except asyncio.CancelledError:
            self._book.forget(name, keep_end=True)
            self._engine.abort(name)
            raise
        except Exception as error:  # the request must not vanish, whatever went wrong
            log.exception("prefill of %s crashed", name)
            await self._give_up(name, MmdError(f"internal error in prefill: {type(error).__name__}: {error}"))
        finally:
            self._store.release(name)
            self._ranges.pop(name, None)
            self._first_token.pop(name, None)
            self._added.pop(name, None)
            self._cached_tokens.pop(name, None)
            self._filling.pop(name, None)
            self._early.discard(name)

    async def _give_up(self, name: str, error: MmdError) -> None:
        # This comes first: a pod whose engine fails gives back all sequences that are open.
        await self._book.fail(name, error)
        self._engine.abort(name)

    async def _serve(self, name: str, tracked: Tracked) -> None:
        request = tracked.request
        placed_at = time.time()
        self._needs_encoders.add(name)
        try:
            tracked.absent = await self._cached_media(name, request)
            needed = [number for number in range(len(request.features)) if number not in tracked.absent]
            arrivals = await self._gather_features(name, request, needed)
            leading_text_tokens = min((request.features[number].ranges[0][0] for number in needed), default=0)
            if not self._begins_early(name, leading_text_tokens, arrivals.values()):
                await asyncio.gather(*map(asyncio.shield, arrivals.values()))
        finally:
            self._needs_encoders.discard(name)
        async with self._engine_slots:
            await self._prefill(name, tracked, arrivals, placed_at)

    def _begins_early(
        self, name: str, leading_text_tokens: int, arrivals: Collection[asyncio.Future[Feature]]
    ) -> bool:
        """Take an early place for a prompt whose media have not come.

        False if it waits for them outside the engine: there is too little text before them to be worth a decoder's blocks while encoders work,
        or so many prompts do this already that slow encoders would leave no place to text.
        """
        has_all = all(map(_has_come, arrivals))
        if has_all or leading_text_tokens < self._overlap_tokens or len(self._early) >= self._max_early:
            return has_all
        self._early.add(name)
        return True

    async def _prefill(
        self, name: str, tracked: Tracked, arrivals: dict[int, asyncio.Future[Feature]], placed_at: float
    ) -> None:
        request = tracked.request
        decoder = self._sender if request.decode_pods else None
        reservation = await decoder.reserve(request) if decoder else None
        ranges = self._ranges[name] = Ranges()
        first = self._first_token[name] = asyncio.get_running_loop().create_future()
        handover: asyncio.Task[None] | None = None
        if decoder and reservation:
            handover = asyncio.create_task(decoder.hand_over(request, name, reservation, ranges))
        filling: asyncio.Future[list[None]] | None = None
        try:
            ready_features = {
                number: arrival.result() for number, arrival in arrivals.items() if _has_come(arrival)
            }
            added = await self._engine.add(
                name, request, stop_after_prefill=decoder is not None, features=ready_features
            )
            self._added[name] = added.at
            for number in ready_features:
                self._store.merged(request.features[number].feature_id)
                del arrivals[number]
            del ready_features  # the store owns their memory
            filling = self._filling[name] = asyncio.gather(
                *(
                    self._fill(name, number, request.features[number], arrival)
                    for number, arrival in arrivals.items()
                )
            )
            filling.add_done_callback(lambda _: self._early.discard(name))
            _, token = await asyncio.gather(filling, first)
            self._note_phases(tracked, placed_at, added, self._cached_tokens.get(name, 0))
            # The KV of the prompt is complete: a handover, however slow, needs no room for features.
            arrivals.clear()
            self._store.release(name)
            if handover is None:
                return  # the sequence decodes here; the book closes it at its last token
            if token.finish_reason is None:
                output = [*request.output_token_ids, token.token_id]
                ranges.finished = Finished(output, added.next_position)
                ranges.changed.set()
                await handover
            self._engine.abort(name)
            await self._book.close(name)
        finally:
            unfinished = [task for task in (filling, handover) if task is not None]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    def _note_phases(self, tracked: Tracked, placed_at: float, added: Added, cached_tokens: int) -> None:
        media_phases = self._feature_phases(tracked.request, placed_at)
        queue_start = max([placed_at, *(phase.end for phase in media_phases if phase.end < added.at)])
        sizes = {"tokens": len(tracked.request.token_ids), "cached_tokens": cached_tokens}
        tracked.phases += [
            *media_phases,
            Phase("queue", queue_start, added.at, {"for": "prefill"}),
            Phase("prefill", added.at, time.time(), sizes),
        ]

    async def _cached_media(self, name: str, request: GenerateRequest) -> set[int]:
        """Numbers of the media that need no encoding: the prefix cache has the KV of all their tokens."""
        if not request.features:
            return set()
        cached = await self._engine.cached_tokens(name, request)
        cached_media = {number for number, ref in enumerate(request.features) if media_end([ref]) <= cached}
        self._metrics.cache.labels("prefix", "hit").inc(len(cached_media))
        self._metrics.cache.labels("prefix", "miss").inc(len(request.features) - len(cached_media))
        return cached_media

    async def _gather_features(
        self, user: str, request: GenerateRequest, numbers: Iterable[int]
    ) -> dict[int, asyncio.Future[Feature]]:
        """Admit the features with these numbers for `user`, and request the missing ones; returns arrivals by number."""
        refs = {number: request.features[number] for number in numbers}
        if not refs:
            return {}
        needs = {
            ref.feature_id: self._engine.feature_bytes(ref.modality, ref.num_tokens) for ref in refs.values()
        }
        refs_by_id = {ref.feature_id: ref for ref in refs.values()}
        admitted = await self._store.admit(
            user, needs, lambda feature_id: self._source.request(refs_by_id[feature_id], request)
        )
        self._metrics.cache.labels("store", "miss").inc(len(admitted.new_ids))
        self._metrics.cache.labels("store", "hit").inc(len(needs) - len(admitted.new_ids))
        return {number: admitted.arrivals[ref.feature_id] for number, ref in refs.items()}

    async def _supply(self, name: str, tracked: Tracked, numbers: set[int]) -> None:
        """Supply media whose KV the engine has lost: evicted from the prefix cache, or freed by a preemption."""
        request, user = tracked.request, f"{_late_name(name)} ({next(self._late_numbers)})"
        try:
            async with asyncio.timeout(max(0.0, request.deadline - time.time())):
                if (filling := self._filling.get(name)) is not None:
                    await asyncio.shield(filling)
                # Features in the prompt are not needed in the store: no request holds bytes there while waiting for more.
                self._store.release(name)
                arrivals = await self._gather_features(user, request, numbers)
                await asyncio.gather(
                    *(
                        self._fill(name, number, request.features[number], arrival)
                        for number, arrival in arrivals.items()
                    )
                )
        except (MmdError, TimeoutError) as error:
            deadline_error = DeadlineError("request deadline exceeded while a medium was being encoded")
            failure = error if isinstance(error, MmdError) else deadline_error
            if not self._fail_prefill(name, failure):
                await self._give_up(name, failure)
        finally:
            self._store.release(user)

    async def _fill(self, name: str, number: int, ref: FeatureRef, arrival: asyncio.Future[Feature]) -> None:
        feature = await asyncio.shield(arrival)
        await self._engine.fill(name, number, feature)
        self._store.merged(ref.feature_id)

    def _feature_phases(self, request: GenerateRequest, placed_at: float) -> list[Phase]:
        """The phases of a request's media since its placement; media that were already here have none."""
        phases = []
        for ref in request.features:
            times = self._source.times(ref.feature_id)
            detail = {"modality": ref.modality, "tokens": ref.num_tokens, "feature": ref.feature_id[:12]}
            if "start" in times and "encoded" in times:
                phases.append(
                    Phase("queue", placed_at, max(placed_at, times["start"]), {"for": "encode"} | detail)
                )
                if "arrived" not in times:
                    work = {"work": ref.work}
                    phases.append(
                        Phase("encode", times["start"], times["encoded"], detail | work | steps_of(times))
                    )
            if "encoded" in times and "arrived" in times:
                sizes = {
                    "bytes": self._engine.feature_bytes(ref.modality, ref.num_tokens),
                    "wire_seconds": round(
                        times["wire_seconds"], 6
                    ),  # the transfer of the bytes alone, by one clock
                }
                phases.append(Phase("embedding_transfer", times["encoded"], times["arrived"], detail | sizes))
        return phases


def _late_name(sequence: str) -> str:
    return f"late-media-of-{sequence}"


def _has_come(arrival: asyncio.Future[Feature]) -> bool:
    return arrival.done() and not arrival.cancelled() and arrival.exception() is None
