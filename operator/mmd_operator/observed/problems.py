"""Problems of a deployment's pods and objects: reason, observation and remedy. Pure: tables test it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mmd_api.contract.pools import PoolName
from mmd_api.faults import Fault
from mmd_api.resource import GROUP
from mmd_api.spec.pools import SCHEDULING_DEADLINE_SECONDS, START_DEADLINE_SECONDS, Pool
from mmd_api.tenants import KEYS_FILE
from mmd_operator.observed.observed import CREATION_SECONDS, PodView
from mmd_operator.resources.exposure import INSTALL_GATEWAY_API, INSTALL_INFERENCE_EXTENSION
from mmd_operator.resources.workload_kinds import INSTALL_LWS

MAX_MESSAGE_CHARACTERS = 1000

ProblemReason = Literal[
    "InvalidSpec",
    "LeaderWorkerSetMissing",
    "PoolDefinitionMissing",
    "GatewayApiMissing",
    "InferenceExtensionMissing",
    "NameTaken",
    "PermissionMissing",
    "QuotaExceeded",
    "AdmissionRefused",
    "WebhookFailed",
    "ServiceAccountMissing",
    "ObjectRefused",
    "ControllerSilent",
    "GatewayLost",
    "ImageNotPulled",
    "SecretMissing",
    "SecretIncomplete",
    "ApiKeysInvalid",
    "CertificateInvalid",
    "IssuerUnreachable",
    "EndpointPickerFailed",
    "ConfigInvalid",
    "VolumePending",
    "WeightsDenied",
    "WeightsNotFound",
    "WeightsTooLarge",
    "WeightsDamaged",
    "WeightsUnreachable",
    "OutOfMemory",
    "CrashLoop",
    "ContainerNotStarted",
    "NodeLost",
    "PodsFail",
    "NotStarting",
    "NoGpu",
    "Unschedulable",
    "ImageMoved",
    "FieldsContested",
    "AutoscalerFailed",
    "DefaultTenantMissing",
    "HistoryNotRecorded",
]
_SEVERITY: tuple[ProblemReason, ...] = get_args(ProblemReason)  # worst first
_QUOTA = re.compile(r"(?:exceeded|failed) quota: (?P<name>[a-z0-9][-a-z0-9.]*)", re.IGNORECASE)
_STOPS_NO_POD: frozenset[ProblemReason] = frozenset(
    {"AutoscalerFailed", "DefaultTenantMissing", "HistoryNotRecorded"}
)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time that a pod may take before that is a problem. The defaults apply to the gateway and NATS."""

    scheduling_seconds: float = SCHEDULING_DEADLINE_SECONDS
    start_seconds: float = START_DEADLINE_SECONDS

    @classmethod
    def of(cls, pool: Pool) -> Deadlines:
        """The deadlines of a pool's pods."""
        return cls(pool.scheduling_deadline_seconds, pool.start_deadline_seconds)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a deployment. `component`: a pool, gateway, nats or an object's kind."""

    reason: ProblemReason
    component: str
    seen: str
    remedy: str
    pods: int = 1
    revision: str | None = None

    @property
    def stops_pods(self) -> bool:
        """Whether it may keep pods from becoming Ready, and so stop a rollout."""
        return self.reason not in _STOPS_NO_POD

    def __str__(self) -> str:
        count = f" ({self.pods} pods)" if self.pods > 1 else ""
        return f"{self.component}{count}: {self.seen}; {self.remedy}"


WEBHOOK_FAILED = "failed calling webhook"
"""The API server's words when it cannot call an admission webhook."""
_IMAGE_REASONS = {
    "ImagePullBackOff",
    "ErrImagePull",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
}
_WAITING_IS_NORMAL = {"ContainerCreating", "PodInitializing", None}


def pod_problem(pod: PodView, now: float, deadlines: Deadlines) -> Problem | None:
    """The problem that keeps a pod, or the one to replace it, from becoming Ready. `now`: Unix seconds.

    None if it is Ready, leaving or still in time. A gateway pod whose containers have ended for good has been replaced, and nobody deletes it.
    """
    finding = None
    if pod.deleting:
        finding = _lost(pod, now)
    elif not pod.ready and not (pod.finished and pod.component == "gateway"):
        finding = (
            _scheduling(pod, now, deadlines) or _waiting(pod) or _ended(pod) or _late(pod, now, deadlines)
        )
    return Problem(*finding[:1], pod.component, *finding[1:], revision=pod.revision) if finding else None


