"""Which Secret of gateways is named for which problem, while the spec changes from one to another."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.kube.cluster import BusyError
from mmd_operator.kube.context import PassContext
from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.kube.pod_client import ReportFetcher
from mmd_operator.observed.observed import Observed, pod_of
from mmd_operator.observed.problems import gathered
from mmd_operator.resources.naming import COMPONENT_LABEL, REVISION_LABEL
from mmd_operator.status.gateway_secrets import GatewaySecrets

from .answering_pods import spec
from .bodies import NEW, pod


class Secrets:
    """The Secrets of a namespace, at an API server that may be busy."""

    def __init__(self, *names: str) -> None:
        self.names, self.busy = set(names), False
        self.lacking: set[str] = set()

    async def secret_metadata(self, _namespace: str, name: str) -> dict[str, Any] | None:
        if self.busy:
            raise BusyError("too many requests")
        return {"name": name} if name in self.names else None

    async def secret_lacks(self, _namespace: str, _name: str, entries: list[str]) -> list[str]:
        return [entry for entry in entries if entry in self.lacking]


class Gateways(ReportFetcher):
    """Gateways that report these faults, all of them."""

    def __init__(self, **faults: str) -> None:
        self.faults = faults

    async def get(self, address: str, port: int, path: str, max_bytes: int) -> bytes:
        ttft = {"window_seconds": 30.0, "requests": 0, "seconds": 0.0}
        queue = {"age_seconds": 0.0, "waiting_work": {}}
        report = {"pod": address, "revision": NEW, "queue": queue, "ttft": ttft, **self.faults}
        return json.dumps(report).encode()


def secrets_of(secrets: Secrets, **faults: str) -> GatewaySecrets:
    context = PassContext(secrets, None, None, "default", "demo", PRODUCTION)  # type: ignore[arg-type]  # all that is asked of them
    return GatewaySecrets(context, Gateways(**faults))


def with_gateway(**fields: object) -> MultimodalDeploymentSpec:
    body = spec().model_dump(mode="json", by_alias=True, exclude_none=True)
    body.setdefault("gateway", {}).update(fields)
    return MultimodalDeploymentSpec.model_validate(body)


def gateway(name: str, secret: str):
    return replace(pod("gateway", name=name, ready=True), address=name, keys_secret=secret)


def problems(keys: GatewaySecrets, secret: str, now: float, *gateways) -> list[str]:
    return told(keys, with_gateway(auth={"keysSecret": secret}), now, *gateways)


def told(of: GatewaySecrets, wanted: MultimodalDeploymentSpec, now: float, *gateways) -> list[str]:
    found = asyncio.run(of.problems(wanted, Observed({}, gateways), now))
    assert {problem.reason for problem in gathered(found)} == {problem.reason for problem in found}
    return [f"{problem.reason}: {problem}" for problem in found]


def test_problems_of_a_secret_end_when_the_spec_names_another() -> None:
    secrets = Secrets("new")
    keys = secrets_of(secrets)
    (missing,) = problems(keys, "old", 0.0)
    assert "Secret old" in missing
    secrets.busy = True
    assert problems(keys, "new", 1.0) == []
    secrets.busy, secrets.names = False, set()
    (missing,) = problems(keys, "new", 1.5)
    assert "Secret new" in missing


def test_a_rejected_file_is_that_of_the_secret_which_the_pod_mounts() -> None:
    keys = secrets_of(Secrets("new"), keys_fault="line 1")
    pods = gateway("before", "old"), gateway("after", "new")
    found = problems(keys, "new", 0.0, *pods)
    assert [f"Secret {name}" in text for name, text in zip(("old", "new"), found, strict=True)] == [
        True,
        True,
    ]


def test_a_pod_shows_the_secret_that_it_mounts() -> None:
    volumes = [{"name": "config"}, {"name": "keys", "secret": {"secretName": "demo-keys"}}]
    labels = {COMPONENT_LABEL: "gateway", REVISION_LABEL: NEW}
    metadata = {"name": "demo", "uid": "u", "labels": labels}
    assert pod_of({"metadata": metadata, "spec": {"volumes": volumes}}).keys_secret == "demo-keys"
    assert pod_of({"metadata": metadata, "spec": {"volumes": volumes[:1]}}).keys_secret is None
    volumes = [{"name": "tls", "secret": {"secretName": "gateway-tls"}}]
    assert pod_of({"metadata": metadata, "spec": {"volumes": volumes}}).tls_secret == "gateway-tls"


TLS = {"secretName": "gateway-tls"}


def test_a_missing_and_an_incomplete_certificate_are_reported_with_what_makes_them() -> None:
    secrets = Secrets()
    of = secrets_of(secrets)
    (missing,) = told(of, with_gateway(tls=TLS), 0.0)
    assert missing.startswith("SecretMissing: ")
    assert "Secret gateway-tls, which spec.gateway.tls.secretName names, does not exist" in missing
    assert "the entries tls.crt and tls.key; `kubectl create secret tls`" in missing
    secrets.names, secrets.lacking = {"gateway-tls"}, {"tls.key"}
    (incomplete,) = told(of, with_gateway(tls=TLS), 10.0)
    assert incomplete.startswith("SecretIncomplete: ")
    assert "lacks the entry tls.key" in incomplete
    secrets.lacking = set()
    assert told(of, with_gateway(tls=TLS), 20.0) == []
    assert told(of, with_gateway(), 30.0) == []


def test_faults_that_gateways_report_name_the_secret_or_the_issuer() -> None:
    oidc = {"issuer": "https://issuer.example.com", "audience": "mmd"}
    wanted = with_gateway(tls=TLS, auth={"keysSecret": "keys", "oidc": oidc})
    of = secrets_of(Secrets("keys", "gateway-tls"), tls_fault="expired", issuer_fault="no answer within 10 s")
    mounting = replace(pod("gateway", name="g", ready=True), address="g", tls_secret="before")
    issuer, certificate = told(of, wanted, 0.0, mounting)
    assert certificate.startswith("CertificateInvalid: ")
    assert "of Secret before" in certificate
    assert "expired" in certificate
    assert issuer.startswith("IssuerUnreachable: ")
    assert "https://issuer.example.com" in issuer
    assert "no answer within 10 s" in issuer


def test_a_missing_default_tenant_is_reported_with_secret_and_field() -> None:
    oidc = {"issuer": "https://issuer.example.com", "audience": "mmd", "defaultTenant": "guests"}
    of = secrets_of(Secrets("keys"), missing_tenant="guests")
    (missing,) = told(of, with_gateway(auth={"keysSecret": "keys", "oidc": oidc}), 0.0, gateway("g", "keys"))
    assert missing.startswith("DefaultTenantMissing: ")
    assert "keys.yaml of Secret keys" in missing
    assert "no tenant guests, which spec.gateway.auth.oidc.defaultTenant names" in missing
    assert "add the tenant to the Secret" in missing


def test_a_missing_tenant_from_an_older_spec_is_not_reported() -> None:
    """A gateway takes the field when it starts: until it is replaced, it reports the tenant that the field named then."""
    of = secrets_of(Secrets("keys"), missing_tenant="guests")
    for now, named in enumerate(({"defaultTenant": "visitors"}, {})):
        oidc = {"issuer": "https://issuer.example.com", "audience": "mmd", **named}
        wanted = with_gateway(auth={"keysSecret": "keys", "oidc": oidc})
        assert told(of, wanted, 100.0 * now, gateway("g", "keys")) == []


def test_a_gateway_is_not_blamed_for_what_the_spec_no_longer_has() -> None:
    of = secrets_of(Secrets("keys"), tls_fault="expired", issuer_fault="no answer", missing_tenant="guests")
    mounting = replace(pod("gateway", name="g", ready=True), address="g")
    assert told(of, with_gateway(auth={"keysSecret": "keys"}), 0.0, mounting) == []


def test_an_endpoint_picker_that_has_ended_is_reported_without_any_secret() -> None:
    of = secrets_of(Secrets(), picker_fault="it ended, exit status -9")
    asked = replace(pod("gateway", name="g", ready=True), address="g")
    (failed,) = told(of, with_gateway(inferencePool={}), 0.0, asked)
    assert failed.startswith("EndpointPickerFailed: ")
    assert "pod g" in failed
    assert "exit status -9" in failed
    assert told(of, with_gateway(), 1.0, asked) == []


def test_gateway_faults_end_when_the_spec_drops_their_field() -> None:
    oidc = {"issuer": "https://issuer.example.com", "audience": "mmd"}
    secrets, asked = Secrets("keys"), gateway("g", "keys")
    for fault, reason, fields in (
        ("picker_fault", "EndpointPickerFailed", {"auth": {"keysSecret": "keys"}, "inferencePool": {}}),
        ("issuer_fault", "IssuerUnreachable", {"auth": {"keysSecret": "keys", "oidc": oidc}}),
    ):
        secrets.busy = False
        of = secrets_of(secrets, **{fault: "it ended"})
        (failed,) = told(of, with_gateway(**fields), 0.0, asked)
        assert failed.startswith(f"{reason}: ")
        secrets.busy = True
        assert told(of, with_gateway(**fields), 100.0, asked) == [failed], "it is not known to be over"
        assert told(of, with_gateway(auth={"keysSecret": "keys"}), 101.0, asked) == []
