"""Pools whose replicas are groups of pods, on a real API server with the definition of LeaderWorkerSet; the test plays its controller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from mmd_api.contract.annotations import DRAIN_ANNOTATION
from mmd_operator.resources.naming import ADMIN_PORT, REVISION_LABEL
from mmd_operator.resources.workload_kinds import INSTALL_LWS, LWS_PLURAL
from support.cluster.definitions import GROUP_SETS, installed
from support.cluster.groups import GROUPS, IMAGE, ONE_POD, WHERE, GroupController
from support.cluster.operator_process import OperatorProcess, another_release
from support.cluster.standin import Namespace, eventually, forget_the_dead, is_gone
from support.harness.waiting import DEADLINE_SECONDS

from .fleet import QUICK, FakePod, next_address

TWO_STAGES = {"engine": {"decode": {"pipelineParallelSize": 2}}}


@pytest.fixture
def groups(api: client.ApiClient, namespace: Namespace) -> Iterator[GroupController]:
    """The definition is installed, and the test plays the controller."""
    with installed(api, GROUP_SETS):
        yield GroupController(namespace)


@pytest.fixture
def operating(groups: GroupController, operator: OperatorProcess) -> GroupController:
    """And an operator that began after that."""
    del operator
    return groups


@pytest.fixture
def serving(operating: GroupController) -> GroupController:
    """A deployment that serves from two groups."""
    operating.namespace.apply(GROUPS)
    until(operating, operating.namespace.is_ready)
    return operating


def until(groups: GroupController, check: Callable[[], Any], run: bool = True, seconds: float = 60) -> Any:
    """Go on until a check holds, while controllers and, with `run`, kubelets do their work."""

    def step() -> Any:
        groups.step()
        if run:
            groups.run_all()
        return check()

    return groups.namespace.settled(step, seconds)


def names(groups: GroupController) -> list[str]:
    return sorted(groups.pods())


def counted(groups: GroupController, pods: int) -> None:
    assert len(names(groups)) == pods


def own_stateful_sets(groups: GroupController) -> set[str]:
    """Those of decode pools that the operator made."""
    made = {key.partition("/")[2] for key in groups.namespace.objects() if key.startswith("StatefulSet/")}
    return {name for name in made - groups.stateful_sets().keys() if "decode" in name}


def well(namespace: Namespace) -> None:
    assert namespace.condition("Degraded")[0] == "False", namespace.condition("Degraded")


def degraded(namespace: Namespace, reason: str, *words: str) -> None:
    status, found, message = namespace.condition("Degraded")
    assert (status, found) == ("True", reason), (found, message)
    for word in words:
        assert word in message


def test_only_the_leader_of_a_group_is_probed_for_readiness(serving: GroupController):
    """A replica larger than a pod is a group."""
    made = serving.only()
    templates = made["spec"]["leaderWorkerTemplate"]
    assert (made["spec"]["replicas"], templates["size"]) == (2, 2)
    assert templates["restartPolicy"] == "RecreateGroupOnPodRestart"
    leader, follower = (
        templates[kind]["spec"]["containers"][0] for kind in ("leaderTemplate", "workerTemplate")
    )
    assert "readinessProbe" in leader
    assert "readinessProbe" not in follower
    assert follower["livenessProbe"] == leader["livenessProbe"]
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == "2"
    service = serving.namespace.core.read_namespaced_service(made["metadata"]["name"], serving.namespace.name)
    assert service.spec.cluster_ip == "None"
    assert service.spec.publish_not_ready_addresses
    assert not own_stateful_sets(serving)
    assert serving.namespace.condition("DecodeReady") == ("True", "AllReady", "2 of 2 groups of 2 pods Ready")
    assert serving.namespace.get()["status"]["pools"]["decode"]["ready"] == 2


def test_a_group_is_not_ready_before_its_followers(operating: GroupController):
    operating.namespace.apply(GROUPS)
    until(operating, lambda: counted(operating, 4), run=False)
    for pod in [name for name in names(operating) if name.count("-") == 3]:
        operating.run(pod)

    def told() -> None:
        assert operating.namespace.condition("DecodeReady")[2].startswith("0 of 2 groups of 2 pods Ready")

    until(operating, told, run=False)
    until(operating, operating.namespace.is_ready)


def test_a_missing_definition_is_reported_and_the_rest_goes_on(
    api: client.ApiClient, namespace: Namespace, operator: OperatorProcess
):
    namespace.apply(ONE_POD)
    namespace.settled(namespace.is_ready)
    before = namespace.stateful_set("decode")
    namespace.change(TWO_STAGES)
    namespace.settled(lambda: degraded(namespace, "LeaderWorkerSetMissing", INSTALL_LWS))
    namespace.change({"encoder": {"replicas": 2}})

    def grown() -> None:
        revision = before.metadata.labels[REVISION_LABEL]
        assert namespace.stateful_set("encoder", revision).spec.replicas == 2

    namespace.settled(grown)
    assert namespace.condition("Ready")[0] == "True"
    assert namespace.condition("Progressing")[1] == "RolloutStuck"
    assert namespace.stateful_set("decode").metadata.uid == before.metadata.uid

    with installed(api, GROUP_SETS):
        assert operator.wait(DEADLINE_SECONDS) == 0, (
            "the operator ends, so that its successor watches the new kind"
        )
        operator.start()
        groups = GroupController(namespace)
        until(groups, namespace.is_ready)
        assert len(groups.pods()) == 4
        assert not own_stateful_sets(groups)
        operator.kill()


def test_stateful_sets_of_a_leader_worker_set_are_no_pools(operating: GroupController):
    """They hold no GPUs of their own either."""
    namespace = operating.namespace
    namespace.apply({**GROUPS, "decode": {"gpus": 2, "replicas": 1}, "gpuBudget": 8})
    until(operating, namespace.is_ready)
    name = operating.only()["metadata"]["name"]
    sizes = {name: 1, f"{name}-0": 1}
    assert {one: found.spec.replicas for one, found in operating.stateful_sets().items()} == sizes
    namespace.change({"decode": {"replicas": 2}})

    def grown() -> None:
        assert operating.only()["spec"]["replicas"] == 2

    until(operating, grown)
    until(operating, namespace.is_ready)


def test_a_webhook_that_cannot_be_called_holds_back_only_its_pool(
    api: client.ApiClient, operating: GroupController
):
    """As while the controller of LeaderWorkerSet does not run."""
    namespace, hooks = operating.namespace, client.AdmissionregistrationV1Api(api)
    operations = {"operations": ["CREATE", "UPDATE"], "resources": [LWS_PLURAL]}
    hook = {
        "name": "mleaderworkerset.kb.io",
        "rules": [{"apiGroups": [WHERE[0]], "apiVersions": [WHERE[1]], **operations}],
        "clientConfig": {"service": {"namespace": namespace.name, "name": "no-such-service"}},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace.name}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    hooks.create_validating_webhook_configuration({"metadata": {"name": namespace.name}, "webhooks": [hook]})
    try:
        namespace.apply(GROUPS)
        until(operating, lambda: degraded(namespace, "WebhookFailed", "mleaderworkerset.kb.io"))
        assert not operating.sets()

        def made() -> None:
            kinds = {key.partition("/")[0] for key in namespace.objects()}
            assert {"Deployment", "NetworkPolicy", "PodDisruptionBudget"} <= kinds

        until(operating, made)
    finally:
        hooks.delete_validating_webhook_configuration(namespace.name)
    until(operating, namespace.is_ready)


def test_scale_down_drains_the_leader_before_its_group_goes(serving: GroupController):
    namespace, name = serving.namespace, serving.only()["metadata"]["name"]
    leaders = {}
    for pod in (f"{name}-0", f"{name}-1"):
        revision = serving.only()["metadata"]["labels"][REVISION_LABEL]
        leaders[pod] = FakePod(pod, revision, ADMIN_PORT, holds_work=True)
        serving.run(pod, leaders[pod].address)
    serving.run(f"{name}-1-1", next_address())  # where nobody answers: a follower is not asked
    try:
        namespace.change({"decode": {"replicas": 1}})

        def asked() -> None:
            found = {
                pod for pod, one in serving.pods().items() if DRAIN_ANNOTATION in one.metadata.annotations
            }
            assert found == {f"{name}-1"}

        until(serving, asked)
        assert serving.only()["spec"]["replicas"] == 2, "it still holds work"
        leaders[f"{name}-1"].drain_requested = True
        leaders[f"{name}-1"].holds_work = False

        def gone() -> None:
            assert names(serving) == [f"{name}-0", f"{name}-0-1"]

        until(serving, gone)
        namespace.reported("Scaled", f"LeaderWorkerSet {name} from 2 to 1 groups of 2 pods")
        until(serving, namespace.is_ready)
    finally:
        for leader in leaders.values():
            leader.stop()


def test_group_templates_get_the_pinned_digest_instead_of_a_tag(serving: GroupController):
    """A group that starts over runs the same image."""
    before = serving.only()
    assert all("@" not in image for image in images(before))
    name, revision = before["metadata"]["name"], before["metadata"]["labels"][REVISION_LABEL]
    leader = FakePod(f"{name}-0", revision, ADMIN_PORT)
    try:
        serving.run(leader.name, leader.address)
        serving.namespace.reported("Pinned", IMAGE)

        def pinned() -> None:
            assert images(serving.only()) == {IMAGE.removeprefix("docker.io/library/")}

        until(serving, pinned)
        until(serving, lambda: gateway_pinned(serving.namespace))
    finally:
        leader.stop()


def images(made: dict[str, Any]) -> set[str]:
    """Of leaders and followers."""
    templates = made["spec"]["leaderWorkerTemplate"]
    pods = (templates[kind]["spec"] for kind in ("leaderTemplate", "workerTemplate"))
    return {pod["containers"][0]["image"] for pod in pods}


def gateway_pinned(namespace: Namespace) -> None:
    gateway = namespace.apps.read_namespaced_deployment("demo-gateway", namespace.name)
    assert gateway.spec.template.spec.containers[0].image == IMAGE.removeprefix("docker.io/library/")


def test_an_autoscaler_grows_groups_within_the_budget_and_asks_leaders_alone(operating: GroupController):
    namespace = operating.namespace
    pool = {"gpus": 2, "replicas": None, "autoscaling": {**QUICK, "maxReplicas": 4}}
    namespace.apply({**GROUPS, "decode": pool, "gpuBudget": 8})
    until(operating, namespace.is_ready)
    made = operating.only()
    revision = made["metadata"]["labels"][REVISION_LABEL]
    busy = {"decode_running_sequences": 64, "kv_blocks_total": 100, "kv_blocks_used": 100}
    leaders: dict[str, FakePod] = {}
    gateway = FakePod(namespace.gateway_pods()[0].metadata.name, revision, ADMIN_PORT)
    operating.run(gateway.name, gateway.address)
    try:

        def grown() -> None:
            for pod in operating.pods():
                if pod.count("-") == 3 and pod not in leaders:
                    leaders[pod] = FakePod(pod, revision, ADMIN_PORT, load=busy)
                    operating.run(pod, leaders[pod].address)
            assert operating.only()["spec"]["replicas"] == 2
            assert namespace.condition("ScalingLimited")[1] == "GpuBudget", namespace.condition(
                "ScalingLimited"
            )
            assert namespace.condition("MetricsFresh")[0] == "True", namespace.condition("MetricsFresh")

        until(operating, grown)
    finally:
        for one in (*leaders.values(), gateway):
            one.stop()


def test_the_reason_of_a_group_that_keeps_restarting_outlives_its_pods(serving: GroupController):
    namespace, name = serving.namespace, serving.only()["metadata"]["name"]
    for encoders, times in enumerate(("once", "2 times"), start=2):
        serving.crash(f"{name}-1-1", "cannot serve (engine_settings): no such weights")
        own = f"pod {name}-1-1 exited once, last with code 1; last message: cannot serve"
        eventually(lambda own=own: its_own(namespace, own))
        serving.recreate(f"{name}-1")
        words = (f"{name}-1-1", "no such weights", f"group {name}-1 has been recreated {times}")
        namespace.change({"encoder": {"replicas": encoders}})
        eventually(lambda encoders=encoders: has_encoders(namespace, encoders))  # a pass later
        degraded(namespace, "CrashLoop", *words)
    until(serving, namespace.is_ready)
    eventually(lambda: well(namespace))


def its_own(namespace: Namespace, words: str) -> None:
    """What a pod itself reports, and not a memory of it."""
    degraded(namespace, "CrashLoop", words)
    assert "recreated" not in namespace.condition("Degraded")[2]


def has_encoders(namespace: Namespace, count: int) -> None:
    assert namespace.stateful_set("encoder").spec.replicas == count


def test_a_follower_that_waits_for_a_gpu_is_named(operating: GroupController):
    namespace = operating.namespace
    namespace.apply({**GROUPS, "decode": {"gpus": 2, "schedulingDeadlineSeconds": 0}})
    until(operating, lambda: counted(operating, 2), run=False)
    follower = names(operating)[1]
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    operating.set_status(follower, {"conditions": [waiting]})
    until(operating, lambda: degraded(namespace, "NoGpu", f"pod {follower} has waited for a GPU"), run=False)


def test_followers_that_a_quota_refuses_are_reported(serving: GroupController):
    namespace, name = serving.namespace, serving.only()["metadata"]["name"]
    about = {"kind": "StatefulSet", "name": f"{name}-1", "namespace": namespace.name, "apiVersion": "apps/v1"}
    event = {
        "metadata": {"generateName": "short-"},
        "involvedObject": about,
        "reason": "FailedCreate",
        "message": "create Pod failed: exceeded quota: pods",
        "type": "Warning",
    }
    namespace.core.create_namespaced_event(namespace.name, event)
    namespace._end_pod(f"{name}-1-1")
    eventually(lambda: degraded(namespace, "QuotaExceeded", "exceeded quota"))


def test_another_release_of_the_operator_restarts_no_group(
    kubeconfig: Path, groups: GroupController, tmp_path: Path
):
    namespace = groups.namespace
    first = OperatorProcess(kubeconfig, namespace.name, tmp_path)
    first.start()
    namespace.apply(GROUPS)
    until(groups, namespace.is_ready)
    before = groups.only()
    first.kill()
    forget_the_dead(namespace)
    second = OperatorProcess(kubeconfig, namespace.name, tmp_path, prepare=another_release)
    second.start()
    try:
        namespace.change({"encoder": {"resources": {"memory": "9Gi"}}})

        def applied() -> None:
            limits = namespace.stateful_set("encoder").spec.template.spec.containers[0].resources.limits or {}
            assert limits.get("memory") == "9Gi"

        until(groups, applied)
        until(groups, namespace.is_ready)
        assert groups.only()["spec"]["leaderWorkerTemplate"] == before["spec"]["leaderWorkerTemplate"]
        namespace.change({"decode": {"resources": {"memory": "9Gi"}}})

        def replaced() -> None:
            template = groups.only()["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
            assert template["spec"]["containers"][0]["resources"]["limits"].get("memory") == "9Gi"

        until(groups, replaced)
    finally:
        second.kill()


def test_a_deleted_deployment_takes_its_groups_with_it(serving: GroupController):
    serving.namespace.delete()
    until(serving, lambda: is_gone(serving.namespace))
    assert not serving.sets()


def test_a_size_that_another_client_gives_a_group_is_corrected(serving: GroupController):
    name = serving.only()["metadata"]["name"]
    serving.namespace.custom.patch_namespaced_custom_object_scale(
        *WHERE, serving.namespace.name, LWS_PLURAL, name, {"spec": {"replicas": 1}}
    )

    def corrected() -> None:
        assert serving.only()["spec"]["replicas"] == 2

    until(serving, corrected)
