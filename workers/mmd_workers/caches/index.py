"""Which pods have the KV of a prompt's first blocks in their prefix cache. Pure: reports of pods come in as arguments.

For each identity of a block one integer has a bit for each pod that has it, so a prompt is looked up for all pods at once. Blocks that come
or go together share the integer, so most of a prompt's blocks are passed over without a look at its bits. What is kept is bounded, for each
pod and in all.
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
BYTES_PER_BLOCK = 256  # of a block of a pod, at most
MOST_AT_ONCE = 4096  # blocks that are removed without a pause: about 2 ms
FEW = 16  # pods that drop out at one block of a prompt and are looked at one by one


@dataclass(slots=True)
class _Pod:
    """What one incarnation has reported. `number`: of its newest report. `known`: none up to that one is missing. `pending`: it reports
    everything again, and `stale` is what it had and has not reported again yet; not `pending`: `stale` is to be removed. `cut`: blocks
    that it has reported are left out. `gone`: all of it is to be removed.
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
    """Blocks of one size: for each identity the pods that have it, as bits of their slots."""

    pods_with: dict[bytes, int] = field(default_factory=dict)
    pods: int = 0


class CacheIndex:
    """Every pod has a slot, a small number; the slot of a pod that has gone is given to another.

    No call takes long: what a pod no longer has, or has no room for, is removed by `tidy`, a part at a time.
    """

    def __init__(self, most_blocks: int = MOST_REPORTED, most_in_all: int = MOST_IN_ALL) -> None:
        """`most_blocks`: of one pod. `most_in_all`: of all pods, each counted for every pod that has it; all pods have the same share of
        it. What a pod reports beyond is left out.
        """
        self.most_in_all = most_in_all
        self._most = most_blocks
        self._total = 0
        self._pods: dict[str, _Pod] = {}
        self._untidy: deque[_Pod] = deque()  # those that may hold what is to be removed
        self._sizes: dict[int, _Blocks] = {}
        self._free_slots: list[int] = []
        self._num_slots = 1
        self.version = 0  # moves when a slot gets or loses its pod

    # --- reports --------------------------------------------------------------------------------------------------

    def take(self, report: CacheReport) -> None:
        """Take a report in. After a gap, what is known of a pod may be wrong until it has reported everything again."""
        pod = self._pods.get(report.pod)
        if report.block_tokens < 1 or (pod is None and len(self._pods) >= MAX_PODS):
            return
        begins = report.begins or report.number == 1
        if pod is not None and pod.incarnation == report.incarnation and report.number <= pod.number:
            return  # an old one, late on the wire
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
        """A pod is gone, with all that it had."""
        if (pod := self._pods.pop(name, None)) is not None:
            pod.gone = True
            self._untidy.append(pod)
            self.version += 1

    def tidy(self, most: int = MOST_AT_ONCE) -> bool:
        """Remove at most this many blocks of those that pods no longer have, or have no room for; whether more are left."""
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
        """Whether a pod's content is known up to the report of this number."""
        if (pod := self._pods.get(name)) is None:
            return number == 0
        if pod.incarnation != incarnation:
            return False  # what is known is of another one
        return pod.number >= number and (pod.known or pod.pending)

    def has_room_again(self, name: str) -> bool:
        """Whether blocks of a pod were left out and a quarter of its share is free now."""
        pod = self._pods.get(name)
        return pod is not None and pod.cut and not pod.pending and 4 * len(pod.held) < 3 * self._share

    @property
    def _share(self) -> int:
        """Blocks that a pod may hold."""
        return min(self._most, self.most_in_all // max(1, len(self._pods)))

    def _surplus(self, pod: _Pod, most: int) -> list[bytes]:
        """The next blocks that a pod should not hold: the newest ones where it has more than its share."""
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
        new = [identity for identity in identities if identity not in pod.held]
        if (missing := len(new) - self._room(pod)) > 0:
            self._remove(pod, list(islice(pod.stale, missing)))
            room = self._room(pod)
            pod.cut = pod.cut or len(new) > room
            new = new[:room]
        if not new:
            return
        blocks = self._sizes.setdefault(pod.block_tokens, _Blocks())
        bit, held, pods_with, before = 1 << pod.slot, pod.held, blocks.pods_with, len(pod.held)
        blocks.pods |= bit
        shared: dict[int, int] = {}  # with this pod, by those who had it before
        for identity in new:
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
        shared: dict[int, int] = {}  # without this pod, by those who had it before
        for identity in identities:
            if identity in held:
                del held[identity]
                all_pods = pods_with[identity]
                if left := shared.get(all_pods) or shared.setdefault(all_pods, all_pods & others):
                    pods_with[identity] = left
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
        """[slots]: which of their bits are set."""
        found = np.zeros(self._num_slots)
        _set(found, bits, 1)
        return found > 0

    @property
    def num_blocks(self) -> int:
        """Blocks that pods have, each counted for every pod that has it; with what `tidy` still has to remove."""
        return self._total

    @property
    def pods(self) -> list[str]:
        """Those that have reported something."""
        return list(self._pods)

    @property
    def cut_pods(self) -> list[str]:
        """Those of which blocks are left out."""
        return [name for name, pod in self._pods.items() if pod.cut]

    def prefix_of(self, token_ids: Sequence[int], media_spans: Sequence[MediaSpan], root: bytes) -> Prefix:
        """Identities of a prompt's first blocks in every size in which a pod has any; none while no pod has any. They are computed as far
        as a pod has them.
        """
        return {size: LeadingIdentities(token_ids, media_spans, root, size) for size in self._sizes}

    def slot(self, name: str) -> int:
        """A pod's place in what `cached_tokens` returns."""
        pod = self._pods.get(name)
        return NOWHERE if pod is None else pod.slot

    def cached_tokens(self, prefix: Prefix) -> npt.NDArray[np.float64]:
        """[slots]: how many of a prompt's first tokens each pod has, without a gap from the first one on."""
        tokens = np.zeros(self._num_slots)
        for size, identities in prefix.items():
            if (blocks := self._sizes.get(size)) is None:
                continue
            having, depth, last = blocks.pods, 0, blocks.pods
            for depth, pods in enumerate(map(blocks.pods_with.get, identities, repeat(0)), start=1):
                if pods is last:
                    continue
                last, left = pods, having & pods
                if left != having:
                    if depth > 1:
                        _set(tokens, having ^ left, (depth - 1) * size)
                    having = left
                    if not left:
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
