"""Which connections the plan's NetworkPolicies let through: all that pods make, and as few others as a policy can express."""

from __future__ import annotations

from typing import Any

import pytest

from mmd_operator.resources.plan import plan_objects
from support.cluster.policies import Place, lets_through

from .planned import deployment, of_kind, pods

HTTP, ADMIN, NATS, DATA = 8000, 8080, 4222, 41234
LAYOUTS: dict[str, dict[str, Any]] = {
    "monolithic": {},
    "encoder and decode": {"encoder": {"gpus": 0}},
    "prefill and decode": {"prefill": {"gpus": 0}, "transfer": {"kv": {"backend": "Gloo"}}},
    "three pools": {
        "encoder": {"gpus": 0},
        "prefill": {"gpus": 0},
        "transfer": {"kv": {"backend": "Gloo"}},
    },
    "groups": {
        "encoder": {"gpus": 0},
        "engine": {"type": "VLLM", "decode": {"tensorParallelSize": 2}},
        "decode": {"gpus": 1},
    },
}
RESTRICTED = {"network": {"egress": "Restricted"}}
PORTS = [80, 443, 4222, 4318, 8080, 8443, 9999]
COMPONENT = "app.kubernetes.io/component"
STRANGER = Place({"app": "stranger"})
ELSEWHERE = Place({"app": "collector"}, namespace="infra")
RESOLVER = Place({"k8s-app": "kube-dns"}, namespace="kube-system")
PUBLIC = [Place(address="198.51.100.7"), Place(address="2001:db8::7")]
PRIVATE = [Place(address=a) for a in ("10.0.0.9", "169.254.169.254", "192.168.1.1", "fd00::1", "100.64.1.1")]
HUB = {"model": {"id": "org/model", "storage": {"type": "Hub"}}}
ISSUER = {"keysSecret": "keys", "oidc": {"issuer": "https://issuer.example.com:8443/x", "audience": "a"}}


class Planned:
    """The policies of a deployment's plan and its pods."""

    def __init__(self, spec: dict[str, Any]) -> None:
        objects = plan_objects(deployment(spec), "x")
        self.policies = of_kind(objects, "NetworkPolicy")
        templates = [template for _, template in pods(objects)]
        self.group = []
        for group in of_kind(objects, "LeaderWorkerSet"):
            parts = group["spec"]["leaderWorkerTemplate"]
            self.group = [parts["leaderTemplate"], parts["workerTemplate"]]
            templates += self.group
        self.pods = {t["metadata"]["labels"][COMPONENT]: Place(t["metadata"]["labels"]) for t in templates}

    def admits(self, source: Place, target: Place, port: int, protocol: str = "TCP") -> bool:
        return lets_through(self.policies, source, target, port, protocol)

    def reaches(self, component: str, places: list[Place], port: int) -> bool:
        """Whether pods of a component reach all of these places; some of them only is a defect."""
        found = {self.admits(self.pods[component], place, port) for place in places}
        assert len(found) == 1, (component, places, port)
        return found.pop()


