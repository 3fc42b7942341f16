"""Identities of the KV blocks that a prompt begins with, by which the router finds pods that have them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mmd_workers.engine.blocks import leading_identities
from mmd_workers.wire.messages import FeatureRef, Heartbeat


def prefix_blocks(
    token_ids: list[int], features: Sequence[FeatureRef], adapter: str, prefill: Sequence[Heartbeat]
) -> tuple[str, ...]:
    """The prompt's first whole blocks, as an adapter computes them; none while no pod of `prefill` reports what it has cached."""
    pods = [beat for beat in prefill if beat.prefix_blocks]
    size = max((beat.load.kv_block_tokens for beat in pods), default=0)
    if not size:
        return ()
    spans = [(start, length, feature.feature_id) for feature in features for start, length in feature.ranges]
    return tuple(identity.hex() for identity in leading_identities(token_ids, spans, adapter, size))
