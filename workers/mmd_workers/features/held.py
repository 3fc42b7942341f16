"""The features that a pod holds, in its tower's cache or its prompts' store, and the changes to report to other pods."""

from __future__ import annotations

import hashlib
from collections import Counter

from mmd_workers.engine.memory.cache_changes import CacheChanges


def feature_identity(feature_id: str) -> bytes:
    """The identity of a feature in reports, beside the identities of KV blocks."""
    return hashlib.blake2b(f"feature {feature_id}".encode(), digest_size=16).digest()


class HeldFeatures:
    """Counts the places that have a feature. Belongs to one event loop."""

    def __init__(self) -> None:
        self.changes = CacheChanges()
        self._places: Counter[str] = Counter()

    def add(self, feature_id: str) -> None:
        """Note that one more place has the feature."""
        self._places[feature_id] += 1
        if self._places[feature_id] == 1:
            self.changes.add(feature_identity(feature_id))

    def remove(self, feature_id: str) -> None:
        """Note that one place no longer has the feature."""
        self._places[feature_id] -= 1
        if self._places[feature_id] <= 0:
            del self._places[feature_id]
            self.changes.remove(feature_identity(feature_id))
