"""Block identities that a prefix cache has gained and lost since the last report. Independent of engines and of the reader.

Only the difference is kept: a block that is added and removed between two reports is never reported. So
memory is bounded by the identities that the cache holds and those that were reported, however long nothing
reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice

MOST_REPORTED = 1 << 17  # identities that peers keep of a pod: 2 million tokens in blocks of 16


@dataclass(frozen=True, slots=True)
class CacheDelta:
    """A step from the state reported so far to what the cache holds.

    `begins`: earlier reports are void, and this is the first step from an empty cache. `complete`: no further
    step is due. `awaited`: the step before was not complete.
    """

    added: list[bytes]
    evicted: list[bytes]
    begins: bool
    complete: bool
    awaited: bool

    @property
    def empty(self) -> bool:
        """True if there is nothing to report."""
        return not (self.added or self.evicted or self.begins or self.awaited)


class CacheChanges:
    """Collects the changes of an engine's prefix cache. Not thread safe: used on the engine's thread."""

    def __init__(self, most: int = MOST_REPORTED) -> None:
        """`most`: limit of reported identities. While the cache holds more, the newest wait until others are evicted."""
        self._most = most
        self._to_repeat: dict[bytes, None] = {}  # in the cache, and to be reported again
        self._reported: dict[bytes, None] = {}
        self._added: dict[bytes, None] = {}  # in the cache, and not reported
        self._evicted: dict[bytes, None] = {}  # reported, and no longer in the cache
        self._begins = False
        self._complete = True

    def __contains__(self, identity: bytes) -> bool:
        """Return whether the cache holds this block."""
        return (
            identity in self._added
            or identity in self._to_repeat
            or (identity in self._reported and identity not in self._evicted)
        )

    def add(self, identity: bytes) -> None:
        """Record that the cache holds this block; nothing happens if it did before."""
        if identity in self._evicted:
            del self._evicted[identity]
        elif identity not in self._reported and identity not in self._to_repeat:
            self._added[identity] = None

    def remove(self, identity: bytes) -> None:
        """Record that the cache no longer holds this block; nothing happens if it did not before."""
        if identity in self._added:
            del self._added[identity]
        elif identity in self._to_repeat:
            del self._to_repeat[identity]
        elif identity in self._reported:
            self._evicted[identity] = None

    def clear(self) -> None:
        """Record that the cache is empty."""
        self._added.clear()
        self._to_repeat.clear()
        self._evicted = dict.fromkeys(self._reported)

    def restart(self) -> None:
        """Report everything again, because a reader has missed a step."""
        for identity in self._evicted:
            del self._reported[identity]
        self._reported.update(self._to_repeat)
        self._to_repeat, self._reported, self._evicted, self._begins = self._reported, {}, {}, True

    def take(self, limit: int) -> CacheDelta:
        """Return the next step, with at most `limit` identities, and count it as reported. Evictions come
        first: they make room."""
        evicted = list(islice(self._evicted, limit))
        for identity in evicted:
            del self._evicted[identity], self._reported[identity]
        room = max(0, min(limit - len(evicted), self._most - len(self._reported)))
        added = list(islice(chain(self._to_repeat, self._added), room))
        for identity in added:
            (self._to_repeat if identity in self._to_repeat else self._added).pop(identity)
            self._reported[identity] = None
        waits = (self._to_repeat or self._added) and len(self._reported) < self._most
        begins, self._begins = self._begins, False
        awaited, self._complete = not self._complete, not (self._evicted or waits)
        return CacheDelta(added, evicted, begins, self._complete, awaited)
