"""The link over NIXL between two agents of one process: what a peer may not send, more pieces than slots, what is freed.

What every backend does is in test_links.py. The test of device memory needs a GPU: pytest tests/kv/test_nixl.py
"""

import os
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from mmd_api.contract.errors import BackendUnavailableError, LinkError
from mmd_workers.kv import chunks, nixl
from mmd_workers.kv.link import PIECE_BYTES
from mmd_workers.kv.links import LinkManager
from mmd_workers.kv.nixl import _READY, _WRITTEN, MAX_METADATA_BYTES, MAX_SLOTS, NixlLink
from support.harness.waiting import DEADLINE_SECONDS
from support.serving.backends import needs_nixl

from .kv_peer import Peer, pattern

CPU = torch.device("cpu")
CHUNK_SECONDS = 20.0  # not waited for, unless a test fails


@pytest.fixture(scope="module", autouse=True)
def available():
    needs_nixl()


@pytest.fixture
def pair():
    """Both ends, connected; the second one is what a peer is."""
    made = []

    def make(chunk_seconds=CHUNK_SECONDS):
        store = HashStore()
        with ThreadPoolExecutor(2) as threads:
            ends = [
                threads.submit(NixlLink, store, rank, CPU, chunk_seconds, DEADLINE_SECONDS) for rank in (0, 1)
            ]
            made.extend(end.result() for end in ends)
        return made[-2:]

    yield make
    for each in made:
        each.close()


def report(end: NixlLink, message: bytes) -> None:
    """Send the other side a message that the link would not send."""
    with end._lock:
        end._agent.send_notif(end._peer, message)


