"""The NCCL link between two real ranks: bytes, a killed peer, an abort. Needs CUDA; how to run it: see mmd_workers.kv.nccl."""

import os
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch

from mmd_api.contract.errors import BackendUnavailableError, LinkError
from mmd_workers.kv import chunks, nccl
from mmd_workers.kv.links import LinkManager

from .kv_peer import Peer, pattern

ONE_GPU = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
needs_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < (1 if ONE_GPU else 2),
    reason="NCCL needs two GPUs, or one and NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or later",
)
PIECE = 4 * 2**20


@pytest.fixture
def pair():
    """(own link, own manager, peer process): the peer is on the last GPU, we are on the first."""
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    settings = {"connect_timeout_seconds": 60.0, "chunk_timeout_seconds": 5.0}
    other = Peer("a", backend="Nccl", device=str(last), **settings)
    own = LinkManager("Nccl", "m", "i0", "127.0.0.1", torch.device("cuda:0"), **settings)
    other.start("connect", "m", "i0", own.endpoint, 0)
    link = own.connect("a", "i0", other.endpoint, 0)
    assert other.answer(60) == 0
    yield link, own, other
    own.close()
    other.kill()


@needs_gpus
def test_bytes_arrive_intact(pair):
    link, _, other = pair
    other.start("recv", 3000, 7, 0)
    chunks.send_range(link, [tensor.cuda() for tensor in pattern(3000, 7)], 0)
    assert other.answer(60) is True


@needs_gpus
def test_a_killed_peer_is_noticed_within_a_second(pair):
    link, _, other = pair
    other.start("recv_forever")
    assert other.answer(60) == "going"
    killed_at = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(other.process.pid, signal.SIGKILL)

    threading.Timer(0.5, kill).start()
    piece = torch.zeros(PIECE, dtype=torch.uint8, device="cuda:0")
    while not link.dead:
        with suppress(LinkError):
            link.send(piece, 0)
    assert time.monotonic() - killed_at[0] < 1.0


@needs_gpus
def test_an_aborted_operation_raises_although_nccl_returns(pair):
    link, own, _ = pair
    threading.Timer(0.3, own.notify_lost, ["a"]).start()
    with pytest.raises(LinkError, match="reported lost"):
        link.recv(torch.zeros(PIECE, dtype=torch.uint8, device="cuda:0"), 0)


@needs_gpus
def test_a_link_carries_one_direction(pair):
    link, _, other = pair
    other.start("recv", 100, 7, 0)
    piece = torch.zeros(100 * 2 * (4 * 64 + 2 * 128 + 4 * 96) * 2, dtype=torch.uint8, device="cuda:0")
    link.send(piece, 0)
    with pytest.raises(LinkError, match="other direction"):
        link.recv(piece, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_without_cuda_the_error_names_the_remedy(device):
    with pytest.raises(BackendUnavailableError, match=r"use transfer\.kv\.backend: Gloo"):
        nccl.check_available(torch.device(device))


class Failing:
    """Torch's group, whose store loses the peer."""

    class Options:
        class config: ...

    def __init__(self, *_: object) -> None:
        self.aborted = threading.Event()
        made.append(self)

    def eager_connect_single_device(self, device: object) -> None:
        raise failures[0]

    def abort(self) -> None:
        self.aborted.set()


made: list[Failing] = []
failures: list[Exception] = []


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (LinkError("the peer was lost"), "^the peer was lost$"),
        (ValueError("odd"), "NCCL could not connect: odd"),
    ],
    ids=["the store", "anything"],
)
def test_a_failed_connect_ends_its_monitor_whatever_failed(monkeypatch, failure, said):
    monkeypatch.setattr(nccl, "ProcessGroupNCCL", Failing)
    monkeypatch.setattr(nccl, "check_available", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    failures[:] = [failure]
    with pytest.raises(LinkError, match=said):
        nccl.NcclLink(None, 0, torch.device("cuda", 0), 1.0, 1.0)
    assert made.pop().aborted.wait(60)


def test_the_refusal_is_not_retryable():
    assert BackendUnavailableError.retryable is False
    assert issubclass(BackendUnavailableError, LinkError)