@pytest.mark.parametrize("egress", ["Open", "Restricted"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_ports_of_pods_with_kv_admit_only_such_pods(layout, egress):
    plan = Planned({**LAYOUTS[layout], "network": {"egress": egress}})
    assert {"decode", "gateway", "nats"} <= set(plan.pods)
    leader_and_follower = [Place(t["metadata"]["labels"]) for t in plan.group]
    assert all(plan.admits(a, b, DATA) for a in leader_and_follower for b in leader_and_follower)
    another = Place({**plan.pods["decode"].labels, "serving.multimodal.dev/deployment": "another"})
    for name, target in plan.pods.items():
        assert not plan.admits(STRANGER, target, DATA)
        assert not plan.admits(another, target, DATA)
        assert all(plan.admits(STRANGER, target, port) for port in (HTTP, ADMIN))
        for source, place in plan.pods.items():
            if source == "nats" != name and egress == "Restricted":
                assert not plan.admits(place, target, DATA)
                continue
            with_kv = source in ("prefill", "decode")
            assert plan.admits(place, target, DATA) is (with_kv or name not in ("prefill", "decode"))


@pytest.mark.parametrize("egress", ["Open", "Restricted"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_connection_within_a_deployment_passes(layout, egress):
    """What pods do: all speak to NATS, clients, the operator and Prometheus to HTTP, and KV goes between prefill and decode."""
    plan = Planned({**LAYOUTS[layout], "network": {"egress": egress}})
    assert all(plan.admits(place, plan.pods["nats"], NATS) for place in plan.pods.values())
    assert all(plan.admits(ELSEWHERE, place, ADMIN) for n, place in plan.pods.items() if n != "nats")
    assert plan.admits(PUBLIC[0], plan.pods["gateway"], HTTP)
    with_kv = [place for name, place in plan.pods.items() if name in ("prefill", "decode")]
    assert all(plan.admits(one, other, DATA) for one in with_kv for other in with_kv)
    for place in plan.pods.values():
        assert all(plan.admits(place, RESOLVER, 53, protocol) for protocol in ("UDP", "TCP"))


def test_egress_is_open_where_the_spec_does_not_restrict_it():
    plan = Planned({})
    assert all(plan.reaches(name, [*PUBLIC, *PRIVATE, ELSEWHERE], 9999) for name in plan.pods)


USES = [
    ("media", {}, {"gateway": (PUBLIC, [80, 443])}),
    ("no media by URL", {"gateway": {"media": {"allowHttp": False}}}, {}),
    ("media of the intranet", {"gateway": {"media": {"allowPrivateAddresses": True}}}, {"gateway": ([*PUBLIC, *PRIVATE, ELSEWHERE], PORTS)}),
    ("the hub", {**HUB, "gateway": {"media": {"allowHttp": False}}}, {"gateway": (PUBLIC, [443]), "decode": (PUBLIC, [443]), "encoder": (PUBLIC, [443])}),
    ("an issuer", {"gateway": {"auth": ISSUER, "media": {"allowHttp": False}}}, {"gateway": ([*PUBLIC, *PRIVATE, ELSEWHERE], [8443])}),
    ("traces", {"gateway": {"media": {"allowHttp": False}}, "observability": {"otlpEndpoint": "http://collector:4318"}},
     {name: ([*PUBLIC, *PRIVATE, ELSEWHERE], [4318]) for name in ("gateway", "encoder", "decode")}),
    ("another NATS server", {"gateway": {"media": {"allowHttp": False}}, "nats": {"managed": False, "url": "tls://nats.example.com"}},
     {name: ([*PUBLIC, *PRIVATE, ELSEWHERE], [4222]) for name in ("gateway", "encoder", "decode")}),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "uses"), [u[1:] for u in USES], ids=[u[0] for u in USES])
def test_restricted_pods_reach_what_the_spec_makes_them_use_and_nothing_else(spec, uses):
    plan = Planned({"encoder": {"gpus": 0}, **spec, **RESTRICTED})
    for component in plan.pods:
        places, ports = uses.get(component, ([], []))
        for port in PORTS:
            for each in (PUBLIC, PRIVATE, [ELSEWHERE]):
                wanted = port in ports and all(place in places for place in each)
                assert plan.reaches(component, each, port) is wanted, (component, each, port)


def test_pods_of_an_earlier_revision_keep_the_egress_of_their_own_model():
    before, after = (Planned({**model, **RESTRICTED}) for model in (HUB, {"model": {"id": "builtin/demo"}}))
    by_name = {p["metadata"]["name"]: p for p in [*before.policies, *after.policies]}
    assert lets_through(by_name.values(), before.pods["decode"], PUBLIC[0], 443)
    assert not lets_through(by_name.values(), after.pods["decode"], PUBLIC[0], 443)


@pytest.mark.parametrize("url", ["nats://nats:x", "nats://[::1", "nats://nats:99999", "nats://nats"])
def test_a_url_without_a_valid_port_gets_that_of_its_scheme(url):
    plan = Planned({"nats": {"managed": False, "url": url}, **RESTRICTED})
    assert plan.reaches("decode", [ELSEWHERE], 4222)


def test_each_of_several_nats_servers_is_reached_at_its_own_port():
    url = "nats://one.example.com:4300,nats://two.example.com:4301,nats://three.example.com"
    plan = Planned({"nats": {"managed": False, "url": url}, **RESTRICTED})
    assert [port for port in (4222, 4300, 4301, 4302) if plan.reaches("decode", [ELSEWHERE], port)] == [
        4222,
        4300,
        4301,
    ]


@pytest.mark.parametrize(
    ("service", "wanted"),
    [
        ({}, {"type": "ClusterIP"}),
        ({"type": "LoadBalancer"}, {"type": "LoadBalancer"}),
        (
            {"type": "LoadBalancer", "loadBalancerClass": "example.com/internal", "loadBalancerSourceRanges": ["192.0.2.0/24", "2001:db8::/32"]},
            {"type": "LoadBalancer", "loadBalancerClass": "example.com/internal", "loadBalancerSourceRanges": ["192.0.2.0/24", "2001:db8::/32"]},
        ),
    ],
)  # fmt: skip
def test_the_gateways_service_is_as_the_spec_wants_it(service, wanted):
    annotations = {"example.com/internal": "true"}
    spec = {"gateway": {"service": {**service, "annotations": annotations}}}
    (found,) = [
        o
        for o in of_kind(plan_objects(deployment(spec), "x"), "Service")
        if o["metadata"]["name"] == "sample-gateway"
    ]
    assert {k: v for k, v in found["spec"].items() if k not in ("selector", "ports")} == wanted
    assert found["metadata"]["annotations"] == annotations
