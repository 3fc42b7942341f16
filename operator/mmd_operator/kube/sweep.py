"""Detection of objects that were deleted while a watch was interrupted.

kopf lists again after a watch's history is lost, but does not report the objects missing from that list, so its indexes keep them
forever. Here each kind is listed periodically, metadata only and for all deployments at once. An object that is indexed but not listed
is a ghost. Independent of what the objects mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from mmd_operator.kube.cluster import BusyError, Cluster, RefusedError, Resource
from mmd_operator.kube.pauses import Pauses

logger = logging.getLogger(__name__)

Indexed = Callable[[], Iterable[tuple[str, str]]]
"""Returns the UID and resource version of each object in an index, but for those of namespaces that may not be read."""


class Sweep:
    """UIDs of ghosts: objects that the indexes hold and the API server does not."""

    def __init__(
        self,
        cluster: Cluster,
        namespaces: Callable[[], tuple[str, ...] | None],
        kinds: Mapping[Resource, tuple[str | None, Indexed]],
        found: Callable[[set[str]], None],
        pauses: Pauses,
    ) -> None:
        """`kinds`: label selector and index of each kind. `found`: called with the UIDs of new ghosts. `namespaces`: those that may be read now; None: all."""
        self._cluster, self._namespaces, self._kinds, self._report_ghosts = cluster, namespaces, kinds, found
        self._pauses = pauses
        self._ghosts: dict[Resource, set[str]] = {}
        self._versions: dict[tuple[Resource, str | None], str] = {}  # resource version of each last list
        self._failed: set[Resource] = set()  # kinds whose last list failed
        self._soon = asyncio.Event()

    def __contains__(self, uid: str) -> bool:
        return any(uid in ghosts for ghosts in self._ghosts.values())

    def soon(self) -> None:
        """Request a sweep, since a watch has restarted."""
        self._soon.set()

    async def run(self) -> None:
        """Run until cancelled. A failed list is retried at growing intervals."""
        interval, retry = self._pauses.sweep_seconds, self._pauses.sweep_retry_seconds
        pause, next_full_sweep = interval, time.monotonic() + interval
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._soon.wait()
                next_full_sweep = 0.0
                self._soon.clear()
                await asyncio.sleep(self._pauses.sweep_settle_seconds)
            if time.monotonic() >= next_full_sweep:
                next_full_sweep = time.monotonic() + interval
                await self.look(self._kinds.keys())
            else:
                await self.look(set(self._failed))
            remaining = max(0.0, next_full_sweep - time.monotonic())
            pause = min(retry, remaining) if self._failed else remaining
            retry = min(2 * retry, interval) if self._failed else self._pauses.sweep_retry_seconds

    async def look(self, resources: Iterable[Resource]) -> None:
        """List these kinds once. A list that cannot be completed changes nothing and starts over next time."""
        for resource in resources:
            selector, indexed = self._kinds[resource]
            try:
                await self._sweep(resource, selector, indexed)
                self._failed.discard(resource)
            except (BusyError, RefusedError) as error:
                self._failed.add(resource)
                logger.warning(
                    "failed to list %s; deletions may go unnoticed until the next attempt: %s",
                    resource.plural,
                    error,
                )

    async def _sweep(self, resource: Resource, selector: str | None, indexed: Indexed) -> None:
        versions = dict(indexed())
        if not versions:
            self._ghosts.pop(resource, None)
            return
        listed: set[str] = set()
        namespaces = self._namespaces()
        for namespace in (None,) if namespaces is None else namespaces:
            not_older_than = None
            if resource not in self._failed:
                listed_version = self._versions.get((resource, namespace))
                not_older_than = newest([*versions.values(), *([listed_version] if listed_version else [])])
            listing = await self._cluster.uids(resource, namespace, selector, not_older_than)
            self._versions[resource, namespace] = listing.version
            listed |= listing.uids
        ghosts = versions.keys() - listed
        new_ghosts = ghosts - self._ghosts.get(resource, set())
        self._ghosts[resource] = ghosts
        if new_ghosts:
            logger.info(
                "%d %s were deleted while the watch was interrupted", len(new_ghosts), resource.plural
            )
            self._report_ghosts(new_ghosts)


def newest(versions: Iterable[str]) -> str | None:
    """The newest of several resource versions of one kind; None if one is not a number and so cannot be compared.

    A list that is older than an indexed object would make that object a ghost.
    """
    candidates = list(versions)
    return max(candidates, key=int) if all(version.isdecimal() for version in candidates) else None
