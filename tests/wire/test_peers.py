import asyncio
from dataclasses import replace

import pytest

from mmd_workers.errors import DeadlineError
from mmd_workers.wire.messages import Heartbeat, Load
from mmd_workers.wire.peers import MAX_PODS, Heartbeater, PeerDirectory, PeerTable

BEAT = Heartbeat("d-0", "decode", ["decode"], "i1", "r1", "ready", "127.0.0.1:1", 100.0, Load())


def kinds(events):
    return [(event.kind, event.heartbeat.pod) for event in events]


def run(timeline, timeout=2.0):
    """Each step is (now, heartbeat | "tick" | "cut"); returns the events of each step."""
    table = PeerTable(timeout)
    seen = []
    for now, what in timeline:
        if isinstance(what, Heartbeat):
            seen.append(kinds(table.heard(what, now)))
        else:
            seen.append(kinds(table.tick(now, connected=what != "cut")))
    return seen


D1 = replace(BEAT, pod="d-1")
REBORN = replace(BEAT, incarnation="i2", sent=101.0)


@pytest.mark.parametrize(
    ("timeline", "events"),
    [
        ([(0, BEAT), (1, BEAT)], [[("appeared", "d-0")], []]),
        (
            [(0, BEAT), (1, "tick"), (2, "tick"), (2.1, "tick")],
            [[("appeared", "d-0")], [], [], [("lost", "d-0")]],
        ),
        (
            [(0, BEAT), (1, "tick"), (1.5, BEAT), (2.3, "tick"), (3.4, "tick")],
            [[("appeared", "d-0")], [], [], [], []],
        ),
        (
            [(0, BEAT), (0, D1), (1, "tick"), (1.5, D1), (2, "tick"), (2.5, "tick")],
            [[("appeared", "d-0")], [("appeared", "d-1")], [], [], [], [("lost", "d-0")]],
        ),
        (
            [(0, BEAT), (1, "tick"), (2, "tick"), (2.1, "tick"), (3, BEAT)],
            [[("appeared", "d-0")], [], [], [("lost", "d-0")], [("appeared", "d-0")]],
        ),
        ([(0, BEAT), (1, REBORN), (1.1, BEAT)], [[("appeared", "d-0")], [("reborn", "d-0")], []]),
        (
            [(0, BEAT), (1, replace(BEAT, state="draining", sent=101.0)), (1.1, BEAT)],
            [[("appeared", "d-0")], [("state", "d-0")], []],
        ),
        # the network was away: silence proves nothing until a whole time-out after it came back
        (
            [(0, BEAT), (1, "tick"), (2, "cut"), (3, "cut"), (4, "tick"), (5, "tick"), (5.1, "tick")],
            [[("appeared", "d-0")], [], [], [], [], [], [("lost", "d-0")]],
        ),
        # this process was stopped for 9 seconds: nobody is lost for that
        ([(0, BEAT), (1, "tick"), (10, "tick"), (11, BEAT)], [[("appeared", "d-0")], [], [], []]),
    ],
    ids=["appears once", "lost", "kept", "one of two", "comes back", "reborn", "drains", "cut", "stalled"],
)
def test_timeline(timeline, events):
    assert run(timeline) == events


def test_the_number_of_pods_is_bounded():
    table = PeerTable(2.0)
    for i in range(MAX_PODS + 3):
        table.heard(replace(BEAT, pod=f"p{i}"), 0.0)
    assert len(table.heartbeats()) == MAX_PODS
    assert table.refused == 3


class Process:
    """A pod that beats on the real bus."""

    def __init__(self, bus, pod: str, **fields) -> None:
        self.now = replace(BEAT, pod=pod, **fields)
        self.heartbeater = Heartbeater(bus, self.make, period=0.05)
        self.sent = 100.0

    def make(self) -> Heartbeat:
        self.sent += 1
        return replace(self.now, sent=self.sent)


async def test_pods_appear_with_their_roles_and_say_goodbye(connect):
    directory = PeerDirectory(await connect("gateway"), timeout_seconds=1.0)
    await directory.start()
    both = Process(await connect("a"), "p-0", roles=["encode", "prefill"])
    loading = Process(await connect("b"), "d-0", state="loading")
    await both.heartbeater.start()
    await loading.heartbeater.start()
    await directory.wait_for(lambda d: len(d.pods(state=None)) == 2, timeout=2)
    assert [beat.pod for beat in directory.pods()] == ["p-0"]
    assert [beat.pod for beat in directory.pods(role="prefill")] == ["p-0"]
    assert directory.pods(role="decode") == []
    loading.now = replace(loading.now, state="ready")
    await loading.heartbeater.beat()
    await directory.wait_for(lambda d: bool(d.pods(role="decode")), timeout=2)
    await both.heartbeater.close()
    await directory.wait_for(lambda d: not d.pods(role="encode"), timeout=2)
    assert directory.get("p-0").state == "drained"
    await loading.heartbeater.close()
    await directory.close()


async def test_a_pod_that_dies_without_a_word_is_lost_within_the_time_out(connect):
    directory = PeerDirectory(await connect("gateway"), timeout_seconds=0.4)
    lost: asyncio.Queue[str] = asyncio.Queue()
    directory.on_event(lambda event: lost.put_nowait(event.heartbeat.pod) if event.kind == "lost" else None)
    await directory.start()
    pod = Process(await connect("a"), "d-0")
    await pod.heartbeater.start()
    await directory.wait_for(lambda d: d.get("d-0") is not None, timeout=2)
    begin = asyncio.get_running_loop().time()
    await pod.heartbeater.close(goodbye=False)
    async with asyncio.timeout(2):
        assert await lost.get() == "d-0"
    assert asyncio.get_running_loop().time() - begin < 0.4 + 0.3
    assert directory.get("d-0") is None
    await directory.close()


async def test_waiting_for_pods_that_never_come_names_who_is_there(connect):
    directory = PeerDirectory(await connect("gateway"), timeout_seconds=1.0)
    await directory.start()
    pod = Process(await connect("a"), "d-0", state="loading")
    await pod.heartbeater.start()
    await directory.wait_for(lambda d: d.get("d-0") is not None, timeout=2)
    with pytest.raises(DeadlineError, match="d-0=loading"):
        await directory.wait_for(lambda d: bool(d.pods()), timeout=0.2)
    await pod.heartbeater.close()
    await directory.close()


async def test_a_server_restart_loses_nobody(own_nats_server, connect):
    bus = await connect("gateway")
    directory = PeerDirectory(bus, timeout_seconds=0.4)
    events: list[str] = []
    directory.on_event(lambda event: events.append(event.kind))
    await directory.start()
    pod = Process(await connect("a"), "d-0")
    await pod.heartbeater.start()
    await directory.wait_for(lambda d: d.get("d-0") is not None, timeout=2)
    await asyncio.to_thread(own_nats_server.kill)
    await asyncio.sleep(1.0)  # longer than the time-out
    await asyncio.to_thread(own_nats_server.start)
    before = pod.sent
    await directory.wait_for(lambda d: d.get("d-0").sent > before + 3, timeout=10)
    assert events == ["appeared"]
    await pod.heartbeater.close()
    await directory.close()
