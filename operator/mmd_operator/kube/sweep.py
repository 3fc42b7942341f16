"""Finds objects that were deleted while a watch was interrupted.

kopf lists again after a watch's history is lost, but does not report what is missing from that list: its indexes keep such
objects for ever. Here each kind is listed periodically, metadata only and over all deployments at once, and an object that is
indexed but not listed is a ghost. Independent of what the objects mean.
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
"""UID and resource version of each object that an index holds."""


class Sweep:
    """UIDs that the indexes hold and the API server does not."""

    def __init__(
        self,
        cluster: Cluster,
        namespaces: tuple[str, ...],
        kinds: Mapping[Resource, tuple[str | None, Indexed]],
        found: Callable[[set[str]], None],
        pauses: Pauses,
    ) -> None:
        """`kinds`: of each, the label selector and what is indexed. `found` is called with new ghosts. `namespaces` empty: all."""
        self._cluster, self._namespaces, self._kinds, self._found = cluster, namespaces, kinds, found
        self._pauses = pauses
        self._ghosts: dict[Resource, set[str]] = {}
        self._versions: dict[tuple[Resource, str | None], str] = {}  # of the last list
        self._afresh: set[Resource] = set()  # whose last list failed
        self._soon = asyncio.Event()

    def __contains__(self, uid: str) -> bool:
        return any(uid in ghosts for ghosts in self._ghosts.values())

    def soon(self) -> None:
        """A watch has restarted: look now."""
        self._soon.set()

    async def run(self) -> None:
        """Run until cancelled. A failed list is retried at growing intervals."""
        between, retry = self._pauses.sweep_seconds, self._pauses.sweep_retry_seconds
        pause, next_of_all = between, time.monotonic() + between
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._soon.wait()
                next_of_all = 0.0
                await asyncio.sleep(self._pauses.sweep_settle_seconds)
            self._soon.clear()
            if time.monotonic() >= next_of_all:
                next_of_all = time.monotonic() + between
                await self.look(self._kinds.keys())
            else:
                await self.look(set(self._afresh))
            rest = max(0.0, next_of_all - time.monotonic())
            pause = min(retry, rest) if self._afresh else rest
            retry = min(2 * retry, between) if self._afresh else self._pauses.sweep_retry_seconds

    async def look(self, resources: Iterable[Resource]) -> None:
        """List these kinds once. A list that cannot be completed changes nothing and starts over next time."""
        for resource in resources:
            selector, indexed = self._kinds[resource]
            try:
                await self._sweep(resource, selector, indexed)
                self._afresh.discard(resource)
            except (BusyError, RefusedError) as error:
                self._afresh.add(resource)
                logger.warning(
                    "failed to list %s; deletions may go unnoticed until the next attempt: %s",
                    resource.plural,
                    error,
                )

    async def _sweep(self, resource: Resource, selector: str | None, indexed: Indexed) -> None:
        before = dict(indexed())
        if not before:
            self._ghosts.pop(resource, None)
            return
        listed: set[str] = set()
        for namespace in self._namespaces or (None,):
            at_least = None
            if resource not in self._afresh:
                known = self._versions.get((resource, namespace))
                at_least = newest([*before.values(), *([known] if known else [])])
            listing = await self._cluster.uids(resource, namespace, selector, at_least)
            self._versions[resource, namespace] = listing.version
            listed |= listing.uids
        ghosts = before.keys() - listed
        new = ghosts - self._ghosts.get(resource, set())
        self._ghosts[resource] = ghosts
        if new:
            logger.info("%d %s were deleted while the watch was interrupted", len(new), resource.plural)
            self._found(new)


def newest(versions: Iterable[str]) -> str | None:
    """The newest of several resource versions of one kind; None if one is not a number and so cannot be compared.

    A list that is older than an indexed object would make a ghost of it.
    """
    found = list(versions)
    return max(found, key=int) if all(version.isdecimal() for version in found) else None
