"""KV that moves between engines that hold it differently: whole, split across ranks, divided into stages, in 8 bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

from mmd_api.contract.errors import EngineDeadError
from mmd_cli.local.pods import free_port
from support.oracles import model_zoo as zoo

from . import cores
from .cores import Question

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]
RANKS, STAGES = {"tensorParallelSize": 2}, {"pipelineParallelSize": 2}
LONG = "how many red squares move to the left? " * 4
Maker = Callable[..., Any]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cores.checkpoint("llava", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def asked(llava: Path) -> Question:
    """A prompt of several chunks with an image in it."""
    return cores.question(llava, LONG, zoo.image(100, 64, 1), LONG)


@pytest.fixture(scope="module")
def made() -> Iterator[Maker]:
    """Makes cores of pods whose KV moves, each kind once, and ends them."""
    found: dict[str, Any] = {}

    def make(folder: Path, settings: dict[str, Any], **more: Any) -> Any:
        key = f"{folder} {settings}"
        if key not in found:
            found[key] = cores.make(folder, vllm=settings, moves=True, **more)
        return found[key]

    yield make
    for core in found.values():
        core.shut_down()


@cores.needs_ranks
@pytest.mark.parametrize(
    ("source", "target"),
    [(RANKS, STAGES), (STAGES, RANKS)],
    ids=["from ranks to stages", "from stages to ranks"],
)
def test_kv_moves_between_engines_that_divide_it_differently(
    made: Maker, llava: Path, asked: Question, source: dict[str, int], target: dict[str, int]
) -> None:
    first, second = made(llava, source), made(llava, target)
    cores.clear([first, second])
    assert first.kv_layout == second.kv_layout == made(llava, {}).kv_layout
    assert cores.hand_over(first, second, asked) == asked.answer(12)
    for core in (first, second):
        cores.assert_empty(core)


@cores.needs_ranks
def test_ranks_that_share_a_head_send_it_once_and_both_receive_it(made: Maker, tmp_path: Path) -> None:
    size = cores.random_model.Size(hidden=cores.WIDE, kv_heads=1)
    folder = cores.random_model.build("llava", tmp_path / "shared", size=size)
    asked = cores.question(folder, LONG, zoo.image(100, 64, 1))
    ranks, whole = made(folder, RANKS), made(folder, {})
    assert ranks.kv_layout == whole.kv_layout
    assert cores.hand_over(ranks, whole, asked) == asked.answer(12)
    assert cores.hand_over(whole, ranks, asked, name="b") == asked.answer(12)


FOLLOWER = """
import sys
from pathlib import Path
from tests.vllm_engine import cores
cores.follow(Path(sys.argv[1]), int(sys.argv[2]), {"tensorParallelSize": 2})
"""


@cores.needs_ranks
def test_kv_moves_to_a_replica_that_spans_pods_and_from_it(
    made: Maker, llava: Path, asked: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    port = free_port()
    command = [sys.executable, "-c", FOLLOWER, str(llava), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as follower:
        try:
            member = cores.Member(0, port)
            pair, whole = cores.make(llava, vllm=RANKS, moves=True, member=member), made(llava, {})
            assert cores.hand_over(pair, whole, asked) == asked.answer(12)
            assert cores.hand_over(whole, pair, asked, name="b") == asked.answer(12)
            pair.shut_down()
        finally:
            follower.kill()


@pytest.mark.skipif(
    cores.DEVICE.type == "cpu" and not torch.cpu._is_avx512_supported(),
    reason="vLLM's KV in 8 bits needs AVX-512 or a GPU",
)
@pytest.mark.parametrize("dtype", ["Fp8E4M3", *(["Fp8E5M2"] if cores.DEVICE.type == "cpu" else [])])
def test_kv_in_8_bits_moves_unchanged(llava: Path, asked: Question, dtype: str) -> None:
    dtypes = {
        "vllm": {"kvCacheDtype": dtype},
        "dtype": "Float32" if cores.DEVICE.type == "cpu" else "BFloat16",
    }
    first, second = (cores.make(llava, moves=True, **dtypes) for _ in range(2))
    assert first.kv_layout.dtype == "uint8"
    alone = cores.ask(first, asked)
    cores.forget(first)
    assert cores.hand_over(first, second, asked) == alone
    read = [_kv_of_a_prefix(core, asked) for core in (first, second)]
    assert all(torch.equal(one, other) for one, other in zip(*read, strict=True))
    assert any(tensor.any() for tensor in read[0])


def _kv_of_a_prefix(core: Any, asked: Question) -> list[torch.Tensor]:
    """What the prefix cache of a core has of a prompt's first blocks."""
    probe = core._builder.build("probe", asked.request, [], 1)
    (blocks,) = core._manager.get_computed_blocks(probe)[0].blocks
    assert len(blocks) > 2
    read: list[torch.Tensor] = core._kv.read([block.block_id for block in blocks], 0, 2 * cores.BLOCK + 3)
    return read


@cores.needs_ranks
def test_a_rank_that_ends_during_a_kv_read_ends_the_engine(llava: Path, asked: Question) -> None:
    lost: Queue[str] = Queue()
    core = cores.make(llava, vllm=RANKS, moves=True, rank_lost=lost.put)
    core.add("a", asked.request, stop_after_prefill=True)
    cores.supply(core, "a", asked)
    outcome = cores.step(core, until=lambda o: o.tokens.get("a"))
    os.kill(core._core.model_executor.workers[1].proc.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        core.read_kv("a", *outcome.ready["a"][0])
    assert lost.get(timeout=10) == "rank 1 of vLLM was killed (SIGKILL), perhaps for its memory"
    assert lost.empty()
