"""The loop of one deployment: gather, plan, apply, say, wait. Knows no kopf: it is given what was seen and is woken when that changes."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from mmd_api.pipeline import pipeline_revision
from mmd_api.resource import GROUP, MultimodalDeployment
from mmd_operator.apply import Applier
from mmd_operator.ask import Asker
from mmd_operator.cluster import BusyError, Cluster, RefusedError
from mmd_operator.conditions import Facts, Verdict, dated, pools_of, removing, status_of, verdicts
from mmd_operator.metrics import OperatorMetrics, Shown
from mmd_operator.observed import Child, Observed
from mmd_operator.plan import plan_objects
from mmd_operator.problems import Problem, gathered, pod_problem, refusal
from mmd_operator.reading import Reading, read
from mmd_operator.resources.naming import Manifest
from mmd_operator.rollout import Step, next_step, pools_in
from mmd_operator.scaling import TICK_SECONDS, PoolScaling

logger = logging.getLogger(__name__)

FINALIZER = f"{GROUP}/drain"
RESYNC_SECONDS = 60.0
MOVING_SECONDS = 5.0
GATHER_SECONDS = 0.05
"""Changes come in bursts: a pass waits this long after the first, to see them all."""
BACKOFF_SECONDS = (0.2, 60.0)
SHORT_OF_PODS_SECONDS = 3.0
WARNINGS_SECONDS = 30.0
DRAIN_MARGIN_SECONDS = 5.0
"""Beyond the gateway's own grace period; after that a deletion goes on without its drain."""
Body = Mapping[str, Any]


