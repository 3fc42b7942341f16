"""KV that is divided among ranks: each holds some layers, those of its stage, and of these some heads. Pods exchange that of the whole
model, so ranks and stages may be divided otherwise in the pod that receives it.

What moves passes through the memory of the pod's main process, a bounded number of bytes at a time.
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

CALL_SECONDS = 30.0  # liveness gives a pod a minute
CALL_BYTES = 64 * 2**20  # that one call moves; each rank is given all that is written


class Kv(Protocol):
    """The KV pool of a pod."""

    @property
    def layout(self) -> KvLayout:
        """Of the whole model."""
        ...

    def read(self, block_ids: list[int], start: int, end: int) -> list[torch.Tensor]:
        """KV of tokens [start, end) of a sequence whose blocks these are, for each layer [2, tokens, kv_heads, head_dim]; copies."""
        ...

    def write(self, block_ids: list[int], start: int, tensors: list[torch.Tensor]) -> None:
        """Write KV of the tokens from `start` on to a sequence's blocks."""
        ...

    def clear(self, block_ids: list[int]) -> None:
        """Zero blocks."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a rank's KV is in that of the model. `layout`: of all heads of the stage's layers. `first`: no rank before it in its stage
    has the same heads."""

    stage: int
    number: int
    first: bool
    layout: KvLayout


class KvShare:
    """The KV of one rank; lives in its process."""

    def __init__(
        self, pages: PagedKv, *, total_heads: int, stage: int, number: int, ranks_of_stage: int
    ) -> None:
        """`total_heads`: of each layer, of which several ranks share one if there are more ranks. `number`: of this rank in its stage.

        Raises:
            UnsupportedModelError: a layer has another number.
        """
        self._pages = pages
        sharing = max(1, ranks_of_stage // max(1, total_heads))
        self._share, parts = number // sharing, ranks_of_stage // sharing
        own = pages.layout
        heads = [count * parts for count in own.num_kv_heads]
        if set(heads) != {total_heads}:
            raise UnsupportedModelError(
                "spec.model.id: layers of this model have different numbers of KV heads, and ranks cannot tell which of them share one; omit "
                "spec.prefill, or set tensorParallelSize: 1"
            )
        layout = KvLayout(own.num_layers, heads, own.head_dim, own.dtype)
        self.place = Place(stage, number, number % sharing == 0, layout)

    def read(self, block_ids: list[int], start: int, end: int) -> list[torch.Tensor]:
        """This rank's heads, on the CPU; nothing if another rank has the same."""
        if not self.place.first:
            return []
        return [tensor.cpu() for tensor in self._pages.read(block_ids, start, end)]

    def write(self, block_ids: list[int], start: int, tensors: list[list[torch.Tensor]]) -> None:
        """Take this rank's heads from what is written to the layers of each stage."""
        layers = zip(tensors[self.place.stage], self._pages.layers, strict=True)
        own = [
            tensor.narrow(2, self._share * layer.num_kv_heads, layer.num_kv_heads) for tensor, layer in layers
        ]
        self._pages.write(block_ids, start, own)

    def clear(self, block_ids: list[int]) -> None:
        """Zero blocks."""
        self._pages.clear(block_ids)


class RankedKv:
    """The KV of all ranks of an executor, each of which has opened its own."""

    def __init__(self, executor: Any, block_tokens: int, device: torch.device) -> None:
        """`device`: where what is read goes."""
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
        """As `Kv.read`."""
        read = empty_range(self.layout, end - start, self._device)
        for first in range(start, end, self._call_tokens):
            last = min(end, first + self._call_tokens)
            found = self._call("read_kv", block_ids, first, last)
            by_layer = (zip(*(found[rank] for rank in ranks), strict=True) for ranks in self._stages)
            for target, heads in zip(read, chain.from_iterable(by_layer), strict=True):
                target[:, first - start : last - start] = torch.cat(heads, dim=2)
        return read

    def write(self, block_ids: list[int], start: int, tensors: list[torch.Tensor]) -> None:
        """As `Kv.write`."""
        count = tensors[0].shape[1]
        for first in range(0, count, self._call_tokens):
            size = min(self._call_tokens, count - first)
            left = iter(tensor.narrow(1, first, size).contiguous().cpu() for tensor in tensors)
            stages = [[next(left) for _ in range(layers)] for layers in self._layers]
            self._call("write_kv", block_ids, start + first, stages)

    def clear(self, block_ids: list[int]) -> None:
        """As `Kv.clear`."""
        self._call("clear_kv", block_ids)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """What each rank answers. If one fails or is late, all end: the answers that remain would be taken for those to the next call.

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
            executor.has_lost_a_rank()  # which is a better reason, and reported by then
            why = f"{method} failed in a rank of vLLM: {reason(error)}"
            executor.fail(why)
            raise EngineDeadError(f"{why}; the pod restarts") from error
        if not answers:  # they were ended meanwhile
            raise EngineDeadError("the ranks of vLLM have ended; the pod restarts")
        return answers
