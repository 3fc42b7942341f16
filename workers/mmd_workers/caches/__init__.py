"""Reports and indexes of the pods' caches: KV blocks and features by identity, reported by their holders and indexed by choosers of pods."""