class Reconciler:
    """One deployment, from the first time it is seen until it is gone."""

    def __init__(
        self,
        cluster: Cluster,
        asker: Asker,
        metrics: OperatorMetrics,
        namespace: str,
        name: str,
        observe: Callable[[], Observed],
        body: Body,
    ) -> None:
        self._asker, self._metrics = asker, metrics
        self.cluster, self.namespace, self.name = cluster, namespace, name
        self.wake = asyncio.Event()
        self.body: Body | None = body
        self.last_pass = time.monotonic()
        self._observe = observe
        self._failures = 0
        self._forget_everything()

    def _forget_everything(self) -> None:
        self._uid: str | None = None
        self._planned: tuple[object, Reading, list[Manifest]] | None = None
        self._written: dict[str, Any] | None = None
        self._settled = False
        self._short_since: dict[str, float] = {}
        self._warned: dict[str, tuple[float, Problem | None]] = {}
        self._drain_overdue = False
        self._scaling = PoolScaling(self.cluster, self._asker, self._metrics, self.namespace)
        self._shown = Shown(self.namespace, self.name)

    def show(self, body: Body | None) -> None:
        """The deployment as it stands now, or None: it is gone."""
        self.body = body
        self.wake.set()

    def shown(self) -> Shown:
        """The deployment as the last pass and the last tick left it."""
        scaling = self._scaling
        return replace(self._shown, decisions=scaling.decisions, bounds=scaling.bounds, counts=scaling.counts)

    async def run(self) -> None:
        """Until the deployment is gone. Errors are logged, and tried again ever more slowly."""
        scaling = asyncio.create_task(self._keep_scaling(), name=f"scale {self.namespace}/{self.name}")
        try:
            await self._keep_reconciling()
        finally:
            scaling.cancel()
            await asyncio.gather(scaling, return_exceptions=True)

    async def _keep_scaling(self) -> None:
        """Ticks of the autoscaler. They end with the deployment; what fails is tried again at the next tick."""
        while True:
            await asyncio.sleep(TICK_SECONDS * random.uniform(0.9, 1.1))  # noqa: S311 - jitter
            try:
                await self._scale()
                self._passed("scale", None)
            except (BusyError, RefusedError) as error:
                self._passed("scale", error)
                logger.warning("%s/%s: not scaled: %s", self.namespace, self.name, error)
            except Exception as error:  # as for passes
                self._passed("scale", error)
                logger.exception("%s/%s: a tick of the autoscaler failed", self.namespace, self.name)

    async def _scale(self) -> None:
        body, planned = self.body, self._planned
        if body is None or planned is None or body["metadata"]["uid"] != self._uid:
            return
        self._scaling.watch_drains(observed := self._observe(), time.time())
        deployment = planned[1].deployment
        if deployment is None or deployment.spec.paused or "deletionTimestamp" in body["metadata"]:
            self._scaling.decisions = {}
            return
        gateway = observed.children.get(("Deployment", f"{self.name}-gateway"))
        serving = gateway.workload.template_revision if gateway and gateway.workload else None
        if serving is None or not self._scaling.needed(deployment.spec, observed, serving):
            self._scaling.decisions = {}
            return
        events, changed = await self._scaling.tick(time.time(), deployment.spec, observed, serving)
        if changed:
            self.wake.set()
        for reason, message in events:
            warning = reason in ("ScalingLimited", "DrainDeadlineExceeded")
            await self.cluster.report(body, reason, message, warning=warning)

    async def _keep_reconciling(self) -> None:
        while (body := self.body) is not None:
            self.wake.clear()
            try:
                async with self.cluster.passes:
                    with self._metrics.pass_seconds.time():
                        delay = await self.one_pass(body)
                self._passed("reconcile", None)
                self._failures = 0
                self.last_pass = time.monotonic()
            except (BusyError, RefusedError) as error:
                delay = self._backoff(error)
                logger.warning("%s/%s: %s; again in %.1f s", self.namespace, self.name, error, delay)
            except Exception as error:  # a bug that one deployment meets must not stop its loop for good
                delay = self._backoff(error)
                logger.exception("%s/%s: pass failed; again in %.1f s", self.namespace, self.name, delay)
            if self._failures:
                await asyncio.sleep(delay)  # deaf on purpose: events must not turn a backoff into a busy loop
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(delay * random.uniform(0.9, 1.1)):  # noqa: S311 - jitter
                    await self.wake.wait()
            await asyncio.sleep(GATHER_SECONDS)

    def _passed(self, loop: str, error: Exception | None) -> None:
        kinds = {type(None): "done", BusyError: "busy", RefusedError: "refused"}
        self._metrics.passes.labels(loop, kinds.get(type(error), "failed")).inc()

    def _backoff(self, error: Exception) -> float:
        low, high = BACKOFF_SECONDS
        grown = min(high, low * 2.0 ** min(self._failures, 20)) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        self._failures += 1
        asked = error.retry_seconds if isinstance(error, BusyError) else None
        return max(grown, min(asked or 0.0, high))

    async def one_pass(self, body: Body) -> float:
        """Do what can be done now. Returns the seconds after which to look again even if nothing happens."""
        metadata = body["metadata"]
        if metadata["uid"] != self._uid:
            self._forget_everything()
            self._uid = metadata["uid"]
            self._scaling.remember(body.get("status", {}))
            self._applier = Applier(self.cluster, self.namespace, self.name, metadata["uid"])
        finalizers = list(metadata.get("finalizers", ()))
        if "deletionTimestamp" in metadata:
            if FINALIZER not in finalizers:
                return RESYNC_SECONDS
            return await self._remove(body)
        if FINALIZER not in finalizers:
            await self.cluster.set_finalizers(
                self.namespace, self.name, [*finalizers, FINALIZER], metadata["resourceVersion"]
            )
            return RESYNC_SECONDS  # the change comes back as an event
        reading, planned = self._plan(body)
        observed = self._observe()
        if reading.deployment is None:
            faults = tuple(
                Problem("InvalidSpec", f.field or "spec", f.message, "mend the field", revision=None)
                for f in reading.faults
            )
            await self._say(body, self._facts(body, observed, reading, None, faults), [])
            return RESYNC_SECONDS
        return await self._towards(body, reading, reading.deployment, planned, observed)

    def _plan(self, body: Body) -> tuple[Reading, list[Manifest]]:
        """The objects of the spec; made anew only for a new generation."""
        generation = body["metadata"].get("generation")
        if self._planned is None or self._planned[0] != generation:
            reading = read(body)
            objects = plan_objects(reading.deployment, self.namespace) if reading.deployment else []
            self._planned = (generation, reading, objects)
        return self._planned[1], self._planned[2]

    async def _towards(
        self,
        body: Body,
        reading: Reading,
        deployment: MultimodalDeployment,
        planned: list[Manifest],
        observed: Observed,
    ) -> float:
        spec, uid = deployment.spec, body["metadata"]["uid"]
        secrets = [manifest for manifest in planned if manifest["kind"] == "Secret"]
        applied = [manifest for manifest in planned if manifest["kind"] != "Secret"]
        step = next_step(spec, pipeline_revision(spec), applied, observed, uid)
        problems = [p for pod in observed.pods if (p := pod_problem(pod))]
        events: list[tuple[str, str]] = []
        if not spec.paused:
            found, settled = await self._carry_out(step, secrets, observed, events)
            problems += found
            if not settled and step.stage == "Complete":
                step = replace(step, stage="Updating")
        problems += await self._short_of_pods(observed)
        facts = self._facts(body, observed, reading, step, tuple(problems))
        await self._say(body, facts, events)
        return RESYNC_SECONDS if step.stage == "Complete" and not self._short_since else MOVING_SECONDS

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
            name=self.name,
            namespace=self.namespace,
            pools=pools_in(spec) if spec else (),
            managed_nats=spec.nats.managed if spec else False,
            observed=observed,
            problems=gathered(problems),
            step=step,
            paused=bool(body.get("spec", {}).get("paused")),
            unknown_fields=reading.unknown,
            scaling=self._scaling.report,
        )

    async def _carry_out(
        self, step: Step, secrets: list[Manifest], observed: Observed, events: list[tuple[str, str]]
    ) -> tuple[list[Problem], bool]:
        """Problems, and whether what was observed is what was applied: while it is not, nothing is switched or removed."""
        problems: list[Problem] = []
        done: dict[str, list[str]] = {}
        settled = True
        try:
            for secret in secrets:
                created, problem = await self._applier.create_once(secret, time.monotonic())
                if created:
                    done.setdefault("Created", []).append(f"Secret {secret['metadata']['name']}")
                if problem is not None:
                    problems.append(problem)
            for manifest in step.apply:
                if not settled and manifest["kind"] == "Deployment" and step.stage == "SwitchingGateway":
                    continue
                child = observed.children.get((manifest["kind"], manifest["metadata"]["name"]))
                outcome, problem = await self._applier.apply(manifest, child, time.monotonic())
                settled = settled and outcome == "Unchanged"
                if problem is not None:
                    problems.append(problem)
                    self._metrics.objects.labels("refused").inc()
                elif outcome not in ("Unchanged", "Unseen"):
                    done.setdefault(outcome, []).append(f"{manifest['kind']} {manifest['metadata']['name']}")
            for name, replicas in step.sizes.items():
                present = observed.stateful_set(name)
                before = present.workload.replicas if present and present.workload else 0
                if replicas < before:
                    continue  # its pods drain first: see `scaling`
                await self.cluster.scale(self.namespace, name, replicas)
                events.append(("Scaled", f"StatefulSet {name} from {before} to {replicas} pods"))
            for child in step.remove if settled else ():
                await self._delete(child)
                done.setdefault("Removed", []).append(f"{child.kind} {child.name}")
        finally:
            events += [(outcome, f"{len(names)}: {', '.join(names)}") for outcome, names in done.items()]
            for what, names in done.items():
                self._metrics.objects.labels(what.lower()).inc(len(names))
        return problems, settled

    async def _delete(self, child: Child) -> None:
        await self.cluster.delete(child.kind, self.namespace, child.name, child.uid)
        self._applier.forget(child.key)

    async def _short_of_pods(self, observed: Observed) -> list[Problem]:
        """Why a workload has fewer pods than it should, in its controller's words: quota and admission show nowhere else."""
        now = time.monotonic()
        short = {
            child.name: child
            for child in observed.children.values()
            if child.workload is not None
            and child.workload.seen
            and not child.deleting
            and child.workload.current < child.workload.replicas
        }
        self._short_since = {name: self._short_since.get(name, now) for name in short}
        self._warned = {name: seen for name, seen in self._warned.items() if name in short}
        problems = []
        for name, child in short.items():
            component = child.component or child.kind
            if child.workload is not None and child.workload.failure:
                problems.append(refusal(component, child.workload.failure, child.workload.template_revision))
                continue
            if now - self._short_since[name] < SHORT_OF_PODS_SECONDS:
                continue
            asked, problem = self._warned.get(name, (float("-inf"), None))
            if now - asked >= WARNINGS_SECONDS:
                warnings = await self.cluster.warnings_about(self.namespace, child.kind, name)
                words = [w["message"] for w in warnings if w.get("reason") == "FailedCreate"]
                problem = refusal(component, words[-1], child.revision) if words else None
                self._warned[name] = (now, problem)
            if problem is not None:
                problems.append(problem)
        return problems

    async def _say(self, body: Body, facts: Facts, events: list[tuple[str, str]]) -> None:
        """Write the status if it changed, and an Event for everything that did."""
        said = verdicts(facts)
        previous = self._previous(body)
        generation = body["metadata"].get("generation", 0)
        conditions = dated(said, previous, generation, _now())
        status = status_of(facts, conditions, generation)
        self._shown = Shown(self.namespace, self.name, said, pools_of(status), facts.problems)
        await self._write_status(body, status.model_dump(mode="json", by_alias=True, exclude_none=True))
        for reason, message in events:
            await self.cluster.report(body, reason, message)
        await self._report_transitions(body, said, previous)

    def _previous(self, body: Body) -> list[dict[str, Any]]:
        status = self._written if self._written is not None else body.get("status", {})
        return list(status.get("conditions", ()))

    async def _write_status(self, body: Body, status: dict[str, Any]) -> None:
        present = body.get("status", {})
        if self._written is not None and present == self._written:
            self._settled = True
        undone = self._settled and present != self._written
        if status == (present if self._written is None else self._written) and not undone:
            return
        await self.cluster.apply_status(self.namespace, self.name, status)
        self._written, self._settled = status, False

    async def _report_transitions(
        self, body: Body, said: tuple[Verdict, ...], previous: list[dict[str, Any]]
    ) -> None:
        before = {c["type"]: (c["status"], c["reason"]) for c in previous}
        for verdict in said:
            if verdict.type not in ("Ready", "Progressing", "Degraded"):
                continue
            was = before.get(verdict.type)
            if was == (verdict.status, verdict.reason) or (was is None and verdict.type != "Progressing"):
                continue
            if verdict.type == "Ready" and was is not None and was[0] == verdict.status:
                continue
            bad = (verdict.type == "Degraded") == (verdict.status == "True")
            bad = bad and verdict.reason not in ("Complete", "Paused", "Deleting")
            if verdict.type == "Progressing" and bad and verdict.reason != "RolloutStuck":
                continue  # Degraded says the same
            reason = {"Ready": "Ready" if not bad else "NotReady"}.get(verdict.type, verdict.reason)
            await self.cluster.report(body, reason, verdict.message, warning=bad)

    async def _remove(self, body: Body) -> float:
        """Deletion: the gateway finishes what it holds, then everything goes, then the deployment itself."""
        metadata = body["metadata"]
        observed = self._observe()
        ours = [c for c in observed.children.values() if c.owner_uid == metadata["uid"]]
        gateways = [c for c in ours if c.kind == "Deployment"]
        for child in gateways:
            if not child.deleting:
                await self._delete(child)
        held = [pod.name for pod in observed.pods_of("gateway")]
        left = self._drain_seconds(body)
        if (gateways or held) and left > 0:
            message = f"{len(held)} gateway pods finish what they hold, for {left:.0f} s at most"
            await self._say_removing(body, "Draining", message if held else "the gateway stops")
            return min(MOVING_SECONDS, left)
        if held and not self._drain_overdue:
            self._drain_overdue = True
            names = ", ".join(held[:5])
            message = f"{len(held)} gateway pods did not end in time ({names}); going on without them"
            await self.cluster.report(body, "DrainDeadlineExceeded", message, warning=True)
        remaining = [c for c in ours if c not in gateways]
        for child in remaining:
            if not child.deleting:
                await self._delete(child)
        if remaining:
            await self._say_removing(body, "Removing", f"{len(remaining)} objects are removed")
            return MOVING_SECONDS
        await self.cluster.report(body, "Removed", "every object of the deployment is gone")
        rest = [f for f in metadata.get("finalizers", ()) if f != FINALIZER]
        await self.cluster.set_finalizers(self.namespace, self.name, rest, metadata["resourceVersion"])
        return RESYNC_SECONDS

    async def _say_removing(self, body: Body, stage: str, message: str) -> None:
        generation = body["metadata"].get("generation", 0)
        self._shown = Shown(self.namespace, self.name, removing(stage, message))
        said = dated(self._shown.conditions, self._previous(body), generation, _now())
        before = self._previous(body)
        conditions = [c.model_dump(mode="json", by_alias=True) for c in said]
        if [(c["type"], c["reason"]) for c in before] == [(c["type"], c["reason"]) for c in conditions]:
            return
        await self._write_status(body, {**body.get("status", {}), "conditions": conditions})
        await self.cluster.report(body, stage, message)

    @staticmethod
    def _drain_seconds(body: Body) -> float:
        """Seconds that the gateway's pods still have to finish."""
        template = body.get("spec", {}).get("gateway", {}).get("template", {})
        grace = float(template.get("terminationGracePeriodSeconds", 120))
        since = datetime.fromisoformat(body["metadata"]["deletionTimestamp"])
        return grace + DRAIN_MARGIN_SECONDS - (datetime.now(UTC) - since).total_seconds()


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
