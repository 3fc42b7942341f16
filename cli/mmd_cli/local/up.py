"""`mmd up`: runs the pods that the operator would make as local processes, around an embedded NATS server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from mmd_api import resource
from mmd_api.contract import paths
from mmd_api.contract.pools import POOL_NAMES, PoolName
from mmd_api.faults import Fault, InvalidDeploymentError
from mmd_api.resource import MultimodalDeployment
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.gateway import TLS_CERTIFICATE, TLS_KEY
from mmd_api.tenants import parse_tenants
from mmd_cli.errors import CommandError
from mmd_cli.local import state
from mmd_cli.local.engines import Interpreter, engine_faults, interpreter_for
from mmd_cli.local.follow import FileFollower
from mmd_cli.local.forkserver import ForkServers
from mmd_cli.local.located import located
from mmd_cli.local.pods import NO_SECRETS, LocalPod, LocalSecrets, component_of, free_port, local_pods
from mmd_cli.local.scale import LocalScaler
from mmd_cli.local.supervisor import NATS, GaveUpError, Supervisor
from mmd_operator.resources.nats import PASSWORD_PREFIX, users_configuration, with_passwords
from mmd_operator.resources.plan import plan_objects
from mmd_workers.gateway.access.certificate import load_pair
from mmd_workers.wire.server import NatsServer

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
NAMESPACE = "default"


class StartError(CommandError):
    """A pod did not become routable in time."""


class SecretError(CommandError):
    """A file that stands for a Secret cannot be used."""


@dataclass(frozen=True, slots=True)
class PodProgress:
    """Progress of a pod: starting, loading, ready or restarting."""

    pod: LocalPod
    state: str
    seconds: float
    restarts: int


@dataclass(slots=True)
class LocalDeployment:
    """A deployment that runs on this machine; every pod was routable when it was returned."""

    name: str
    model: str
    gateway_url: str
    admin_url: str
    pods: list[LocalPod]
    supervisor: Supervisor
    nats: NatsServer

    def pod(self, component: str, ordinal: int = 0) -> LocalPod:
        """A pod by component (gateway, encoder, prefill, decode) and number."""
        return [pod for pod in self.pods if pod.component == component][ordinal]


def load(path: Path) -> MultimodalDeployment:
    """Read the resource. Relative paths of the model and of adapters are resolved in the file's folder.

    Raises:
        InvalidDeploymentError: it is not a valid resource, or a path has characters that ids cannot have.
    """
    return located(resource.load(path), path.parent)


def _fits_here(deployment: MultimodalDeployment) -> MultimodalDeployment:
    """Return the deployment, if each replica fits on one machine.

    Raises:
        InvalidDeploymentError: a replica spans several machines.
    """
    spec = deployment.spec
    if faults := [_spans_machines(spec, name) for name in POOL_NAMES if _is_grouped(spec, name)]:
        raise InvalidDeploymentError(faults)
    return deployment


def _is_grouped(spec: MultimodalDeploymentSpec, pool: PoolName) -> bool:
    return getattr(spec, pool) is not None and spec.group_size(pool) > 1


def _spans_machines(spec: MultimodalDeploymentSpec, pool: PoolName) -> Fault:
    size, gpus = spec.group_size(pool), spec.replica_gpus(pool)
    return Fault(
        f"spec.{pool}.gpus",
        f"a replica spans {size} pods, which mmd up does not start; set it to {gpus}, or to 0 to run all ranks on the CPU",
    )


@asynccontextmanager
async def running(
    deployment: MultimodalDeployment,
    *,
    port: int = 0,
    admin_port: int = 0,
    threads: int = 0,
    log_line: Callable[[str, str], None],
    progress: Callable[[list[PodProgress]], None] = lambda _: None,
    ready_seconds: float = 600.0,
    follow: Path | None = None,
    secrets: LocalSecrets = NO_SECRETS,
    shared_servers: ForkServers | None = None,
) -> AsyncIterator[LocalDeployment]:
    """Run a deployment; leaves no process and no port behind, however the block ends.

    `follow`: the file of the deployment. Its changes reach the running processes where they may change at
    runtime. `secrets`: files in place of the Secrets of spec.gateway.auth and spec.gateway.tls; gateways
    follow them. `shared_servers`: fork servers of this event loop that start the pods of several deployments,
    and outlive them.

    Raises:
        EngineMissingError: the deployment's engine is not installed.
        InvalidDeploymentError: a replica spans several machines, or the engine refuses its settings.
        StartError: a pod was not routable within `ready_seconds`.
        SecretError: the file of API keys or the TLS certificate cannot be used, or the deployment needs none.
        RenderError: the deployment needs such a file, or something else that does not exist here.
        GaveUpError: a process ended, and did not come back; also while the block runs, which is cancelled.
    """
    interpreter = interpreter_for(_fits_here(deployment).spec.engine)
    if faults_of_engine := await asyncio.to_thread(engine_faults, deployment.spec.engine):
        raise InvalidDeploymentError(faults_of_engine)
    _check_secrets(secrets, deployment.spec)
    _stop_in_good_order_on_sigterm()
    name = deployment.metadata.name
    deployment = for_one_machine(deployment)
    objects = objects_of(deployment)
    with tempfile.TemporaryDirectory(prefix=f"mmd-{name}-") as folder:
        nats = _nats(Path(folder) / "nats", deployment, objects)
        async with (
            _started(nats),
            _supervising(log_line, interpreter, shared_servers) as supervisor,
            _in_background(supervisor.supervise(NATS, supervisor.keep_nats(nats))),
            _ending_on_give_up(supervisor),
        ):
            threads = threads or _threads_per_worker(objects)
            fraction = 1 / max(1, most_workers(deployment.spec))
            pods = local_pods(objects, Path(folder), nats.url, port, threads, fraction, admin_port, secrets)
            gateway = next(pod for pod in pods if pod.component == "gateway")
            local = LocalDeployment(
                name,
                deployment.spec.model.names[0],
                gateway.http_url,
                gateway.admin_url,
                pods,
                supervisor,
                nats,
            )
            for pod in pods:
                supervisor.start(pod)
            with _state_file(local) as write_state:  # from now on `mmd status` shows how far each pod is
                await _until_ready(pods, supervisor, progress, ready_seconds)
                scaler = LocalScaler(
                    deployment,
                    objects,
                    pods,
                    supervisor,
                    Path(folder),
                    nats.url,
                    threads,
                    fraction,
                    log_line,
                    write_state,
                )
                background = [asyncio.create_task(scaler.run(), name="autoscaler")] if scaler.needed else []
                if follow is not None:
                    namespace = deployment.metadata.namespace or NAMESPACE
                    follower = FileFollower(
                        follow,
                        load_for_one_machine,
                        deployment,
                        namespace,
                        Path(folder),
                        log_line,
                    )
                    background.append(asyncio.create_task(follower.run(), name="follow-file"))
                async with _in_background(*background):
                    yield local


@asynccontextmanager
async def _started(nats: NatsServer) -> AsyncIterator[None]:
    """Run the message server until the block ends."""
    try:
        nats.start()  # on this thread, which lasts: the server ends with the thread that started it
        yield
    finally:
        await asyncio.to_thread(nats.stop)


@asynccontextmanager
async def _supervising(
    log_line: Callable[[str, str], None], interpreter: Interpreter, shared_servers: ForkServers | None
) -> AsyncIterator[Supervisor]:
    """Yield a supervisor. After the block, all its processes have ended.

    Gateways end first, which may take as long as a request: requests in flight still find their workers.
    """
    supervisor = Supervisor(log_line, interpreter=interpreter, shared_servers=shared_servers)
    try:
        yield supervisor
    finally:
        _kill_on_a_second_signal(supervisor)
        gateways = [n for n, child in supervisor.children.items() if child.pod.component == "gateway"]
        await supervisor.stop(gateways)
        await supervisor.close()


@asynccontextmanager
async def _in_background(*tasks: asyncio.Task[None]) -> AsyncIterator[None]:
    """Cancel the tasks when the block ends."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _ending_on_give_up(supervisor: Supervisor) -> AsyncIterator[None]:
    """Cancel the block when a process is given up.

    Raises:
        GaveUpError: the reason for the first such process.
    """
    task, faults = asyncio.current_task(), list[GaveUpError]()

    def give_up(fault: GaveUpError) -> None:
        faults.append(fault)
        if task is not None and len(faults) == 1:
            task.cancel()

    supervisor.gave_up = give_up
    try:
        yield
    except asyncio.CancelledError:
        if task is None or not faults:
            raise
        task.uncancel()
        raise faults[0] from None
    finally:
        supervisor.gave_up = lambda _: None


