"""What is wrong with a deployment's pods and objects, as a reason, what was seen, and the remedy. Pure: tables test it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mmd_operator.observed import PodView

MAX_MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that keeps the deployment from being whole. `component` is a pool, gateway, nats or an object's kind."""

    reason: str
    component: str
    seen: str
    remedy: str
    pods: int = 1
    revision: str | None = None

    def __str__(self) -> str:
        count = f" ({self.pods} pods)" if self.pods > 1 else ""
        return f"{self.component}{count}: {self.seen}; {self.remedy}"


_IMAGE_REASONS = {
    "ImagePullBackOff",
    "ErrImagePull",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
}
_WAITING_IS_NORMAL = {"ContainerCreating", "PodInitializing", None}


def pod_problem(pod: PodView) -> Problem | None:
    """What keeps a pod from becoming ready, or None for one that is ready, leaving, or still on its way."""
    if pod.ready or pod.deleting:
        return None
    said = _scheduling(pod) or _waiting(pod) or _ended(pod)
    return Problem(*said[:1], pod.component, *said[1:], revision=pod.revision) if said else None


def _scheduling(pod: PodView) -> tuple[str, str, str] | None:
    words = pod.unschedulable
    if words is None:
        return None
    if "persistentvolumeclaim" in words.lower():
        return (
            "VolumePending",
            f"pod {pod.name} waits for its volume: {words}",
            "create the claim that spec.model.storage.claimName names, with a storage class that can bind it",
        )
    if "nvidia.com/gpu" in words:
        return (
            "NoGpu",
            f"pod {pod.name} finds no GPU: {words}",
            "add GPU nodes, free GPUs, or lower gpus or replicas of the pool",
        )
    return (
        "Unschedulable",
        f"pod {pod.name} fits on no node: {words}",
        "add nodes, or change resources, nodeSelector or tolerations of the pool",
    )


def _waiting(pod: PodView) -> tuple[str, str, str] | None:
    reason, words = pod.waiting_reason, pod.waiting_message
    if reason in _WAITING_IS_NORMAL:
        return None
    if reason in _IMAGE_REASONS:
        field = "spec.image.nats" if pod.component == "nats" else "spec.image.worker"
        return (
            "ImageNotPulled",
            f"pod {pod.name} cannot get its image ({reason}): {words}",
            f"set {field} to an image that exists, and spec.image.pullSecrets if its registry asks who you are",
        )
    if reason == "CreateContainerConfigError":
        if "secret" in words.lower():
            return (
                "SecretMissing",
                f"pod {pod.name} cannot start: {words}",
                "create the Secret in this namespace with the key that the field's description names",
            )
        return (
            "ConfigInvalid",
            f"pod {pod.name} cannot start: {words}",
            "create or mend what the message names; the pod tries again by itself",
        )
    if reason == "CrashLoopBackOff":
        return _crashed(pod)
    return (
        "ContainerNotStarted",
        f"pod {pod.name} cannot start ({reason}): {words}",
        "mend what the message names; the pod tries again by itself",
    )


def _ended(pod: PodView) -> tuple[str, str, str] | None:
    return _crashed(pod) if pod.exit_code not in (None, 0) and pod.restarts > 0 else None


def _crashed(pod: PodView) -> tuple[str, str, str]:
    if pod.exit_reason == "OOMKilled":
        return (
            "OutOfMemory",
            f"pod {pod.name} was killed for memory {pod.restarts} times",
            "raise resources.memory of the pool, or lower its caches",
        )
    words = f"; its last words: {pod.last_words}" if pod.last_words else ""
    return (
        "CrashLoop",
        f"pod {pod.name} ended {pod.restarts} times, last with code {pod.exit_code}{words}",
        "mend what the last words name, then see `kubectl logs --previous`",
    )


def refusal(component: str, words: str, revision: str | None = None) -> Problem:
    """Why the API server or a controller did not make an object, from its own words."""
    words = re.sub(r"\s+", " ", words)[:500]
    lowered = words.lower()
    if "exceeded quota" in lowered or "must specify" in lowered:
        reason, remedy = "QuotaExceeded", "raise the namespace's ResourceQuota, or ask for less in the spec"
    elif "violates podsecurity" in lowered or "admission webhook" in lowered or "admission policy" in lowered:
        reason, remedy = "AdmissionRefused", "change the spec or the policy that the message names"
    elif " cannot " in lowered and "forbidden" in lowered:
        reason, remedy = "PermissionMissing", "give the operator's service account the rights of its chart"
    elif "serviceaccount" in lowered:
        reason, remedy = "ServiceAccountMissing", "create the service account that the pool's template names"
    else:
        reason, remedy = "ObjectRefused", "change what the message names"
    return Problem(reason, component, words, remedy, revision=revision)


def not_ours(kind: str, name: str) -> Problem:
    """An object stands where the deployment needs one of its own."""
    return Problem(
        "NameTaken",
        kind,
        f"{kind} {name} exists and belongs to somebody else",
        "delete it, or give this deployment another name; it is left as it is",
    )


_SEVERITY = (
    "InvalidSpec",
    "NameTaken",
    "PermissionMissing",
    "QuotaExceeded",
    "AdmissionRefused",
    "ServiceAccountMissing",
    "ObjectRefused",
    "ImageNotPulled",
    "SecretMissing",
    "ConfigInvalid",
    "VolumePending",
    "OutOfMemory",
    "CrashLoop",
    "ContainerNotStarted",
    "NoGpu",
    "Unschedulable",
)


def gathered(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """One problem for each reason, component and revision, with its number of pods; the worst first."""
    found: dict[tuple[str, str, str | None], Problem] = {}
    for problem in problems:
        key = (problem.reason, problem.component, problem.revision)
        first = found.get(key)
        pods = problem.pods + (first.pods if first else 0)
        base = first or problem
        found[key] = Problem(base.reason, base.component, base.seen, base.remedy, pods, base.revision)
    return tuple(
        sorted(found.values(), key=lambda p: (_SEVERITY.index(p.reason), p.component, p.revision or ""))
    )


def told(problems: Iterable[Problem]) -> str:
    """Problems as one message of a condition."""
    return " | ".join(str(p) for p in problems)[:MAX_MESSAGE_CHARACTERS]
