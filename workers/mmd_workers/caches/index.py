"""An index of the pods that have the KV of a prompt's first blocks in their prefix cache. Pure: reports of pods are arguments.

For each identity of a block, one integer has a bit for each pod that has the block, so a prompt is looked up for all pods at once. Blocks
that come or go together share the integer, so most of a prompt's blocks are passed over without a look at the bits. The number of entries is
bounded, for each pod and in all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat

import numpy as np
import numpy.typing as npt

from mmd_workers.engine.memory.blocks import LeadingIdentities, MediaSpan
from mmd_workers.engine.memory.cache_changes import MOST_REPORTED
from mmd_workers.wire.messages.every_pod import CacheReport
from mmd_workers.wire.peers import MAX_PODS

Prefix = Mapping[int, Iterable[bytes]]
"""Identities of a prompt's first whole blocks, by their size in tokens."""
NOWHERE = 0
"""The slot of pods that have reported nothing."""
MOST_IN_ALL = 1 << 22  # 1 GiB
BYTES_PER_BLOCK = 256  # upper bound for a block of a pod
MOST_AT_ONCE = 4096  # blocks that are removed without a pause: about 2 ms
FEW = 16  # up to this many pods that drop out at one block of a prompt are looked at one by one


@dataclass(slots=True)
class _Pod:
    """The reports of one incarnation of a pod.

    `number`: number of the newest report. `known`: no report up to that one is missing. `pending`: the pod reports everything again, and
    `stale` has the blocks that it had and has not reported again yet; not `pending`: `stale` is to be removed. `cut`: blocks that it has
    reported are left out. `gone`: all of its blocks are to be removed.
    """

    incarnation: str
    slot: int
    block_tokens: int
    number: int = 0
    known: bool = True
    held: dict[bytes, None] = field(default_factory=dict)  # in the order of reports
    stale: set[bytes] = field(default_factory=set)
    pending: bool = False
    cut: bool = False
    gone: bool = False


@dataclass(slots=True)
class _Blocks:
    """Blocks of one size: for each identity, the pods that have the block, as bits of their slots."""

    pods_with: dict[bytes, int] = field(default_factory=dict)
    pods: int = 0


