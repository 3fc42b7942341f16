"""One ragged batch: the KV slots that its tokens write and attend to. Built once per step, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from mmd_workers.engine.cpu.library import StepStruct
from mmd_workers.engine.memory.kv_pool import KvPool
from mmd_workers.engine.pieces import Work


def _to(device: torch.device, values: list[int] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(slots=True)
class Chunk:
    """Rows [start, end) of the batch: tokens [past, past + end - start) of one sequence, attending to `slots`
    [past + rows]."""

    start: int
    end: int
    past: int
    slots: torch.Tensor
    atomic_ranges: list[tuple[int, int]]


class Batch:
    """A batch has single rows first (`num_single`, see `Work.is_single`), then chunks. Layers share one mask per window.

    `write_slots`: int64 [rows]. `block_table`: int32 [sequences, blocks], `context_lengths` and `query_starts` (cumulative): int32, over
    singles and chunks in row order.
    """

    def __init__(self, pool: KvPool, work: Items[Work]) -> None:
        """`work` is in row order; single rows come first."""
        self.pool = pool
        device = pool.device
        lengths = [item.end - item.start for item in work]
        self.num_single = sum(item.is_single for item in work)
        self.num_rows = sum(lengths)
        slots: list[int] = []
        starts = [0]
        for item, length in zip(work, lengths, strict=True):
            slots += pool.slots(item.sequence.blocks, item.start, item.end)
            starts.append(starts[-1] + length)
        self.write_slots = _to(device, slots, torch.int64)
        self.query_starts = _to(device, starts, torch.int32)
        self.last_rows = [start - 1 for start in starts[1:]]
        self.context_lengths = _to(device, [item.end for item in work], torch.int32)
        columns = -(-max(item.end for item in work) // pool.block_tokens)
        self.block_table = _to(device, [self._table_row(item, columns) for item in work], torch.int32)
        self._work = work
        self._starts = starts
        self._chunks: list[Chunk] | None = None
        self._single_slots: torch.Tensor | None = None
        self._single_masks: dict[int | None, torch.Tensor] = {}
        self._chunk_masks: dict[tuple[int, int | None], torch.Tensor | None] = {}
        self._visible: dict[int | None, torch.Tensor] = {}
        self._step: StepStruct | None = None

    def _table_row(self, item: Work, columns: int) -> list[int]:
        """Return a sequence's blocks. The block of zeros stands for those it no longer holds, and fills the row."""
        zero, sequence = [self.pool.zero_block], item.sequence
        row = zero * sequence.dropped + sequence.blocks[sequence.dropped : columns]
        return row + zero * (columns - len(row))

    def step(self) -> StepStruct:
        """Return this batch in the form that the CPU kernels read."""
        if self._step is None:
            self._step = StepStruct(
                self.num_rows,
                *self.block_table.shape,
                self.query_starts.data_ptr(),
                self.block_table.data_ptr(),
                self.write_slots.data_ptr(),
            )
        return self._step

    @property
    def window(self) -> int | None:
        """Largest window that a layer has requested; None: a layer sees its whole context, or none has made a request."""
        requested = {*self._visible, *self._single_masks, *(window for _, window in self._chunk_masks)}
        windows = [window for window in requested if window is not None]
        return max(windows) if windows and len(windows) == len(requested) else None

    def visible(self, window: int | None) -> torch.Tensor:
        """Return the positions of its sequence's context that each row sees: int32 [rows, 2], first and last + 1.

        It is always one range: the window up to the row's own position, extended to the whole of an atomic range around it.
        """
        ranges = self._visible.get(window)
        if ranges is None:
            rows = torch.cat([torch.arange(item.start, item.end, dtype=torch.int32) for item in self._work])
            first = torch.zeros_like(rows) if window is None else (rows - window + 1).clamp_(min=0)
            ranges = torch.stack((first, rows + 1), dim=1)
            for number, item in enumerate(self._work):
                sequence_ranges = ranges[self._starts[number] : self._starts[number + 1]]
                for start, stop in item.sequence.atomic_ranges:
                    range_rows = sequence_ranges[max(0, start - item.start) : max(0, stop - item.start)]
                    range_rows[:, 0].clamp_(max=start)
                    range_rows[:, 1].clamp_(min=min(stop, item.end))
            self._visible[window] = ranges
        return ranges

    def single_slots(self) -> torch.Tensor:
        """Return the slots of the single rows' contexts, then slots of zeros: int64 [num_single, longest].

        Attention multiplies what a mask excludes by 0, and NaN times 0 is NaN. So it must not read the rest of
        a sequence's last block, where other sequences and rejected drafts have left KV of any value.
        """
        if self._single_slots is None:
            size, device = self.pool.block_tokens, self.pool.device
            longest = max(item.end for item in self._work[: self.num_single])
            table = self.block_table[: self.num_single, : -(-longest // size)].long()
            grid = table[:, :, None] * size + torch.arange(size, device=device)
            slots = grid.flatten(1)[:, :longest]
            within = torch.arange(longest, device=device) < self.context_lengths[: self.num_single, None]
            self._single_slots = torch.where(within, slots, self.pool.zero_block * size)
        return self._single_slots

    def single_mask(self, window: int | None) -> torch.Tensor:
        """Return which of `single_slots` each row sees: bool [num_single, longest]."""
        mask = self._single_masks.get(window)
        if mask is None:
            positions = torch.arange(self.single_slots().shape[1], device=self.pool.device)
            lengths = self.context_lengths[: self.num_single, None]
            mask = positions < lengths
            if window is not None:
                mask = mask & (positions >= lengths - window)
            self._single_masks[window] = mask
        return mask

    def chunks(self) -> list[Chunk]:
        """Return the rows after the singles, one chunk per sequence."""
        if self._chunks is None:
            size, device = self.pool.block_tokens, self.pool.device
            self._chunks = []
            offsets = torch.arange(size, device=device)
            for number in range(self.num_single, len(self._work)):
                item = self._work[number]
                table = self.block_table[number, : -(-item.end // size)].long()
                slots = (table[:, None] * size + offsets).flatten()[: item.end]
                start, end = self._starts[number], self._starts[number + 1]
                self._chunks.append(Chunk(start, end, item.start, slots, item.sequence.atomic_ranges))
        return self._chunks

    def chunk_mask(self, number: int, window: int | None) -> torch.Tensor | None:
        """Return which positions of a chunk's context each of its rows sees: bool [rows, context].

        None: plain causal attention from position 0.
        """
        key = (number, window)
        if key not in self._chunk_masks:
            self._chunk_masks[key] = self._make_chunk_mask(self.chunks()[number], window)
        return self._chunk_masks[key]

    def _make_chunk_mask(self, chunk: Chunk, window: int | None) -> torch.Tensor | None:
        context = chunk.slots.shape[0]
        inner_ranges = [(a, b) for a, b in chunk.atomic_ranges if a < context and b > chunk.past]
        if chunk.past == 0 and not inner_ranges and (window is None or window >= context):
            return None
        device = self.pool.device
        queries = torch.arange(chunk.past, context, device=device)[:, None]
        keys = torch.arange(context, device=device)[None]
        mask = keys <= queries
        if window is not None:
            mask = mask & (keys > queries - window)
        for start, stop in inner_ranges:  # bidirectional inside, whatever the window
            mask = mask | ((queries >= start) & (queries < stop) & (keys >= start) & (keys < stop))
        return mask
