"""Two real processes, one link: agreement, epochs, a peer killed with SIGKILL, and what it costs others (nothing)."""

import os
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from mmd_api.contract.errors import BackendUnavailableError, LinkError, OverloadedError
from mmd_workers.kv import chunks, links, nccl, rendezvous, sentinel
from mmd_workers.kv.links import LinkManager, PairLink
from mmd_workers.sequences.links import KvLinks
from support.harness.waiting import DEADLINE_SECONDS, wait_until
from support.serving.backends import needs_nixl

from .kv_peer import LAYOUT, Peer, pattern

torch.set_num_threads(1)
PIECE = 4 * 2**20
CPU = torch.device("cpu")
NOTICED_SECONDS = 15.0
"""A peer's death is noticed by the socket within this; the timeouts of chunks in these tests are far longer."""

LINKED_SECONDS = 30.0
"""Two processes that are started on a busy machine have linked within this."""


only_gloo = pytest.mark.parametrize("backend", ["Gloo"])
"""For what the manager does whatever the backend."""


@pytest.fixture(params=["Gloo", "Nixl"])
def backend(request):
    if request.param == "Nixl":
        needs_nixl()
    return request.param


@pytest.fixture
def manager(backend):
    made = []

    def make(pod="m", incarnation="i0", **settings):
        settings = {"connect_timeout_seconds": LINKED_SECONDS} | settings
        made.append(LinkManager(backend, pod, incarnation, "127.0.0.1", CPU, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def peer(backend):
    made = []

    def make(pod, incarnation="i0", **settings):
        made.append(Peer(pod, incarnation, backend=backend, **settings))
        return made[-1]

    yield make
    for each in made:
        each.kill()


def link_with(own: LinkManager, other: Peer, epoch: int = 0):
    other.start("connect", own._self[0], own._self[1], own.endpoint, epoch)
    link = own.connect(other.pod, other.incarnation, other.endpoint, epoch)
    assert other.answer() == epoch
    return link


def pieces_until_error(operation) -> int:
    """Move pieces until the link dies; how many went."""
    piece = torch.zeros(PIECE, dtype=torch.uint8)
    for tag in range(1_000_000):
        try:
            operation(piece, tag)
        except LinkError:
            return tag
    raise AssertionError("the link never died")


def linked(one: LinkManager, two: LinkManager, epoch: int = 0):
    """Both sides connect at once."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(one.connect, *two._self, two.endpoint, epoch)
        second = threads.submit(two.connect, *one._self, one.endpoint, epoch)
        return first.result(DEADLINE_SECONDS), second.result(DEADLINE_SECONDS)


def test_kv_of_a_token_range_arrives_intact_in_another_process_both_ways(manager, peer):
    own, other = manager(), peer("a")
    link = link_with(own, other)
    other.start("recv", 3000, 7, 0)
    after = chunks.send_range(link, pattern(3000, 7), 0)
    assert other.answer() is True
    assert after == chunks.num_pieces(LAYOUT, 3000) > 1
    other.start("send", 777, 8, after)
    got = chunks.recv_range(link, LAYOUT, 777, after, CPU)
    assert all(torch.equal(a, b) for a, b in zip(got, pattern(777, 8), strict=True))


def test_concurrent_threads_get_what_was_sent_under_their_tags(manager):
    one, two = linked(manager("one"), manager("two"))
    tags = range(20)
    got = [torch.zeros(100_000 + tag, dtype=torch.int32) for tag in tags]
    with ThreadPoolExecutor(2 * len(tags)) as threads:
        moving = [threads.submit(two.recv, got[tag], tag) for tag in reversed(tags)]
        moving += [threads.submit(one.send, torch.full_like(got[tag], tag), tag) for tag in tags]
        for each in moving:
            each.result(DEADLINE_SECONDS)
    assert all(tensor.eq(tag).all() for tag, tensor in zip(tags, got, strict=True))


def test_pods_with_ipv6_addresses_link_too(backend):
    try:
        one, two = (LinkManager(backend, pod, "i0", "::1", CPU) for pod in ("one", "two"))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    first, second = linked(one, two)
    sent, got = torch.arange(8), torch.empty(8, dtype=torch.int64)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(second.send, sent, 0)
        first.recv(got, 0)
        sending.result(DEADLINE_SECONDS)
    assert torch.equal(sent, got)
    one.close()
    two.close()


def test_many_simultaneous_connects_of_both_sides_share_one_link(manager):
    one, two = manager("one"), manager("two")
    with ThreadPoolExecutor(16) as threads:
        firsts = [threads.submit(one.connect, "two", "i0", two.endpoint, 0) for _ in range(8)]
        seconds = [threads.submit(two.connect, "one", "i0", one.endpoint, 0) for _ in range(8)]
        assert len({id(future.result(DEADLINE_SECONDS)) for future in firsts}) == 1
        assert len({id(future.result(DEADLINE_SECONDS)) for future in seconds}) == 1
    assert one.live_links == two.live_links == 1


@pytest.mark.parametrize("role", ["send_forever", "recv_forever"])
def test_a_peer_killed_during_a_transfer_is_noticed_before_its_timeout(manager, peer, role):
    own, other = manager(chunk_timeout_seconds=2 * DEADLINE_SECONDS), peer("a")
    link = link_with(own, other)
    other.start(role)
    assert other.answer() == "going"
    killed_at = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(other.process.pid, signal.SIGKILL)

    timer = threading.Timer(0.3, kill)
    timer.start()
    operation = link.recv if role == "send_forever" else link.send
    moved = pieces_until_error(operation)
    assert time.monotonic() - killed_at[0] < NOTICED_SECONDS
    assert moved > 1  # it did die in the middle
    assert link.dead
    assert own.failed_epoch("a", "i0") == 0


def test_an_idle_link_learns_of_its_peers_death_too(manager, peer):
    own, other = manager(), peer("a")
    link = link_with(own, other)
    gone = threading.Event()
    kill = link._channel.abort
    link._channel.abort = lambda reason: (kill(reason), gone.set())
    other.kill()
    assert gone.wait(NOTICED_SECONDS)
    assert own.live_links == 0


def test_a_dead_pair_costs_no_other_pair(manager, peer):
    own, victim, other = manager(chunk_timeout_seconds=2 * DEADLINE_SECONDS), peer("a"), peer("b")
    dead, live = link_with(own, victim), link_with(own, other)
    victim.start("recv_forever")
    other.start("recv_forever")
    assert victim.answer() == other.answer() == "going"
    piece = torch.zeros(PIECE, dtype=torch.uint8)
    failed = threading.Event()

    def feed_victim() -> None:
        pieces_until_error(dead.send)
        failed.set()

    thread = threading.Thread(target=feed_victim)
    thread.start()
    longest, tag = 0.0, 0
    while tag < 30 or not failed.is_set():
        if tag == 5:
            os.kill(victim.process.pid, signal.SIGKILL)
        began = time.monotonic()
        live.send(piece, tag)
        longest = max(longest, time.monotonic() - began)
        tag += 1
    thread.join(DEADLINE_SECONDS)
    assert longest < NOTICED_SECONDS, "it waited for the dead pair"
    assert not live.dead


def test_a_silent_peer_fails_the_chunk_at_its_own_timeout(manager, peer):
    own, other = manager(chunk_timeout_seconds=0.3), peer("a")
    link = link_with(own, other)
    os.kill(other.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(LinkError, match="next epoch"):
        link.recv(torch.zeros(PIECE, dtype=torch.uint8), 0)
    assert time.monotonic() - began > 0.25


def test_a_peer_reported_lost_frees_the_pending_wait_at_once(manager, peer):
    own, other = manager(chunk_timeout_seconds=3600), peer("a")
    link = link_with(own, other)
    threading.Timer(0.1, own.notify_lost, ["a"]).start()
    with pytest.raises(LinkError, match="reported lost"):
        link.recv(torch.zeros(8, dtype=torch.uint8), 0)
    os.kill(other.process.pid, signal.SIGKILL)  # lets the thread inside gloo go


def test_after_a_failure_only_the_next_epoch_works(manager):
    one, two = manager("one"), manager("two")
    assert two.epoch_for("one", "i0", -1) == 0
    linked(one, two)
    one.notify_lost("two")
    assert two.epoch_for("one", "i0", one.failed_epoch("two", "i0")) == 1
    with pytest.raises(LinkError, match="epoch 0"):
        two.connect("one", "i0", one.endpoint, 0)
    first, second = linked(one, two, epoch=1)
    sent, got = torch.arange(64, dtype=torch.float32), torch.empty(64)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(first.send, sent, 3)
        second.recv(got, 3)
        sending.result(DEADLINE_SECONDS)
    assert torch.equal(sent, got)


def test_a_new_incarnation_replaces_the_pod_and_the_old_one_is_refused(manager):
    own, old = manager("own"), manager("pod", "old")
    link, _ = linked(own, old)
    new = manager("pod", "new")
    fresh, _ = linked(own, new)
    assert link.dead
    assert not fresh.dead
    for refused in (
        lambda: own.connect("pod", "old", old.endpoint, 5),
        lambda: own.epoch_for("pod", "old", -1),
    ):
        with pytest.raises(LinkError, match="has restarted as"):
            refused()


@only_gloo
def test_a_peer_that_never_comes_fails_at_the_connect_deadline(manager):
    own, absent = manager(connect_timeout_seconds=0.5), manager("zz")
    with pytest.raises(LinkError, match=r"not linked|did not connect|no link"):
        own.connect("zz", "i0", absent.endpoint, 0)
    assert own.failed_epoch("zz", "i0") == 0


@only_gloo
def test_a_waiting_connect_ends_when_the_peer_is_reported_lost(manager):
    own, absent = manager(connect_timeout_seconds=3600), manager("zz")
    threading.Timer(0.1, own.notify_lost, ["zz"]).start()
    with pytest.raises(LinkError, match="reported lost"):
        own.connect("zz", "i0", absent.endpoint, 0)


def connecting_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-connect-")]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_peer_that_is_frozen_when_it_is_called_keeps_no_thread(manager, peer, when):
    own, other = manager(connect_timeout_seconds=1.0), peer("a")
    freeze = threading.Timer(0.0 if when == "before" else 0.3, os.kill, [other.process.pid, signal.SIGSTOP])
    freeze.start()
    if when == "before":
        freeze.join()
    with pytest.raises(LinkError, match="no link to a"):
        own.connect("a", "i0", other.endpoint, 0)
    freeze.join(NOTICED_SECONDS)
    wait_until(lambda: not connecting_threads(), "no thread connects", seconds=NOTICED_SECONDS)
    assert own.connecting_seconds == 0


def attempts_given_up(own: LinkManager, peer: str, count: int) -> list[Exception]:
    """A peer that offers again and again, and never calls: what became of each of its links."""
    errors, failed = [], -1

    def connect(epoch: int) -> None:
        try:
            own.connect(peer, "i0", "127.0.0.1:1", epoch)
        except (LinkError, OverloadedError) as error:
            errors.append(error)

    threads = []
    for _ in range(count):
        failed = own.epoch_for(peer, "i0", failed)
        threads.append(threading.Thread(target=connect, args=[failed]))
        threads[-1].start()
        time.sleep(0.02)
    own.notify_lost(peer)
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    return errors


@only_gloo
def test_repeated_offers_by_one_peer_cost_no_other_its_link(manager):
    own, good = manager("a", max_links=3), manager("b")
    link, _ = linked(own, good)
    errors = attempts_given_up(own, "zz", 8)
    assert len(errors) == 8
    assert not any(isinstance(error, OverloadedError) for error in errors)
    assert not link.dead
    wait_until(lambda: not connecting_threads(), "no thread connects", seconds=NOTICED_SECONDS)


@contextmanager
def half_linked(own: LinkManager, epoch: int = 0):
    """The socket of a peer of whom gloo awaits an address: what gloo has set is read."""
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(own.connect, "zz", "i0", "127.0.0.1:1", epoch)
        sock = rendezvous.call(
            own.endpoint, own._name(("zz", "i0"), epoch), time.monotonic() + DEADLINE_SECONDS
        )
        with sock:
            head = struct.Struct("!HI")
            content = b""
            while len(content) < head.size or len(content) < head.size + sum(head.unpack_from(content)):
                content += sock.recv(2**16)
            yield sock, content[head.size + 3 :], making


@only_gloo
@pytest.mark.parametrize("value", [b"", b"\1", bytes(64), b"\xff" * 170, bytes(5000)], ids=len)
def test_what_a_peer_sends_instead_of_its_address_never_reaches_gloo(manager, value):
    with half_linked(manager("a")) as (sock, _, making):
        sock.sendall(struct.pack("!HI", 3, len(value)) + b"0/1" + value)
        with pytest.raises(LinkError, match="something else than gloo's address"):
            making.result(DEADLINE_SECONDS)


class Lingers:
    """gloo, while it calls a peer that has died."""

    release = threading.Event()

    def __init__(self, *_: object) -> None:
        self.release.wait(DEADLINE_SECONDS)
        raise LinkError("released")


@only_gloo
def test_a_peer_may_have_only_a_few_lingering_attempts(manager, monkeypatch):
    monkeypatch.setattr(links, "MAX_GIVEN_UP", 2)
    monkeypatch.setattr(links, "GlooLink", Lingers)
    monkeypatch.setattr(Lingers, "release", threading.Event())
    one, two = (manager(pod, connect_timeout_seconds=0.5, max_links=1) for pod in ("one", "two"))
    for epoch in range(2):
        with pytest.raises(LinkError, match=r"no link|was lost|gave up"):
            linked(one, two, epoch)
    wait_until(lambda: one.connecting_seconds > 1)
    with pytest.raises(OverloadedError, match="2 earlier attempts to link with two have not ended"):
        one.connect("two", "i0", two.endpoint, 2)
    with pytest.raises(LinkError, match="no link to zz"):
        one.connect("zz", "i0", "127.0.0.1:1", 0)
    Lingers.release.set()
    wait_until(lambda: not connecting_threads())
    assert one.connecting_seconds == 0


@pytest.fixture
def no_threads(monkeypatch):
    """While it is entered, the manager can start no thread."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name.startswith(("kv-c", "kv-nixl-c")):
            raise RuntimeError("can't start new thread")
        start(thread)

    @contextmanager
    def entered():
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            yield

    return entered


@only_gloo
def test_a_process_without_threads_closes_links_and_goes_on_watching_the_others(manager, no_threads):
    own, one, two = manager("own"), manager("one"), manager("two")
    first, _ = linked(own, one)
    second, _ = linked(own, two)
    with no_threads():
        one.notify_lost("own")
        wait_until(lambda: first.dead)
        wait_until(lambda: first._channel._group is None)
    two.notify_lost("own")
    wait_until(lambda: second.dead)


@only_gloo
def test_an_attempt_whose_thread_cannot_be_started_leaves_nothing_behind(manager, no_threads):
    one, two = manager("one", max_links=1), manager("two")
    with no_threads(), pytest.raises(OverloadedError, match="can't start new thread"):
        one.connect("two", "i0", two.endpoint, 0)
    assert one.live_links == 0
    linked(one, two)


@only_gloo
@pytest.mark.parametrize(
    "failing", [(sentinel, "keep_alive"), (sentinel.Watch, "add")], ids=["set up", "watched"]
)
def test_a_link_that_cannot_be_watched_is_none(manager, monkeypatch, failing):
    one, two = manager("one"), manager("two")

    def fail(*_: object) -> None:
        raise OSError("epoll")

    with monkeypatch.context() as patched:
        patched.setattr(*failing, fail)
        with pytest.raises(LinkError, match=r"no link to .*epoll"):
            linked(one, two)
    assert one.live_links == two.live_links == 0
    linked(one, two, epoch=1)


@only_gloo
def test_a_link_that_cannot_end_leaves_other_links_watched(manager):
    own, others = manager("own"), [manager(pod) for pod in ("one", "two")]
    (first, _), (second, _) = (linked(own, other) for other in others)

    def fail(reason: str) -> None:
        raise ValueError(reason)

    first.kill = fail
    for other in others:
        other.notify_lost("own")
    wait_until(lambda: second.dead)
    assert own.live_links == 0


@only_gloo
@pytest.mark.parametrize("content", [b"", b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "http"])
def test_strangers_who_call_do_not_become_peers(manager, content):
    one, two = manager("one"), manager("two")
    host, _, port = one.endpoint.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(content)
        first, second = linked(one, two)
        assert not first.dead
        assert not second.dead


def test_beyond_max_links_the_idle_one_goes_and_a_held_one_never(manager):
    own = manager("own", max_links=1)
    peers = [manager(f"p{i}") for i in range(3)]
    first, _ = linked(own, peers[0])
    with first.held(), pytest.raises(OverloadedError):
        own.connect("p1", "i0", peers[1].endpoint, 0)
    second, _ = linked(own, peers[1])
    assert first.dead
    assert not second.dead
    assert own.live_links == 1
    assert own.epoch_for("p0", "i0", -1) == 1


@only_gloo
def test_reserved_tags_of_two_transfers_do_not_meet(manager):
    link, _ = linked(manager("one"), manager("two"))
    ranges = [range(first, first + n) for n in (3, 1, 5) for first in [link.reserve_tags(n)]]
    assert len(set().union(*ranges)) == 9


@pytest.mark.parametrize("backend", ["Nixl"], indirect=True)
def test_an_agent_is_named_after_the_pods_that_it_links(manager):
    first, second = linked(manager("p-0"), manager("d-1"))
    assert first._channel._agent.name.startswith("p-0-to-d-1-")
    assert second._channel._agent.name.startswith("d-1-to-p-0-")


def test_links_made_and_closed_leave_no_descriptor_and_no_thread(manager):
    one, two = manager("one"), manager("two")

    def cycle(epoch: int) -> None:
        first, _ = linked(one, two, epoch)
        first.close()
        two.drop("one")

    for epoch in range(3):
        cycle(epoch)

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = held()
    for epoch in range(3, 13):
        cycle(epoch)
    wait_until(lambda: held()[0] <= before[0] + 4 and held()[1] <= before[1] + 2)


class Stuck:
    """Keeps the threads that close a link's channel for as long as the test goes on."""

    def __init__(self, link: PairLink) -> None:
        self.release = threading.Event()
        self._close = link._channel.close
        link._channel.close = self._wait_and_close

    def _wait_and_close(self) -> None:
        self.release.wait(120)
        self._close()


@only_gloo
def test_a_backend_that_takes_long_to_close_a_link_holds_up_nobody(manager):
    own, others = manager("own"), [manager(f"p{i}") for i in range(4)]
    stuck = [Stuck(linked(own, other)[0]) for other in others]
    try:
        with ThreadPoolExecutor(1) as threads:
            for operation in (
                lambda: own.notify_lost("p0"),
                lambda: own.failed_epoch("p1", "i1"),
                own.close,
            ):
                threads.submit(operation).result(DEADLINE_SECONDS)
    finally:
        for each in stuck:
            each.release.set()


@only_gloo
def test_a_piece_too_large_is_refused_before_it_reaches_the_wire(manager):
    link, _ = linked(manager("one"), manager("two"))
    with pytest.raises(ValueError, match=r"chunks\.split"):
        link.send(torch.zeros(PIECE + 1, dtype=torch.uint8), 0)
    assert not link.dead


@only_gloo
def test_a_piece_on_another_device_is_refused_whatever_the_backend(manager):
    link, _ = linked(manager("one"), manager("two"))
    with pytest.raises(ValueError, match="on cpu, not on meta"):
        link.recv(torch.empty(8, dtype=torch.uint8, device="meta"), 0)
    assert not link.dead


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_nccl_on_a_cpu_machine_fails_with_a_remedy():
    with pytest.raises(BackendUnavailableError, match=r"use transfer\.kv\.backend: Gloo"):
        LinkManager("Nccl", "pod", "i0", "127.0.0.1", CPU)


class NeverConnects:
    """A backend's channel that hangs while it is made, as NCCL may when its peer dies during the initialization."""

    release = threading.Event()

    def __init__(self, *_: object) -> None:
        self.release.wait(120)
        raise LinkError("released")


@pytest.fixture
def never_connects(monkeypatch):
    monkeypatch.setattr(NeverConnects, "release", threading.Event())
    monkeypatch.setattr(nccl, "check_available", lambda _: None)
    monkeypatch.setattr(nccl, "NcclLink", NeverConnects)
    yield NeverConnects
    NeverConnects.release.set()


only_nccl = pytest.mark.parametrize("backend", ["Nccl"])


@only_nccl
def test_an_initialization_of_nccl_that_outlives_its_attempt_fails_liveness(manager, never_connects):
    one, two = manager("one", connect_timeout_seconds=1.0), manager("two", connect_timeout_seconds=1.0)
    part = KvLinks(None, CPU)  # no directory: it accepts nothing here
    part._manager = one
    alive = part.progress()["kv-connect"].age_seconds
    assert alive() == 0
    with pytest.raises(LinkError, match=r"not linked within|was lost|no link"):
        linked(one, two)
    assert one.live_links == 0  # given up, and yet
    wait_until(lambda: alive() > 2)
    never_connects.release.set()
    wait_until(lambda: alive() == 0)


@only_nccl
def test_attempts_that_were_given_up_take_room_until_they_have_ended(manager, never_connects):
    one, two = (manager(pod, connect_timeout_seconds=1.0, max_links=1) for pod in ("one", "two"))
    with pytest.raises(LinkError, match="no link"):
        linked(one, two)
    with pytest.raises(OverloadedError, match="all 1 KV links are in use"):
        one.connect("two", "i0", two.endpoint, 1)
    never_connects.release.set()
    wait_until(lambda: not connecting_threads())
    with pytest.raises(LinkError, match=r"released|no link"):
        linked(one, two, epoch=1)


@only_nccl
def test_no_link_is_evicted_for_attempts_that_were_given_up(manager, never_connects):
    one, two = (manager(pod, connect_timeout_seconds=1.0, max_links=2) for pod in ("one", "two"))
    with pytest.raises(LinkError, match="no link"):
        linked(one, two)
    never = links._Attempt("other", calls=False)
    never.set_result(link := PairLink("other", 0, CPU, Freed(), socket.socket(), lambda _: None))
    one._peers["other"] = links._Peer("other", "i0", attempt=never)
    with pytest.raises(OverloadedError, match="all 2 KV links are in use"):
        one.connect("two", "i0", two.endpoint, 1)
    assert not link.dead


class Freed:
    """A channel that moves nothing."""

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


@only_nccl
def test_nccl_is_not_initialized_for_a_peer_that_never_comes(manager, never_connects):
    own, absent = (manager(pod, connect_timeout_seconds=0.5) for pod in ("own", "absent"))
    with pytest.raises(LinkError, match="no link"):
        own.connect("absent", "i0", absent.endpoint, 0)
    wait_until(lambda: not connecting_threads())
