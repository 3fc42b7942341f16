"""Keeps every sequence moving: places it, receives its tokens, places it again if a worker is lost, and frees it at the end.

Independent of HTTP and text. It provides tokens in order, and a typed error if the rest will not come.
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
# Beyond the heartbeat timeout: an attempt without a report or token for this long is held by no pod.
UNREPORTED_SECONDS = 3.0
STALL_SECONDS = 2.0  # after a longer gap between checks this process was stalled, and silence proves nothing
KEPT_ATTEMPTS = 64
MOST_SUSPECTS = 1024
SUSPECT_SECONDS = 600.0
LEAST_TTFT_SECONDS = 0.001  # lower bound of the divisor in an estimate's relative error
BYTES_PER_TOKEN = 5  # maximum bytes of a token id in a message
COMMIT_BYTES = 4096  # bytes of a handover's message besides the placement and the outputs
CANCEL_SECONDS = 0.1  # until a cancellation that had no effect is repeated
SILENCE_SECONDS = 60.0  # tokens that a pod reports and that do not arrive for this long are lost

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lost:
    """The reason for the end of an attempt, and the pod to avoid next ("" for none).

    `reason`: the label of metrics. `wanted_room`: nothing failed, but the pod had no room. This ends when other requests end or a pod becomes
    Ready, at the latest at the request's deadline. `by_media`: a medium may have failed, or may have crashed the pod. `unencodable`: the failure
    of a medium that cannot be encoded in its present layout.
    """

    reason: Literal["pod_lost", "preempted", "gave_up", "gap", "silent", "forgotten", "unencodable"]
    message: str
    pod: str
    wanted_room: bool = False
    by_media: bool = False
    unencodable: RequestFailed | None = None


Alternative = Callable[[str], Awaitable["tuple[SequenceSpec, RouteRequest] | None"]]
"""Returns what to place instead of a sequence with a feature that cannot be encoded, or None if there is no alternative."""


class ServedSequence:
    """One sequence that the gateway serves.

    `news`: set whenever there are tokens to take, or the sequence ends. `admission`: if given, the sequence first waits for it.
    `fall_back`: if given, a medium that cannot be encoded need not end the sequence.
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
        self.wants_room = False  # the last attempt found no room
        self.placed_at = 0.0
        self.attempt = Attempt(0, -1, "", [], 0.0)
        self.placement: Placement | None = None  # set while the attempt has no token yet
        self.gap_since: float | None = None
        self.held_at = 0.0  # time of the last report by a pod that works on the attempt
        self.lacks_tokens_since: float | None = None  # its pod has reported more tokens than have arrived
        self.looked_at = 0.0

    @property
    def ended(self) -> bool:
        """True if all tokens have been taken and no more will come."""
        return not self.state.pending_tokens and (self.state.finished or self.error is not None)

    def wake(self) -> None:
        """Notify both sides that something changed."""
        self.signal.set()
        self.news.set()

    def fail(self, error: MmdError) -> None:
        """End the sequence with a typed error."""
        self.error = error
        self.leave_pods()
        self.wake()

    def leave_pods(self) -> None:
        """Note that the sequence needs no pod any more, so that others may start. Safe to call twice."""
        if self._needs_pods and self.admission is not None:
            self.admission.sequence_ended(self.state.num_tokens)
        self._needs_pods = False


