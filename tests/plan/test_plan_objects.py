import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from mmd_api.faults import InvalidDeploymentError
from mmd_api.pipeline import PipelineConfig, pipeline_revision
from mmd_operator.resources.nats import PASSWORD_PREFIX, password_changes, with_passwords
from mmd_operator.resources.plan import plan_objects
from support.cluster.deployments import ANOTHER_MODEL, SPEC
from support.cluster.deployments import deployment as of_spec

from .planned import deployment, of_kind, pods, valid_deployments

SOME = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


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


def test_a_component_reads_only_fields_declared_as_its_own():
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
def test_an_omitted_pool_is_served_by_the_next_one_downstream(pools, expected):
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
        ("NetworkPolicy", "sample.kv"),
        ("Secret", "sample-nats"),
        ("ConfigMap", "sample-nats"),
        ("Service", "sample-nats"),
        ("StatefulSet", "sample-nats"),
        ("PodDisruptionBudget", "sample-nats"),
        ("Service", "sample-gateway"),
        ("Deployment", "sample-gateway"),
        ("PodDisruptionBudget", "sample-gateway"),
    }


def test_a_pull_secret_that_is_named_twice_is_in_pods_once():
    """No server takes a list with two equal keys, and none says whose they are."""
    for manifest in plan_objects(of_spec({**SPEC, "image": {"pullSecrets": ["a", "b", "a"]}}), "x"):
        if (template := manifest["spec"].get("template") if "spec" in manifest else None) is not None:
            assert template["spec"]["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def test_each_revision_of_a_pool_has_a_disruption_budget_of_its_own():
    """Pods of the other revision that are not Ready would count as disrupted, and none could be evicted."""
    before = plan_objects(of_spec(SPEC), "x")
    after = plan_objects(of_spec({**SPEC, **ANOTHER_MODEL}), "x")
    for objects in (before, after):
        workloads = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "StatefulSet"}
        budgets = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "PodDisruptionBudget"}
        for pool in ("encoder", "prefill", "decode"):
            (name,) = (name for name in workloads if f"-{pool}-" in name)
            assert budgets[name]["selector"] == workloads[name]["selector"]


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


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_nats_server_accepts_its_configuration(tmp_path, replicas):
    objects = plan_objects(deployment({"nats": {"replicas": replicas}}), "somewhere")
    (config,) = (o["data"]["nats.conf"] for o in of_kind(objects, "ConfigMap") if "nats.conf" in o["data"])
    file = tmp_path / "nats.conf"
    file.write_text(config)
    server = Path(sys.executable).with_name("nats-server")
    (secret,) = of_kind(objects, "Secret")
    passwords = with_passwords(secret)["stringData"]
    environment = {f"{PASSWORD_PREFIX}{user}": password for user, password in passwords.items()}
    environment |= variables_of_nats(objects, passwords)
    command = [server, "-t", "--config", file]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)
    assert result.returncode == 0, result.stderr


def variables_of_nats(objects, passwords):
    """As the kubelet would set them."""
    (container,) = next(
        o["spec"]["template"]["spec"]["containers"]
        for o in of_kind(objects, "StatefulSet")
        if o["metadata"]["name"] == "sample-nats"
    )
    found = {}
    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            found[variable["name"]] = passwords[source["secretKeyRef"]["key"]]
        else:
            value = variable.get("value", "sample-nats-0")
            for name, of in found.items():
                value = value.replace(f"$({name})", of)
            found[variable["name"]] = value
    return found


@pytest.mark.parametrize("replicas", [1, 3])
def test_no_manifest_holds_a_password(replicas):
    objects = plan_objects(deployment({"nats": {"replicas": replicas}}), "somewhere")
    (secret,) = of_kind(objects, "Secret")
    assert not {"data", "stringData"} & set(secret)
    for variable in nats_container(deployment({"nats": {"replicas": replicas}})).get("env", []):
        assert "://" not in variable.get("value", "") or "$(MMD_ROUTES_PASSWORD)" in variable["value"]


def nats_container(d):
    return stateful_set(d, "nats")["spec"]["template"]["spec"]["containers"][0]


def test_servers_of_a_nats_cluster_have_stable_names_that_clients_know():
    objects = plan_objects(deployment({"nats": {"replicas": 3}}), "somewhere")
    services = {o["metadata"]["name"]: o["spec"] for o in of_kind(objects, "Service")}
    names = [f"sample-nats-{number}" for number in range(3)]
    for name in names:
        assert services[name]["clusterIP"] == "None"
        assert services[name]["publishNotReadyAddresses"], "servers find each other before any is Ready"
        assert services[name]["selector"]["statefulset.kubernetes.io/pod-name"] == name
    variables = variables_of_nats(objects, {"routes": "p1"})
    hosts = [f"{name}.somewhere.svc" for name in names]
    assert [variables[f"MMD_ROUTE_{n}"] for n in range(3)] == [f'"nats://routes:p1@{h}:6222"' for h in hosts]
    (deployed,) = of_kind(objects, "Deployment")
    environment = deployed["spec"]["template"]["spec"]["containers"][0]["env"]
    (urls,) = (v["value"] for v in environment if v["name"] == "MMD_NATS_URL")
    assert urls == ",".join(f"nats://{host}:4222" for host in hosts)


