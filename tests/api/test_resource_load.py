import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.faults import Fault, InvalidDeploymentError
from mmd_api.resource import MultimodalDeployment, load, load_all
from mmd_api.spec.pools import Pool
from support.cluster.manifests import base_manifest, merge


def faults(source) -> list[str]:
    with pytest.raises(InvalidDeploymentError) as refused:
        load(source) if not isinstance(source, dict) else MultimodalDeployment.parse(source)
    return [str(f) for f in refused.value.faults]


def faults_if_any(manifest) -> tuple[Fault, ...]:
    try:
        MultimodalDeployment.parse(manifest)
    except InvalidDeploymentError as refused:
        return refused.faults or (Fault("", "refused without a reason"),)
    return ()


@pytest.fixture
def file(tmp_path):
    def write(text: str):
        path = tmp_path / "deployment.yaml"
        path.write_text(text)
        return path

    return write


def test_a_file_is_read(file):
    assert load(file(yaml.safe_dump(base_manifest()))).spec.model.id == "builtin/demo"


def test_every_fault_is_named_at_once():
    manifest = merge(
        base_manifest(),
        {
            "metadata": {"name": "A"},
            "spec": {
                "model": {"id": "builtin/other", "dtpye": "Float32"},
                "encoder": {"gpus": "one", "tensorParallelSize": 1},
                "prefill": {"replicas": 1, "autoscaling": {"minReplicas": 2}},
                "decode": {"maxSequences": 0},
                "transfer": {"kv": {"backend": "Nccl", "leaseSeconds": 1}},
            },
        },
    )
    assert sorted(f.partition(":")[0] for f in faults(manifest)) == [
        "metadata.name",
        "spec.decode.maxSequences",
        "spec.encoder.gpus",
        "spec.encoder.tensorParallelSize",
        "spec.model.dtpye",
        "spec.model.id",
        "spec.prefill.autoscaling.maxReplicas",
        "spec.prefill.replicas",
        "spec.transfer.kv.backend",
        "spec.transfer.kv.leaseSeconds",
    ]


def test_a_rule_keeps_quiet_about_a_value_that_is_itself_broken():
    manifest = merge(base_manifest(), {"spec": {"gpuBudget": 1, "decode": {"gpus": 99, "replicas": 5}}})
    assert [f.partition(":")[0] for f in faults(manifest)] == ["spec.decode.gpus"]


def test_faults_of_every_document_are_named_with_the_document(file):
    documents = [base_manifest(), merge(base_manifest(), {"spec": {"decode": {"gpus": -1}}})]
    found = faults(file(yaml.safe_dump_all(documents)))
    assert found == ["document[1].spec.decode.gpus: -1 is too small; set at least 0"]


def test_objects_of_other_groups_are_left_to_others(file):
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}}
    assert len(load_all(file(yaml.safe_dump_all([secret, base_manifest(), None])))) == 1


def test_two_deployments_where_one_is_wanted(file):
    documents = [base_manifest(), merge(base_manifest(), {"metadata": {"name": "other"}})]
    path = file(yaml.safe_dump_all(documents))
    assert faults(path) == ["2 deployments (sample, other), but one is expected; put each in its own file"]
    assert [d.metadata.name for d in load_all(path)] == ["sample", "other"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "contains no MultimodalDeployment; start it with"),
        ("a: [1", "line 1: invalid YAML"),
        ("a: 1\na: 2\n", "line 2: invalid YAML: the key 'a' appears twice"),
        ("just words", "is not a mapping"),
        ("!!python/object/apply:os.system [id]", "invalid YAML"),
        ("apiVersion: v1\nkind: Secret\n", "contains no MultimodalDeployment"),
        pytest.param("[" * 5000, "nested too deeply", id="deep"),
    ],
)
def test_a_file_that_is_not_a_deployment_is_rejected_with_a_reason(file, text, words):
    (fault,) = faults(file(text))
    assert words in fault


def test_a_file_that_is_not_there(tmp_path):
    assert faults(tmp_path / "none.yaml") == ["cannot be read (No such file or directory); check the path"]


def test_metadata_added_by_the_api_server_is_accepted():
    manifest = merge(
        base_manifest(),
        {"metadata": {"managedFields": [], "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 3}},
    )
    assert MultimodalDeployment.parse(manifest).metadata.generation == 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PATHS = st.sampled_from(
    [
        ("spec",),
        ("metadata",),
        ("metadata", "labels"),
        ("spec", "model"),
        ("spec", "decode", "template"),
        ("spec", "decode", "template", "env"),
        ("spec", "decode", "template", "labels"),
        ("spec", "decode", "tolerations"),
        ("spec", "encoder", "autoscaling"),
        ("spec", "encoder", "autoscaling", "schedules"),
        ("spec", "nats", "url"),
        ("status",),
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(PATHS, JSON), min_size=1, max_size=3))
def test_any_manifest_is_read_or_rejected_with_fields(replacements):
    manifest = base_manifest()
    for path, value in replacements:
        parent = manifest
        for step in path[:-1]:
            if not isinstance(parent.get(step), dict):
                parent[step] = {}
            parent = parent[step]
        parent[path[-1]] = value
    assert all(f.field and f.message for f in faults_if_any(manifest))


@pytest.mark.parametrize(
    ("pool", "replicas"),
    [
        ({}, 1),
        ({"replicas": 0}, 0),
        ({"replicas": 3}, 3),
        ({"autoscaling": {"maxReplicas": 4}}, 1),
        ({"autoscaling": {"minReplicas": 0, "maxReplicas": 4}}, 0),
    ],
)
def test_a_pool_has_one_replica_unless_replicas_or_autoscaling_is_set(pool, replicas):
    assert Pool.model_validate(pool).min_replicas == replicas
