"""What a worker process is told at start: the pipeline configuration file and the identity of its pod. Nothing is read elsewhere."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field

from mmd_api.pipeline import PipelineConfig
from mmd_api.subjects import DEFAULT_INBOX

CONFIG_ENV = "MMD_PIPELINE_CONFIG"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Identity and addresses of this process. `incarnation` is new at every start.

    `annotations`: the file in which Kubernetes shows the pod's annotations; empty outside of it. `nats_inbox`: prefix of the
    subjects on which replies come, where the NATS server lets this user listen. `grace_seconds`: from SIGTERM to SIGKILL.
    """

    pipeline: PipelineConfig
    pod: str
    pod_ip: str
    http_port: int
    nats_url: str
    threads: int
    annotations: str = ""
    nats_inbox: str = DEFAULT_INBOX
    grace_seconds: float = 120.0
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @classmethod
    def from_environment(cls) -> WorkerSettings:
        """Read MMD_PIPELINE_CONFIG (a path), MMD_POD_NAME, MMD_POD_IP, MMD_HTTP_PORT, MMD_NATS_URL, MMD_THREADS, MMD_POD_ANNOTATIONS, MMD_NATS_INBOX,
        MMD_GRACE_SECONDS.

        Raises:
            RuntimeError: a variable is missing; the message names it.
        """

        def need(name: str) -> str:
            value = os.environ.get(name)
            if not value:
                raise RuntimeError(
                    f"environment variable {name} is not set; the operator and `mmd up` set it"
                )
            return value

        return cls(
            pipeline=PipelineConfig.load(need(CONFIG_ENV)),
            pod=need("MMD_POD_NAME"),
            pod_ip=need("MMD_POD_IP"),
            http_port=int(need("MMD_HTTP_PORT")),
            nats_url=need("MMD_NATS_URL"),
            threads=int(os.environ.get("MMD_THREADS", "0")),
            annotations=os.environ.get("MMD_POD_ANNOTATIONS", ""),
            nats_inbox=os.environ.get("MMD_NATS_INBOX", DEFAULT_INBOX),
            grace_seconds=float(os.environ.get("MMD_GRACE_SECONDS", "120")),
        )
