"""The operator's process: client, health endpoint, lease, kopf."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp
import kopf
from kubernetes.aio import client, config

from mmd_api.resource import GROUP, PLURAL
from mmd_operator.handlers import Loops, registry_for, settings
from mmd_operator.health import health_endpoint
from mmd_operator.kube.cluster import (
    CHILD_KINDS,
    DEPLOYMENTS,
    INSTALLED_BY_USERS,
    BusyError,
    Cluster,
    RefusedError,
)
from mmd_operator.kube.kopf_toggles import calm_toggles
from mmd_operator.kube.leadership import DEFAULT_LEASE_NAME, Leadership, NotLeaderError
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pauses import PRODUCTION, Pauses

logger = logging.getLogger(__name__)

LEASE_STALE_SECONDS = 60.0


class NoDefinitionError(RuntimeError):
    """The API server does not know the resource."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the operator process. Empty `namespaces`: all namespaces."""

    namespaces: tuple[str, ...]
    lease_namespace: str
    health_port: int
    pauses: Pauses = PRODUCTION
    lease_name: str = DEFAULT_LEASE_NAME


@asynccontextmanager
async def api_client(fence: Callable[[], None] | None = None) -> AsyncIterator[client.ApiClient]:
    """A client with the rights of the pod's service account, or of the kubeconfig.

    `fence` is called once a write has a connection, just before it is sent: a process that slept while the write waited for
    a connection must not send it. An exception from `fence` ends the call.
    """
    configuration = client.Configuration()
    if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        config.load_incluster_config(client_configuration=configuration)
    else:
        await config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=configuration)
    if fence is not None:
        configuration.trace_configs = [_fence_writes(fence)]
    async with client.ApiClient(configuration) as api:
        yield api


def _fence_writes(fence: Callable[[], None]) -> aiohttp.TraceConfig:
    """A trace that calls the fence before headers and body: aiohttp holds the headers back until the body's first chunk."""

    async def about_to_send(
        _session: aiohttp.ClientSession,
        _context: SimpleNamespace,
        request: aiohttp.TraceRequestHeadersSentParams | aiohttp.TraceRequestChunkSentParams,
    ) -> None:
        if request.method != "GET":
            fence()

    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(about_to_send)
    trace.on_request_chunk_sent.append(about_to_send)
    return trace


def trouble(leadership: Leadership, loops: Loops) -> str | None:
    """Why the process must be restarted, or None."""
    if leadership.quiet_seconds > LEASE_STALE_SECONDS:
        return f"the lease has not been checked for {leadership.quiet_seconds:.0f} s\n"
    problem = loops.trouble()
    return f"{problem}\n" if problem else None


async def serve(options: Options) -> None:
    """Run until SIGTERM.

    Raises:
        NotLeaderError: the lease was lost; the process must end.
        NoDefinitionError: the CRD is not installed.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    metrics = OperatorMetrics()
    async with AsyncExitStack() as stack:
        # Renewals have their own client, so that they never wait for other calls.
        api = await stack.enter_async_context(api_client())
        leadership = Leadership(api, options.lease_namespace, options.lease_name, metrics, options.pauses)
        fenced = await stack.enter_async_context(api_client(leadership.fence))
        cluster = Cluster(fenced, metrics)
        loops = Loops(cluster, options.namespaces, metrics, options.pauses)
        metrics.leading.set_function(lambda: leadership.held)
        metrics.oldest_pass.set_function(lambda: loops.oldest_pass_seconds)
        metrics.deployments = loops.snapshots
        metrics.unread = lambda: loops.watches.unread_seconds

        async def work() -> None:
            await _need_definition(cluster, options.pauses)
            installation_watchers = [
                asyncio.create_task(_stop_when_installed(kind, cluster, stop, options.pauses))
                for kind in INSTALLED_BY_USERS
            ]
            try:
                with loops.watches.in_force(), calm_toggles():
                    await kopf.operator(
                        registry=registry_for(loops),
                        settings=settings(),
                        standalone=True,
                        clusterwide=not options.namespaces,
                        namespaces=options.namespaces,
                        stop_flag=stop,
                    )
            finally:
                for watcher in installation_watchers:
                    watcher.cancel()

        async with health_endpoint(options.health_port, lambda: trouble(leadership, loops), metrics):
            leading = asyncio.create_task(leadership.lead(work))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({leading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not leading.done() and not loops.started:
                leading.cancel()  # a standby holds nothing
            try:
                await leading
            except asyncio.CancelledError:
                logger.info("stopped before it acquired the lease")
            finally:
                stopping.cancel()


async def _stop_when_installed(kind: str, cluster: Cluster, stop: asyncio.Event, pauses: Pauses) -> None:
    """Stop the process once a missing kind is installed; its successor watches it. kopf looks for kinds only at startup."""
    while not await _served(kind, cluster):
        await asyncio.sleep(pauses.not_served_seconds)
        if await _served(kind, cluster):
            logger.info("%s has been installed; the operator restarts to watch it", kind)
            stop.set()


async def _served(kind: str, cluster: Cluster) -> bool:
    try:
        return await cluster.serves(CHILD_KINDS[kind])
    except (BusyError, RefusedError) as error:
        logger.warning("failed to find out whether the API server serves %s: %s", kind, error)
        return False


async def _need_definition(cluster: Cluster, pauses: Pauses) -> None:
    """Return once the API server serves MultimodalDeployments, for which kopf would wait silently. While it cannot be asked, ask again.

    Raises:
        NoDefinitionError: the API server does not serve them.
    """
    while True:
        try:
            if await cluster.serves(DEPLOYMENTS):
                return
        except BusyError as error:
            logger.warning("failed to find out whether the API server serves %s: %s", PLURAL, error)
            await asyncio.sleep(pauses.lease_seconds)
        else:
            raise NoDefinitionError(
                f"the API server does not serve {PLURAL}.{GROUP}; apply the CRD, or install the chart with crds.install=true"
            )


__all__ = ["NoDefinitionError", "NotLeaderError", "Options", "serve"]
