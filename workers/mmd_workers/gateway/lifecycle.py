"""Keeps every sequence moving: places it, listens for its tokens, places it again when a worker is lost, frees it at the end.

Independent of HTTP and text: it provides tokens in order, and a typed error if the rest will not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from mmd_api.contract.errors import (
    CapacityError,
    DeadlineError,
    DrainingError,
    MmdError,
    OverloadedError,
    PeerLostError,
    PreemptedError,
    TooLongError,
    error_of,
)
from mmd_api.contract.pools import ROLES, Role
from mmd_workers.backoff import Backoff
from mmd_workers.gateway.requests import RequestState, SequenceSpec
from mmd_workers.gateway.router import (
    NeverFits,
    NothingRoutable,
    Overloaded,
    Placement,
    Router,
    RouteRequest,
)
from mmd_workers.gateway.timeline import Attempt, Timeline, Timelines, split_sequence_id
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus, Subscription
from mmd_workers.wire.codec import MAX_REQUEST_BYTES
from mmd_workers.wire.messages import (
    GenerateRequest,
    HeldSequence,
    PhaseReport,
    Placed,
    RequestFailed,
    SequenceReceipt,
    SequenceReport,
    TokenBatch,
)
from mmd_workers.wire.peers import PeerDirectory, PeerEvent

PLACE_TIMEOUT_SECONDS = 5.0
TICK_SECONDS = 0.5
RETRY_SECONDS = (0.04, 1.0)  # first and longest pause before a lost attempt is placed again
GAP_SECONDS = 8.0  # a missing token that its pod has not resent for this long will not arrive
HANDOVER_SECONDS = 1.0  # silence after a possible holder was lost, before the request is placed again
UNREPORTED_SECONDS = (
    3.0  # beyond the heartbeat timeout, without a report or token of it: no pod holds the attempt
)
STALL_SECONDS = 2.0  # between two looks at a sequence: this process stood still, and silence proves nothing
KEPT_ATTEMPTS = 64
BYTES_PER_TOKEN = 5  # of an id on the wire, at most
COMMIT_BYTES = 4096  # of a handover's message, besides the placement and the outputs
SILENCE_SECONDS = 60.0  # between two tokens of a sequence that has begun

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lost:
    """Why an attempt is over, and the pod to avoid next ("" for none). `reason` is a metric's label."""

    reason: Literal["pod_lost", "preempted", "gave_up", "gap", "silent", "forgotten"]
    message: str
    pod: str


