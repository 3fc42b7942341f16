"""Configuration of a worker process at start: the pipeline file, the identity of its pod, its NATS login. Read nowhere else."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mmd_api.contract import environment
from mmd_api.contract.subjects import DEFAULT_INBOX, USERS, previous_of
from mmd_api.pipeline import PipelineConfig
from mmd_workers.basics.cores import usable_cores
from mmd_workers.wire.login import Login, refuse_credentials_in

# LeaderWorkerSet sets these in pods of a replica that spans several: how many, the place among them, and the host name of the leader.
LWS_GROUP_SIZE = "LWS_GROUP_SIZE"
LWS_WORKER_INDEX = "LWS_WORKER_INDEX"
LWS_LEADER_ADDRESS = "LWS_LEADER_ADDRESS"


@dataclass(frozen=True, slots=True)
class Group:
    """The replica of several pods that this one belongs to. `rank`: its place, 0 for the leader; `leader`: the leader's host name."""

    size: int
    rank: int
    leader: str


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Identity and addresses of this process. `incarnation` is new at every start.

    `annotations`: the file in which Kubernetes shows the pod's annotations; empty outside of Kubernetes. `nats_inbox`: prefix of the
    subjects for replies, where the NATS server lets this user listen. `grace_seconds`: from SIGTERM to SIGKILL.
    `config_file`: where `pipeline` was read, and where its live settings are read again; empty: they never change.
    `keys_file`: tenants and hashes of their API keys, for a gateway that needs keys; empty if it needs none.
    `tls_folder`: certificate and key of a gateway that speaks TLS to clients; empty if it does not.
    `gpus`: number of GPUs that Kubernetes gave this pod. `memory_fraction`: fraction of the memory found here, if other pods share the
    machine. `http_port`: a gateway's port for clients, a worker's only port. `admin_port`: a gateway's port for all else; 0: a free one.
    `picker_port`: port of a gateway with an InferencePool, where Gateways ask which pod takes a request; 0: a free one.
    `turns`: a file shared by pods that compute with all cores of one machine, one at a time; empty: this pod has its cores to itself.
    `feature_disk`, `feature_disk_mebibytes`: where and how much the encoder's cache may write of evicted features; empty: nothing.
    `identity`, `commit`, `adapter_commits`: see `mmd_workers.process.identity`; empty until it has looked.
    """

    pipeline: PipelineConfig
    pod: str
    pod_ip: str
    http_port: int
    nats_url: str
    threads: int
    annotations: str = ""
    nats_inbox: str = DEFAULT_INBOX
    nats_login: Login | None = None
    grace_seconds: float = 120.0
    config_file: str = ""
    keys_file: str = ""
    tls_folder: str = ""
    gpus: int = 0
    memory_fraction: float = 1.0
    turns: str = ""
    feature_disk: str = ""
    feature_disk_mebibytes: int = 0
    identity: str = ""
    commit: str = ""
    adapter_commits: dict[str, str] = field(default_factory=dict)
    admin_port: int = 0
    picker_port: int = 0
    group: Group | None = None
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @property
    def compute_threads(self) -> int:
        """Threads that one operation may use: all cores of the container, if no number is set."""
        return self.threads or usable_cores()

    @property
    def group_port(self) -> int:
        """The port on which a group's leader listens for its followers; the same number in all of its pods."""
        return self.http_port + 1

    @property
    def ranks_port(self) -> int:
        """The port on which the engine's first rank listens for the ranks of other pods."""
        return self.http_port + 2

    @property
    def mesh(self) -> str:
        """The name of the processes that this one may talk to: same pipeline revision, code and weights."""
        return f"{self.pipeline.revision}-{self.identity}" if self.identity else self.pipeline.revision

    @classmethod
    def from_environment(cls) -> WorkerSettings:
        """Read the variables of `mmd_api.contract.environment`, and those of LeaderWorkerSet.

        Raises:
            RuntimeError: a variable is missing or cannot be used; the message names it.
        """

        def need(name: str) -> str:
            value = os.environ.get(name)
            if not value:
                raise RuntimeError(
                    f"environment variable {name} is not set; the operator and `mmd up` set it"
                )
            return value

        try:
            refuse_credentials_in(need(environment.NATS_URL))
        except ValueError as error:
            raise RuntimeError(f"environment variable {environment.NATS_URL}: {error}") from error
        user = os.environ.get(environment.NATS_USERNAME, "")
        return cls(
            pipeline=PipelineConfig.load(need(environment.PIPELINE_CONFIG)),
            config_file=need(environment.PIPELINE_CONFIG),
            pod=need(environment.POD_NAME),
            pod_ip=need(environment.POD_IP),
            http_port=int(need(environment.HTTP_PORT)),
            admin_port=int(os.environ.get(environment.ADMIN_PORT, "0")),
            picker_port=int(os.environ.get(environment.PICKER_PORT, "0")),
            nats_url=need(environment.NATS_URL),
            threads=int(os.environ.get(environment.THREADS, "0")),
            annotations=os.environ.get(environment.POD_ANNOTATIONS, ""),
            nats_inbox=os.environ.get(environment.NATS_INBOX, DEFAULT_INBOX),
            nats_login=_login(user, need(environment.NATS_PASSWORD)) if user else None,
            grace_seconds=float(os.environ.get(environment.GRACE_SECONDS, "120")),
            keys_file=os.environ.get(environment.KEYS_FILE, ""),
            tls_folder=os.environ.get(environment.TLS_FOLDER, ""),
            gpus=int(os.environ.get(environment.GPUS, "0")),
            memory_fraction=float(os.environ.get(environment.MEMORY_FRACTION, "1")),
            feature_disk=os.environ.get(environment.FEATURE_DISK, ""),
            feature_disk_mebibytes=int(os.environ.get(environment.FEATURE_DISK_MEBIBYTES, "0")),
            turns=os.environ.get(environment.TURNS, ""),
            group=_group(need) if int(os.environ.get(LWS_GROUP_SIZE, "1")) > 1 else None,
        )


def _group(need: Callable[[str], str]) -> Group:
    size, rank = int(need(LWS_GROUP_SIZE)), int(need(LWS_WORKER_INDEX))
    return Group(size, rank, need(LWS_LEADER_ADDRESS))


def _login(user: str, password: str) -> Login:
    """The login of a user of a managed server, who may have a previous password too, or of an external server."""
    folder = os.environ.get(environment.NATS_LOGIN)
    previous = previous_of(user) if user in USERS else ""
    return Login(user, password, previous, Path(folder) if folder else None)
