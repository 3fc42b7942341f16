"""Keeps every sequence moving: places it, listens for its tokens, places it again when a worker is lost, frees it at the end.

Knows neither HTTP nor text: it hands tokens in order to whoever iterates, and typed errors when there will be none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from mmd_workers.errors import (
    BadMediaError,
    CapacityError,
    CountMismatchError,
    DeadlineError,
    FetchError,
    LinkError,
    MmdError,
    OverloadedError,
    PeerLostError,
    UnsupportedInputError,
)
from mmd_workers.gateway.requests import RequestState, SequenceSpec
from mmd_workers.gateway.router import NothingRoutable, Overloaded, Router, RouteRequest
from mmd_workers.gateway.timeline import Attempt, Timeline, Timelines, split_sequence_id
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus, Subscription
from mmd_workers.wire.messages import (
    GenerateRequest,
    Heartbeat,
    PhaseReport,
    Placed,
    RequestFailed,
    TokenBatch,
    TokenItem,
)
from mmd_workers.wire.peers import PeerDirectory, PeerEvent

PLACE_TIMEOUT_SECONDS = 5.0
TICK_SECONDS = 0.5
GAP_SECONDS = 2.0  # a token that others have overtaken for so long was lost on the wire
HANDOVER_SECONDS = 1.0  # silence after a possible holder was lost, before the request is placed again
IDLE_SECONDS = 6.0  # its pod reports to have nothing to do, and nothing comes: it has forgotten the request
KEPT_ATTEMPTS = 64
SILENCE_SECONDS = 60.0  # between two tokens of a sequence that has begun

_log = logging.getLogger(__name__)
_BY_CODE: dict[str, type[MmdError]] = {
    error.code: error
    for error in (
        BadMediaError,
        CapacityError,
        CountMismatchError,
        DeadlineError,
        FetchError,
        LinkError,
        OverloadedError,
        PeerLostError,
        UnsupportedInputError,
    )
}


def error_of(code: str, message: str) -> MmdError:
    """The typed error that a worker reported as data."""
    return _BY_CODE.get(code, MmdError)(message)


@dataclass(frozen=True, slots=True)
class Lost:
    """Why an attempt is over, and the pod to avoid next ("" for none). `reason` is a metric's label."""

    reason: Literal["pod_lost", "gave_up", "gap", "silent", "forgotten"]
    message: str
    pod: str


class Sequence:
    """One sequence in the gateway's hands. `news` is set whenever there are tokens to take, or an end."""

    def __init__(
        self, spec: SequenceSpec, route: RouteRequest, timeline: Timeline, news: asyncio.Event
    ) -> None:
        self.state = RequestState(spec)
        self.route = route
        self.timeline = timeline
        self.news = news
        self.error: MmdError | None = None
        self.signal = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.lost_pods: set[str] = set()
        self.waits_for_role: str | None = None
        self.placed_at = 0.0
        self.attempt = Attempt(0, -1, "", [], 0.0)
        self.gap_since: float | None = None
        self.idle_since: float | None = None
        self._taken = 0

    def take(self) -> list[TokenItem]:
        """Tokens in order that have not been taken yet."""
        items = self.state.tokens[self._taken :]
        self._taken += len(items)
        return items

    @property
    def ended(self) -> bool:
        """Whether everything has been taken and nothing more will come."""
        return self._taken == len(self.state.tokens) and (self.state.finished or self.error is not None)

    def wake(self) -> None:
        """Tell both sides that something changed."""
        self.signal.set()
        self.news.set()

    def fail(self, error: MmdError) -> None:
        """End it with a typed error."""
        self.error = error
        self.wake()


