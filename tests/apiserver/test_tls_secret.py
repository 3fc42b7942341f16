"""The Secret with the TLS certificate: what is missing of it is a condition, and the address of the deployment begins with https."""

from __future__ import annotations

import pytest

from support.cluster.deployments import SPEC
from support.cluster.shared_server import AnyOperator
from support.cluster.standin import Namespace
from support.servers.certificates import Authority

from .fleet import assert_gateway_fault_shown

pytestmark = pytest.mark.usefixtures("any_operator")

SECRET = "gateway-tls"
WITH_TLS = {**SPEC, "gateway": {"tls": {"secretName": SECRET}}}


def degraded(namespace: Namespace, reason: str, words: str = "") -> None:
    _, found, message = namespace.condition("Degraded")
    assert found == reason, message
    assert words in message


def put(namespace: Namespace, entries: dict[str, str]) -> None:
    body = {"metadata": {"name": SECRET}, "type": "kubernetes.io/tls", "stringData": entries}
    namespace.core.create_namespaced_secret(namespace.name, body)


def test_a_missing_certificate_is_reported_until_it_is_there(any_operator: AnyOperator, namespace: Namespace):
    namespace.apply(WITH_TLS)
    words = f"Secret {SECRET}, which spec.gateway.tls.secretName names, does not exist"
    namespace.settled(lambda: degraded(namespace, "SecretMissing", words))
    pair = Authority().issue()
    put(namespace, pair)
    namespace.settled(lambda: degraded(namespace, "NoProblem"))
    namespace.settled(namespace.is_ready)
    status = namespace.get("demo")["status"]
    assert status["endpoint"] == f"https://demo-gateway.{namespace.name}.svc:8000"
    assert not set(pair["tls.key"].splitlines()) & set(any_operator.log_text().splitlines())


def test_a_certificate_that_a_gateway_rejects_is_reported_in_its_words(namespace: Namespace):
    put(namespace, Authority().issue())
    words = f"does not use the TLS certificate of Secret {SECRET}"
    fault = {"tls_fault": "tls.crt has expired"}
    assert_gateway_fault_shown(namespace, WITH_TLS["gateway"], fault, "CertificateInvalid", words)
