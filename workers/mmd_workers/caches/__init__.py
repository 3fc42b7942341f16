"""What pods have in their caches, KV blocks and features by identity: reported by those that have it, indexed by those that choose pods."""
