"""A replica of two pods: two processes with a host address each, joined by vLLM's ranks. They serve, drain and fail as one."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from mmd_api.contract.subjects import Subjects
from mmd_api.pipeline import PipelineConfig
from mmd_cli.local.pods import free_port
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.peers import PeerDirectory
from mmd_workers.wire.server import NatsServer
from support.harness.processes import children
from support.harness.waiting import until
from support.serving.placing import PROMPT, Client

from . import cores

pytest_plugins = ["support.servers.nats_fixture"]
pytestmark = [pytest.mark.alone, pytest.mark.timeout(900), cores.needs_ranks]
READY_SECONDS = 600
END_SECONDS = 120
TOKENS = 40
_numbers = itertools.count(random.randrange(1, 1 << 14))
PROGRAM = "from mmd_cli.program import main; main()"


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cores.checkpoint("llava", tmp_path_factory.mktemp("models"), layers=4)


@pytest.fixture(scope="module")
def expected(llava: Path) -> list[int]:
    """What one process generates."""
    core = cores.make(llava, vllm={})
    core.add("a", cores.text_request(PROMPT, TOKENS), stop_after_prefill=False)
    outcome = cores.step(core)
    core.shut_down()
    return outcome.tokens["a"]


@dataclass
class Pod:
    """A process and its log."""

    process: subprocess.Popen[bytes]
    log: Path

    def ended(self) -> int:
        return self.process.wait(END_SECONDS)

    def said(self) -> str:
        return self.log.read_text()

    def ranks(self) -> list[int]:
        """Its processes that wait for vLLM's messages."""
        return [child for child in children(self.process.pid) if os.getsid(child) == child]


@dataclass
class Replica:
    """Its two pods, and what a gateway needs to place requests on it."""

    leader: Pod
    follower: Pod
    server: NatsServer
    subjects: Subjects

    async def client(self) -> tuple[Client, PeerDirectory]:
        """A gateway that has seen the replica become ready."""
        bus = await Bus.connect(self.server.url, "gateway-0", self.subjects)
        directory = PeerDirectory(bus, 60.0)
        await directory.start()
        client = Client(bus)
        await client.start()

        def is_ready() -> bool:
            for pod in (self.leader, self.follower):
                if pod.process.poll() is not None:
                    raise RuntimeError(f"a pod ended:\n{pod.said()[-4000:]}")
            return any(peer.state == "ready" for peer in peers(directory))

        await until(is_ready, "the replica is ready")
        return client, directory


@functools.cache
def identity_of_a_process(folder: Path) -> str:
    """What a process that has not imported vLLM, whose imports extend `sys.path`, finds here."""
    program = (
        "import sys; from mmd_api.spec.model import ModelSpec; from mmd_workers.process.identity import of_model;"
        "print(of_model(ModelSpec(id=sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, check=True, text=True
    )
    return done.stdout.split()[-1]


async def said(pod: Pod, words: str) -> None:
    await until(lambda: words in pod.said())


def peers(directory: PeerDirectory) -> list:
    return directory.pods(state=None)


@contextmanager
def replica(
    folder: Path,
    server: NatsServer,
    tmp_path: Path,
    tensor: int = 2,
    stages: int = 1,
    of_follower: Mapping[str, str] | None = None,
) -> Iterator[Replica]:
    """Two pods with a GPU each as the spec has it; here a rank of each computes on CPUs. They are killed at the end if still there."""
    number = next(_numbers)
    addresses = [f"127.{90 + host}.{number // 250 % 250}.{1 + number % 250}" for host in (0, 1)]
    port = free_port()
    pool = {"gpus": 1, "kvCacheMebibytes": 16, "maxSequences": 8, "kvBlockTokens": 16}
    engine = {"tensorParallelSize": tensor, "pipelineParallelSize": stages}
    spec = {
        "model": {"id": str(folder), "dtype": "Float32", "maxModelLen": 512},
        "engine": {"type": "VLLM", "decode": engine},
        "encoder": {"gpus": 0},
        "decode": pool,
    }
    config = {"namespace": "test", "name": f"g{number}", "revision": "r1", "spec": spec}
    pipeline = PipelineConfig.model_validate(config)
    assert pipeline.spec.group_size("decode") == 2
    file = tmp_path / "pipeline.json"
    file.write_text(pipeline.dump())
    pods = []
    for rank, address in enumerate(addresses):
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "LWS_GROUP_SIZE": "2",
            "LWS_LEADER_ADDRESS": addresses[0],
            "LWS_WORKER_INDEX": str(rank),
            "MMD_GRACE_SECONDS": "60",
            "MMD_HTTP_PORT": str(port),
            "MMD_NATS_URL": server.url,
            "MMD_PIPELINE_CONFIG": str(file),
            "MMD_POD_IP": address,
            "MMD_POD_NAME": "decode-0" if rank == 0 else "decode-0-1",
            "MMD_THREADS": "1",
            **((of_follower or {}) if rank else {}),
        }
        log = tmp_path / f"{rank}.log"
        with log.open("wb") as out:
            command = [sys.executable, "-c", PROGRAM, "worker", "--pool=decode", "--roles=prefill,decode"]
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        pods.append(Pod(process, log))
    try:
        yield Replica(*pods, server, Subjects("test", f"g{number}", f"r1-{identity_of_a_process(folder)}"))
    finally:
        for pod in pods:
            pod.process.kill()
            pod.process.wait(60)


