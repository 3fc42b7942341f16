"""Settings of a running gateway change with its configuration file; what cannot be used is rejected and changes nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from mmd_api.pipeline import PipelineConfig
from mmd_api.resource import MultimodalDeployment
from mmd_cli.local.pods import free_port
from mmd_workers.gateway.process import gateway_process, leave
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import until


def text(name: str = "live", **spec) -> str:
    """The gateway's configuration file, as the operator writes it."""
    body = {
        "apiVersion": "serving.multimodal.dev/v1alpha1",
        "kind": "MultimodalDeployment",
        "metadata": {"name": name},
        "spec": {"model": {"id": "builtin/demo"}, "decode": {"gpus": 0}, **spec},
    }
    return PipelineConfig.text_for(MultimodalDeployment.parse(body).spec, "test", name, "gateway")


@pytest.fixture
async def gateway(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[httpx.AsyncClient, Path]]:
    """A gateway, and the file that it follows."""
    monkeypatch.setattr("mmd_workers.process.live.CHECK_SECONDS", 0.02)
    monkeypatch.setattr(leave, "QUIET_SECONDS", 0.0)
    level = logging.getLogger().level
    file = tmp_path / "gateway.json"
    file.write_text(text())
    settings = WorkerSettings(
        PipelineConfig.load(file),
        "gateway-0",
        "127.0.0.1",
        free_port(),
        nats_server.url,
        1,
        config_file=str(file),
        admin_port=free_port(),
    )
    stop = asyncio.Event()
    task = asyncio.create_task(gateway_process.serve(settings, stop))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.admin_port}", timeout=30) as client:
        await until_seen(client, lambda seen: seen["ready"] == 200)
        yield client, file
    stop.set()
    async with asyncio.timeout(20):
        await task
    logging.getLogger().setLevel(level)


def write(file: Path, content: str) -> None:
    """Replace a file at once, as Kubernetes and `mmd up` do: a reader sees the old content or the new one."""
    part = file.with_suffix(".part")
    part.write_text(content)
    part.replace(file)


async def look(client: httpx.AsyncClient) -> dict[str, object]:
    state = (await client.get("/debug/state")).json()
    metrics = (await client.get("/metrics")).text
    lines = (line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    return {
        "ready": (await client.get("/readyz")).status_code,
        "page": (await client.get("/")).status_code,
        **state["limits"],
        "metrics": {name: float(value) for name, value in lines},
    }


async def until_seen(client: httpx.AsyncClient, holds) -> dict[str, object]:
    async def is_seen() -> bool:
        seen = await look(client)
        assert holds(seen), seen
        return True

    await until(is_seen, retried=(httpx.HTTPError,))
    return await look(client)  # again: the first was not read all at once


async def test_limits_promises_page_and_log_level_change_without_a_restart(gateway) -> None:
    client, file = gateway
    before = await look(client)
    assert before["page"] == 200
    assert 'mmd_slo_target_seconds{signal="ttft"}' not in before["metrics"]
    write(
        file,
        text(
            gateway={
                "webPage": False,
                "maxConcurrentRequests": 3,
                "maxBodyMebibytes": 7,
                "media": {"underLoad": {}, "failurePolicy": "TextOnly"},
            },
            slo={"ttftMilliseconds": 250, "percentile": 99},
            observability={"logLevel": "Warning"},
        ),
    )
    seen = await until_seen(client, lambda seen: seen["max_concurrent_requests"] == 3)
    assert seen["max_body_bytes"] == 7 << 20
    assert seen["page"] == 404
    assert seen["metrics"]['mmd_slo_target_seconds{signal="ttft"}'] == 0.25
    assert seen["metrics"]['mmd_slo_objective_ratio{signal="ttft"}'] == 0.99
    assert seen["metrics"]['mmd_config_reloads_total{result="applied"}'] == 1
    assert logging.getLogger().level == logging.WARNING
    write(file, text())
    seen = await until_seen(client, lambda seen: seen["page"] == 200)
    assert seen["max_concurrent_requests"] == before["max_concurrent_requests"]
    assert 'mmd_slo_target_seconds{signal="ttft"}' not in seen["metrics"]


def broken(change) -> str:
    config = json.loads(text())
    change(config)
    return json.dumps(config)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (broken(lambda c: c["spec"].update(gateway={"maxConcurrentRequests": 0})), "maxConcurrentRequests"),
        (broken(lambda c: c["spec"].update(gateway={"webPages": False})), "webPages"),
        (text()[:40], "char 40"),
        (text("another", gateway={"maxRetries": 1}), "another"),
    ],
    ids=["out of bounds", "unknown field", "cut off", "of another deployment"],
)
async def test_an_unusable_configuration_is_rejected_and_the_old_one_stays(
    gateway, caplog: pytest.LogCaptureFixture, content: str, reason: str
) -> None:
    client, file = gateway
    before = await look(client)
    with caplog.at_level(logging.ERROR, logger="mmd_workers.process.live"):
        logging.getLogger().addHandler(caplog.handler)
        write(file, content)
        seen = await until_seen(client, lambda seen: seen["metrics"]["mmd_config_rejected_state"] == 1)
    assert seen["metrics"]['mmd_config_reloads_total{result="rejected"}'] == 1
    assert seen["max_concurrent_requests"] == before["max_concurrent_requests"]
    assert any(reason in record.message for record in caplog.records)
    write(file, text(gateway={"maxConcurrentRequests": 5}))
    seen = await until_seen(client, lambda seen: seen["metrics"]["mmd_config_rejected_state"] == 0)
    assert seen["max_concurrent_requests"] == 5


async def test_a_configuration_for_the_pods_that_replace_this_one_is_no_fault(
    gateway, caplog: pytest.LogCaptureFixture
) -> None:
    client, file = gateway
    before = await look(client)
    with caplog.at_level(logging.INFO, logger="mmd_workers.process.live"):
        logging.getLogger().addHandler(caplog.handler)
        write(file, broken(lambda c: c.update(readers=["gateway", "encode"])))
        await until(lambda: any("replace this one" in record.message for record in caplog.records))
    seen = await look(client)
    assert seen["metrics"]["mmd_config_rejected_state"] == 0
    assert seen["max_concurrent_requests"] == before["max_concurrent_requests"]


async def test_names_of_the_model_change_without_a_restart(gateway) -> None:
    client, file = gateway

    async def names() -> list[str]:
        return [one["id"] for one in (await client.get("/v1/models")).json()["data"]]

    assert await names() == ["builtin/demo"]
    write(file, text(model={"id": "builtin/demo", "servedName": ["chat", "old"]}))

    async def are_changed() -> bool:
        return await names() == ["chat", "old"]

    await until(are_changed)


async def test_a_setting_read_at_start_changes_only_at_the_next_start(gateway) -> None:
    client, file = gateway
    write(file, text(model={"id": "builtin/demo", "maxModelLen": 64}, gateway={"maxConcurrentRequests": 4}))
    seen = await until_seen(client, lambda seen: seen["max_concurrent_requests"] == 4)
    assert seen["metrics"]["mmd_config_rejected_state"] == 0
    said = (await client.get("/v1/models")).json()["data"][0]
    assert said["max_model_len"] != 64
