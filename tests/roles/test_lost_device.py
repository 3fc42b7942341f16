"""A worker whose accelerator fails ends, and its last line says why: Kubernetes shows it in the pod's status."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmd_workers.wire.server import NatsServer

from .worker_process import environment_of

WORKER = """
import torch
from mmd_workers import worker
from mmd_workers.basics.device import check_device
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.engine.engine import Engine
from mmd_workers.engine.model_runner import ModelRunner
from mmd_workers.model.encoder import HfEncoderModel
from mmd_workers.process.settings import WorkerSettings

def fail(*_):
    check_device(torch.AcceleratorError("CUDA error: unspecified launch failure"), torch.device("cpu"))

def fault(*_):
    raise torch.AcceleratorError("CUDA error: unspecified launch failure")

async def run(self):
    fail()

{fault}
pool, role = {roles!r}
worker.run(WorkerSettings.from_environment(), pool, (role,))
"""
LOST = "device_lost.*unspecified launch failure; the process exits"


@pytest.mark.parametrize(
    ("roles", "fault", "gpus", "reason"),
    [
        (("encoder", "encode"), "EncodePipeline.run = run", 0, LOST),
        (("decode", "decode"), "Engine.stats = fail", 0, LOST),
        (("encoder", "encode"), "HfEncoderModel.encode = fault", 0, LOST),
        (("decode", "decode"), "ModelRunner.run = fault", 0, LOST),
        (("encoder", "encode"), "", 2, r"device_lost.*spec\.encoder\.gpus is 2.*found no CUDA device"),
    ],
    ids=[
        "tower",
        "engine",
        "tower while it warms up",
        "engine while it warms up",
        "no GPU where there should be two",
    ],
)
def test_a_worker_without_its_device_logs_the_reason_last(
    nats_server: NatsServer, tmp_path: Path, roles: tuple[str, str], fault: str, gpus: int, reason: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WORKER.format(roles=roles, fault=fault)],
        env=environment_of(nats_server, tmp_path, f"lost-{roles[0]}-{tmp_path.name}", gpus),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 1
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    assert lines
    assert re.search(reason, lines[-1]), "\n".join(lines[-30:])
