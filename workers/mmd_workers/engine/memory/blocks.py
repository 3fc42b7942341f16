"""Ownership of the KV pool's blocks: a free list, reference counts and a prefix cache. Independent of tensors
and sequences."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

from mmd_api.contract.errors import OverloadedError
from mmd_workers.engine.memory.cache_changes import CacheChanges
from mmd_workers.engine.memory.sequence_room import blocks_for

MAX_NAMED_BLOCKS = 1 << 14
"""Blocks of one prompt that a message may name: the message takes 300 KB, and hashing them takes about 20 ms."""
HASHED_AT_ONCE = 64
MediaSpan = tuple[int, int, str]  # start, length, feature id


def block_hash(
    parent: bytes, token_ids: Sequence[int], start: int, media_spans: Sequence[MediaSpan]
) -> bytes:
    """Return the identity of a full block: a hash of its parent's identity, its token ids, and every feature
    that overlaps it.

    `start` is the position of the block's first token. A span is hashed with its offset to the block. So the
    same placeholder ids over another medium, or over another part of the same medium, never share an
    identity.
    """
    digest = hashlib.blake2b(parent + _packed(len(token_ids))(*token_ids), digest_size=16)
    end = start + len(token_ids)
    for span_start, length, feature_id in media_spans:
        if span_start < end and span_start + length > start:
            digest.update(f"|{span_start - start}:{length}:{feature_id}".encode())
    return digest.digest()


@lru_cache(maxsize=16)
def _packed(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{count}q").pack


def root_of(adapter: str, salt: str) -> bytes:
    """Return the parent identity of a prompt's first block.

    Blocks of different adapters, or of different salts, never share an identity. Empty: the model alone
    computed the blocks, and every request may use them.
    """
    if not (adapter or salt):
        return b""
    words = f"adapter {adapter}" if not salt else f"salt {len(salt)} {salt} adapter {adapter}"
    return hashlib.blake2b(words.encode(), digest_size=16).digest()


def prompt_root(
    root: bytes, token_ids: Sequence[int], media_spans: Sequence[MediaSpan], *, bidirectional: bool
) -> bytes:
    """Return the parent identity of the first block of the prompt `token_ids`. `root`: see `root_of`.

    `bidirectional`: all tokens of a prompt see one another (`LanguageModel.bidirectional_prompt`). The KV of
    each block then depends on the whole prompt, and only the same prompts share blocks.
    """
    return block_hash(root + b"prompt", token_ids, 0, media_spans) if bidirectional else root


def extend_identities(
    identities: list[bytes],
    token_ids: Sequence[int],
    media_spans: Sequence[MediaSpan],
    block_tokens: int,
    full_blocks: int,
    root: bytes = b"",
) -> None:
    """Append identities of the next full blocks of `token_ids`, until there are `full_blocks`.

    `root`: see `prompt_root`. An identity stands for all that the KV of its block depends on, so any number of
    leading blocks may be shared, of an atomic range too: such a range is the whole prompt, which is in the
    root, or a run of one medium, of which each block has the feature and the length.
    """
    spans_of: dict[int, list[MediaSpan]] = {}
    for span in media_spans:
        first, last = span[0] // block_tokens, (span[0] + span[1] - 1) // block_tokens
        for block in range(max(first, len(identities)), min(last + 1, full_blocks)):
            spans_of.setdefault(block, []).append(span)
    for block in range(len(identities), full_blocks):
        start = block * block_tokens
        parent = identities[-1] if identities else root
        tokens = token_ids[start : start + block_tokens]
        identities.append(block_hash(parent, tokens, start, spans_of.get(block, ())))


class LeadingIdentities(Iterable[bytes]):
    """Identities of a prompt's leading full blocks, at most `MAX_NAMED_BLOCKS`. `root`: see `prompt_root`.

    They are computed once, as far as they are read.
    """

    def __init__(
        self, token_ids: Sequence[int], media_spans: Sequence[MediaSpan], root: bytes, block_tokens: int
    ) -> None:
        self._token_ids = token_ids
        self._media_spans = media_spans
        self._root = root
        self._block_tokens = block_tokens
        self._full_blocks = min(len(token_ids) // block_tokens, MAX_NAMED_BLOCKS)
        self._identities: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[list[bytes]]:
        yielded = 0
        while yielded < self._full_blocks:
            if yielded == len(self._identities):
                end = min(self._full_blocks, yielded + HASHED_AT_ONCE)
                extend_identities(
                    self._identities, self._token_ids, self._media_spans, self._block_tokens, end, self._root
                )
            part = self._identities[yielded:]
            yield part
            yielded += len(part)


def leading_identities(
    token_ids: Sequence[int], media_spans: Sequence[MediaSpan], root: bytes, block_tokens: int
) -> list[bytes]:
    """Return all of `LeadingIdentities`: as many as a message may name."""
    return list(LeadingIdentities(token_ids, media_spans, root, block_tokens))


class BlockPool:
    """Bookkeeping of `num_blocks` blocks. Each is free, referenced (count ≥ 1), or cached (unreferenced, content still valid).

    Free blocks are allocated first, then the least recently used cached ones, which lose their identity.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.changes = CacheChanges()
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can take now: free ones and unreferenced cached ones."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold this many tokens."""
        return blocks_for(num_tokens, self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each; all or none.

        Raises:
            OverloadedError: fewer blocks are available.
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
        self._lose(self._hash_of.pop(block))
        return block

    def _lose(self, identity: bytes) -> None:
        del self._block_of[identity]
        self.changes.remove(identity)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. Later blocks of a sequence are evicted first."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise AssertionError(f"block {block} was released more often than it was allocated")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def touch(self, identities: Sequence[bytes]) -> None:
        """Move the cached blocks among these leading blocks of a sequence to the end of the eviction order,
        the first one last."""
        for identity in reversed(identities):
            block = self._block_of.get(identity)
            if block is not None and block in self._cached:
                self._cached.move_to_end(block)

    def forget(self, identities: Iterable[bytes]) -> None:
        """Remove the blocks of these identities from the prefix cache, so that their content is not reused."""
        for identity in identities:
            block = self._block_of.get(identity)
            if block is None:
                continue
            del self._hash_of[block]
            self._lose(identity)
            if not self._references[block]:
                del self._cached[block]
                self._free.append(block)

    def register(self, block: int, identity: bytes) -> None:
        """Add a referenced, fully written block to the prefix cache. A second block of the same identity stays private."""
        if identity not in self._block_of and block not in self._hash_of:
            self._block_of[identity] = block
            self._hash_of[block] = identity
            self.changes.add(identity)

    def find(self, identities: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `identities`. Changes neither references nor the
        eviction order."""
        blocks: list[int] = []
        for identity in identities:
            block = self._block_of.get(identity)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def available_beside(self, found: Iterable[int]) -> int:
        """Return what `available` would be after sharing these found blocks; each is listed once."""
        return self.available - sum(1 for block in found if block in self._cached)

    def share(self, found: Sequence[int]) -> None:
        """Add one reference to each of these found blocks."""
        for block in found:
            self._cached.pop(block, None)
            self._references[block] += 1
