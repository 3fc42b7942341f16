"""What is said about a pod, as a table: state in, reason and remedy out."""

from __future__ import annotations

import pytest
from bodies import NEW, crashed, pod, waiting

from mmd_operator.problems import _SEVERITY, Problem, gathered, pod_problem, refusal, told

NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available"
NO_CLAIM = '0/1 nodes are available: persistentvolumeclaim "weights" not found.'
UNBOUND = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."
NO_NODE = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."


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
            ["ended 3 times, last with code 1", "no weights at /models/x", "kubectl logs --previous"],
        ),
        (pod(container=crashed(None)), "CrashLoop", ["ended 3 times"]),
        (
            pod(container=crashed(None, code=137, reason="OOMKilled")),
            "OutOfMemory",
            ["killed for memory 3 times", "resources.memory"],
        ),
    ],
)
def test_a_pod_that_cannot_become_ready_says_why_and_what_to_do(seen, reason, words):
    problem = pod_problem(seen)
    assert problem is not None
    assert problem.reason == reason
    for word in words:
        assert word in str(problem)
    assert problem.revision == seen.revision


@pytest.mark.parametrize(
    "fine",
    [
        pod(ready=True),
        pod(ready=True, container=crashed("was bad once")),
        pod(container=waiting("ContainerCreating")),
        pod(container=waiting("PodInitializing")),
        pod(),
        pod(container=crashed("shutting down"), deleting=True),
    ],
)
def test_a_pod_that_is_ready_starting_or_leaving_is_no_problem(fine):
    assert pod_problem(fine) is None


def test_only_the_end_of_long_last_words_is_kept():
    problem = pod_problem(pod(container=crashed("x" * 5000 + " ValueError: the end")))
    assert problem is not None
    assert "ValueError: the end" in problem.seen
    assert len(problem.seen) < 600


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
        pod_problem(pod(scheduling=NO_GPU, name="demo-decode-3")),
        pod_problem(pod(container=crashed("no"), name="demo-decode-0")),
        pod_problem(pod(scheduling=NO_GPU, name="demo-decode-4")),
    ]
    found = gathered(p for p in many if p)
    assert [(p.reason, p.pods) for p in found] == [("CrashLoop", 1), ("NoGpu", 2)]
    assert "decode (2 pods)" in told(found)


def test_every_reason_has_a_place_in_the_order():
    known = [Problem(reason, "decode", "seen", "remedy", revision=NEW) for reason in _SEVERITY]
    assert [p.reason for p in gathered(reversed(known))] == list(_SEVERITY)
