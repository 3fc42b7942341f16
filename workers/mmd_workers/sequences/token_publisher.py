"""Sends tokens to gateways, one message per engine step and gateway, and records which gateway needs which sequence.

Tokens, failures and cancellations are published once and may be lost. Every second the book compares its sequences with their gateways
(`SequenceReport`): tokens that a gateway has not received are sent again, sequences that it does not need are freed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import get_args

from mmd_api.contract.errors import (
    DeadlineError,
    GrammarFailedError,
    MmdError,
    OverloadedError,
    PeerLostError,
    TooLongError,
)
from mmd_api.contract.pools import Modality
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.engine.interface import SampledToken, StepOutput
from mmd_workers.features.source import EncodeError
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.gateway import (
    HeldSequence,
    PhaseReport,
    RequestFailed,
    SequenceReceipt,
    SequenceReport,
    TokenBatch,
    TokenItem,
)
from mmd_workers.wire.messages.message_parts import Phase, PromptLogprob, TokenLogprob
from mmd_workers.wire.messages.prefill import GenerateRequest

log = logging.getLogger(__name__)

MAX_CANCELLED = 8192
MAX_MESSAGE_CHARACTERS = 4096
MAX_PHASES = 1024  # limit per report
REPORT_SECONDS = 1.0  # interval between reports to a gateway
REPORT_TIMEOUT_SECONDS = 2.0
REPORT_LINES = 4096  # about 300 KB
EXPECTATION_SECONDS = 1.0  # how long a prefix that the router knew to be cached counts as no load
KEEP_ENDED_SECONDS = 60.0  # an end unconfirmed for this long is forgotten
MAX_ENDED = 8192  # limit of unconfirmed ends; beyond it the oldest are forgotten
GATEWAY_GONE_SECONDS = 10.0  # without heartbeat and replies for this long, its sequences are not needed


def sequence_id(request_id: str, attempt: int) -> str:
    """The engine's name for one attempt of a request."""
    return f"{request_id}#{attempt}"


@dataclass(slots=True)
class Tracked:
    """An attempt that this pod answers for: its request, its ended phases, and the tokens its gateway has not confirmed."""

    request: GenerateRequest
    phases: list[Phase] = field(default_factory=list)
    phases_sent: int = 0  # number of phases sent to the gateway
    # Media whose features the engine has not been given, or has dropped: it has KV of their tokens.
    absent: set[int] = field(default_factory=set)
    unconfirmed: deque[TokenItem] = field(default_factory=deque)
    made: int = 0  # index after the last token made here
    reported: int = 0  # `made` at the last report: the gateway has had time to receive those tokens
    failure: RequestFailed | None = None
    opened: float = field(default_factory=time.monotonic)
    ended: float = 0.0  # time.monotonic; 0 while it is open

    def tokens_to_compute(self, cached_tokens: int | None) -> int:
        """The tokens of the prompt that are still to be computed, with those of a companion.

        `cached_tokens`: tokens that the engine has found in its prefix cache; None: it has not looked. Then the tokens that the router knew
        to be there count for a moment only: nobody knows how long they stay, and a load that is too low would hide a backlog.
        """
        if cached_tokens is None:
            fresh = time.monotonic() - self.opened < EXPECTATION_SECONDS
            cached_tokens = max(0, self.request.cached_tokens) if fresh else 0
        return max(0, len(self.request.token_ids) - cached_tokens) + self.request.companion_tokens

    def __post_init__(self) -> None:
        self.made = self.reported = len(self.request.output_token_ids)

    def confirm(self, received: int) -> list[TokenItem]:
        """Forget received tokens; returns lost ones, which are older than the last report."""
        while self.unconfirmed and self.unconfirmed[0].index < received:
            self.unconfirmed.popleft()
        lost = bool(self.unconfirmed) and self.unconfirmed[0].index < self.reported
        return list(self.unconfirmed) if lost else []


