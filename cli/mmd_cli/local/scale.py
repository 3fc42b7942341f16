"""The autoscaler of `mmd up`: carries out the operator's decisions and actions on processes.

A process is requested to drain as a pod is: by an annotation, in the file that its environment names.
Independent of the reasons of decisions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from mmd_api.contract import environment, paths
from mmd_api.contract.annotations import DRAIN_ANNOTATION
from mmd_api.contract.pools import PoolName
from mmd_api.pipeline import pipeline_revision
from mmd_api.resource import MultimodalDeployment
from mmd_cli.local.pods import LocalPod, pool_pod
from mmd_cli.local.steps import repeat
from mmd_cli.local.supervisor import Supervisor
from mmd_operator.autoscaling import (
    DeploymentPolicy,
    PodFacts,
    PoolFacts,
    ReportError,
    ScaleActions,
    Scaler,
    gateway_report,
    worker_report,
)

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
ANSWER_SECONDS = 1.0


class LocalScaler:
    """Sizes the pools of one running deployment until it is cancelled. `pods` is kept up to date."""

    def __init__(
        self,
        deployment: MultimodalDeployment,
        objects: list[dict[str, Any]],
        pods: list[LocalPod],
        supervisor: Supervisor,
        directory: Path,
        nats_url: str,
        threads: int,
        memory_fraction: float,
        log_line: Callable[[str, str], None],
        changed: Callable[[Mapping[PoolName, str]], object],
    ) -> None:
        self._revision = pipeline_revision(deployment.spec)
        self._scaler = Scaler(DeploymentPolicy.of(deployment.spec))
        self._objects, self._pods, self._supervisor = objects, pods, supervisor
        self._directory, self._nats_url = directory, nats_url
        self._threads, self._memory_fraction = threads, memory_fraction
        self._log_line, self._changed = log_line, changed
        self._sizes: dict[PoolName, int] = {pool: len(self._of(pool)) for pool in self._scaler.policy.pools}
        self._created_at = {pod.name: time.time() for pod in pods}
        self._drain_requested_at: dict[str, float] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._leaving: set[str] = set()
        self._reported: set[str] = set()
        self.decisions: dict[PoolName, str] = {}

    @property
    def needed(self) -> bool:
        """Whether any pool may change its size."""
        return any(not rules.fixed for rules in self._scaler.policy.pools.values())

    async def run(self) -> None:
        """Tick until cancelled, then wait for processes that are being stopped."""
        try:
            async with httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
                await repeat("autoscaler", TICK_SECONDS, lambda: self._tick(client))
        finally:
            await asyncio.gather(*self._stopping, return_exceptions=True)

    async def _tick(self, client: httpx.AsyncClient) -> None:
        now = time.time()
        await asyncio.gather(*(self._fetch_report(client, pod, now) for pod in list(self._pods)))
        facts = {
            pool: PoolFacts(
                replicas=size,
                pods=tuple(self._facts(pod) for pod in self._of(pool)),
                drain_seconds=max((pod.grace_seconds for pod in self._of(pool)), default=120.0),
            )
            for pool, size in self._sizes.items()
        }
        gateways = frozenset(pod.name for pod in self._pods if pod.component == "gateway")
        verdict = self._scaler.tick(now, facts, gateways)
        for pool, decision in verdict.decisions.items():
            if self._scaler.policy.pools[pool].fixed:
                continue
            if decision.replicas != decision.current:
                self._log_line("autoscaler", str(decision))
                self.decisions[pool] = str(decision)
            self._make(pool, self._scaler.actions(now, decision, facts[pool]))

    async def _fetch_report(self, client: httpx.AsyncClient, pod: LocalPod, now: float) -> None:
        path = paths.GATEWAY_DEMAND if pod.component == "gateway" else paths.WORKER_STATE
        try:
            answer = await client.get(pod.admin_url + path)
            answer.raise_for_status()
            if pod.component == "gateway":
                self._scaler.record_gateway_report(
                    pod.name, now, gateway_report(answer.content, pod.name, self._revision)
                )
            else:
                self._scaler.record_report(
                    pod.name, now, worker_report(answer.content, pod.name, self._revision)
                )
                self._reported.add(pod.name)
        except httpx.HTTPError as error:
            log.debug("%s did not respond: %r", pod.name, error)
        except ReportError as error:
            log.warning("%s", error)

    def _of(self, pool: PoolName) -> list[LocalPod]:
        return [pod for pod in self._pods if pod.component == pool]

    def _facts(self, pod: LocalPod) -> PodFacts:
        child = self._supervisor.children[pod.name]
        return PodFacts(
            name=pod.name,
            ordinal=_ordinal(pod),
            created_at=self._created_at[pod.name],
            ready=pod.name in self._reported and child.pid is not None,
            deleting=pod.name in self._leaving,
            drain_requested=pod.name in self._drain_requested_at,
            drain_requested_at=self._drain_requested_at.get(pod.name),
            waiting_since=time.time() - (self._supervisor.clock.now() - child.started)
            if child.started
            else None,
        )

    def _make(self, pool: PoolName, actions: ScaleActions) -> None:
        by_name = {pod.name: pod for pod in self._of(pool)}
        for name in actions.drain:
            self._log_line(
                "autoscaler", f"{name} is draining: it finishes its requests and accepts no new ones"
            )
            self._drain_requested_at[name] = time.time()
            _annotate(by_name[name], datetime.now(UTC))
        for name in actions.renew:
            self._log_line("autoscaler", f"drained pod {name} is needed again and is being replaced")
            self._stop(by_name[name], again=True)
        if actions.replicas is None:
            return
        before, self._sizes[pool] = self._sizes[pool], actions.replicas
        self._log_line("autoscaler", f"{pool}: from {before} to {actions.replicas} pods")
        for ordinal in range(before, actions.replicas):
            self._start(
                pool_pod(
                    self._objects,
                    pool,
                    ordinal,
                    self._directory,
                    self._nats_url,
                    self._threads,
                    self._memory_fraction,
                )
            )
        for pod in by_name.values():
            if _ordinal(pod) >= actions.replicas and pod.name not in self._leaving:
                self._stop(pod, again=False)
        self._changed(self.decisions)

    def _start(self, pod: LocalPod) -> None:
        if pod.name in {p.name for p in self._pods}:
            return  # still stopping: it is restarted once it has ended
        self._pods.append(pod)
        self._created_at[pod.name] = time.time()
        self._supervisor.start(pod)

    def _stop(self, pod: LocalPod, *, again: bool) -> None:
        self._leaving.add(pod.name)
        task = asyncio.create_task(self._until_stopped(pod, again=again), name=f"stop {pod.name}")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _until_stopped(self, pod: LocalPod, *, again: bool) -> None:
        await self._supervisor.stop([pod.name])
        _forget(pod)
        self._pods.remove(pod)
        self._drain_requested_at.pop(pod.name, None)
        self._reported.discard(pod.name)
        self._leaving.discard(pod.name)
        pool: PoolName = next(p for p in self._sizes if p == pod.component)
        if again or _ordinal(pod) < self._sizes[pool]:
            self._start(pod)
        self._changed(self.decisions)


def _ordinal(pod: LocalPod) -> int:
    return int(pod.name.rpartition("-")[2])


def _forget(pod: LocalPod) -> None:
    """Delete the annotations of a removed pod."""
    Path(pod.environment[environment.POD_ANNOTATIONS]).unlink(missing_ok=True)


def _annotate(pod: LocalPod, now: datetime) -> None:
    """Write the annotation as Kubernetes shows it to a pod."""
    file = Path(pod.environment[environment.POD_ANNOTATIONS])
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(f'{DRAIN_ANNOTATION}="{now.isoformat(timespec="seconds")}"\n')
    part.rename(file)
