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

from mmd_workers.memory import MEBIBYTE
from mmd_workers.wire.server import NatsServer
from tests.support.local_deployment import until

from .worker_process import environment_of

READY_SECONDS = 240.0


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
        assert process.poll() is None, log.read_text()
        try:
            return _get(f"{url}/readyz") != ""
        except urllib.error.URLError:
            return False

    try:
        until(ready, READY_SECONDS, "it is ready")
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
