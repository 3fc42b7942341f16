"""The kopf handlers: which objects to watch and which deployment to wake. Handlers translate and decide nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, cast

import kopf

from mmd_operator.kube.cluster import (
    CHILD_KINDS,
    DEPLOYMENTS,
    PODS,
    BusyError,
    Cluster,
    RefusedError,
    Resource,
)
from mmd_operator.kube.events import EventRecorder
from mmd_operator.kube.metrics import DeploymentSnapshot, OperatorMetrics
from mmd_operator.kube.namespace_watches import NamespaceWatches
from mmd_operator.kube.pauses import Pauses
from mmd_operator.kube.pod_client import ReportFetcher
from mmd_operator.kube.sweep import Indexed, Sweep
from mmd_operator.observed.observed import (
    MANAGED_BY_LABEL,
    Child,
    Observed,
    PodView,
    child_of,
    deployment_key,
    pod_of,
)
from mmd_operator.passes.reconciler import Reconciler
from mmd_operator.resources.naming import DEPLOYMENT_LABEL
from mmd_operator.resources.workload_kinds import SET_NAME_LABEL

logger = logging.getLogger(__name__)

SELECTOR = f"{MANAGED_BY_LABEL}=multimodal-operator,{DEPLOYMENT_LABEL}"
OWN_SELECTOR = f"{SELECTOR},!{SET_NAME_LABEL}"
"""Selects objects the operator created. LeaderWorkerSet copies our labels to its children, so those are excluded."""
STOP_SECONDS = 10.0
NAMESPACES_PER_SECOND = 5.0
Key = tuple[str, str]
Index = kopf.Index[Key, Any]


class Loops:
    """Runs the loops of each deployment, from its first observation to its deletion."""

    def __init__(
        self,
        cluster: Cluster,
        namespaces: tuple[str, ...],
        metrics: OperatorMetrics,
        pauses: Pauses,
    ) -> None:
        self._cluster, self._metrics, self._pauses = cluster, metrics, pauses
        self.watches = NamespaceWatches(namespaces, pauses, self.relisted, self._seen)
        self._without_loop: dict[Key, float] = {}  # monotonic seconds when each deployment was seen first
        self._namespaces = namespaces
        self._report_fetcher = ReportFetcher()
        self._events = EventRecorder(cluster, metrics, pauses)
        self._running: dict[Key, tuple[Reconciler, asyncio.Task[None]]] = {}
        self._children: Mapping[Key, Iterable[Any]] = {}
        self._pods: Mapping[Key, Iterable[Any]] = {}
        kinds: dict[Resource, tuple[str | None, Indexed]] = {
            resource: (OWN_SELECTOR, partial(self._indexed, kind)) for kind, resource in CHILD_KINDS.items()
        }
        kinds[PODS] = (
            SELECTOR,
            lambda: (
                (pod.uid, pod.resource_version)
                for (namespace, _), pods in self._pods.items()
                if self.watches.may_read(namespace)
                for pod in pods
            ),
        )
        kinds[DEPLOYMENTS] = (
            None,
            lambda: (
                (reconciler.body["metadata"]["uid"], reconciler.body["metadata"]["resourceVersion"])
                for reconciler, _ in self._running.values()
                if reconciler.body and self.watches.may_read(reconciler.namespace)
            ),
        )
        self._sweep = Sweep(cluster, self._readable, kinds, self._ghosts_found, pauses)
        self._helpers: tuple[asyncio.Task[None], ...] = ()
        self.started = False

    def start(self) -> None:
        """Start the background tasks: the operator leads from now on."""
        self.started = True
        helpers = {"sweep": self._sweep.run, "events": self._events.run, "namespaces": self._watch_namespaces}
        self._helpers = tuple(_begun(run(), name) for name, run in helpers.items())

    async def _watch_namespaces(self) -> None:
        """Notify deployments of their namespace's deletion. A watch would need rights in all namespaces."""
        while True:
            namespaces = sorted({namespace for namespace, _ in self._running})
            pause = max(self._pauses.namespace_seconds / max(len(namespaces), 1), 1 / NAMESPACES_PER_SECOND)
            for namespace in namespaces:
                await asyncio.sleep(pause)
                try:
                    terminating = await self._cluster.is_terminating(namespace)
                except (BusyError, RefusedError) as error:
                    logger.debug("failed to read namespace %s: %s", namespace, error)
                    continue
                except Exception:  # unusable response; the pods will show the deletion later
                    logger.warning("failed to read namespace %s", namespace, exc_info=True)
                    continue
                for (reconciler_namespace, _), (reconciler, _) in list(self._running.items()):
                    if terminating and reconciler_namespace == namespace:
                        reconciler.namespace_ends()
            if not namespaces:
                await asyncio.sleep(pause)

    def _readable(self) -> tuple[str, ...] | None:
        return tuple(filter(self.watches.may_read, self._namespaces)) if self._namespaces else None

    def _indexed(self, kind: str) -> Iterable[tuple[str, str]]:
        return (
            (child.uid, child.resource_version)
            for (namespace, _), children in self._children.items()
            if self.watches.may_read(namespace)
            for child in children
            if child.kind == kind
        )

    def _ghosts_found(self, uids: set[str]) -> None:
        for key, (reconciler, _) in list(self._running.items()):
            if reconciler.body is not None and reconciler.body["metadata"]["uid"] in uids:
                reconciler.show(None)
                del self._running[key]
            else:
                reconciler.wake.set()

    def relisted(self) -> None:
        """Sweep soon after a watch restarted: objects may have been deleted while it was interrupted."""
        self._sweep.soon()

    def _seen(self, resource: Any, event: Mapping[str, Any]) -> None:
        """Note a deployment when it is listed: its handler is called once all objects of all kinds have been."""
        is_deployment = (resource.group, resource.plural) == (DEPLOYMENTS.group, DEPLOYMENTS.plural)
        if is_deployment and event["type"] in (None, "ADDED"):  # others may be of no object
            metadata = event["object"]["metadata"]
            key = (metadata["namespace"], metadata["name"])
            if key not in self._running:
                self._without_loop.setdefault(key, time.monotonic())

    def show(self, body: dict[str, Any], gone: bool, children: Index, pods: Index) -> None:
        """Handle a new, changed or deleted deployment."""
        self._children, self._pods = children, pods
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        self._without_loop.pop(key, None)
        running = self._running.get(key)
        if gone:
            # A deletion may be handled after the creation of the next deployment of this name.
            if running is not None and _uid(running[0].body) == _uid(body):
                running[0].show(None)
                del self._running[key]
            return
        if running is not None:
            running[0].show(body)
            return

        def observe() -> Observed:
            if not self.watches.may_read(key[0]):
                raise RefusedError(f"namespace {key[0]} cannot be read")
            live_children = [
                child
                for child in cast("Iterable[Child]", children.get(key, ()))
                if child.uid not in self._sweep
            ]
            live_pods = [
                pod for pod in cast("Iterable[PodView]", pods.get(key, ())) if pod.uid not in self._sweep
            ]
            return Observed({child.key: child for child in live_children}, tuple(live_pods))

        reconciler = Reconciler(
            self._cluster,
            self._report_fetcher,
            self._events,
            self._metrics,
            *key,
            observe,
            body,
            self._pauses,
        )
        self._running[key] = (reconciler, _begun(reconciler.run(), f"deployment {key}"))

    def wake(self, key: Key) -> None:
        """Wake a deployment's loop after one of its objects changed."""
        if key in self._running:
            self._running[key][0].wake.set()

    def note_failed(self, key: Key, pod: PodView) -> None:
        """Let a deployment's loop know of a failed pod before that pod is gone."""
        if key in self._running:
            self._running[key][0].note_failed(pod)

    @property
    def oldest_pass_seconds(self) -> float:
        """Seconds since the last pass, successful or not, of the longest-waiting deployment; 0 without deployments.

        Before its first pass, seconds since this process saw the deployment.
        """
        now = time.monotonic()
        passes = (reconciler.last_pass for reconciler, _ in self._running.values())
        return max((now - since for since in (*passes, *self._without_loop.values())), default=0.0)

    def trouble(self) -> str | None:
        """A problem of the loops themselves, or None; only a restart fixes it. A failed pass does not count: it is retried."""
        ended = [task.get_name() for _, task in self._running.values() if task.done()]
        ended += [helper.get_name() for helper in self._helpers if helper.done()]
        return f"ended unexpectedly: {', '.join(ended[:5])}" if ended else None

    def snapshots(self) -> list[DeploymentSnapshot]:
        """Current snapshots of all deployments."""
        return [reconciler.snapshot() for reconciler, _ in self._running.values()]

    async def stop(self) -> None:
        """End all loops, giving running passes up to `STOP_SECONDS` to finish."""
        tasks = [task for _, task in self._running.values()]
        for reconciler, _ in self._running.values():
            reconciler.show(None)
        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=STOP_SECONDS)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        self._running.clear()
        await self._events.flush()
        for helper in self._helpers:
            helper.cancel()
        await asyncio.gather(*self._helpers, return_exceptions=True)
        await self._report_fetcher.close()


