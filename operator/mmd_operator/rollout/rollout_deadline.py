"""Tracks whether a rollout makes progress, and since when it has not. Pure: time is an argument."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.pools import Pool
from mmd_api.status import RolloutProgress
from mmd_operator.observed.observed import Observed
from mmd_operator.rollout.next_step import Step
from mmd_operator.sizes.pool_sizes import pools_in
from mmd_operator.sizes.replacement import pods_of

ProgressClock = Literal["Runs", "Stands", "Complete"]


def progress_deadline_seconds(spec: MultimodalDeploymentSpec) -> float:
    """The progress deadline of a rollout, in seconds. By default, long enough for a pod to end, and for its successor to get a node and start."""
    if spec.rollout.progress_deadline_seconds is not None:
        return spec.rollout.progress_deadline_seconds
    pools: list[Pool] = [getattr(spec, name) for name in pools_in(spec)]
    return max(
        pool.grace_seconds + pool.scheduling_deadline_seconds + pool.start_deadline_seconds for pool in pools
    )


def clock_of(step: Step, observed: Observed, *, paused: bool, downloading: bool = False) -> ProgressClock:
    """Whether the progress deadline runs.

    The clock is stopped while weights are downloaded, while the rollout waits for GPUs or for requests on old pods, and while it is paused.
    """
    if step.stage == "Complete":
        return "Complete"
    if paused or downloading or step.blocked or step.stage == "SwitchingGateway":
        return "Stands"
    if step.stage == "Draining" and any(
        pod.ready for pod in observed.pods_of("gateway") if pod.revision == step.revision
    ):
        return "Stands"
    waits = step.waits_for or not _pods_are_pending(step, observed)
    return "Stands" if waits and step.stage != "BringingUp" else "Runs"


def _pods_are_pending(step: Step, observed: Observed) -> bool:
    """Whether pods of the revision or the gateway are to be replaced or are not Ready.

    An object that other clients keep changing does not count as a pod.
    """
    workloads = (
        child.workload
        for child in observed.children.values()
        if child.workload and (child.revision == step.revision or child.kind == "Deployment")
    )
    return bool(step.replace) or any(not workload.rolled for workload in workloads)


def new_pods(revision: str, observed: Observed) -> tuple[int, int]:
    """Numbers of a revision's pods with a node, and of its Ready pods. Only pods with the present settings count."""
    gateway = next((c.workload for c in observed.children.values() if c.kind == "Deployment"), None)
    current_pods = [
        pod
        for pod in observed.pods_of("gateway")
        if pod.revision == revision and (gateway is None or pod.inputs == gateway.inputs)
    ]
    for child in observed.children.values():
        if child.is_sized and child.revision == revision and child.workload is not None:
            current_pods += [pod for pod in pods_of(child, observed) if pod.inputs == child.workload.inputs]
    remaining = [pod for pod in current_pods if not pod.deleting]
    return sum(pod.scheduled for pod in remaining), sum(pod.ready for pod in remaining)


def advanced(
    before: RolloutProgress | None,
    spec: str,
    revision: str,
    clock: ProgressClock,
    pods: tuple[int, int],
    now: datetime,
) -> RolloutProgress:
    """The record after a pass. `spec`: digest of the spec being rolled out; `revision`: its pipeline revision; `pods`: see `new_pods`.

    Only a new maximum of pods is progress: a pod that becomes Ready and fails again and again makes none.
    """
    if before is None or (before.spec, before.revision) != (spec, revision):
        before = RolloutProgress(spec=spec, revision=revision)
    if clock == "Complete" or before.complete:
        return RolloutProgress(spec=spec, revision=revision, complete=True)
    scheduled, ready = max(before.scheduled, pods[0]), max(before.ready, pods[1])
    if clock == "Stands":
        since = None
    elif before.since is None or (scheduled, ready) != (before.scheduled, before.ready):
        since = now
    else:
        since = before.since
    return RolloutProgress(spec=spec, revision=revision, since=since, scheduled=scheduled, ready=ready)


def seconds_left(progress: RolloutProgress, deadline_seconds: float, now: datetime) -> float | None:
    """Seconds until the progress deadline, negative after it; None while the clock stands."""
    if progress.since is None:
        return None
    return deadline_seconds - (now - progress.since).total_seconds()


def fallback_revision(step: Step, observed: Observed) -> str | None:
    """The revision still serving beside the one being rolled out: its pools exist, and a gateway uses them."""
    if step.serving not in (None, step.revision):
        return step.serving
    older = {pod.revision for pod in observed.pods_of("gateway") if pod.ready and not pod.deleting}
    return next(iter(sorted(filter(None, older - {step.revision}))), None)
