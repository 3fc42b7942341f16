import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from planned import deployment, valid_deployments

from mmd_api.faults import InvalidDeploymentError
from mmd_api.pipeline import PipelineConfig, pipeline_revision
from mmd_operator.plan import plan_objects
from mmd_operator.resources.nats import PASSWORD_PREFIX, with_passwords

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
def test_every_mount_has_its_volume_and_every_variable_stands_once(d):
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
def test_pods_are_told_their_revision_and_the_whole_pipeline(d):
    objects = plan_objects(d, "somewhere")
    revision = pipeline_revision(d.spec)
    (config,) = [o for o in of_kind(objects, "ConfigMap") if "pipeline.json" in o["data"]]
    told = PipelineConfig.model_validate(json.loads(config["data"]["pipeline.json"]))
    assert (told.namespace, told.name, told.revision) == ("somewhere", d.metadata.name, revision)
    assert pipeline_revision(told.spec) == revision, (
        "workers that hash what they were told arrive at the same revision"
    )


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
        ("Secret", "sample-nats"),
        ("ConfigMap", "sample-nats"),
        ("Service", "sample-nats"),
        ("StatefulSet", "sample-nats"),
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
def test_the_nats_server_is_no_pod_that_others_may_starve(resources, asked):
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
def test_threads_follow_the_cores_that_were_asked_for(cpu, threads):
    d = deployment({"decode": {"gpus": 0, "resources": {"cpu": cpu} if cpu else {}}})
    environment = stateful_set(d, "decode")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [e["value"] for e in environment if e["name"] == "MMD_THREADS"] == [threads]


def test_a_relative_model_path_is_refused_for_a_cluster():
    with pytest.raises(InvalidDeploymentError, match="relative path") as refused:
        plan_objects(deployment({"model": {"id": "./model"}}), "x")
    assert [f.field for f in refused.value.faults] == ["spec.model.id"]
