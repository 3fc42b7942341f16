"""Finds vLLM's cached blocks by the identities of their tokens. Not thread safe.

Routers and other pods use identities, which are independent of the size of vLLM's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock, get_block_hash

from mmd_workers.engine.memory.blocks import extend_identities, root_of
from mmd_workers.engine.memory.cache_changes import CacheChanges
from mmd_workers.features.references import media_spans
from mmd_workers.vllm_engine.core_table import CoreSequence


class PrefixBlocks:
    """Blocks in vLLM's prefix cache by identity. `changes`: identities that the cache has gained and lost."""

    def __init__(self, manager: KVCacheManager, block_tokens: int, identity_tokens: int) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._block_tokens = block_tokens
        self.identity_tokens = identity_tokens
        self.hashes_of: dict[bytes, tuple[BlockHash, ...]] = {}
        """By identity, vLLM's hashes of the blocks with its tokens, in order; all of them are cached. If
        several blocks have these tokens, because they continue differently, the last used one counts."""
        self.identities_in: dict[BlockHash, set[bytes]] = {}  # `hashes_of` by vLLM's hash
        self.changes = CacheChanges()
        self._pool._emit_block_removed_events = self._evicted  # called for every block that vLLM evicts

    def clear(self) -> bool:
        """Empty the prefix cache. False: sequences use blocks of it."""
        if not self._manager.reset_prefix_cache():
            return False
        self.hashes_of.clear()
        self.identities_in.clear()
        self.changes.clear()
        return True

    def cached(self, prefix: Sequence[bytes], prompt_tokens: int) -> list[KVCacheBlock]:
        """Return vLLM's leading blocks with the KV of these identities' tokens, as far as they are cached."""
        size, blocks = self.identity_tokens, list[KVCacheBlock]()
        for number, identity in enumerate(prefix):
            hashes = self.hashes_of.get(identity, ())
            covered_blocks = min(prompt_tokens, (number + 1) * size) // self._block_tokens
            for index, block_hash in enumerate(hashes, number * size // self._block_tokens):
                if len(blocks) <= index < covered_blocks:
                    if (
                        index > len(blocks)
                        or (cached := self._pool.get_cached_block(block_hash, [0])) is None
                    ):
                        return blocks
                    blocks.extend(cached)
            if not hashes:
                break
        return blocks

    def note(self, sequence: CoreSequence) -> None:
        """Record the blocks of all tokens so far under the identities that routers and other pods use.

        These are independent of the size of vLLM's blocks.
        """
        request, size = sequence.request, self.identity_tokens
        if not self._manager.enable_caching:
            return
        tokens, identities = list(request.all_token_ids), sequence.identities
        covered = min(len(tokens) // self._block_tokens, len(request.block_hashes)) * self._block_tokens
        source = sequence.source
        spans, root = media_spans(source.features), root_of(source.adapter, source.cache_salt)
        extend_identities(identities, tokens, spans, size, covered // size, root)
        for number, identity in enumerate(identities[: covered // size]):
            first, last = number * size, (number + 1) * size - 1
            blocks = tuple(request.block_hashes[first // self._block_tokens : last // self._block_tokens + 1])
            if self.hashes_of.get(identity) != blocks and all(map(self._is_cached, blocks)):
                self._forget_identity(identity)
                self.hashes_of[identity] = blocks
                for block_hash in blocks:
                    self.identities_in.setdefault(block_hash, set()).add(identity)
                self.changes.add(identity)

    def _is_cached(self, block_hash: BlockHash) -> bool:
        return self._pool.get_cached_block(block_hash, [0]) is not None

    def _forget_identity(self, identity: bytes) -> None:
        """Remove an identity from its blocks; nothing happens if it has none."""
        for block_hash in self.hashes_of.pop(identity, ()):
            self.identities_in[block_hash].discard(identity)
            if not self.identities_in[block_hash]:
                del self.identities_in[block_hash]
        self.changes.remove(identity)

    def _evicted(self, evicted: list[BlockHashWithGroupId]) -> None:
        """Forget identities of blocks that vLLM has evicted, unless another cached block has the same tokens."""
        for block_hash in map(get_block_hash, evicted):
            if not self._is_cached(block_hash):
                for identity in tuple(self.identities_in.get(block_hash, ())):
                    self._forget_identity(identity)
