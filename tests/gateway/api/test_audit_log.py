"""The audit log: what a line has, what it never has, and that nobody waits for it to be written."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from mmd_api.tenants import hash_of, new_key
from mmd_workers.gateway.api import audit_log as module
from mmd_workers.gateway.api.audit_log import AuditLog
from mmd_workers.observe.metrics import Metrics
from support.harness.waiting import until
from tests.gateway.running import Launch, Running
from tests.gateway.scripted import answer_well, say_nothing
from tests.gateway.uploads import png

KEY = new_key()
SECRET = "the-content-of-a-question"
BODY = {"model": "builtin/demo", "messages": [{"role": "user", "content": SECRET}], "temperature": 0}
BEARER = {"authorization": f"Bearer {KEY}"}
Lines = Callable[[int], Awaitable[list[dict[str, Any]]]]


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """Returns the next `count` audit lines. The log goes to a file, because pytest's capture loses output written during a read.

    Request this fixture before `launch`: gateways write until they stop.
    """
    file, text = tmp_path / "audit.jsonl", ""
    with file.open("ab") as log, file.open() as reader:
        monkeypatch.setattr(
            "mmd_workers.gateway.process.gateway_process.AuditLog",
            lambda metrics: AuditLog(metrics, log.fileno()),
        )

        async def read(count: int) -> list[dict[str, Any]]:
            nonlocal text

            def are_written() -> bool:
                nonlocal text
                text += reader.read()
                return text.count("\n") >= count

            await until(are_written, lambda: f"{count} lines; so far {text}")
            *complete, text = text.split("\n", count)
            return [json.loads(line) for line in complete]

        yield read


async def with_audit(launch: Launch, tmp_path: Path, **gateway: object) -> Running:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"tenants": [{"name": "search", "keys": [{"hash": hash_of(KEY)}]}]}))
    return await launch(keys_file=str(file), auth={"keysSecret": "keys"}, auditLog=True, **gateway)


async def test_every_request_has_a_line_with_who_what_and_how_much(
    lines: Lines, launch: Launch, tmp_path: Path
) -> None:
    gateway = await with_audit(launch, tmp_path)
    await gateway.worker("the red circle", answer_well)
    for stream in (False, True):
        answer = await gateway.http.post(
            "/v1/chat/completions?secret=1", json={**BODY, "stream": stream}, headers=BEARER
        )
        assert answer.status_code == 200
        (line,) = await lines(1)
        assert line.pop("time").endswith("+00:00")
        assert 0 <= line.pop("seconds") < 30
        assert line.pop("tokens_in") > 0
        assert line.pop("tokens_out") == len(gateway.ids("the red circle"))
        assert line == {
            "audit": "request",
            "request_id": answer.headers["x-request-id"],
            "tenant": "search",
            "principal": "key:" + hash_of(KEY).removeprefix("sha256:")[:8],
            "client": "127.0.0.1",
            "method": "POST",
            "path": "/v1/chat/completions",
            "model": "builtin/demo",
            "status": 200,
            "code": "ok",
        }


async def test_refused_failed_and_cancelled_requests_have_lines_too(
    lines: Lines, launch: Launch, tmp_path: Path
) -> None:
    gateway = await with_audit(launch, tmp_path)
    worker = await gateway.worker(script=say_nothing)
    await gateway.http.get("/health")
    await gateway.http.get("/v1/models", headers={"x-api-key": new_key()})
    (line,) = await lines(1)
    assert (line["path"], line["status"]) == ("/v1/models", 401), "health is not logged"
    assert line["tenant"] is line["principal"] is line["request_id"] is None
    await gateway.http.get("/v1/models", headers=BEARER)
    await gateway.http.post("/v1/chat/completions", json={**BODY, "model": SECRET}, headers=BEARER)
    await gateway.http.get("/unknown%0A" + "x" * 5000, headers=BEARER)
    listed, missing, unknown = await lines(3)
    assert (listed["status"], listed["tenant"], listed["code"]) == (200, "search", None)
    assert (missing["status"], missing["code"], missing["model"]) == (404, "model_not_found", None)
    assert (unknown["status"], len(unknown["path"])) == (404, 256 + len("\\x0a") - 1)
    asking = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=BODY, headers=BEARER))
    await worker.until(lambda: bool(worker.requests))
    asking.cancel()
    await worker.until(lambda: bool(worker.cancels))
    (gone,) = await lines(1)
    assert (gone["status"], gone["code"]) == (499, "client_gone")


async def test_no_line_has_content_or_keys_and_none_is_long(
    launch: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gateway = await with_audit(launch, tmp_path)
    await gateway.worker("the red circle", answer_well)
    hostile = "\u2028\x1b]0;" + "é" * 9000
    for headers in (BEARER, {"x-api-key": KEY}, {"x-api-key": SECRET}):
        await gateway.http.post("/v1/chat/completions", json=BODY, headers=headers)
        await gateway.http.post("/v1/chat/completions", json={**BODY, "model": hostile}, headers=headers)
        await gateway.http.post(
            "/v1/responses", json={"model": "builtin/demo", "input": SECRET}, headers=headers
        )
        await gateway.http.get(f"/v1/models/{quote(hostile[:1000])}?key={KEY}", headers=headers)
    gateway.stop.set()
    await asyncio.wait_for(gateway.task, 30)
    gateway.end_awaited = True
    written = capfd.readouterr().out
    assert written.count("\n") == 12
    for secret in (KEY, KEY[4:20], SECRET, "red circle", hash_of(KEY)[7:], "\u2028", "\x1b"):
        assert secret not in written
    assert max(map(len, written.splitlines())) < 4096


async def test_nothing_is_logged_unless_the_spec_wants_it(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    gateway = await launch()
    await gateway.http.get("/v1/models")
    gateway.stop.set()
    await asyncio.wait_for(gateway.task, 30)
    gateway.end_awaited = True
    assert "audit" not in capfd.readouterr().out


async def test_a_stalled_reader_delays_nobody_and_dropped_lines_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    reading, writing = os.pipe()
    metrics = Metrics(("gateway",))
    log = AuditLog(metrics, writing)
    line = {"audit": "request", "path": "x" * 200}
    for _ in range(3 * module.MAX_LINES):
        log.write(line)  # would block for ever
    dropped = metrics.audit_dropped._value.get()
    assert dropped >= module.MAX_LINES
    await asyncio.wait_for(log.close(), 30)
    os.set_blocking(reading, False)
    received = b""

    async def read() -> None:
        nonlocal received
        while received.count(b"\n") < 3 * module.MAX_LINES - dropped:
            try:
                received += os.read(reading, 1 << 20)
            except BlockingIOError:
                await asyncio.sleep(0.01)

    await asyncio.wait_for(read(), 30)
    assert {json.loads(one)["audit"] for one in received.splitlines()} == {"request"}
    os.close(reading)


async def test_output_that_is_closed_costs_lines_and_nothing_else() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    metrics = Metrics(("gateway",))
    log = AuditLog(metrics, writing)
    for _ in range(3):
        log.write({"audit": "request"})
    await asyncio.wait_for(log.close(), 30)
    assert metrics.audit_dropped._value.get() == 3
    os.close(writing)
    log = AuditLog(metrics, writing)
    log.write({"audit": "request"})
    await asyncio.wait_for(log.close(), 30)
    assert metrics.audit_dropped._value.get() == 4


async def test_lines_are_whole_where_another_process_has_made_the_output_non_blocking() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    metrics = Metrics(("gateway",))
    log = AuditLog(metrics, writing)
    for number in range(300):
        log.write({"number": number, "path": "x" * 5000})
    os.set_blocking(reading, False)
    received = bytearray()
    async with asyncio.timeout(30):
        while received.count(b"\n") < 300:
            try:
                received += os.read(reading, 1 << 14)
            except BlockingIOError:
                await asyncio.sleep(0.01)
    assert [json.loads(line)["number"] for line in received.splitlines()] == list(range(300))
    assert metrics.audit_dropped._value.get() == 0
    await asyncio.wait_for(log.close(), 30)


async def test_a_line_that_was_cut_by_an_error_spoils_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, results = bytearray(), [6, errno.ENOSPC, 99, errno.ENOSPC, 99]

    def write(_: int, data: memoryview) -> int:
        """A device that takes so many bytes at each write, or fails."""
        if (result := results.pop(0)) == errno.ENOSPC:
            raise OSError(result, "No space left on device")
        written.extend(data[:result])
        return min(result, len(data))

    monkeypatch.setattr(module, "os", SimpleNamespace(write=write))
    metrics = Metrics(("gateway",))
    log = AuditLog(metrics)
    for number in range(4):
        log.write({"number": number})
    await asyncio.wait_for(log.close(), 30)
    assert written.decode().splitlines() == ['{"numb', '{"number": 1}', '{"number": 3}']
    assert metrics.audit_dropped._value.get() == 2


async def test_a_line_that_comes_after_the_end_is_counted() -> None:
    reading, writing = os.pipe()
    metrics = Metrics(("gateway",))
    log = AuditLog(metrics, writing)
    log.write({"number": 1})
    await asyncio.wait_for(log.close(), 30)
    log.write({"number": 2})
    assert metrics.audit_dropped._value.get() == 1
    os.close(writing)
    assert os.read(reading, 1000) == b'{"number": 1}\n'
    os.close(reading)


async def test_a_request_is_answered_while_nobody_reads_standard_output(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    monkeypatch.setattr(
        "mmd_workers.gateway.process.gateway_process.AuditLog", lambda metrics: AuditLog(metrics, writing)
    )
    monkeypatch.setattr(module, "MAX_LINES", 2)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    gateway = await with_audit(launch, tmp_path)
    for _ in range(20):
        assert (await gateway.http.get("/v1/models", headers=BEARER)).status_code == 200
    await gateway.until_metric("mmd_gateway_audit_dropped_total", 20 - 2 - 1)
    os.close(reading)


async def test_calls_of_files_have_lines_without_names_and_contents(
    lines: Lines, launch: Launch, tmp_path: Path
) -> None:
    gateway = await with_audit(launch, tmp_path, files={})
    made = await gateway.http.post(
        "/v1/files",
        files={"file": (f"{SECRET}.png", png())},
        data={"purpose": "vision"},
        headers=BEARER,
    )
    path = f"/v1/files/{made.json()['id']}"
    for method, where in (("GET", "/v1/files"), ("GET", f"{path}/content"), ("DELETE", path)):
        assert (await gateway.http.request(method, where, headers=BEARER)).status_code == 200
    written = await lines(4)
    assert [(line["method"], line["path"], line["tenant"], line["status"]) for line in written] == [
        ("POST", "/v1/files", "search", 200),
        ("GET", "/v1/files", "search", 200),
        ("GET", f"{path}/content", "search", 200),
        ("DELETE", path, "search", 200),
    ]
    assert SECRET not in json.dumps(written)
