import asyncio
import contextlib
import hashlib
import logging
import os
import re
import time

import pytest

from mmd_api.contract.errors import (
    CapacityError,
    DeadlineError,
    LinkError,
    OverloadedError,
    PeerLostError,
    WireError,
)
from mmd_workers.wire import embedding_receiver
from mmd_workers.wire.codec import Frame, unpack, unpack_frame
from mmd_workers.wire.embedding_receiver import PLACES_PER_SENDER, EmbeddingReceiver
from mmd_workers.wire.embedding_sender import EmbeddingSender
from mmd_workers.wire.messages.encoder import EmbeddingCredit, EncodeJob
from mmd_workers.wire.messages.message_parts import FeatureRef, TensorHeader
from mmd_workers.wire.messages.prefill import EmbeddingChunk, EmbeddingGrant, EmbeddingOffer
from support.harness.waiting import DEADLINE_SECONDS, until

MIB = 1 << 20
POD = "prefill-0"


def job(name: str = "f", seconds: float = 30.0) -> EncodeJob:
    feature = FeatureRef(name, name, "image", 10, 4, [[0, 4]], {}, {}, 1)
    return EncodeJob(f"j-{name}", feature, "gw", POD, "inc", time.time() + seconds, time.time(), "r")


def tensor(num_bytes: int, name: str = "rows") -> tuple[TensorHeader, memoryview]:
    return TensorHeader(name, "float32", [num_bytes // 4], num_bytes), memoryview(os.urandom(num_bytes))


class Pod:
    """A pod that takes every feature in and remembers it."""

    def __init__(self, bus, budget_bytes=64 * MIB, timeout_seconds=0.5, **options):
        self.features: dict[str, tuple[list[TensorHeader], bytes]] = {}
        self.timings: dict[str, float] = {}
        self.verdict = None
        self.asked = 0
        self.arrived = asyncio.Event()
        self.receiver = EmbeddingReceiver(
            bus, POD, budget_bytes, self.wants, self.take, timeout_seconds=timeout_seconds, **options
        )

    def wants(self, feature_id, num_bytes):
        self.asked += 1
        return self.verdict or ("have" if feature_id in self.features else "send")

    def take(self, feature_id, headers, data, timings):
        self.features[feature_id] = (headers, bytes(data))
        self.timings = timings
        self.arrived.set()

    async def room_is_free(self):
        await until(lambda: not self.receiver.reserved_bytes)


@pytest.fixture
async def pod(connect):
    pod = Pod(await connect(POD))
    await pod.receiver.start()
    return pod


@pytest.fixture
async def sender(connect):
    return EmbeddingSender(await connect("encoder-0"), timeout_seconds=2.0)


@pytest.fixture
async def wire(connect):
    """A sender of our own making, which breaks the rules."""
    return Wire(await connect("rogue"))


class Wire:
    def __init__(self, bus):
        self.bus = bus
        self.credits: asyncio.Queue[EmbeddingCredit] = asyncio.Queue()
        self.inbox = bus.new_inbox()

    async def offer(self, data: bytes, digest: str | None = None, name: str = "f") -> EmbeddingGrant:
        await self.bus.subscribe(self.inbox, EmbeddingCredit, self.credits.put)
        offer = EmbeddingOffer(
            f"t-{name}",
            name,
            "rogue",
            [TensorHeader("rows", "uint8", [len(data)], len(data))],
            len(data),
            digest or hashlib.blake2b(data, digest_size=16).hexdigest(),
        )
        return await self.bus.request(self.bus.subjects.embedding(POD), offer, EmbeddingGrant, timeout=30)

    async def chunk(self, grant, sequence, offset, data, last=False):
        header = EmbeddingChunk(grant.transfer_id, sequence, offset, last)
        await self.bus.publish(grant.inbox, Frame(header, data), reply=self.inbox)

    async def fault(self) -> str:
        async with asyncio.timeout(30):
            while not (credit := await self.credits.get()).error:
                assert not credit.complete
        return credit.error


async def test_a_feature_of_several_tensors_arrives_as_it_was_sent(pod, sender):
    tensors = [
        tensor(3 * MIB),
        tensor(4, "tiny"),
        (TensorHeader("none", "int64", [0, 8], 0), memoryview(b"")),
        tensor(40),
    ]
    assert await sender.send(job(), tensors, timings={"encoded": 1.5}) == "sent"
    headers, data = pod.features["f"]
    assert headers == [header for header, _ in tensors]
    assert data == b"".join(view for _, view in tensors)
    assert pod.timings.pop("encoded") == 1.5
    assert 0 < pod.timings.pop("wire_seconds") < DEADLINE_SECONDS
    assert not pod.timings
    await pod.room_is_free()


async def test_a_transfers_time_excludes_its_senders_clock_and_waiting_for_room(pod, sender):
    pod.verdict = "wait"
    begun = time.monotonic()
    sending = asyncio.create_task(sender.send(job(), [tensor(MIB)], timings={"encoded": time.time() - 3600}))
    await until(lambda: pod.asked >= 3)
    pod.verdict = None
    waited = time.monotonic() - begun
    assert await sending == "sent"
    assert pod.timings["wire_seconds"] < time.monotonic() - begun - waited


async def test_a_feature_without_bytes_arrives(pod, sender):
    assert await sender.send(job(), [(TensorHeader("none", "int64", [0], 0), memoryview(b""))]) == "sent"
    assert pod.features["f"][1] == b""


async def test_a_second_sender_gets_the_answer_have(pod, sender, connect):
    rows = [tensor(MIB)]
    other = EmbeddingSender(await connect("encoder-1"))
    assert await sender.send(job(), rows) == "sent"
    assert await other.send(job(), rows) == "have"


async def test_of_two_senders_at_once_one_sends(pod, sender, connect):
    rows = [tensor(16 * MIB)]
    other = EmbeddingSender(await connect("encoder-1"))
    assert sorted(await asyncio.gather(sender.send(job(), rows), other.send(job(), rows))) == ["have", "sent"]


async def test_a_feature_that_is_not_needed_is_refused(pod, sender):
    pod.verdict = "refuse"
    assert await sender.send(job(), [tensor(400)]) == "refused"


async def test_a_receiver_too_busy_for_an_offer_says_so_in_time(pod, wire):
    pod.verdict = asyncio.get_running_loop().create_future()  # as if its loop did not come to it
    with pytest.raises(OverloadedError, match=r"too busy to answer an offer within 0.5 s"):
        async with asyncio.timeout(20):
            await wire.offer(b"1234")


async def test_an_absent_receiver_is_a_lost_peer(sender):
    with pytest.raises(PeerLostError):
        await sender.send(job(), [tensor(400)])


async def test_a_feature_larger_than_the_budget_fails_permanently(connect, sender):
    pod = Pod(await connect(POD), budget_bytes=MIB)
    await pod.receiver.start()
    with pytest.raises(CapacityError, match="raise the feature budget"):
        await sender.send(job(), [tensor(2 * MIB)])


async def test_a_full_receiver_makes_the_sender_wait_until_there_is_room(connect, sender, wire):
    pod = Pod(await connect(POD), budget_bytes=8 * MIB)
    await pod.receiver.start()
    grant = await wire.offer(bytes(6 * MIB), name="first")  # holds its room and sends nothing
    assert grant.verdict == "send"
    assert pod.receiver.reserved_bytes == 6 * MIB
    begin = time.monotonic()
    assert await sender.send(job(), [tensor(4 * MIB)]) == "sent"
    assert time.monotonic() - begin > 0.3  # the dead transfer's time-out, not at once
    await pod.room_is_free()


async def test_frozen_transfers_of_one_sender_delay_no_other(connect, sender, wire):
    pod = Pod(await connect(POD), timeout_seconds=2 * DEADLINE_SECONDS)
    await pod.receiver.start()
    grants = [await wire.offer(DATA, name=f"frozen {number}") for number in range(PLACES_PER_SENDER)]
    assert [grant.verdict for grant in grants] == ["send"] * PLACES_PER_SENDER
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await sender.send(job(), [tensor(MIB)]) == "sent"
    assert pod.receiver.reserved_bytes == PLACES_PER_SENDER * MIB, "they are frozen still"


@pytest.fixture
async def full_pod(connect, wire, monkeypatch):
    """A pod whose room is taken by a transfer `first`, and which answers no offer before its turn."""
    monkeypatch.setattr(embedding_receiver, "ANSWER_SECONDS", DEADLINE_SECONDS)
    pod = Pod(await connect(POD), budget_bytes=MIB, timeout_seconds=2 * DEADLINE_SECONDS)
    await pod.receiver.start()
    assert (await wire.offer(DATA, name="first")).verdict == "send"
    return pod


async def test_a_waiting_offer_is_answered_once_there_is_room(full_pod, wire):
    offered = asyncio.create_task(wire.offer(DATA, name="second"))
    await until(lambda: full_pod.receiver._waiting)
    full_pod.receiver.cancel("first")
    assert (await offered).verdict == "send"
    assert full_pod.asked == 3, "the second was offered once, and asked for again at its turn"


async def test_more_transfers_of_a_sender_wait_for_its_own_places(connect, wire, monkeypatch):
    monkeypatch.setattr(embedding_receiver, "ANSWER_SECONDS", DEADLINE_SECONDS)
    pod = Pod(await connect(POD), timeout_seconds=2 * DEADLINE_SECONDS)
    await pod.receiver.start()
    for number in range(PLACES_PER_SENDER):
        await wire.offer(DATA, name=f"f{number}")
    offered = asyncio.create_task(wire.offer(DATA, name="more"))
    await until(lambda: pod.receiver._waiting)
    pod.receiver.cancel("f2")
    assert (await offered).verdict == "send"
    assert pod.receiver.reserved_bytes == PLACES_PER_SENDER * MIB


async def test_an_offer_that_is_repeated_in_time_keeps_its_turn(full_pod, wire, monkeypatch):
    monkeypatch.setattr(embedding_receiver, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(embedding_receiver, "REPEAT_SECONDS", DEADLINE_SECONDS)
    answer = await wire.offer(DATA, name="early")
    assert (answer.verdict, answer.reason) == ("wait", "no capacity now")
    monkeypatch.setattr(embedding_receiver, "ANSWER_SECONDS", DEADLINE_SECONDS)
    late = asyncio.create_task(wire.offer(DATA, name="late"))
    await until(lambda: len(full_pod.receiver._waiting) == 2)
    early = asyncio.create_task(wire.offer(DATA, name="early"))
    await until(lambda: not full_pod.receiver._waiting[0].turn.done())
    full_pod.receiver.cancel("first")
    assert (await early).verdict == "send"
    assert not late.done()
    full_pod.receiver.cancel("early")
    assert (await late).verdict == "send"


async def test_an_offer_not_needed_any_more_takes_no_room_at_its_turn(full_pod, wire):
    offered = asyncio.create_task(wire.offer(DATA, name="second"))
    await until(lambda: full_pod.receiver._waiting)
    full_pod.verdict = "refuse"
    full_pod.receiver.cancel("first")
    assert (await offered).verdict == "refuse"
    await full_pod.room_is_free()


async def test_a_receiver_that_closes_gives_room_to_no_waiting_offer(full_pod, wire):
    offered = asyncio.create_task(wire.offer(DATA, name="second"))
    await until(lambda: full_pod.receiver._waiting)
    await full_pod.receiver.close()
    assert full_pod.receiver.reserved_bytes == 0
    assert not full_pod.receiver._waiting
    offered.cancel()


async def test_waiting_for_room_ends_at_the_deadline(pod, sender):
    pod.verdict = "wait"
    with pytest.raises(DeadlineError):
        await sender.send(job(seconds=0.4), [tensor(400)])


async def test_a_sender_that_dies_half_way_frees_its_room(pod, wire):
    grant = await wire.offer(bytes(2 * MIB))
    await wire.chunk(grant, 0, 0, bytes(grant.chunk_bytes))
    assert pod.receiver.reserved_bytes == 2 * MIB
    assert "no chunk within" in await wire.fault()
    await pod.room_is_free()
    assert pod.features == {}


DATA = os.urandom(MIB)
HALF = MIB // 2


@pytest.mark.parametrize(
    ("chunks", "fault"),
    [
        ([(0, 0, DATA[:HALF], False), (0, 0, DATA[:HALF], False)], "chunk 0 at byte 0 arrived, but chunk 1"),
        ([(1, HALF, DATA[HALF:], True)], "chunk 1 .* arrived, but chunk 0"),
        ([(0, 0, DATA[: HALF // 2], False), (2, HALF, DATA[HALF:], True)], "chunk 2 .* arrived, but chunk 1"),
        ([(0, 0, DATA[:HALF], False), (1, 0, DATA[HALF:], True)], "chunk 1 at byte 0 arrived, but chunk 1"),
        ([(0, 0, DATA[:HALF], False), (1, HALF, DATA[:HALF], True)], "digest"),
        ([(0, 0, DATA[:HALF], False), (1, HALF, DATA[HALF:], False)], "last=False"),
        ([(0, 0, DATA[:HALF], True)], "last=True"),
        ([(0, 0, DATA[: HALF + 1], False)], "exceeds the granted credit"),
        ([(0, 0, b"", False)], "ends at byte 0"),
        ([(0, 0, DATA[:HALF], False)], "no chunk within"),
    ],
    ids=[
        "repeated",
        "reordered",
        "lost",
        "misplaced",
        "damaged",
        "no end",
        "early end",
        "too large",
        "empty",
        "tail lost",
    ],
)
async def test_a_broken_transfer_is_noticed_and_frees_its_room(pod, wire, chunks, fault):
    grant = await wire.offer(DATA)
    for chunk in chunks:
        await wire.chunk(grant, *chunk)
    said = await wire.fault()
    assert re.search(fault, said), said
    await pod.room_is_free()
    assert pod.features == {}


@pytest.mark.parametrize(
    "header",
    [
        TensorHeader("x", "float32", [3], 8),
        TensorHeader("x", "__class__", [8], 8),
        TensorHeader("x", "float32", [-2, -1], 8),
    ],
)
async def test_an_offer_that_contradicts_itself_sets_no_memory_aside(pod, wire, header):
    offer = EmbeddingOffer("t", "f", "rogue", [header], 8, "d")
    with pytest.raises(WireError, match="tensor x"):
        await wire.bus.request(wire.bus.subjects.embedding(POD), offer, EmbeddingGrant, timeout=30)
    assert pod.receiver.reserved_bytes == 0


@pytest.mark.parametrize("breakage", ["drop", "repeat", "damage"])
async def test_the_sender_offers_again_after_a_broken_transfer(pod, sender, breakage):
    bus = (await sender._bus.bulk()).bus
    publish, broken = bus.publish, []

    async def faulty(subject, message, reply=""):
        if isinstance(message, Frame) and message.header.sequence == 3 and not broken:
            broken.append(breakage)
            if breakage == "drop":
                return
            if breakage == "repeat":
                await publish(subject, message, reply)
            if breakage == "damage":
                message = Frame(message.header, bytes(len(message.payload)))
        await publish(subject, message, reply)

    bus.publish = faulty
    rows = tensor(4 * MIB)
    assert await sender.send(job(), [rows]) == "sent"
    assert broken == [breakage]
    assert pod.features["f"][1] == bytes(rows[1])
    await pod.room_is_free()


async def test_a_transfer_that_fails_every_time_is_a_link_error(pod, sender):
    bus = (await sender._bus.bulk()).bus
    publish = bus.publish

    async def deaf(subject, message, reply=""):
        if not isinstance(message, Frame):
            await publish(subject, message, reply)

    bus.publish = deaf
    with pytest.raises(LinkError, match="4 attempts"):
        await sender.send(job(), [tensor(MIB)])
    await pod.room_is_free()


async def test_a_receiver_that_fails_to_take_over_is_not_counted_as_sent(pod, sender):
    took = pod.take
    failures = []

    def fail_once(*args):
        if not failures:
            failures.append(1)
            raise MemoryError("no room for a copy")
        took(*args)

    pod.receiver._on_feature = fail_once
    assert await sender.send(job(), [tensor(MIB)]) == "sent"
    assert failures == [1]
    assert "f" in pod.features


async def test_a_cancelled_feature_ends_its_transfer_and_refuses_the_next_offer(pod, sender):
    begun = asyncio.Event()
    home = asyncio.get_running_loop()
    take = pod.receiver._receive

    async def slow(*args):
        home.call_soon_threadsafe(begun.set)
        await asyncio.sleep(0.02)
        await take(*args)

    pod.receiver._receive = slow
    sending = asyncio.create_task(sender.send(job(), [tensor(32 * MIB)]))
    await begun.wait()
    pod.verdict = "refuse"
    pod.receiver.cancel("f")
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await sending == "refused"
    await pod.room_is_free()
    assert pod.features == {}


async def test_a_cancelled_sender_stops_and_the_room_is_freed(pod, sender):
    pod.receiver._receive = lambda *args: asyncio.sleep(0)  # no credit ever
    sending = asyncio.create_task(sender.send(job(), [tensor(32 * MIB)]))
    await until(lambda: pod.receiver.reserved_bytes)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await pod.room_is_free()


async def test_the_sender_never_exceeds_its_credit_on_the_wire(connect, sender):
    window = 2 * MIB
    pod = Pod(await connect(POD), window_bytes=window)
    await pod.receiver.start()
    spy = await connect("spy")
    credited, worst, chunks, largest = 0, 0, 0, 0

    async def watch(message):
        nonlocal credited, worst, chunks, largest
        try:
            header, payload = unpack_frame(EmbeddingChunk, message.data)
        except WireError:
            try:
                credited = max(credited, unpack(EmbeddingCredit, message.data).received_bytes)
            except WireError:
                return
        else:
            chunks += 1
            largest = max(largest, len(message.data))
            worst = max(worst, header.offset + payload.nbytes - credited)

    await spy.client.subscribe("_INBOX.>", cb=watch, pending_bytes_limit=256 * MIB)
    await spy.flush()
    assert await sender.send(job(), [tensor(20 * MIB)]) == "sent"
    await spy.flush()
    await until(lambda: credited >= 20 * MIB)
    assert chunks == 40
    assert largest <= MIB
    assert window // 2 < worst <= window


async def test_a_slow_receiver_slows_the_sender_and_loses_nothing(pod, sender):
    take = pod.receiver._receive

    async def slow(*args):
        await asyncio.sleep(0.01)
        await take(*args)

    pod.receiver._receive = slow
    rows = tensor(20 * MIB)
    begin = time.monotonic()
    assert await sender.send(job(), [rows]) == "sent"
    assert time.monotonic() - begin > 40 * 0.01
    assert pod.features["f"][1] == bytes(rows[1])


async def test_a_feature_of_125_megabytes_goes_through_a_window_of_8(
    connect, sender, caplog, record_property
):
    size = 125_000_000
    pod = Pod(await connect(POD), budget_bytes=128_000_000, window_bytes=8 * MIB, timeout_seconds=2.0)
    await pod.receiver.start()
    rows = tensor(size)
    begin = time.monotonic()
    sending = asyncio.create_task(sender.send(job(), [rows]))
    worst = 0
    while not sending.done():
        worst = max(worst, pod.receiver.reserved_bytes)
        await asyncio.wait([sending], timeout=0.01)
    seconds = time.monotonic() - begin
    assert await sending == "sent"
    assert hashlib.sha256(pod.features["f"][1]).digest() == hashlib.sha256(rows[1]).digest()
    assert worst == size
    await pod.room_is_free()
    record_property("megabytes_per_second", round(size / 1e6 / seconds))
    with caplog.at_level(logging.INFO):
        logging.getLogger(__name__).info("125 MB in %.2f s: %.0f MB/s", seconds, size / 1e6 / seconds)


async def test_small_messages_do_not_queue_behind_a_large_feature(connect, sender):
    bus = await connect(POD)
    pod = Pod(bus, budget_bytes=128_000_000, timeout_seconds=2.0)
    await pod.receiver.start()

    async def echo(credit: EmbeddingCredit) -> EmbeddingCredit:
        return credit

    await bus.serve("echo", EmbeddingCredit, echo)
    other = await connect("gateway")
    sending = asyncio.create_task(sender.send(job(), [tensor(60_000_000)]))
    answers = 0
    while not sending.done():
        await other.request("echo", EmbeddingCredit("t", 1), EmbeddingCredit, timeout=30)
        answers += 1
        await asyncio.sleep(0.002)
    assert await sending == "sent"
    assert answers > 10


async def test_a_transfer_survives_a_server_restart(own_nats_server, connect):
    pod = Pod(await connect(POD), timeout_seconds=0.5)
    await pod.receiver.start()
    sender = EmbeddingSender(await connect("encoder-0"), timeout_seconds=1.0)
    take = pod.receiver._receive
    home, begun = asyncio.get_running_loop(), asyncio.Event()

    async def slow(*args):
        home.call_soon_threadsafe(begun.set)
        await asyncio.sleep(0.01)
        await take(*args)

    pod.receiver._receive = slow
    rows = tensor(24 * MIB)
    sending = asyncio.create_task(sender.send(job(), [rows]))
    await begun.wait()
    await asyncio.to_thread(own_nats_server.kill)
    await asyncio.to_thread(own_nats_server.start)
    assert await sending == "sent"
    assert pod.features["f"][1] == bytes(rows[1])
    await pod.room_is_free()


async def test_a_cancelled_sender_stops_although_the_client_swallows_the_cancellation(pod, sender):
    """nats-py's publish swallows a cancellation that meets it while it flushes."""
    bus = (await sender._bus.bulk()).bus
    publish, offers = bus.publish, []
    request = bus.request
    home, begun = asyncio.get_running_loop(), asyncio.Event()

    async def stubborn(subject, message, reply=""):
        home.call_soon_threadsafe(begun.set)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)
        await publish(subject, message, reply)

    async def counted(*args, **options):
        offers.append(1)
        return await request(*args, **options)

    bus.publish, bus.request = stubborn, counted
    sending = asyncio.create_task(sender.send(job(), [tensor(8 * MIB)]))
    await begun.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await pod.room_is_free()
    await asyncio.sleep(0.5)
    assert len(offers) == 1
    assert pod.features == {}


async def test_an_offer_made_again_replaces_the_transfer_that_never_began(pod, wire):
    first = await wire.offer(DATA)
    second = await wire.offer(DATA)
    assert (first.verdict, second.verdict) == ("send", "send")
    assert pod.receiver.reserved_bytes == MIB
    await wire.chunk(second, 0, 0, DATA[:HALF])
    await wire.chunk(second, 1, HALF, DATA[HALF:], last=True)
    async with asyncio.timeout(30):
        await pod.arrived.wait()
    assert pod.features["f"][1] == DATA
    await pod.room_is_free()


async def test_the_jobs_deadline_includes_the_first_connection_for_bulk(own_nats_server, connect):
    sender = EmbeddingSender(await connect("encoder-0"))
    await asyncio.to_thread(own_nats_server.kill)
    with pytest.raises(DeadlineError, match="before its deadline"):
        await sender.send(job(seconds=0.2), [tensor(1000)])
