"""What is said about a pod, as a table: state in, reason and remedy out."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

from mmd_api.spec.pools import DecodeSpec
from mmd_operator.observed import problems
from mmd_operator.observed.observed import TERMINATION_MARGIN_SECONDS, PodView
from mmd_operator.observed.problems import (
    _SEVERITY,
    Deadlines,
    Problem,
    format_problems,
    gathered,
    pod_problem,
    refusal,
    waiting_for_nodes,
)

from .bodies import NEW, crashed, pod, waiting

NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available"
NO_CLAIM = '0/1 nodes are available: persistentvolumeclaim "weights" not found.'
UNBOUND = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."
NO_NODE = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
CREATED, CREATED_SECONDS = "2026-01-01T00:00:00Z", 1767225600.0


def problem_of(seen: PodView) -> Problem | None:
    """Long after every deadline."""
    return pod_problem(seen, CREATED_SECONDS + 1e9, Deadlines())


@pytest.mark.parametrize(
    ("seen", "reason", "words"),
    [
        (pod(scheduling=NO_GPU), "NoGpu", ["Insufficient nvidia.com/gpu", "add GPU nodes"]),
        (pod(scheduling=NO_CLAIM), "VolumePending", ["weights", "spec.model.storage.claimName"]),
        (pod(scheduling=UNBOUND), "VolumePending", ["unbound", "storage class"]),
        (pod(scheduling=NO_NODE), "Unschedulable", ["affinity", "nodeSelector"]),
        (
            pod(container=waiting("ImagePullBackOff", 'Back-off pulling image "nobody/none"')),
            "ImageNotPulled",
            ["nobody/none", "spec.image.worker", "pullSecrets"],
        ),
        (
            pod(
                container=waiting(
                    "ImagePullBackOff", f'Back-off pulling image "r.example/w@sha256:{"0" * 64}"'
                )
            ),
            "ImageNotPulled",
            ["if it names a tag", "no longer has the image that this revision was pinned to"],
        ),
        (pod(container=waiting("ErrImageNeverPull", "not present")), "ImageNotPulled", ["spec.image.worker"]),
        (
            pod("nats", None, container=waiting("InvalidImageName", "bad")),
            "ImageNotPulled",
            ["spec.image.nats"],
        ),
        (
            pod(container=waiting("CreateContainerConfigError", 'secret "hub" not found')),
            "SecretMissing",
            ['secret "hub" not found', "create the Secret"],
        ),
        (
            pod(
                container=waiting(
                    "CreateContainerConfigError", "couldn't find key token in Secret default/hub"
                )
            ),
            "SecretMissing",
            ["key token"],
        ),
        (
            pod(container=waiting("CreateContainerConfigError", 'configmap "x" not found')),
            "ConfigInvalid",
            ['configmap "x"'],
        ),
        (
            pod(container=waiting("RunContainerError", "failed to create shim task")),
            "ContainerNotStarted",
            ["RunContainerError", "shim"],
        ),
        (
            pod(
                container=crashed("Traceback ...\nModelNotFoundError: no weights at /models/x; mount them\n")
            ),
            "CrashLoop",
            ["exited 3 times, last with code 1", "no weights at /models/x", "kubectl logs --previous"],
        ),
        (pod(container=crashed(None)), "CrashLoop", ["exited 3 times"]),
        (pod(container=crashed(None, restarts=1)), "CrashLoop", ["exited once, last with"]),
        (
            pod(container=crashed(None, code=137, reason="OOMKilled")),
            "OutOfMemory",
            ["ran out of memory 3 times", "resources.memory"],
        ),
    ],
)
def test_a_pod_that_cannot_become_ready_is_reported_with_reason_and_remedy(seen, reason, words):
    problem = problem_of(seen)
    assert problem is not None
    assert problem.reason == reason
    for word in words:
        assert word in str(problem)
    assert problem.revision == seen.revision


def test_a_pod_that_its_node_does_not_end_is_a_problem_where_it_blocks_its_successor():
    leaving = pod(ready=True, deleting=True)
    late = leaving.ends_at + TERMINATION_MARGIN_SECONDS + 1
    assert pod_problem(leaving, late - 1, Deadlines()) is None
    problem = pod_problem(leaving, late, Deadlines())
    assert (problem.reason, problem.revision) == ("NodeLost", NEW)
    assert "delete its Node object" in problem.remedy
    gateway = pod("gateway", ready=True, deleting=True)
    assert pod_problem(gateway, late, Deadlines()) is None, "its Deployment starts another one beside it"


@pytest.mark.parametrize(
    "fine",
    [
        pod(ready=True),
        pod(ready=True, container=crashed("was bad once")),
        pod(container=waiting("ContainerCreating")),
        pod(container=waiting("PodInitializing")),
        pod(),
        pod(container=crashed("shutting down"), deleting=True),
        replace(pod("gateway", container=crashed("The node was low on resource.")), finished=True),
    ],
)
def test_a_ready_starting_or_terminating_pod_is_not_a_problem(fine):
    assert pod_problem(fine, 30.0, Deadlines()) is None


@pytest.mark.parametrize("words", [NO_GPU, NO_NODE])
def test_a_pod_without_a_node_is_not_a_problem_before_its_deadline(words: str):
    seen = pod(scheduling=words, created=CREATED)
    deadlines = Deadlines.of(DecodeSpec(scheduling_deadline_seconds=300))
    assert pod_problem(seen, CREATED_SECONDS + 299, deadlines) is None
    problem = pod_problem(seen, CREATED_SECONDS + 301, deadlines)
    assert problem is not None
    assert "for more than 300 s" in problem.seen


def runs(started: str, *, restarts: int = 0, last: dict[str, Any] | None = None) -> dict[str, Any]:
    container = {"restartCount": restarts, "state": {"running": {"startedAt": started}}}
    return {**container, "lastState": {"terminated": last}} if last else container


def test_the_start_deadline_counts_from_the_containers_start_not_from_the_pods():
    hour_later = "2026-01-01T01:00:00Z"
    deadlines = Deadlines.of(DecodeSpec(start_deadline_seconds=1800))
    seen = pod(container=runs(hour_later, restarts=1), created=CREATED)
    assert seen.starting_since == CREATED_SECONDS + 3600
    assert pod_problem(seen, CREATED_SECONDS + 3600 + 1799, deadlines) is None
    problem = pod_problem(seen, CREATED_SECONDS + 3600 + 1801, deadlines)
    assert problem is not None
    assert problem.reason == "NotStarting"
    assert "not become Ready within 1800 s" in problem.seen
    assert "startDeadlineSeconds" in problem.remedy


def test_the_start_deadline_counts_from_lost_readiness():
    assert pod(container=runs(CREATED), ready_since="2026-01-01T01:00:00Z").starting_since == (
        CREATED_SECONDS + 3600
    )


def test_the_time_to_pull_an_image_does_not_count_unless_it_has_no_end():
    pulling = pod(container=waiting("ContainerCreating"), created=CREATED)
    assert pod_problem(pulling, CREATED_SECONDS + 1199, Deadlines()) is None
    problem = pod_problem(pulling, CREATED_SECONDS + 1201, Deadlines())
    assert problem is not None
    assert problem.reason == "NotStarting"
    assert "no container has run" in problem.seen
    assert "kubectl describe pod" in problem.remedy


def test_an_old_crash_is_no_problem_of_a_pod_that_has_been_ready_since():
    killed = {
        "exitCode": 137,
        "reason": "OOMKilled",
        "startedAt": CREATED,
        "finishedAt": "2026-01-01T00:10:00Z",
    }
    container = runs("2026-01-01T00:10:05Z", restarts=1, last=killed)
    blip = pod(container=container, created=CREATED, ready_since="2026-01-08T00:00:00Z")
    assert pod_problem(blip, blip.starting_since + 2, Deadlines()) is None
    starts = pod(container=container, created=CREATED, ready_since="2026-01-01T00:10:03Z")
    problem = pod_problem(starts, starts.starting_since + 2, Deadlines())
    assert problem is not None
    assert problem.reason == "OutOfMemory"


def test_a_pod_that_drains_is_not_late():
    seen = pod(container=runs(CREATED), created=CREATED, drain="2026-01-01T01:00:00+00:00")
    assert problem_of(seen) is None


@pytest.mark.parametrize(
    ("restarts", "began", "failing"),
    [
        (3, "2026-01-01T00:10:00Z", True),
        (2, "2026-01-01T00:10:00Z", False),
        (3, "2025-12-31T00:00:00Z", False),  # that run was Ready
    ],
)
def test_a_container_is_failing_when_its_last_run_was_never_ready(restarts, began, failing):
    last = {"exitCode": 1, "startedAt": began, "finishedAt": "2026-01-01T00:20:00Z"}
    seen = pod(container=runs("2026-01-01T00:20:10Z", restarts=restarts, last=last), ready_since=CREATED)
    assert seen.failing is failing


def test_a_missing_volume_is_a_problem_at_once():
    """No new node has it."""
    problem = pod_problem(pod(scheduling=NO_CLAIM, created=CREATED), CREATED_SECONDS, Deadlines())
    assert problem is not None
    assert problem.reason == "VolumePending"


def test_pods_waiting_for_a_node_are_reported_with_the_schedulers_message():
    pods = [
        pod(scheduling=NO_GPU, name="demo-decode-1", created=CREATED),
        pod(scheduling=NO_GPU, name="demo-decode-2", created=CREATED),
        pod("gateway", None, scheduling=NO_NODE, name="demo-gateway-x", created=CREATED),
        pod(scheduling=NO_CLAIM, name="demo-decode-3", created=CREATED),
        pod(scheduling=NO_GPU, name="demo-decode-4", created=CREATED, deleting=True),
        pod(ready=True, name="demo-decode-0", created=CREATED),
    ]
    said = waiting_for_nodes(pods, CREATED_SECONDS + 60, {"decode": Deadlines(300)})
    assert said == (
        f"2 decode pods are waiting for a node, for up to 300 s ({NO_GPU}); "
        f"1 gateway pod is waiting for a node, for up to 900 s ({NO_NODE})"
    )
    assert "decode" not in waiting_for_nodes(pods, CREATED_SECONDS + 301, {"decode": Deadlines(300)})


def test_a_workers_last_message_is_quoted_without_library_output():
    reason = "cannot serve (engine_settings): vLLM cannot start: no such architecture; change spec.model"
    log = f'{{"level": "warning", "message": "a"}}\n{{"level": "critical", "message": "{reason}", "pod": "p"}}\n[W1125 leaked semaphores]'
    problem = problem_of(pod(container=crashed(log)))
    assert problem is not None
    assert problem.seen.endswith(f"last message: {reason}")


def test_only_the_end_of_long_last_words_is_kept():
    problem = problem_of(pod(container=crashed("x" * 5000 + " ValueError: the end")))
    assert problem is not None
    assert "ValueError: the end" in problem.seen
    assert len(problem.seen) < 600


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            'pods "x" is forbidden: exceeded quota: team-a.gpus, requested: pods=1, used: pods=1, limited: pods=1',
            "raise ResourceQuota team-a.gpus, or request less in the spec",
        ),
        (
            "create Pod failed: Exceeded quota",
            "raise ResourceQuota of the namespace, or request less in the spec",
        ),
        (
            'pods "x" is forbidden: failed quota: q: must specify limits.cpu for: worker',
            "set resources.cpu and resources.memory in the spec, and what it has no field for in a LimitRange, "
            "since ResourceQuota q counts them",
        ),
    ],
)
def test_the_remedy_names_the_quota_that_refuses_a_pod(words, remedy):
    assert refusal("decode", words).remedy == remedy


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            'create Pod x in StatefulSet x failed error: pods "x" is forbidden: exceeded quota: q, requested: pods=1',
            "QuotaExceeded",
        ),
        ('pods "x" is forbidden: failed quota: q: must specify memory for: worker', "QuotaExceeded"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot', "AdmissionRefused"),
        ('admission webhook "policy.example.com" denied the request: no', "AdmissionRefused"),
        (
            'Internal error occurred: failed calling webhook "mleaderworkerset.kb.io": failed to call webhook: Post '
            '"https://lws-webhook-service.lws-system.svc:443/mutate": no endpoints available for service',
            "WebhookFailed",
        ),
        (
            'services is forbidden: User "system:serviceaccount:a:b" cannot create resource "services"',
            "PermissionMissing",
        ),
        (
            'pods "x" is forbidden: error looking up service account default/w: serviceaccount "w" not found',
            "ServiceAccountMissing",
        ),
        ("StatefulSet.apps is invalid: spec: Forbidden: updates to statefulset spec", "ObjectRefused"),
    ],
)
def test_a_refusal_is_known_by_its_words(words, reason):
    problem = refusal("decode", words)
    assert problem.reason == reason
    assert problem.remedy


def test_problems_of_one_kind_are_counted_and_the_worst_comes_first():
    many = [
        problem_of(pod(scheduling=NO_GPU, name="demo-decode-3")),
        problem_of(pod(container=crashed("no"), name="demo-decode-0")),
        problem_of(pod(scheduling=NO_GPU, name="demo-decode-4")),
    ]
    found = gathered(p for p in many if p)
    assert [(p.reason, p.pods) for p in found] == [("CrashLoop", 1), ("NoGpu", 2)]
    assert "decode (2 pods)" in format_problems(found)


def test_every_reason_has_a_place_in_the_order():
    known = [Problem(reason, "decode", "seen", "remedy", revision=NEW) for reason in _SEVERITY]
    assert [p.reason for p in gathered(reversed(known))] == list(_SEVERITY)


MADE_BY = {
    name: function
    for name, function in vars(problems).items()
    if inspect.isfunction(function) and function.__annotations__.get("return") == "Problem"
}


@pytest.mark.parametrize("name", list(MADE_BY))
def test_each_source_of_problems_gives_a_reason_from_the_order(name: str):
    wanted = inspect.signature(MADE_BY[name]).parameters
    given = {"seconds": 5.0, "lacking": ["a"], "secret": problems.MountedSecret("a", "a", ("a",), "a")}
    problem = MADE_BY[name](**{parameter: given.get(parameter, "a") for parameter in wanted})
    assert [one.reason for one in gathered([problem])] == [problem.reason]
