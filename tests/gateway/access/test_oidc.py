"""Tokens of an OpenID Connect issuer in place of API keys: whom they let in, whom they do not, and what happens while the issuer is away."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from mmd_api.tenants import hash_of, new_key
from mmd_workers.gateway.access import issuer as issuer_module
from tests.gateway.local_issuer import AUDIENCE, KEYS, LocalIssuer, public_jwk, rsa_key, running_issuer
from tests.gateway.running import Launch, Running
from tests.gateway.scripted import answer_well

FIRST, SECOND = rsa_key(), rsa_key()
KEY = new_key()
BODY = {"model": "builtin/demo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
TENANTS = [
    {"name": "search", "keys": [{"hash": hash_of(KEY)}], "limits": {"requestsPerMinute": 1000}},
    {"name": "small", "keys": [], "models": ["another"], "limits": {"requestsPerMinute": 1}},
]


@pytest.fixture
def issuer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIssuer]:
    with running_issuer(tmp_path / "issuer") as one:
        monkeypatch.setenv("SSL_CERT_FILE", str(one.trusted))
        one.keys = [public_jwk("first", FIRST)]
        yield one


Open = Callable[..., Awaitable[Running]]


@pytest.fixture
def open_gateway(launch: Launch, issuer: LocalIssuer, tmp_path: Path) -> Open:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"tenants": TENANTS}))

    async def start(**oidc: str) -> Running:
        auth = {"keysSecret": "keys", "oidc": {"issuer": issuer.url, "audience": AUDIENCE, **oidc}}
        return await launch(keys_file=str(file), auth=auth)

    return start


async def models(gateway: Running, token: str | bytes, header: str = "authorization") -> httpx.Response:
    value = token if isinstance(token, str) else token.decode()
    value = f"Bearer {value}" if header == "authorization" else value
    return await gateway.http.get("/v1/models", headers={header: value})


def code(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


async def test_tokens_act_for_the_tenants_they_name_beside_keys(
    open_gateway: Open, issuer: LocalIssuer
) -> None:
    gateway = await open_gateway()
    await gateway.worker("the red circle", answer_well)
    token = issuer.token(FIRST)
    for headers in ({"authorization": f"Bearer {token}"}, {"x-api-key": token}, {"x-api-key": KEY}):
        answer = await gateway.http.post("/v1/chat/completions", json=BODY, headers=headers)
        assert answer.status_code == 200, answer.text
        request_id = answer.headers["x-request-id"]
        assert (await gateway.admin.get(f"/debug/requests/{request_id}")).json()["tenant"] == "search"
    metrics = (await gateway.admin.get("/metrics")).text
    assert 'mmd_tenant_requests_total{status="200",tenant="search"} 3.0' in metrics
    small = {"authorization": f"Bearer {issuer.token(FIRST, tenant='small')}"}
    refused = await gateway.http.post("/v1/chat/completions", json=BODY, headers=small)
    assert (refused.status_code, code(refused)) == (404, "model_not_found")
    refused = await gateway.http.post("/v1/chat/completions", json=BODY, headers=small)
    assert (refused.status_code, code(refused)) == (429, "rate_limit_exceeded")


async def test_every_asymmetric_kind_of_signature_is_accepted(
    open_gateway: Open, issuer: LocalIssuer
) -> None:
    elliptic, edwards = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
    issuer.keys = [public_jwk("first", FIRST), public_jwk("ec", elliptic), public_jwk("ed", edwards)]
    gateway = await open_gateway()
    for key, algorithm, kid in (
        (FIRST, "RS256", "first"),
        (FIRST, "PS512", "first"),
        (elliptic, "ES256", "ec"),
        (edwards, "EdDSA", "ed"),
    ):
        answer = await models(gateway, issuer.token(key, algorithm, kid))
        assert answer.status_code == 200, (algorithm, answer.text)


def part(value: object) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def with_header(token: str, **header: object) -> str:
    """The same token with another header, under the signature that it had."""
    _, claims, signature = token.split(".")
    return f"{part(header)}.{claims}.{signature}"


def hmac_with_public_key(issuer: LocalIssuer) -> str:
    """The classic confusion: the public key, which everybody has, as the secret of a symmetric signature."""
    secret = FIRST.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    _, claims, _ = issuer.token(FIRST).split(".")
    signed = f"{part({'alg': 'HS256', 'typ': 'JWT', 'kid': 'first'})}.{claims}"
    return f"{signed}.{part(hmac.new(secret, signed.encode(), hashlib.sha256).digest())}"


def unsigned(issuer: LocalIssuer, algorithm: str = "none") -> str:
    _, claims, _ = issuer.token(FIRST).split(".")
    return f"{part({'alg': algorithm, 'kid': 'first'})}.{claims}."


def changed(issuer: LocalIssuer) -> str:
    header, _, signature = issuer.token(FIRST).split(".")
    claims = {"iss": issuer.url, "aud": AUDIENCE, "exp": int(time.time()) + 600, "tenant": "small"}
    return f"{header}.{part(claims)}.{signature}"


HOSTILE: dict[str, Callable[[LocalIssuer], str]] = {
    "no signature": unsigned,
    "no signature, in capitals": lambda i: unsigned(i, "NONE"),
    "the public key as a secret": hmac_with_public_key,
    "other claims": changed,
    "another key under a published id": lambda i: i.token(SECOND),
    "a key that is not published": lambda i: i.token(SECOND, kid="second"),
    "its own key in the header": lambda i: with_header(
        i.token(SECOND), alg="RS256", kid="first", jwk=public_jwk("first", SECOND)
    ),
    "its own key set in the header": lambda i: with_header(
        i.token(SECOND), alg="RS256", kid="first", jku="https://127.0.0.1:1/keys"
    ),
    "an extension that must be understood": lambda i: with_header(
        i.token(FIRST), alg="RS256", kid="first", crit=["x"], x=1
    ),
    "another audience": lambda i: i.token(FIRST, aud="somebody else"),
    "several other audiences": lambda i: i.token(FIRST, aud=["a", "b"]),
    "no audience": lambda i: i.token(FIRST, aud=None),
    "another issuer": lambda i: i.token(FIRST, iss="https://localhost"),
    "the issuer with a slash": lambda i: i.token(FIRST, iss=i.url + "/"),
    "no issuer": lambda i: i.token(FIRST, iss=None),
    "expired": lambda i: i.token(FIRST, exp=int(time.time()) - 40),
    "no expiry": lambda i: i.token(FIRST, exp=None),
    "not yet valid": lambda i: i.token(FIRST, nbf=int(time.time()) + 300),
    "from the future": lambda i: i.token(FIRST, iat=int(time.time()) + 300),
    "a key id that is a number": lambda i: with_header(i.token(FIRST), alg="RS256", kid=7),
    "no algorithm": lambda i: with_header(i.token(FIRST), kid="first"),
    "a header that is no object": lambda i: "eyJ" + i.token(FIRST)[5:],
    "a nested header": lambda i: part(b'{"a":' + b"[" * 9000) + ".e30.e30",
    "a number that is too long": lambda i: part(b'{"a":' + b"1" * 6000 + b"}") + ".e30.e30",
    "empty parts": lambda _: "eyJ..",
    "no base64": lambda _: "eyJ!.!.!",
}


async def test_a_token_not_issued_for_this_gateway_and_time_is_refused(
    open_gateway: Open, issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_module, "RETRY_SECONDS", 0.001)
    gateway = await open_gateway()
    assert (await models(gateway, issuer.token(FIRST))).status_code == 200
    for name, make in HOSTILE.items():
        token = make(issuer)
        answer = await models(gateway, token)
        assert (answer.status_code, code(answer)) == (401, "invalid_token"), (name, answer.text)
        assert answer.headers["www-authenticate"] == 'Bearer realm="mmd", error="invalid_token"'
        assert not any(piece in answer.text for piece in token.split(".") if len(piece) > 8), name
        assert "somebody" not in answer.text
    metrics = (await gateway.admin.get("/metrics")).text
    assert f'mmd_gateway_unauthorized_total{{reason="token"}} {len(HOSTILE)}.0' in metrics
    assert (await models(gateway, issuer.token(FIRST))).status_code == 200


async def test_clocks_may_differ_by_half_a_minute(open_gateway: Open, issuer: LocalIssuer) -> None:
    gateway = await open_gateway()
    now = int(time.time())
    for claims in ({"exp": now - 15}, {"nbf": now + 15}, {"iat": now + 15}):
        assert (await models(gateway, issuer.token(FIRST, **claims))).status_code == 200


async def test_signing_keys_are_rotated_without_a_restart_and_without_a_refused_token(
    open_gateway: Open, issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await open_gateway()
    assert (await models(gateway, issuer.token(FIRST))).status_code == 200
    monkeypatch.setattr(issuer_module, "RETRY_SECONDS", 0.001)
    issuer.keys.append(public_jwk("second", SECOND))
    assert (await models(gateway, issuer.token(SECOND, kid="second"))).status_code == 200
    assert (await models(gateway, issuer.token(FIRST))).status_code == 200
    issuer.keys = [public_jwk("second", SECOND)]
    assert (await models(gateway, issuer.token(SECOND, kid="unknown"))).status_code == 401
    assert (await models(gateway, issuer.token(FIRST))).status_code == 401


async def test_a_flood_of_unknown_keys_reaches_the_issuer_no_more_than_once(
    open_gateway: Open, issuer: LocalIssuer
) -> None:
    gateway = await open_gateway()
    assert (await models(gateway, issuer.token(FIRST))).status_code == 200
    token = issuer.token(FIRST)
    for number in range(100):
        refused = await models(gateway, with_header(token, alg="RS256", kid=f"random-{number}"))
        assert (refused.status_code, code(refused)) == (503, "issuer_unavailable")
        assert 1 <= int(refused.headers["retry-after"]) <= 10
    assert issuer.fetched[KEYS] <= 2
    assert (await models(gateway, token)).status_code == 200


async def test_while_the_issuer_is_away_tokens_get_503_and_keys_work(
    open_gateway: Open, issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer.stop()
    gateway = await open_gateway()
    token = issuer.token(FIRST)
    refused = await models(gateway, token)
    assert (refused.status_code, code(refused)) == (503, "issuer_unavailable")
    assert int(refused.headers["retry-after"]) == 10
    assert (await models(gateway, KEY, "x-api-key")).status_code == 200
    assert (await gateway.http.get("/readyz")).status_code == 200, "it serves those who have keys"
    assert (await gateway.admin.get("/demand")).json()["issuer_fault"]
    assert (await gateway.admin.get("/debug/state")).json()["auth"]["issuer_fault"]
    assert await gateway.metric("mmd_gateway_issuer_unreachable_state") == 1
    monkeypatch.setattr(issuer_module, "RETRY_SECONDS", 0.001)
    issuer.start()
    assert (await models(gateway, token)).status_code == 200
    assert (await gateway.admin.get("/demand")).json()["issuer_fault"] == ""
    assert await gateway.metric("mmd_gateway_issuer_unreachable_state") == 0


async def test_a_token_for_an_unlisted_tenant_fails_without_a_default(
    open_gateway: Open, issuer: LocalIssuer
) -> None:
    strict, lenient = await open_gateway(), await open_gateway(defaultTenant="search")
    for claims in ({"tenant": "stranger"}, {"tenant": None}, {"tenant": ["search"]}, {"tenant": ""}):
        token = issuer.token(FIRST, **claims)
        refused = await models(strict, token)
        assert (refused.status_code, code(refused)) == (403, "unknown_tenant")
        assert "stranger" not in refused.text
        assert (await models(lenient, token)).status_code == 200
    absent = await open_gateway(defaultTenant="nobody")
    assert (await models(absent, issuer.token(FIRST, tenant="stranger"))).status_code == 403
    reported = [
        (await one.admin.get("/demand")).json()["missing_tenant"] for one in (strict, lenient, absent)
    ]
    assert reported == ["", "", "nobody"]


async def test_the_claim_may_have_any_name(open_gateway: Open, issuer: LocalIssuer) -> None:
    gateway = await open_gateway(tenantClaim="https://example.com/team")
    assert (await models(gateway, issuer.token(FIRST, tenant="small"))).status_code == 403
    named = issuer.token(FIRST, tenant=None, **{"https://example.com/team": "search"})
    assert (await models(gateway, named)).status_code == 200


async def test_neither_tokens_nor_claims_appear_in_logs_metrics_or_state(
    open_gateway: Open, issuer: LocalIssuer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    gateway = await open_gateway()
    tokens = [
        issuer.token(FIRST, sub="subject-4711"),
        issuer.token(FIRST, aud="audience-4711"),
        changed(issuer),
    ]
    for token in tokens:
        await models(gateway, token)
    shown = caplog.text
    for path in ("/metrics", "/debug/state", "/debug/requests", "/demand"):
        shown += (await gateway.admin.get(path)).text
    assert "4711" not in shown
    assert not [piece for token in tokens for piece in token.split(".")[1:] if piece in shown]