def waiting_for_nodes(pods: Iterable[PodView], now: float, deadlines: Mapping[str, Deadlines]) -> str:
    """A message about pods that wait for a node and are not a problem yet, with their number, deadline and the scheduler's words."""
    waiting: dict[str, list[PodView]] = {}
    for pod in pods:
        limits = deadlines.get(pod.component, Deadlines())
        if pod.unschedulable and not pod.deleting and pod_problem(pod, now, limits) is None:
            waiting.setdefault(pod.component, []).append(pod)
    parts = []
    for component, problems in sorted(waiting.items()):
        seconds = deadlines.get(component, Deadlines()).scheduling_seconds
        count = f"1 {component} pod is" if len(problems) == 1 else f"{len(problems)} {component} pods are"
        parts.append(f"{count} waiting for a node, for up to {seconds:.0f} s ({problems[0].unschedulable})")
    return "; ".join(parts)


def _lost(pod: PodView, now: float) -> tuple[ProblemReason, str, str] | None:
    """A pod that blocks its replacement. A gateway pod does not: its Deployment starts another beside it."""
    if pod.component == "gateway" or pod.finished or not pod.gone(now):
        return None
    return (
        "NodeLost",
        f"pod {pod.name} should have ended {now - (pod.ends_at or now):.0f} s ago, but its node does not confirm that",
        f"check the node; if it is down for good, delete its Node object or run `kubectl delete pod --force {pod.name}`",
    )


def _scheduling(pod: PodView, now: float, deadlines: Deadlines) -> tuple[ProblemReason, str, str] | None:
    words = pod.unschedulable
    if words is None:
        return None
    if "persistentvolumeclaim" in words.lower():  # no autoscaler adds a volume
        return (
            "VolumePending",
            f"pod {pod.name} is waiting for its volume: {words}",
            "create the PersistentVolumeClaim named in spec.model.storage.claimName, spec.model.storage.cache.claimName or "
            "spec.encoder.cache.disk.claimName, with a storage class that can bind it",
        )
    if not pod.unplaced(now, deadlines.scheduling_seconds):
        return None
    waited = f"for more than {deadlines.scheduling_seconds:.0f} s: {words}"
    if pod.lacks_gpu:
        return (
            "NoGpu",
            f"pod {pod.name} has waited for a GPU {waited}",
            "add GPU nodes, free up GPUs, or lower the pool's gpus or replicas",
        )
    return (
        "Unschedulable",
        f"pod {pod.name} could not be scheduled {waited}",
        "add nodes, or change the pool's resources, nodeSelector or tolerations",
    )


def _waiting(pod: PodView) -> tuple[ProblemReason, str, str] | None:
    reason, words = pod.waiting_reason, pod.waiting_message
    if reason in _WAITING_IS_NORMAL:
        return None
    if reason in _IMAGE_REASONS:
        field = "spec.image.nats" if pod.component == "nats" else "spec.image.worker"
        image = "an image that exists"
        if "@sha256:" in words:
            image += (
                " (if it names a tag, the registry no longer has the image that this revision was pinned to)"
            )
        return (
            "ImageNotPulled",
            f"pod {pod.name} cannot pull its image ({reason}): {words}",
            f"set {field} to {image}, and spec.image.pullSecrets if its registry requires authentication",
        )
    if reason == "CreateContainerConfigError":
        if "secret" in words.lower():
            return (
                "SecretMissing",
                f"pod {pod.name} cannot start: {words}",
                "create the Secret in this namespace, with the key given in the field's description",
            )
        return (
            "ConfigInvalid",
            f"pod {pod.name} cannot start: {words}",
            "create or fix the object named in the message; the kubelet retries automatically",
        )
    if reason == "CrashLoopBackOff":
        return crashed(pod)
    return (
        "ContainerNotStarted",
        f"pod {pod.name} cannot start ({reason}): {words}",
        "fix the problem described in the message; the kubelet retries automatically",
    )


