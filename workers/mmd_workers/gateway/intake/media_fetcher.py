"""Fetches, probes and holds the media of a request, and finds the frames that its choices select by content.

Only the sandbox opens media; here they are bytes. Independent of prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmd_api.contract.errors import InvalidValueError, MmdError, OverloadedError
from mmd_workers.gateway.basics.api_errors import refused
from mmd_workers.gateway.basics.media_hold import RequestReservation
from mmd_workers.gateway.content.parts import MediaSource
from mmd_workers.gateway.intake.checks import RequestChecks
from mmd_workers.gateway.intake.file_media import FileMedia, expanded
from mmd_workers.gateway.intake.frame_search import FrameSearch
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.observe.metrics import Metrics

CONCURRENT_FETCHES = 8  # per request
PROBE_WAIT_SECONDS = 60.0  # for a place in the sandbox, in addition to the probe's own deadline


class MediaFetcher:
    """Fetches media within the limits of `checks.policy`."""

    def __init__(self, sandbox: DecodePool, checks: RequestChecks, metrics: Metrics) -> None:
        self._sandbox = sandbox
        self._checks = checks
        self._metrics = metrics
        self._frame_search = FrameSearch(sandbox)

    async def fetch(
        self,
        messages: list[dict[str, Any]],
        sources: Sequence[MediaSource],
        files: FileMedia,
        reservation: RequestReservation,
    ) -> tuple[list[dict[str, Any]], list[MediaSource], list[MediumInfo]]:
        """Fetch, probe and hold the media, with one entry for each page of a document. Choices are resolved to frames."""
        if not sources:
            return messages, [], []
        fetched = await self._bring(sources, files, reservation)
        resolved = [
            replace(source, choice=choice) for source, (_, choice) in zip(sources, fetched, strict=True)
        ]
        messages, all_sources, infos = expanded(messages, resolved, [infos for infos, _ in fetched])
        self._checks.check_number(all_sources)
        return messages, all_sources, infos

    async def _bring(
        self, sources: Sequence[MediaSource], files: FileMedia, reservation: RequestReservation
    ) -> list[tuple[list[MediumInfo], SamplingChoice]]:
        """Fetch and probe each source, and return its facts with its choice, resolved to frames.

        A document has facts for each page, a video also for its sound, if it has any and the request asks for it.
        """
        body_characters = sum(len(source.url) for source in sources if source.url[:5].lower() == "data:")
        await reservation.resize(2 * body_characters)
        slots = asyncio.Semaphore(CONCURRENT_FETCHES)

        async def bring(source: MediaSource) -> tuple[bytes, list[MediumInfo], SamplingChoice]:
            async with slots:
                try:
                    data = await files.bytes_of(source, self._checks.policy, reservation.grow)
                    infos = await self._probe(data, source)
                    seconds = PROBE_WAIT_SECONDS + self._checks.policy.decode_timeout_seconds
                    search = self._frame_search.resolved(data, infos[0], source.choice, source, seconds)
                    return data, infos, await search
                except MmdError as error:
                    raise refused(error, source.param) from error

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(bring(source)) for source in sources]
        except ExceptionGroup as faults:
            raise _first(faults) from faults
        results: list[tuple[list[MediumInfo], SamplingChoice]] = []
        distinct_bytes = {id(data): len(data) for data, _, _ in (task.result() for task in tasks)}
        for data, infos, choice in (task.result() for task in tasks):
            reservation.put(infos[0].digest, data)
            self._metrics.fetch_bytes.labels(infos[0].modality).inc(infos[0].num_bytes)
            results.append((infos, choice))
        reservation.shrink(sum(distinct_bytes.values()))
        return results

    async def _probe(self, data: bytes, source: MediaSource) -> list[MediumInfo]:
        """The facts of a medium, of each page of a document, or of a video and its sound."""
        seconds = PROBE_WAIT_SECONDS + self._checks.policy.decode_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                if source.kind == "document":
                    return await self._sandbox.probe_pages(data, source.pages, self._checks.policy)
                if source.pages:
                    raise InvalidValueError(
                        f"the file is of kind {source.kind}, which has no pages; omit pages"
                    )
                info = await self._sandbox.probe(data, source.medium, self._checks.policy)
                if not (source.choice.with_sound and info.has_sound):
                    return [info]
                return [info, await self._sandbox.probe(data, "audio", self._checks.policy, of_video=True)]
        except TimeoutError as error:
            raise OverloadedError(
                f"no decode process became available for this {source.kind} within {seconds:.0f} s; retry later"
            ) from error


def _first(faults: BaseExceptionGroup[Any]) -> BaseException:
    first: BaseException = faults.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
