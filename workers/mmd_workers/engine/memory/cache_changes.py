"""What a prefix cache has gained and lost since somebody last asked, by identity of block. Independent of engines and of who asks.

Only the difference is kept: a block that comes and goes in between is never reported. So the memory is that of the identities which the
cache holds and of those that were reported, however long nobody asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice

MOST_REPORTED = 1 << 17  # identities of a pod that its peers keep: 2 million tokens in blocks of 16


@dataclass(frozen=True, slots=True)
class CacheDelta:
    """A step from what was reported before to what the cache holds. `begins`: what was reported before is void, and this is the first step
    from an empty cache. `complete`: no further step is due. `awaited`: the step before was not complete.
    """

    added: list[bytes]
    evicted: list[bytes]
    begins: bool
    complete: bool
    awaited: bool

    @property
    def empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self.added or self.evicted or self.begins or self.awaited)


class CacheChanges:
    """Fed by an engine as its prefix cache changes. Not thread safe: on the engine's thread."""

    def __init__(self, most: int = MOST_REPORTED) -> None:
        """`most`: identities that are reported at once; while the cache holds more, the newest wait for others to be evicted."""
        self._most = most
        self._again: dict[bytes, None] = {}  # held, and to be reported once more
        self._reported: dict[bytes, None] = {}
        self._added: dict[bytes, None] = {}  # held and not reported
        self._gone: dict[bytes, None] = {}  # reported and not held any more
        self._begins = False
        self._complete = True

    def __contains__(self, identity: bytes) -> bool:
        """Whether the cache holds this block."""
        return (
            identity in self._added
            or identity in self._again
            or (identity in self._reported and identity not in self._gone)
        )

    def add(self, identity: bytes) -> None:
        """The cache holds this block; nothing happens if it did before."""
        if identity in self._gone:
            del self._gone[identity]
        elif identity not in self._reported and identity not in self._again:
            self._added[identity] = None

    def remove(self, identity: bytes) -> None:
        """The cache no longer holds this block; nothing happens if it did not before."""
        if identity in self._added:
            del self._added[identity]
        elif identity in self._again:
            del self._again[identity]
        elif identity in self._reported:
            self._gone[identity] = None

    def clear(self) -> None:
        """The cache is empty."""
        self._added.clear()
        self._again.clear()
        self._gone = dict.fromkeys(self._reported)

    def restart(self) -> None:
        """Report everything again: somebody has missed a step."""
        for identity in self._gone:
            del self._reported[identity]
        self._reported.update(self._again)
        self._again, self._reported, self._gone, self._begins = self._reported, {}, {}, True

    def take(self, limit: int) -> CacheDelta:
        """The next step, of at most `limit` identities, which counts as reported now. Evictions come first: they make room."""
        evicted = list(islice(self._gone, limit))
        for identity in evicted:
            del self._gone[identity], self._reported[identity]
        room = max(0, min(limit - len(evicted), self._most - len(self._reported)))
        added = list(islice(chain(self._again, self._added), room))
        for identity in added:
            (self._again if identity in self._again else self._added).pop(identity)
            self._reported[identity] = None
        waits = (self._again or self._added) and len(self._reported) < self._most
        begins, self._begins = self._begins, False
        awaited, self._complete = not self._complete, not (self._gone or waits)
        return CacheDelta(added, evicted, begins, self._complete, awaited)
