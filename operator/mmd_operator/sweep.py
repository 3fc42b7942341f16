"""Finds what a watch did not tell: objects that were deleted while it was away.

kopf lists anew after a watch's history is lost, and says nothing of what is missing from that list: its indexes keep such objects
for ever. Here each kind is listed once in a while, metadata only and over all deployments at once, and what is indexed and not
listed is a ghost. Knows nothing of what the objects mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from mmd_operator.cluster import BusyError, Cluster, RefusedError, Resource

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 60.0
SETTLE_SECONDS = 0.5
"""After a watch began anew: what it lists is let in first."""
Uids = Callable[[], Iterable[str]]


class Sweep:
    """UIDs that the indexes hold and the API server does not."""

    def __init__(
        self,
        cluster: Cluster,
        namespaces: tuple[str, ...],
        kinds: Mapping[Resource, tuple[str | None, Uids]],
        found: Callable[[set[str]], None],
    ) -> None:
        """`kinds`: of each, the label selector and what is indexed. `found` is told of new ghosts. `namespaces` empty: all."""
        self._cluster, self._namespaces, self._kinds, self._found = cluster, namespaces, kinds, found
        self._ghosts: dict[Resource, set[str]] = {}
        self._soon = asyncio.Event()

    def __contains__(self, uid: str) -> bool:
        return any(uid in ghosts for ghosts in self._ghosts.values())

    def soon(self) -> None:
        """A watch has begun anew: look now."""
        self._soon.set()

    async def run(self) -> None:
        """Until cancelled. An API server that does not answer is asked again next time."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_SECONDS):
                    await self._soon.wait()
                await asyncio.sleep(SETTLE_SECONDS)
            self._soon.clear()
            for resource, (selector, indexed) in self._kinds.items():
                try:
                    await self._sweep(resource, selector, indexed)
                except (BusyError, RefusedError) as error:
                    logger.warning(
                        "%s not listed, what was deleted meanwhile may be missed: %s", resource.plural, error
                    )
                    self._soon.set()
                    await asyncio.sleep(1.0)

    async def _sweep(self, resource: Resource, selector: str | None, indexed: Uids) -> None:
        before = set(indexed())
        if not before:
            self._ghosts.pop(resource, None)
            return
        listed: set[str] = set()
        for namespace in self._namespaces or (None,):
            listed |= await self._cluster.uids(resource, namespace, selector)
        ghosts = before - listed
        new = ghosts - self._ghosts.get(resource, set())
        self._ghosts[resource] = ghosts
        if new:
            logger.info("%d %s were deleted while their watch was away", len(new), resource.plural)
            self._found(new)
