import asyncio
import gc
import logging
import threading
import warnings
from urllib.parse import urlsplit

import pytest
from nats.aio.client import Client
from nats.errors import AuthorizationError

from mmd_api.contract.errors import (
    DeadlineError,
    MmdError,
    OverloadedError,
    PeerLostError,
    TooLongError,
    WireError,
)
from mmd_workers.wire.bus import CONCURRENT_REQUESTS, Bus
from mmd_workers.wire.codec import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES, Frame, pack
from mmd_workers.wire.messages.gateway import MediaRead, MediaSlice
from mmd_workers.wire.messages.prefill import Cancel, Placed
from mmd_workers.wire.parts import ASSEMBLY_SECONDS, MAX_ASSEMBLIES, PART_BYTES, Assembler
from mmd_workers.wire.refusals import Refusal
from support.harness.waiting import DEADLINE_SECONDS


async def test_messages_arrive_in_order(connect):
    here, there = await connect("here"), await connect("there")
    got: asyncio.Queue[Cancel] = asyncio.Queue()
    await there.subscribe("a.b", Cancel, got.put)
    await there.flush()
    for i in range(200):
        await here.publish("a.b", Cancel("r", i))
    async with asyncio.timeout(30):
        assert [(await got.get()).attempt for _ in range(200)] == list(range(200))


async def test_a_request_is_answered(connect):
    here, there = await connect("here"), await connect("there")

    async def place(cancel: Cancel) -> Placed:
        return Placed(cancel.request_id, accepted=True)

    await there.serve("place", Cancel, place)
    await there.flush()
    assert await here.request("place", Cancel("r7", 0), Placed, timeout=DEADLINE_SECONDS) == Placed(
        "r7", True
    )


async def test_requests_that_are_cancelled_before_their_turn_do_not_begin(connect):
    here, there = await connect("here"), await connect("there")
    begun: list[int] = []

    async def end_all(cancel: Cancel) -> None:
        begun.append(cancel.attempt)
        for task in there._serving:
            task.cancel()

    await there.serve("place", Cancel, end_all)
    await there.flush()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in range(50):
            await here.publish("place", Cancel("r", number))
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not begun or there._serving:
                await asyncio.sleep(0)
        await there.close()
        gc.collect()
    assert len(begun) < 50, "none was cancelled before its turn"
    assert [str(one.message) for one in warned if one.category is RuntimeWarning] == []


async def test_a_request_without_a_subscriber_fails_at_once_as_a_lost_peer(connect):
    here = await connect("here")
    start = asyncio.get_running_loop().time()
    with pytest.raises(PeerLostError, match="no subscriber on"):
        await here.request("nobody.home", Cancel("r", 0), Placed, timeout=30)
    assert asyncio.get_running_loop().time() - start < 15


async def test_connecting_ends_in_time_though_the_client_swallows_the_cancellation(
    nats_server, subjects, monkeypatch
):
    """As it does when the server refuses the login at the same moment; then it would try again for ever."""
    swallowed = []

    async def refused(_: Client) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if swallowed:
                raise
            swallowed.append(True)
            raise AuthorizationError from None

    monkeypatch.setattr(Client, "_process_connect_init", refused)
    with pytest.raises(PeerLostError, match="within 1 s"):
        async with asyncio.timeout(DEADLINE_SECONDS):
            await Bus.connect(nats_server.url, "late", subjects, timeout=1.0)
    assert swallowed


async def test_no_reply_in_time_is_a_deadline(connect):
    here = await connect("here")
    never = asyncio.Event()

    async def hang(_: Cancel) -> Placed:
        await never.wait()
        raise AssertionError

    await here.serve("slow", Cancel, hang)
    with pytest.raises(DeadlineError, match="slow within"):
        await here.request("slow", Cancel("r", 0), Placed, timeout=0.1)