class SequenceBook:
    """The record of this pod's sequences and their gateways; the only writer of tokens, failures and phases to gateways.

    A sequence is open while this pod works on it. Afterwards its end is kept until the gateway has confirmed it.
    """

    def __init__(self, bus: Bus, pod: str, metrics: Metrics, tracing: Tracing) -> None:
        self._bus = bus
        self._pod = pod
        self._metrics = metrics
        self._tracing = tracing
        self._sequences: dict[str, Tracked] = {}
        self._ended: dict[str, Tracked] = {}
        self._cancelled: OrderedDict[str, int] = OrderedDict()
        self._silent_since: dict[str, float] = {}  # by gateway: since when reports are unanswered
        self._log = RateLimitedLog(log)
        self._steps = 0

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def unconfirmed(self) -> int:
        """The number of sequences that have ended here without a confirmation of their gateway."""
        return len(self._ended)

    def open(self, request: GenerateRequest) -> Tracked:
        """Start to answer for an attempt of a request."""
        tracked = Tracked(request)
        self._sequences[sequence_id(request.request_id, request.attempt)] = tracked
        return tracked

    def get(self, sequence: str) -> Tracked | None:
        """The sequence, unless it has ended."""
        return self._sequences.get(sequence)

    def cancel(self, request_id: str, up_to: int) -> list[str]:
        """Cancel a request's attempts up to `up_to`; returns their sequences.

        Cancellations are remembered for a while, for placements and offers that they overtook.
        """
        self._cancelled[request_id] = max(up_to, self._cancelled.get(request_id, -1))
        self._cancelled.move_to_end(request_id)
        if len(self._cancelled) > MAX_CANCELLED:
            self._cancelled.popitem(last=False)
        return [
            name
            for name, tracked in (*self._sequences.items(), *self._ended.items())
            if tracked.request.request_id == request_id and tracked.request.attempt <= up_to
        ]

    def was_cancelled(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt is no longer needed."""
        return attempt <= self._cancelled.get(request_id, -1)

    def of_gateway(self, gateway: str) -> list[str]:
        """Names of every open sequence of a gateway."""
        return [name for name, tracked in self._sequences.items() if tracked.request.gateway == gateway]

    def all(self) -> list[str]:
        """Names of every open sequence."""
        return list(self._sequences)

    def tokens(self) -> dict[str, int]:
        """Known tokens of the open sequences, by modality or `text`."""
        counts = dict.fromkeys(("text", *get_args(Modality)), 0)
        for tracked in self._sequences.values():
            request = tracked.request
            counts["text"] += len(request.token_ids) + tracked.made
            if request.guidance is not None:
                counts["text"] += len(request.guidance.token_ids) + tracked.made
            for ref in request.features:
                counts[ref.modality] += ref.num_tokens
                counts["text"] -= ref.num_tokens
        return counts

    def late(self, now: float) -> list[str]:
        """Names of open sequences whose request's deadline (Unix seconds) has passed."""
        return [name for name, tracked in self._sequences.items() if now > tracked.request.deadline]

    async def publish(self, output: StepOutput) -> None:
        """Send the tokens of a step, grouped by gateway."""
        self._steps += 1
        by_gateway: dict[str, list[TokenItem]] = defaultdict(list)
        for token in output.tokens:
            if (tracked := self._sequences.get(token.sequence_id)) is not None:
                item = _item(tracked.request, token)
                tracked.unconfirmed.append(item)
                tracked.made = item.index + 1
                by_gateway[tracked.request.gateway].append(item)
        for gateway, items in by_gateway.items():
            await self._send_tokens(gateway, items)

    async def finish(self, sequence: str) -> None:
        """Close a sequence that had its last token here; it decoded since its last phase ended."""
        if (tracked := self._sequences.get(sequence)) is not None:
            now = time.time()
            start = max((phase.end for phase in tracked.phases), default=now)
            tracked.phases.append(Phase("decode", start, now))
        await self.close(sequence)

    async def close(self, sequence: str) -> None:
        """Close a finished or handed-over sequence: report its phases, and keep its tokens until confirmed."""
        if (tracked := self._end(sequence)) is not None and tracked.phases:
            request = tracked.request
            self._tracing.record(request.trace, tracked.phases)
            heaviest = _heaviest(request)
            for phase in tracked.phases:
                modality = phase.detail.get("modality", heaviest)
                self._metrics.phase.labels(phase.name, modality).observe(max(0.0, phase.end - phase.start))
            await self._send_phases(tracked)

    async def report_phases(self, sequence: str) -> None:
        """Report the phases that have ended to the gateway now.

        Later phases may never be reported, if the client goes or a stop string ends the sequence.
        """
        if (tracked := self._sequences.get(sequence)) is not None:
            await self._send_phases(tracked)

    async def fail(self, sequence: str, error: MmdError) -> None:
        """Give the sequence up and report it to its gateway, again and again until the gateway confirms it."""
        await self.fail_each([(sequence, error)])

    async def fail_each(self, failed: Sequence[tuple[str, MmdError]]) -> None:
        """Give up several sequences, as `fail` does. All have ended before this waits for anything."""
        for tracked in [ended for sequence, error in failed if (ended := self._fail(sequence, error))]:
            assert tracked.failure is not None
            await self._send(self._bus.subjects.failures(tracked.request.gateway), tracked.failure)

    def _fail(self, sequence: str, error: MmdError) -> Tracked | None:
        if (tracked := self._end(sequence)) is None:
            return None
        request = tracked.request
        # A message about a grammar may quote it, so it is for the client alone.
        what = error.code if isinstance(error, GrammarFailedError) else error.message
        log.warning("request %s attempt %d failed: %s", request.request_id, request.attempt, what)
        self._metrics.errors.labels(error.code).inc()
        self._tracing.record(request.trace, tracked.phases, error.code)
        # A deadline that is not the request's own (a transfer's, a reply's) does not rule out another attempt.
        internal = isinstance(error, DeadlineError) and time.time() < request.deadline
        tracked.failure = RequestFailed(
            request.request_id,
            request.attempt,
            self._pod,
            error.code,
            error.message[:MAX_MESSAGE_CHARACTERS],
            retryable=error.retryable or internal,
            feature_id=error.feature_id if isinstance(error, EncodeError) else "",
        )
        return tracked

    def forget(self, sequence: str, *, keep_end: bool = False) -> None:
        """Forget a sequence that its gateway no longer needs; `keep_end`: a reported end is still to be confirmed."""
        self._sequences.pop(sequence, None)
        if not keep_end:
            self._ended.pop(sequence, None)

    def forget_ends(self, gateway: str) -> None:
        """Forget the ends of a lost gateway, which will confirm nothing."""
        for name in [n for n, tracked in self._ended.items() if tracked.request.gateway == gateway]:
            del self._ended[name]

    async def report_forever(
        self, is_alive: Callable[[str], bool], on_unwanted: Callable[[list[str]], None]
    ) -> None:
        """Report every second, until cancelled.

        `is_alive(gateway)`: its heartbeats arrive. `on_unwanted(sequences)` frees open sequences that their gateways do not need, or
        whose gateways are lost.
        """
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._forget_old_ends()
            if self._bus.is_connected:
                unwanted = await self.report(is_alive)
                on_unwanted(unwanted)
                for name in unwanted:
                    log.warning("freed sequence %s: its gateway no longer needs it or is lost", name)
            else:
                self._silent_since.clear()

    async def report(self, is_alive: Callable[[str], bool]) -> list[str]:
        """Send one report to every gateway; returns the open sequences that are not needed."""
        gateways: dict[str, list[str]] = defaultdict(list)
        for name, tracked in (*self._sequences.items(), *self._ended.items()):
            gateways[tracked.request.gateway].append(name)
        for gateway in self._silent_since.keys() - gateways.keys():
            del self._silent_since[gateway]
        unwanted = await asyncio.gather(
            *(self._report_to(gateway, names, is_alive(gateway)) for gateway, names in gateways.items())
        )
        return [name for names in unwanted for name in names]

    def _forget_old_ends(self) -> None:
        now = time.monotonic()
        for name in [n for n, t in self._ended.items() if now - t.ended > KEEP_ENDED_SECONDS]:
            del self._ended[name]

    async def _report_to(self, gateway: str, names: list[str], alive: bool) -> list[str]:
        unwanted: list[str] = []
        for start in range(0, len(names), REPORT_LINES):
            batch = names[start : start + REPORT_LINES]
            try:
                unwanted += await self._report_some(gateway, batch)
            except MmdError as error:
                silent_since = self._silent_since.setdefault(gateway, time.monotonic())
                if not alive and time.monotonic() - silent_since > GATEWAY_GONE_SECONDS:
                    self.forget_ends(gateway)
                    open_names = [name for name in names if name in self._sequences]
                    self._metrics.freed_sequences.labels("gateway_gone").inc(len(open_names))
                    return open_names
                self._log.warning(gateway, f"report to {gateway} failed: {error.message}")
                return unwanted
        self._silent_since.pop(gateway, None)
        return unwanted

    async def _report_some(self, gateway: str, names: list[str]) -> list[str]:
        entries = [(name, t) for name in names if (t := self._sequences.get(name) or self._ended.get(name))]
        made_counts = [tracked.made for _, tracked in entries]
        report = SequenceReport(
            self._pod,
            [HeldSequence(t.request.request_id, t.request.attempt, t.made, not t.ended) for _, t in entries],
        )
        receipt = await self._bus.request(
            self._bus.subjects.sequences(gateway), report, SequenceReceipt, timeout=REPORT_TIMEOUT_SECONDS
        )
        unwanted: list[str] = []
        lost: list[TokenItem] = []
        for (name, tracked), now_reported, received in zip(
            entries, made_counts, receipt.received, strict=False
        ):
            if received < 0:
                self._ended.pop(name, None)
                if name in self._sequences:
                    unwanted.append(name)
                continue
            lost += tracked.confirm(received)
            tracked.reported = now_reported
            if tracked.failure is not None and name in self._ended:
                await self._send(self._bus.subjects.failures(gateway), tracked.failure)
            elif not tracked.unconfirmed:
                self._ended.pop(name, None)
        self._metrics.freed_sequences.labels("unwanted").inc(len(unwanted))
        self._metrics.resent_tokens.inc(len(lost))
        if lost:
            log.warning("%d tokens did not reach %s; resending", len(lost), gateway)
            await self._send_tokens(gateway, lost)
        return unwanted

    def _end(self, sequence: str) -> Tracked | None:
        tracked = self._sequences.pop(sequence, None)
        if tracked is not None:
            tracked.ended = time.monotonic()
            self._ended.pop(sequence, None)  # keeps the sequences in the order of their ends
            self._ended[sequence] = tracked
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
        return tracked

    async def _send_phases(self, tracked: Tracked) -> None:
        request, phases = tracked.request, tracked.phases[tracked.phases_sent :][:MAX_PHASES]
        tracked.phases_sent = len(tracked.phases)
        await self._send(
            self._bus.subjects.phases(request.gateway),
            PhaseReport(request.request_id, request.attempt, self._pod, phases),
        )

    async def _send_tokens(self, gateway: str, items: Sequence[TokenItem]) -> None:
        """Send tokens in as few messages as hold them."""
        try:
            await self._send(
                self._bus.subjects.tokens(gateway), TokenBatch(self._pod, self._steps, list(items))
            )
        except TooLongError:
            if len(items) == 1:
                raise
            middle = len(items) // 2
            await self._send_tokens(gateway, items[:middle])
            await self._send_tokens(gateway, items[middle:])

    async def _send(self, subject: str, message: object) -> None:
        """Send a message once; the next report finds lost tokens and failures.

        Raises:
            TooLongError: the message must be split.
        """
        try:
            await self._bus.publish(subject, message)
        except (OverloadedError, PeerLostError) as error:
            self._log.warning(
                "send",
                f"failed to send a message on {subject}; it is resent after the next report: {error.message}",
            )


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
        top_logprobs=_likeliest(token.top_logprobs),
        prompt_logprobs=[PromptLogprob(value, _likeliest(top)) for value, top in token.prompt_logprobs],
    )


def _likeliest(top_logprobs: Sequence[tuple[int, float]]) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, value) for token_id, value in top_logprobs]
