"""Limits what the autoscaler may do now: no growth without free GPUs, and no loss of pods that others wait for. Pure."""

from __future__ import annotations

from dataclasses import replace

from mmd_operator.autoscaling import ScaleActions
from mmd_operator.observed.observed import Child, Observed, PodView
from mmd_operator.scaling.scaling_facts import pod_facts
from mmd_operator.sizes.gpu_budget import grown
from mmd_operator.sizes.groups import next_size
from mmd_operator.sizes.replacement import outdated_pods


def growth_within(
    free: int | None, actions: ScaleActions, child: Child, observed: Observed
) -> tuple[ScaleActions, int | None]:
    """Limit growth to the GPUs that are free now. Returns the limited actions, and the GPUs that remain free.

    A pool grows further when pods that leave other pools give GPUs back. A pool of groups grows by one group at a time.
    """
    if child.workload is None or actions.replicas is None:
        return actions, free
    replicas, free = grown(child, next_size(child, actions.replicas, observed), observed, free)
    return replace(actions, replicas=replicas if replicas != child.workload.replicas else None), free


def without_loss(
    actions: ScaleActions,
    child: Child,
    observed: Observed,
    pods: list[PodView],
    now: float,
    scheduling_deadline_seconds: float,
) -> ScaleActions:
    """Keep Ready pods and surges while pods of their pool are being replaced. `now`: Unix seconds.

    The last Ready pod never leaves before a staying pod is Ready, unless all staying pods have waited for a GPU beyond their deadline: the
    leaving pod may hold the GPU that they need.
    """
    size = child.workload.replicas if child.workload else 0
    target = size if actions.replicas is None else actions.replicas
    excess_pods = [pod for pod in pods if pod_facts(pod, now).ordinal >= target]
    if outdated_pods(child, observed):
        surged = child.workload is not None and child.workload.surged
        if target > size or not (surged or any(pod.ready for pod in excess_pods)):
            return replace(actions, drain=())
        return replace(actions, drain=(), replicas=None, overdue=())
    leaving = {pod.name for pod in excess_pods} | set(actions.drain)
    staying = [pod for pod in pods if pod.name not in leaving]
    leaves_none = any(p.ready for p in pods if p.name in leaving) and not any(
        p.ready and not p.deleting for p in staying
    )
    if leaves_none and not all(
        pod.unplaced(now, scheduling_deadline_seconds) and pod.lacks_gpu for pod in staying
    ):
        return replace(actions, drain=(), replicas=actions.replicas if target > size else None, overdue=())
    return actions
