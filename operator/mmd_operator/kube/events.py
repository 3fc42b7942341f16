"""Kubernetes Events about deployments: best effort, correlated and bounded like those of client-go's recorder.

`report` never waits and never fails: one writer sends Events in the background. A repeated Event raises `count` and `lastTimestamp` of
the existing object; many similar Events share one object. An Event that cannot be written is dropped, logged and counted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import uuid4

from mmd_api.resource import API_VERSION, KIND
from mmd_operator.kube.cluster import BusyError, Cluster, RefusedError
from mmd_operator.kube.leadership import NotLeaderError
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pauses import Pauses
from mmd_operator.observed.observed import FIELD_MANAGER

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
"""Distinct Events kept to recognise repetitions; the least recently reported is dropped first."""
MAX_PENDING = 1000
SIMILAR_EVENTS = 10
SIMILAR_SECONDS = 600.0
"""This many different messages with one reason within this time are distinct Events; further messages share one object."""
OBJECT_BURST = 50.0
OBJECT_REFILL_SECONDS = 10.0
"""Rate limit for the Events of one deployment: after a burst, one per this many seconds."""
ATTEMPTS = 5
FLUSH_SECONDS = 5.0
MAX_MESSAGE_CHARACTERS = 1000
COMBINED = "(combined from similar events): "
Events = list[tuple[str, str]]
"""Reason and message of each Event."""
_Key = TypeVar("_Key")
_Group = tuple[str, str, str, str]
"""A deployment's namespace/name and UID, and the type and reason of an Event."""


@dataclass(slots=True)
class _Event:
    """One Event object: its desired content, and whether it was created."""

    about: Mapping[str, str]
    type: str
    reason: str
    message: str
    first: datetime
    last: datetime
    count: int = 0
    name: str = field(default_factory=lambda: uuid4().hex[:16])
    created: bool = False

    def manifest(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{self.about['name']}.{self.name}",
                "namespace": self.about["namespace"],
            },
            "involvedObject": {"apiVersion": API_VERSION, "kind": KIND, **self.about},
            "type": self.type,
            "reason": self.reason,
            "source": {"component": FIELD_MANAGER},
            "firstTimestamp": _text(self.first),
            **self.progress(),
        }

    def progress(self) -> dict[str, Any]:
        """Fields that a repetition changes."""
        return {"count": self.count, "lastTimestamp": _text(self.last), "message": self.message}


@dataclass(slots=True)
class _Similar:
    """Messages with one reason about one deployment."""

    since: float
    messages: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Bucket:
    """Token bucket with the number of Events that a deployment may still report."""

    tokens: float
    at: float


class EventRecorder:
    """Recorder of Events about all deployments. One task (`run`) writes them."""

    def __init__(self, cluster: Cluster, metrics: OperatorMetrics, pauses: Pauses) -> None:
        self._cluster, self._metrics, self._pauses = cluster, metrics, pauses
        self._events: OrderedDict[tuple[_Group, str], _Event] = OrderedDict()
        self._similar: OrderedDict[_Group, _Similar] = OrderedDict()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._pending: OrderedDict[tuple[_Group, str], _Event] = OrderedDict()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def report(self, about: Mapping[str, Any], reason: str, message: str, *, warning: bool = False) -> None:
        """Record an Event about a deployment. Returns at once, and drops the Event if too many were reported."""
        metadata, now = about["metadata"], time.monotonic()
        message = message[:MAX_MESSAGE_CHARACTERS]
        uid, kind = metadata["uid"], "Warning" if warning else "Normal"
        group = (f"{metadata['namespace']}/{metadata['name']}", uid, kind, reason)
        text = self._aggregated(group, message, now)
        key = (group, COMBINED if text != message else message)
        if (key not in self._pending and len(self._pending) >= MAX_PENDING) or not self._allowed(uid, now):
            self._dropped(group, "too many Events")
            return
        event = self._events.get(key)
        at = datetime.now(UTC)
        if event is None:
            reference = {name: metadata[name] for name in ("name", "namespace", "uid")}
            event = self._events[key] = _Event(reference, kind, reason, text, first=at, last=at)
        event.count, event.last, event.message = event.count + 1, at, text[:MAX_MESSAGE_CHARACTERS]
        _touch(self._events, key, MAX_REMEMBERED)
        self._pending[key] = event
        self._idle.clear()
        self._work.set()

    async def run(self) -> None:
        """Write reported Events until cancelled."""
        while True:
            await self._work.wait()
            while self._pending:
                (group, _), event = self._pending.popitem(last=False)
                try:
                    await self._write(event)
                    self._metrics.events.labels("written").inc()
                except (BusyError, RefusedError) as error:
                    self._dropped(group, str(error))
                except NotLeaderError:
                    return  # the process ends
                except Exception:  # a bug met by one Event must not stop the others
                    logger.exception("%s: failed to write Event %s", group[0], group[3])
            self._work.clear()
            self._idle.set()

    async def flush(self) -> None:
        """Wait until everything reported so far is written or dropped, for `FLUSH_SECONDS` at most."""
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._idle.wait()
        except TimeoutError:
            logger.info("failed to write %d Events in time", len(self._pending))

    async def _write(self, event: _Event) -> None:
        low, high = self._pauses.first_event_retry_seconds, self._pauses.last_event_retry_seconds
        for attempt in range(1, ATTEMPTS + 1):
            try:
                namespace = event.about["namespace"]
                name = f"{event.about['name']}.{event.name}"
                if event.created and await self._cluster.patch_event(namespace, name, event.progress()):
                    return
                event.name, event.created = (
                    uuid4().hex[:16],
                    False,
                )  # the API server forgets Events after an hour
                await self._cluster.create_event(namespace, event.manifest())
                event.created = True
                return
            except BusyError as error:
                if attempt == ATTEMPTS:
                    raise
                pause = max(error.retry_seconds or 0.0, low * 2**attempt)
                await asyncio.sleep(min(high, pause) * random.uniform(0.5, 1.0))  # noqa: S311 - jitter

    def _aggregated(self, group: _Group, message: str, now: float) -> str:
        """The message, marked as combined if its reason recently had many different messages."""
        similar = self._similar.get(group)
        if similar is None or now - similar.since > SIMILAR_SECONDS:
            similar = self._similar[group] = _Similar(now)
        _touch(self._similar, group, MAX_REMEMBERED)
        if message not in similar.messages and len(similar.messages) >= SIMILAR_EVENTS:
            return COMBINED + message
        similar.messages.add(message)
        return message

    def _allowed(self, uid: str, now: float) -> bool:
        bucket = self._buckets.setdefault(uid, _Bucket(OBJECT_BURST, now))
        _touch(self._buckets, uid, MAX_REMEMBERED)
        bucket.tokens = min(OBJECT_BURST, bucket.tokens + (now - bucket.at) / OBJECT_REFILL_SECONDS)
        bucket.at = now
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True

    def _dropped(self, group: _Group, why: str) -> None:
        self._metrics.events.labels("dropped").inc()
        logger.info("%s: failed to write Event %s: %s", group[0], group[3], why)


def _touch(entries: OrderedDict[_Key, Any], key: _Key, max_entries: int) -> None:
    """Mark an entry as the most recently used, and forget the least recently used ones."""
    entries.move_to_end(key)
    while len(entries) > max_entries:
        entries.popitem(last=False)


def _text(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
