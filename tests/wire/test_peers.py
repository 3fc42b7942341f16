import asyncio
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmd_api.contract.errors import DeadlineError, OverloadedError
from mmd_api.contract.load import PodLoad
from mmd_workers.basics.clock import SYSTEM_CLOCK, Clock
from mmd_workers.wire.messages.every_pod import Heartbeat
from mmd_workers.wire.peers import (
    ABSENCE_SECONDS,
    CLOSE_SECONDS,
    MAX_PODS,
    Heartbeater,
    PeerDirectory,
    PeerTable,
    sent_now,
)
from support.harness.clock import FakeClock
from support.harness.waiting import DEADLINE_SECONDS, until
from support.serving.memory_bus import MemoryNet

BEAT = Heartbeat("d-0", "decode", ["decode"], "i1", "r1", "ready", "127.0.0.1:1", 100.0, PodLoad())


def kinds(events):
    return [(event.kind, event.heartbeat.pod) for event in events]


def run(timeline, timeout=2.0):
    """Each step is (now, heartbeat | "tick" | "cut"); returns the events of each step."""
    table = PeerTable(timeout)
    seen = []
    for now, what in timeline:
        if isinstance(what, Heartbeat):
            seen.append(kinds(table.record(what, now)))
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
        table.record(replace(BEAT, pod=f"p{i}"), 0.0)
    assert len(table.heartbeats()) == MAX_PODS
    assert table.refused == 3


def test_a_pod_is_silent_from_its_loss_until_it_is_back() -> None:
    table = PeerTable(2.0)
    table.tick(0.0)
    assert table.silent_seconds("d-0", 0.0) == 0.0, "nothing has been heard yet"
    table.forgive(1.0)
    assert table.silent_seconds("d-0", 3.0) == 2.0, "it was not heard since"
    table.record(BEAT, 3.0)
    assert table.silent_seconds("d-0", 4.0) == 0.0
    for now in range(4, 10):
        table.tick(float(now))
    assert table.silent_seconds("d-0", 10.0) == 3.0, (
        "it counted as stopped until 4.0, and d-0 as lost from 7.0"
    )
    table.tick(10.0, connected=False)
    assert table.silent_seconds("d-0", 11.0) == 1.0, "it could not be heard"
    table.record(BEAT, 11.0)
    assert table.silent_seconds("d-0", 20.0) == 0.0


