"""The loops of one deployment: reconcile passes, and beside them autoscaler ticks, each with backoff after failures.

Independent of kopf: the loops are given the observed state and are woken when it changes. `reconcile_pass` has the work of a pass.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

from mmd_api.faults import InvalidDeploymentError
from mmd_operator.kube.cluster import BusyError, Cluster, RefusedError
from mmd_operator.kube.context import PassContext
from mmd_operator.kube.events import EventRecorder
from mmd_operator.kube.metrics import DeploymentSnapshot, OperatorMetrics
from mmd_operator.kube.pauses import Pauses
from mmd_operator.kube.pod_client import ReportFetcher
from mmd_operator.kube.status_time import now
from mmd_operator.observed.condition_state import ConditionState
from mmd_operator.observed.observed import Body, Observed, PodView
from mmd_operator.observed.problems import Problem, autoscaler_failed, not_followed, refusal
from mmd_operator.passes.reconcile_pass import ReconcilePass

logger = logging.getLogger(__name__)

PASS_SECONDS = 120.0
BUSY_PASSES = 5
"""This many consecutive passes must fail on a busy API server before a condition reports it."""


class Reconciler:
    """Reconciles one deployment, from its first observation until its deletion."""

    def __init__(
        self,
        cluster: Cluster,
        report_fetcher: ReportFetcher,
        events: EventRecorder,
        metrics: OperatorMetrics,
        namespace: str,
        name: str,
        observe: Callable[[], Observed],
        body: Body,
        pauses: Pauses,
    ) -> None:
        self._context = PassContext(cluster, events, metrics, namespace, name, pauses)
        self._pauses = pauses
        self._report_fetcher, self._observe = report_fetcher, observe
        self.cluster, self.namespace, self.name = cluster, namespace, name
        self._events, self._metrics = events, metrics
        self.wake = asyncio.Event()
        self.body: Body | None = body
        self.last_pass = time.monotonic()
        self._failures = 0
        self._failing_since: datetime | None = None
        self._pass = ReconcilePass(self._context, report_fetcher, observe)

    def show(self, body: Body | None) -> None:
        """Take the deployment's current body, or None after its deletion."""
        self.body = body
        self.wake.set()

    def note_failed(self, pod: PodView) -> None:
        """Take a pod that failed. It may be gone before the next pass."""
        self._pass.failed_pods.note(pod, time.time())

    def namespace_ends(self) -> None:
        """Note that the namespace is being deleted."""
        if not self._pass.removal.ending:
            self._pass.removal.ending = True
            self.wake.set()

    def snapshot(self) -> DeploymentSnapshot:
        """The deployment's state after the last pass and the last tick."""
        scaling = self._pass.scaling
        since = self._failing_since
        return replace(
            self._pass.status.snapshot,
            decisions=scaling.decisions,
            bounds=scaling.bounds,
            counts=scaling.counts,
            failing_seconds=(now() - since).total_seconds() if since else 0.0,
        )

    async def run(self) -> None:
        """Run until the deployment is deleted. Errors are logged and retried with backoff."""
        scaling = asyncio.create_task(self._keep_scaling(), name=f"scale {self.namespace}/{self.name}")
        try:
            await self._keep_reconciling()
        finally:
            scaling.cancel()
            await asyncio.gather(scaling, return_exceptions=True)

    async def _keep_scaling(self) -> None:
        """Run autoscaler ticks until the deployment is deleted, less often after failures."""
        failures, minimum_pause = 0, 0.0
        while True:
            pause = max(
                minimum_pause, min(self._pauses.tick_seconds * 2.0**failures, self._pauses.last_tick_seconds)
            )
            await asyncio.sleep(pause * random.uniform(0.9, 1.1))  # noqa: S311 - jitter
            failures, minimum_pause = min(failures + 1, 10), 0.0
            try:
                await self._scale()
                self._passed("scale", None)
                self._note_unscaled(None)
                failures = 0
            except (BusyError, RefusedError) as error:
                self._passed("scale", error)
                minimum_pause = getattr(error, "retry_seconds", None) or 0.0
                logger.warning("%s/%s: failed to scale: %s", self.namespace, self.name, error)
                if isinstance(error, RefusedError):
                    self._note_unscaled(refusal("autoscaler", str(error)))
            except InvalidDeploymentError as error:
                self._passed("scale", error)
                logger.warning("%s/%s: no pool is scaled: %s", self.namespace, self.name, error)
                self._note_unscaled(not_followed(error.faults))
            except Exception as error:  # the loop must go on, as for passes
                self._passed("scale", error)
                logger.exception("%s/%s: autoscaler tick failed", self.namespace, self.name)
                self._note_unscaled(autoscaler_failed(error))

    def _note_unscaled(self, problem: Problem | None) -> None:
        """Let the next pass report why the last tick could not scale, and begin that pass now if this has changed."""
        if problem != self._pass.not_scaled:
            self._pass.not_scaled = problem
            self.wake.set()

    async def _scale(self) -> None:
        body, current_pass = self.body, self._pass
        if body is None or not current_pass.has_read or body["metadata"]["uid"] != current_pass.uid:
            return
        current_pass.scaling.watch_drains(self._observe(), time.time())
        view = current_pass.scaled(body)
        if view is None or not current_pass.scaling.needed(view):
            current_pass.scaling.suspend()
            return
        await current_pass.verify_growth()
        events, changed = await current_pass.scaling.tick(time.time(), lambda: current_pass.scaled(self.body))
        if changed:
            self.wake.set()
        for reason, message in events:
            warning = reason in ("ScalingLimited", "DrainDeadlineExceeded", "FieldsContested")
            self._events.report(body, reason, message, warning=warning)

    async def _keep_reconciling(self) -> None:
        while (body := self.body) is not None:
            self.wake.clear()
            try:
                async with self.cluster.passes.of(self.namespace):
                    with self._metrics.pass_seconds.time():
                        delay = await self._bounded_pass(body)
                self._passed("reconcile", None)
                self._failures, self._failing_since = 0, None
            except (BusyError, RefusedError) as error:
                delay = self._backoff(error)
                logger.warning("%s/%s: %s; retrying in %.1f s", self.namespace, self.name, error, delay)
                await self._report_failure(body, error)
            except Exception as error:  # a bug that one deployment meets must not stop its loop permanently
                delay = self._backoff(error)
                logger.exception(
                    "%s/%s: reconcile pass failed; retrying in %.1f s", self.namespace, self.name, delay
                )
                await self._report_failure(body, error)
            self.last_pass = time.monotonic()
            if self._failures:
                await self._pause(delay, body)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(delay * random.uniform(0.9, 1.1)):  # noqa: S311 - jitter
                    await self.wake.wait()
            await asyncio.sleep(self._pauses.gather_seconds)

    async def _bounded_pass(self, body: Body) -> float:
        """Run `_one_pass` within its deadline.

        Raises:
            BusyError: the deadline has passed.
        """
        try:
            async with asyncio.timeout(PASS_SECONDS) as deadline:
                return await self._one_pass(body)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise BusyError(f"the reconcile pass did not finish within {PASS_SECONDS:.0f} s") from None

    async def _pause(self, seconds: float, body: Body) -> None:
        """Wait before a retry. Object changes do not end it, or the backoff would become a busy loop.

        A new spec ends it, and so does the deletion of the namespace.
        """
        ending = self._pass.removal.ending
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while _intent(self.body) == _intent(body) and self._pass.removal.ending == ending:
                    self.wake.clear()
                    await self.wake.wait()

    async def _report_failure(self, body: Body, error: Exception) -> None:
        """Report in condition Degraded why no pass succeeds, leaving the other conditions unchanged. Best effort."""
        if self._failing_since is None:
            self._failing_since = now()
        if isinstance(error, BusyError) and self._failures < BUSY_PASSES:
            return  # conflicts and throttling are normal
        since = self._failing_since.strftime("%H:%M:%S UTC")
        message = f"reconciliation has failed since {since}: {str(error) or repr(error)}; the operator keeps retrying"
        failing = ConditionState("Degraded", "True", "ReconcileFailed", message[:1024])
        await self._pass.status.publish_failure(body, failing)

    def _passed(self, loop: str, error: Exception | None) -> None:
        kinds = {type(None): "done", BusyError: "busy", RefusedError: "refused"}
        self._metrics.passes.labels(loop, kinds.get(type(error), "failed")).inc()

    def _backoff(self, error: Exception) -> float:
        low, high = self._pauses.first_retry_seconds, self._pauses.last_retry_seconds
        backoff = min(high, low * 2.0 ** min(self._failures, 20)) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        self._failures += 1
        retry_after = error.retry_seconds if isinstance(error, BusyError) else None
        return max(backoff, min(retry_after or 0.0, high))

    async def _one_pass(self, body: Body) -> float:
        """Run a pass over the current deployment, dropping the state of an earlier one with the same name."""
        if body["metadata"]["uid"] != self._pass.uid:
            self._pass = ReconcilePass(self._context, self._report_fetcher, self._observe, body)
        return await self._pass.run(body, failing=bool(self._failures))


def _intent(body: Body | None) -> object:
    """The user's intent for the deployment, as a comparable value."""
    if body is None:
        return None
    metadata = body["metadata"]
    return metadata["uid"], metadata.get("generation"), metadata.get("deletionTimestamp")
