"""What the tests of groups begin with: the settings of a group's pods, and an address for each group."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from mmd_api.pipeline import PipelineConfig
from mmd_cli.local.pods import free_port
from mmd_workers.process.settings import Group, WorkerSettings
from mmd_workers.wire.login import Login

SECONDS = 20
_numbers = itertools.count(random.randrange(1, 1 << 14))


def settings(
    rank: int, size: int, address: str, port: int, revision: str = "r1", password: str = "of this deployment"
) -> WorkerSettings:
    spec = {"model": {"id": "builtin/demo"}, "decode": {"gpus": 0}}
    config = {"namespace": "test", "name": "group", "revision": revision, "spec": spec}
    pipeline = PipelineConfig.model_validate(config)
    one = WorkerSettings(pipeline, f"pod-{rank}", address, port, "", threads=1)
    return replace(one, group=Group(size, rank, address), nats_login=Login("decode", password))


def place() -> tuple[str, int]:
    number = next(_numbers)
    address = f"127.77.{number // 250 % 250}.{1 + number % 250}"
    return address, free_port()
