"""A deployment on an API server that answers when a test lets it, and a watch that shows what the test lets it show."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from mmd_api.pool_resource import POOL_KIND
from mmd_api.resource import API_VERSION, KIND
from mmd_operator.kube.cluster import BusyError, RefusedError
from mmd_operator.kube.context import PassContext
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.kube.pod_client import ReportFetcher
from mmd_operator.observed.observed import Observed, PodView, child_of
from mmd_operator.passes.finalizer import FINALIZER
from mmd_operator.passes.reconcile_pass import ReconcilePass
from mmd_operator.resources.naming import REVISION_LABEL

from .bodies import UID, pod

AUTOSCALING = {
    "minReplicas": 1,
    "maxReplicas": 4,
    "maxScaleUpPercent": 1000,
    "maxScaleDownPercent": 100,
    "scaleDownStabilizationSeconds": 0,
    "scaleDownCooldownSeconds": 0,
    "panicWindowSeconds": 0,
}
TICK_SECONDS = 2.0


class LaggingCluster:
    """The API server. While `holds`, every write waits for `release` before it has an effect, and again before it is answered.

    `outcomes`: of the next writes, in this order: "done", "refused", "lost" (neither carried out nor answered) or "unanswered".
    """

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], dict[str, Any]] = {}
        self.holds = False
        self.waiting: list[asyncio.Future[None]] = []
        self.outcomes: deque[str] = deque()
        self.specs: dict[str, dict[str, Any]] = {}  # recorded, by name; they are not watched
        self.status: dict[str, Any] = {}
        self.broken: set[str] = set()  # revisions whose workers do not become Ready
        self.shrunk: list[str] = []  # no pod here drains, so nothing may become smaller
        self._shown: dict[tuple[str, str], dict[str, Any]] = {}
        self._shared: asyncio.Future[None] | None = None
        self._version = 0

    async def turn(self, *, shared: bool = False) -> None:
        """Wait until the test lets this call go on, with others that share their turn."""
        if not self.holds:
            return
        if shared and self._shared is not None and not self._shared.done():
            await asyncio.shield(self._shared)
            return
        waits = asyncio.get_running_loop().create_future()
        self.waiting.append(waits)
        if shared:
            self._shared = waits
        await waits

    def release(self, number: int) -> None:
        """Let one of the calls that wait go on."""
        if self.waiting:
            self.waiting.pop(number % len(self.waiting)).set_result(None)

    def show(self) -> None:
        """The watch catches up."""
        self._shown = copy.deepcopy(self.stored)

    def observe(self) -> Observed:
        """What the watch shows: every pod of a size that it shows is Ready, unless its revision is broken."""
        children = [child_of(kind, body) for (kind, _), body in self._shown.items()]
        pods: list[PodView] = []
        for child in children:
            if child.workload is not None and child.component is not None:
                revision, name = child.workload.template_revision, child.name
                pods += [
                    replace(
                        pod(
                            child.component,
                            revision,
                            name=f"{name}-{n}",
                            ready=n < child.workload.ready,
                            gpus=child.workload.gpus,
                            inputs=child.workload.inputs,
                        ),
                        address=f"{name}-{n}",
                    )
                    for n in range(child.workload.replicas)
                ]
        return Observed({child.key: child for child in children}, tuple(pods))

    @property
    def gpus(self) -> int:
        """GPUs of all sizes as they are stored."""
        sets = (child_of(kind, body) for (kind, _), body in self.stored.items() if kind == "StatefulSet")
        return sum(child.workload.replicas * child.workload.gpus for child in sets if child.workload)

    def size(self, pool: str) -> int:
        """Replicas of a pool over all revisions."""
        found = [
            body
            for (kind, name), body in self.stored.items()
            if kind == "StatefulSet" and f"-{pool}-" in name
        ]
        return sum(body["spec"]["replicas"] for body in found)

    async def recorded(self, _namespace: str, _selector: str) -> list[dict[str, Any]]:
        return list(self.specs.values())

    async def create_recorded(self, _namespace: str, manifest: dict[str, Any]) -> dict[str, Any]:
        self.specs[manifest["metadata"]["name"]] = manifest
        return manifest

    async def patch_recorded(self, _namespace: str, name: str, change: dict[str, Any]) -> None:
        before = self.specs[name]
        metadata = {**before["metadata"], **change.get("metadata", {})}
        self.specs[name] = {**before, **change, "metadata": metadata}

    async def delete_recorded(self, _namespace: str, name: str) -> None:
        del self.specs[name]

    async def get(self, kind: str, _namespace: str, name: str) -> dict[str, Any] | None:
        return copy.deepcopy(self.stored.get((kind, name)))

    async def apply(self, manifest: dict[str, Any], _namespace: str) -> dict[str, Any]:
        key = manifest["kind"], manifest["metadata"]["name"]

        def change() -> None:
            body = copy.deepcopy(manifest)
            before = self.stored.get(key, {})
            size = before.get("spec", {}).get("replicas")
            if key[0] == "StatefulSet":
                body["spec"].setdefault("replicas", 1 if size is None else size)
            uid = before.get("metadata", {}).get("uid", f"uid-of-{key}-{self._version}")
            body["metadata"] |= {"uid": uid, "namespace": "default"}
            before = copy.deepcopy(before)
            before.get("metadata", {}).pop("resourceVersion", None)
            before.pop("status", None)
            if body != before:
                self._store(key, body)

        await self._write(change)
        return copy.deepcopy(self.stored[key])

    async def scale(self, kind: str, _namespace: str, name: str, replicas: int, *_: str) -> None:
        def change() -> None:
            if (kind, name) not in self.stored:
                raise RefusedError("not found")
            body = copy.deepcopy(self.stored[kind, name])
            if replicas < body["spec"]["replicas"]:
                self.shrunk.append(name)
            body["spec"]["replicas"] = replicas
            self._store((kind, name), body)

        await self._write(change)

    def recover(self, revision: str) -> None:
        """The workers of a broken revision become Ready."""
        self.broken.discard(revision)
        for key, body in list(self.stored.items()):
            if key[0] == "StatefulSet" and body["metadata"]["labels"].get(REVISION_LABEL) == revision:
                self._store(key, copy.deepcopy(body))

    def vanish(self, pool: str) -> None:
        """Another client deletes the StatefulSets of a pool."""
        for kind, name in list(self.stored):
            if kind == "StatefulSet" and f"-{pool}-" in name:
                del self.stored[kind, name]

    async def delete(self, kind: str, _namespace: str, name: str, _uid: str) -> None:
        await self._write(lambda: self.stored.pop((kind, name), None))

    async def apply_status(self, _namespace: str, _name: str, status: dict[str, Any]) -> dict[str, Any]:
        self.status = status
        return status

    async def apply_pool_status(self, _namespace: str, name: str, status: dict[str, Any]) -> None:
        def change() -> None:
            body = copy.deepcopy(self.stored[POOL_KIND, name])
            body["status"] = dict(status)
            self._store((POOL_KIND, name), body)

        await self._write(change)

    async def release_replicas(self, *_: object) -> None:
        pass

    async def ask_to_drain(self, *_: object) -> None:
        pass

    async def warnings_about(self, *_: object) -> list[Any]:
        return []

    async def _write(self, change: Any) -> None:
        await self.turn()
        outcome = self.outcomes.popleft() if self.outcomes else "done"
        if outcome == "refused":
            raise RefusedError("quota exceeded")
        if outcome != "lost":
            change()
        await self.turn()
        if outcome != "done":
            raise BusyError("no answer")

    def _store(self, key: tuple[str, str], body: dict[str, Any]) -> None:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        if size := body["spec"].get("replicas") if "template" in body.get("spec", {}) else None:
            revision = body["metadata"]["labels"].get(REVISION_LABEL)
            ready = 0 if revision in self.broken else size
            body["status"] = {"replicas": size, "readyReplicas": ready, "updatedReplicas": size}
        self.stored[key] = body


class Reports(ReportFetcher):
    """Workers and gateways that answer over such a cluster. `queued`: work that waits in each encoder."""

    def __init__(self, cluster: LaggingCluster) -> None:
        self._cluster = cluster
        self.queued = 0.0

    async def get(self, address: str, port: int, path: str, max_bytes: int) -> bytes:
        await self._cluster.turn(shared=True)
        ((_, found),) = [
            (key, body)
            for key, body in self._cluster._shown.items()
            if address.startswith(f"{key[1]}-") and "template" in body.get("spec", {})
        ] or [(None, None)]
        if found is None:
            return b""
        revision = found["spec"]["template"]["metadata"]["labels"][REVISION_LABEL]
        report: dict[str, Any] = {"pod": address, "revision": revision}
        if "gateway" in address:
            ttft = {"window_seconds": 30.0, "requests": 0, "seconds": 0.0}
            report |= {"queue": {"age_seconds": 0.0, "waiting_work": {}}, "ttft": ttft}
        else:
            load: dict[str, Any] = {}
            if "encoder" in address:
                load = {
                    "encode_queued_work": {"video": self.queued},
                    "encode_work_per_second": {"video": 100.0},
                    "encode_busy_fraction": 1.0 if self.queued else 0.0,
                }
            report |= {"state": "ready", "load": load}
        return json.dumps(report).encode()


class Race:
    """One deployment whose passes and ticks run at the same time. Its encoder scales, its decode pool has a fixed size."""

    def __init__(self, budget: int, decode: int = 1) -> None:
        self.cluster = LaggingCluster()
        self.reports = Reports(self.cluster)
        metrics = OperatorMetrics()
        events = SimpleNamespace(report=lambda *_, **__: None)
        self._context = PassContext(
            cast(Any, self.cluster), cast(Any, events), metrics, "default", "demo", PRODUCTION
        )
        self.body: dict[str, Any] = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {
                "name": "demo",
                "namespace": "default",
                "uid": UID,
                "generation": 1,
                "resourceVersion": "1",
                "finalizers": [FINALIZER],
            },
            "spec": {
                "model": {"id": "builtin/demo", "dtype": "Float32"},
                "nats": {"managed": False, "url": "nats://nats.example:4222"},
                "encoder": {"gpus": 1, "autoscaling": AUTOSCALING},
                "prefill": {"gpus": 1, "replicas": 1},
                "decode": {"gpus": 1, "replicas": decode},
                "gpuBudget": budget,
                "transfer": {"kv": {"backend": "Gloo"}},
            },
        }
        self._skipped = 0.0
        self.restart()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._now = time.time()

    def time_passes(self, seconds: float) -> None:
        """What was written grows older, and the next tick comes as much later."""
        self._skipped += seconds
        self._now += seconds

    def change(self, **spec: Any) -> None:
        """A new generation of the spec."""
        self.body = copy.deepcopy(self.body)
        self.body["spec"] |= spec
        self.body["metadata"]["generation"] += 1

    async def begin(self, what: str) -> None:
        """A pass or a tick begins unless one is running, and goes on until it waits for the API server or for a report."""
        if what not in self._running or self._running[what].done():
            self._running[what] = asyncio.create_task(
                self._run_pass() if what == "pass" else self._run_tick()
            )
        await self.quiet()

    async def finish(self, what: str) -> None:
        """A pass or a tick, to its end."""
        await self.begin(what)
        await self._running[what]

    async def change_during_reports(self, change: Callable[[], None]) -> None:
        """A tick, in which something changes after the pods were asked for their reports and before they answer."""
        self.cluster.holds = True
        await self.begin("tick")
        assert self.cluster.waiting
        change()
        self.cluster.holds = False
        while self.cluster.waiting:
            await self.release()
        await self._running["tick"]

    def serve(self, revision: str) -> None:
        """The gateway's template becomes that of another revision, and the watch shows it."""
        gateway = self.cluster.stored["Deployment", "demo-gateway"]
        gateway["spec"]["template"]["metadata"]["labels"][REVISION_LABEL] = revision
        self.cluster.show()

    @property
    def gateway_revision(self) -> str | None:
        """The revision in the template of the gateway, if there is one."""
        gateway = self.cluster.stored.get(("Deployment", "demo-gateway"))
        return gateway["spec"]["template"]["metadata"]["labels"][REVISION_LABEL] if gateway else None

    def restart(self) -> None:
        """Another process takes over: it knows what the watch shows, the status included."""
        self.body = {**self.body, "status": self.cluster.status}
        self._pass = ReconcilePass(self._context, self.reports, self.cluster.observe, self.body)
        self._pass._growth._clock = lambda: time.monotonic() + self._skipped

    async def release(self, number: int = 0) -> None:
        """One call goes on."""
        self.cluster.release(number)
        await self.quiet()

    async def quiet(self) -> None:
        """Wait until every task waits for a call."""
        for _ in range(30):
            await asyncio.sleep(0)

    async def settle(self, rounds: int = 3) -> None:
        """Passes and ticks, one after another, on a watch that does not lag."""
        self.cluster.holds = False
        while self.cluster.waiting:
            await self.release()
        for _ in range(rounds):
            for what in ("pass", "tick"):
                self.cluster.show()
                await self.finish(what)
        self.cluster.show()

    async def end(self) -> None:
        """Cancel what still runs."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run_pass(self) -> None:
        with suppress(BusyError, RefusedError):
            await self._pass.run(self.body, failing=False)

    async def _run_tick(self) -> None:
        self._now += TICK_SECONDS
        with suppress(BusyError, RefusedError):
            await self._pass.verify_growth()
            await self._pass.scaling.tick(self._now, lambda: self._pass.scaled(self.body))
