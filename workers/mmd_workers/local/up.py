"""`mmd up`: the pods that the operator would make, as processes of this machine, around an embedded NATS server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from mmd_api import resource
from mmd_api.pools import PoolName
from mmd_api.resource import MultimodalDeployment
from mmd_operator.plan import plan_objects
from mmd_operator.resources.nats import PASSWORD_PREFIX, users_configuration, with_passwords
from mmd_workers.errors import MmdError
from mmd_workers.local import state
from mmd_workers.local.pods import LocalPod, component_of, local_pods
from mmd_workers.local.scale import LocalScaler
from mmd_workers.local.supervisor import Supervisor
from mmd_workers.wire.server import NatsServer

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
NAMESPACE = "default"


class StartError(MmdError):
    """A pod did not become routable in time, or ended again and again."""

    code = "start_failed"


@dataclass(frozen=True, slots=True)
class PodProgress:
    """How far a pod has come: starting, loading, ready or restarting."""

    pod: LocalPod
    state: str
    seconds: float
    restarts: int


@dataclass(slots=True)
class LocalDeployment:
    """A deployment that runs on this machine; every pod was routable when it was handed out."""

    name: str
    model: str
    gateway_url: str
    pods: list[LocalPod]
    supervisor: Supervisor
    nats: NatsServer

    def pod(self, component: str, ordinal: int = 0) -> LocalPod:
        """A pod by component (gateway, encoder, prefill, decode) and number."""
        return [pod for pod in self.pods if pod.component == component][ordinal]


def load(path: Path) -> MultimodalDeployment:
    """Read the resource; a relative model path is taken from the file's folder."""
    deployment = resource.load(path)
    model = deployment.spec.model
    if model.id.startswith(("./", "../")):
        absolute = str((path.parent / model.id).resolve())
        spec = deployment.spec.model_copy(update={"model": model.model_copy(update={"id": absolute})})
        return deployment.model_copy(update={"spec": spec})
    return deployment


@asynccontextmanager
async def running(
    deployment: MultimodalDeployment,
    *,
    port: int = 0,
    threads: int = 0,
    log_line: Callable[[str, str], None],
    progress: Callable[[list[PodProgress]], None] = lambda _: None,
    ready_seconds: float = 600.0,
) -> AsyncIterator[LocalDeployment]:
    """Run a deployment; leaves no process and no port behind, however the block ends.

    Raises:
        StartError: a pod was not routable within `ready_seconds`.
    """
    _stop_in_good_order_on_sigterm()
    name = deployment.metadata.name
    objects = objects_of(deployment)
    with tempfile.TemporaryDirectory(prefix=f"mmd-{name}-") as folder:
        nats = _nats(Path(folder) / "nats", deployment, objects)
        supervisor = Supervisor(log_line)
        try:
            nats.start()  # on this thread, which lasts: the server ends with the thread that started it
            threads = threads or _threads_per_worker(objects)
            pods = local_pods(objects, Path(folder), nats.url, port, threads)
            gateway = next(pod for pod in pods if pod.component == "gateway")
            local = LocalDeployment(name, deployment.spec.model.id, gateway.http_url, pods, supervisor, nats)

            def tell(decisions: Mapping[PoolName, str]) -> Path:
                shown = [state.RunningPod(pod.name, pod.component, pod.http_url) for pod in pods]
                return state.write(
                    state.Running(
                        name,
                        os.getpid(),
                        gateway.http_url,
                        shown,
                        {str(pool): words for pool, words in decisions.items()},
                    )
                )

            for pod in pods:
                supervisor.start(pod)
            note = tell({})  # from now on `mmd status` shows how far each pod is
            try:
                await _until_ready(pods, supervisor, progress, ready_seconds)
                scaler = LocalScaler(
                    deployment, objects, pods, supervisor, Path(folder), nats.url, threads, log_line, tell
                )
                scaling = asyncio.create_task(_scale(scaler), name="autoscaler")
                try:
                    yield local
                finally:
                    scaling.cancel()
                    await asyncio.gather(scaling, return_exceptions=True)
            finally:
                note.unlink(missing_ok=True)
        finally:
            gateways = [n for n, child in supervisor.children.items() if child.pod.component == "gateway"]
            await supervisor.stop(
                gateways
            )  # the front door first: requests under way still find their workers
            await supervisor.close()
            await asyncio.to_thread(nats.stop)


def objects_of(deployment: MultimodalDeployment) -> list[dict[str, Any]]:
    """What the operator would apply; Secrets that it would make have their passwords."""
    planned = plan_objects(deployment, deployment.metadata.namespace or NAMESPACE)
    return [with_passwords(o) if o["kind"] == "Secret" else o for o in planned]


def _nats(folder: Path, deployment: MultimodalDeployment, objects: list[dict[str, Any]]) -> NatsServer:
    """The server that a managed one would be, with its users; one of somebody else's is stood in for by an open one."""
    passwords = next((o["stringData"] for o in objects if o["kind"] == "Secret"), None)
    if passwords is None:
        return NatsServer(folder)
    metadata = deployment.metadata
    return NatsServer(
        folder,
        configuration=users_configuration(metadata.namespace or NAMESPACE, metadata.name),
        environment={f"{PASSWORD_PREFIX}{user}": password for user, password in passwords.items()},
    )


async def _scale(scaler: LocalScaler) -> None:
    if scaler.needed:
        try:
            await scaler.run()
        except Exception:
            log.exception("the autoscaler ended: pools keep their sizes")
            raise


def _stop_in_good_order_on_sigterm() -> None:
    """SIGTERM ends the block like Ctrl-C does; on a thread other than the main one signals are not ours."""
    if (task := asyncio.current_task()) is not None:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _threads_per_worker(objects: list[dict[str, Any]]) -> int:
    """Compute threads of each worker process: the cores shared among those that compute."""
    workers = sum(
        int(o["spec"].get("replicas", 1))
        for o in objects
        if o["kind"] == "StatefulSet" and component_of(o) != "nats"
    )
    return max(1, (os.cpu_count() or 1) // max(1, workers))


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
            for child in supervisor.children.values():
                if child.restarts >= 3 and child.pod.name not in seconds:
                    raise StartError(
                        f"{child.pod.name} ended {child.restarts} times; it said: {child.last_line}"
                    )
            await asyncio.sleep(POLL_SECONDS)


async def _state(client: httpx.AsyncClient, pod: LocalPod) -> str:
    path = "/ready" if pod.component == "gateway" else "/readyz"
    try:
        response = await client.get(pod.http_url + path)
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
