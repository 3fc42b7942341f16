"""How two sides meet and what they exchange: early and late ones, strangers, peers that stop in the middle, and every wait has an end."""

import errno
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from torch._C._distributed_c10d import PrefixStore

from mmd_api.contract.errors import LinkError
from mmd_workers.kv import rendezvous
from mmd_workers.kv.rendezvous import _VALUE, MAX_VALUE_BYTES, PairStore, Rendezvous, call
from support.harness.waiting import DEADLINE_SECONDS, wait_until

SOON = 0.3


def later(seconds: float = DEADLINE_SECONDS) -> float:
    return time.monotonic() + seconds


def fails(error: Exception):
    def operation(*_: object, **__: object):
        raise error

    return operation


@pytest.fixture
def meeting():
    made = []

    def make(patience_seconds: float = DEADLINE_SECONDS) -> Rendezvous:
        made.append(Rendezvous("127.0.0.1", patience_seconds))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def pair():
    """An exchange, and the plain socket of its peer."""
    ours, theirs = socket.socketpair()

    def make(seconds: float = DEADLINE_SECONDS) -> tuple[PairStore, socket.socket]:
        return PairStore(ours, later(seconds)), theirs

    yield make
    ours.close()
    theirs.close()


def test_a_peer_that_calls_early_is_kept_for_its_own_link(meeting):
    place = meeting()
    first, second = (call(place.endpoint, name, later()) for name in ("first", "second"))
    first.sendall(b"1")
    second.sendall(b"2")
    assert place.accept("second", later()).recv(1) == b"2"
    assert place.accept("first", later()).recv(1) == b"1"


def test_a_peer_that_does_not_call_is_waited_for_until_the_deadline(meeting):
    place = meeting()
    with pytest.raises(LinkError, match="did not call within the connect deadline"):
        place.accept("nobody", later(SOON))


def test_who_waits_for_a_peer_is_released_when_the_links_are_closed(meeting):
    place = meeting()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(place.accept, "nobody", later())
        place.close()
        with pytest.raises(LinkError, match="has closed its KV links"):
            waiting.result(DEADLINE_SECONDS)


@pytest.mark.parametrize("content", [b"GET / HTTP/1.1\r\n\r\n", b"mmd-kv-1\0\0", b"mmd-kv-1\xff\xff"])
def test_who_greets_with_something_else_is_hung_up_on(meeting, content):
    host, _, port = meeting().endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) as stranger:
        stranger.sendall(content)
        with suppress(ConnectionResetError):  # what it sent was not all read
            assert stranger.recv(1) == b""


@pytest.mark.parametrize(
    "content", [b"", b"mmd", b"mmd-kv-1\0\5half"], ids=["nothing", "a part", "half a name"]
)
def test_who_never_ends_its_greeting_is_hung_up_on(meeting, content):
    host, _, port = meeting(patience_seconds=SOON).endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) as stranger:
        stranger.sendall(content)
        assert stranger.recv(1) == b""


def test_a_peer_that_nobody_awaits_is_hung_up_on(meeting):
    early = call(meeting(patience_seconds=SOON).endpoint, "early", later())
    assert early.recv(1) == b""


def test_of_too_many_that_nobody_awaits_the_oldest_are_hung_up_on(meeting, monkeypatch):
    monkeypatch.setattr(rendezvous, "MAX_CALLERS", 2)
    place = meeting()
    oldest = call(place.endpoint, "0", later())
    newer = [call(place.endpoint, str(number), later()) for number in (1, 2)]
    assert oldest.recv(1) == b""
    for number, _ in enumerate(newer, 1):
        place.accept(str(number), later()).close()


def test_of_too_many_an_awaited_one_is_hung_up_on_last(meeting, monkeypatch):
    monkeypatch.setattr(rendezvous, "MAX_CALLERS", 1)
    place = meeting()
    place._awaited["awaited"] += 1
    awaited = call(place.endpoint, "awaited", later())
    wait_until(lambda: "awaited" in place._callers)
    other = call(place.endpoint, "other", later())
    assert other.recv(1) == b""
    place.accept("awaited", later()).close()
    assert awaited.recv(1) == b""


def test_who_waits_for_an_unwanted_link_is_released(meeting):
    place, given_up = meeting(), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(place.accept, "link", later(), given_up)
        given_up.set()
        place.look_again()
        with pytest.raises(LinkError, match="was given up while its peer was awaited"):
            waiting.result(DEADLINE_SECONDS)
    assert not place._awaited


