"""One pass over a deployment, from its spec to its status. Its parts remember state for the next pass.

Independent of loops and kopf: a pass is given the deployment, and returns when to run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from mmd_api.contract.logs import RELAYED
from mmd_api.pipeline import pipeline_revision
from mmd_api.resource import MultimodalDeployment
from mmd_api.status import WeightsStatus
from mmd_operator.kube.context import PassContext
from mmd_operator.kube.pod_client import ReportFetcher
from mmd_operator.kube.status_time import now as status_time
from mmd_operator.observed.observed import Body, Child, Observed, PodView, child_of
from mmd_operator.observed.problems import (
    Deadlines,
    Problem,
    gateway_lost,
    gathered,
    pod_problem,
    waiting_for_nodes,
)
from mmd_operator.observed.stored_spec import Reading, read
from mmd_operator.passes.finalizer import FINALIZER, Finalizer
from mmd_operator.passes.pool_objects import PoolObjects
from mmd_operator.passes.removal import Removal
from mmd_operator.resources.naming import WEIGHTS, Manifest
from mmd_operator.resources.plan import plan_objects
from mmd_operator.resources.workload_kinds import POOL_KINDS
from mmd_operator.rollout.execution import Execution
from mmd_operator.rollout.next_step import Step, next_step
from mmd_operator.rollout.pinning import Pins
from mmd_operator.rollout.rollout_target import RolloutTarget
from mmd_operator.scaling.pool_scaling import PoolScaling, ScalingView
from mmd_operator.sizes.groups import with_its_start
from mmd_operator.sizes.pending_growth import PendingGrowth
from mmd_operator.sizes.pool_sizes import pools_in
from mmd_operator.status.facts import Facts
from mmd_operator.status.failed_pods import FailedPods
from mmd_operator.status.gateway_secrets import GatewaySecrets
from mmd_operator.status.group_crashes import GroupCrashes
from mmd_operator.status.shortage import Shortage
from mmd_operator.status.silent_controllers import SilentControllers
from mmd_operator.status.status_writer import StatusWriter
from mmd_operator.status.weights_download import WeightsDownload, weights_problems, weights_words


class ReconcilePass:
    """Reconciles one deployment (one UID). `not_scaled`: why the autoscaler's last tick could not scale."""

    def __init__(
        self,
        context: PassContext,
        report_fetcher: ReportFetcher,
        observe: Callable[[], Observed],
        body: Body | None = None,
    ) -> None:
        self.uid = body["metadata"]["uid"] if body is not None else ""
        self.not_scaled: Problem | None = None
        self._growth = PendingGrowth()
        self.scaling = PoolScaling(
            context.cluster, report_fetcher, context.metrics, context.namespace, self._growth, context.pauses
        )
        self.status = StatusWriter(context)
        self._context = context
        self._observe = observe
        self._reading: tuple[object, Reading] | None = None
        self._planned: tuple[object, Reading, list[Manifest]] | None = None
        self._target = RolloutTarget(context, self.uid)
        self._pins = Pins(report_fetcher)
        self._shortage = Shortage(context)
        self._crashes = GroupCrashes()
        self.failed_pods = FailedPods()
        self._silent = SilentControllers()
        self._gateway_secrets = GatewaySecrets(context, report_fetcher)
        self._finalizer = Finalizer(context)
        self._pool_objects = PoolObjects(context, self.uid)
        self._last_serving: str | None = None
        self._weights = WeightsDownload(report_fetcher, context.pauses)
        self._execution = Execution(context, self.uid, self._growth)
        self.removal = Removal(context, self._finalizer, self.status, observe, self._execution.delete)
        if body is not None:
            self.scaling.remember(body.get("status", {}))
            self._pins.remember(body.get("status", {}))
            self._target.remember(body.get("status", {}))
            self._last_serving = body.get("status", {}).get("pipelineRevision")

    @property
    def has_read(self) -> bool:
        """Whether a pass has read the spec."""
        return self._planned is not None

    def scaled(self, body: Body | None) -> ScalingView | None:
        """The autoscaler's view of the deployment, or None while nothing may be scaled. `body`: the deployment now."""
        if body is None or body["metadata"]["uid"] != self.uid or "deletionTimestamp" in body["metadata"]:
            return None
        deployment = self._target.of(body, self._reading_of(body)).deployment
        observed = self.observe()
        gateway = observed.children.get(("Deployment", f"{self._context.name}-gateway"))
        serving = gateway.workload.template_revision if gateway and gateway.workload else None
        if deployment is None or deployment.spec.paused or serving is None:
            return None
        return ScalingView(deployment.spec, serving, observed, self.uid)

    def observe(self) -> Observed:
        """The state shown by the watch, plus decided growth still missing there, and what is known of pods that are refused."""
        observed = self._observe()
        return replace(observed, growth=self._growth.unseen(observed), refused=self._shortage.refused)

    async def verify_growth(self) -> None:
        """Look up written sizes that the watch still does not show after a while.

        Raises:
            RefusedError, BusyError: the API server refused the request, or could not answer now.
        """
        await self._growth.verify(self._observe(), self._sized)

    async def _sized(self, name: str) -> Child | None:
        for kind in POOL_KINDS:
            stored = await self._context.cluster.get(kind, self._context.namespace, name)
            if stored is not None and (child := child_of(kind, stored)).owner_uid in (self.uid, None):
                return child
        return None

    async def run(self, body: Body, *, failing: bool) -> float:
        """Do everything possible now. Returns seconds until the next pass if nothing happens before."""
        if await self.removal.namespace_ends(failing=failing):
            return await self.removal.let_go(body)
        if "deletionTimestamp" in body["metadata"]:
            if FINALIZER not in body["metadata"].get("finalizers", ()):
                return self._context.pauses.resync_seconds
            return await self.removal.remove(body)
        if await self._finalizer.ensure(body):
            return self._context.pauses.resync_seconds  # the change comes back as an event
        own_reading = self._reading_of(body)
        if own_reading.deployment is not None:
            await self._target.find(body, own_reading.deployment.spec, own_reading)
        reading, planned = self._plan(body)
        if (deployment := reading.deployment) is None:
            await self._report_faults(body, reading, self.observe())
            return self._context.pauses.resync_seconds
        if await self._pin(body, self.observe(), pipeline_revision(deployment.spec)):
            # A gateway that switches to the revision in this pass must name the pinned digest.
            _, planned = self._plan(body)
        return await self._towards(body, reading, deployment, planned)

    def _plan(self, body: Body) -> tuple[Reading, list[Manifest]]:
        """The objects of the spec in effect. They are recomputed only when the spec changes or its revision is pinned."""
        pins = tuple((pin.revision, pin.identity, pin.image) for pin in self._pins.status)
        key = (body["metadata"].get("generation"), self._target.digest, pins)
        if self._planned is None or self._planned[0] != key:
            reading = self._target.of(body, self._reading_of(body))
            objects: list[Manifest] = []
            if (deployment := reading.deployment) is not None:
                pinned = self._pins.of(pipeline_revision(deployment.spec))
                objects = plan_objects(deployment, self._context.namespace, pinned)
            self._planned = (key, reading, objects)
        return self._planned[1], self._planned[2]

    def _reading_of(self, body: Body) -> Reading:
        """The deployment's own spec, read once per generation."""
        generation = body["metadata"].get("generation")
        if self._reading is None or self._reading[0] != generation:
            self._reading = generation, read(body)
        return self._reading[1]

    async def _report_faults(self, body: Body, reading: Reading, observed: Observed) -> None:
        """Report why there is no plan. Existing objects stay unchanged."""
        faults = tuple(
            Problem("InvalidSpec", fault.field or "spec", fault.message, reading.remedy, revision=None)
            for fault in reading.faults
        )
        await self.status.publish(body, self._facts(body, observed, reading, None, faults))

    async def _towards(
        self,
        body: Body,
        reading: Reading,
        deployment: MultimodalDeployment,
        planned: list[Manifest],
    ) -> float:
        await self.verify_growth()
        has_history = self._target.history.listed
        serving_gateway = await self._serving_gateway(body, pipeline_revision(deployment.spec))
        spec, uid, observed = deployment.spec, body["metadata"]["uid"], self.observe()
        secrets = [manifest for manifest in planned if manifest["kind"] == "Secret"]
        applied = [manifest for manifest in planned if manifest["kind"] != "Secret"]
        step = next_step(
            spec,
            pipeline_revision(spec),
            applied,
            observed,
            uid,
            time.time(),
            self._last_serving,
            serving_gateway,
        )
        self._last_serving = step.serving or self._last_serving
        now = time.time()
        deadlines: dict[str, Deadlines] = {name: Deadlines.of(getattr(spec, name)) for name in pools_in(spec)}
        problems = _pod_problems(observed, now, deadlines)
        problems += self._crashes.problems(observed)
        problems += self.failed_pods.problems(observed, now)
        problems += self._silent.problems(observed, time.monotonic())
        problems += self._pins.moved(observed)
        own_deployment = self._reading_of(body).deployment
        if not spec.paused:
            if own_deployment is not None:
                problems += await self._target.keep(body, own_deployment.spec, step.serving)
            try:
                with self._growth.deciding(step.growth):
                    step_problems, settled = await self._execution.carry_out(body, step, secrets, observed)
            finally:
                self._last_serving = self._execution.gateway_revision or self._last_serving
            problems += step_problems
            problems += await self._pool_objects.publish(body, spec, observed, step.serving)
            if not settled and step.stage == "Complete":
                step = replace(step, stage="Updating")
        weights, pods = await self._weights.look(planned, observed, time.monotonic())
        problems += weights_problems(weights, _job_of(weights, observed), pods, now)
        problems += await self._shortage.problems(observed)
        problems += await self._gateway_secrets.problems(spec, observed, time.monotonic())
        problems += [self.not_scaled] if self.not_scaled else []
        problems += [*self._finalizer.problems(), *self.status.problems()]
        if step.lacks_gateway and step.serving is not None and has_history:
            problems.append(gateway_lost(self._context.name, step.serving))
        due = await self._target.advance(
            body, spec, step, observed, gathered(problems), status_time(), downloading=self._weights.advances
        )
        if step.stage == "Complete" and not spec.paused and self._target.digest is not None:
            await self._target.history.complete(self._target.digest)
        facts = self._facts(body, observed, reading, step, tuple(problems))
        waiting_parts = (weights_words(weights), waiting_for_nodes(observed.pods, now, deadlines))
        waiting_text = "; ".join(filter(None, waiting_parts))
        await self.status.publish(body, replace(facts, waiting=waiting_text, weights=weights))
        awaits_change = self._shortage.lasts or self._gateway_secrets.last or self._execution.awaits_secret
        idle = step.stage == "Complete" and not awaits_change
        pauses = self._context.pauses
        return pauses.resync_seconds if idle else min(pauses.moving_seconds, due)

    async def _serving_gateway(self, body: Body, revision: str) -> Manifest | None:
        """The gateway's Deployment of the revision that served last, if the present one names another. `revision`: the one to serve."""
        gateway = self.observe().children.get(("Deployment", f"{self._context.name}-gateway"))
        named = gateway.workload.template_revision if gateway and gateway.workload else None
        last = self._last_serving
        if last is None or last in (named, revision):
            return None
        deployment = await self._target.deployment_of(body, last)
        if deployment is None:
            return None
        objects = plan_objects(deployment, self._context.namespace, self._pins.of(last))
        return next(manifest for manifest in objects if manifest["kind"] == "Deployment")

    async def _pin(self, body: Body, observed: Observed, revision: str) -> bool:
        """Pin a revision to the code and weights of its first Ready pod. Returns whether the pin is new."""
        pin = await self._pins.look(observed, revision)
        if pin is not None:
            commit = f"model commit {pin.commit}" if pin.commit else ""
            adapters = [f"commit {adapter.commit} of adapter {adapter.name}" for adapter in pin.adapters]
            names = ", ".join(filter(None, [pin.identity, commit, *adapters, pin.image]))
            self._context.events.report(body, "Pinned", f"revision {pin.revision} is pinned to {names}")
        return pin is not None

    def _facts(
        self,
        body: Body,
        observed: Observed,
        reading: Reading,
        step: Step | None,
        problems: tuple[Problem, ...],
    ) -> Facts:
        spec = reading.deployment.spec if reading.deployment else None
        return Facts(
            name=self._context.name,
            namespace=self._context.namespace,
            pools=pools_in(spec) if spec else (),
            managed_nats=spec.nats.managed if spec else False,
            tls=bool(spec and spec.gateway.tls),
            route_parents=tuple(spec.gateway.http_route.parent_refs)
            if spec and spec.gateway.http_route
            else (),
            auth=spec.gateway.auth if spec else None,
            exposed_by=spec.gateway.exposed_by if spec else (),
            observed=observed,
            problems=gathered(problems),
            step=step,
            paused=bool(body.get("spec", {}).get("paused")),
            unknown_fields=reading.unknown,
            scaling=self.scaling.report,
            pinned=tuple(self._pins.status),
            changes_paused=bool(spec and spec.rollout.paused),
            progress=self._target.progress,
            rolled_back=self._target.rolled_back,
            overdue_seconds=self._target.overdue_seconds if step is not None else None,
            not_rolled_back=self._target.not_rolled_back,
            last_serving=self._last_serving,
        )


def _pod_problems(observed: Observed, now: float, deadlines: dict[str, Deadlines]) -> list[Problem]:
    return [
        problem
        for pod in (with_its_start(pod, observed) for pod in _causes_first(observed.pods))
        if pod.component != WEIGHTS  # download pods end: see `weights_download`
        and (problem := pod_problem(pod, now, deadlines.get(pod.component, Deadlines()))) is not None
    ]


def _job_of(weights: WeightsStatus | None, observed: Observed) -> Child | None:
    return observed.children.get(("Job", weights.job)) if weights is not None else None


def _causes_first(pods: Iterable[PodView]) -> list[PodView]:
    """Pods with a reason of their own first: of several problems of one kind, the first is quoted."""
    return sorted(pods, key=lambda pod: RELAYED in pod.last_words)
