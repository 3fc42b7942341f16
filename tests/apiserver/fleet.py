"""Pods of a deployment that answer over HTTP like real ones: each listens on a separate loopback address."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from kubernetes import client

from mmd_api.contract.annotations import DRAIN_ANNOTATION
from mmd_operator.observed.observed import Workload, child_of
from mmd_operator.resources.naming import ADMIN_PORT, REVISION_LABEL
from support.cluster.deployments import SPEC
from support.cluster.standin import Namespace, eventually

_ADDRESSES = itertools.count(random.randrange(1 << 20))
QUICK = {
    "minReplicas": 1,
    "maxReplicas": 3,
    "maxScaleUpPercent": 1000,
    "maxScaleDownPercent": 100,
    "scaleDownStabilizationSeconds": 0,
    "scaleDownCooldownSeconds": 0,
    "panicWindowSeconds": 0,
    "scaleToZeroAfterSeconds": 1,
}
RATE = {"video": 100.0}
BUSY = {"encode_queued_work": {"video": 700}, "encode_work_per_second": RATE, "encode_busy_fraction": 1.0}
IDLE = {"encode_work_per_second": RATE}


def next_address() -> str:
    number = next(_ADDRESSES)
    return f"127.{100 + number // 62500 % 100}.{number // 250 % 250}.{1 + number % 250}"


@dataclass
class FakePod:
    """One pod: what it answers, and the server that answers. `holds_work`: a drain does not end while it does."""

    name: str
    revision: str
    port: int
    address: str = field(default_factory=next_address)
    load: dict[str, Any] = field(default_factory=dict)
    demand: dict[str, Any] = field(default_factory=dict)
    holds_work: bool = False
    drain_requested: bool = False
    answer: bytes | None = None
    """Instead of a true answer."""
    identity: str = "0123456789"
    commit: str = ""
    real: str = ""
    """The address of a process that answers instead, as the pod of this name."""

    def __post_init__(self) -> None:
        pod = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = pod.reply(self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer((self.address, self.port), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def is_gateway(self) -> bool:
        return "gateway" in self.name

    @property
    def state(self) -> str:
        if not self.drain_requested:
            return "ready"
        return "draining" if self.holds_work else "drained"

    def body(self) -> bytes:
        report: dict[str, Any] = {"pod": self.name, "revision": self.revision}
        if self.is_gateway:
            queue = {"age_seconds": 0.1, "waiting_work": {}}
            ttft = {"window_seconds": 30.0, "requests": 0, "seconds": 0.0}
            report |= {"held": {}, "queue": queue, "ttft": ttft, **self.demand}
        else:
            report |= {
                "state": self.state,
                "load": self.load,
                "identity": self.identity,
                "commit": self.commit,
            }
        return json.dumps(report).encode()

    def reply(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        if self.real:
            return self._real_reply(path)
        return 200, self.body() if self.answer is None else self.answer

    def _real_reply(self, path: str) -> tuple[int, bytes]:
        """The process's own, but for a gateway's name, which ends differently in a cluster."""
        try:
            reply = httpx.get(f"{self.real}{path}", timeout=5)
        except httpx.HTTPError:
            return 504, b""
        body = reply.content
        if self.is_gateway:
            body = re.sub(rb'"pod":\s*"[^"]*"', b'"pod":"%s"' % self.name.encode(), body)
        return reply.status_code, body

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Fleet:
    """Plays StatefulSet controller, kubelet and workers. `unschedulable`: pods that no node has room for; `real`: addresses of
    processes that are workers indeed, by the names of their pods."""

    def __init__(self, namespace: Namespace, real: Mapping[str, str] | None = None) -> None:
        self.namespace = namespace
        self.real = real or {}
        self.pods: dict[str, FakePod] = {}
        self.unschedulable: set[str] = set()
        self.image = "registry.example/worker@sha256:aa"
        """What nodes pull for the tag now; of an image that is named by its digest, they pull that."""
        self.largest_size: dict[str, int] = {}
        """Largest size that each pool was ever given."""

    def step(self) -> None:
        """Once: what controllers and kubelets would do now."""
        self.namespace.unready = self.unschedulable
        self.namespace.settle()
        core, name = self.namespace.core, self.namespace.name
        present = {p.metadata.name: p for p in core.list_namespaced_pod(name).items}
        wanted: dict[str, Any] = {}
        for item in self.namespace.apps.list_namespaced_stateful_set(
            name, label_selector=REVISION_LABEL
        ).items:
            pool = item.metadata.labels["app.kubernetes.io/component"]
            self.largest_size[pool] = max(self.largest_size.get(pool, 0), item.spec.replicas)
            for ordinal in range(item.spec.replicas):
                wanted[f"{item.metadata.name}-{ordinal}"] = item.spec.template
        for pod in [p for p in present if p not in wanted and "gateway" not in p]:
            self.namespace._end_pod(pod)
        for pod, template in wanted.items():
            if pod not in present:
                self.namespace.pod_of(pod, template)
                self.remove(pod)
        for pod, found in present.items():
            if pod in wanted or "gateway" in pod:
                self._run(found)
        for pod in [p for p in self.pods if p not in present]:
            self.remove(pod)

    def _run(self, found: Any) -> None:
        """What the kubelet and the worker do about one pod."""
        name = found.metadata.name
        drain_requested = DRAIN_ANNOTATION in (found.metadata.annotations or {})
        if name in self.pods:
            self.pods[name].drain_requested = drain_requested
            return
        if name in self.unschedulable:
            reason = {
                "reason": "Unschedulable",
                "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
            }
            self._set_status(name, {"conditions": [{"type": "PodScheduled", "status": "False", **reason}]})
            return
        pod = FakePod(name, found.metadata.labels[REVISION_LABEL], ADMIN_PORT, real=self.real.get(name, ""))
        self.pods[name] = pod
        ready = [{"type": t, "status": "True"} for t in ("PodScheduled", "Ready")]
        named = found.spec.containers[0].image
        container = {
            "name": found.spec.containers[0].name,
            "image": "worker:latest",
            "imageID": named if "@" in named else self.image,
            "ready": True,
            "restartCount": 0,
            "state": {"running": {}},
        }
        self._set_status(
            name,
            {
                "podIP": pod.address,
                "podIPs": [{"ip": pod.address}],
                "conditions": ready,
                "containerStatuses": [container],
            },
        )

    def _set_status(self, pod: str, status: dict[str, Any]) -> None:
        try:
            self.namespace.core.patch_namespaced_pod_status(pod, self.namespace.name, {"status": status})
        except client.ApiException as error:
            if error.status != 404:
                raise

    def remove(self, pod: str) -> None:
        if pod in self.pods:
            self.pods.pop(pod).stop()

    def stop(self) -> None:
        for pod in list(self.pods):
            self.remove(pod)

    def until(self, check: Any) -> None:
        """Go on until a check holds."""

        def step_and_check() -> None:
            self.step()
            check()

        eventually(step_and_check)

    def pods_of(self, pool: str) -> list[FakePod]:
        """Pods of a pool by ordinal."""
        return [self.pods[name] for name in sorted(self.pods) if f"-{pool}-" in name]

    def workload(self, pool: str) -> Workload:
        """A pool's StatefulSet as the operator sees it."""
        found = self.namespace.core.api_client.sanitize_for_serialization(self.namespace.stateful_set(pool))
        workload = child_of("StatefulSet", found).workload
        assert workload is not None
        return workload

    @property
    def gateway(self) -> FakePod:
        return next(pod for name, pod in self.pods.items() if "gateway" in name)

    def assert_size(self, pool: str, replicas: int) -> None:
        found = self.namespace.stateful_set(pool).spec.replicas
        assert found == replicas, self.namespace.get()["status"]["pools"].get(pool)
        assert len(self.pods_of(pool)) == replicas


