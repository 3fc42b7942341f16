"""Keeps every sequence moving: places it, listens for its tokens, places it again when a worker is lost, frees it at the end.

Independent of HTTP and text: it provides tokens in order, and a typed error if the rest will not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
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
    UnprocessableMediumError,
    error_of,
)
from mmd_api.contract.pools import ROLES, Role
from mmd_workers.basics.backoff import Backoff
from mmd_workers.basics.clock import SYSTEM_CLOCK, Clock
from mmd_workers.gateway.placement.admission import Admission
from mmd_workers.gateway.placement.router import (
    NeverFits,
    NothingRoutable,
    Overloaded,
    Placement,
    Router,
    RouteRequest,
)
from mmd_workers.gateway.placement.sequence_state import RequestState, SequenceSpec
from mmd_workers.gateway.placement.timeline import Attempt, Timeline, Timelines, split_sequence_id
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus, Subscription
from mmd_workers.wire.codec import MAX_REQUEST_BYTES
from mmd_workers.wire.messages.gateway import (
    HeldSequence,
    PhaseReport,
    RequestFailed,
    SequenceReceipt,
    SequenceReport,
    TokenBatch,
)
from mmd_workers.wire.messages.prefill import GenerateRequest, Placed
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
MOST_SUSPECTS = 1024
SUSPECT_SECONDS = 600.0
LEAST_TTFT_SECONDS = 0.001  # below which the error of an estimate is that of a millisecond
BYTES_PER_TOKEN = 5  # of an id on the wire, at most
COMMIT_BYTES = 4096  # of a handover's message, besides the placement and the outputs
SILENCE_SECONDS = 60.0  # between two tokens of a sequence that has begun

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lost:
    """Why an attempt is over, and the pod to avoid next ("" for none). `reason` is a metric's label. `wanted_room`: nothing failed, but there was
    no room for it: that ends when others do or a pod becomes Ready, at the request's deadline at the latest. `by_media`: a medium may have failed,
    or ended the pod. `unencodable`: the failure of a medium that cannot be encoded as it is laid out.
    """

    reason: Literal["pod_lost", "preempted", "gave_up", "gap", "silent", "forgotten", "unencodable"]
    message: str
    pod: str
    wanted_room: bool = False
    by_media: bool = False
    unencodable: RequestFailed | None = None


Alternative = Callable[[str], Awaitable["tuple[SequenceSpec, RouteRequest] | None"]]
"""What is placed instead of a sequence with a feature that cannot be encoded; None: nothing."""


class ServedSequence:
    """One sequence in the gateway's hands. `news` is set whenever there are tokens to take, or an end. `admission`: for which it waits first.
    `fall_back`: where a medium that cannot be encoded need not end it.
    """

    def __init__(
        self,
        spec: SequenceSpec,
        route: RouteRequest,
        timeline: Timeline,
        news: asyncio.Event,
        admission: Admission | None = None,
        fall_back: Alternative | None = None,
    ) -> None:
        self.state = RequestState(spec)
        self.admission = admission
        self.fall_back = fall_back
        self._needs_pods = True
        self.route = route
        self.timeline = timeline
        self.news = news
        self.error: MmdError | None = None
        self.signal = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.lost_pods: set[str] = set()
        self.waits_for_role: Role | None = None
        self.wants_room = False  # its last attempt found none
        self.placed_at = 0.0
        self.attempt = Attempt(0, -1, "", [], 0.0)
        self.placement: Placement | None = None  # of an attempt that has no token yet
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
        self.leave_pods()
        self.wake()

    def leave_pods(self) -> None:
        """It needs no pod any more: others may start. Safe to call twice."""
        if self._needs_pods and self.admission is not None:
            self.admission.sequence_ended(self.state.num_tokens)
        self._needs_pods = False


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
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._directory = directory
        self._router = router
        self._gateway = gateway
        self.max_retries = max_retries
        self._metrics = metrics
        self._live: dict[str, ServedSequence] = {}
        self._subscriptions: list[Subscription] = []
        self._pods_changed = asyncio.Event()
        self._connected_at = 0.0
        self._suspects: OrderedDict[str, float] = (
            OrderedDict()
        )  # media that a prefill pod may have failed on, and until when
        self.timelines = Timelines()
        self.on_first_token: Callable[[float], None] = lambda _seconds: None
        self._show_factors()

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
        self,
        spec: SequenceSpec,
        route: RouteRequest,
        timeline: Timeline,
        news: asyncio.Event,
        admission: Admission | None = None,
        fall_back: Alternative | None = None,
    ) -> ServedSequence:
        """Start a sequence, once it is admitted where there is an `admission`. The caller must `release` it, whatever happens. `fall_back`: see
        `ServedSequence`."""
        sequence = ServedSequence(spec, route, timeline, news, admission, fall_back)
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
        sequence.attempt.ended = sequence.attempt.ended or self._clock.unix()
        sequence.leave_pods()
        self._metrics.duplicates.inc(sequence.state.duplicates)
        if not sequence.state.finished:
            await self._cancel(sequence)

    # --- events ---------------------------------------------------------------------------------------------

    async def _on_tokens(self, batch: TokenBatch) -> None:
        now = self._clock.unix()
        for item in batch.items:
            sequence = self._live.get(item.request_id)
            if sequence is None or sequence.error is not None:
                continue
            before = sequence.state.last_token_at
            if taken := sequence.state.accept(item, batch.pod, now):
                if sequence.placement is not None:
                    self._note_outcome(sequence, sequence.placement, now)
                if before is not None:
                    self._metrics.itl.labels(sequence.timeline.modality()).observe(
                        (now - before) / len(taken)
                    )
                elif sequence.admission is not None:
                    sequence.admission.first_token()
                if not sequence.timeline.first_token:
                    sequence.timeline.first_token = now
                    self.on_first_token(now - sequence.timeline.arrived)
                sequence.timeline.last_token = now
                sequence.news.set()
            if sequence.state.finished:
                sequence.attempt.ended = sequence.attempt.ended or now
                sequence.leave_pods()
            if sequence.state.finished or sequence.state.failure is not None:
                sequence.signal.set()

    def _note_outcome(self, sequence: ServedSequence, placement: Placement, now: float) -> None:
        """The first token of an attempt: what its estimate was worth."""
        sequence.placement = None
        sequence.attempt.ttft_seconds = seconds = max(0.0, now - sequence.placed_at)
        error = abs(seconds - placement.estimated_ttft_seconds) / max(seconds, LEAST_TTFT_SECONDS)
        self._metrics.router_error.labels(sequence.timeline.modality()).observe(error)
        self._router.learn(placement, seconds)
        self._show_factors()

    def _show_factors(self) -> None:
        """The state of the router's estimate, as metrics."""
        fitted = asdict(self._router.model.factors)
        self._metrics.router_overhead.set(fitted.pop("overhead"))
        for term, factor in fitted.items():
            self._metrics.router_factor.labels(term).set(factor)

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
            sequence.held_at = self._clock.unix()
            sequence.state.held_by(pod)
        return sequence.state.num_tokens

    async def _reconnected(self) -> None:
        self._connected_at = self._clock.unix()

    async def _on_phases(self, report: PhaseReport) -> None:
        self.timelines.report(report)
        self._note_transfers(report)
        sequence = self._live.get(report.request_id)
        if sequence is not None:
            sequence.news.set()

    def _note_transfers(self, report: PhaseReport) -> None:
        """How fast bytes have travelled, for the router."""
        for phase in report.phases:
            tokens, num_bytes, seconds = (
                phase.detail.get(name) for name in ("tokens", "bytes", "wire_seconds")
            )
            if not (isinstance(tokens, int) and isinstance(num_bytes, int) and isinstance(seconds, float)):
                continue
            if phase.name == "embedding_transfer":
                self._router.embeddings_moved(report.pod, tokens, num_bytes, seconds, self._clock.now())
            elif phase.name == "kv_transfer" and (attempt := self.timelines.attempt_of(report)) is not None:
                self._router.kv_moved(
                    attempt.prefill_pod, report.pod, tokens, num_bytes, seconds, self._clock.now()
                )

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
            async with self._clock.timeout(max(0.0, sequence.state.spec.deadline - self._clock.unix())):
                if sequence.admission is not None:
                    await sequence.admission.wait()
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
            failures += not lost.wanted_room
            sequence.wants_room = lost.wanted_room
            self._metrics.retries.labels(lost.reason).inc()
            if sequence.state.num_tokens:
                self._metrics.migrations.labels(lost.reason).inc()
            sequence.attempt.lost = lost.message
            name = sequence.state.spec.request_id
            _log.warning("%s attempt %d lost: %s", name, sequence.state.attempt, lost.message)
            await self._cancel(sequence)
            if lost.by_media and sequence.placement is not None and sequence.placement.encode_here:
                self._suspect(sequence.route, lost)
            sequence.state.unplace()
            if lost.unencodable is not None:
                await self._fall_back(sequence, lost.unencodable)
                failures, avoid = 0, frozenset()
                continue
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
            await self._clock.sleep(pauses.next())

    async def _fall_back(self, sequence: ServedSequence, failed: RequestFailed) -> None:
        """Go on with another prompt, which has less of the medium that has failed.

        Raises:
            MmdError: there is none; the failure itself.
        """
        assert sequence.fall_back is not None
        other = await sequence.fall_back(failed.feature_id)
        if other is None:
            raise error_of(failed.code, f"{failed.message} (from {failed.pod})")
        spec, sequence.route = other
        sequence.state.respecify(spec)

    def _suspect(self, route: RouteRequest, lost: Lost) -> None:
        """For some minutes only encoder pods get these media: one that ends its process must not end another that holds prompts."""
        for need in route.features:
            self._suspects[need.feature_id] = self._clock.now() + SUSPECT_SECONDS
            self._suspects.move_to_end(need.feature_id)
        while len(self._suspects) > MOST_SUSPECTS:
            self._suspects.popitem(last=False)
        _log.warning(
            "%s: for %.0f s only encoder pods encode its %d media, because a prefill pod may have failed on them: %s",
            route.request_id,
            SUSPECT_SECONDS,
            len(route.features),
            lost.message,
        )

    def is_suspected(self, feature_id: str) -> bool:
        """Whether only encoder pods get this medium now."""
        return self._suspects.get(feature_id, 0.0) > self._clock.now()

    async def _place(self, sequence: ServedSequence, avoid: frozenset[str]) -> None:
        state = sequence.state
        refused: dict[str, Placed] = {}
        unreachable: set[str] = set()
        while True:
            self._pods_changed.clear()
            route = replace(sequence.route, avoid=avoid | refused.keys() | unreachable)
            if any(self.is_suspected(need.feature_id) for need in route.features):
                route = replace(route, encoders_only=True)
            outcome = self._router.route(route, self._directory.pods(state=None), self._clock.now())
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
            try:
                if pod in unreachable:
                    unreachable.clear()
                    await self._pods_or(TICK_SECONDS)
                placed = await self._sent_to_pod(sequence, outcome, unreachable)
            except BaseException:  # also where the client has gone: else it would count as waiting there
                self._router.take_back(outcome)
                raise
            if placed.accepted:
                self._router.confirm(outcome, self._directory.get)
                sequence.held_at = self._clock.unix()
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

    async def _sent_to_pod(
        self, sequence: ServedSequence, placement: Placement, unreachable: set[str]
    ) -> Placed:
        """Send a request to the pod where it is placed, and return its answer. A pod that does not answer is added to `unreachable`.

        Raises:
            CapacityError: the request is longer than a message may be.
        """
        state, pod = sequence.state, placement.prefill_pod
        request = state.place(
            self._gateway,
            pod,
            placement.decode_pods,
            placement.cached_tokens,
            encode_here=placement.encode_here,
        )
        self._note_attempt(sequence, request, placement)
        try:
            return await self._bus.request(
                self._bus.subjects.prefill(pod),
                request,
                Placed,
                timeout=PLACE_TIMEOUT_SECONDS,
                max_bytes=_largest_placement(request),
            )
        except TooLongError as error:
            state.unplace()
            raise CapacityError(
                f"the prompt of {len(request.token_ids)} tokens exceeds the limit of a worker "
                f"({MAX_REQUEST_BYTES >> 20} MiB, about {MAX_REQUEST_BYTES // BYTES_PER_TOKEN} tokens); shorten it"
            ) from error
        except (PeerLostError, DeadlineError) as error:
            # It may have taken the request nevertheless.
            await self._cancel(sequence)
            unreachable.add(pod)
            return Placed(state.spec.request_id, False, error.code, error.message)
        except OverloadedError as error:
            return Placed(state.spec.request_id, False, error.code, error.message)

    async def _watch(self, sequence: ServedSequence) -> Lost | None:
        """Wait until the sequence has finished (None) or has to be placed again."""
        state = sequence.state
        while True:
            sequence.signal.clear()
            if state.finished:
                return None
            if (failed := state.failure) is not None:
                if failed.feature_id and sequence.fall_back is not None and not state.num_tokens:
                    why = f"{failed.pod} got no feature of a medium: {failed.code} {failed.message}"
                    return Lost("unencodable", why, failed.pod, unencodable=failed)
                if not failed.retryable:
                    raise error_of(failed.code, f"{failed.message} (from {failed.pod})")
                if failed.code == PreemptedError.code:
                    why = f"{failed.pod} had no KV block left: {failed.message}"
                    return Lost("preempted", why, failed.pod, wanted_room=True)
                why = f"{failed.pod} abandoned it: {failed.code} {failed.message}"
                wanted_room = failed.code == OverloadedError.code
                by_media = failed.code == UnprocessableMediumError.code
                return Lost("gave_up", why, failed.pod, wanted_room, by_media)
            if (lost := self._stuck(sequence, self._clock.unix())) is not None:
                return lost
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(TICK_SECONDS):
                    await sequence.signal.wait()

    def _stuck(self, sequence: ServedSequence, now: float) -> Lost | None:
        """Why this attempt will produce nothing more; None if it may still be running."""
        state = sequence.state
        moved = max(sequence.placed_at, state.last_token_at or 0.0)
        certain = state.certain_holder() or ""
        if certain in sequence.lost_pods:
            return Lost("pod_lost", f"pod {certain} is gone", certain, by_media=True)
        suspects = sequence.lost_pods & state.possible_holders()
        if suspects and now - moved > HANDOVER_SECONDS:
            return Lost(
                "pod_lost", f"pod {min(suspects)} is gone and may have held it", min(suspects), by_media=True
            )
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
            return Lost("forgotten", f"no pod has reported it for {limit:.1f} s", certain, by_media=True)
        return None

    async def _pods_or(self, seconds: float) -> None:
        """Wait until a pod appears, goes or changes state, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(seconds):
                await self._pods_changed.wait()

    def _note_attempt(self, sequence: ServedSequence, request: GenerateRequest, placement: Placement) -> None:
        sequence.lost_pods.clear()
        sequence.gap_since = None
        sequence.held_at = sequence.looked_at = 0.0
        sequence.placed_at = self._clock.unix()
        _, number = split_sequence_id(request.request_id)
        sequence.placement = placement
        estimated = {"ttft": placement.estimated_ttft_seconds, **placement.terms.seconds}
        sequence.attempt = Attempt(
            number,
            request.attempt,
            placement.prefill_pod,
            request.decode_pods,
            sequence.placed_at,
            estimated={name: round(seconds, 6) for name, seconds in estimated.items()},
            cached_tokens=placement.cached_tokens,
        )
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
    if sequence.admission is not None and sequence.admission.is_waiting:
        return sequence.admission.out_of_time()
    if sequence.waits_for_role is not None:
        return OverloadedError(
            f"no Ready {sequence.waits_for_role} pod before the request deadline; check the pool's replicas and its pods' Events"
        )
    if sequence.wants_room and not sequence.state.num_tokens:
        return OverloadedError(
            "no pod had room for the request before its deadline; retry later, or raise the pools' replica limits"
        )
    return DeadlineError(
        "request deadline exceeded; request fewer tokens, or raise x-request-timeout or spec.gateway.requestTimeoutSeconds"
    )