class Dispatcher:
    """All sequences of this gateway, by request id. One task per sequence drives it; events only change its state."""

    def __init__(
        self,
        bus: Bus,
        directory: PeerDirectory,
        router: Router,
        gateway: str,
        max_retries: int,
        metrics: Metrics,
    ) -> None:
        self._bus = bus
        self._directory = directory
        self._router = router
        self._gateway = gateway
        self._max_retries = max_retries
        self._metrics = metrics
        self._live: dict[str, Sequence] = {}
        self._subscriptions: list[Subscription] = []
        self._pods_changed = asyncio.Event()
        self.timelines = Timelines()
        self.on_first_token: Callable[[float], None] = lambda _seconds: None

    @property
    def live_sequences(self) -> int:
        """Sequences that have not been released."""
        return len(self._live)

    def held_by_role(self) -> dict[str, int]:
        """Sequences that wait for a pod, by the role that is missing: what scale-from-zero looks at."""
        held: dict[str, int] = {}
        for sequence in self._live.values():
            if sequence.waits_for_role is not None:
                held[sequence.waits_for_role] = held.get(sequence.waits_for_role, 0) + 1
        return held

    async def start(self) -> None:
        """Listen for tokens, failures and phases of this gateway, and for pods that go."""
        subjects = self._bus.subjects
        self._subscriptions = [
            await self._bus.subscribe(subjects.tokens(self._gateway), TokenBatch, self._on_tokens),
            await self._bus.subscribe(subjects.failures(self._gateway), RequestFailed, self._on_failure),
            await self._bus.subscribe(subjects.phases(self._gateway), PhaseReport, self._on_phases),
        ]
        self._directory.on_event(self._on_peer)
        await self._bus.flush()

    async def close(self) -> None:
        """Free whatever is left, at the workers too, and stop listening."""
        for sequence in list(self._live.values()):
            await self.release(sequence)
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def open(
        self, spec: SequenceSpec, route: RouteRequest, timeline: Timeline, news: asyncio.Event
    ) -> Sequence:
        """Start a sequence. Whoever opens it must `release` it, whatever happens."""
        sequence = Sequence(spec, route, timeline, news)
        self._live[spec.request_id] = sequence
        sequence.task = asyncio.create_task(self._drive(sequence), name=f"drive {spec.request_id}")
        return sequence

    async def release(self, sequence: Sequence) -> None:
        """Forget a sequence; if it has not finished, tell the workers to free it. Safe to call twice."""
        if self._live.pop(sequence.state.spec.request_id, None) is None:
            return
        while sequence.task is not None and not sequence.task.done():
            sequence.task.cancel()  # again, if need be: the NATS client may swallow one in a request that is just answered
            await asyncio.wait([sequence.task], timeout=0.1)
        self._metrics.duplicates.inc(sequence.state.duplicates)
        if not sequence.state.finished:
            await self._cancel(sequence)

    # --- events ---------------------------------------------------------------------------------------------

    async def _on_tokens(self, batch: TokenBatch) -> None:
        now = time.time()
        for item in batch.items:
            sequence = self._live.get(item.request_id)
            if sequence is None or sequence.error is not None:
                continue
            before = sequence.state.last_token_at
            if taken := sequence.state.accept(item, batch.pod, now):
                if before is not None:
                    self._metrics.itl.labels(sequence.timeline.modality()).observe(
                        (now - before) / len(taken)
                    )
                if not sequence.timeline.first_token:
                    sequence.timeline.first_token = now
                    self.on_first_token(now - sequence.timeline.arrived)
                sequence.timeline.last_token = now
                sequence.news.set()
            if sequence.state.finished or sequence.state.failure is not None:
                sequence.signal.set()

    async def _on_failure(self, failed: RequestFailed) -> None:
        sequence = self._live.get(failed.request_id)
        if sequence is not None and sequence.state.fail(failed):
            sequence.signal.set()

    async def _on_phases(self, report: PhaseReport) -> None:
        self.timelines.report(report)
        sequence = self._live.get(report.request_id)
        if sequence is not None:
            sequence.news.set()

    def _on_peer(self, event: PeerEvent) -> None:
        self._pods_changed.set()
        gone = event.kind in ("lost", "reborn") or event.heartbeat.state == "drained"
        if not gone:
            return
        for sequence in self._live.values():
            if event.heartbeat.pod in sequence.state.possible_holders():
                sequence.lost_pods.add(event.heartbeat.pod)
                sequence.signal.set()

    # --- driving --------------------------------------------------------------------------------------------

    async def _drive(self, sequence: Sequence) -> None:
        try:
            async with asyncio.timeout(max(0.0, sequence.state.spec.deadline - time.time())):
                await self._until_finished(sequence)
        except TimeoutError:
            sequence.fail(_out_of_time(sequence))
        except MmdError as error:
            sequence.fail(error)
        except Exception as error:  # noqa: BLE001 - a bug must end the client's stream, not leave it waiting
            _log.exception("driving %s failed", sequence.state.spec.request_id)
            sequence.fail(MmdError(f"{type(error).__name__} in the gateway: see its log"))

    async def _until_finished(self, sequence: Sequence) -> None:
        failures = 0
        avoid: frozenset[str] = frozenset()
        while True:
            await self._place(sequence, avoid)
            lost = await self._watch(sequence)
            if lost is None:
                return
            failures += 1
            self._metrics.retries.labels(lost.reason).inc()
            if sequence.state.tokens:
                self._metrics.migrations.labels(lost.reason).inc()
            sequence.attempt.lost = lost.message
            name = sequence.state.spec.request_id
            _log.warning("%s attempt %d is lost: %s", name, sequence.state.attempt, lost.message)
            await self._cancel(sequence)
            sequence.state.unplace()
            if failures > self._max_retries:
                raise PeerLostError(
                    f"given up after {failures} placements; the last one failed because {lost.message}"
                )
            avoid = frozenset({lost.pod}) if lost.pod else frozenset()
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(1.0, 0.02 * 2**failures))  # noqa: S311

    async def _place(self, sequence: Sequence, avoid: frozenset[str]) -> None:
        state = sequence.state
        refused: dict[str, Placed] = {}
        unreachable: set[str] = set()
        while True:
            self._pods_changed.clear()
            route = replace(sequence.route, avoid=avoid | refused.keys() | unreachable)
            outcome = self._router.route(route, self._directory.pods(state=None), time.time())
            if isinstance(outcome, NothingRoutable):
                sequence.waits_for_role = outcome.missing_role
                await self._pods_or(TICK_SECONDS)
                continue
            sequence.waits_for_role = None
            if isinstance(outcome, Overloaded) or outcome.prefill_pod in refused:
                # Nobody has seen a token yet: say so now. Otherwise a client is in the middle of a stream: keep trying.
                if not state.tokens and avoid == frozenset():
                    why = "; ".join(
                        sorted({f"{placed.code} {placed.message}" for placed in refused.values()})
                    )
                    raise OverloadedError(
                        f"every prefill queue is full{f' ({why})' if why else ''}: retry after a moment, or raise the pool's bounds"
                    )
                refused.clear()
                await self._pods_or(TICK_SECONDS)
                continue
            pod = outcome.prefill_pod
            if pod in unreachable:
                unreachable.clear()
                await self._pods_or(TICK_SECONDS)
            request = state.place(self._gateway, pod, outcome.decode_pods)
            self._note_attempt(sequence, request, pod)
            try:
                placed = await self._bus.request(
                    self._bus.subjects.prefill(pod), request, Placed, timeout=PLACE_TIMEOUT_SECONDS
                )
            except (PeerLostError, DeadlineError) as error:
                # It may have taken the request all the same.
                await self._cancel(sequence)
                placed = Placed(state.spec.request_id, False, error.code, error.message)
                unreachable.add(pod)
            except OverloadedError as error:
                placed = Placed(state.spec.request_id, False, error.code, error.message)
            if placed.accepted:
                return
            sequence.attempt.lost = f"{pod} refused: {placed.code} {placed.message}"
            state.unplace()
            if placed.code == "draining":
                unreachable.add(pod)  # it is not full, it leaves: another comes in its place
            if pod in unreachable:
                continue
            refusal = error_of(placed.code, f"{placed.message} (refused by {pod})")
            if placed.code in _BY_CODE and not refusal.retryable:
                raise refusal
            refused[pod] = placed

    async def _watch(self, sequence: Sequence) -> Lost | None:
        """Wait until the sequence has finished (None) or has to be placed again."""
        state = sequence.state
        while True:
            sequence.signal.clear()
            if state.finished:
                return None
            if (failed := state.failure) is not None:
                if not failed.retryable:
                    raise error_of(failed.code, f"{failed.message} (from {failed.pod})")
                return Lost("gave_up", f"{failed.pod} gave it up: {failed.code} {failed.message}", failed.pod)
            if (lost := self._stuck(sequence, time.time())) is not None:
                return lost
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await sequence.signal.wait()

    def _stuck(self, sequence: Sequence, now: float) -> Lost | None:
        """Why nothing more will come of this attempt; None: it may be well."""
        state = sequence.state
        moved = max(sequence.placed_at, state.last_token_at or 0.0)
        certain = state.certain_holder() or ""
        if certain in sequence.lost_pods:
            return Lost("pod_lost", f"pod {certain} is gone", certain)
        suspects = sequence.lost_pods & state.possible_holders()
        if suspects and now - moved > HANDOVER_SECONDS:
            return Lost("pod_lost", f"pod {min(suspects)} is gone and may have held it", min(suspects))
        sequence.gap_since = (sequence.gap_since or now) if state.has_gap else None
        if sequence.gap_since is not None and now - sequence.gap_since > GAP_SECONDS:
            return Lost("gap", f"token {len(state.tokens)} did not arrive, later ones did", "")
        if state.started and now - moved > SILENCE_SECONDS:
            return Lost("silent", f"no token came for {SILENCE_SECONDS:.0f} s", certain)
        idle = all(self._is_idle(pod, moved) for pod in state.possible_holders())
        sequence.idle_since = (sequence.idle_since or now) if idle else None
        if sequence.idle_since is not None and now - max(sequence.idle_since, moved) > IDLE_SECONDS:
            return Lost("forgotten", f"its pods report no work for {IDLE_SECONDS:.0f} s", certain)
        return None

    def _is_idle(self, pod: str, since: float) -> bool:
        beat: Heartbeat | None = self._directory.get(pod)
        if beat is None or beat.sent <= since:
            return beat is None
        load = beat.load
        return not (
            load.prefill_waiting_requests
            or load.prefill_waiting_tokens
            or load.decode_running
            or load.decode_waiting
        )

    async def _pods_or(self, seconds: float) -> None:
        """Wait until a pod appears, goes or changes state, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._pods_changed.wait()

    def _note_attempt(self, sequence: Sequence, request: GenerateRequest, pod: str) -> None:
        sequence.lost_pods.clear()
        sequence.gap_since = sequence.idle_since = None
        sequence.placed_at = time.time()
        _, number = split_sequence_id(request.request_id)
        sequence.attempt = Attempt(number, request.attempt, pod, request.decode_pods, sequence.placed_at)
        if len(sequence.timeline.attempts) < KEPT_ATTEMPTS:
            sequence.timeline.attempts.append(sequence.attempt)

    async def _cancel(self, sequence: Sequence) -> None:
        message = sequence.state.cancel()
        if message is None:
            return
        try:
            await self._bus.publish(self._bus.subjects.cancel, message)
        except MmdError as error:
            _log.warning(
                "cancel of %s not sent, its deadline will free it: %s", message.request_id, error.message
            )


def _out_of_time(sequence: Sequence) -> MmdError:
    if sequence.waits_for_role is not None:
        return OverloadedError(
            f"no ready {sequence.waits_for_role} pod until the request's deadline: check the pool's replicas and its pods' events"
        )
    return DeadlineError(
        "the request's deadline passed: raise spec.gateway.requestTimeoutSeconds or ask for fewer tokens"
    )
