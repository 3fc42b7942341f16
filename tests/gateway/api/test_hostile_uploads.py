"""What clients may send to /v1/files: forms that are broken, slow, endless or too many; names and ids that reach for others. Nothing is left of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import nats
import pytest

from mmd_api.tenants import new_key
from mmd_workers.gateway.basics import body
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import DEADLINE_SECONDS, until
from tests.gateway.running import Launch, Running, assert_nothing_is_left
from tests.gateway.tenancy import AUTH, bearer, tenant, write
from tests.gateway.uploads import FILES, bmp, png, stored, upload

BOUNDARY = "b0undary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
HEAD = (
    f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
).encode()
END = f"\r\n--{BOUNDARY}--\r\n".encode()


def part(name: str, value: str, filename: str = "") -> bytes:
    named = f'; filename="{filename}"' if filename else ""
    return f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{named}\r\n\r\n{value}\r\n'.encode()


async def until_empty(gateway: Running) -> None:
    """NATS has no byte of a file, and no entry but those of deletions."""
    assert (await gateway.http.get("/v1/files")).json()["data"] == []
    client = await nats.connect(gateway.nats.url)
    try:
        context, name = client.jetstream(), gateway.subjects.file_bytes_stream

        async def is_empty() -> bool:
            return not (await context.stream_info(name)).state.messages

        await until(is_empty, f"{name} is empty")
    finally:
        await client.close()
    assert (await gateway.http.get("/v1/files")).json()["data"] == []


BROKEN = {
    "no form": (b"{}", {"content-type": "application/json"}, 415, "multipart/form-data"),
    "no boundary": (HEAD, {"content-type": "multipart/form-data"}, 415, "boundary"),
    "a long boundary": (HEAD, {"content-type": f"multipart/form-data; boundary={'b' * 71}"}, 415, "70"),
    "compressed": (HEAD + png() + END, {**FORM, "content-encoding": "gzip"}, 415, "content-encoding"),
    "no multipart": (b"hello" * 100, FORM, 400, "no valid multipart form"),
    "another boundary": (HEAD.replace(b"b0", b"b1") + END, FORM, 400, "no valid multipart form"),
    "cut off": (HEAD + png(), FORM, 400, "ends before its multipart form"),
    "empty": (b"", FORM, 400, "ends before its multipart form"),
    "no file": (part("purpose", "vision") + END[2:], FORM, 400, "file is missing"),
    "an empty file": (HEAD + END, FORM, 400, "it is empty"),
    "no filename": (part("file", "x") + END[2:], FORM, 400, "no filename"),
    "two files": (HEAD + png() + b"\r\n" + part("file", "x", "b") + END[2:], FORM, 400, "several"),
    "no purpose": (part("file", "GIF89a", "a.gif") + END[2:], FORM, 400, "purpose is missing"),
    "another purpose": (HEAD.replace(b"vision", b"batch") + png() + END, FORM, 400, "not served"),
    "a field twice": (part("purpose", "vision") + HEAD + png() + END, FORM, 400, "twice"),
    "an unknown field": (part("model", "x") + HEAD + png() + END, FORM, 400, "unknown field"),
    "a long field": (part("purpose", "v" * 2000) + END[2:], FORM, 400, "1024 bytes"),
    "no medium": (HEAD + b"#!/bin/sh" + END, FORM, 400, "unknown format"),
    "a part without a name": (f"--{BOUNDARY}\r\n\r\nx".encode() + END, FORM, 400, "no name"),
    "many headers": (f"--{BOUNDARY}\r\n".encode() + b"a: b\r\n" * 100 + b"\r\n" + END, FORM, 400, "no valid multipart"),
    "a long header": (f"--{BOUNDARY}\r\na: {'b' * 9000}\r\n\r\n".encode() + END, FORM, 400, "no valid multipart"),
    "a lifetime of zero": (part("expires_after[anchor]", "created_at") + part("expires_after[seconds]", "0") + HEAD + png() + END, FORM, 400, "from 1 to"),
    "a lifetime that never ends": (part("expires_after[anchor]", "created_at") + part("expires_after[seconds]", "9" * 400) + HEAD + png() + END, FORM, 400, "from 1 to"),
    "another anchor": (part("expires_after[anchor]", "last_use") + HEAD + png() + END, FORM, 400, "created_at"),
}  # fmt: skip


async def test_a_broken_form_is_refused_with_a_remedy_and_leaves_nothing(
    launch: Launch, subtests: pytest.Subtests
) -> None:
    gateway = await launch(files=FILES)
    for name, (content, headers, status, expected) in BROKEN.items():
        with subtests.test(name):
            answer = await gateway.http.post("/v1/files", content=content, headers=headers)
            assert answer.status_code == status, answer.text
            assert expected in answer.json()["error"]["message"]
            assert ";" in answer.json()["error"]["message"], "a remedy follows"
    await until_empty(gateway)
    await assert_nothing_is_left(gateway)


async def test_a_page_of_another_site_uploads_nothing(launch: Launch) -> None:
    """A browser sends a form without a preflight. On a loopback address, such pages get no further than its server."""
    gateway = await launch(files=FILES, cors={"allowedOrigins": ["https://app.example.com"]})
    for origin, status in {
        "https://other.example.com": 403,
        "null": 403,
        "https://app.example.com": 200,
        gateway.url: 200,
    }.items():
        content, headers = HEAD + png() + END, {**FORM, "origin": origin}
        answer = await gateway.http.post("/v1/files", content=content, headers=headers)
        assert answer.status_code == status, (origin, answer.text)


async def test_a_path_in_a_filename_is_cut_off(launch: Launch, subtests: pytest.Subtests) -> None:
    gateway = await launch(files=FILES)
    for given, expected in {
        "../../etc/passwd": "passwd",
        "C:\\\\Users\\\\me\\\\red.png": "red.png",
        "..": "file",
        "a\x1b[31mb\u202e": "a[31mb",
        "é" * 300: "é" * 127,
    }.items():
        with subtests.test(given):
            content = HEAD.replace(b"a.png", given.encode()) + png() + END
            answer = await gateway.http.post("/v1/files", content=content, headers=FORM)
            assert answer.status_code == 200, answer.text
            assert answer.json()["filename"] == expected
            read = await gateway.http.get(f"/v1/files/{answer.json()['id']}/content")
            assert read.headers["content-type"] == "application/octet-stream"
            assert read.headers["x-content-type-options"] == "nosniff"


async def test_a_slow_body_is_given_up_and_its_room_is_free_again(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "STALL_SECONDS", 0.2)
    gateway = await launch(files=FILES)

    url = httpx.URL(gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    fields = {"host": url.host, "content-length": "1000000", **FORM}
    lines = ["POST /v1/files HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode() + HEAD + bmp(300_000))
    assert b" 408 " in await reader.readline()
    writer.close()
    await until_empty(gateway)
    for _ in range(2):
        assert (await upload(gateway, bmp(600_000), "large.bmp")).status_code == 200


async def test_an_upload_ends_at_the_request_deadline(launch: Launch) -> None:
    gateway = await launch(files=FILES)

    async def slow() -> AsyncIterator[bytes]:
        yield HEAD
        for _ in range(30):  # then the client reads its answer
            yield b"x"
            await asyncio.sleep(0.05)

    headers = {**FORM, "x-request-timeout": "0.5"}
    answer = await gateway.http.post("/v1/files", content=slow(), headers=headers)
    assert answer.status_code == 408
    assert "x-request-timeout" in answer.json()["error"]["message"]
    await until_empty(gateway)


async def test_an_endless_body_ends_at_the_limit_of_a_file(launch: Launch) -> None:
    gateway = await launch(files=FILES)
    sent = 0

    async def endless(piece: bytes) -> AsyncIterator[bytes]:
        nonlocal sent
        yield HEAD + png()
        while True:
            sent += len(piece)
            yield piece

    for piece in (b"\r" * 65_536, b"x" * 65_536, END + b"x" * 65_536):
        sent = 0
        try:
            answer = await gateway.http.post("/v1/files", content=endless(piece), headers=FORM)
            assert answer.status_code == 413, answer.text
            assert "maxFileMebibytes" in answer.json()["error"]["message"]
        except httpx.TransportError:
            pass  # the connection was closed while the client still wrote, and so it read no answer
        assert sent < 64 << 20
    await until_empty(gateway)


async def test_a_declared_length_beyond_the_limit_is_refused_before_it_is_read(launch: Launch) -> None:
    gateway = await launch(files=FILES)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    head = f"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {FORM['content-type']}\r\ncontent-length: 99999999999\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert b" 413 " in await reader.readline()
    writer.close()


async def test_a_declared_length_beside_chunks_bypasses_no_limit(launch: Launch) -> None:
    gateway = await launch(files=FILES)
    content = HEAD + bmp(600_000) + END  # 1.8 MB, of which two fit
    head = f"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {FORM['content-type']}\r\ntransfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n"
    message = head.encode() + f"{len(content):x}\r\n".encode() + content + b"\r\n0\r\n\r\n"

    async def send() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(message)
        async with asyncio.timeout(DEADLINE_SECONDS):
            status = (await reader.readline()).split()[1]
        writer.close()
        return status

    assert sorted([await send() for _ in range(4)]) == [b"200", b"200", b"413", b"413"]
    files = (await gateway.http.get("/v1/files")).json()["data"]
    assert sum(one["bytes"] for one in files) <= FILES["maxTenantMebibytes"] << 20


async def test_a_small_upload_without_a_length_needs_only_its_own_room(launch: Launch) -> None:
    gateway = await launch(files=FILES)
    for _ in range(2):
        assert (await upload(gateway, bmp(600_000), "a.bmp")).status_code == 200

    async def pieces() -> AsyncIterator[bytes]:
        yield HEAD + png() + END

    answer = await gateway.http.post("/v1/files", content=pieces(), headers=FORM)
    assert answer.status_code == 200, answer.text


async def test_uploads_that_are_no_medium_use_up_nothing(launch: Launch) -> None:
    gateway = await launch(files={**FILES, "maxFiles": 4})  # a tenant has two
    for _ in range(4):
        assert (await upload(gateway, b"#!/bin/sh", "a.png")).status_code == 400
    for _ in range(2):
        answer = await upload(gateway, png())
        assert answer.status_code == 200, answer.text
    await gateway.http.delete(f"/v1/files/{answer.json()['id']}")
    refused = await upload(gateway, png())
    assert refused.status_code == 413
    assert "1 files and 1 deletions" in refused.json()["error"]["message"]


async def test_a_client_that_hangs_up_in_the_middle_leaves_nothing(launch: Launch) -> None:
    gateway = await launch(files=FILES)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    content = HEAD + bmp(400_000)
    head = f"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {FORM['content-type']}\r\ncontent-length: {len(content) + 9}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()

    async def is_stored() -> bool:
        return await stored(gateway) > 1

    await until(is_stored)
    writer.close()
    await until_empty(gateway)
    await assert_nothing_is_left(gateway)
    del reader


async def test_many_tiny_files_stop_at_the_tenants_share_of_their_number(launch: Launch) -> None:
    gateway = await launch(files={**FILES, "maxFiles": 40})
    answers = await asyncio.gather(*(upload(gateway, png(side=1)) for _ in range(50)))
    assert sorted(answer.status_code for answer in answers) == [200] * 20 + [413] * 30
    refused = next(answer for answer in answers if answer.status_code == 413)
    assert "its limit is 20" in refused.json()["error"]["message"]
    assert len((await gateway.http.get("/v1/files")).json()["data"]) == 20


async def test_a_tenant_finds_no_file_of_another_whatever_it_asks(launch: Launch, tmp_path: Path) -> None:
    owner, other = new_key(), new_key()
    keys = tmp_path / "keys.yaml"
    write(keys, tenant("owner", owner), tenant("other", other))
    gateway = await launch(files=FILES, auth=AUTH, keys_file=str(keys))
    await gateway.worker()
    made = await gateway.http.post(
        "/v1/files", files={"file": ("red.png", png())}, data={"purpose": "vision"}, headers=bearer(owner)
    )
    file_id = made.json()["id"]
    asked = {
        "model": "builtin/demo",
        "messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": file_id}}]}],
    }
    for key, status in ((other, 404), (owner, 200)):
        headers = bearer(key)
        listed = (await gateway.http.get("/v1/files", headers=headers)).json()["data"]
        assert [one["id"] for one in listed] == ([file_id] if status == 200 else [])
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
            assert (await gateway.http.get(path, headers=headers)).status_code == status
        answer = await gateway.http.post("/v1/chat/completions", json=asked, headers=headers)
        assert answer.status_code == status, answer.text
        assert (await gateway.http.delete(f"/v1/files/{file_id}", headers=headers)).status_code == status
    for guess in ("*", ">", "file-*", "..", "file-" + "0" * 5000, "%00", "a.b"):
        answer = await gateway.http.get(f"/v1/files/{guess}", headers=bearer(other))
        assert answer.status_code == 404, guess
    assert (await gateway.http.get("/v1/files")).status_code == 401


async def test_a_server_without_room_refuses_with_the_field_and_recovers(
    launch: Launch, tmp_path: Path
) -> None:
    full = NatsServer(tmp_path / "full", configuration="jetstream { max_file_store: 8MB }")
    await asyncio.to_thread(full.start)
    try:
        gateway = await launch(nats=full, files={"maxMebibytes": 64, "maxTenantMebibytes": 64})
        refused = await upload(gateway, png())
        assert refused.status_code == 413, refused.text
        assert "spec.nats.storageMebibytes" in refused.json()["error"]["message"]
        assert (await gateway.http.get("/livez")).status_code == 200
    finally:
        await asyncio.to_thread(full.stop)


async def test_a_server_that_lost_its_store_starts_over_with_new_files(
    launch: Launch, own_nats_server: NatsServer
) -> None:
    gateway = await launch(nats=own_nats_server, files=FILES)
    file_id = (await upload(gateway, png())).json()["id"]
    client = await nats.connect(own_nats_server.url)
    for name in (gateway.subjects.files_stream, gateway.subjects.file_bytes_stream):
        await client.jetstream().delete_stream(name)
    await client.close()
    assert (await gateway.http.get(f"/v1/files/{file_id}")).status_code == 404
    again = await upload(gateway, png())
    assert again.status_code == 200, again.text
    assert (await gateway.http.get(f"/v1/files/{again.json()['id']}/content")).content == png()