async def test_an_error_of_the_server_is_raised_at_the_requester(connect):
    here, there = await connect("here"), await connect("there")

    async def full(_: Cancel) -> Placed:
        raise OverloadedError("no blocks: try elsewhere")

    async def broken(_: Cancel) -> Placed:
        raise ZeroDivisionError("oops")

    await there.serve("full", Cancel, full)
    await there.serve("broken", Cancel, broken)
    await there.flush()
    with pytest.raises(OverloadedError, match="no blocks"):
        await here.request("full", Cancel("r", 0), Placed, timeout=DEADLINE_SECONDS)
    with pytest.raises(MmdError, match="ZeroDivisionError while serving broken"):
        await here.request("broken", Cancel("r", 0), Placed, timeout=DEADLINE_SECONDS)
    assert there.handler_errors == 1


async def test_requests_are_served_side_by_side(connect):
    here = await connect("here")
    both = asyncio.Barrier(2)

    async def meet(cancel: Cancel) -> Placed:
        await both.wait()
        return Placed(cancel.request_id, True)

    await here.serve("meet", Cancel, meet)
    replies = await asyncio.gather(
        *(here.request("meet", Cancel(n, 0), Placed, timeout=DEADLINE_SECONDS) for n in "ab")
    )
    assert [reply.request_id for reply in replies] == ["a", "b"]


async def test_bad_messages_are_counted_and_do_not_end_the_subscription(connect, caplog):
    here = await connect("here")
    got: asyncio.Queue[Cancel] = asyncio.Queue()
    await here.subscribe("x", Cancel, got.put)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            await here.client.publish("x", b"\xc1garbage")
        await here.publish("x", Refusal("another", "type"))
        await here.publish("x", Cancel("good", 1))
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert await got.get() == Cancel("good", 1)
    assert here.bad_messages == 51
    assert sum("invalid message" in record.message for record in caplog.records) == 1


async def test_a_bad_request_is_refused_not_timed_out(connect):
    here = await connect("here")

    async def answer(_: Cancel) -> Placed:
        raise AssertionError

    await here.serve("x", Cancel, answer)
    with pytest.raises(WireError, match="request_id"):
        await here.request("x", Refusal("not", "a cancel"), Placed, timeout=DEADLINE_SECONDS)


async def test_a_handler_that_raises_does_not_end_the_subscription(connect):
    here = await connect("here")
    got: asyncio.Queue[Cancel] = asyncio.Queue()

    async def handle(cancel: Cancel) -> None:
        if cancel.attempt == 0:
            raise RuntimeError("once")
        await got.put(cancel)

    await here.subscribe("x", Cancel, handle)
    for i in range(2):
        await here.publish("x", Cancel("r", i))
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert (await got.get()).attempt == 1


async def test_a_reply_can_carry_bytes(connect):
    here = await connect("here")

    async def read(request: MediaRead) -> Frame:
        return Frame(
            MediaSlice(request.digest, request.offset, 10), memoryview(b"0123456789")[request.offset :]
        )

    await here.serve("m", MediaRead, read)
    header, view = await here.request_frame("m", MediaRead("d", 4, 6), MediaSlice, timeout=DEADLINE_SECONDS)
    assert (header.offset, bytes(view)) == (4, b"456789")


async def test_subscriptions_and_requests_survive_a_server_restart(own_nats_server, connect):
    here, there = await connect("here"), await connect("there")
    got: asyncio.Queue[Cancel] = asyncio.Queue()
    back = {bus: asyncio.Event() for bus in (here, there)}
    for bus, event in back.items():

        async def hook(event=event) -> None:
            event.set()

        bus.on_reconnect(hook)
    await there.subscribe("x", Cancel, got.put)
    await there.flush()
    await asyncio.to_thread(own_nats_server.kill)
    await asyncio.to_thread(own_nats_server.start)
    async with asyncio.timeout(30):
        for event in back.values():
            await event.wait()
        await there.flush()
        await here.publish("x", Cancel("after", 1))
        assert await got.get() == Cancel("after", 1)


async def test_no_server_is_a_typed_error_within_the_time_given(subjects):
    with pytest.raises(PeerLostError, match="check that it is running"):
        await Bus.connect("nats://127.0.0.1:1", "lonely", subjects, timeout=0.3)