def _ended(pod: PodView) -> tuple[ProblemReason, str, str] | None:
    return crashed(pod) if pod.exit_code not in (None, 0) and pod.restarts > 0 else None


def _late(pod: PodView, now: float, deadlines: Deadlines) -> tuple[ProblemReason, str, str] | None:
    seconds = deadlines.start_seconds
    waits_or_drains = pod.unschedulable is not None or pod.drain_requested_at is not None
    if waits_or_drains or now - pod.starting_since <= seconds:
        return None
    if not pod.has_run:
        return (
            "NotStarting",
            f"pod {pod.name} has had a node for more than {CREATION_SECONDS + seconds:.0f} s, and no container has run",
            f"see its Events in `kubectl describe pod {pod.name}`: an image is being pulled, or a volume cannot be mounted",
        )
    return (
        "NotStarting",
        f"pod {pod.name} has not become Ready within {seconds:.0f} s of its start",
        f"check `kubectl logs {pod.name}`; if it only needs more time, raise the pool's startDeadlineSeconds",
    )


def crashed(pod: PodView) -> tuple[ProblemReason, str, str]:
    """Why a container of a pod ended: reason, observation and remedy."""
    if pod.exit_reason == "OOMKilled":
        return (
            "OutOfMemory",
            f"pod {pod.name} ran out of memory {_times(pod.restarts)}",
            "raise the pool's resources.memory, or reduce its caches",
        )
    words = f"; last message: {pod.last_words}" if pod.last_words else ""
    return (
        "CrashLoop",
        f"pod {pod.name} exited {_times(pod.restarts)}, last with code {pod.exit_code}{words}",
        "fix the error in the last message; check `kubectl logs --previous`",
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def refusal(component: str, words: str, revision: str | None = None) -> Problem:
    """Why the API server or a controller did not create an object, from its own words."""
    words = re.sub(r"\s+", " ", words)[:500]
    lowered = words.lower()
    reason: ProblemReason
    if WEBHOOK_FAILED in lowered:
        reason, remedy = (
            "WebhookFailed",
            "check the Service and the pods of the webhook named in the message; the operator keeps trying",
        )
    elif "exceeded quota" in lowered or "must specify" in lowered:
        reason, remedy = "QuotaExceeded", _quota_remedy(words)
    elif "violates podsecurity" in lowered or "admission webhook" in lowered or "admission policy" in lowered:
        reason, remedy = "AdmissionRefused", "change the spec, or the policy named in the message"
    elif " cannot " in lowered and "forbidden" in lowered:
        reason, remedy = (
            "PermissionMissing",
            "grant the operator's service account the permissions defined in its chart",
        )
    elif "serviceaccount" in lowered:
        reason, remedy = "ServiceAccountMissing", "create the ServiceAccount named in the pool's template"
    elif "spec.template." in words:
        reason, remedy = (
            "ObjectRefused",
            f"fix what spec.{component}.template sets there; the pods stay as they are until then",
        )
    else:
        reason, remedy = "ObjectRefused", "fix the problem described in the message"
    return Problem(reason, component, words, remedy, revision=revision)


def _quota_remedy(words: str) -> str:
    quota = _QUOTA.search(words)
    name = quota["name"] if quota else "of the namespace"
    if "must specify" in words.lower():
        return f"set resources.cpu and resources.memory in the spec, and what it has no field for in a LimitRange, since ResourceQuota {name} counts them"
    return f"raise ResourceQuota {name}, or request less in the spec"


def not_served(component: str, kind: str, revision: str | None) -> Problem:
    """The plan has a kind whose definition is not installed in the cluster."""
    if kind == "HTTPRoute":
        return Problem(
            "GatewayApiMissing",
            component,
            f"spec.gateway.httpRoute needs {kind} of the Gateway API, and the API server does not serve it; there is no route",
            f"install it: {INSTALL_GATEWAY_API}; or remove spec.gateway.httpRoute",
        )
    if kind == "InferencePool":
        return Problem(
            "InferenceExtensionMissing",
            component,
            f"spec.gateway.inferencePool needs {kind} of the Gateway API Inference Extension, and the API server does not serve it; there is no pool, and the route leads to the Service",
            f"install it: {INSTALL_INFERENCE_EXTENSION}; or remove spec.gateway.inferencePool",
        )
    return Problem(
        "LeaderWorkerSetMissing",
        component,
        f"a replica spans several pods, which needs {kind}, and the API server does not serve it; the pool stays as it is",
        f"install it: {INSTALL_LWS}; or let a replica fit into one pod",
        revision=revision,
    )


def not_acted_on(component: str, kind: str, name: str, seconds: float, revision: str | None) -> Problem:
    """The controller of a user-installed kind does not act on an object."""
    return Problem(
        "ControllerSilent",
        component,
        f"the controller of {kind} has not acted on {kind} {name} for {seconds:.0f} s",
        "check that it runs, and its log: kubectl get pods --all-namespaces -l control-plane=controller-manager",
        revision=revision,
    )


def not_ours(kind: str, name: str) -> Problem:
    """An object of another owner has a name that the deployment needs."""
    return Problem(
        "NameTaken",
        kind,
        f"{kind} {name} exists and is not owned by this deployment",
        "delete it or rename this deployment; the operator leaves it unchanged",
    )


def secret_incomplete(name: str, lacking: Sequence[str]) -> Problem:
    """The user's own Secret with the NATS passwords lacks keys that NATS users need."""
    return Problem(
        "SecretIncomplete",
        "nats",
        f"Secret {name}, which was not created by the operator, lacks {', '.join(lacking)}",
        "add these keys (USER_previous may be a copy of USER), or delete the Secret so that the operator creates its own; until then a running NATS "
        "server keeps its configuration",
    )


@dataclass(frozen=True, slots=True)
class MountedSecret:
    """A user's Secret that gateways mount. `field`: the spec field that names it. `hint`: how to make its entries."""

    name: str
    field: str
    entries: tuple[str, ...]
    hint: str

    def __str__(self) -> str:
        return f"Secret {self.name}, which spec.{self.field} names,"


def mounted_secret_missing(secret: MountedSecret) -> Problem:
    """A Secret that gateways mount does not exist."""
    entries = _entries(secret.entries)
    return Problem(
        "SecretMissing",
        "gateway",
        f"{secret} does not exist; gateway pods that start wait for it",
        f"create it in this namespace, with {entries}; {secret.hint}",
    )


def mounted_secret_incomplete(secret: MountedSecret, lacking: Sequence[str]) -> Problem:
    """A Secret that gateways mount lacks entries."""
    return Problem(
        "SecretIncomplete",
        "gateway",
        f"{secret} lacks {_entries(lacking)}; gateway pods that start wait for it",
        f"add {'it' if len(lacking) == 1 else 'them'}; {secret.hint}",
    )


def _entries(names: Sequence[str]) -> str:
    return f"the {'entry' if len(names) == 1 else 'entries'} {' and '.join(names)}"


RENEWED = "fix the Secret; the gateway reads it again when the kubelet has updated it"


def keys_rejected(secret: str, pod: str, fault: str) -> Problem:
    """A gateway cannot use the file of API keys."""
    return Problem("ApiKeysInvalid", "gateway", _rejected(KEYS_FILE, secret, pod, fault), RENEWED)


def default_tenant_missing(tenant: str, secret: str, pod: str) -> Problem:
    """Tokens that name no tenant count for a default tenant that a gateway's file of API keys lacks."""
    return Problem(
        "DefaultTenantMissing",
        "gateway",
        f"{KEYS_FILE} of Secret {secret}, as pod {pod} has it, has no tenant {tenant}, which spec.gateway.auth.oidc.defaultTenant names; tokens that "
        "name no other tenant are refused",
        "add the tenant to the Secret, or change the field; the gateway reads the Secret again when the kubelet has updated it",
    )


def certificate_rejected(secret: str, pod: str, fault: str) -> Problem:
    """A gateway cannot use its TLS certificate."""
    seen = _rejected("the TLS certificate", secret, pod, fault)
    return Problem("CertificateInvalid", "gateway", seen, RENEWED)


def _rejected(what: str, secret: str, pod: str, fault: str) -> str:
    return f"pod {pod} does not use {what} of Secret {secret}, and keeps the last valid one if it has read one: {fault}"


def issuer_unreachable(issuer: str, pod: str, fault: str) -> Problem:
    """A gateway cannot fetch the issuer's keys, which verify tokens."""
    return Problem(
        "IssuerUnreachable",
        "gateway",
        f"pod {pod} cannot fetch the keys of {issuer}, and checks tokens with those published last, for at most an hour: {fault}",
        "check spec.gateway.auth.oidc.issuer and the network to it; the gateway tries again every 10 s",
    )


def picker_failed(pod: str, fault: str) -> Problem:
    """The endpoint picker of a gateway has ended unexpectedly."""
    return Problem(
        "EndpointPickerFailed",
        "gateway",
        f"the endpoint picker of pod {pod} has ended, and is started again: {fault}",
        "check who can reach port 9002 of the gateway, and its memory and log; while it is down, Envoy fails requests with a body that it asks this pod about: run several gateway replicas",
    )


def pool_definition_missing(pool: PoolName) -> Problem:
    """Another client sizes a pool, but the resource that it would write to is not installed."""
    return Problem(
        "PoolDefinitionMissing",
        pool,
        f"spec.{pool}.autoscaling.mode is External, and the API server does not serve multimodalpools.{GROUP}; the pool keeps its size",
        f"apply the CRD, or install the chart with crds.install=true; or set spec.{pool}.autoscaling.mode to Active",
    )


def gateway_lost(name: str, revision: str) -> Problem:
    """The gateway of the serving revision is gone, and its Deployment cannot be made again."""
    return Problem(
        "GatewayLost",
        "gateway",
        f"another client deleted or changed Deployment {name}-gateway while revision {revision} served, and no recorded spec makes that revision",
        "wait until the pools of the new revision are Ready, or change the spec back if it was changed (after an upgrade of the operator, wait); the pools that served stay until then",
        revision=revision,
    )


def not_recorded(words: str) -> Problem:
    """The API server refuses the ControllerRevision of a spec."""
    return Problem(
        "HistoryNotRecorded",
        "ControllerRevision",
        f"the spec could not be recorded, so a later rollout cannot return to it: {words[:500]}",
        "grant the operator's service account the permissions defined in its chart, or raise the quota that the message names",
    )


def not_followed(faults: Sequence[Fault]) -> Problem:
    """Schedules that the autoscaler cannot follow. No rule of the CRD can read a cron expression, or add up pools over time."""
    seen = "; ".join(map(str, faults))[:1000]
    return Problem("AutoscalerFailed", "autoscaler", f"no pool is resized: {seen}", "all else goes on")


def autoscaler_failed(error: Exception) -> Problem:
    """A tick of the autoscaler raised an unexpected error."""
    return Problem(
        "AutoscalerFailed",
        "autoscaler",
        f"the autoscaler failed, and no pool is resized: {repr(error)[:500]}",
        "report the error in the operator's log; revert the last change of the spec if it began with that",
    )


def contested(component: str, what: str, rival: str) -> Problem:
    """Another client undoes what the operator writes."""
    return Problem(
        "FieldsContested",
        component,
        f"{rival} keeps changing {what}",
        "stop that client from changing it; the operator backs off to one revert every five minutes",
    )


def gathered(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """One problem for each reason, component and revision, with its number of pods; worst first."""
    merged: dict[tuple[str, str, str | None], Problem] = {}
    for problem in problems:
        key = (problem.reason, problem.component, problem.revision)
        first = merged.get(key)
        pods = problem.pods + (first.pods if first else 0)
        base = first or problem
        merged[key] = Problem(base.reason, base.component, base.seen, base.remedy, pods, base.revision)
    return tuple(
        sorted(merged.values(), key=lambda p: (_SEVERITY.index(p.reason), p.component, p.revision or ""))
    )


def format_problems(problems: Iterable[Problem]) -> str:
    """Problems as one message of a condition."""
    return " | ".join(str(p) for p in problems)[:MAX_MESSAGE_CHARACTERS]