class CacheIndex:
    """An index of cached blocks. Every pod has a slot, a small number; the slot of a pod that has gone is given to another.

    No call takes long: `tidy` removes the blocks that a pod no longer has, or has no room for, a part at a time.
    """

    def __init__(self, most_blocks: int = MOST_REPORTED, most_in_all: int = MOST_IN_ALL) -> None:
        """`most_blocks`: limit of one pod. `most_in_all`: limit of all pods, a block counted for every pod that has it; all pods have the
        same share of it. Blocks that a pod reports beyond these limits are left out.
        """
        self.most_in_all = most_in_all
        self._most_blocks = most_blocks
        self._total = 0
        self._pods: dict[str, _Pod] = {}
        self._untidy: deque[_Pod] = deque()  # pods that may hold blocks to be removed
        self._sizes: dict[int, _Blocks] = {}
        self._free_slots: list[int] = []
        self._num_slots = 1
        self.version = 0  # changes when a slot gets or loses its pod

    # --- reports --------------------------------------------------------------------------------------------------

    def take(self, report: CacheReport) -> None:
        """Take in a report. After a gap, the entries of a pod may be wrong until it has reported everything again."""
        pod = self._pods.get(report.pod)
        if report.block_tokens < 1 or (pod is None and len(self._pods) >= MAX_PODS):
            return
        begins = report.begins or report.number == 1
        if pod is not None and pod.incarnation == report.incarnation and report.number <= pod.number:
            return  # an old report, late on the wire
        if pod is None or (pod.incarnation, pod.block_tokens) != (report.incarnation, report.block_tokens):
            self.forget(report.pod)
            pod = self._pods[report.pod] = _Pod(report.incarnation, self._take_slot(), report.block_tokens)
            pod.known = begins
            self._untidy += [other for other in self._pods.values() if len(other.held) > self._share]
        elif report.number != pod.number + 1 and not begins:
            if pod.pending:
                pod.pending, pod.stale = False, set()
            pod.known = False
        pod.number = report.number
        if report.begins:
            pod.pending, pod.stale, pod.cut = True, set(pod.held), False
        self._remove(pod, report.evicted)
        self.tidy(len(report.added))  # so that there is room
        self._add(pod, report.added)
        if pod.pending and report.complete:
            pod.pending, pod.known = False, True
            self._untidy.append(pod)

    def forget(self, name: str) -> None:
        """Forget a pod that is gone, with all its blocks."""
        if (pod := self._pods.pop(name, None)) is not None:
            pod.gone = True
            self._untidy.append(pod)
            self.version += 1

    def tidy(self, most: int = MOST_AT_ONCE) -> bool:
        """Remove at most `most` blocks that pods no longer have, or have no room for; returns whether more are left."""
        while self._untidy and most > 0:
            pod = self._untidy[0]
            surplus = self._surplus(pod, most)
            self._remove(pod, surplus)
            most -= len(surplus)
            if most > 0:
                self._untidy.popleft()
                if pod.gone and not pod.held and pod.slot != NOWHERE:
                    self._free_slots.append(pod.slot)
                    pod.slot = NOWHERE
        return bool(self._untidy)

    def follows(self, name: str, incarnation: str, number: int) -> bool:
        """Whether a pod's content is known up to the report with this number."""
        if (pod := self._pods.get(name)) is None:
            return number == 0
        if pod.incarnation != incarnation:
            return False  # the entries belong to another incarnation
        return pod.number >= number and (pod.known or pod.pending)

    def has_room_again(self, name: str) -> bool:
        """Whether blocks of a pod were left out and a quarter of its share is free now."""
        pod = self._pods.get(name)
        return pod is not None and pod.cut and not pod.pending and 4 * len(pod.held) < 3 * self._share

    @property
    def _share(self) -> int:
        """Blocks that a pod may hold."""
        return min(self._most_blocks, self.most_in_all // max(1, len(self._pods)))

    def _surplus(self, pod: _Pod, most: int) -> list[bytes]:
        """The next blocks that a pod should not hold: the newest ones if it has more than its share."""
        if pod.gone:
            return list(islice(reversed(pod.held), most))
        if pod.stale and not pod.pending:
            return list(islice(pod.stale, most))
        over = min(most, len(pod.held) - self._share)
        if over <= 0:
            return []
        if pod.stale:
            return list(islice(pod.stale, over))
        pod.cut = True
        return list(islice(reversed(pod.held), over))

    def _add(self, pod: _Pod, identities: Sequence[bytes]) -> None:
        pod.stale.difference_update(identities)
        new_identities = [identity for identity in identities if identity not in pod.held]
        if (missing := len(new_identities) - self._room(pod)) > 0:
            self._remove(pod, list(islice(pod.stale, missing)))
            room = self._room(pod)
            pod.cut = pod.cut or len(new_identities) > room
            new_identities = new_identities[:room]
        if not new_identities:
            return
        blocks = self._sizes.setdefault(pod.block_tokens, _Blocks())
        bit, held, pods_with, before = 1 << pod.slot, pod.held, blocks.pods_with, len(pod.held)
        blocks.pods |= bit
        shared: dict[int, int] = {}  # bits with this pod, by the bits before
        for identity in new_identities:
            held[identity] = None
            others = pods_with.get(identity, 0)
            pods_with[identity] = shared.get(others) or shared.setdefault(others, others | bit)
        self._total += len(held) - before

    def _room(self, pod: _Pod) -> int:
        """How many more blocks a pod may hold."""
        return max(0, min(self._share - len(pod.held), self.most_in_all - self._total))

    def _remove(self, pod: _Pod, identities: Collection[bytes]) -> None:
        if not identities or (blocks := self._sizes.get(pod.block_tokens)) is None:
            return
        others, held, pods_with, before = ~(1 << pod.slot), pod.held, blocks.pods_with, len(pod.held)
        pod.stale.difference_update(identities)
        shared: dict[int, int] = {}  # bits without this pod, by the bits before
        for identity in identities:
            if identity in held:
                del held[identity]
                all_pods = pods_with[identity]
                if remaining_pods := shared.get(all_pods) or shared.setdefault(all_pods, all_pods & others):
                    pods_with[identity] = remaining_pods
                else:
                    del pods_with[identity]
        self._total -= before - len(held)
        if not held:
            blocks.pods &= others
            if not blocks.pods:
                del self._sizes[pod.block_tokens]

    def _take_slot(self) -> int:
        self.version += 1
        if self._free_slots:
            return self._free_slots.pop()
        self._num_slots += 1
        return self._num_slots - 1

    # --- lookups --------------------------------------------------------------------------------------------------

    def holders(self, identity: bytes) -> int:
        """The pods that have this block or feature, as bits of their slots."""
        bits = 0
        for blocks in self._sizes.values():
            bits |= blocks.pods_with.get(identity, 0)
        return bits

    def flags(self, bits: int) -> npt.NDArray[np.bool_]:
        """[slots]: whether the bit of each slot is set."""
        values = np.zeros(self._num_slots)
        _set(values, bits, 1)
        return values > 0

    @property
    def num_blocks(self) -> int:
        """The number of blocks, each counted for every pod that has it, with those that `tidy` still has to remove."""
        return self._total

    @property
    def pods(self) -> list[str]:
        """Names of the pods that have reported something."""
        return list(self._pods)

    @property
    def cut_pods(self) -> list[str]:
        """Names of the pods with blocks that are left out."""
        return [name for name, pod in self._pods.items() if pod.cut]

    def prefix_of(self, token_ids: Sequence[int], media_spans: Sequence[MediaSpan], root: bytes) -> Prefix:
        """Identities of a prompt's first blocks, in every size in which a pod has blocks; empty while no pod has any.

        They are computed only as far as a pod has the blocks. May run on any thread.
        """
        return {size: LeadingIdentities(token_ids, media_spans, root, size) for size in tuple(self._sizes)}

    def hash_cached(self, prefix: Prefix) -> None:
        """Compute the identities of a prompt's first blocks as far as some pod has the blocks. May run on any thread."""
        for size, identities in prefix.items():
            if (blocks := self._sizes.get(size)) is not None:
                all(map(blocks.pods_with.__contains__, identities))  # ends at the first block that no pod has

    def slot(self, name: str) -> int:
        """A pod's place in what `cached_tokens` returns."""
        pod = self._pods.get(name)
        return NOWHERE if pod is None else pod.slot

    def cached_tokens(self, prefix: Prefix) -> npt.NDArray[np.float64]:
        """[slots]: how many of a prompt's first tokens each pod has, without a gap."""
        tokens = np.zeros(self._num_slots)
        for size, identities in prefix.items():
            if (blocks := self._sizes.get(size)) is None:
                continue
            having, depth, last = blocks.pods, 0, blocks.pods
            for depth, pods in enumerate(map(blocks.pods_with.get, identities, repeat(0)), start=1):
                if pods is last:
                    continue
                last, remaining_pods = pods, having & pods
                if remaining_pods != having:
                    if depth > 1:
                        _set(tokens, having ^ remaining_pods, (depth - 1) * size)
                    having = remaining_pods
                    if not remaining_pods:
                        break
            else:
                _set(tokens, having, depth * size)
        return tokens


def _set(tokens: npt.NDArray[np.float64], pods: int, value: int) -> None:
    if pods.bit_count() <= FEW:
        while pods:
            slot = pods.bit_length() - 1
            tokens[slot] = value
            pods ^= 1 << slot
        return
    bits = np.frombuffer(pods.to_bytes(-(-len(tokens) // 8), "little"), dtype=np.uint8)
    tokens[np.unpackbits(bits, count=len(tokens), bitorder="little").view(np.bool_)] = value
