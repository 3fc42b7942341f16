"""Encodes uploaded files ahead of time, so that the first question about a file finds its features in the encoders' cache.

It never delays a request or an upload. It encodes one file at a time, only while no encode job waits, and only with memory nobody else
needs. A file without a turn in time is left to its first question. The gateway acts as the pod that wants a feature, and declines the
offer as if it had it already; the encoder keeps the feature. Independent of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable

from mmd_api.contract.errors import DeadlineError, MmdError, error_of
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.media_hold import MediaHold
from mmd_workers.gateway.intake.intake import Intake
from mmd_workers.wire.bus import Bus, Subscription
from mmd_workers.wire.job_runs import JobRuns, unwanted
from mmd_workers.wire.jobs import EncodeQueue
from mmd_workers.wire.messages.encoder import EncodeJob
from mmd_workers.wire.messages.message_parts import Acknowledged, FeatureRef
from mmd_workers.wire.messages.prefill import (
    EmbeddingGrant,
    EmbeddingOffer,
    EncodeCheck,
    EncodeFailed,
    EncodeWanted,
)
from mmd_workers.wire.stored_files import StoredFile

MAX_WAITING = 256  # files; the oldest beyond that are left to their first question
TURN_SECONDS = 120.0  # from the upload of a file to the latest start of its encoding
FILE_SECONDS = 120.0  # for all pages of a document
JOB_SECONDS = 60.0
LOOK_SECONDS = 0.5  # between readings of the queue's depth

_log = logging.getLogger(__name__)


class EncodeOnUpload:
    """Encodes files with the sampling of a question that chooses none. `is_busy()`: True while requests wait for encoders."""

    def __init__(
        self,
        bus: Bus,
        pod: str,
        incarnation: str,
        intake: Intake,
        hold: MediaHold,
        is_busy: Callable[[], bool],
    ) -> None:
        self._bus, self._pod, self._incarnation = bus, pod, incarnation
        self._intake, self._hold, self._is_busy = intake, hold, is_busy
        self._queue = EncodeQueue(bus)
        self._waiting: deque[tuple[StoredFile, float]] = deque(maxlen=MAX_WAITING)
        self._arrived = asyncio.Event()
        self._jobs: dict[str, tuple[str, asyncio.Future[None], JobRuns]] = {}  # by feature id
        self._subscriptions: list[Subscription] = []
        self._log = RateLimitedLog(_log)

    def add(self, stored: StoredFile) -> None:
        """Queue a file for encoding."""
        self._waiting.append((stored, time.monotonic()))
        self._arrived.set()

    async def run(self) -> None:
        """Encode queued files until cancelled."""
        subjects, serve = self._bus.subjects, self._bus.serve
        self._subscriptions = [
            await serve(subjects.embedding(self._pod), EmbeddingOffer, self._offered),
            await serve(subjects.encode_wanted(self._pod), EncodeCheck, self._checked),
            await serve(subjects.encode_failed(self._pod), EncodeFailed, self._failed),
        ]
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            stored, since = self._waiting.popleft()
            remaining_seconds = since + TURN_SECONDS - time.monotonic()
            try:
                async with asyncio.timeout(remaining_seconds):
                    await self._until_idle()
                async with asyncio.timeout(FILE_SECONDS):
                    await self._encode(stored)
            except TimeoutError:
                self._log.warning("encode", f"{stored.file_id} was not encoded on upload: encoders are busy")
            except (MmdError, ApiError) as error:
                self._log.warning("encode", f"{stored.file_id} was not encoded on upload: {error.message}")
            except Exception as error:  # noqa: BLE001 - the file's first question reports the fault
                self._log.warning("encode", f"{stored.file_id} was not encoded on upload: {error}", error)

    async def _until_idle(self) -> None:
        while self._is_busy():
            await asyncio.sleep(LOOK_SECONDS)

    async def _encode(self, stored: StoredFile) -> None:
        """Encode a file. Its bytes are held until encoders have read them, and released while requests keep encoders busy."""
        num_encoded = 0
        while True:
            await self._until_idle()
            reservation = self._hold.reservation(waits=False)
            try:
                features = await self._intake.features_of(stored, reservation)
                while num_encoded < len(features) and not self._is_busy():
                    await self._one(features[num_encoded], stored.file_id)
                    num_encoded += 1
            finally:
                reservation.release()
            if num_encoded == len(features):
                return

    async def _one(self, feature: FeatureRef, file_id: str) -> None:
        now = time.time()
        job = EncodeJob(
            job_id=uuid.uuid4().hex,
            feature=feature,
            gateway=self._pod,
            receiver=self._pod,
            receiver_incarnation=self._incarnation,
            deadline=now + JOB_SECONDS,
            published=now,
            request_id=file_id,
        )
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs[feature.feature_id] = job.job_id, done, JobRuns()
        try:
            async with asyncio.timeout(JOB_SECONDS):
                await self._queue.publish(job)
                await done
        except TimeoutError as error:
            raise DeadlineError(f"no encoder was done within {JOB_SECONDS:.0f} s") from error
        finally:
            self._jobs.pop(feature.feature_id, None)

    async def _offered(self, offer: EmbeddingOffer) -> EmbeddingGrant:
        """Decline an offer: the encoder now has the feature in its cache."""
        job = self._jobs.get(offer.feature_id)
        if job is not None and not job[1].done():
            job[1].set_result(None)
        return EmbeddingGrant(offer.transfer_id, "have")

    async def _checked(self, check: EncodeCheck) -> EncodeWanted:
        job = self._jobs.get(check.feature_id)
        return unwanted(check) if job is None or job[0] != check.job_id else job[2].answer(check)

    async def _failed(self, failure: EncodeFailed) -> Acknowledged:
        job = self._jobs.get(failure.feature_id)
        if job is not None and not job[1].done():
            job[1].set_exception(error_of(failure.code, failure.message))
        return Acknowledged()
