"""/v1/files at one gateway with a real NATS server: OpenAI's client uploads, lists, reads, uses and deletes."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from mmd_api.contract.errors import FileNotFoundInStoreError
from mmd_api.spec.gateway import FilesSpec
from mmd_workers.gateway.intake.tenant_files import Files
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.stored_files import StoredFile
from support.harness.waiting import until
from tests.gateway.running import Launch, assert_nothing_is_left, until_status
from tests.gateway.uploads import FILES, bmp, png, until_nothing_is_stored, upload


def question(file_id: str) -> list[dict]:
    parts = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": "what is it?"}]
    return [{"role": "user", "content": parts}]


async def test_openais_client_uploads_lists_reads_and_deletes(launch: Launch) -> None:
    gateway = await launch(files=FILES)
    client = gateway.openai.files
    data = png()

    made = await client.create(file=("red.png", data), purpose="user_data")
    assert (made.object, made.bytes, made.filename, made.purpose) == (
        "file",
        len(data),
        "red.png",
        "user_data",
    )
    assert made.status == "processed"
    assert made.expires_at == made.created_at + 86_400
    assert await client.retrieve(made.id) == made
    assert (await client.content(made.id)).content == data
    assert [one.id async for one in client.list()] == [made.id]

    assert (await client.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError, match="has expired or been deleted"):
        await client.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.content(made.id)
    assert [one.id async for one in client.list()] == []


async def test_a_list_has_pages_and_both_orders(launch: Launch) -> None:
    gateway = await launch(files=FILES)
    client = gateway.openai.files
    ids = [
        (await client.create(file=("a.png", png()), purpose=purpose)).id
        for purpose in ("vision", "user_data", "vision")
    ]
    found = [one.id async for one in client.list(limit=2, order="asc")]
    assert sorted(found) == sorted(ids)
    first = await client.list(limit=2, order="desc")
    assert first.has_more
    assert {one.purpose async for one in client.list(purpose="vision")} == {"vision"}
    for query in ("limit=0", "limit=x", "order=up", "after=file-none", "purpose=batch", "before=1"):
        refused = await gateway.http.get(f"/v1/files?{query}")
        assert refused.status_code == 400, query
        assert refused.json()["error"]["param"] == query.partition("=")[0]


async def test_an_uploaded_file_is_the_same_medium_as_inline_bytes(launch: Launch) -> None:
    gateway = await launch(files=FILES)
    worker = await gateway.worker()
    data = png()
    made = await gateway.openai.files.create(file=("red.png", data), purpose="vision")
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    inline = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    for messages in (question(made.id), [{"role": "user", "content": inline}]):
        answer = await gateway.openai.chat.completions.create(model="builtin/demo", messages=messages)
        assert answer.choices[0].message.content == "the red circle"
    by_file, by_url = worker.requests
    assert by_file.features == by_url.features
    assert by_file.token_ids == by_url.token_ids
    await assert_nothing_is_left(gateway)


async def test_each_surface_takes_an_uploaded_image(launch: Launch) -> None:
    gateway = await launch(files=FILES)
    worker = await gateway.worker()
    made = await gateway.openai.files.create(file=("red.png", png()), purpose="vision")
    text = {"type": "input_text", "text": "what is it?"}
    for part in (
        {"type": "input_image", "file_id": made.id},
        {"type": "input_file", "file_id": made.id},
    ):
        await gateway.openai.responses.create(
            model="builtin/demo", input=[{"role": "user", "content": [part, text]}]
        )
    block = {"type": "image", "source": {"type": "file", "file_id": made.id}}
    body = {
        "model": "builtin/demo",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": [block, {"type": "text", "text": "what is it?"}]}],
    }
    answer = await gateway.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert len({request.features[0].feature_id for request in worker.requests}) == 1


async def test_a_file_that_does_not_exist_names_its_part(launch: Launch) -> None:
    gateway = await launch(files=FILES)
    await gateway.worker()
    guess = f"file-{'0' * 32}"
    with pytest.raises(openai.NotFoundError) as caught:
        await gateway.openai.chat.completions.create(model="builtin/demo", messages=question(guess))
    assert caught.value.param == "messages[0].content[0].file.file_id"
    assert "POST /v1/files" in caught.value.message
    body = {
        "model": "builtin/demo",
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": guess}}]}
        ],
    }
    answer = await gateway.http.post("/v1/messages", json=body)
    assert answer.status_code == 404
    assert "messages.0.content.0.source.file_id" in answer.json()["error"]["message"]


async def test_a_deployment_without_files_says_so(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker()
    refused = await upload(gateway, png())
    assert refused.status_code == 404
    assert "spec.gateway.files" in refused.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match=r"spec\.gateway\.files"):
        await gateway.openai.chat.completions.create(model="builtin/demo", messages=question("file-1"))


async def test_a_file_expires_and_leaves_nothing(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmd_workers.gateway.intake.tenant_files.PERIOD_SECONDS", 0.05)
    gateway = await launch(files=FILES)
    more = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}
    made = (await upload(gateway, png(), **more)).json()
    assert made["expires_at"] == made["created_at"] + 1
    await until_status(gateway.http, f"/v1/files/{made['id']}", 404)
    await until_nothing_is_stored(gateway)


async def test_a_request_that_has_read_its_file_outlives_it(launch: Launch) -> None:
    gateway = await launch(files=FILES)
    worker = await gateway.worker()
    worker.placing = asyncio.Event()
    made = await gateway.openai.files.create(file=("red.png", png()), purpose="vision")
    asked = asyncio.create_task(
        gateway.openai.chat.completions.create(model="builtin/demo", messages=question(made.id))
    )
    await until(lambda: worker.requests)
    await gateway.openai.files.delete(made.id)
    worker.placing.set()
    assert (await asked).choices[0].message.content == "the red circle"


async def test_two_gateways_keep_a_tenants_limit_together(launch: Launch) -> None:
    first = await launch(files=FILES)
    second = await launch(files=FILES, pod="gateway-1", beside=first)
    large = bmp(600_000)  # 1.8 MB, of which two fit
    answers = await asyncio.gather(*(upload(one, large, "a.bmp") for one in (first, second) * 3))
    accepted = [answer.json()["id"] for answer in answers if answer.status_code == 200]
    assert len(accepted) == 2
    assert {answer.status_code for answer in answers} == {200, 413}
    for one in (first, second):
        listed = (await one.http.get("/v1/files")).json()["data"]
        assert {entry["id"] for entry in listed} == set(accepted)
    assert (await second.http.delete(f"/v1/files/{accepted[0]}")).status_code == 200
    assert (await first.http.get(f"/v1/files/{accepted[0]}")).status_code == 404
    assert (await upload(first, large, "a.bmp")).status_code == 200


async def test_the_upload_of_a_gateway_that_crashed_ends_by_itself(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmd_workers.gateway.intake.tenant_files.PERIOD_SECONDS", 0.05)
    monkeypatch.setattr("mmd_workers.gateway.intake.tenant_files.UPLOAD_SLACK_SECONDS", 0.0)
    gateway = await launch(files=FILES)
    bus = await Bus.connect(gateway.nats.url, "crashed", gateway.subjects)
    crashed = Files(bus, FilesSpec.model_validate(FILES))
    entry = await crashed.begin("", 4 << 20, time.time() + 5.0)
    await crashed.store(entry, 0, bytes(1000))
    assert (await upload(gateway, png())).status_code == 413, "its room is taken"
    assert (await gateway.http.get("/v1/files")).json()["data"] == [], "and it is no file yet"
    assert (await gateway.http.get(f"/v1/files/{entry.file_id}")).status_code == 404
    await until_nothing_is_stored(gateway)
    assert (await upload(gateway, png())).status_code == 200
    with pytest.raises(FileNotFoundInStoreError):
        await crashed.finish(entry)
    await bus.close()


async def test_limits_name_their_field_and_a_deletion_makes_room(launch: Launch) -> None:
    gateway = await launch(files=FILES)
    large = bmp(600_000)  # 1.8 MB
    ids = []
    for _ in range(2):
        answer = await upload(gateway, large, "large.bmp")
        assert answer.status_code == 200, answer.text
        ids.append(answer.json()["id"])
    refused = await upload(gateway, large, "large.bmp")
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "file_quota_exceeded"
    assert "spec.gateway.files.maxTenantMebibytes" in refused.json()["error"]["message"]
    await gateway.http.delete(f"/v1/files/{ids[0]}")
    assert (await upload(gateway, large, "large.bmp")).status_code == 200

    refused = await upload(gateway, bmp(1_000_000), "larger.bmp")
    assert refused.status_code == 413
    assert "spec.gateway.files.maxFileMebibytes" in refused.json()["error"]["message"]


async def test_an_upload_that_no_encoder_takes_succeeds_and_frees_its_bytes(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmd_workers.gateway.intake.encode_on_upload.JOB_SECONDS", 1.0)
    gateway = await launch(
        files={**FILES, "encodeOnUpload": True}, encoder={"replicas": 1, "gpus": 0}, prefill={"gpus": 0}
    )
    assert (await upload(gateway, png())).status_code == 200
    await gateway.until_metric(
        "mmd_encode_queue_jobs", 1
    )  # and one file at a time: the next one waits for it
    assert (await upload(gateway, png("blue"))).status_code == 200
    await gateway.until_metric("mmd_gateway_media_items", 0)
    assert await gateway.metric("mmd_encode_queue_jobs") == 1
    await assert_nothing_is_left(gateway)


async def test_a_download_that_meets_its_deadline_ends_within_its_response(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await launch(files=FILES)
    made = await gateway.openai.files.create(file=("large.bmp", bmp(600_000)), purpose="vision")
    read = Files._chunk

    async def stalled(self: Files, entry: StoredFile, number: int) -> bytes:
        return await (read(self, entry, number) if number == 0 else asyncio.Event().wait())

    monkeypatch.setattr(Files, "_chunk", stalled)
    path, headers = f"/v1/files/{made.id}/content", {"x-request-timeout": "5"}
    async with gateway.http.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            await answer.aread()
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_request_reads_the_log_once_and_each_file_once(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmd_workers.gateway.intake.tenant_files.PERIOD_SECONDS", 600.0)
    gateway = await launch(files=FILES)
    await gateway.worker()
    ids = [
        (await gateway.openai.files.create(file=("a.png", png(colour)), purpose="vision")).id
        for colour in ("red", "blue")
    ]
    calls = []
    for name in ("_catch_up", "read"):
        monkeypatch.setattr(Files, name, counted(calls, name, getattr(Files, name)))
    parts = [{"type": "file", "file": {"file_id": file_id}} for file_id in (*ids, *ids)]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]
    await gateway.openai.chat.completions.create(model="builtin/demo", messages=messages)
    assert sorted(calls) == ["_catch_up", "read", "read"]
    await assert_nothing_is_left(gateway)


def counted(calls: list[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*arguments: object) -> object:
        calls.append(name)
        return await method(*arguments)

    return call


async def test_too_many_parts_are_refused_before_a_file_is_looked_up(launch: Launch) -> None:
    gateway = await launch(files=FILES, media={"maxItemsPerRequest": 2})
    await gateway.worker()
    parts = [{"type": "file", "file": {"file_id": "file-none"}}] * 3
    with pytest.raises(openai.BadRequestError, match="maxItemsPerRequest"):
        await gateway.openai.chat.completions.create(
            model="builtin/demo", messages=[{"role": "user", "content": parts}]
        )


async def test_metrics_have_what_files_take_and_which_uploads_were_refused(launch: Launch) -> None:
    gateway = await launch(files=FILES)
    large = bmp(600_000)  # of which two fit
    ids = [(await upload(gateway, large, "a.bmp")).json().get("id") for _ in range(3)]
    await gateway.until_metric("mmd_file_stored_bytes", 2 * len(large))
    assert await gateway.metric("mmd_file_budget_bytes") == FILES["maxMebibytes"] << 20
    assert (await gateway.http.delete(f"/v1/files/{ids[0]}")).status_code == 200
    await gateway.until_metric("mmd_file_stored_bytes", len(large))
    assert await gateway.metric("mmd_file_stored_items") == 2, "the deletion counts for a while"
    assert (await upload(gateway, b"#!/bin/sh")).status_code == 400
    await gateway.until_metric("mmd_file_refused_uploads_total", 2)
    text = (await gateway.admin.get("/metrics")).text
    assert 'mmd_file_refused_uploads_total{code="file_quota_exceeded"} 1.0' in text
