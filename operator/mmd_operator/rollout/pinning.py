"""Pins the code and weights of pipeline revisions: read from the first Ready pod, kept in the status, passed to every later pod."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from mmd_api.contract import paths
from mmd_api.contract.pools import POOL_NAMES
from mmd_api.status import PinnedAdapter, PinnedRevision
from mmd_operator.autoscaling import MAX_REPORT_BYTES, ReportError, worker_report
from mmd_operator.kube.pod_client import NoAnswerError, ReportFetcher
from mmd_operator.observed.observed import Observed, PodView
from mmd_operator.observed.problems import Problem

logger = logging.getLogger(__name__)

MAX_PINNED = 8
_PINNED = (*POOL_NAMES, "gateway")


class Pins:
    """The pinned revisions of one deployment."""

    def __init__(self, report_fetcher: ReportFetcher) -> None:
        self._report_fetcher = report_fetcher
        self._pinned: dict[str, PinnedRevision] = {}

    def remember(self, status: Mapping[str, Any]) -> None:
        """Restore the pins from the status after a start."""
        for entry in status.get("pinned", ()):
            try:
                pinned = PinnedRevision.model_validate(entry)
            except ValidationError as error:
                logger.warning("status.pinned contains an invalid entry: %s", error)
                continue
            self._pinned[pinned.revision] = pinned

    def of(self, revision: str) -> PinnedRevision | None:
        """The pin of a revision, or None if it has none yet."""
        return self._pinned.get(revision)

    @property
    def status(self) -> list[PinnedRevision]:
        """All pins, as in the status."""
        return [self._pinned[revision] for revision in sorted(self._pinned)]

    async def look(self, observed: Observed, revision: str) -> PinnedRevision | None:
        """Read the pin of an unpinned revision from its oldest Ready pod; forget deleted revisions. Returns a new pin, or None."""
        present = {child.revision for child in observed.children.values()} | {revision}
        self._pinned = {r: pin for r, pin in self._pinned.items() if r in present}
        if revision in self._pinned or len(self._pinned) >= MAX_PINNED:
            return None
        ready = [p for p in _workers(observed, revision) if p.ready and not p.deleting and p.address]
        for pod in sorted(ready, key=lambda p: (p.created_at, p.name))[:1]:
            try:
                answer = await self._report_fetcher.get(
                    pod.address or "", pod.report_port, paths.WORKER_STATE, MAX_REPORT_BYTES
                )
                report = worker_report(answer, pod.name, revision)
                pin = PinnedRevision(
                    revision=revision,
                    identity=report.identity,
                    commit=report.commit or None,
                    adapters=[
                        PinnedAdapter(name=name, commit=commit)
                        for name, commit in sorted(report.adapter_commits.items())
                    ],
                    image=pod.image_id,
                )
            except (NoAnswerError, ReportError, ValidationError) as error:
                logger.info("pod %s did not report its code and weights: %s", pod.name, error)
                continue
            self._pinned[revision] = pin
            return pin
        return None

    def moved(self, observed: Observed) -> list[Problem]:
        """Report pods whose image differs from their revision's pin: the tag has moved."""
        problems = []
        for revision, pin in self._pinned.items():
            running = [p for p in observed.pods if p.revision == revision and p.component in _PINNED]
            for pod in running:
                if pin.image and pod.image_id and _differ(pin.image, pod.image_id):
                    message = f"pod {pod.name} runs image {pod.image_id}, but revision {revision} is pinned to {pin.image}"
                    remedy = f"the tag in spec.image.worker has moved; set it to a digest ({pin.image} keeps what is running)"
                    problems.append(Problem("ImageMoved", pod.component, message, remedy, revision=revision))
        return problems


def _differ(first: str, second: str) -> bool:
    """Whether two image ids name different images. An id from a registry and one of an image loaded by hand cannot be compared."""
    digests = [image.partition("@")[2] for image in (first, second)]
    if all(digests):
        return digests[0] != digests[1]
    return not any(digests) and first != second


def _workers(observed: Observed, revision: str) -> list[PodView]:
    return [pod for name in POOL_NAMES for pod in observed.pods_of(name) if pod.revision == revision]