def scaled(**changes: Any) -> dict[str, Any]:
    return {**SPEC, "decode": {"gpus": 0}, "encoder": {"gpus": 0, "autoscaling": {**QUICK, **changes}}}


def assert_condition(fleet: Fleet, condition: str, status: str, reason: str, words: str = "") -> None:
    found = fleet.namespace.condition(condition)
    assert found[:2] == (status, reason), found
    assert words in found[2]


def assert_drain_requested(*pods: Any) -> None:
    assert all(pod.drain_requested for pod in pods)


def assert_replaced(fleet: Fleet, old: Any) -> None:
    now = fleet.pods.get(old.name)
    assert now is not None
    assert now is not old
    assert not now.drain_requested


def assert_gateway_fault_shown(
    namespace: Namespace, secret: dict[str, Any], fault: dict[str, str], reason: str, *words: str
) -> None:
    """A gateway of a deployment whose `spec.gateway` names a Secret reports a fault: `Degraded` has the reason and the words until it ends."""
    fleet = Fleet(namespace)
    try:
        namespace.apply({**SPEC, "gateway": secret})

        def gateway_runs() -> None:
            assert any(pod.is_gateway for pod in fleet.pods.values())

        fleet.until(gateway_runs)
        fleet.gateway.demand = fault
        ((part, fields),) = secret.items()
        another = {name: "another" for name in fields if name in ("keysSecret", "secretName")}
        namespace.change({"gateway": {part: another}})  # looked at anew
        fleet.until(lambda: assert_condition(fleet, "Degraded", "True", "SecretMissing", "another"))
        namespace.change({"gateway": secret})
        fleet.until(lambda: assert_condition(fleet, "Degraded", "True", reason, words[0]))
        message = namespace.condition("Degraded")[2]
        assert all(word in message for word in (*words, *fault.values())), message
        for pod in fleet.pods.values():
            pod.demand = {}
        fleet.until(lambda: assert_condition(fleet, "Degraded", "False", "NoProblem"))
    finally:
        fleet.stop()