def test_a_caller_that_cannot_be_watched_costs_no_other_one(meeting, monkeypatch):
    place = meeting()
    with monkeypatch.context() as patched:
        patched.setattr(place._selector, "register", fails(OSError(errno.ENOSPC, "epoll")))
        with suppress(ConnectionResetError, LinkError):  # its greeting was not read
            assert call(place.endpoint, "first", later()).recv(1) == b""
    second = call(place.endpoint, "second", later())
    place.accept("second", later()).close()
    assert second.recv(1) == b""


@pytest.mark.parametrize("failing", ["socketpair", "start"])
def test_a_rendezvous_that_cannot_be_made_leaves_no_port_open(monkeypatch, failing):
    made = []
    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *a, **k: made.append(create(*a, **k)) or made[-1])
    monkeypatch.setattr(
        *((socket, failing) if failing == "socketpair" else (threading.Thread, failing)),
        fails(OSError("full")),
    )
    with pytest.raises(OSError, match="full"):
        Rendezvous("127.0.0.1", SOON)
    assert made[0].fileno() == -1


def test_what_either_side_sets_both_have_until_they_have_connected(meeting):
    place = meeting()
    theirs = PairStore(call(place.endpoint, "link", later()), later())
    ours = PairStore(place.accept("link", later()), later())
    theirs.set("a", "text")
    ours.set("b", bytes(100_000))
    ours.wait(["a", "b"])
    assert ours.get("a") == theirs.get("a") == b"text"
    assert theirs.get("b") == bytes(100_000)
    assert theirs.check(["a", "b"])
    assert not theirs.check(["a", "c"])
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(ours.finish)
        second = theirs.finish()
        first.result().close()
    assert second.recv(1) == b""
    theirs.set("later", "stays here")
    assert not ours.check(["later"])
    with pytest.raises(LinkError, match="exchange nothing any more"):
        ours.get("later")


@pytest.mark.parametrize(
    "operation",
    [
        lambda exchange: exchange.get("key"),
        lambda exchange: exchange.wait(["key"]),
        lambda exchange: exchange.finish(),
        lambda exchange: exchange.set("key", bytes(MAX_VALUE_BYTES)),
    ],
    ids=["get", "wait", "finish", "set"],
)
def test_a_peer_that_stops_midway_is_awaited_until_the_deadline(pair, operation):
    exchange, peer = pair(SOON)
    peer.sendall(b"\0")
    with pytest.raises(LinkError, match="did not answer within the connect deadline"):
        operation(exchange)


def test_store_calls_of_torch_after_connecting_are_answered_locally(pair):
    exchange, peer = pair()
    exchange.set("x/known", b"value")
    peer.sendall(_VALUE.pack(0, 0))
    exchange.finish()
    store = PrefixStore("x", exchange)
    store.set("later", "value")
    assert store.get("known") == store.get("later") == b"value"
    store.wait(["known"])
    assert (store.check(["known"]), store.check(["other"])) == (True, False)
    assert (store.add("count", 2), store.add("count", 3)) == (2, 5)
    assert (store.delete_key("known"), store.delete_key("known")) == (True, False)


def test_who_waits_for_a_value_can_be_released(pair):
    exchange, _ = pair()
    threading.Timer(0.1, exchange.abort).start()
    with pytest.raises(LinkError, match="while it connected"):
        exchange.get("key")


def test_a_peer_that_closes_the_connection_is_noticed_at_once(pair):
    exchange, peer = pair()
    threading.Timer(0.1, peer.shutdown, [socket.SHUT_RDWR]).start()
    with pytest.raises(LinkError, match="gave up or died while it connected"):
        exchange.get("key")


@pytest.mark.parametrize(
    "content", [_VALUE.pack(1, MAX_VALUE_BYTES + 1), _VALUE.pack(2**16 - 1, 1), _VALUE.pack(1, 0) * 2000]
)
def test_a_peer_that_sends_too_much_is_refused(pair, monkeypatch, content):
    monkeypatch.setattr(rendezvous, "MAX_VALUES", 0 if len(content) > 100 else 256)
    exchange, peer = pair()
    peer.sendall(content)
    with pytest.raises(LinkError, match="sent something else than a peer does"):
        exchange.get("key")


def test_a_peer_that_cannot_be_reached_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for endpoint in (
        f"127.0.0.1:{port}",
        "127.0.0.1:none",
        "nowhere.invalid:1",
        "localhost:1",
        "127.0.0.1:70000",
    ):
        with pytest.raises(LinkError, match=f"cannot call {endpoint} "):
            call(endpoint, "link", later(2.0))