@pytest.mark.parametrize(
    ("tensor", "stages", "asked"),
    [(2, 1, "leader"), (1, 2, "follower")],
    ids=["layers split, the leader is asked to stop", "layers divided, the follower is"],
)
async def test_two_pods_answer_and_drain_as_one(
    llava: Path,
    expected: list[int],
    nats_server: NatsServer,
    tmp_path: Path,
    tensor: int,
    stages: int,
    asked: str,
):
    with replica(llava, nats_server, tmp_path, tensor, stages) as pods:
        client, directory = await pods.client()
        assert [peer.pod for peer in peers(directory)] == ["decode-0"], "a follower takes no requests"
        await client.place("decode-0", "whole", TOKENS, [])
        assert await client.until_tokens("whole", TOKENS) == expected
        await client.place("decode-0", "drained", TOKENS * 5, [])
        await client.until_tokens("drained", 3)
        (pods.leader if asked == "leader" else pods.follower).process.terminate()
        await client.until_tokens("drained", TOKENS * 5)
        assert not client.failures
        assert pods.leader.ended() == 0, pods.leader.said()[-3000:]
        if asked == "leader":
            await said(pods.follower, "waiting to be deleted with it")
            pods.follower.process.terminate()
        else:
            assert "follower 1 of the group is asked to stop: draining" in pods.leader.said()
        assert pods.follower.ended() == 0, pods.follower.said()[-3000:]
        await client.bus.close()


@pytest.mark.parametrize("victim", ["rank of the follower", "leader"])
async def test_the_death_of_either_process_ends_both_with_a_reason(
    llava: Path, nats_server: NatsServer, tmp_path: Path, victim: str
):
    with replica(llava, nats_server, tmp_path) as pods:
        client, _ = await pods.client()
        await client.place("decode-0", "lost", 400, [])
        await client.until_tokens("lost", 3)
        if victim == "leader":
            pods.leader.process.kill()
            assert pods.follower.ended() == 1
            assert "the leader of the group ended: its process ended without a reason" in pods.follower.said()
        else:
            os.kill(pods.follower.ranks()[0], signal.SIGKILL)
            async with asyncio.timeout(30):  # at once, and not at a timeout of vLLM
                await until(lambda: client.failures, changed=client.changed)
            assert client.failures[0].retryable, "the gateway places it elsewhere"
            assert pods.leader.ended() == 1
            assert "follower 1 of the group ended: rank 1 of vLLM was killed" in pods.leader.said()
            pods.follower.ended()
        await client.bus.close()


@pytest.mark.parametrize("victim", ["follower", "rank of the leader"])
async def test_a_death_while_the_stages_start_ends_both_with_a_reason(
    llava: Path, nats_server: NatsServer, tmp_path: Path, victim: str
):
    """Their ranks would wait for one another for many minutes."""
    with replica(llava, nats_server, tmp_path, tensor=1, stages=2) as pods:
        of = pods.follower if victim == "follower" else pods.leader
        await until(lambda: of.ranks())
        os.kill(of.process.pid if victim == "follower" else of.ranks()[0], signal.SIGKILL)
        assert pods.leader.ended() == 1, pods.leader.said()[-3000:]
        pods.follower.ended()
        dead = "its process ended" if victim == "follower" else "a rank of vLLM ended before it had started"
        for pod in (pods.leader, pods.follower) if victim != "follower" else (pods.leader,):
            (*_, last) = [line for line in pod.said().splitlines() if "cannot serve (" in line]
            assert dead in last


async def test_a_leader_stopped_before_its_followers_start_exits_cleanly(
    llava: Path, nats_server: NatsServer, tmp_path: Path
):
    with replica(llava, nats_server, tmp_path) as pods:
        pods.follower.process.kill()
        await said(pods.leader, "waiting for 1 followers of the group")
        pods.leader.process.terminate()
        assert pods.leader.ended() == 0, pods.leader.said()[-3000:]


async def test_a_leader_reports_why_its_follower_cannot_start(
    llava: Path, nats_server: NatsServer, tmp_path: Path
):
    """One that has GPUs in its spec and none that works."""
    with replica(llava, nats_server, tmp_path, of_follower={"MMD_GPUS": "1"}) as pods:
        assert pods.follower.ended() == 1
        assert pods.leader.ended() == 1
        assert "cannot serve (device_lost): spec.decode.gpus is 1" in pods.follower.said()
        assert (
            "cannot serve (engine_dead): follower 1 of the group ended: spec.decode.gpus is 1"
            in pods.leader.said()
        )
