"""Looks up what a gateway's index of prefixes knows of a pod, by single blocks."""

from __future__ import annotations

from collections.abc import Iterable

from mmd_workers.caches.index import CacheIndex

BLOCK_TOKENS = 16


def held_by(
    index: CacheIndex, pod: str, identities: Iterable[bytes], block_tokens: int = BLOCK_TOKENS
) -> set[bytes]:
    """The `identities` that the pod is known to have."""
    slot = index.slot(pod)
    return {
        identity
        for identity in identities
        if index.cached_tokens({block_tokens: [identity]})[slot] == block_tokens
    }
