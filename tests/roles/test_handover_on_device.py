"""KV goes from the prefill's pool to the decoder's without passing a tensor of another device to anybody.

Without a GPU (support/oracles/devices.py) the device is a backend in Python (support/oracles/strict_device.py) that refuses to mix with
host memory, as CUDA does, and links refuse tensors of other devices whatever their backend.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from mmd_workers.wire.server import NatsServer
from support.oracles.devices import DEVICE, ON_GPU

ROOT = Path(__file__).parents[2]


def test_kv_moves_between_pools_on_a_device_and_the_output_equals_generate(nats_server: NatsServer) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.roles.handover_on_device", nats_server.url],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert seen["failures"] == []
    assert seen["devices"] == [str(DEVICE) if ON_GPU else "strict:0"]
    assert seen["tokens"] == seen["expected"]