@contextmanager
def _state_file(local: LocalDeployment) -> Iterator[Callable[[Mapping[PoolName, str]], Path]]:
    """Keep the file by which `mmd status` finds the deployment, until the block ends.

    Yields a function that writes the file again, with the decisions by pool.
    """

    def write_state(decisions: Mapping[PoolName, str]) -> Path:
        shown = [state.RunningPod(pod.name, pod.component, pod.admin_url) for pod in local.pods]
        words = {str(pool): decision for pool, decision in decisions.items()}
        return state.write(
            state.Running(local.name, os.getpid(), local.gateway_url, local.admin_url, shown, words)
        )

    note = write_state({})
    try:
        yield write_state
    finally:
        note.unlink(missing_ok=True)


def _check_secrets(secrets: LocalSecrets, spec: MultimodalDeploymentSpec) -> None:
    if (file := secrets.keys) is not None:
        if spec.gateway.auth is None:
            raise SecretError(
                f"spec.gateway.auth is not set, so the keys of {file} would not be needed; set spec.gateway.auth.keysSecret"
            )
        try:
            parse_tenants(file.read_text())
        except (OSError, ValueError) as error:
            raise SecretError(f"cannot use the API keys of {file}: {error}") from error
    if (folder := secrets.tls) is not None:
        if spec.gateway.tls is None:
            raise SecretError(
                f"spec.gateway.tls is not set, so the certificate of {folder} would not be needed; set spec.gateway.tls.secretName"
            )
        try:
            load_pair(*((folder / name).read_bytes() for name in (TLS_CERTIFICATE, TLS_KEY)))
        except (OSError, ValueError) as error:
            raise SecretError(f"cannot use the TLS certificate of {folder}: {error}") from error


