"""A pod that encodes in addition to holding a KV pool leaves memory for its towers; no other pod spends time or memory on that."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mmd_workers.basics.memory import MEBIBYTE
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import wait_until

from .worker_process import environment_of


@pytest.mark.parametrize(
    ("pools", "pool", "roles", "measures"),
    [
        (("prefill", "decode"), "prefill", "encode,prefill", True),
        (("decode",), "decode", "encode,prefill,decode", True),
        (("prefill", "decode"), "decode", "decode", False),
        (("encoder", "prefill", "decode"), "encoder", "encode", False),
    ],
)
def test_the_pool_of_a_pod_that_encodes_leaves_memory_for_its_tower(
    nats_server: NatsServer,
    tmp_path: Path,
    pools: tuple[str, ...],
    pool: str,
    roles: str,
    measures: bool,
) -> None:
    environment = environment_of(nats_server, tmp_path, f"memory-{len(pools)}-{pool}", pools=pools)
    command = [sys.executable, "-m", "mmd_cli", "worker", "--pool", pool, "--roles", roles]
    url, log = f"http://127.0.0.1:{environment['MMD_HTTP_PORT']}", tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    def ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"it ended before it was ready:\n{log.read_text()}")
        return _get(f"{url}/readyz") != ""

    try:
        wait_until(ready, "it is ready", retried=(urllib.error.URLError,))
        phases = json.loads(_get(f"{url}/state"))["startup_seconds"]
    finally:
        process.terminate()
        assert process.wait(60) == 0
    assert ("memory_encoder" in phases) is measures
    left = [int(number) for number in re.findall(r"tower_bytes=(\d+)", log.read_text())]
    if measures:
        assert left[0] > MEBIBYTE
    else:
        assert left == ([0] if "decode" in roles else [])


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
