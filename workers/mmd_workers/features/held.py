"""Which features a pod holds, in the cache of its tower or in the store of its prompts, and the changes of that for reports to others."""

from __future__ import annotations

import hashlib
from collections import Counter

from mmd_workers.engine.memory.cache_changes import CacheChanges


def feature_identity(feature_id: str) -> bytes:
    """Identity of a feature in reports, beside those of KV blocks."""
    return hashlib.blake2b(f"feature {feature_id}".encode(), digest_size=16).digest()


class HeldFeatures:
    """Counts the places in which a feature is. Belongs to one event loop."""

    def __init__(self) -> None:
        self.changes = CacheChanges()
        self._places: Counter[str] = Counter()

    def add(self, feature_id: str) -> None:
        """A place has it now."""
        self._places[feature_id] += 1
        if self._places[feature_id] == 1:
            self.changes.add(feature_identity(feature_id))

    def remove(self, feature_id: str) -> None:
        """A place that had it does not any more."""
        self._places[feature_id] -= 1
        if self._places[feature_id] <= 0:
            del self._places[feature_id]
            self.changes.remove(feature_identity(feature_id))