def move(one: NixlLink, two: NixlLink, tag: int = 0, size: int = 1000) -> bool:
    sent, got = torch.randint(0, 256, (size,), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(one.send, sent, tag)
        two.recv(got, tag)
        sending.result()
    return torch.equal(sent, got)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"anything", "unknown message of 8 bytes"),
        (b"R", "unknown message"),
        (b"hello", "unknown message"),
        (_READY.pack(b"R", 1, 0, 8) + bytes(MAX_METADATA_BYTES + 1), "unknown message"),
        (_WRITTEN.pack(b"W", 5, 8), "8 bytes for tag 5, which were not awaited"),
        (_WRITTEN.pack(b"W", 4, 9), "9 bytes for tag 4, which were not awaited"),
        (_WRITTEN.pack(b"W", 4, 2**63), "which were not awaited"),
        (_READY.pack(b"R", 1, 0, PIECE_BYTES + 1), "a piece has 4194304 at most"),
        (_READY.pack(b"R", 1, 0, 8) + b"metadata", "NIXL_ERR_MISMATCH"),
    ],
)
def test_a_forbidden_message_ends_the_link_and_spares_the_tensor(pair, message, reason):
    own, peer = pair()
    got = torch.full((8,), 7, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(own.recv, got, 4)
        peer._until(lambda: peer._ready.get(4), time.monotonic() + DEADLINE_SECONDS)
        report(peer, message)
        with pytest.raises(LinkError, match=f"NIXL recv of tag 4 failed: .*{reason}.*offer again"):
            receiving.result()
    assert got.eq(7).all()
    with pytest.raises(LinkError, match="NIXL link is dead"):
        own.send(got, 0)


def test_a_peer_may_not_announce_too_many_slots_or_repeated_tags(pair):
    for tags in (range(MAX_SLOTS + 1), (3, 3)):
        own, peer = pair()
        for tag in tags:
            report(peer, _READY.pack(b"R", tag, 0, 8))
        with pytest.raises(LinkError, match=f"too many slots, the last for tag {tags[-1]}"):
            own.recv(torch.zeros(8, dtype=torch.uint8), 100)


def test_nothing_is_written_to_an_address_that_the_peer_has_not_registered(pair):
    own, peer = pair()
    assert move(own, peer)
    slot = peer._slots[0].memory
    victim = torch.full((8,), 7, dtype=torch.uint8)
    for address in (victim.data_ptr(), slot.data_ptr() + PIECE_BYTES - 4, slot.data_ptr() - 4):
        own, peer = pair()
        assert move(own, peer)
        report(peer, _READY.pack(b"R", 1, address, 8))
        with pytest.raises(LinkError, match="NIXL send of tag 1 failed: NIXL_ERR_NOT_FOUND"):
            own.send(torch.zeros(8, dtype=torch.uint8), 1)
    assert victim.eq(7).all()


def test_a_slot_of_another_agent_is_refused(pair):
    own, peer = pair()
    other, _ = pair()
    assert other._take_slot(sends=False) is not None
    metadata = other._agent.get_partial_agent_metadata(other._slots[0].registration, True, ["UCX"])
    report(peer, _READY.pack(b"R", 1, 0, 8) + metadata)
    with pytest.raises(LinkError, match="a slot of another agent"):
        own.send(torch.zeros(8, dtype=torch.uint8), 1)


def test_sides_that_disagree_about_the_size_both_fail(pair):
    one, two = pair(chunk_seconds=1.0)
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(two.recv, torch.zeros(9, dtype=torch.uint8), 0)
        with pytest.raises(LinkError, match="the peer expects 9 bytes, not 8"):
            one.send(torch.zeros(8, dtype=torch.uint8), 0)
        with pytest.raises(LinkError, match="deadline exceeded"):
            receiving.result()


def test_a_strangers_messages_are_ignored(pair):
    own, peer = pair()
    stranger = nixl._agent(nixl._load(), "stranger")
    name = stranger.add_remote_agent(own._agent.get_agent_metadata()).decode()
    stranger.send_notif(name, _WRITTEN.pack(b"W", 0, 1000))
    with own._lock:
        for _ in range(1000):  # UCX connects in several steps, on both sides
            stranger.get_new_notifs()
            own._read_notifications()
    assert move(peer, own)
    assert move(own, peer)


def test_a_piece_that_nobody_receives_fails_at_its_deadline(pair):
    own, _ = pair(chunk_seconds=0.2)
    with pytest.raises(LinkError, match="NIXL send of tag 1 failed: deadline exceeded"):
        own.send(torch.zeros(8, dtype=torch.uint8), 1)


def test_successive_pieces_take_one_slot_per_side_and_direction(pair):
    one, two = pair()
    assert all(move(one, two, tag, PIECE_BYTES) for tag in range(4))
    assert all(move(two, one, tag) for tag in range(4))
    assert [slot.sends for slot in one._slots] == [True, False]
    assert [slot.sends for slot in two._slots] == [False, True]
    assert not any((one._ready, one._writes, two._awaited, two._written))


def test_more_pieces_than_slots_wait_for_one_another(pair):
    one, two = pair()
    piece = torch.ones(8, dtype=torch.uint8)
    with ThreadPoolExecutor(MAX_SLOTS + 4) as threads:
        receiving = [threads.submit(two.recv, torch.zeros_like(piece), tag) for tag in range(MAX_SLOTS + 4)]
        one._until(lambda: len(one._ready) == MAX_SLOTS or None, time.monotonic() + DEADLINE_SECONDS)
        for _ in receiving:  # those that have announced themselves, and then those that they make room for
            tag = one._until(lambda: next(iter(one._ready), None), time.monotonic() + DEADLINE_SECONDS)
            one.send(piece, tag)
        for each in receiving:
            each.result()
    assert len(two._slots) == MAX_SLOTS
    assert len(one._slots) == 1


def test_a_closed_link_has_freed_agent_and_memory_and_closes_again(pair):
    one, two = pair()
    assert move(one, two)
    one.close()
    assert one._agent is None
    assert not one._slots
    one.close()
    with pytest.raises(LinkError, match="NIXL link is dead: the link was closed"):
        one.recv(torch.zeros(8, dtype=torch.uint8), 0)


def test_a_peer_that_does_not_answer_fails_the_connection_at_its_deadline():
    store = HashStore()
    silent = nixl._agent(nixl._load(), "silent")
    store.set("nixl-1", f"DRAM 0 {silent.get_agent_metadata().hex()}")
    with pytest.raises(LinkError, match="NIXL could not connect: deadline exceeded"):
        NixlLink(store, 0, CPU, CHUNK_SECONDS, 0.3)


INTRODUCTIONS = ["", "DRAM x y", "DRAM 0 nothing", "DRAM 0 ", "FOO 0 6e6f", "FILE 0 6e6f", "DRAM -1 6e6f"]


@pytest.mark.parametrize("introduction", [*INTRODUCTIONS, f"DRAM {10**30} 6e6f"])
def test_a_peer_that_introduces_itself_with_something_else_is_refused(introduction):
    store = HashStore()
    store.set("nixl-1", introduction)
    with pytest.raises(LinkError, match="NIXL could not connect: the peer introduced itself as"):
        NixlLink(store, 0, CPU, CHUNK_SECONDS, DEADLINE_SECONDS)


def test_a_peer_whose_metadata_are_none_is_refused():
    store = HashStore()
    store.set("nixl-1", "DRAM 0 6e6f")
    with pytest.raises(LinkError, match="NIXL could not connect: NIXL_ERR"):
        NixlLink(store, 0, CPU, CHUNK_SECONDS, DEADLINE_SECONDS)


@pytest.mark.parametrize("address", [0, 2**63, 2**64 - 8, 2**64 - 1])
def test_an_address_that_is_none_ends_the_link(pair, address):
    own, peer = pair()
    report(peer, _READY.pack(b"R", 1, address, 8))
    with pytest.raises(LinkError, match="NIXL send of tag 1 failed"):
        own.send(torch.zeros(8, dtype=torch.uint8), 1)
    with pytest.raises(LinkError, match="NIXL link is dead"):
        own.send(torch.zeros(8, dtype=torch.uint8), 1)


def test_whatever_an_operation_raises_ends_the_link(pair, monkeypatch):
    own, peer = pair()

    def write(*_: object) -> None:
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(own, "_write", write)
    report(peer, _READY.pack(b"R", 1, 5, 8))
    with pytest.raises(LinkError, match="NIXL send of tag 1 failed: incompatible function arguments"):
        own.send(torch.zeros(8, dtype=torch.uint8), 1)
    with pytest.raises(LinkError, match="NIXL link is dead"):
        own.send(torch.zeros(8, dtype=torch.uint8), 1)


def failed_at_an_address(own: NixlLink, peer: NixlLink) -> LinkError:
    report(peer, _READY.pack(b"R", 1, 5, 8))
    with pytest.raises(LinkError) as failure:
        own.send(torch.zeros(8, dtype=torch.uint8), 1)
    return failure.value


def test_the_agent_ends_with_the_link_although_somebody_keeps_its_error(pair):
    own, peer = pair()
    agent, before = weakref.ref(own._agent.agent), len(os.listdir("/proc/self/fd"))
    error = failed_at_an_address(own, peer)
    own.close()
    assert error
    assert agent() is None
    assert len(os.listdir("/proc/self/fd")) < before


def test_memory_is_freed_by_the_end_of_the_agent_and_not_before(pair):
    own, peer = pair()
    agent = own._agent.agent  # as a frame of NIXL's may have it
    assert move(peer, own)
    memory = weakref.ref(own._slots[0].memory)
    own.close()
    assert own._agent is None
    assert memory() is not None
    del agent
    assert memory() is None


def test_pieces_go_both_ways_while_all_slots_of_both_sides_are_announced(pair):
    one, two = pair()
    got = [torch.zeros(8, dtype=torch.uint8) for _ in range(2 * MAX_SLOTS)]
    with ThreadPoolExecutor(2 * MAX_SLOTS) as threads:
        receiving = [threads.submit((one, two)[tag % 2].recv, got[tag], tag) for tag in range(2 * MAX_SLOTS)]
        for end in (one, two):
            end._until(
                lambda end=end: len(end._ready) == MAX_SLOTS or None, time.monotonic() + DEADLINE_SECONDS
            )
        for tag in range(2 * MAX_SLOTS):
            (two, one)[tag % 2].send(torch.full((8,), tag, dtype=torch.uint8), tag)
        for each in receiving:
            each.result()
    assert [tensor.tolist() for tensor in got] == [[tag] * 8 for tag in range(2 * MAX_SLOTS)]


MOVE = """
import torch
from concurrent.futures import ThreadPoolExecutor
from torch.distributed import HashStore
from mmd_workers.kv.nixl import NixlLink

store = HashStore()
with ThreadPoolExecutor(2) as threads:
    ends = [threads.submit(NixlLink, store, rank, torch.device("cpu"), 60.0, 60.0) for rank in (0, 1)]
    one, two = (end.result() for end in ends)
    sending = threads.submit(one.send, torch.ones(4 * 2**20, dtype=torch.uint8), 0)
    two.recv(torch.zeros(4 * 2**20, dtype=torch.uint8), 0)
    sending.result()
one.close()
two.close()
"""


@pytest.mark.parametrize(("chosen", "used"), [(None, False), ("cma,tcp", True)], ids=["default", "chosen"])
def test_no_process_writes_into_anothers_memory_unless_the_user_chose_it(chosen, used):
    """With cma a sender that stalled would write into what the receiver has freed long ago."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    environment |= {"UCX_PROTO_INFO": "y"} | ({"UCX_TLS": chosen} if chosen else {})
    moved = subprocess.run(
        [sys.executable, "-c", MOVE], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert "remote memory write" in moved.stdout + moved.stderr
    assert ("cma/memory" in moved.stdout + moved.stderr) is used


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, nixl._load().__name__, None)
    with pytest.raises(BackendUnavailableError, match=r"install multimodal-operator\[nixl\] in the image"):
        LinkManager("Nixl", "pod", "i0", "127.0.0.1", CPU)


def test_the_error_names_the_package_for_the_cuda_of_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(BackendUnavailableError, match=r"nixl_cu12.*; install nixl-cu12 in the image"):
        nixl.check_available(CPU)


def test_without_ucx_the_error_names_the_extra_too(monkeypatch):
    monkeypatch.setattr(nixl, "_UCX", "missing")
    with pytest.raises(BackendUnavailableError, match=r"UCX.*cannot start.*multimodal-operator\[nixl\]"):
        nixl.check_available(CPU)


def test_ucx_that_cannot_move_device_memory_is_refused_for_it_alone(monkeypatch):
    agent = SimpleNamespace(get_backend_mem_types=lambda _: ["DRAM_SEG"])
    monkeypatch.setattr(nixl, "_agent", lambda *_: agent)
    nixl.check_available(CPU)
    with pytest.raises(BackendUnavailableError, match="cannot move memory of cuda:0 here, only DRAM_SEG"):
        nixl.check_available(torch.device("cuda:0"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_device_memory_arrives_intact():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    other = Peer("a", backend="Nixl", device=str(last), chunk_timeout_seconds=30.0)
    own = LinkManager("Nixl", "m", "i0", "127.0.0.1", torch.device("cuda:0"), chunk_timeout_seconds=30.0)
    try:
        other.start("connect", "m", "i0", own.endpoint, 0)
        link = own.connect("a", "i0", other.endpoint, 0)
        assert other.answer() == 0
        other.start("recv", 3000, 7, 0)
        with suppress(LinkError):  # the other side says why
            chunks.send_range(link, [tensor.cuda() for tensor in pattern(3000, 7)], 0)
        assert other.answer() is True
    finally:
        own.close()
        other.kill()
