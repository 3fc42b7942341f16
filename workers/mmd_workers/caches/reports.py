"""A pod's reports of a cache to other pods: numbered changes, and the whole content again when somebody has missed some.

Reports are published and never repeated: followers find a gap by the numbers of reports, or by the number in heartbeats.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from mmd_api.contract.errors import MmdError
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.caches.kinds import FEATURES, CacheKind
from mmd_workers.engine.memory.cache_changes import CacheDelta
from mmd_workers.process.pod import Advertised, Part, Pod
from mmd_workers.wire.messages.every_pod import CacheReport, CacheWanted
from mmd_workers.wire.messages.message_parts import Acknowledged

MOST_NAMED = 4096  # limit of identities in a report, 18 bytes each
MOST_AT_ONCE = 4 * MOST_NAMED  # limit of identities reported between two samples

_log = logging.getLogger(__name__)


class CacheReports:
    """Numbers and publishes the changes of one cache of a pod."""

    def __init__(self, pod: Pod, kind: CacheKind, block_tokens: int = 1) -> None:
        """`block_tokens`: tokens per KV block of a prefix cache."""
        self._pod = pod
        self._kind = kind
        self._block_tokens = block_tokens
        self._wanted = False
        self._log = RateLimitedLog(_log)
        self.number = 0  # number of the newest report

    async def start(self) -> None:
        """Answer pods that ask for the whole content."""
        bus = self._pod.bus
        await bus.serve(self._kind.wanted(bus.subjects, self._pod.name), CacheWanted, self._asked)

    def take_wanted(self) -> bool:
        """Whether somebody has asked since the last call; one report of everything answers all requests."""
        requested, self._wanted = self._wanted, False
        return requested

    async def publish(self, delta: CacheDelta) -> None:
        """Send changes in as many reports as they need. If one cannot be sent, followers notice that it is missing, and ask."""
        if delta.empty:
            return
        pod, parts = self._pod, list(_parts(delta))
        for place, (added, evicted) in enumerate(parts, start=1):
            self.number += 1
            report = CacheReport(
                pod=pod.name,
                incarnation=pod.settings.incarnation,
                number=self.number,
                block_tokens=self._block_tokens,
                added=added,
                evicted=evicted,
                begins=delta.begins and place == 1,
                complete=delta.complete and place == len(parts),
            )
            try:
                await pod.bus.publish(self._kind.report(pod.bus.subjects, pod.name), report)
            except MmdError as error:
                self._log.warning(
                    "publish",
                    f"failed to report changes of the {self._kind.name}; others will ask for all: {error.message}",
                )

    async def _asked(self, wanted: CacheWanted) -> Acknowledged:
        if wanted.incarnation == self._pod.settings.incarnation:
            self._wanted = True
        return Acknowledged()


def _parts(delta: CacheDelta) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Additions and evictions for each report, evictions first; at least one pair."""
    evicted, added = list(_pieces(delta.evicted)), list(_pieces(delta.added))
    if not evicted and not added:
        yield [], []
    yield from (([], piece) for piece in evicted)
    yield from ((piece, []) for piece in added)


def _pieces(identities: Sequence[bytes]) -> Iterator[list[bytes]]:
    return (list(identities[at : at + MOST_NAMED]) for at in range(0, len(identities), MOST_NAMED))


class FeatureReports(Part):
    """Reports which features a pod holds, whichever role has them."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._reports = CacheReports(pod, FEATURES)

    async def accept(self) -> None:
        """Answer pods that ask for all features."""
        await self._reports.start()

    async def sample(self) -> None:
        """Report the features that have come and gone."""
        changes = self._pod.held.changes
        if self._reports.take_wanted():
            changes.restart()
        await self._reports.publish(changes.take(MOST_AT_ONCE))

    def advertised(self) -> Advertised:
        """The number of the newest report."""
        return Advertised(feature_number=self._reports.number)