def test_the_record_of_lost_pods_is_bounded() -> None:
    table = PeerTable(2.0)
    table.forgive(0.0)
    for generation in range(3):
        for i in range(MAX_PODS // 2):
            table.record(replace(BEAT, pod=f"p{generation}-{i}"), 4.0 * generation)
        for pause in range(1, 5):
            table.tick(4.0 * generation + pause)
    assert len(table._silences) == MAX_PODS
    assert [table.silent_seconds(f"p{generation}-0", 12.0) for generation in range(3)] == [12.0, 5.0, 1.0]


@pytest.mark.parametrize("timeout", [0.3, 2.5, 60.0])
@pytest.mark.parametrize("stalls", [False, True], ids=["disconnected", "stopped"])
def test_only_a_long_time_without_contact_is_an_absence(timeout: float, stalls: bool) -> None:
    table, now = PeerTable(timeout), 0.0
    table.tick(now)
    for seconds, absences in ((ABSENCE_SECONDS, 0), (4 * ABSENCE_SECONDS, 1), (ABSENCE_SECONDS, 1)):
        end = now + seconds
        while not stalls and (now := now + table.tick_seconds) < end:
            table.tick(now, connected=False)
        for now in (end, end + table.tick_seconds):
            table.tick(now)
        assert table.absences == absences


class Process:
    """A pod that beats, on the real bus unless there is a clock."""

    def __init__(self, bus, pod: str, clock: Clock = SYSTEM_CLOCK, **fields) -> None:
        self.now = replace(BEAT, pod=pod, **fields)
        self.heartbeater = Heartbeater(bus, self.make, 0.05 if clock is SYSTEM_CLOCK else PERIOD, clock)
        self.sent = 100.0

    def make(self) -> Heartbeat:
        self.sent += 1
        return replace(self.now, sent=self.sent)


PERIOD, TIMEOUT = 0.5, 2.5


class Watched:
    """A directory, and one pod that it lists, on one clock and on buses in memory."""

    def __init__(self, **fields) -> None:
        self.clock = FakeClock()
        net = MemoryNet(self.clock)
        self.directory = PeerDirectory(net.bus("gateway"), TIMEOUT, self.clock)
        self.pod = Process(net.bus("d-0"), "d-0", self.clock, **fields)
        self.events: list[tuple[str, float]] = []
        self.directory.on_event(lambda event: self.events.append((event.kind, self.clock.now())))

    async def start(self) -> None:
        await self.directory.start()
        await self.pod.heartbeater.start()
        await self.clock.until(lambda: self.events)


async def test_pods_appear_with_their_roles_and_leave_as_drained(connect):
    directory = PeerDirectory(await connect("gateway"), timeout_seconds=1.0)
    await directory.start()
    both = Process(await connect("a"), "p-0", roles=["encode", "prefill"])
    loading = Process(await connect("b"), "d-0", state="loading")
    await both.heartbeater.start()
    await loading.heartbeater.start()
    await directory.wait_for(lambda d: len(d.pods(state=None)) == 2, timeout=DEADLINE_SECONDS)
    assert [beat.pod for beat in directory.pods()] == ["p-0"]
    assert [beat.pod for beat in directory.pods(role="prefill")] == ["p-0"]
    assert directory.pods(role="decode") == []
    loading.now = replace(loading.now, state="ready")
    await loading.heartbeater.beat()
    await directory.wait_for(lambda d: bool(d.pods(role="decode")), timeout=DEADLINE_SECONDS)
    await both.heartbeater.close()
    await directory.wait_for(lambda d: not d.pods(role="encode"), timeout=DEADLINE_SECONDS)
    assert directory.get("p-0").state == "drained"
    await loading.heartbeater.close()
    await directory.close()


async def test_a_pod_that_dies_without_a_word_is_lost_after_the_timeout():
    watched = Watched()
    await watched.start()
    await watched.clock.let_pass(60.0)
    assert [kind for kind, _ in watched.events] == ["appeared"]
    await watched.pod.heartbeater.close(announce=False)
    last = watched.clock.now()
    await watched.clock.until(lambda: watched.directory.get("d-0") is None)
    kind, lost = watched.events[-1]
    assert kind == "lost"
    assert TIMEOUT - PERIOD < lost - last <= TIMEOUT * 9 / 8
    await watched.directory.close()


async def test_waiting_for_pods_that_never_come_names_who_is_there():
    watched = Watched(state="loading")
    await watched.start()
    begin = watched.clock.now()
    waiting = asyncio.create_task(watched.directory.wait_for(lambda d: bool(d.pods()), timeout=30.0))
    await watched.clock.until(waiting.done)
    with pytest.raises(DeadlineError, match=r"within 30\.0 s; present: d-0=loading"):
        await waiting
    assert watched.clock.now() == begin + 30.0
    await watched.pod.heartbeater.close()
    await watched.directory.close()


async def test_a_server_restart_loses_no_peer(own_nats_server, connect):
    bus, clock = await connect("gateway"), FakeClock()
    directory = PeerDirectory(bus, TIMEOUT, clock)
    events: list[str] = []
    directory.on_event(lambda event: events.append(event.kind))
    await directory.start()
    pod = Process(await connect("a"), "d-0")
    await pod.heartbeater.start()
    await directory.wait_for(lambda d: d.get("d-0") is not None, timeout=DEADLINE_SECONDS)
    await asyncio.to_thread(own_nats_server.kill)
    await until(lambda: not bus.is_connected)
    await clock.let_pass(2 * TIMEOUT)
    await asyncio.to_thread(own_nats_server.start)
    before = pod.sent
    await directory.wait_for(lambda d: d.get("d-0").sent > before + 3, timeout=DEADLINE_SECONDS)
    await clock.let_pass(TIMEOUT)
    assert events == ["appeared"]
    await pod.heartbeater.close()
    await directory.close()


def raising_once(function):
    """`function`, whose first call raises what no caller expects."""
    calls = iter([KeyError("first")])

    def wrapped(*args):
        if (fault := next(calls, None)) is not None:
            raise fault
        return function(*args)

    return wrapped


async def test_heartbeats_continue_after_one_that_could_not_be_built(connect, caplog):
    directory = PeerDirectory(await connect("gateway"), timeout_seconds=60.0)
    await directory.start()
    pod = Process(await connect("a"), "d-0")
    await pod.heartbeater.start()
    pod.heartbeater._make = raising_once(pod.make)
    await directory.wait_for(
        lambda d: any("failed to send a heartbeat" in r.message for r in caplog.records), timeout=30
    )
    before = pod.sent
    await directory.wait_for(lambda d: d.get("d-0").sent > before, timeout=30)
    assert "KeyError" in caplog.text
    await pod.heartbeater.close()
    await directory.close()


async def test_heartbeats_that_always_fail_count_as_no_progress(connect, caplog):
    pod = Process(await connect("a"), "d-0")
    await pod.heartbeater.start()

    def never() -> Heartbeat:
        attempts.put_nowait(None)
        raise KeyError("never")

    attempts: asyncio.Queue[None] = asyncio.Queue()
    pod.heartbeater._make = never
    async with asyncio.timeout(30):
        await attempts.get()
        before = pod.heartbeater.last_progress
        await attempts.get()
        await attempts.get()
    assert pod.heartbeater.last_progress == before
    await pod.heartbeater.close(announce=False)


async def test_losses_are_still_noticed_after_a_tick_that_failed(caplog):
    watched = Watched()
    await watched.start()
    watched.directory._table.tick = raising_once(watched.directory._table.tick)
    await watched.pod.heartbeater.close(announce=False)
    await watched.clock.until(lambda: watched.directory.get("d-0") is None, 2 * TIMEOUT)
    assert "KeyError" in caplog.text
    await watched.directory.close()


async def test_closing_waits_a_second_of_its_clock_for_a_heartbeat() -> None:
    """For one whose client swallowed the cancellation."""
    clock = FakeClock()
    bus = MemoryNet(clock).bus("d-0")
    heartbeater = Heartbeater(bus, lambda: BEAT, PERIOD, clock)

    async def swallow(*_: object) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    await heartbeater.start()
    bus.publish = swallow
    beating = heartbeater._task
    await clock.let_pass(PERIOD)
    begin = clock.now()
    closing = asyncio.create_task(heartbeater.close(announce=False))
    await clock.until(closing.done)
    assert clock.now() - begin == CLOSE_SECONDS
    beating.cancel()
    await asyncio.wait([beating])


def test_a_clock_that_is_set_back_makes_no_heartbeat_late(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sent_now()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert sent_now() >= before


async def test_an_announcement_that_cannot_be_sent_is_logged_and_not_raised(
    connect, cut_off, caplog, own_nats_server
):
    bus = await connect("a")
    heartbeater = Heartbeater(bus, lambda: BEAT, 0.5)
    await cut_off(bus)
    with pytest.raises(OverloadedError):
        await heartbeater.beat()
    await heartbeater.announce()
    assert "failed to send a heartbeat; next attempt within 0.5 s" in caplog.text


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["beat", "look", "tick"]),
            st.sampled_from("dacb"),
            st.sampled_from([0.1, 1.5, 4.0]),
        ),
        max_size=40,
    )
)
def test_the_newest_heartbeats_are_listed_by_name_and_lists_never_change(steps) -> None:
    table, newest, seen = PeerTable(3.0), dict[str, tuple[Heartbeat, float]](), []
    now = 100.0
    table.tick(now)
    for action, pod, seconds in steps:
        if action == "beat":
            beat = replace(BEAT, pod=pod, sent=now)
            table.record(beat, now)
            newest[pod] = beat, now
        elif action == "tick":
            now += seconds
            if seconds > 1.5:
                newest = {pod: (beat, now) for pod, (beat, _) in newest.items()}  # this process stood still
            newest = {pod: (beat, at) for pod, (beat, at) in newest.items() if now - at <= 3.0}
            table.tick(now)
        seen.append((table.heartbeats(), [newest[pod][0] for pod in sorted(newest)]))
    assert all(listed == expected for listed, expected in seen)