class Dispatcher:
    """All sequences of this gateway, by request id. One task drives each sequence; events only change its state."""

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
        # Feature ids of media that a prefill pod may have failed on, with the time at which the suspicion ends.
        self._suspects: OrderedDict[str, float] = OrderedDict()
        self.timelines = Timelines()
        self.on_first_token: Callable[[float], None] = lambda _seconds: None
        self._show_factors()

    @property
    def live_sequences(self) -> int:
        """Sequences that have not been released."""
        return len(self._live)

    def held_by_role(self) -> dict[Role, int]:
        """Count the sequences that wait for a pod, by the missing role. Scale-from-zero reads this."""
        counts: dict[Role, int] = {}
        for sequence in self._live.values():
            if sequence.waits_for_role is not None:
                counts[sequence.waits_for_role] = counts.get(sequence.waits_for_role, 0) + 1
        return counts

    def ready_pods(self) -> dict[Role, int]:
        """Count the pods, by role, that requests are routed to now."""
        pods = self._router.routable(self._directory.pods())
        return {role: sum(role in pod.roles for pod in pods) for role in ROLES}

    async def start(self) -> None:
        """Subscribe to tokens, failures and phases for this gateway, and to changes of pods."""
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
        """Free all remaining sequences, at the workers too, and stop listening."""
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
        """Start a sequence, after its `admission` if there is one.

        The caller must `release` the sequence, whatever happens. `fall_back`: see `ServedSequence`.
        """
        sequence = ServedSequence(spec, route, timeline, news, admission, fall_back)
        self._live[spec.request_id] = sequence
        sequence.task = asyncio.create_task(self._drive(sequence), name=f"drive {spec.request_id}")
        return sequence

    async def release(self, sequence: ServedSequence) -> None:
        """Forget a sequence. If it has not finished, tell the workers to free it. Safe to call twice."""
        if self._live.pop(sequence.state.spec.request_id, None) is None:
            return
        while sequence.task is not None and not sequence.task.done():
            sequence.task.cancel()  # repeated, because the NATS client may swallow it while a reply arrives
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(CANCEL_SECONDS):
                    await asyncio.wait([sequence.task])
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
            last_token_at = sequence.state.last_token_at
            if accepted := sequence.state.accept(item, batch.pod, now):
                if sequence.placement is not None:
                    self._note_outcome(sequence, sequence.placement, now)
                if last_token_at is not None:
                    self._metrics.itl.labels(sequence.timeline.modality()).observe(
                        (now - last_token_at) / len(accepted)
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
        """Compare the estimate of an attempt with the time of its first token, and let the router learn from it."""
        sequence.placement = None
        sequence.attempt.ttft_seconds = seconds = max(0.0, now - sequence.placed_at)
        error = abs(seconds - placement.estimated_ttft_seconds) / max(seconds, LEAST_TTFT_SECONDS)
        self._metrics.router_error.labels(sequence.timeline.modality()).observe(error)
        self._router.learn(placement, seconds)
        self._show_factors()

    def _show_factors(self) -> None:
        """Publish the factors of the router's estimate as metrics."""
        factors = asdict(self._router.model.factors)
        self._metrics.router_overhead.set(factors.pop("overhead"))
        for term, factor in factors.items():
            self._metrics.router_factor.labels(term).set(factor)

    async def _on_failure(self, failed: RequestFailed) -> None:
        sequence = self._live.get(failed.request_id)
        if sequence is not None and sequence.state.fail(failed):
            sequence.signal.set()

    async def _on_report(self, report: SequenceReport) -> SequenceReceipt:
        """Note which sequences a pod holds for this gateway. The reply says what was received, and what is not wanted."""
        return SequenceReceipt([self._receipt_of(entry, report.pod) for entry in report.sequences])

    def _receipt_of(self, entry: HeldSequence, pod: str) -> int:
        sequence = self._live.get(entry.request_id)
        if sequence is None or sequence.error is not None or not sequence.state.is_current(entry.attempt):
            return -1
        if entry.open:
            sequence.held_at = now = self._clock.unix()
            sequence.state.held_by(pod)
            if entry.tokens > sequence.state.num_tokens:
                sequence.lacks_tokens_since = sequence.lacks_tokens_since or now
            elif pod == sequence.state.certain_holder():  # the pod that it comes from may report it longer
                sequence.lacks_tokens_since = None
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
        """Tell the router how fast bytes have travelled."""
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
        is_gone = event.kind in ("lost", "reborn") or event.heartbeat.state == "drained"
        if not is_gone:
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
        except Exception as error:  # noqa: BLE001 - a bug must end the client's stream, not block it
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
            # A decode pod may have less in its prefix cache than the router assumes.
            if lost.reason == "gave_up":
                sequence.route = replace(sequence.route, prefill_only=True)
            avoid = frozenset({lost.pod}) if lost.pod else frozenset()
            await self._clock.sleep(pauses.next())

    async def _fall_back(self, sequence: ServedSequence, failed: RequestFailed) -> None:
        """Continue with another prompt, which contains less of the failed medium.

        Raises:
            MmdError: no such prompt exists; this is the failure itself.
        """
        assert sequence.fall_back is not None
        alternative = await sequence.fall_back(failed.feature_id)
        if alternative is None:
            raise error_of(failed.code, f"{failed.message} (from {failed.pod})")
        spec, sequence.route = alternative
        sequence.state.respecify(spec)

    def _suspect(self, route: RouteRequest, lost: Lost) -> None:
        """Leave these media to encoder pods for some minutes: a medium that crashes a process must not crash one that holds prompts."""
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
        """True while only encoder pods may encode this medium."""
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
                # Fail now if no token has been sent yet. Otherwise the client is in the middle of a stream: keep trying.
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
            except BaseException:  # including cancellation: the placement would still count as waiting there
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
                unreachable.add(pod)  # the pod is draining, not full, and will be replaced
            if pod in unreachable:
                continue
            refusal = error_of(placed.code, f"{placed.message} (refused by {pod})")
            if _is_final(refusal):
                raise refusal
            refused[pod] = placed

    async def _sent_to_pod(
        self, sequence: ServedSequence, placement: Placement, unreachable: set[str]
    ) -> Placed:
        """Send a request to its prefill pod, and return the reply. A pod that does not reply is added to `unreachable`.

        Raises:
            CapacityError: the request exceeds the size of a message.
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
            # The pod may have taken the request nevertheless.
            await self._cancel(sequence)
            unreachable.add(pod)
            return Placed(state.spec.request_id, False, error.code, error.message)
        except OverloadedError as error:
            return Placed(state.spec.request_id, False, error.code, error.message)

    async def _watch(self, sequence: ServedSequence) -> Lost | None:
        """Wait until the sequence has finished (None) or must be placed again."""
        state = sequence.state
        while True:
            sequence.signal.clear()
            if state.finished:
                return None
            if (failed := state.failure) is not None:
                if failed.feature_id and sequence.fall_back is not None and not state.num_tokens:
                    message = f"{failed.pod} got no feature of a medium: {failed.code} {failed.message}"
                    return Lost("unencodable", message, failed.pod, unencodable=failed)
                if not failed.retryable:
                    raise error_of(failed.code, f"{failed.message} (from {failed.pod})")
                if failed.code == PreemptedError.code:
                    message = f"{failed.pod} had no KV block left: {failed.message}"
                    return Lost("preempted", message, failed.pod, wanted_room=True)
                message = f"{failed.pod} abandoned it: {failed.code} {failed.message}"
                wanted_room = failed.code == OverloadedError.code
                by_media = failed.code == UnprocessableMediumError.code
                return Lost("gave_up", message, failed.pod, wanted_room, by_media)
            if (lost := self._stuck(sequence, self._clock.unix())) is not None:
                return lost
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(TICK_SECONDS):
                    await sequence.signal.wait()

    def _stuck(self, sequence: ServedSequence, now: float) -> Lost | None:
        """Return why this attempt will produce nothing more, or None if it may still be running.

        A sequence that its pod reports may wait for any time, as for KV blocks after a preemption: only its deadline ends that.
        """
        state = sequence.state
        last_progress = max(sequence.placed_at, state.last_token_at or 0.0)
        certain = state.certain_holder() or ""
        if certain in sequence.lost_pods:
            return Lost("pod_lost", f"pod {certain} is gone", certain, by_media=True)
        suspects = sequence.lost_pods & state.possible_holders()
        if suspects and now - last_progress > HANDOVER_SECONDS:
            return Lost(
                "pod_lost", f"pod {min(suspects)} is gone and may have held it", min(suspects), by_media=True
            )
        sequence.gap_since = (sequence.gap_since or now) if state.has_gap else None
        if sequence.gap_since is not None and now - sequence.gap_since > GAP_SECONDS:
            return Lost("gap", f"token {state.num_tokens} did not arrive, but later tokens did", "")
        if now - sequence.looked_at > STALL_SECONDS or not self._bus.is_connected:
            sequence.held_at = now
            sequence.lacks_tokens_since = None
        sequence.looked_at = now
        lacks_since = sequence.lacks_tokens_since
        if lacks_since is not None and now - max(lacks_since, last_progress) > SILENCE_SECONDS:
            message = f"{certain} reports tokens that did not arrive for {SILENCE_SECONDS:.0f} s"
            return Lost("silent", message, certain)
        last_report = max(last_progress, sequence.held_at, self._connected_at)
        if now - last_report > (limit := self._directory.timeout_seconds + UNREPORTED_SECONDS):
            return Lost("forgotten", f"no pod has reported it for {limit:.1f} s", certain, by_media=True)
        return None

    async def _pods_or(self, seconds: float) -> None:
        """Wait until a pod appears, leaves or changes state, for at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(seconds):
                await self._pods_changed.wait()

    def _note_attempt(self, sequence: ServedSequence, request: GenerateRequest, placement: Placement) -> None:
        sequence.lost_pods.clear()
        sequence.gap_since = None
        sequence.lacks_tokens_since = None
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
    """True if no pod would take the request: the refusal is about the request, and not a fault of that pod alone."""
    about_request = type(refusal) is not MmdError and refusal.status is not None
    return about_request and not refusal.retryable


def _largest_placement(request: GenerateRequest) -> int:
    """Maximum bytes of a placement whose handover, outputs included, still fits into a message."""
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