class ServedSequence:
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
        self.waits_for_role: Role | None = None
        self.placed_at = 0.0
        self.attempt = Attempt(0, -1, "", [], 0.0)
        self.gap_since: float | None = None
        self.held_at = 0.0  # when a pod last reported that it works on the attempt
        self.looked_at = 0.0

    @property
    def ended(self) -> bool:
        """Whether everything has been taken and nothing more will come."""
        return not self.state.pending_tokens and (self.state.finished or self.error is not None)

    def wake(self) -> None:
        """Notify both sides that something changed."""
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
        self.max_retries = max_retries
        self._metrics = metrics
        self._live: dict[str, ServedSequence] = {}
        self._subscriptions: list[Subscription] = []
        self._pods_changed = asyncio.Event()
        self._connected_at = 0.0
        self.timelines = Timelines()
        self.on_first_token: Callable[[float], None] = lambda _seconds: None

    @property
    def live_sequences(self) -> int:
        """Sequences that have not been released."""
        return len(self._live)

    def held_by_role(self) -> dict[Role, int]:
        """Sequences waiting for a pod, by the missing role: scale-from-zero reads this."""
        held: dict[Role, int] = {}
        for sequence in self._live.values():
            if sequence.waits_for_role is not None:
                held[sequence.waits_for_role] = held.get(sequence.waits_for_role, 0) + 1
        return held

    def ready_pods(self) -> dict[Role, int]:
        """Pods by role to which requests are routed now."""
        pods = self._router.routable(self._directory.pods())
        return {role: sum(role in pod.roles for pod in pods) for role in ROLES}

    async def start(self) -> None:
        """Listen for tokens, failures and phases of this gateway, and for pods that go."""
        subjects = self._bus.subjects
        self._subscriptions = [
            await self._bus.subscribe(subjects.tokens(self._gateway), TokenBatch, self._on_tokens),
            await self._bus.subscribe(subjects.failures(self._gateway), RequestFailed, self._on_failure),
            await self._bus.subscribe(subjects.phases(self._gateway), PhaseReport, self._on_phases),
            await self._bus.serve(subjects.sequences(self._gateway), SequenceReport, self._on_report),
        ]
        self._bus.on_reconnect(self._reconnected)
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
    ) -> ServedSequence:
        """Start a sequence. The caller must `release` it, whatever happens."""
        sequence = ServedSequence(spec, route, timeline, news)
        self._live[spec.request_id] = sequence
        sequence.task = asyncio.create_task(self._drive(sequence), name=f"drive {spec.request_id}")
        return sequence

    async def release(self, sequence: ServedSequence) -> None:
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

    async def _on_report(self, report: SequenceReport) -> SequenceReceipt:
        """What a pod holds for this gateway: note that it does, and reply what was received and what is not wanted."""
        return SequenceReceipt([self._receipt_of(held, report.pod) for held in report.sequences])

    def _receipt_of(self, held: HeldSequence, pod: str) -> int:
        sequence = self._live.get(held.request_id)
        if sequence is None or sequence.error is not None or not sequence.state.is_current(held.attempt):
            return -1
        if held.open:
            sequence.held_at = time.time()
            sequence.state.held_by(pod)
        return sequence.state.num_tokens

    async def _reconnected(self) -> None:
        self._connected_at = time.time()

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

    async def _drive(self, sequence: ServedSequence) -> None:
        try:
            async with asyncio.timeout(max(0.0, sequence.state.spec.deadline - time.time())):
                await self._until_finished(sequence)
        except TimeoutError:
            sequence.fail(_out_of_time(sequence))
        except MmdError as error:
            sequence.fail(error)
        except Exception as error:  # noqa: BLE001 - a bug must end the client's stream, not leave it waiting
            _log.exception("driving %s failed", sequence.state.spec.request_id)
            sequence.fail(MmdError(f"{type(error).__name__} in the gateway; check its log"))

    async def _until_finished(self, sequence: ServedSequence) -> None:
        failures = 0
        pauses = Backoff(*RETRY_SECONDS)
        avoid: frozenset[str] = frozenset()
        while True:
            await self._place(sequence, avoid)
            lost = await self._watch(sequence)
            if lost is None:
                return
            # Yielding to older requests is no failure: it ends when those do, at the request's deadline at the latest.
            failures += lost.reason != "preempted"
            self._metrics.retries.labels(lost.reason).inc()
            if sequence.state.num_tokens:
                self._metrics.migrations.labels(lost.reason).inc()
            sequence.attempt.lost = lost.message
            name = sequence.state.spec.request_id
            _log.warning("%s attempt %d lost: %s", name, sequence.state.attempt, lost.message)
            await self._cancel(sequence)
            sequence.state.unplace()
            if failures > self.max_retries:
                raise PeerLostError(
                    f"gave up after {failures} placements, the last with reason {lost.reason}; retry, or search for {name} in the "
                    "gateway's log"
                )
            if (
                lost.reason == "gave_up"
            ):  # a decode pod may have less in its prefix cache than the router knows
                sequence.route = replace(sequence.route, prefill_only=True)
            avoid = frozenset({lost.pod}) if lost.pod else frozenset()
            await asyncio.sleep(pauses.next())

    async def _place(self, sequence: ServedSequence, avoid: frozenset[str]) -> None:
        state = sequence.state
        refused: dict[str, Placed] = {}
        unreachable: set[str] = set()
        while True:
            self._pods_changed.clear()
            route = replace(sequence.route, avoid=avoid | refused.keys() | unreachable)
            outcome = self._router.route(route, self._directory.pods(state=None), time.monotonic())
            if isinstance(outcome, NothingRoutable):
                sequence.waits_for_role = outcome.missing_role
                await self._pods_or(TICK_SECONDS)
                continue
            sequence.waits_for_role = None
            if isinstance(outcome, NeverFits):
                raise CapacityError(outcome.message)
            if isinstance(outcome, Overloaded) or outcome.prefill_pod in refused:
                if isinstance(outcome, Placement):
                    self._router.take_back(outcome)
                # No token has been sent yet: fail now. Otherwise a client is in the middle of a stream: keep trying.
                if not state.num_tokens and avoid == frozenset():
                    why = "; ".join(
                        sorted({f"{placed.code} {placed.message}" for placed in refused.values()})
                    )
                    raise OverloadedError(
                        f"all prefill queues are full{f' ({why})' if why else ''}; retry later, or raise the pool's replica limits",
                        retry_after_seconds=outcome.retry_after_seconds,
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
                    self._bus.subjects.prefill(pod),
                    request,
                    Placed,
                    timeout=PLACE_TIMEOUT_SECONDS,
                    max_bytes=_largest_placement(request),
                )
            except TooLongError as error:
                self._router.take_back(outcome)
                state.unplace()
                raise CapacityError(
                    f"the prompt of {len(request.token_ids)} tokens exceeds the limit of a worker "
                    f"({MAX_REQUEST_BYTES >> 20} MiB, about {MAX_REQUEST_BYTES // BYTES_PER_TOKEN} tokens); shorten it"
                ) from error
            except (PeerLostError, DeadlineError) as error:
                # It may have taken the request nevertheless.
                await self._cancel(sequence)
                placed = Placed(state.spec.request_id, False, error.code, error.message)
                unreachable.add(pod)
            except OverloadedError as error:
                placed = Placed(state.spec.request_id, False, error.code, error.message)
            if placed.accepted:
                self._router.confirm(outcome, self._directory.pods(state=None))
                sequence.held_at = time.time()
                return
            self._router.take_back(outcome)
            sequence.attempt.lost = f"{pod} refused: {placed.code} {placed.message}"
            state.unplace()
            if placed.code == DrainingError.code:
                unreachable.add(pod)  # it is not full but leaving: another replaces it
            if pod in unreachable:
                continue
            refusal = error_of(placed.code, f"{placed.message} (refused by {pod})")
            if _is_final(refusal):
                raise refusal
            refused[pod] = placed

    async def _watch(self, sequence: ServedSequence) -> Lost | None:
        """Wait until the sequence has finished (None) or has to be placed again."""
        state = sequence.state
        while True:
            sequence.signal.clear()
            if state.finished:
                return None
            if (failed := state.failure) is not None:
                if not failed.retryable:
                    raise error_of(failed.code, f"{failed.message} (from {failed.pod})")
                if failed.code == PreemptedError.code:
                    return Lost(
                        "preempted", f"{failed.pod} had no KV block left: {failed.message}", failed.pod
                    )
                return Lost(
                    "gave_up", f"{failed.pod} abandoned it: {failed.code} {failed.message}", failed.pod
                )
            if (lost := self._stuck(sequence, time.time())) is not None:
                return lost
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await sequence.signal.wait()

    def _stuck(self, sequence: ServedSequence, now: float) -> Lost | None:
        """Why this attempt will produce nothing more; None if it may still be running."""
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
            return Lost("gap", f"token {state.num_tokens} did not arrive, but later tokens did", "")
        if state.started and now - moved > SILENCE_SECONDS:
            return Lost("silent", f"no token arrived for {SILENCE_SECONDS:.0f} s", certain)
        if now - sequence.looked_at > STALL_SECONDS or not self._bus.is_connected:
            sequence.held_at = now
        sequence.looked_at = now
        last_report = max(moved, sequence.held_at, self._connected_at)
        if now - last_report > (limit := self._directory.timeout_seconds + UNREPORTED_SECONDS):
            return Lost("forgotten", f"no pod has reported it for {limit:.1f} s", certain)
        return None

    async def _pods_or(self, seconds: float) -> None:
        """Wait until a pod appears, goes or changes state, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._pods_changed.wait()

    def _note_attempt(self, sequence: ServedSequence, request: GenerateRequest, pod: str) -> None:
        sequence.lost_pods.clear()
        sequence.gap_since = None
        sequence.held_at = sequence.looked_at = 0.0
        sequence.placed_at = time.time()
        _, number = split_sequence_id(request.request_id)
        sequence.attempt = Attempt(number, request.attempt, pod, request.decode_pods, sequence.placed_at)
        if len(sequence.timeline.attempts) < KEPT_ATTEMPTS:
            sequence.timeline.attempts.append(sequence.attempt)

    async def _cancel(self, sequence: ServedSequence) -> None:
        message = sequence.state.cancel()
        if message is None:
            return
        try:
            await self._bus.publish(self._bus.subjects.cancel, message)
        except MmdError as error:
            _log.warning(
                "failed to send the cancellation of %s; it is freed after its pod's next report: %s",
                message.request_id,
                error.message,
            )


def _is_final(refusal: MmdError) -> bool:
    """Whether no pod would take the request: the refusal is about the request, and not a defect or trouble of that pod alone."""
    about_request = type(refusal) is not MmdError and refusal.status is not None
    return about_request and not refusal.retryable


def _largest_placement(request: GenerateRequest) -> int:
    """Bytes of a placement whose handover, outputs included, still fits."""
    return MAX_REQUEST_BYTES - 2 * BYTES_PER_TOKEN * request.sampling.max_tokens - COMMIT_BYTES


def _out_of_time(sequence: ServedSequence) -> MmdError:
    if sequence.waits_for_role is not None:
        return OverloadedError(
            f"no Ready {sequence.waits_for_role} pod before the request deadline; check the pool's replicas and its pods' Events"
        )
    return DeadlineError(
        "request deadline exceeded; raise spec.gateway.requestTimeoutSeconds or request fewer tokens"
    )
