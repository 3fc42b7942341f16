"""Which block of the KV pool belongs to whom: a free list, reference counts and a prefix cache. Independent of tensors and sequences."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

from mmd_api.contract.errors import OverloadedError
from mmd_workers.engine.room import blocks_for

MAX_NAMED_BLOCKS = 1024  # of one prompt; to hash them takes about 10 ms
MediaSpan = tuple[int, int, str]  # start, length, feature id


def block_hash(
    parent: bytes, token_ids: Sequence[int], start: int, media_spans: Sequence[MediaSpan]
) -> bytes:
    """Identity of a full block: its parent's identity, its token ids, and every feature that overlaps it.

    `start` is the position of the block's first token. A span is hashed with its offset to the block, so the same placeholder ids
    over another medium, or another part of the same medium, never meet.
    """
    digest = hashlib.blake2b(parent, digest_size=16)
    digest.update(b"".join(token.to_bytes(8, "little", signed=True) for token in token_ids))
    end = start + len(token_ids)
    for span_start, length, feature_id in media_spans:
        if span_start < end and span_start + length > start:
            digest.update(f"|{span_start - start}:{length}:{feature_id}".encode())
    return digest.digest()


def root_of(adapter: str) -> bytes:
    """The parent of a prompt's first block: blocks that different adapters computed never meet. Empty: the model alone."""
    return hashlib.blake2b(f"adapter {adapter}".encode(), digest_size=16).digest() if adapter else b""


def extend_identities(
    identities: list[bytes],
    token_ids: Sequence[int],
    media_spans: Sequence[MediaSpan],
    block_tokens: int,
    full_blocks: int,
    root: bytes = b"",
) -> None:
    """Append the identities of the following full blocks of `token_ids`, until there are `full_blocks`. `root`: see `root_of`."""
    while len(identities) < full_blocks:
        start = len(identities) * block_tokens
        parent = identities[-1] if identities else root
        identities.append(block_hash(parent, token_ids[start : start + block_tokens], start, media_spans))


def leading_identities(
    token_ids: Sequence[int], media_spans: Sequence[MediaSpan], adapter: str, block_tokens: int
) -> list[bytes]:
    """Identities of a prompt's first whole blocks as an adapter computes them, of as many as a message may name."""
    identities: list[bytes] = []
    whole = min(len(token_ids) // block_tokens, MAX_NAMED_BLOCKS)
    extend_identities(identities, token_ids, media_spans, block_tokens, whole, root_of(adapter))
    return identities


class BlockPool:
    """Bookkeeping of `num_blocks` blocks. Each is free, referenced (count ≥ 1), or cached (unreferenced, content still valid).

    Blocks are handed out free ones first, then the least recently used cached ones, whose identity is forgotten then.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now: free ones and unreferenced cached ones."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return blocks_for(num_tokens, self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference; all or none.

        Raises:
            OverloadedError: fewer are available.
        """
        if count > self.available:
            raise OverloadedError(
                f"{count} KV blocks are needed, but only {self.available} of {self.num_blocks} are available; "
                "retry when a sequence has finished, or give the pool more memory"
            )
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block. Later blocks of a sequence become the first to be evicted."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise AssertionError(f"block {block} was released more often than it was allocated")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove referenced blocks from the prefix cache, so that their content is not reused."""
        for block in blocks:
            identity = self._hash_of.pop(block, None)
            if identity is not None:
                del self._block_of[identity]

    def register(self, block: int, identity: bytes) -> None:
        """Make a referenced, fully written block findable. A second block of the same identity stays private."""
        if identity not in self._block_of and block not in self._hash_of:
            self._block_of[identity] = block
            self._hash_of[block] = identity

    def find(self, identities: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `identities`. Changes nothing: neither references nor the order of eviction."""
        blocks: list[int] = []
        for identity in identities:
            block = self._block_of.get(identity)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def available_beside(self, found: Sequence[int]) -> int:
        """What `available` would be once these found blocks are shared."""
        return self.available - sum(1 for block in found if block in self._cached)

    def share(self, found: Sequence[int]) -> None:
        """Add one reference to each of these found blocks."""
        for block in found:
            self._cached.pop(block, None)
            self._references[block] += 1

    def sample_identities(self, limit: int) -> list[str]:
        """Hex identities of up to `limit` of the most recently registered blocks, for prefix locality in routing."""
        newest = list(self._block_of)[-limit:] if limit else []
        return [identity.hex() for identity in reversed(newest)]
