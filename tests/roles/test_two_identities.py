"""Two worker processes of one pipeline revision, one of which has other weights: they never serve together, and once the revision is
pinned, the one that differs ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest

from mmd_api.pipeline import PipelineConfig, pipeline_revision, roles_of
from mmd_api.readers import Component
from mmd_api.resource import API_VERSION, KIND, MultimodalDeployment
from mmd_api.status import PinnedRevision
from mmd_cli.local.pods import free_port
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import wait_until

pytestmark = pytest.mark.processes
DEMO = Path(str(resources.files("mmd_workers.model"))) / "demo"
ENDS_SECONDS = 120


@dataclass
class Pipeline:
    """Processes as containers run them, each with its own configuration file and the model in one folder."""

    server: NatsServer
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = Path(shutil.copytree(DEMO, self.folder / "model"))
        spec = {"model": {"id": str(self.model)}, "decode": {"gpus": 0}}
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "two"}, "spec": spec}
        self.spec = MultimodalDeployment.parse(body).spec

    def configure(self, pod: str, component: Component, identity: str | None) -> Path:
        """Write a pod's configuration, as a kubelet does: at once as a whole."""
        pinned = identity and PinnedRevision(revision=pipeline_revision(self.spec), identity=identity)
        text = PipelineConfig.text_for(self.spec, "test", self.folder.name, component, pinned or None)
        (self.folder / "new").write_text(text)
        return (self.folder / "new").replace(self.folder / f"{pod}.json")

    def start(self, pod: str, component: Component, identity: str | None = None) -> Process:
        command = ["gateway"] if component == "gateway" else ["worker", "--pool", component]
        if component != "gateway":
            command += ["--roles", ",".join(roles_of(self.spec, component))]
        ports = {"MMD_HTTP_PORT": str(free_port()), "MMD_ADMIN_PORT": str(free_port())}
        environment = {
            **os.environ,
            **ports,
            "CUDA_VISIBLE_DEVICES": "",
            "MMD_PIPELINE_CONFIG": str(self.configure(pod, component, identity)),
            "MMD_POD_NAME": pod,
            "MMD_POD_IP": "127.0.0.1",
            "MMD_NATS_URL": self.server.url,
            "MMD_THREADS": "1",
        }
        log = self.folder / f"{pod}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "mmd_cli", *command], env=environment, stdout=out, stderr=out
            )
        self.started.append(process)
        url, admin = (f"http://127.0.0.1:{port}" for port in ports.values())
        return Process(process, url, admin, log)

    def train_on(self) -> None:
        """New weights in the folder; who has loaded the old ones keeps them."""
        (weights,) = self.model.glob("*.safetensors")
        content = bytearray(weights.read_bytes())
        content[-4] ^= 1  # the least bit of the last number
        (self.folder / "weights").write_bytes(content)
        (self.folder / "weights").replace(weights)

    def train_anew(self) -> None:
        """Weights in the folder that give other answers: half of the numbers have another sign."""
        (weights,) = self.model.glob("*.safetensors")
        content = bytearray(weights.read_bytes())
        signs = slice(len(content) // 8 * 4 + 3, None, 4)
        content[signs] = bytes(byte ^ 0x80 for byte in content[signs])
        (self.folder / "weights").write_bytes(content)
        (self.folder / "weights").replace(weights)


@dataclass
class Process:
    """One pod's process."""

    child: subprocess.Popen[bytes]
    url: str
    admin: str
    log: Path

    def ready(self) -> Process:
        wait_until(self.is_ready, f"{self.log.stem} is ready", retried=(httpx.HTTPError,))
        return self

    def is_ready(self) -> bool:
        if self.child.poll() is not None:
            raise RuntimeError(f"it ended:\n{self.log.read_text()}")
        return httpx.get(f"{self.url}/readyz", timeout=10).status_code == 200

    def identity(self) -> str:
        return str(httpx.get(f"{self.url}/state", timeout=10).json()["identity"])

    def ended_because_of(self, identity: str) -> None:
        assert self.child.wait(ENDS_SECONDS) == 1, self.log.read_text()
        (line,) = [line for line in self.log.read_text().splitlines() if "cannot serve" in line]
        assert "revision_mismatch" in line
        assert f"is pinned to {identity}" in line
        assert "the branch or files of the model changed after the revision was pinned" in line
        assert "set spec.image.worker to a digest" in line


@pytest.fixture
def pipeline(nats_server: NatsServer, tmp_path: Path) -> Iterator[Pipeline]:
    made = Pipeline(nats_server, tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.wait(ENDS_SECONDS)


def asked(gateway: Process) -> httpx.Response:
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 8,
    }
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=120)


def answer(gateway: Process) -> dict[str, Any]:
    reply = asked(gateway)
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["choices"][0])


def workers_of(gateway: Process) -> set[tuple[str, str]]:
    """Workers that a gateway knows: name and state."""
    state = httpx.get(f"{gateway.admin}/debug/state", timeout=10).json()
    return {(pod["pod"], pod["state"]) for pod in state["pods"]}


def test_a_worker_that_starts_with_other_weights_than_the_pinned_ones_ends(pipeline: Pipeline) -> None:
    first, gateway = pipeline.start("decode-0", "decode"), pipeline.start("gateway-0", "gateway")
    first.ready()
    gateway.ready()
    identity, before = first.identity(), answer(gateway)
    pipeline.train_on()
    second = pipeline.start("decode-1", "decode", identity)
    second.ended_because_of(identity)
    assert first.is_ready()
    assert first.identity() == identity
    assert answer(gateway) == before


def test_a_running_worker_with_other_weights_ends_at_the_pin(pipeline: Pipeline) -> None:
    first, gateway = pipeline.start("decode-0", "decode"), pipeline.start("gateway-0", "gateway")
    first.ready()
    gateway.ready()
    identity, before = first.identity(), answer(gateway)
    pipeline.train_on()
    second = pipeline.start("decode-1", "decode").ready()
    assert second.identity() != identity
    for pod in ("decode-0", "decode-1", "gateway-0"):
        pipeline.configure(pod, "gateway" if pod == "gateway-0" else "decode", identity)
    second.ended_because_of(identity)
    assert first.is_ready()
    assert gateway.is_ready()
    assert answer(gateway) == before


def test_a_gateway_never_uses_a_worker_of_other_weights_that_keeps_running(pipeline: Pipeline) -> None:
    """Without an operator nothing pins the revision, and the second worker stays."""
    limits = pipeline.spec.gateway.model_copy(update={"request_timeout_seconds": 20})
    pipeline.spec = pipeline.spec.model_copy(update={"gateway": limits})
    first, gateway = pipeline.start("decode-0", "decode"), pipeline.start("gateway-0", "gateway")
    first.ready()
    gateway.ready()
    before = answer(gateway)
    pipeline.train_anew()
    second = pipeline.start("decode-1", "decode").ready()
    assert second.identity() != first.identity()
    assert answer(gateway) == before
    assert workers_of(gateway) == {("decode-0", "ready")}
    first.child.kill()
    first.child.wait(ENDS_SECONDS)
    refused = asked(gateway)
    assert refused.status_code >= 500, refused.text
    assert second.is_ready()
    assert "decode-1" not in {pod for pod, _ in workers_of(gateway)}
