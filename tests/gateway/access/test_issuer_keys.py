"""The keys of an issuer: which are used, when they are fetched, and what of a hostile or broken issuer's answers is a reason."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from mmd_api.contract.errors import InvalidTokenError, IssuerUnavailableError
from mmd_workers.gateway.access import issuer as module
from mmd_workers.gateway.access.issuer import IssuerKeys
from mmd_workers.observe.metrics import Metrics
from tests.gateway.local_issuer import (
    DISCOVERY,
    KEYS,
    LocalIssuer,
    answer,
    public_jwk,
    rsa_key,
    running_issuer,
)

FIRST = rsa_key()


@pytest.fixture
def issuer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIssuer]:
    with running_issuer(tmp_path / "issuer") as one:
        monkeypatch.setenv("SSL_CERT_FILE", str(one.trusted))
        one.keys = [public_jwk("first", FIRST)]
        yield one


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def keys(issuer: LocalIssuer, clock: Clock) -> AsyncIterator[IssuerKeys]:
    one = IssuerKeys(issuer.url, Metrics(("gateway",)), clock)
    yield one
    await one._client.aclose()


async def test_a_key_is_found_by_its_id_and_fetched_once(keys: IssuerKeys, issuer: LocalIssuer) -> None:
    for _ in range(5):
        found = await keys.find("first")
    assert found.key == FIRST.public_key()
    assert issuer.fetched == {DISCOVERY: 1, KEYS: 1}


async def test_many_who_ask_at_once_share_one_fetch(keys: IssuerKeys, issuer: LocalIssuer) -> None:
    await asyncio.gather(*(keys.find("first") for _ in range(50)))
    assert issuer.fetched == {DISCOVERY: 1, KEYS: 1}


async def test_unknown_keys_cause_at_most_one_fetch_in_ten_seconds(
    keys: IssuerKeys, issuer: LocalIssuer, clock: Clock
) -> None:
    await keys.find("first")
    final = 0
    for number in range(300):
        clock.now += 0.125
        with pytest.raises((InvalidTokenError, IssuerUnavailableError)) as refused:
            await keys.find(f"random-{number}")
        final += refused.type is InvalidTokenError
    assert (issuer.fetched[KEYS], final) == (1 + 3, 3)


async def test_a_new_key_is_found_as_soon_as_it_may_be_fetched(
    keys: IssuerKeys, issuer: LocalIssuer, clock: Clock
) -> None:
    await keys.find("first")
    with pytest.raises(InvalidTokenError):
        await keys.find("a stranger's")
    second = rsa_key()
    issuer.keys = [public_jwk("second", second)]
    clock.now += 4
    with pytest.raises(IssuerUnavailableError) as refused:
        await keys.find("second")
    assert refused.value.retry_after_seconds == module.RETRY_SECONDS - 4
    clock.now += refused.value.retry_after_seconds
    assert (await keys.find("second")).key == second.public_key()
    with pytest.raises(InvalidTokenError):
        await keys.find("first")


@pytest.mark.parametrize("left", [[], [public_jwk("first", FIRST, use="enc")]], ids=["none", "no usable"])
async def test_an_issuers_withdrawn_only_key_is_refused_after_a_refresh(
    left: list[dict[str, Any]], keys: IssuerKeys, issuer: LocalIssuer, clock: Clock
) -> None:
    await keys.find("first")
    issuer.keys = left
    clock.now += module.REFRESH_SECONDS
    await keys._refreshed()
    with pytest.raises(IssuerUnavailableError):
        await keys.find("first")
    assert "no key for signatures" in keys.fault
    issuer.keys = [public_jwk("first", FIRST)]
    clock.now += module.RETRY_SECONDS
    assert (await keys.find("first")).key == FIRST.public_key()
    assert keys.fault == ""


async def test_keys_survive_an_issuers_absence_for_one_hour_only(
    keys: IssuerKeys, issuer: LocalIssuer, clock: Clock
) -> None:
    await keys.find("first")
    issuer.stop()
    clock.now += module.MAX_AGE_SECONDS
    assert (await keys.find("first")).key == FIRST.public_key()
    with pytest.raises(IssuerUnavailableError):
        await keys.find("second")
    assert keys.fault
    clock.now += 1
    with pytest.raises(IssuerUnavailableError):
        await keys.find("first")
    issuer.start()
    clock.now += module.RETRY_SECONDS
    assert (await keys.find("first")).key == FIRST.public_key()
    assert keys.fault == ""


async def test_keys_are_fetched_again_without_anybody_asking(
    keys: IssuerKeys, issuer: LocalIssuer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.02)
    following = asyncio.create_task(keys.run())
    try:
        async with asyncio.timeout(30):
            while issuer.fetched[KEYS] < 1:
                await asyncio.sleep(0.02)
            issuer.keys = [public_jwk("second", FIRST)]
            clock.now += module.REFRESH_SECONDS
            while issuer.fetched[KEYS] < 2:
                await asyncio.sleep(0.02)
            await keys.find("second")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def endless(to: BaseHTTPRequestHandler) -> None:
    to.send_response(200)
    to.end_headers()
    while True:
        to.wfile.write(b" " * 65536)


def silent(to: BaseHTTPRequestHandler) -> None:
    time.sleep(2)


def trickling(to: BaseHTTPRequestHandler) -> None:
    to.send_response(200)
    to.end_headers()
    for _ in range(40):
        to.wfile.write(b" ")
        time.sleep(0.05)


def of(document: object) -> bytes:
    return json.dumps(document).encode()


BROKEN = {
    "not found": (DISCOVERY, answer(404), "status 404"),
    "a redirect": (DISCOVERY, answer(302, location="https://localhost/"), "status 302"),
    "a page": (DISCOVERY, answer(200, b"<html>"), "cannot be read"),
    "a list": (DISCOVERY, answer(200, b"[]"), "is no JSON object"),
    "nested": (DISCOVERY, answer(200, b"[" * 100_000), "cannot be read"),
    "endless": (DISCOVERY, endless, "more than 256 KiB"),
    "silent": (DISCOVERY, silent, "no answer within"),
    "trickling": (DISCOVERY, trickling, "no answer within"),
    "another issuer": (DISCOVERY, answer(200, of({"issuer": "https://other"})), "names another issuer"),
    "no keys": (KEYS, answer(200, b"{}"), "no list of at most 64 keys"),
    "too many keys": (KEYS, answer(200, of({"keys": [{}] * 65})), "no list of at most 64 keys"),
    "no usable key": (
        KEYS,
        answer(200, of({"keys": [1, {}, {"kty": "oct", "k": "c2VjcmV0"}]})),
        "no key for signatures",
    ),
    "a failure": (KEYS, answer(500), "status 500"),
}


@pytest.mark.parametrize("name", list(BROKEN))
async def test_a_broken_issuer_causes_a_temporary_fault_in_bounded_time(
    name: str, keys: IssuerKeys, issuer: LocalIssuer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, send, words = BROKEN[name]
    monkeypatch.setattr(module, "FETCH_SECONDS", 1.0 if name in ("silent", "trickling") else 30.0)
    issuer.instead[path] = send
    with pytest.raises(IssuerUnavailableError):
        await asyncio.wait_for(keys.find("first"), 30)
    assert words in keys.fault
    with pytest.raises(IssuerUnavailableError):
        await keys.find("first")
    assert issuer.fetched[DISCOVERY] == 1, "and is not asked again at once"
    del issuer.instead[path]
    clock.now += module.RETRY_SECONDS
    assert (await keys.find("first")).key == FIRST.public_key()


async def test_key_sets_at_addresses_without_tls_are_not_fetched(
    keys: IssuerKeys, issuer: LocalIssuer
) -> None:
    issuer.about = {"jwks_uri": issuer.url.replace("https", "http") + KEYS}
    with pytest.raises(IssuerUnavailableError):
        await keys.find("first")
    assert "no https address" in keys.fault


async def test_only_a_few_requests_wait_for_an_issuer_that_never_answers(
    keys: IssuerKeys, issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    monkeypatch.setattr(module, "FETCH_SECONDS", 1.0)
    issuer.instead[DISCOVERY] = silent
    waiting = [asyncio.create_task(keys.find("first")) for _ in range(5)]
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert (len(done), len(pending)) == (3, 2)
    for task in waiting:
        with pytest.raises(IssuerUnavailableError):
            await task


async def test_a_published_key_is_not_refused_for_good_while_strangers_wait(
    keys: IssuerKeys, issuer: LocalIssuer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    await keys.find("first")
    issuer.keys.append(public_jwk("second", FIRST))
    clock.now += module.RETRY_SECONDS
    strangers = [asyncio.create_task(keys.find(f"random-{number}")) for number in range(2)]
    await asyncio.sleep(0)
    clock.now += 1
    with pytest.raises(IssuerUnavailableError):
        await keys.find("second")
    for stranger in strangers:
        with pytest.raises(InvalidTokenError, match="does not publish"):
            await stranger
    assert (await keys.find("second")).key == FIRST.public_key()


async def test_with_several_keys_a_token_needs_a_key_id(
    keys: IssuerKeys, issuer: LocalIssuer, clock: Clock
) -> None:
    assert (await keys.find("")).key == FIRST.public_key()
    issuer.keys.append(public_jwk("second", FIRST))
    clock.now += module.REFRESH_SECONDS
    await keys._refreshed()
    clock.now += 1
    with pytest.raises(InvalidTokenError, match="the token has no key id"):
        await keys.find("")


async def test_only_keys_that_are_strong_public_and_for_signatures_are_used(
    keys: IssuerKeys, issuer: LocalIssuer
) -> None:
    small, elliptic, edwards = (
        rsa_key(1024),
        ec.generate_private_key(ec.SECP384R1()),
        ed25519.Ed25519PrivateKey.generate(),
    )
    issuer.keys = [
        public_jwk("small", small),
        public_jwk("encryption", FIRST, use="enc"),
        {
            "kty": "oct",
            "kid": "symmetric",
            "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LTEyMzQ",
            "alg": "HS256",
        },
        public_jwk("curve", ec.generate_private_key(ec.SECP256K1())),
        public_jwk("stated", FIRST, alg="PS256"),
        public_jwk("any", FIRST),
        public_jwk("elliptic", elliptic),
        public_jwk("edwards", edwards),
        {**public_jwk("number", FIRST), "kid": 7},
    ]
    found = {}
    for kid in ("stated", "any", "elliptic", "edwards"):
        found[kid] = (await keys.find(kid)).algorithms
    assert found.pop("any") == ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
    assert found == {"stated": ("PS256",), "elliptic": ("ES384",), "edwards": ("EdDSA",)}
    for kid in ("small", "encryption", "symmetric", "curve", "7", ""):
        with pytest.raises(InvalidTokenError):
            await keys.find(kid)