async def test_closing_finishes_the_requests_in_flight(connect):
    here, there = await connect("here"), await connect("there")
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(cancel: Cancel) -> Placed:
        begun.set()
        await go_on.wait()
        return Placed(cancel.request_id, True)

    await there.serve("x", Cancel, slow)
    await there.flush()
    reply = asyncio.create_task(here.request("x", Cancel("r", 0), Placed, timeout=DEADLINE_SECONDS))
    async with asyncio.timeout(30):
        await begun.wait()
    closing = asyncio.create_task(there.close())
    go_on.set()
    assert (await reply).accepted
    await closing
    with pytest.raises(PeerLostError):
        await there.publish("x", Cancel("r", 0))


async def test_a_flush_confirms_what_was_sent_before_it(nats_server, subjects):
    """Seen by the server: the PING of the flush comes behind the subscription, whose handlers it promises to be reachable."""
    sent = bytearray()

    async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, record: bytearray) -> None:
        while data := await source.read(65536):
            record += data
            sink.write(data)
        sink.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = urlsplit(nats_server.url)
        from_server, to_server = await asyncio.open_connection(address.hostname, address.port)
        await asyncio.gather(
            pass_on(reader, to_server, sent),
            pass_on(from_server, writer, bytearray()),
            return_exceptions=True,
        )

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        bus = await Bus.connect(f"nats://127.0.0.1:{port}", "relayed", subjects)
        sent.clear()
        await bus.subscribe("confirmed", Cancel, asyncio.Queue().put)
        await bus.flush()
        assert b"SUB confirmed" in sent
        assert sent.index(b"SUB confirmed") < sent.index(b"PING")
        await bus.close()


async def test_bulk_has_a_separate_connection(connect):
    here = await connect("here")
    bulk = await here.bulk()
    assert bulk is await here.bulk()
    got: asyncio.Queue[Cancel] = asyncio.Queue()
    await here.subscribe("x", Cancel, got.put)
    await here.flush()
    await bulk.run(bulk.bus.publish("x", Cancel("from the other thread", 1)))
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert (await got.get()).attempt == 1
    await here.close()
    assert not any(thread.name.startswith("here-bulk") for thread in threading.enumerate())


async def test_work_on_the_bulk_loop_is_cancelled_at_its_time_limit(connect):
    bulk = await (await connect("here")).bulk()
    cancelled = threading.Event()

    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        await bulk.run(stuck(), timeout=0.1)
    assert await asyncio.to_thread(cancelled.wait, DEADLINE_SECONDS)


async def test_more_requests_than_can_be_held_are_refused_at_once(connect):
    here = await connect("here")
    go_on = asyncio.Event()

    async def slow(cancel: Cancel) -> Placed:
        await go_on.wait()
        return Placed(cancel.request_id, True)

    await here.serve("x", Cancel, slow)
    requests = [
        asyncio.create_task(here.request("x", Cancel(f"r{i}", 0), Placed, timeout=DEADLINE_SECONDS))
        for i in range(CONCURRENT_REQUESTS + 5)
    ]
    async with asyncio.timeout(30):
        done, _ = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        assert all(isinstance(task.exception(), OverloadedError) for task in done)
        go_on.set()
        results = await asyncio.gather(*requests, return_exceptions=True)
    assert sum(isinstance(result, OverloadedError) for result in results) == 5


async def test_a_handler_that_is_too_slow_costs_messages_not_memory(connect, monkeypatch):
    monkeypatch.setattr("mmd_workers.wire.connection.PENDING_MESSAGES", 10)
    here, there = await connect("here"), await connect("there")
    go_on = asyncio.Event()

    async def slow(_: Cancel) -> None:
        await go_on.wait()

    await here.subscribe("x", Cancel, slow)
    await here.flush()
    for i in range(50):
        await there.publish("x", Cancel("r", i))
    await there.flush()
    async with asyncio.timeout(30):
        while here.dropped_messages < 39:  # ten wait, one may be in hand
            await asyncio.sleep(0.01)
    await here.flush()
    assert here.dropped_messages <= 40
    go_on.set()


