"""Claims jobs at their receivers, so that one encoder at a time runs a job and only real failures count as attempts. Independent of encoding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mmd_api.contract.errors import DeadlineError, MediaGoneError, MmdError, PeerLostError, ReceiverGoneError
from mmd_workers.basics.clock import SYSTEM_CLOCK, Clock
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.encoder import EncodeJob, EncodeTaken
from mmd_workers.wire.messages.prefill import EncodeCheck, EncodeRun, EncodeWanted

log = logging.getLogger(__name__)

REPLY_SECONDS = 1.0
END_REPORT_SECONDS = 5.0  # limit for reporting the end of a run
REPORT_PAUSE_SECONDS = 0.25
MAX_ENDED_RUNS = 4  # reported in one claim; more only if other encoders claim the job meanwhile
RECONNECT_SECONDS = 5.0  # for other pods to reconnect, too; until then, none counts as lost
# A lost receiver may be cut off from NATS. Its client notices that within 15 s, and has then to reconnect.
RECEIVER_PATIENCE_SECONDS = 20.0
SILENT_CHECK_SECONDS = 2.0  # interval between questions to a receiver without heartbeats: each may hold a slot until it times out


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that may run here. `attempt`: counted from 1. `is_recorded`: False if the receiver did not answer."""

    attempt: int
    is_recorded: bool = True


class RunsElsewhereError(Exception):
    """Another encoder runs the job or has its feature."""


class RunUnclearError(Exception):
    """Who runs the job, or whether anybody needs it, cannot be determined now."""


