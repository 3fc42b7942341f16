"""The sequences that a pod's engine runs: passes the results of steps on, and ends sequences for reasons from outside.

Results go to the role that brought the sequence, or to the book. Reasons from outside are a cancellation, the deadline, a lost gateway
and the end of this pod. Independent of roles: roles register as owners.
"""

from __future__ import annotations

import asyncio
import logging
import time

from mmd_api.contract.errors import DeadlineError, MmdError, PeerLostError
from mmd_workers.engine.interface import KvReady, SampledToken, StepOutput
from mmd_workers.process.pod import Part, Pod
from mmd_workers.sequences.engine import EngineHost
from mmd_workers.sequences.token_publisher import SequenceBook
from mmd_workers.wire.messages.every_pod import Heartbeat
from mmd_workers.wire.messages.prefill import Cancel
from mmd_workers.wire.peers import PeerEvent

log = logging.getLogger(__name__)

DEADLINE_CHECK_SECONDS = 0.5


class SequenceOwner:
    """A role that brings sequences into the engine. By default it ignores all events."""

    def on_admitted(self, sequence: str, cached_tokens: int) -> None:
        """The engine runs the prompt now, without the tokens found in its prefix cache."""

    def on_kv_ready(self, event: KvReady) -> None:
        """The engine has completed the KV of a range."""

    def on_token(self, token: SampledToken) -> None:
        """The engine has sampled a token, which is on its way to its gateway."""

    def on_failed(self, sequence: str, error: MmdError) -> None:
        """The engine gave the sequence up; the book reports it."""

    def hands_over(self, sequence: str) -> bool:
        """Whether the sequence goes on at another pod; its owner then closes it in the book."""
        return False

    def cancel(self, sequence: str) -> None:
        """Stop work on a sequence that is not in the engine yet."""

    async def cancel_request(self, request_id: str, attempt: int) -> None:
        """Free what the request's attempts up to this one hold, besides sequences in the book."""


class Sequences(Part):
    """Owns the book, and the task that takes the engine's outputs."""

    def __init__(self, pod: Pod, engine: EngineHost) -> None:
        self._pod = pod
        self._engine = engine
        self._owners: list[SequenceOwner] = []
        self.book = SequenceBook(pod.bus, pod.name, pod.metrics, pod.tracing)

    def add(self, owner: SequenceOwner) -> None:
        """Report to `owner` from now on."""
        self._owners.append(owner)

    async def start(self) -> None:
        """Take the engine's outputs, and watch for lost gateways."""
        self._pod.directory.on_event(self._peer_event)
        self._pod.tasks.spawn(self._take_outputs(), "outputs")

    async def accept(self) -> None:
        """Listen for cancellations, report to gateways, and watch deadlines."""
        pod = self._pod
        await pod.bus.subscribe(pod.bus.subjects.cancel, Cancel, self._cancelled)
        reports = self.book.report_forever(
            lambda gateway: pod.directory.get(gateway) is not None, self._abandon
        )
        pod.tasks.spawn(reports, "sequence-reports")
        pod.tasks.spawn(self.end_late(), "deadlines")

    async def sample(self) -> None:
        """Expose the tokens of the sequences by modality."""
        for modality, tokens in self.book.tokens().items():
            self._pod.metrics.sequence_tokens.labels(modality).set(tokens)

    # --- events ---------------------------------------------------------------------------------------------------

    async def _take_outputs(self) -> None:
        """Process the outputs of engine steps, in order.

        A token is on its way to its gateway before any role acts on it, so that the book never closes a sequence before its last token
        is sent.
        """
        while True:
            output = await self._engine.outputs.get()
            self._count(output)
            for owner in self._owners:
                for sequence, cached_tokens in output.admitted.items():
                    owner.on_admitted(sequence, cached_tokens)
                for ready in output.kv_ready:
                    owner.on_kv_ready(ready)
            await self.book.publish(output)
            for token in output.tokens:
                handed_over = any(owner.hands_over(token.sequence_id) for owner in self._owners)
                for owner in self._owners:
                    owner.on_token(token)
                if token.finish_reason is not None and not handed_over:
                    await self.book.finish(token.sequence_id)
            await self._report_failed(output)
            self._engine.taken()

    async def _report_failed(self, output: StepOutput) -> None:
        """Report failed sequences, all at once: if the engine has failed, this pod ends and gives back all that is still open."""
        failed = [
            (name, cause if isinstance(cause, MmdError) else MmdError(str(cause)))
            for name, cause in output.failed
        ]
        for sequence, error in failed:
            for owner in self._owners:
                owner.on_failed(sequence, error)
        await self.book.fail_each(failed)

    def _count(self, output: StepOutput) -> None:
        metrics = self._pod.metrics
        metrics.prefill_tokens.inc(output.prefill_tokens)
        if output.sequences:
            metrics.step.observe(output.duration_seconds)
            metrics.step_sequences.observe(output.sequences)

    async def _cancelled(self, cancel: Cancel) -> None:
        for sequence in self.book.cancel(cancel.request_id, cancel.attempt):
            await self._abandon(sequence)
        for owner in self._owners:
            await owner.cancel_request(cancel.request_id, cancel.attempt)

    async def end_late(self) -> None:
        """End sequences past their request's deadline, whatever else failed to end them."""
        while True:
            await asyncio.sleep(DEADLINE_CHECK_SECONDS)
            for sequence in self.book.late(time.time()):
                self._pod.metrics.freed_sequences.labels("deadline").inc()
                await self.book.fail(
                    sequence,
                    DeadlineError(
                        "request deadline exceeded while its tokens were being generated; request fewer tokens, or raise "
                        "spec.gateway.requestTimeoutSeconds"
                    ),
                )
                await self._abandon(sequence, keep_end=True)

    def _peer_event(self, event: PeerEvent) -> None:
        if event.kind in ("lost", "reborn") and (former := event.before) is not None:
            self._pod.tasks.in_background(self._gateway_lost(former), f"end-sequences-of-{former.pod}")

    async def _gateway_lost(self, gateway: Heartbeat) -> None:
        self.book.forget_ends(gateway.pod)
        for sequence in self.book.of_gateway(gateway.pod):
            # If the gateway is alive after all, this makes it place the request again.
            await self.book.fail(sequence, PeerLostError(f"{gateway.pod} sent no heartbeat for too long"))
            await self._abandon(sequence, keep_end=True)

    async def _abandon(self, sequence: str, *, keep_end: bool = False) -> None:
        """Stop work on a sequence and free it; `keep_end`: its gateway has yet to confirm the end."""
        for owner in self._owners:
            owner.cancel(sequence)
        self.book.forget(sequence, keep_end=keep_end)
        await self._engine.engine.abort(sequence)

    # --- end ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Log the sequences in flight; the roles refuse new work."""
        log.info("draining: %d sequences in flight", len(self.book))

    @property
    def drained(self) -> bool:
        """Whether every sequence has ended and its gateway knows."""
        return not (len(self.book) or self.book.unconfirmed)

    async def give_back(self, error: MmdError) -> None:
        """Report the remaining sequences to their gateways, which place them again.

        Sequences that the engine gave up last are reported as failed before.
        """
        while not self._engine.outputs.empty():
            await self._report_failed(self._engine.outputs.get_nowait())
        for sequence in self.book.all():
            await self.book.fail(sequence, error)
