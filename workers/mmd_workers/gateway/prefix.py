"""Identities of the KV blocks that a prompt begins with, by which the router finds pods that have them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mmd_workers.engine.blocks import leading_identities
from mmd_workers.wire.messages import FeatureRef, Heartbeat


def prefix_blocks(
    token_ids: list[int],
    features: Sequence[FeatureRef],
    adapter: str,
    block_tokens: int,
    pods: Sequence[Heartbeat],
) -> tuple[str, ...]:
    """The prompt's first whole blocks of `block_tokens`, as an adapter computes them; none while none of `pods` reports what it has cached."""
    if not any(beat.prefix_blocks for beat in pods):
        return ()
    spans = [(start, length, feature.feature_id) for feature in features for start, length in feature.ranges]
    return tuple(identity.hex() for identity in leading_identities(token_ids, spans, adapter, block_tokens))
