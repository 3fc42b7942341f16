"""KV sharded across ranks by layer (pipeline stage) and head (tensor parallel).

Pods exchange the KV of the whole model, so the receiving pod may have other ranks and stages. KV that moves
passes through the memory of the pod's main process, a bounded number of bytes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Protocol

import torch

from mmd_api.contract.errors import EngineDeadError, UnsupportedModelError
from mmd_workers.kv.chunks import empty_range
from mmd_workers.model.prompt import KvLayout
from mmd_workers.vllm_engine.kv import PagedKv, one_dtype
from mmd_workers.vllm_engine.reasons import reason

CALL_SECONDS = 30.0  # the liveness probe allows a pod a minute
CALL_BYTES = 64 * 2**20  # most bytes that one call moves; a write passes all of them to each rank


class Kv(Protocol):
    """The KV pool of a pod."""

    @property
    def layout(self) -> KvLayout:
        """Layout of the whole model's KV."""
        ...

    def read(self, block_ids: list[int], start: int, end: int) -> list[torch.Tensor]:
        """Copy the KV of tokens [start, end) of a sequence with these blocks: [2, tokens, kv_heads, head_dim] per layer."""
        ...

    def write(self, block_ids: list[int], start: int, tensors: list[torch.Tensor]) -> None:
        """Write the KV of the tokens from `start` on to a sequence's blocks."""
        ...

    def clear(self, block_ids: list[int]) -> None:
        """Zero blocks."""
        ...


@dataclass(frozen=True)
class Place:
    """Place of a rank's KV in the model's.

    `number`: index of the rank in its stage. `first`: no earlier rank of the stage has the same heads.
    `layout`: layout of all heads of the stage's layers.
    """

    stage: int
    number: int
    first: bool
    layout: KvLayout


class KvShare:
    """KV of one rank, in the rank's process."""

    def __init__(
        self, pages: PagedKv, *, total_heads: int, stage: int, number: int, ranks_of_stage: int
    ) -> None:
        """`total_heads`: heads of each layer; if there are more ranks, several share a head. `number`: index
        of the rank in its stage.

        Raises:
            UnsupportedModelError: a layer has another number of heads.
        """
        self._pages = pages
        sharing = max(1, ranks_of_stage // max(1, total_heads))
        self._share, parts = number // sharing, ranks_of_stage // sharing
        own_layout = pages.layout
        heads = [count * parts for count in own_layout.num_kv_heads]
        if set(heads) != {total_heads}:
            raise UnsupportedModelError(
                "spec.model.id: layers of this model have different numbers of KV heads, and ranks cannot tell which of them share one; omit "
                "spec.prefill, or set tensorParallelSize: 1"
            )
        layout = KvLayout(own_layout.num_layers, heads, own_layout.head_dim, own_layout.dtype)
        self.place = Place(stage, number, number % sharing == 0, layout)

    def read(self, block_ids: list[int], start: int, end: int) -> list[torch.Tensor]:
        """Read this rank's heads to the CPU. Returns nothing if an earlier rank has the same heads."""
        if not self.place.first:
            return []
        return [tensor.cpu() for tensor in self._pages.read(block_ids, start, end)]

    def write(self, block_ids: list[int], start: int, tensors: list[list[torch.Tensor]]) -> None:
        """Write this rank's heads, out of KV for all heads of each stage's layers."""
        layers = zip(tensors[self.place.stage], self._pages.layers, strict=True)
        own_tensors = [
            tensor.narrow(2, self._share * layer.num_kv_heads, layer.num_kv_heads) for tensor, layer in layers
        ]
        self._pages.write(block_ids, start, own_tensors)

    def clear(self, block_ids: list[int]) -> None:
        """Zero blocks."""
        self._pages.clear(block_ids)


class RankedKv:
    """KV of all ranks of an executor. Each rank opens its own share."""

    def __init__(self, executor: Any, block_tokens: int, device: torch.device) -> None:
        """`device`: device to which KV is read."""
        self._executor, self._device = executor, device
        places: list[Place] = self._call("open_kv", block_tokens)
        owners = sorted(
            (rank for rank, place in enumerate(places) if place.first),
            key=lambda rank: (places[rank].stage, places[rank].number),
        )
        self._stages = [list(ranks) for _, ranks in groupby(owners, lambda rank: places[rank].stage)]
        layouts = [places[ranks[0]].layout for ranks in self._stages]
        self._layers = [layout.num_layers for layout in layouts]
        self.layout = KvLayout(
            sum(self._layers),
            list(chain.from_iterable(layout.num_kv_heads for layout in layouts)),
            list(chain.from_iterable(layout.head_dim for layout in layouts)),
            one_dtype(layout.dtype for layout in layouts),
        )
        self._call_tokens = max(1, CALL_BYTES // self.layout.bytes_per_token())

    def read(self, block_ids: list[int], start: int, end: int) -> list[torch.Tensor]:
        """Implement `Kv.read`."""
        read = empty_range(self.layout, end - start, self._device)
        for first in range(start, end, self._call_tokens):
            last = min(end, first + self._call_tokens)
            by_rank = self._call("read_kv", block_ids, first, last)
            by_layer = (zip(*(by_rank[rank] for rank in ranks), strict=True) for ranks in self._stages)
            for target, heads in zip(read, chain.from_iterable(by_layer), strict=True):
                target[:, first - start : last - start] = torch.cat(heads, dim=2)
        return read

    def write(self, block_ids: list[int], start: int, tensors: list[torch.Tensor]) -> None:
        """Implement `Kv.write`."""
        count = tensors[0].shape[1]
        for first in range(0, count, self._call_tokens):
            size = min(self._call_tokens, count - first)
            parts = iter(tensor.narrow(1, first, size).contiguous().cpu() for tensor in tensors)
            stages = [[next(parts) for _ in range(layers)] for layers in self._layers]
            self._call("write_kv", block_ids, start + first, stages)

    def clear(self, block_ids: list[int]) -> None:
        """Implement `Kv.clear`."""
        self._call("clear_kv", block_ids)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on each rank, and return the answers.

        If a rank fails or is late, all ranks end: remaining answers would be taken for those to the next call.

        Raises:
            EngineDeadError: a rank has failed, or has ended before.
        """
        executor = self._executor
        if executor.is_failed:
            raise EngineDeadError("the ranks of vLLM have ended; the pod restarts")
        try:
            answers: list[Any] = executor.collective_rpc(method, CALL_SECONDS, arguments)
        except TimeoutError as error:
            why = f"a rank of vLLM did not answer for {CALL_SECONDS:.0f} s ({method})"
            executor.fail(why)
            raise EngineDeadError(f"{why}; the pod restarts") from error
        except Exception as error:
            executor.has_lost_a_rank()  # a lost rank is a better reason, and is reported by now
            why = f"{method} failed in a rank of vLLM: {reason(error)}"
            executor.fail(why)
            raise EngineDeadError(f"{why}; the pod restarts") from error
        if not answers:  # they were ended meanwhile
            raise EngineDeadError("the ranks of vLLM have ended; the pod restarts")
        return answers
