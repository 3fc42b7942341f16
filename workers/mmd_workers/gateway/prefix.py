"""Identities of the KV blocks that a prompt begins with, by which the router finds pods that have them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mmd_workers.engine.blocks import extend_identities, root_of
from mmd_workers.wire.messages import FeatureRef, Heartbeat

MAX_HASHED_BLOCKS = 1024  # of a prompt, for locality: about 10 ms


def prefix_blocks(
    token_ids: list[int], features: Sequence[FeatureRef], adapter: str, prefill: Sequence[Heartbeat]
) -> tuple[str, ...]:
    """The prompt's first whole blocks, as an adapter computes them; none while no pod of `prefill` reports what it has cached."""
    pods = [beat for beat in prefill if beat.prefix_blocks]
    size = max((beat.load.kv_block_tokens for beat in pods), default=0)
    if not size:
        return ()
    spans = [(start, length, feature.feature_id) for feature in features for start, length in feature.ranges]
    identities: list[bytes] = []
    whole = min(len(token_ids) // size, MAX_HASHED_BLOCKS)
    extend_identities(identities, token_ids, spans, size, whole, root_of(adapter))
    return tuple(identity.hex() for identity in identities)
