"""KV that is divided among ranks: each holds some layers, those of its stage, and of these some heads. Pods exchange that of the whole
model, so ranks and stages may be divided otherwise in the pod that receives it.

What moves passes through the memory of the pod's main process.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from mmd_workers.model.prompt import KvLayout
from mmd_workers.vllm_engine.kv import PagedKv

CALL_SECONDS = 120.0


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
        """`total_heads`: of the model, of which several ranks share one if there are more ranks. `number`: of this rank in its stage."""
        self._pages = pages
        sharing = max(1, ranks_of_stage // total_heads)
        self._share, parts = number // sharing, ranks_of_stage // sharing
        own = pages.layout
        heads = [count * parts for count in own.num_kv_heads]
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
        self._stages = [
            [rank for rank, place in enumerate(places) if place.stage == stage and place.first]
            for stage in sorted({place.stage for place in places})
        ]
        for ranks in self._stages:
            ranks.sort(key=lambda rank: places[rank].number)
        layouts = [places[ranks[0]].layout for ranks in self._stages]
        self._layers = [layout.num_layers for layout in layouts]
        self.layout = KvLayout(
            sum(self._layers),
            list(chain.from_iterable(layout.num_kv_heads for layout in layouts)),
            list(chain.from_iterable(layout.head_dim for layout in layouts)),
            layouts[0].dtype,
        )

    def read(self, block_ids: list[int], start: int, end: int) -> list[torch.Tensor]:
        """As `Kv.read`."""
        found = self._call("read_kv", block_ids, start, end)
        by_layer = (zip(*(found[rank] for rank in ranks), strict=True) for ranks in self._stages)
        return [torch.cat(heads, dim=2).to(self._device) for heads in chain.from_iterable(by_layer)]

    def write(self, block_ids: list[int], start: int, tensors: list[torch.Tensor]) -> None:
        """As `Kv.write`."""
        left = iter(tensor.cpu() for tensor in tensors)
        self._call("write_kv", block_ids, start, [[next(left) for _ in range(n)] for n in self._layers])

    def clear(self, block_ids: list[int]) -> None:
        """As `Kv.clear`."""
        self._call("clear_kv", block_ids)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """What each rank answers. One that does not in time has failed: its late answer would be taken for that to the next call.

        Raises:
            RuntimeError: a rank has failed.
        """
        try:
            answers: list[Any] = self._executor.collective_rpc(method, CALL_SECONDS, arguments)
        except TimeoutError as error:
            self._executor.fail(f"a rank of vLLM did not answer for {CALL_SECONDS:.0f} s")
            raise RuntimeError(str(error)) from error
        return answers
