"""A worker that cannot find out whether it is asked to drain: it must not wait for ever, neither serving nor ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mmd_workers.wire.server import NatsServer

from .worker_process import environment_of

WORKER = """
from mmd_workers import worker
from mmd_workers.process.settings import WorkerSettings

async def nothing(self):
    pass

worker.Worker._load = worker.Worker._join = nothing
worker.run(WorkerSettings.from_environment(), "decode", ("decode",))
"""


def test_a_worker_that_cannot_read_its_annotations_fails_and_logs_why(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    annotations = tmp_path / "annotations"
    annotations.write_bytes(b"\xff\xfe\n")
    environment = environment_of(nats_server, tmp_path, f"annotations-{tmp_path.name}")
    ended = subprocess.run(
        [sys.executable, "-c", WORKER],
        env=environment | {"MMD_POD_ANNOTATIONS": str(annotations)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1, output
    assert "failed permanently" in output
    assert "UnicodeDecodeError" in output
