"""The generated definition in a real API server: accepted, within the cost limits of CEL, and as strict as our own reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from kubernetes import client

from mmd_api.resource import GROUP, PLURAL, VERSION, MultimodalDeployment, load
from mmd_operator.resources.nats import with_passwords
from mmd_operator.resources.plan import plan_objects
from support.cluster.manifests import BadManifest, bad_manifests, base_manifest

EXAMPLES = Path(__file__).parents[2] / "examples"
ON_ONE_MACHINE_ONLY = "qwen2_5_vl-random.yaml"


@pytest.fixture
def api(shared_api: client.ApiClient) -> client.ApiClient:
    return shared_api


def create(api: client.ApiClient, manifest: dict) -> dict:
    return client.CustomObjectsApi(api).create_namespaced_custom_object(
        GROUP, VERSION, "default", PLURAL, manifest, dry_run="All", field_validation="Strict"
    )


def test_the_api_server_fills_in_defaults_as_the_reader_does(api):
    stored = create(api, base_manifest())
    assert MultimodalDeployment.parse(stored).spec == MultimodalDeployment.parse(base_manifest()).spec


def test_quantities_may_be_whole_numbers_as_in_pods(api):
    manifest = base_manifest()
    whole = {"cpu": 4, "memory": 8589934592}
    manifest["spec"]["decode"] |= {"resources": whole, "template": {"sharedMemory": 1073741824}}
    manifest["spec"]["gateway"] = {"resources": whole, "inferencePool": {}}
    read = MultimodalDeployment.parse(create(api, manifest))
    assert read.spec == MultimodalDeployment.parse(manifest).spec
    resources = read.spec.decode.resources
    assert (resources.cpu, resources.memory) == ("4", "8589934592")
    manifest["spec"]["gateway"]["resources"] = {"memory": 100}
    with pytest.raises(client.ApiException, match="nothing is left to the gateway"):
        create(api, manifest)


@pytest.mark.parametrize("case", [c for c in bad_manifests() if not c.file_only], ids=lambda c: c.name)
def test_the_api_server_refuses_what_the_reader_refuses(api, case: BadManifest):
    with pytest.raises(client.ApiException) as refused:
        create(api, case.manifest)
    message = json.loads(refused.value.body)["message"]
    assert refused.value.status in (400, 422), message
    assert case.server_field in message
    if case.same_words_from_server:
        assert case.words in message


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.name)
def test_every_example_is_accepted_but_the_one_for_a_single_machine(api, example: Path):
    manifest = yaml.safe_load(example.read_text())
    if example.name == ON_ONE_MACHINE_ONLY:
        with pytest.raises(client.ApiException, match="relative path"):
            create(api, manifest)
    else:
        assert create(api, manifest)["spec"]


@pytest.mark.parametrize("example", ["demo.yaml", "monolithic.yaml", "gpu.yaml"])
def test_every_object_of_the_plan_is_accepted_and_every_pod_is_restricted(api, example: str):
    """Pods are created in a namespace that enforces the pod security standard "restricted"."""
    core = client.CoreV1Api(api)
    namespace = example.partition(".")[0]
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    core.create_namespace({"metadata": {"name": namespace, "labels": labels}})
    core.create_namespaced_service_account(namespace, {"metadata": {"name": "default"}})
    dynamic = client.CustomObjectsApi(api)
    pods = 0
    for manifest in plan_objects(load(EXAMPLES / example), namespace):
        group, _, version = manifest["apiVersion"].rpartition("/")
        options = {"dry_run": "All", "field_validation": "Strict"}
        match manifest["kind"]:
            case "ConfigMap":
                core.create_namespaced_config_map(namespace, manifest, **options)
            case "Service":
                core.create_namespaced_service(namespace, manifest, **options)
            case "Secret":
                core.create_namespaced_secret(namespace, with_passwords(manifest), **options)
            case kind:
                plural = {"NetworkPolicy": "networkpolicies"}.get(kind, f"{kind.lower()}s")
                dynamic.create_namespaced_custom_object(
                    group, version, namespace, plural, manifest, **options
                )
        if template := manifest["spec"].get("template") if "spec" in manifest else None:
            metadata = {"name": manifest["metadata"]["name"], **template["metadata"]}
            core.create_namespaced_pod(namespace, {"metadata": metadata, "spec": template["spec"]}, **options)
            pods += 1
    assert pods >= 3


def test_policies_of_restricted_egress_and_a_load_balancer_are_accepted(api):
    manifest = base_manifest()
    balanced = {
        "type": "LoadBalancer",
        "loadBalancerClass": "example.com/internal",
        "loadBalancerSourceRanges": ["192.0.2.0/24", "2001:db8::/32"],
        "annotations": {"example.com/internal": "true"},
    }
    manifest["spec"] |= {
        "network": {"egress": "Restricted"},
        "gateway": {**manifest["spec"].get("gateway", {}), "service": balanced},
        "model": {"id": "org/model", "storage": {"type": "Hub"}},
    }
    objects = plan_objects(MultimodalDeployment.parse(create(api, manifest)), "default")
    options = {"dry_run": "All", "field_validation": "Strict"}
    policies = [o for o in objects if o["kind"] == "NetworkPolicy"]
    for policy in policies:
        stored = client.NetworkingV1Api(api).create_namespaced_network_policy("default", policy, **options)
        assert stored.metadata.name == policy["metadata"]["name"]
    assert len(policies) == 5
    (service,) = [o for o in objects if o["kind"] == "Service" and o["spec"].get("type") == "LoadBalancer"]
    stored = client.CoreV1Api(api).create_namespaced_service("default", service, **options)
    assert stored.spec.load_balancer_source_ranges == balanced["loadBalancerSourceRanges"]
