import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from mmd_api.faults import InvalidDeploymentError
from mmd_api.pipeline import PipelineConfig, pipeline_revision
from mmd_operator.plan import plan_objects
from mmd_operator.resources.nats import PASSWORD_PREFIX, with_passwords

from .planned import deployment, valid_deployments

SOME = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def of_kind(objects, *kinds):
    return [o for o in objects if o["kind"] in kinds]


def pods(objects):
    """Name of the owner and pod template of everything that runs pods."""
    return [
        (o["metadata"]["name"], o["spec"]["template"]) for o in of_kind(objects, "StatefulSet", "Deployment")
    ]


def worker_arguments(objects):
    """Pool -> roles, as the workers' command lines say them."""
    commands = [template["spec"]["containers"][0] for _, template in pods(objects)]
    return {c["args"][1]: c["args"][3] for c in commands if c["command"] == ["mmd", "worker"]}


@SOME
@given(valid_deployments())
def test_every_valid_deployment_renders_the_same_json_each_time(d):
    objects = plan_objects(d, "somewhere")
    assert json.loads(json.dumps(objects, allow_nan=False)) == objects
    assert json.dumps(plan_objects(d, "somewhere")) == json.dumps(objects)


@SOME
@given(valid_deployments())
def test_every_object_is_named_once_labelled_and_in_the_namespace(d):
    objects = plan_objects(d, "somewhere")
    identities = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(set(identities)) == len(identities)
    for o in objects:
        assert o["metadata"]["namespace"] == "somewhere"
        assert o["metadata"]["labels"]["serving.multimodal.dev/deployment"] == d.metadata.name
        assert o["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "multimodal-operator"


@SOME
@given(valid_deployments())
def test_names_leave_room_for_the_labels_that_kubernetes_derives(d):
    for o in plan_objects(d, "somewhere"):
        # A pod's controller-revision-hash label is the StatefulSet's name, a dash and ten characters.
        assert len(o["metadata"]["name"]) <= (52 if o["kind"] == "StatefulSet" else 63)


@SOME
@given(valid_deployments())
def test_every_pod_is_restricted_and_holds_no_token(d):
    for _, template in pods(plan_objects(d, "somewhere")):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(pod)
        assert not [v for v in pod["volumes"] if "hostPath" in v]
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert {"livenessProbe", "readinessProbe", "startupProbe"} <= set(container)


@SOME
@given(valid_deployments())
def test_every_selector_selects_its_own_pods_and_no_others(d):
    objects = plan_objects(d, "somewhere")
    labels = {name: template["metadata"]["labels"] for name, template in pods(objects)}
    for o in of_kind(objects, "StatefulSet", "Deployment"):
        selector = o["spec"]["selector"]["matchLabels"]
        assert [n for n, found in labels.items() if selector.items() <= found.items()] == [
            o["metadata"]["name"]
        ]
    for o in of_kind(objects, "Service"):
        selector = o["spec"]["selector"]
        assert [n for n, found in labels.items() if selector.items() <= found.items()] == [
            o["metadata"]["name"]
        ]


@SOME
@given(valid_deployments())
def test_every_mount_has_its_volume_and_every_variable_is_set_once(d):
    objects = plan_objects(d, "somewhere")
    maps = {o["metadata"]["name"]: o["data"] for o in of_kind(objects, "ConfigMap")}
    for _, template in pods(objects):
        (container,) = template["spec"]["containers"]
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        assert {m["name"] for m in container["volumeMounts"]} == set(volumes)
        assert all(v["configMap"]["name"] in maps for v in volumes.values() if "configMap" in v)
        names = [e["name"] for e in container.get("env", [])]
        assert len(set(names)) == len(names)


@SOME
@given(valid_deployments())
def test_the_roles_of_all_pools_cover_the_pipeline_once_and_in_order(d):
    roles = [role for roles in worker_arguments(plan_objects(d, "x")).values() for role in roles.split(",")]
    assert roles == ["encode", "prefill", "decode"]


@SOME
@given(valid_deployments())
def test_every_pod_mounts_the_configuration_of_its_component_and_no_other(d):
    objects = plan_objects(d, "somewhere")
    maps = {o["metadata"]["name"]: o["data"] for o in of_kind(objects, "ConfigMap")}
    for owner, template in pods(objects):
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        if component == "nats":
            continue
        (volume,) = [v["configMap"] for v in template["spec"]["volumes"] if "configMap" in v]
        assert volume["items"] == [{"key": f"{component}.json", "path": f"{component}.json"}], owner
        config = PipelineConfig.parse(maps[volume["name"]][f"{component}.json"])
        revision = pipeline_revision(d.spec)
        assert (config.namespace, config.name, config.revision) == ("somewhere", d.metadata.name, revision)


def test_a_component_cannot_read_a_field_that_is_not_declared_as_its_own():
    d = deployment({"slo": {"ttftMilliseconds": 5}, "gateway": {"maxRetries": 1}, "encoder": {"gpus": 0}})
    gateway = PipelineConfig.of(d.spec, "somewhere", "sample", "gateway").spec
    assert (gateway.slo.ttft_milliseconds, gateway.gateway.max_retries) == (5, 1)
    encoder = PipelineConfig.of(d.spec, "somewhere", "sample", "encoder").spec
    assert encoder.encoder.batching.max_items == 8
    with pytest.raises(AttributeError):
        _ = encoder.slo.ttft_milliseconds
    with pytest.raises(AttributeError):
        _ = encoder.decode.max_sequences


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        ((), {"decode": "encode,prefill,decode"}),
        (("encoder",), {"encoder": "encode", "decode": "prefill,decode"}),
        (("prefill",), {"prefill": "encode,prefill", "decode": "decode"}),
        (("encoder", "prefill"), {"encoder": "encode", "prefill": "prefill", "decode": "decode"}),
    ],
)
def test_a_pool_that_is_left_out_is_served_by_the_next_one_downstream(pools, expected):
    spec = {pool: {"gpus": 0} for pool in pools} | {"transfer": {"kv": {"backend": "Gloo"}}}
    assert worker_arguments(plan_objects(deployment(spec), "x")) == expected


def selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector selects a pod."""
    chosen = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    for each in selector.get("matchExpressions", []):
        chosen &= (labels.get(each["key"]) in each["values"]) == (each["operator"] == "In")
    return chosen


def admits(policies: list[dict[str, Any]], source: dict[str, str], target: dict[str, str], port: int) -> bool:
    """Whether a pod may reach another one at a port: policies add up, and a pod that none selects takes everything."""
    applying = [p["spec"] for p in policies if selected(p["spec"]["podSelector"], target)]
    return not applying or any(
        ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
        and ("from" not in rule or any(selected(peer["podSelector"], source) for peer in rule["from"]))
        for spec in applying
        for rule in spec["ingress"]
    )


HTTP, ADMIN, NATS, DATA = 8000, 8080, 4222, 41234
GROUP = {"engine": {"type": "VLLM", "decode": {"tensorParallelSize": 2}}, "decode": {"gpus": 1}}


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"encoder": {"gpus": 0}},
        {"prefill": {"gpus": 0}, "transfer": {"kv": {"backend": "Gloo"}}},
        {"encoder": {"gpus": 0}, "prefill": {"gpus": 0}, "transfer": {"kv": {"backend": "Gloo"}}},
        {"encoder": {"gpus": 0}, **GROUP},
    ],
    ids=["monolithic", "encoder and decode", "prefill and decode", "three pools", "groups"],
)
def test_data_ports_of_pods_with_kv_take_such_pods_alone_and_other_ports_whom_they_took(spec):
    objects = plan_objects(deployment(spec), "x")
    policies = of_kind(objects, "NetworkPolicy")
    templates = [template for _, template in pods(objects)]
    for group in of_kind(objects, "LeaderWorkerSet"):
        parts = group["spec"]["leaderWorkerTemplate"]
        templates += [parts["leaderTemplate"], parts["workerTemplate"]]
        leader, follower = (
            parts[part]["metadata"]["labels"] for part in ("leaderTemplate", "workerTemplate")
        )
        assert admits(policies, leader, follower, DATA)
        assert admits(policies, follower, leader, DATA)
    pods_of = {
        t["metadata"]["labels"]["app.kubernetes.io/component"]: t["metadata"]["labels"] for t in templates
    }
    assert "decode" in pods_of
    stranger = {"app": "stranger"}
    another = {**pods_of["decode"], "serving.multimodal.dev/deployment": "another"}
    for name, target in pods_of.items():
        assert not admits(policies, stranger, target, DATA)
        assert not admits(policies, another, target, DATA)
        assert all(admits(policies, stranger, target, port) for port in (HTTP, ADMIN))
        for source, labels in pods_of.items():
            with_kv = source in ("prefill", "decode")
            assert admits(policies, labels, target, DATA) is (with_kv or name not in ("prefill", "decode"))
    if "nats" in pods_of:
        assert all(admits(policies, labels, pods_of["nats"], NATS) for labels in pods_of.values())


def stateful_set(d, pool):
    (found,) = [
        o
        for o in of_kind(plan_objects(d, "x"), "StatefulSet")
        if o["metadata"]["labels"]["app.kubernetes.io/component"] == pool
    ]
    return found


@pytest.mark.parametrize(
    ("size", "replicas"),
    [
        ({}, 1),
        ({"replicas": 3}, 3),
        ({"replicas": 0}, 0),
        ({"autoscaling": {"minReplicas": 2, "maxReplicas": 4}}, 2),
        ({"autoscaling": {"minReplicas": 0, "maxReplicas": 4}}, 1),
    ],
)
def test_a_pool_is_created_with_its_smallest_useful_size(size, replicas):
    d = deployment({"encoder": {"gpus": 0, **size}})
    assert stateful_set(d, "encoder")["spec"]["replicas"] == replicas


def test_two_revisions_stand_side_by_side():
    before, after = (deployment({"model": {"id": model}}) for model in ("org/one", "org/two"))
    old, new = (stateful_set(d, "decode") for d in (before, after))
    assert old["metadata"]["name"] != new["metadata"]["name"]
    assert old["spec"]["selector"] != new["spec"]["selector"]
    shared = {(o["kind"], o["metadata"]["name"]) for o in plan_objects(before, "x")}
    shared &= {(o["kind"], o["metadata"]["name"]) for o in plan_objects(after, "x")}
    assert shared == {
        ("NetworkPolicy", "sample"),
        ("NetworkPolicy", "sample.kv"),
        ("Secret", "sample-nats"),
        ("ConfigMap", "sample-nats"),
        ("Service", "sample-nats"),
        ("StatefulSet", "sample-nats"),
        ("PodDisruptionBudget", "sample-nats"),
        ("Service", "sample-gateway"),
        ("Deployment", "sample-gateway"),
        ("PodDisruptionBudget", "sample-decode"),
        ("PodDisruptionBudget", "sample-gateway"),
    }


@pytest.mark.parametrize(
    "change",
    [
        {"decode": {"gpus": 0, "replicas": 7}},
        {"decode": {"gpus": 0, "autoscaling": {"maxReplicas": 7}}},
        {"gpuBudget": 4},
        {"paused": True},
        {"nats": {"storageMebibytes": 64}},
        {"nats": {"resources": {"cpu": "4"}}},
        {"gateway": {"replicas": 2}},
    ],
    ids=str,
)
def test_scaling_and_budgets_restart_no_worker(change):
    before, after = (stateful_set(deployment(c), "decode")["spec"]["template"] for c in ({}, change))
    assert before == after


def test_a_worker_setting_rolls_the_pods_of_the_same_revision():
    before, after = (
        stateful_set(deployment({"decode": {"gpus": 0, "maxSequences": n}}), "decode") for n in (8, 16)
    )
    assert before["metadata"]["name"] == after["metadata"]["name"]
    assert (
        before["spec"]["template"]["metadata"]["annotations"]
        != after["spec"]["template"]["metadata"]["annotations"]
    )


def test_the_nats_server_accepts_its_configuration(tmp_path):
    objects = plan_objects(deployment({}), "somewhere")
    (config,) = (o["data"]["nats.conf"] for o in of_kind(objects, "ConfigMap") if "nats.conf" in o["data"])
    file = tmp_path / "nats.conf"
    file.write_text(config)
    server = Path(sys.executable).with_name("nats-server")
    (secret,) = of_kind(objects, "Secret")
    passwords = with_passwords(secret)["stringData"]
    environment = {f"{PASSWORD_PREFIX}{user}": password for user, password in passwords.items()}
    command = [server, "-t", "--config", file]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)
    assert result.returncode == 0, result.stderr


def test_no_manifest_holds_a_password():
    (secret,) = of_kind(plan_objects(deployment({}), "somewhere"), "Secret")
    assert not {"data", "stringData"} & set(secret)


@pytest.mark.parametrize(
    ("resources", "asked"),
    [
        ({}, {"cpu": "250m"}),
        ({"memory": "1Gi"}, {"cpu": "250m", "memory": "1Gi"}),
        ({"cpu": "2"}, {"cpu": "2"}),
    ],
    ids=str,
)
def test_the_nats_server_cannot_be_starved_by_other_pods(resources, asked):
    container = stateful_set(deployment({"nats": {"resources": resources}}), "nats")["spec"]["template"]
    assert container["spec"]["containers"][0]["resources"]["requests"] == asked


def test_no_managed_nats_where_another_is_named():
    d = deployment({"nats": {"managed": False, "url": "nats://elsewhere:4222"}})
    assert not [o for o in plan_objects(d, "x") if o["metadata"]["name"] == "sample-nats"]


def test_a_variable_of_the_template_wins_over_a_default():
    d = deployment({"decode": {"gpus": 0, "template": {"env": [{"name": "HF_HUB_OFFLINE", "value": "0"}]}}})
    environment = stateful_set(d, "decode")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [e["value"] for e in environment if e["name"] == "HF_HUB_OFFLINE"] == ["0"]


@pytest.mark.parametrize(
    ("cpu", "threads"), [(None, "0"), ("250m", "1"), ("1.5", "1"), ("2", "2"), ("3900m", "3")]
)
def test_threads_follow_the_requested_cores(cpu, threads):
    d = deployment({"decode": {"gpus": 0, "resources": {"cpu": cpu} if cpu else {}}})
    environment = stateful_set(d, "decode")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [e["value"] for e in environment if e["name"] == "MMD_THREADS"] == [threads]


def test_a_relative_model_path_is_refused_for_a_cluster():
    with pytest.raises(InvalidDeploymentError, match="relative path") as refused:
        plan_objects(deployment({"model": {"id": "./model"}}), "x")
    assert [f.field for f in refused.value.faults] == ["spec.model.id"]


@pytest.mark.parametrize(("timeout", "configured"), [(1, 5), (600, 120), (600, 3600), (86_400, 120)])
def test_a_gateway_may_finish_a_request_that_came_at_the_last_moment(timeout: int, configured: int):
    gateway = {
        "requestTimeoutSeconds": timeout,
        "template": {"terminationGracePeriodSeconds": configured},
    }
    (workload,) = of_kind(plan_objects(deployment({"gateway": gateway}), "x"), "Deployment")
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (drain,) = [float(e["value"]) for e in container["env"] if e["name"] == "MMD_GRACE_SECONDS"]
    leaving = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= max(configured, leaving + timeout)
    assert timeout < drain <= pod["terminationGracePeriodSeconds"] - leaving