class JobClaims:
    """The jobs of one encoder, as their receivers know them. A run begins with a claim and ends with the feature, or with a report.

    `incarnation_of(pod)` returns the incarnation of a pod with recent heartbeats, or None. `silent_seconds(pod)` returns for how long a pod
    has been without them, not counting the time in which this process could not have heard it.
    """

    def __init__(
        self,
        bus: Bus,
        incarnation: str,
        incarnation_of: Callable[[str], str | None],
        silent_seconds: Callable[[str], float],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._bus = bus
        self._run = EncodeRun(bus.client_name, incarnation)
        self._incarnation_of = incarnation_of
        self._silent_seconds = silent_seconds
        self._clock = clock
        self._reconnected_at: float | None = None
        self._asked_at: dict[str, float] = {}  # by receiver without heartbeats that has not answered
        bus.on_reconnect(self._reconnected)

    async def claim(self, job: EncodeJob, is_first: bool) -> Claim:
        """Claim a job that was delivered here.

        The first delivery of a job is attempt 1 even if its receiver does not answer. Such a claim is to be confirmed at once. A server
        that restarted may count deliveries anew, so that the receiver has to answer soon after a reconnect.

        Raises:
            ReceiverGoneError: nothing waits for the feature any longer.
            RunsElsewhereError: another encoder runs the job or has its feature.
            RunUnclearError: whether one does, or whether the receiver is lost, cannot be determined now.
        """
        self._spare(job)
        ended, failed = None, False
        for _ in range(MAX_ENDED_RUNS):
            try:
                answer = await self._check(job, run=self._run, ended=ended, failed=failed)
            except MmdError as error:
                self.check_peers(job, error, needs_gateway=False)
                trusts_server = self._bus.is_connected and not self._has_just_reconnected()
                if is_first and ended is None and trusts_server:
                    return Claim(1, is_recorded=False)
                raise RunUnclearError from error
            self._asked_at.pop(job.receiver, None)
            _require_wanted(answer)
            if answer.other is None:
                return Claim(answer.attempt)
            ended, failed = answer.other, await self._has_died(answer.other, job)
        raise RunUnclearError

    async def confirm(self, job: EncodeJob, is_claimed: bool) -> None:
        """Check that the receiver still waits for the feature of a job, and repeat the claim. A receiver that does not answer still waits.

        Raises:
            ReceiverGoneError: nothing waits for the feature any longer.
            RunsElsewhereError: another encoder runs the job now. This one stood still for a while, or the other did and is back.
        """
        try:
            answer = await self._check(job, run=self._run if is_claimed else None, in_progress=is_claimed)
        except MmdError:
            return
        _require_wanted(answer)
        if is_claimed and answer.other is not None:
            raise RunsElsewhereError

    async def report_end(self, job: EncodeJob, failed: bool, seconds: float = END_REPORT_SECONDS) -> None:
        """Report within `seconds` that the run of a job ended here without the feature. `failed`: it counts as an attempt.

        A report that is not confirmed is only logged: the next encoder finds out that the job does not run here, and counts nothing.
        """
        reason = f"no reply within {seconds:g} s"
        with suppress(TimeoutError):
            async with self._clock.timeout(seconds):
                while True:
                    try:
                        await self._check(job, ended=self._run, failed=failed)
                        return
                    except MmdError as error:
                        reason = error.message
                        if isinstance(error, PeerLostError) and self._misses_receiver(job):
                            return  # it is lost, or the next encoder finds out
                    await self._clock.sleep(REPORT_PAUSE_SECONDS)
        log.warning(
            "%s did not confirm the end of a run of job %s, so it counts no attempt: %s",
            *(job.receiver, job.job_id, reason),
        )

    def check_peers(self, job: EncodeJob, error: MmdError, needs_gateway: bool) -> None:
        """Raise an error if `error` says that a peer did not reply, and one is lost; with recent heartbeats, it will recover.

        Raises:
            ReceiverGoneError: the pod that waits for the feature is lost.
            RunUnclearError: that pod has no recent heartbeats, and may be back within `RECEIVER_PATIENCE_SECONDS`.
            MediaGoneError: `needs_gateway`, and the gateway that held the medium is lost.
        """
        if not isinstance(error, PeerLostError | DeadlineError):
            return
        if self._misses_receiver(job):
            # The heartbeat of the newer process may not have come yet where this one was disconnected meanwhile.
            knows_another = self._incarnation_of(job.receiver) is not None
            has_restarted = knows_another and not self._has_just_reconnected()
            if has_restarted or self._silent_seconds(job.receiver) >= RECEIVER_PATIENCE_SECONDS:
                raise ReceiverGoneError(f"{job.receiver}, which requested the feature, is lost") from error
            raise RunUnclearError from error
        if needs_gateway and self._incarnation_of(job.gateway) is None and not self._has_just_reconnected():
            raise MediaGoneError(f"{job.gateway}, which held the medium, is lost") from error

    def _spare(self, job: EncodeJob) -> None:
        """Ask a receiver without heartbeats for one job at a time: it may never answer, and others need the slots.

        Raises:
            ReceiverGoneError, RunUnclearError: as in `check_peers`.
        """
        now = self._clock.now()
        self._asked_at = {pod: at for pod, at in self._asked_at.items() if now - at < SILENT_CHECK_SECONDS}
        if self._incarnation_of(job.receiver) is not None:
            return
        if job.receiver in self._asked_at:
            self.check_peers(job, DeadlineError(f"{job.receiver} has no heartbeats"), needs_gateway=False)
        self._asked_at[job.receiver] = now

    def _misses_receiver(self, job: EncodeJob) -> bool:
        return self._incarnation_of(job.receiver) != job.receiver_incarnation

    async def _check(self, job: EncodeJob, **report: Any) -> EncodeWanted:
        """Ask the receiver. `report`: fields of `EncodeCheck`."""
        check = EncodeCheck(job.feature.feature_id, job.job_id, **report)
        subject = self._bus.subjects.encode_wanted(job.receiver)
        return await self._bus.request(subject, check, EncodeWanted, timeout=REPLY_SECONDS)

    async def _has_died(self, run: EncodeRun, job: EncodeJob) -> bool:
        """Whether the encoder of a run whose end nobody reported has died; otherwise it lives and does not run the job.

        An encoder without heartbeats that does not answer counts as dead.

        Raises:
            RunsElsewhereError: it runs the job or has its feature.
            RunUnclearError: it does not answer, and may live.
        """
        if run.encoder == self._run.encoder:
            return True  # an earlier process of this pod; its name reaches this one
        has_answered = True
        try:
            subject = self._bus.subjects.encode_cached(run.encoder)
            if (await self._bus.request(subject, job, EncodeTaken, timeout=REPLY_SECONDS)).taken:
                raise RunsElsewhereError
        except MmdError:
            has_answered = False
        incarnation = self._incarnation_of(run.encoder)  # heartbeats may have come meanwhile
        if incarnation == run.incarnation:
            if not has_answered:
                raise RunUnclearError
            return False
        if incarnation is None and self._has_just_reconnected():
            raise RunUnclearError
        return True

    def _has_just_reconnected(self) -> bool:
        at = self._reconnected_at
        return at is not None and self._clock.now() - at < RECONNECT_SECONDS

    async def _reconnected(self) -> None:
        self._reconnected_at = self._clock.now()


def _require_wanted(answer: EncodeWanted) -> None:
    if not answer.wanted:
        raise ReceiverGoneError("the feature is no longer needed")
