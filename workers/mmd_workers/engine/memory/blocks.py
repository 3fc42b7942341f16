"""Ownership of the KV pool's blocks: a free list, reference counts and a prefix cache. Independent of tensors
and sequences."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain

from mmd_api.contract.errors import OverloadedError
from mmd_workers.engine.memory.cache_changes import CacheChanges
from mmd_workers.engine.memory.sequence_room import blocks_for

MAX_NAMED_BLOCKS = 1 << 14
"""Blocks of one prompt that a message may name: the message takes 300 KB."""
HASHED_AT_ONCE = 64
TOKEN_BYTES = 8
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
    end = start + len(token_ids)
    labels = [
        f"|{span_start - start}:{length}:{feature_id}"
        for span_start, length, feature_id in media_spans
        if span_start < end and span_start + length > start
    ]
    return blake2b(parent + _packed(token_ids) + "".join(labels).encode(), digest_size=16).digest()


def _packed(token_ids: Sequence[int]) -> bytes:
    """Return the tokens as little-endian integers of 8 bytes."""
    packed = array("q", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def root_of(adapter: str, salt: str) -> bytes:
    """Return the parent identity of a prompt's first block.

    Blocks of different adapters, or of different salts, never share an identity. Empty: the model alone
    computed the blocks, and every request may use them.
    """
    if not (adapter or salt):
        return b""
    words = f"adapter {adapter}" if not salt else f"salt {len(salt)} {salt} adapter {adapter}"
    return blake2b(words.encode(), digest_size=16).digest()


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
    if full_blocks <= len(identities):
        return
    labels = _labels_of(media_spans, block_tokens, len(identities), full_blocks)
    _extend(identities, token_ids, labels, block_tokens, full_blocks, root)


def completed_identities(
    identities: Sequence[bytes],
    token_ids: Sequence[int],
    media_spans: Sequence[MediaSpan],
    block_tokens: int,
    root: bytes = b"",
) -> list[bytes]:
    """Return the identities of all full blocks of `token_ids`. `identities`: those of leading blocks, from a peer.

    A peer may have blocks of another size. Then the first identity differs, and all are computed here.
    """
    full_blocks = len(token_ids) // block_tokens
    completed = list(identities[:full_blocks])
    if completed and block_hash(root, token_ids[:block_tokens], 0, media_spans) != completed[0]:
        completed = []
    extend_identities(completed, token_ids, media_spans, block_tokens, full_blocks, root)
    return completed


def _labels_of(
    media_spans: Iterable[MediaSpan], block_tokens: int, first_block: int, last_block: int
) -> dict[int, str]:
    """Return what each of the blocks [first_block, last_block) with media hashes of their spans, as `block_hash` does."""
    labels: dict[int, str] = {}
    for start, length, feature_id in media_spans:
        first, last = start // block_tokens, (start + length - 1) // block_tokens
        suffix = f":{length}:{feature_id}"
        for block in range(max(first, first_block), min(last + 1, last_block)):
            label = f"|{start - block * block_tokens}{suffix}"
            labels[block] = labels[block] + label if block in labels else label
    return labels


def _extend(
    identities: list[bytes],
    token_ids: Sequence[int],
    labels: Mapping[int, str],
    block_tokens: int,
    full_blocks: int,
    root: bytes,
) -> None:
    """Append what `block_hash` returns for the next blocks. The tokens are packed all at once. `labels`: see `_labels_of`."""
    first = len(identities)
    packed = _packed(token_ids[first * block_tokens : full_blocks * block_tokens])
    parent, block_bytes = identities[-1] if identities else root, block_tokens * TOKEN_BYTES
    for block, at in enumerate(range(0, len(packed), block_bytes), first):
        content = parent + packed[at : at + block_bytes]
        if block in labels:
            content += labels[block].encode()
        parent = blake2b(content, digest_size=16).digest()
        identities.append(parent)


class LeadingIdentities(Iterable[bytes]):
    """Identities of a prompt's leading full blocks, at most `MAX_NAMED_BLOCKS`. `root`: see `prompt_root`.

    They are computed once, as far as they are read.
    """

    def __init__(
        self, token_ids: Sequence[int], media_spans: Sequence[MediaSpan], root: bytes, block_tokens: int
    ) -> None:
        self._token_ids = token_ids
        self._media_spans = media_spans
        self._labels: Mapping[int, str] | None = None  # None: nothing has been read
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
                self._hash_more()
            part = self._identities[yielded:]
            yield part
            yielded += len(part)

    def _hash_more(self) -> None:
        size = self._block_tokens
        if self._labels is None:
            self._labels = _labels_of(self._media_spans, size, 0, self._full_blocks)
        end = min(self._full_blocks, len(self._identities) + HASHED_AT_ONCE)
        _extend(self._identities, self._token_ids, self._labels, size, end, self._root)


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
