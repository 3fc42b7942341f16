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

    def cancel_request(self, request_id: str, attempt: int) -> None:
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
        self._abandon(self.book.cancel(cancel.request_id, cancel.attempt))
        for owner in self._owners:
            owner.cancel_request(cancel.request_id, cancel.attempt)

    async def end_late(self) -> None:
        """End sequences past their request's deadline, whatever else failed to end them."""
        while True:
            await asyncio.sleep(DEADLINE_CHECK_SECONDS)
            late = self.book.late(time.time())
            self._pod.metrics.freed_sequences.labels("deadline").inc(len(late))
            await self._fail_each(
                late,
                DeadlineError(
                    "request deadline exceeded while its tokens were being generated; request fewer tokens, or raise "
                    "spec.gateway.requestTimeoutSeconds"
                ),
            )

    def _peer_event(self, event: PeerEvent) -> None:
        if event.kind in ("lost", "reborn") and (former := event.before) is not None:
            self._pod.tasks.in_background(self._gateway_lost(former), f"end-sequences-of-{former.pod}")

    async def _gateway_lost(self, gateway: Heartbeat) -> None:
        self.book.forget_ends(gateway.pod)
        # If the gateway is alive after all, this makes it place the requests again.
        error = PeerLostError(f"{gateway.pod} sent no heartbeat for too long")
        await self._fail_each(self.book.of_gateway(gateway.pod), error)

    async def _fail_each(self, sequences: list[str], error: MmdError) -> None:
        """Stop work on sequences and free them, then report the error to their gateways."""
        self._free(sequences)
        await self.book.fail_each([(sequence, error) for sequence in sequences])

    def _abandon(self, sequences: list[str]) -> None:
        """Stop work on sequences that their gateways do not need, and forget them."""
        self._free(sequences)
        for sequence in sequences:
            self.book.forget(sequence)

    def _free(self, sequences: list[str]) -> None:
        """Stop work on sequences. Nothing is awaited: all of them have left the engine before its next step."""
        for owner in self._owners:
            for sequence in sequences:
                owner.cancel(sequence)
        if sequences:
            self._engine.engine.abort(*sequences)

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
        await self.book.fail_each([(sequence, error) for sequence in self.book.all()])
