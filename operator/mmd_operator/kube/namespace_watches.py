"""Keeps a namespace that may not be read from ending the watches of all others.

kopf ends the whole operator when the API server refuses one of its watches, and calls no handler before every namespace has been listed
once. Here a refused watch begins again later, and counts as listed meanwhile; nobody acts on what is known of its namespace until it has been
listed. kopf has no setting for this: `infinite_watch` is replaced while the operator runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kopf._cogs.clients import errors, watching

from mmd_operator.kube.pauses import Pauses

logger = logging.getLogger(__name__)

_LISTED = watching.Bookmark.LISTED


class NamespaceWatches:
    """The watches of an operator that serves some namespaces. One that serves all of them has no namespace to set apart.

    `on_readable` is called when a refused namespace is watched again: objects may have been deleted meanwhile. `on_event` is called with
    each event of a watch as it arrives, long before its handler where many objects are listed.
    """

    def __init__(
        self,
        namespaces: tuple[str, ...],
        pauses: Pauses,
        on_readable: Callable[[], None],
        on_event: Callable[[Any, Mapping[str, Any]], None],
    ) -> None:
        self._namespaces, self._pauses = namespaces, pauses
        self._on_readable, self._on_event = on_readable, on_event
        self._refused: dict[
            str, dict[Any, float]
        ] = {}  # monotonic seconds of the first refusal, by namespace and kind
        self._readable_since: dict[str, float] = {}

    def may_read(self, namespace: str) -> bool:
        """Whether all kinds of a namespace are watched, and have been for long enough to be in the indexes."""
        if self._refused.get(namespace):
            return False
        since = self._readable_since.get(namespace)
        return since is None or time.monotonic() - since >= self._pauses.sweep_settle_seconds

    @property
    def unread_seconds(self) -> dict[str, float]:
        """Seconds for which each served namespace has been refused; 0 while it is watched."""
        now = time.monotonic()
        return {
            name: now - min(since.values()) if (since := self._refused.get(name)) else 0.0
            for name in self._namespaces
        }

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Replace kopf's watches."""
        original = watching.infinite_watch
        watching.infinite_watch = self._watch(original)
        try:
            yield
        finally:
            watching.infinite_watch = original

    def _watch(self, original: Any) -> Any:
        async def infinite_watch(
            *, resource: Any, namespace: str | None, **options: Any
        ) -> AsyncIterator[Any]:
            pause = self._pauses.first_refused_watch_seconds
            while True:
                began = time.monotonic()
                try:
                    async for event in original(resource=resource, namespace=namespace, **options):
                        if event is _LISTED and namespace is not None:
                            self._listed(namespace, resource)
                        if not isinstance(event, watching.Bookmark):
                            self._on_event(resource, event)
                        yield event
                    return
                except errors.APIForbiddenError as error:
                    if namespace is None:
                        raise
                    self._note_refusal(namespace, resource, error)
                    yield _LISTED
                except errors.APIServerError as error:
                    logger.warning("failed to watch %s: %s", resource, error)
                if time.monotonic() - began > self._pauses.last_refused_watch_seconds:
                    pause = self._pauses.first_refused_watch_seconds
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._pauses.last_refused_watch_seconds)

        return infinite_watch

    def _note_refusal(self, namespace: str, resource: Any, error: Exception) -> None:
        kinds = self._refused.setdefault(namespace, {})
        if not kinds:
            logger.warning(
                "namespace %s cannot be read, and its deployments are not served until it can: %s",
                namespace,
                error,
            )
        kinds.setdefault(resource, time.monotonic())

    def _listed(self, namespace: str, resource: Any) -> None:
        kinds = self._refused.get(namespace)
        if kinds and kinds.pop(resource, None) is not None and not kinds:
            self._readable_since[namespace] = time.monotonic()
            logger.info("namespace %s can be read again", namespace)
            self._on_readable()