def objects_of(deployment: MultimodalDeployment) -> list[dict[str, Any]]:
    """The objects that the operator would apply, with passwords in the Secrets that it would make."""
    planned = plan_objects(deployment, deployment.metadata.namespace or NAMESPACE)
    return [with_passwords(o) if o["kind"] == "Secret" else o for o in planned]


def for_one_machine(deployment: MultimodalDeployment) -> MultimodalDeployment:
    """The deployment with one NATS server, and with gloo where the spec leaves the transport of KV open.

    More servers would be lost together. All workers share one GPU, and NCCL needs one for each process.
    """
    spec = deployment.spec
    nats = spec.nats.model_copy(update={"replicas": 1})
    kv = spec.transfer.kv
    if kv.backend == "Auto":
        kv = kv.model_copy(update={"backend": "Gloo"})
    transfer = spec.transfer.model_copy(update={"kv": kv})
    changed = spec.model_copy(update={"nats": nats, "transfer": transfer})
    return deployment.model_copy(update={"spec": changed})


def load_for_one_machine(path: Path) -> MultimodalDeployment:
    """The deployment of a file, as it runs on this machine.

    Raises:
        InvalidDeploymentError: it is invalid, or a replica spans several machines.
    """
    return for_one_machine(_fits_here(load(path)))


def _nats(folder: Path, deployment: MultimodalDeployment, objects: list[dict[str, Any]]) -> NatsServer:
    """The message server: with the users of a managed one, or open in place of an external one."""
    passwords = next((o["stringData"] for o in objects if o["kind"] == "Secret"), None)
    if passwords is None:
        return NatsServer(folder, port=free_port())
    metadata = deployment.metadata
    return NatsServer(
        folder,
        port=free_port(),  # no connection takes this port while the server restarts
        configuration=users_configuration(metadata.namespace or NAMESPACE, metadata.name),
        environment={f"{PASSWORD_PREFIX}{user}": password for user, password in passwords.items()},
    )


def _stop_in_good_order_on_sigterm() -> None:
    """Let SIGTERM end the block as Ctrl-C does. Only the main thread may handle signals."""
    if (task := asyncio.current_task()) is not None:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _kill_on_a_second_signal(supervisor: Supervisor) -> None:
    """Let a second interrupt kill the pods, without waiting for requests in flight."""
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(number, supervisor.kill)


def _threads_per_worker(objects: list[dict[str, Any]]) -> int:
    """Compute threads of each worker process.

    Together they are twice as many as the cores, because pools often wait for one another.
    """
    workers = sum(
        int(o["spec"].get("replicas", 1))
        for o in objects
        if o["kind"] == "StatefulSet" and component_of(o) != "nats"
    )
    cores = os.cpu_count() or 1
    return min(cores, math.ceil(2 * cores / max(1, workers)))


def most_workers(spec: MultimodalDeploymentSpec) -> int:
    """Number of worker processes at the largest size of every pool.

    Each may take that share of the machine's memory.
    """
    pools = (pool for pool in (spec.encoder, spec.prefill, spec.decode) if pool is not None)
    return sum(
        pool.min_replicas if pool.autoscaling is None else pool.autoscaling.max_replicas for pool in pools
    )


async def _until_ready(
    pods: list[LocalPod],
    supervisor: Supervisor,
    progress: Callable[[list[PodProgress]], None],
    ready_seconds: float,
) -> None:
    begin = time.monotonic()
    seconds: dict[str, float] = {}
    states: dict[str, str] = {}
    async with httpx.AsyncClient(timeout=2.0) as client:
        while len(seconds) < len(pods):
            for pod in pods:
                if pod.name in seconds:
                    continue
                states[pod.name] = await _state(client, pod)
                if states[pod.name] == "ready":
                    seconds[pod.name] = time.monotonic() - begin
            progress(
                [
                    PodProgress(
                        pod,
                        states[pod.name],
                        seconds.get(pod.name, time.monotonic() - begin),
                        supervisor.children[pod.name].restarts,
                    )
                    for pod in pods
                ]
            )
            if time.monotonic() - begin > ready_seconds:
                late = [pod.name for pod in pods if pod.name not in seconds]
                words = "; ".join(f"{name}: {supervisor.children[name].last_line}" for name in late)
                raise StartError(f"not routable within {ready_seconds:.0f} s: {words}")
            await asyncio.sleep(POLL_SECONDS)


async def _state(client: httpx.AsyncClient, pod: LocalPod) -> str:
    try:
        response = await client.get(f"{pod.admin_url}{paths.READYZ}")
    except httpx.HTTPError:
        return "starting"
    return "ready" if response.status_code == 200 else "loading"


async def until_stopped() -> None:
    """Wait for Ctrl-C or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    await stop.wait()
