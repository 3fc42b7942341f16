"""Which heads and layers of KV are where: ranks and backends that stand in for vLLM's, so that every division can be had."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mmd_api.contract.errors import EngineDeadError, UnsupportedModelError
from mmd_workers.model.prompt import KvLayout
from mmd_workers.sequences.links import device_of_kv
from mmd_workers.vllm_engine.kv import PagedKv
from mmd_workers.vllm_engine.ranks import kv_of_ranks
from mmd_workers.vllm_engine.ranks.kv_of_ranks import KvShare, RankedKv

from . import cores


class Backend:
    """An attention layer whose backend has its heads outermost, K and V of a token side by side, and perhaps 8 bits for a number."""

    head_size = 8
    _k_scale_float, _v_scale_float = 0.37, 1.9

    def __init__(self, dtype: torch.dtype, blocks: int, heads: int = 2) -> None:
        self.kv_cache_dtype = "fp8_e5m2" if dtype == torch.float8_e5m2 else "fp8_e4m3"
        self.num_kv_heads = heads
        self._dtype = dtype
        stored = torch.uint8 if dtype.itemsize == 1 else dtype
        self.kv_cache = torch.zeros(blocks, heads, cores.BLOCK, 2 * self.head_size, dtype=stored)
        self.impl = self

    def do_kv_cache_update(
        self, layer: Backend, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        written = torch.cat([k, v], -1)
        if cache.dtype == torch.uint8:
            scaled = torch.cat([k / layer._k_scale_float, v / layer._v_scale_float], -1)
            written = scaled.to(self._dtype).view(torch.uint8)
        for token, slot in zip(written, slots.tolist(), strict=True):
            cache[slot // cores.BLOCK, :, slot % cores.BLOCK] = token


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_bytes_of_kv_in_8_bits_move_unchanged_whatever_the_scales(dtype: torch.dtype) -> None:
    first, second = Backend(dtype, 6), Backend(dtype, 6)
    source, target = (PagedKv({"layer": layer}, cores.BLOCK) for layer in (first, second))
    k, v = torch.randn(2, 3 * cores.BLOCK, 2, 8).bfloat16()
    blocks, others = [4, 1, 3], [0, 5, 2]
    slots = torch.tensor([block * cores.BLOCK + n for block in blocks for n in range(cores.BLOCK)])
    first.do_kv_cache_update(first, k, v, first.kv_cache, slots)
    assert source.layout == target.layout
    assert source.layout.dtype == "uint8"
    for start, end in ((0, 7), (7, 40), (40, 3 * cores.BLOCK)):
        target.write(others, start, source.read(blocks, start, end))
    assert torch.equal(second.kv_cache[others], first.kv_cache[blocks])


class Transposed(Backend):
    """Blocks with the tokens outermost, as a backend has them that shows its pool with other axes than it has."""

    def __init__(self, dtype: torch.dtype, blocks: int, heads: int = 2) -> None:
        super().__init__(dtype, blocks, heads)
        pool = torch.zeros(blocks, cores.BLOCK, heads, 2 * self.head_size, dtype=dtype)
        self.kv_cache = pool.transpose(1, 2)


class Shuffled(Backend):
    """Blocks whose elements are packed in an order of their own."""

    def do_kv_cache_update(
        self, layer: Backend, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        whole = torch.zeros_like(cache)
        super().do_kv_cache_update(layer, k, v, whole, slots)
        order = torch.randperm(cache[0].numel(), generator=torch.Generator().manual_seed(1))
        for block in set((slots // cores.BLOCK).tolist()):
            cache[block].view(-1)[order] = whole[block].flatten()


@pytest.mark.parametrize(("kind", "views"), [(Backend, True), (Transposed, True), (Shuffled, False)])
def test_kv_moves_between_blocks_however_a_backend_arranges_them(kind: type[Backend], views: bool) -> None:
    blocks, others = [4, 1, 3], [0, 5, 2]
    k, v = torch.randn(2, 3 * cores.BLOCK, 2, 8)
    slots = torch.tensor([block * cores.BLOCK + n for block in blocks for n in range(cores.BLOCK)])
    layers = kind(torch.float32, 6), Backend(torch.float32, 6)
    layers[0].do_kv_cache_update(layers[0], k, v, layers[0].kv_cache, slots)
    source, target = (PagedKv({"layer": layer}, cores.BLOCK) for layer in layers)
    assert (source._views[0] is not None) == views
    for start, end in ((0, 7), (7, 40), (40, 3 * cores.BLOCK)):
        (read,) = source.read(blocks, start, end)
        assert torch.equal(read, torch.stack([k[start:end], v[start:end]]))
        target.write(others, start, [read])
    (moved,) = target.read(others, 0, 3 * cores.BLOCK)
    assert torch.equal(moved, torch.stack([k, v]))
    source.write(blocks, 5, [read := torch.randn(2, 50, 2, 8)])
    assert torch.equal(source.read(blocks, 5, 55)[0], read)
    assert torch.equal(source.read(blocks, 0, 5)[0], torch.stack([k[:5], v[:5]]))
    assert torch.equal(source.read(blocks, 55, 96)[0], torch.stack([k[55:], v[55:]]))


class Ranks:
    """Ranks in this process, as an executor has them: two layers of each stage in pools of six blocks. `broken`: what calls raise."""

    is_failed = False
    broken: Exception | None = None

    def __init__(self, heads: int, ranks: int, stages: int) -> None:
        self.lost: list[str] = []
        own = max(1, heads // ranks)
        self.layers = [[Backend(torch.float32, 6, own) for _ in range(2)] for _ in range(stages * ranks)]
        self.shares = [
            KvShare(
                PagedKv(dict(enumerate(layers)), cores.BLOCK),
                total_heads=heads,
                stage=rank // ranks,
                number=rank % ranks,
                ranks_of_stage=ranks,
            )
            for rank, layers in enumerate(self.layers)
        ]

    def collective_rpc(self, method: str, timeout: float, arguments: tuple[Any, ...]) -> list[Any]:
        if self.broken is not None:
            raise self.broken
        if method == "open_kv":
            return [share.place for share in self.shares]
        return [getattr(share, method.removesuffix("_kv"))(*arguments) for share in self.shares]

    def has_lost_a_rank(self) -> bool:
        return False

    def fail(self, words: str) -> None:
        self.is_failed = True
        self.lost.append(words)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("heads", "ranks"), [(1, 2), (2, 4), (4, 2), (2, 8), (8, 8)])
def test_each_rank_writes_its_own_heads_and_all_are_read(
    heads: int, ranks: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_of_ranks, "CALL_BYTES", 10_000)  # less than is moved
    executor = Ranks(heads, ranks, stages)
    kv = RankedKv(executor, cores.BLOCK, torch.device("cpu"))
    assert kv.layout == KvLayout(2 * stages, [heads] * 2 * stages, [8] * 2 * stages, "float32")
    blocks, start, count = [4, 1, 3], 5, 2 * cores.BLOCK + 9
    given = [torch.randn(2, count, heads, 8) for _ in range(2 * stages)]
    kv.write(blocks, start, given)
    rows = torch.arange(start, start + count)
    written = torch.tensor(blocks)[rows // cores.BLOCK], slice(None), rows % cores.BLOCK
    for rank, layers in enumerate(executor.layers):
        first = rank % ranks * heads // ranks
        for of_stage, layer in enumerate(layers):
            k, v = given[2 * (rank // ranks) + of_stage][:, :, first : first + max(1, heads // ranks)]
            assert torch.equal(layer.kv_cache[written], torch.cat([k, v], -1))
    read = kv.read(blocks, start, start + count)
    assert all(torch.equal(one, other) for one, other in zip(read, given, strict=True))
    kv.clear(blocks)
    assert not any(tensor.any() for tensor in kv.read(blocks, 0, 3 * cores.BLOCK))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (RuntimeError("Worker failed with error 'out of memory'"), "read_kv failed in a rank of vLLM: "),
        (TimeoutError("timed out"), "a rank of vLLM did not answer for 30 s (read_kv)"),
    ],
    ids=["fails", "is late"],
)
def test_a_call_that_fails_in_one_rank_ends_all(broken: Exception, words: str) -> None:
    """Later answers would be out of step."""
    executor = Ranks(2, 2, 1)
    kv = RankedKv(executor, cores.BLOCK, torch.device("cpu"))
    executor.broken = broken
    with pytest.raises(EngineDeadError, match=re.escape(words)):
        kv.read([0], 0, 3)
    executor.broken = None
    with pytest.raises(EngineDeadError, match="have ended"):
        kv.read([0], 0, 3)
    (reported,) = executor.lost
    assert reported.startswith(words)


def test_layers_that_differ_in_heads_are_refused_where_ranks_divide_them() -> None:
    layers = {"a": Backend(torch.float32, 1, 1), "b": Backend(torch.float32, 1, 2)}
    with pytest.raises(UnsupportedModelError, match="different numbers of KV heads"):
        KvShare(PagedKv(layers, cores.BLOCK), total_heads=2, stage=0, number=0, ranks_of_stage=2)


def test_layers_that_differ_in_their_data_type_are_refused() -> None:
    layers = {"a": Backend(torch.bfloat16, 1), "b": Backend(torch.float8_e4m3fn, 1)}
    with pytest.raises(UnsupportedModelError, match="bfloat16, uint8"):
        _ = PagedKv(layers, cores.BLOCK).layout


@pytest.mark.parametrize(
    ("ranks", "backend", "device"),
    [(1, "Gloo", "cuda"), (2, "Gloo", "cpu"), (2, "Nixl", "cuda")],
)
def test_kv_of_ranks_stays_on_the_host_where_gloo_reads_it(
    ranks: int, backend: str, device: str, tmp_path: Path
) -> None:
    pod = cores.pod_of(tmp_path, vllm={"tensorParallelSize": ranks}, moves=True, kv_backend=backend)
    assert device_of_kv(pod, torch.device("cuda")).type == device
