"""Valid deployments, written down and drawn at random."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from mmd_api.resource import MultimodalDeployment

NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,30}[a-z0-9])?", fullmatch=True)
QUALIFIED = st.from_regex(r"(example\.com/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,20}[A-Za-z0-9])?", fullmatch=True)
LABEL_VALUES = st.from_regex(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,20}[A-Za-z0-9])?)?", fullmatch=True)
LABELS = st.dictionaries(QUALIFIED, LABEL_VALUES, max_size=3)
ENVIRONMENT = st.lists(
    st.fixed_dictionaries(
        {"name": st.from_regex(r"[A-LN-Z_][A-Z0-9_]{0,12}", fullmatch=True), "value": st.text(max_size=20)}
    ),
    max_size=3,
    unique_by=lambda e: e["name"],
)
RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.sampled_from(["1", "250m", "1.5", "16"]),
        "memory": st.sampled_from(["512Mi", "4Gi", "1.5G"]),
    },
)
TOLERATIONS = st.lists(
    st.sampled_from(
        [{"key": "gpu", "operator": "Exists"}, {"key": "spot", "value": "yes", "effect": "NoExecute"}]
    ),
    max_size=2,
)
TEMPLATES = st.fixed_dictionaries(
    {}, optional={"labels": LABELS, "annotations": LABELS, "env": ENVIRONMENT, "serviceAccountName": NAMES}
)
SIZES = st.one_of(
    st.just({}),
    st.integers(1, 1000).map(lambda n: {"replicas": n}),
    st.integers(1, 9).map(lambda n: {"autoscaling": {"minReplicas": n, "maxReplicas": n + 3}}),
)
PLACEMENT = st.fixed_dictionaries(
    {},
    optional={
        "resources": RESOURCES,
        "nodeSelector": LABELS,
        "tolerations": TOLERATIONS,
        "template": TEMPLATES,
    },
)
POOLS = st.builds(
    lambda gpus, size, placement: {"gpus": gpus, **size, **placement}, st.integers(0, 1), SIZES, PLACEMENT
)
MODELS = st.sampled_from(
    [
        {"id": "builtin/demo"},
        {"id": "org/model", "revision": "main", "storage": {"type": "Hub", "tokenSecret": "hub"}},
        {
            "id": "/models/one",
            "storage": {"type": "PersistentVolumeClaim", "claimName": "weights", "subPath": "a/b"},
        },
        {"id": "/opt/model"},
    ]
)
NATS = st.sampled_from(
    [
        {},
        {"storageMebibytes": 64},
        {"nodeSelector": {"a": "b"}, "template": {"env": [{"name": "GOMEMLIMIT", "value": "1GiB"}]}},
        {"managed": False, "url": "nats://nats.example.com:4222"},
        {"managed": False, "url": "tls://nats.example.com", "credentialsSecret": "bus"},
    ]
)


@st.composite
def valid_deployments(draw: st.DrawFn) -> MultimodalDeployment:
    """Deployments of every shape: which pools there are, how large, where, from which model and bus."""
    spec: dict[str, Any] = {
        "model": draw(MODELS),
        "decode": draw(POOLS),
        "nats": draw(NATS),
        "gateway": draw(PLACEMENT),
        "network": {"egress": draw(st.sampled_from(["Open", "Restricted"]))},
        "transfer": {"kv": {"backend": "Gloo"}},
    }
    for pool in ("encoder", "prefill"):
        if draw(st.booleans()):
            spec[pool] = draw(POOLS)
    return deployment(spec, draw(NAMES))


def deployment(spec: dict[str, Any], name: str = "sample") -> MultimodalDeployment:
    """A deployment with this spec; a CPU-only monolith where nothing else is said."""
    whole = {"model": {"id": "builtin/demo"}, "decode": {"gpus": 0}, **spec}
    return MultimodalDeployment.parse(
        {
            "apiVersion": "serving.multimodal.dev/v1alpha1",
            "kind": "MultimodalDeployment",
            "metadata": {"name": name},
            "spec": whole,
        }
    )


def of_kind(objects: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    """The objects of these kinds."""
    return [o for o in objects if o["kind"] in kinds]


def pods(objects: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Name of the owner and pod template of everything that runs pods."""
    return [
        (o["metadata"]["name"], o["spec"]["template"]) for o in of_kind(objects, "StatefulSet", "Deployment")
    ]
