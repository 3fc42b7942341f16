"""A file that is encoded on upload holds no memory that requests could have while these keep encoders busy."""

from __future__ import annotations

import asyncio

import pytest

from mmd_api.contract.subjects import Subjects
from mmd_workers.gateway.basics.media_hold import MediaHold, RequestReservation
from mmd_workers.gateway.intake import encode_on_upload
from mmd_workers.gateway.intake.encode_on_upload import EncodeOnUpload
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.job_runs import JobRuns
from mmd_workers.wire.messages.prefill import EncodeCheck, EncodeRun
from mmd_workers.wire.server import NatsServer
from mmd_workers.wire.stored_files import StoredFile
from support.harness.waiting import until

STORED = StoredFile("file-1", "", "ready", 1.0, 2.0, 50)


class Pages:
    """In place of an intake: each file has two features, whose bytes are held."""

    def __init__(self) -> None:
        self.reads = 0

    async def features_of(self, _stored: StoredFile, reservation: RequestReservation) -> list[str]:
        self.reads += 1
        await reservation.grow(50)
        return ["page-1", "page-2"]


async def test_bytes_are_freed_while_requests_await_encoders_and_reread_later(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_on_upload, "LOOK_SECONDS", 0.01)
    bus = await Bus.connect(nats_server.url, "gateway-0", Subjects("test", "encodeonupload", "r1"))
    hold, pages, busy, encoded = MediaHold(100), Pages(), False, []
    encoding = EncodeOnUpload(bus, "gateway-0", "1", pages, hold, lambda: busy)

    async def one(feature: str, _file_id: str) -> None:
        nonlocal busy
        assert hold.used_bytes == 50
        encoded.append(feature)
        busy = len(encoded) == 1

    monkeypatch.setattr(encoding, "_one", one)
    encoding.add(STORED)
    running = asyncio.create_task(encoding.run())
    try:
        await until(lambda: encoded and hold.used_bytes == 0)
        assert encoded == ["page-1"]
        busy = False
        await until(lambda: len(encoded) >= 2 and not hold.used_bytes)
    finally:
        running.cancel()
        await asyncio.wait([running])
        await bus.close()
    assert (encoded, pages.reads) == (["page-1", "page-2"], 2)


async def test_one_encoder_at_a_time_runs_the_job_of_an_upload(nats_server: NatsServer) -> None:
    bus = await Bus.connect(nats_server.url, "gateway-0", Subjects("test", "claimedupload", "r1"))
    encoding = EncodeOnUpload(bus, "gateway-0", "1", Pages(), MediaHold(100), lambda: False)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    encoding._jobs["page-1"] = "job", done, JobRuns()
    first, second = EncodeRun("encoder-0", "i1"), EncodeRun("encoder-1", "i1")
    answers = [await encoding._checked(EncodeCheck("page-1", "job", run)) for run in (first, second)]
    assert [(answer.wanted, answer.other) for answer in answers] == [(True, None), (True, first)]
    assert not (await encoding._checked(EncodeCheck("page-1", "an earlier job", first))).wanted
    await bus.close()
