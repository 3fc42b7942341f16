"""Encoded features by content: a byte-bounded LRU. A miss costs time, never correctness."""

from __future__ import annotations

from collections import OrderedDict

from mmd_workers.model.prompt import Feature


class FeatureCache:
    """Least recently used features go first; a feature larger than the whole budget is not kept."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._features: OrderedDict[str, Feature] = OrderedDict()

    def get(self, feature_id: str) -> Feature | None:
        """The feature, now the most recently used, or None."""
        feature = self._features.get(feature_id)
        if feature is not None:
            self._features.move_to_end(feature_id)
        return feature

    def put(self, feature_id: str, feature: Feature) -> int:
        """Keep a feature, evicting until it fits; returns how many were evicted."""
        if feature_id in self._features or feature.num_bytes > self.budget_bytes:
            return 0
        evictions = 0
        self.used_bytes += feature.num_bytes
        self._features[feature_id] = feature
        while self.used_bytes > self.budget_bytes:
            _, evicted = self._features.popitem(last=False)
            self.used_bytes -= evicted.num_bytes
            evictions += 1
        return evictions

    def newest(self, count: int) -> list[str]:
        """Up to `count` feature ids, most recently used first."""
        return list(reversed(self._features))[:count]