async def test_a_handler_that_never_ends_does_not_hold_up_closing(connect):
    here = await connect("here")
    begun = asyncio.Event()

    async def stuck(_: Cancel) -> None:
        begun.set()
        await asyncio.Event().wait()

    await here.subscribe("x", Cancel, stuck)
    await here.publish("x", Cancel("r", 0))
    await begun.wait()
    await here.close(timeout=0.3)


def message_of(num_bytes: int) -> Placed:
    """A message of exactly so many bytes when packed."""
    empty = len(pack(Placed("", accepted=True, message="x" * (1 << 16)))) - (
        1 << 16
    )  # as for any length from 64 KiB on
    message = Placed("", accepted=True, message="x" * (num_bytes - empty))
    assert len(pack(message, 2 * MAX_REQUEST_BYTES)) == num_bytes
    return message


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("num_bytes", [MAX_MESSAGE_BYTES, 2 * PART_BYTES, 6 * PART_BYTES])
async def test_a_request_of_any_size_is_answered(connect, num_bytes: int, beyond: int):
    here, there = await connect("here"), await connect("there")

    async def echo_size(placed: Placed) -> Cancel:
        return Cancel("size", len(placed.message))

    await there.serve("long", Placed, echo_size)
    await there.flush()
    message = message_of(num_bytes + beyond)
    assert await here.request("long", message, Cancel, timeout=DEADLINE_SECONDS) == Cancel(
        "size", len(message.message)
    )


@pytest.mark.parametrize(("beyond", "refused"), [(-1, False), (0, False), (1, True)])
async def test_a_request_has_a_largest_size(connect, beyond: int, refused: bool):
    here, there = await connect("here"), await connect("there")

    async def place(_: Placed) -> Cancel:
        return Cancel("taken", 0)

    await there.serve("largest", Placed, place)
    await there.flush()
    message = message_of(MAX_REQUEST_BYTES + beyond)
    if refused:
        with pytest.raises(TooLongError, match=str(MAX_REQUEST_BYTES)):
            await here.request("largest", message, Cancel, timeout=DEADLINE_SECONDS)
    else:
        assert await here.request("largest", message, Cancel, timeout=DEADLINE_SECONDS) == Cancel("taken", 0)


async def test_an_error_about_a_long_request_is_raised_at_the_requester(connect):
    here, there = await connect("here"), await connect("there")

    async def refuse(_: Placed) -> Cancel:
        raise OverloadedError("no room for it")

    await there.serve("full", Placed, refuse)
    await there.flush()
    with pytest.raises(OverloadedError, match="no room for it"):
        await here.request("full", message_of(MAX_MESSAGE_BYTES + 1), Cancel, timeout=DEADLINE_SECONDS)


def test_parts_that_never_end_are_forgotten_and_bounded():
    assembler = Assembler()
    for number in range(MAX_ASSEMBLIES):
        assert assembler.take(f"r{number} 0 2", b"a", now=0.0) is None
    with pytest.raises(OverloadedError, match="elsewhere"):
        assembler.take("more 0 2", b"a", now=1.0)
    assert assembler.take("r0 1 2", b"b", now=1.0) == b"ab"
    assert assembler.take("more 0 2", b"a", now=1.0) is None
    late = ASSEMBLY_SECONDS + 0.5
    assert assembler.take("later 0 2", b"a", now=late) is None
    with pytest.raises(WireError, match="part 1 of 2 arrived, but part 0 was expected"):
        assembler.take("r1 1 2", b"b", now=late)


@pytest.mark.parametrize("header", ["", "r", "r 0", "r 1 1", "r -1 2", "r 0 9999", "r x 2", "r 0 2 3"])
def test_a_header_that_names_no_part_is_refused(header: str):
    with pytest.raises(WireError):
        Assembler().take(header, b"", now=0.0)
