"""Deployments that cannot be reconciled report it as a condition: the others are served and the operator stays alive."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from kubernetes import client
from prometheus_client.parser import text_string_to_metric_families

from mmd_api.resource import GROUP, PLURAL, VERSION
from mmd_cli.local.pods import free_port
from mmd_operator.kube.pauses import Pauses
from support.cluster.control_plane import ControlPlane
from support.cluster.deployments import SPEC
from support.cluster.operator_process import OperatorProcess
from support.cluster.standin import Namespace, eventually, exhaust

from .rights import RULES, bind, token_of

HEALTHY = [f"d{number}" for number in range(46)]
SMALL = {**{key: SPEC[key] for key in ("model", "transfer")}, "decode": {"gpus": 0, "replicas": 1}}
DENIED = "this cluster allows no Service"
OFTEN_SWEPT = Pauses(sweep_seconds=1.0)
PLACES = ("healthy", "webhook", "quota", "scale", "status")


@pytest.fixture
def denying_webhook(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL and the CA bundle of an admission webhook that denies whatever it is asked about."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "webhook")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    file = tmp_path / "webhook.pem"
    file.write_bytes(private + pem)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = {"uid": review["request"]["uid"], "allowed": False, "status": {"message": DENIED}}
            kind = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
            body = json.dumps({**kind, "response": answer}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}/", base64.b64encode(pem).decode()
    server.shutdown()
    server.server_close()


def deny(api: client.ApiClient, webhook: tuple[str, str], where: Namespace, rule: dict) -> None:
    url, bundle = webhook
    hook = {
        "name": "deny.example.com",
        "rules": [rule],
        "clientConfig": {"url": url, "caBundle": bundle},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": where.name}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 5,
    }
    client.AdmissionregistrationV1Api(api).create_validating_webhook_configuration(
        {"metadata": {"name": where.name}, "webhooks": [hook]}
    )


@pytest.fixture
def places(api: client.ApiClient, denying_webhook: tuple[str, str]) -> Iterator[dict[str, Namespace]]:
    """Namespaces of which all but the first have a fault."""
    found = {name: Namespace.create(api, f"isolation-{name}") for name in PLACES}
    services = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["services"], "operations": ["CREATE"]}
    status = {
        "apiGroups": [GROUP],
        "apiVersions": [VERSION],
        "resources": [f"{PLURAL}/status"],
        "operations": ["UPDATE"],
    }
    deny(api, denying_webhook, found["webhook"], services)
    deny(api, denying_webhook, found["status"], status)
    exhaust(found["quota"])
    yield found
    for name in ("webhook", "status"):
        client.AdmissionregistrationV1Api(api).delete_validating_webhook_configuration(found[name].name)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def operator(
    control_plane: ControlPlane, places: dict[str, Namespace], tmp_path: Path, port: int
) -> Iterator[OperatorProcess]:
    home = places["healthy"]
    account = (home.name, "operator")
    home.core.create_namespaced_service_account(home.name, {"metadata": {"name": "operator"}})
    for name, place in places.items():
        rules = [r for r in RULES["rules"] if name != "scale" or "statefulsets/scale" not in r["resources"]]
        bind(place, place.name, [*rules, *RULES["leaseRules"]], account)
    kubeconfig = control_plane.kubeconfig(token_of(home, *account))
    others = tuple(place.name for name, place in places.items() if name != "healthy")
    process = OperatorProcess(kubeconfig, home.name, tmp_path, port, also=others, pauses=OFTEN_SWEPT)
    process.start()
    yield process
    process.kill()


@pytest.mark.timeout(600)
def test_of_fifty_deployments_four_fail_and_the_others_are_served(
    places: dict[str, Namespace], operator: OperatorProcess, port: int
) -> None:
    """One meets a denying webhook, one an exhausted quota, one a forbidden `/scale`, and of one not even the status can be written."""
    healthy, scale = places["healthy"], places["scale"]
    for name in HEALTHY:
        healthy.apply(SMALL, name)
    for place in PLACES[1:]:
        places[place].apply(SMALL)
    scale.settled(scale.is_ready)
    scale.change({"decode": {"replicas": 2}})
    eventually(lambda: degraded(places["webhook"], "AdmissionRefused", DENIED))
    eventually(lambda: degraded(places["quota"], "QuotaExceeded", "exceeded quota"))
    eventually(lambda: degraded(scale, "PermissionMissing", "statefulsets/scale"))
    eventually(lambda: retried(port, places["status"]))

    def all_ready() -> None:
        for name in HEALTHY:
            healthy.is_ready(name)

    healthy.settled(all_ready)
    for name in HEALTHY:
        healthy.change({"decode": {"replicas": 2}}, name)

    def all_sized() -> None:
        sets = healthy.apps.list_namespaced_stateful_set(
            healthy.name, label_selector="app.kubernetes.io/component=decode"
        ).items
        assert [item.spec.replicas for item in sets] == [2] * len(HEALTHY)

    eventually(all_sized)
    healthy.settled(all_ready)
    assert probe(port) == (200, "ok\n")
    assert operator.wait(0) is None


def degraded(namespace: Namespace, reason: str, words: str) -> None:
    found = namespace.condition("Degraded")
    assert found[:2] == ("True", reason), found
    assert words in found[2]


def retried(port: int, namespace: Namespace) -> None:
    """Its passes fail all the time, and each counts as a sign of life of the operator."""
    text = get(port, "/metrics")[1]
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    failing = next(
        s.value
        for s in samples
        if s.name == "mmd_deployment_reconcile_failing_seconds" and s.labels["namespace"] == namespace.name
    )
    oldest = next(s.value for s in samples if s.name == "mmd_operator_oldest_pass_seconds")
    reasons = {
        s.labels["reason"]
        for s in samples
        if s.name == "mmd_deployment_condition"
        and s.labels["namespace"] == namespace.name
        and s.labels["condition"] == "Degraded"
        and s.value == 1
    }
    assert reasons == {"ReconcileFailed"}
    assert failing > oldest


def probe(port: int) -> tuple[int, str]:
    return get(port, "/healthz")


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
