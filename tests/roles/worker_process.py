"""The environment in which a worker of the demo model runs as a separate process."""

from __future__ import annotations

import os
from pathlib import Path

from mmd_api.pipeline import PipelineConfig
from mmd_cli.local.pods import free_port
from mmd_workers.wire.server import NatsServer


def environment_of(
    server: NatsServer,
    folder: Path,
    name: str,
    gpus: int = 0,
    pools: tuple[str, ...] = ("encoder", "prefill", "decode"),
) -> dict[str, str]:
    """What the operator would give to a pod of a deployment with this name; MMD_HTTP_PORT is free."""
    spec = {
        "model": {"id": "builtin/demo"},
        "transfer": {"kv": {"backend": "Gloo"}},
        **{pool: {"replicas": 1, "gpus": 0} for pool in pools},
    }
    config = folder / "pipeline.json"
    pipeline = {"namespace": "test", "name": name, "revision": "r1", "spec": spec}
    config.write_text(PipelineConfig.model_validate(pipeline).dump())
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "MMD_PIPELINE_CONFIG": str(config),
        "MMD_POD_NAME": "pod-0",
        "MMD_POD_IP": "127.0.0.1",
        "MMD_HTTP_PORT": str(free_port()),
        "MMD_NATS_URL": server.url,
        "MMD_THREADS": "1",
        "MMD_GPUS": str(gpus),
    }