def _begun(loop: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task. Its unexpected end is logged with the cause at once; see `Loops.trouble`."""
    task = asyncio.create_task(loop, name=name)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s ended unexpectedly", task.get_name(), exc_info=error)


def registry_for(loops: Loops) -> kopf.OperatorRegistry:
    """Register indexes of the operator's objects, and events that wake deployments."""
    registry = kopf.OperatorRegistry()
    for kind, resource in CHILD_KINDS.items():
        _index_children(registry, kind, resource)
        _wake_on(registry, resource, loops)
    _index_pods(registry)
    _note_failed_pods(registry, loops)
    _wake_on(registry, PODS, loops)

    @kopf.on.event(DEPLOYMENTS.group, DEPLOYMENTS.version, DEPLOYMENTS.plural, registry=registry)
    async def deployment_changed(event: kopf.RawEvent, **indices: Any) -> None:
        children, pods = indices["children"], indices["pods"]
        if event["type"] is None:
            loops.relisted()
        loops.show(dict(event["object"]), event["type"] == "DELETED", children, pods)

    @kopf.on.startup(registry=registry)
    async def began(**_: Any) -> None:
        loops.start()

    @kopf.on.cleanup(registry=registry)
    async def ends(**_: Any) -> None:
        await loops.stop()

    @kopf.on.login(registry=registry)
    async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    return registry


def settings() -> kopf.OperatorSettings:
    """The kopf settings of this operator: kopf itself writes nothing, and only labelled objects are watched."""
    kopf_settings = kopf.OperatorSettings()
    kopf_settings.posting.enabled = False
    kopf_settings.scanning.disabled = True
    kopf_settings.watching.connect_timeout = 10
    kopf_settings.watching.server_timeout = 300
    kopf_settings.networking.request_timeout = 60
    kopf_settings.networking.error_backoffs = (1.0, 2.0, 4.0)
    selectors = {**dict.fromkeys(CHILD_KINDS.values(), OWN_SELECTOR), PODS: SELECTOR}
    for resource, selector in selectors.items():
        kopf_settings.watching.label_selectors[(resource.group, resource.version, resource.plural)] = selector
    return kopf_settings


def _index_children(registry: kopf.OperatorRegistry, kind: str, resource: Resource) -> None:
    @kopf.index(resource.group, resource.version, resource.plural, id="children", registry=registry)
    async def children(body: kopf.Body, **_: Any) -> dict[Key, Child]:
        return {deployment_key(body): child_of(kind, body)}


def _index_pods(registry: kopf.OperatorRegistry) -> None:
    @kopf.index(PODS.group, PODS.version, PODS.plural, id="pods", registry=registry)
    async def pods(body: kopf.Body, **_: Any) -> dict[Key, PodView]:
        return {deployment_key(body): pod_of(body)}


def _note_failed_pods(registry: kopf.OperatorRegistry, loops: Loops) -> None:
    @kopf.on.event(PODS.group, PODS.version, PODS.plural, registry=registry, id="note_failed")
    async def note_failed(body: kopf.Body, **_: Any) -> None:
        if body.get("status", {}).get("phase") == "Failed":
            loops.note_failed(deployment_key(body), pod_of(body))


def _wake_on(registry: kopf.OperatorRegistry, resource: Resource, loops: Loops) -> None:
    @kopf.on.event(resource.group, resource.version, resource.plural, registry=registry, id="wake")
    async def wake(event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        loops.wake(deployment_key(body))
        if event["type"] is None:
            loops.relisted()


def _uid(body: Mapping[str, Any] | None) -> str | None:
    return body["metadata"]["uid"] if body else None