def test_nats_servers_spread_over_nodes_and_are_replaced_one_by_one():
    spec = stateful_set(deployment({"nats": {"replicas": 3}}), "nats")["spec"]
    assert (spec["replicas"], spec["updateStrategy"]) == (3, {"type": "RollingUpdate"})
    pod = spec["template"]["spec"]
    (preferred,) = pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    (container,) = pod["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz", "streams have caught up"
    for probe in ("startupProbe", "livenessProbe"):
        assert "js-server-only" in container[probe]["httpGet"]["path"], "a lost majority restarts no server"


@pytest.mark.parametrize(("storage_class", "written"), [(None, {}), ("fast", {"storageClassName": "fast"})])
def test_each_nats_server_stores_on_its_own_claim_where_specified(storage_class, written):
    nats = {"replicas": 3, "storage": "PersistentVolumeClaim", "storageMebibytes": 1000}
    spec = stateful_set(deployment({"nats": {**nats, "storageClassName": storage_class}}), "nats")["spec"]
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "store"
    size = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2500Mi"}}}
    assert claim["spec"] == {**size, **written}
    assert spec["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Delete"
    assert [v["name"] for v in spec["template"]["spec"]["volumes"]] == ["config"]


def test_growing_nats_adds_the_routes_password_and_changes_no_other():
    one, three = (
        of_kind(plan_objects(deployment({"nats": {"replicas": n}}), "x"), "Secret")[0] for n in (1, 3)
    )
    present = one["metadata"]["annotations"]
    assert password_changes(one, present) == []
    key, marks = password_changes(three, present)
    assert (key["op"], key["path"]) == ("add", "/data/routes")
    assert password_changes(three, marks["value"]) == []
    assert password_changes(one, marks["value"]) == [], "it stays where servers may still use it"
    rotated = of_kind(plan_objects(deployment({"nats": {"passwordGeneration": 2}}), "x"), "Secret")[0]
    changes = password_changes(rotated, marks["value"])
    assert not [c for c in changes if c["path"] == "/data/routes"]
    assert password_changes(three, changes[-1]["value"])[-1]["path"] != "/data/routes"


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


def test_the_nats_volume_has_room_for_holes_of_removed_messages():
    pod = stateful_set(deployment({"nats": {"storageMebibytes": 1000}}), "nats")["spec"]["template"]["spec"]
    (limit,) = (v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v["name"] == "store")
    assert int(limit.removesuffix("Mi")) >= 2150, "its files took so much of 1000 MiB when they came and went"


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


def test_a_tls_gateway_mounts_its_secret_and_is_probed_over_http():
    objects = plan_objects(deployment({"gateway": {"tls": {"secretName": "gateway-tls"}}}), "somewhere")
    (gateway,) = of_kind(objects, "Deployment")
    pod = gateway["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "tls"]
    assert volume["secret"]["secretName"] == "gateway-tls"
    assert [item["path"] for item in volume["secret"]["items"]] == ["tls.crt", "tls.key"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "tls"]
    assert "subPath" not in mount, "a file mounted by its path alone is never updated"
    assert {"name": "MMD_TLS_FOLDER", "value": mount["mountPath"]} in container["env"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert {(probe["port"], probe["scheme"]) for probe in probes} == {("admin", "HTTP")}
    (service,) = [o for o in of_kind(objects, "Service") if o["metadata"]["name"].endswith("-gateway")]
    (port,) = service["spec"]["ports"]
    assert (port["appProtocol"], port["targetPort"], port["port"]) == ("https", "http", 8000)
    for name, template in pods(objects):
        if not name.endswith("-gateway"):
            mounted = [v.get("secret", {}).get("secretName") for v in template["spec"]["volumes"]]
            assert "gateway-tls" not in mounted


@pytest.mark.parametrize(
    ("disk", "source"),
    [
        ({"sizeMebibytes": 800}, {"emptyDir": {"sizeLimit": "900Mi"}}),
        (
            {"sizeMebibytes": 800, "claimName": "features"},
            {"persistentVolumeClaim": {"claimName": "features"}},
        ),
    ],
)
def test_only_encoder_pods_have_a_cache_disk_with_separate_folders(disk, source):
    spec = {
        "encoder": {"cache": {"disk": disk}},
        "prefill": {"gpus": 0, "localEncodeTokens": 64},
        "transfer": {"kv": {"backend": "Gloo"}},
    }
    for name, template in pods(plan_objects(deployment(spec), "somewhere")):
        volumes = [{**volume} for volume in template["spec"]["volumes"] if volume["name"] == "features"]
        container = template["spec"]["containers"][0]
        variables = {v["name"]: v.get("value") for v in container.get("env", [])}
        if "encoder" not in name:
            assert not volumes
            assert "MMD_FEATURE_DISK" not in variables
            continue
        assert volumes == [{"name": "features", **source}]
        assert {"name": "features", "mountPath": "/var/cache/features"} in container["volumeMounts"]
        assert variables["MMD_FEATURE_DISK"] == (
            "/var/cache/features/.mmd-features/somewhere-sample/$(MMD_POD_NAME)"
        )
        assert variables["MMD_FEATURE_DISK_MEBIBYTES"] == "800"
