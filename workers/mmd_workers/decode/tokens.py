"""Tokens on their way to gateways: one message per engine step and gateway, and the book of who asked for which sequence."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

from mmd_workers.engine.types import SampledToken, StepOutput
from mmd_workers.errors import DeadlineError, MmdError, OverloadedError, PeerLostError
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages import (
    GenerateRequest,
    Phase,
    PhaseReport,
    RequestFailed,
    TokenBatch,
    TokenItem,
    TokenLogprob,
)

log = logging.getLogger(__name__)

MAX_CANCELLED = 8192
RESEND_SECONDS = 0.1


def sequence_id(request_id: str, attempt: int) -> str:
    """The engine's name of one attempt of a request."""
    return f"{request_id}#{attempt}"


@dataclass(slots=True)
class Tracked:
    """A sequence on this pod: its request, and the phases that have ended."""

    request: GenerateRequest
    phases: list[Phase] = field(default_factory=list)


class SequenceBook:
    """Which sequences this pod works on, and for whom; the only writer of tokens, failures and phases to gateways."""

    def __init__(self, bus: Bus, pod: str, metrics: Metrics, tracing: Tracing) -> None:
        self._bus = bus
        self._pod = pod
        self._metrics = metrics
        self._tracing = tracing
        self._sequences: dict[str, Tracked] = {}
        self._cancelled: OrderedDict[str, int] = OrderedDict()
        self._steps = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def open(self, request: GenerateRequest) -> Tracked:
        """Start to answer for an attempt of a request."""
        tracked = Tracked(request)
        self._sequences[sequence_id(request.request_id, request.attempt)] = tracked
        return tracked

    def get(self, sequence: str) -> Tracked | None:
        """The sequence, unless it has ended."""
        return self._sequences.get(sequence)

    def cancel(self, request_id: str, up_to: int) -> list[str]:
        """Sequences of a request whose attempt is at most `up_to`. They are remembered for a while: a placement or an offer
        that a cancellation overtook finds out here.
        """
        self._cancelled[request_id] = max(up_to, self._cancelled.get(request_id, -1))
        self._cancelled.move_to_end(request_id)
        if len(self._cancelled) > MAX_CANCELLED:
            self._cancelled.popitem(last=False)
        return [
            name
            for name, tracked in self._sequences.items()
            if tracked.request.request_id == request_id and tracked.request.attempt <= up_to
        ]

    def was_cancelled(self, request_id: str, attempt: int) -> bool:
        """Whether nobody wants this attempt any more."""
        return attempt <= self._cancelled.get(request_id, -1)

    def of_gateway(self, gateway: str) -> list[str]:
        """Names of every open sequence of a gateway."""
        return [name for name, tracked in self._sequences.items() if tracked.request.gateway == gateway]

    def all(self) -> list[str]:
        """Names of every open sequence."""
        return list(self._sequences)

    async def publish(self, output: StepOutput) -> None:
        """Send what a step made, grouped by gateway."""
        self._steps += 1
        by_gateway: dict[str, list[TokenItem]] = defaultdict(list)
        for token in output.tokens:
            if (tracked := self._sequences.get(token.sequence_id)) is not None:
                by_gateway[tracked.request.gateway].append(_item(tracked.request, token))
        for gateway, items in by_gateway.items():
            await self._send(self._bus.subjects.tokens(gateway), TokenBatch(self._pod, self._steps, items))

    async def finish(self, sequence: str) -> None:
        """The sequence has had its last token here: it decoded since its last phase ended."""
        if (tracked := self._sequences.get(sequence)) is not None:
            now = time.time()
            start = max((phase.end for phase in tracked.phases), default=now)
            tracked.phases.append(Phase("decode", start, now))
        await self.close(sequence)

    async def close(self, sequence: str) -> None:
        """The sequence has left this pod in peace: report its phases and forget it."""
        if (tracked := self._sequences.pop(sequence, None)) is not None and tracked.phases:
            request = tracked.request
            self._tracing.record(request.trace, tracked.phases)
            heaviest = _heaviest(request)
            for phase in tracked.phases:
                modality = phase.detail.get("modality", heaviest)
                self._metrics.phase.labels(phase.name, modality).observe(max(0.0, phase.end - phase.start))
            await self._send(
                self._bus.subjects.phases(request.gateway),
                PhaseReport(request.request_id, request.attempt, self._pod, tracked.phases),
            )

    async def fail(self, sequence: str, error: MmdError) -> None:
        """Give the sequence up and say so to its gateway."""
        if (tracked := self._sequences.pop(sequence, None)) is None:
            return
        request = tracked.request
        log.warning("request %s attempt %d failed: %s", request.request_id, request.attempt, error.message)
        self._metrics.errors.labels(error.code).inc()
        self._tracing.record(request.trace, tracked.phases, error.code)
        # A deadline that is not the request's own (a transfer's, a reply's) says nothing against another attempt.
        internal = isinstance(error, DeadlineError) and time.time() < request.deadline
        await self._send(
            self._bus.subjects.failures(request.gateway),
            RequestFailed(
                request.request_id,
                request.attempt,
                self._pod,
                error.code,
                error.message,
                retryable=error.retryable or internal,
            ),
        )

    async def _send(self, subject: str, message: object) -> None:
        """Until it is sent: while the server is away and the send buffer is full, whoever makes tokens waits here."""
        while True:
            try:
                return await self._bus.publish(subject, message)
            except OverloadedError:
                await asyncio.sleep(RESEND_SECONDS)
            except PeerLostError as error:  # the bus is closed: this process is ending
                log.warning("not sent: %s", error.message)
                return None

    def forget(self, sequence: str) -> None:
        """The gateway no longer cares."""
        self._sequences.pop(sequence, None)


def _heaviest(request: GenerateRequest) -> str:
    """The modality that dominates a request's cost."""
    present = {ref.modality for ref in request.features}
    return next((modality for modality in ("video", "audio", "image") if modality in present), "text")


def _item(request: GenerateRequest, token: SampledToken) -> TokenItem:
    return TokenItem(
        request_id=request.request_id,
        attempt=request.attempt,
        index=token.index,
        token_id=token.token_id,
        finish_reason=token.finish_reason,
        logprob=token.logprob,
        top_logprobs=[TokenLogprob(token_id, value) for token_id, value in token.top_logprobs],
    )
