"""The pods that requests may be sent to, as columns of numbers. Each pod has a row, and heartbeats update it. Pure.

A decision looks at all pods, so their figures are in arrays. A heartbeat changes one column. When pods come, leave or change state, all
arrays are rebuilt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import is_not

import numpy as np
import numpy.typing as npt

from mmd_api.contract.pools import MODALITIES
from mmd_workers.wire.messages.every_pod import Heartbeat

Figures = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
DEFAULT_PREFILL_TOKENS_PER_SECOND = 2000.0  # until a pod has measured its own rate
DEFAULT_STEP_SECONDS = 0.02
LEAST_STEP_SECONDS = 0.001
UNKNOWN_NODE = -1
COMPARED_AT_ONCE = 50  # heartbeats per comparison


class Rows:
    """Pods that hold a role. `nodes`: numbers of their machines; pods with the same number share one."""

    def __init__(self, beats: Sequence[Heartbeat], node_numbers: dict[str, int]) -> None:
        self.names = [beat.pod for beat in beats]
        self.row_of = {name: row for row, name in enumerate(self.names)}
        self.nodes = np.array([node_numbers.get(beat.node, UNKNOWN_NODE) for beat in beats], dtype=np.int64)
        self.own_tokens = np.zeros(len(beats))  # placements by this gateway that no heartbeat includes yet
        self.own_requests = np.zeros(len(beats))
        self.beats = list(beats)

    def __len__(self) -> int:
        return len(self.names)

    def flags(self, names: frozenset[str]) -> Flags:
        """True for the pods with these names, as an array [rows]."""
        flags = np.zeros(len(self), dtype=np.bool_)
        for name in names:
            if (row := self.row_of.get(name)) is not None:
                flags[row] = True
        return flags


class KvRows(Rows):
    """Pods with a KV pool, and the figures that decide whether a request fits."""

    def __init__(self, beats: Sequence[Heartbeat], node_numbers: dict[str, int]) -> None:
        super().__init__(beats, node_numbers)
        self.also_prefills = np.array(["prefill" in beat.roles for beat in beats], dtype=np.bool_)
        self.also_decodes = np.array(["decode" in beat.roles for beat in beats], dtype=np.bool_)
        self.longest = np.array([float(beat.max_model_len or np.inf) for beat in beats])
        self._columns: Figures = np.zeros((12, len(beats)))
        for row, beat in enumerate(beats):
            self.set(row, beat)

    def set(self, row: int, beat: Heartbeat) -> None:
        """Update a row from a heartbeat."""
        load = beat.load
        blocks = load.kv_blocks_total if load.kv_block_tokens else 0
        kv_tokens = blocks * load.kv_block_tokens
        self.beats[row] = beat
        self._columns[:, row] = (
            load.prefill_waiting_tokens,
            load.prefill_tokens_per_second or DEFAULT_PREFILL_TOKENS_PER_SECOND,
            load.prefill_waiting_requests,
            load.decode_running,
            load.decode_waiting,
            max(load.decode_max_sequences, 1),
            load.itl_seconds,
            # Infinite if any pair of sequences fits.
            kv_tokens if 0 < kv_tokens < 2 * self.longest[row] else np.inf,
            # Blocks in use; without a pool -inf, so that the batch alone counts as busy.
            blocks - load.kv_blocks_free if blocks else -np.inf,
            load.kv_block_tokens or 1,
            max(blocks, 1),
            load.prefill_blocked_tokens,
        )

    @property
    def waiting_tokens(self) -> Figures:
        """Prompt tokens that wait for prefill, as an array [rows]."""
        column: Figures = self._columns[0]
        return column

    @property
    def blocked_tokens(self) -> Figures:
        """Waiting tokens of prompts that wait for their media, as an array [rows]. The pod cannot work on them meanwhile."""
        column: Figures = self._columns[11]
        return column

    @property
    def tokens_per_second(self) -> Figures:
        """Prefill throughput, as an array [rows]."""
        column: Figures = self._columns[1]
        return column

    @property
    def waiting_requests(self) -> Figures:
        """Requests that wait for prefill, as an array [rows]."""
        column: Figures = self._columns[2]
        return column

    def needed_tokens(self, num_tokens: int, max_tokens: int, companion_tokens: int) -> Figures:
        """Tokens whose KV the pod must hold at the end, as an array [rows].

        A pod that decodes holds prompt and output, any other the prompt and the first token. A companion needs as much again;
        `companion_tokens` is 0 if there is none.
        """
        new_tokens = np.where(self.also_decodes, max_tokens, 1)
        needed: Figures = np.minimum(num_tokens + new_tokens, self.longest)
        if companion_tokens:
            needed = needed + np.minimum(companion_tokens + new_tokens, self.longest)
        return needed

    def fits(self, num_tokens: int, max_tokens: int, companion_tokens: int) -> Flags:
        """True where the pod could hold the request if it were idle, as an array [rows]; True for pods that have not reported their pool."""
        fitting: Flags = self.needed_tokens(num_tokens, max_tokens, companion_tokens) <= self._columns[7]
        return fitting

    def decode_waits(self, own_decodes: Figures) -> Figures:
        """Seconds lost to sequences without a place in the batch, one step each, as an array [rows].

        `own_decodes`: placements by this gateway that no heartbeat includes yet, as an array [rows].
        """
        _, _, _, running, waiting, places, step, *_ = self._columns
        unplaced = np.maximum(0.0, running + own_decodes - places)
        seconds: Figures = (waiting + unplaced) * np.maximum(step, LEAST_STEP_SECONDS)
        return seconds

    def busy(self) -> Figures:
        """Share in use of the batch or the KV pool, whichever is fuller, as an array [rows]. Reserved blocks are not free."""
        _, _, _, running, waiting, places, _, _, used, block_tokens, blocks, _ = self._columns
        batch = (running + waiting + self.own_requests) / places
        fuller: Figures = np.maximum(batch, (used + self.own_tokens / block_tokens) / blocks)
        return fuller

    def step_seconds(self) -> Figures:
        """Seconds between two tokens of a sequence, as an array [rows]."""
        step = self._columns[6]
        return np.where(step > 0, step, DEFAULT_STEP_SECONDS)


class EncodeRows(Rows):
    """Pods that encode, with queued work and throughput by modality."""

    def __init__(self, beats: Sequence[Heartbeat], node_numbers: dict[str, int]) -> None:
        super().__init__(beats, node_numbers)
        self.queued = np.zeros((len(MODALITIES), len(beats)))
        self.work_per_second = np.zeros((len(MODALITIES), len(beats)))
        for row, beat in enumerate(beats):
            self.set(row, beat)

    def set(self, row: int, beat: Heartbeat) -> None:
        """Update a row from a heartbeat."""
        self.beats[row] = beat
        for number, modality in enumerate(MODALITIES):
            self.queued[number, row] = beat.load.encode_queued_work.get(modality, 0)
            self.work_per_second[number, row] = beat.load.encode_work_per_second.get(modality, 0.0)


class Fleet:
    """The ready pods of one revision, by role. A pod may be in several tables.

    `takers`: decode pods that compute prompts themselves. Their own placements are prompts.
    """

    def __init__(self, revision: str) -> None:
        self._revision = revision
        self._beats: Sequence[Heartbeat] = ()
        self.version = 0  # changes when rows are rebuilt
        self._make(())

    def update(self, beats: Sequence[Heartbeat]) -> list[Heartbeat]:
        """Take the newest heartbeats; return those that are new."""
        before = self._beats
        if len(before) != len(beats):
            return self._renew(beats)
        changed = _places_of_others(beats, before)
        if not changed:
            return []
        if any(_kind(beats[place]) != _kind(before[place]) for place in changed):
            return self._renew(beats)
        for place in changed:
            self._set(beats[place])
        self._beats = list(beats)
        return [beats[place] for place in changed]

    def has(self, pod: str) -> bool:
        """True if a pod of this name, in any state, was among the newest heartbeats."""
        return pod in self._names

    def _renew(self, beats: Sequence[Heartbeat]) -> list[Heartbeat]:
        old, self._beats = set(map(id, self._beats)), list(beats)
        self._make(beats)
        return [beat for beat in beats if id(beat) not in old]

    def _make(self, beats: Sequence[Heartbeat]) -> None:
        self.version += 1
        self._names = {beat.pod for beat in beats}
        routable = [beat for beat in beats if beat.state == "ready" and beat.revision == self._revision]
        numbers = {
            node: number for number, node in enumerate(sorted({beat.node for beat in routable if beat.node}))
        }
        self.num_nodes = len(numbers)
        self.prefill = KvRows([beat for beat in routable if "prefill" in beat.roles], numbers)
        self.decode = KvRows([beat for beat in routable if "decode" in beat.roles], numbers)
        self.takers = KvRows([beat for beat in self.decode.beats if beat.takes_prompts], numbers)
        self.decode_row_of_taker = np.array(
            [self.decode.row_of[name] for name in self.takers.names], dtype=np.int64
        )
        order = np.argsort(self.decode.nodes, kind="stable")
        nodes, starts = np.unique(self.decode.nodes[order], return_index=True)
        # Rows grouped by node, where each group begins, and the node of each group.
        self.decode_by_node = order, starts, nodes
        self.encoders = EncodeRows([beat for beat in routable if beat.roles == ["encode"]], numbers)
        prefill = self.prefill.beats
        self.encodes_all = np.array(["encode" in beat.roles for beat in prefill], dtype=np.bool_)
        self.encodes_small_media = np.array([beat.encodes_small_media for beat in prefill], dtype=np.bool_)
        self.has_towers = bool(self.encodes_all.any() or self.encodes_small_media.any())
        self.local_encoders = EncodeRows(prefill if self.has_towers else (), numbers)
        self.decode_row_of_prefill = np.array(
            [self.decode.row_of.get(name, 0) for name in self.prefill.names], dtype=np.int64
        )

    def _set(self, beat: Heartbeat) -> None:
        for rows in (self.prefill, self.decode, self.takers, self.encoders, self.local_encoders):
            if (row := rows.row_of.get(beat.pod)) is not None:
                rows.set(row, beat)


def _places_of_others(beats: Sequence[Heartbeat], before: Sequence[Heartbeat]) -> list[int]:
    """The positions at which heartbeats have changed.

    Most parts have no changes. Comparing lists of the same objects is much faster than comparing the objects one by one.
    """
    places: list[int] = []
    for begin in range(0, len(beats), COMPARED_AT_ONCE):
        end = begin + COMPARED_AT_ONCE
        new, old = beats[begin:end], before[begin:end]
        if new != old:
            places += compress(range(begin, end), map(is_not, new, old))
    return places


def _kind(beat: Heartbeat) -> tuple[object, ...]:
    """The facts about a pod that rows and tables depend on."""
    return (
        *(beat.pod, beat.roles, beat.state, beat.revision, beat.max_model_len, beat.node),
        *(beat.takes_prompts, beat.encodes_small_media),
    )
