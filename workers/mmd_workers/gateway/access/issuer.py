"""The signing keys of an OpenID Connect issuer: found by its discovery document, fetched within bounds, and remembered.

PyJWT's own key set client has no bound on size or total time, and fetches at every unknown key id. So keys are fetched here, and only
parsed by PyJWT. Independent of tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from mmd_api.contract.errors import InvalidTokenError, IssuerUnavailableError
from mmd_workers.observe.metrics import Metrics

DISCOVERY = "/.well-known/openid-configuration"
MAX_DOCUMENT_BYTES = 256 << 10
MAX_KEYS = 64
MIN_RSA_BITS = 2048
FETCH_SECONDS = 10.0  # for both documents
REFRESH_SECONDS = 300.0
RETRY_SECONDS = 10.0
"""Minimum interval between fetches, whatever causes them: failures, or tokens that name unknown keys."""
MAX_AGE_SECONDS = 3600.0  # for keys that cannot be fetched again
MAX_WAITING = 64  # requests waiting for the same attempt

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_EC = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}

_log = logging.getLogger(__name__)


class _FetchError(Exception):
    """The keys cannot be fetched; the message has the reason."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A public key, and the algorithms that signatures with it may use, all of them asymmetric."""

    key: RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey
    algorithms: tuple[str, ...]


class IssuerKeys:
    """The keys of one issuer, by key id; a key without an id has the empty one."""

    def __init__(self, issuer: str, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._issuer, self._metrics, self._clock = issuer, metrics, clock
        self._client = httpx.AsyncClient(
            timeout=FETCH_SECONDS, headers={"accept": "application/json", "accept-encoding": "identity"}
        )
        self._keys: Mapping[str, SigningKey] = {}
        self._fetched = self._attempted = float("-inf")
        self._attempt: asyncio.Task[None] | None = None
        self._waiting = 0
        self.fault = ""
        metrics.issuer_unreachable.set(0)

    async def run(self) -> None:
        """Keep the keys fresh until cancelled."""
        async with self._client:
            try:
                while True:
                    due = self._attempted + (RETRY_SECONDS if self.fault else REFRESH_SECONDS)
                    if (pause := due - self._clock()) > 0:
                        await asyncio.sleep(min(pause, RETRY_SECONDS))
                    else:
                        await self._refreshed()
            finally:
                if self._attempt is not None:
                    self._attempt.cancel()
                    await asyncio.gather(self._attempt, return_exceptions=True)

    async def find(self, kid: str) -> SigningKey:
        """The key with this id; for an empty id, the only key.

        An unknown key may be new, so the keys are fetched again for it, but at the earliest `RETRY_SECONDS` after the last attempt. A refusal is
        final only if the issuer was asked after the token came, because strangers decide when other attempts are made.

        Raises:
            InvalidTokenError: the issuer has no such key, or it has several and the token does not name one.
            IssuerUnavailableError: its keys could not be fetched, or not for `MAX_AGE_SECONDS`, or may not be fetched again yet.
        """
        arrived_at = self._clock()
        key = self._known(kid)
        if key is None and self._may_attempt():
            await self._wait_for_attempt()
            key = self._known(kid)
        if key is not None:
            return key
        if self.fault or not self._are_fresh():
            raise IssuerUnavailableError(
                "this gateway cannot check tokens, because it could not fetch the signing keys of their issuer; retry, or use an API key",
                retry_after_seconds=RETRY_SECONDS,
            )
        if not kid:
            raise InvalidTokenError(
                "the token has no key id, and its issuer publishes several keys; get one with `kid` in its header"
            )
        if self._attempted < arrived_at:
            raise IssuerUnavailableError(
                "the token is signed with a key that its issuer did not publish when this gateway last fetched its keys; retry, or get a new one",
                retry_after_seconds=max(1.0, self._attempted + RETRY_SECONDS - arrived_at),
            )
        raise InvalidTokenError(
            "the token is signed with a key that its issuer does not publish; get a new one"
        )

    def _known(self, kid: str) -> SigningKey | None:
        if not self._are_fresh():
            return None
        if kid:
            return self._keys.get(kid)
        return next(iter(self._keys.values())) if len(self._keys) == 1 else None

    def _are_fresh(self) -> bool:
        return self._clock() - self._fetched <= MAX_AGE_SECONDS

    def _may_attempt(self) -> bool:
        return self._attempt is not None or self._clock() - self._attempted >= RETRY_SECONDS

    async def _wait_for_attempt(self) -> None:
        if self._waiting >= MAX_WAITING:
            return
        self._waiting += 1
        try:
            await self._refreshed()
        finally:
            self._waiting -= 1

    async def _refreshed(self) -> None:
        """Wait for the attempt in progress, or for a new one. If a caller is cancelled, the attempt continues."""
        if self._attempt is None:
            self._attempt = asyncio.create_task(self._refresh(), name="issuer-keys")
        await asyncio.shield(self._attempt)

    async def _refresh(self) -> None:
        self._attempted = self._clock()
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                keys = await self._fetch()
        except TimeoutError:
            self._failed(f"no answer within {FETCH_SECONDS:g} s")
        except (_FetchError, httpx.HTTPError) as error:
            self._failed(str(error) or type(error).__name__)
        except Exception as error:  # noqa: BLE001 - no response of an issuer may end the gateway
            self._failed(f"its answer cannot be read ({type(error).__name__})")
        else:
            self._take(keys)
        finally:
            self._attempt = None

    def _take(self, keys: Mapping[str, SigningKey]) -> None:
        """Use the published keys. An empty set makes all keys invalid, and is a fault as well."""
        if keys.keys() != self._keys.keys():
            _log.info("%d signing keys of issuer %s", len(keys), self._issuer)
        self._keys, self._fetched = keys, self._clock()
        if keys:
            self.fault = ""
            self._metrics.issuer_unreachable.set(0)
        else:
            self._failed(
                f"its key set has no key for signatures: RSA of {MIN_RSA_BITS} bits or more, EC or EdDSA"
            )

    def _failed(self, reason: str) -> None:
        if reason != self.fault:
            _log.error(
                "cannot fetch the signing keys of %s: %s; check spec.gateway.auth.oidc.issuer and the network to it",
                self._issuer,
                reason,
            )
        self.fault = reason
        self._metrics.issuer_unreachable.set(1)

    async def _fetch(self) -> dict[str, SigningKey]:
        discovery = await self._document(self._issuer.rstrip("/") + DISCOVERY)
        if discovery.get("issuer") != self._issuer:
            raise _FetchError("its discovery document names another issuer")
        address = discovery.get("jwks_uri")
        if not isinstance(address, str) or not address.startswith("https://"):
            raise _FetchError("its discovery document has no https address in jwks_uri")
        entries = (await self._document(address)).get("keys")
        if not isinstance(entries, list) or len(entries) > MAX_KEYS:
            raise _FetchError(f"its key set has no list of at most {MAX_KEYS} keys")
        return {kid: key for entry in entries if (pair := _signing_key(entry)) for kid, key in [pair]}

    async def _document(self, url: str) -> dict[str, Any]:
        async with self._client.stream("GET", url) as answer:
            if answer.status_code != 200:
                raise _FetchError(f"{url} answered with status {answer.status_code}")
            body = bytearray()
            async for part in answer.aiter_raw():
                body += part
                if len(body) > MAX_DOCUMENT_BYTES:
                    raise _FetchError(f"{url} has more than {MAX_DOCUMENT_BYTES >> 10} KiB")
        document = json.loads(body)
        if not isinstance(document, dict):
            raise _FetchError(f"{url} is no JSON object")
        return document


def _signing_key(entry: object) -> tuple[str, SigningKey] | None:
    """The key id and key of a key set's entry; None if the key is not for signatures or not supported."""
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
        return None
    try:
        key = jwt.PyJWK(entry).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    algorithms = _algorithms(key)
    if declared := entry.get("alg"):
        algorithms = tuple(name for name in algorithms if name == declared)
    kid = entry.get("kid", "")
    return (kid, SigningKey(key, algorithms)) if algorithms and isinstance(kid, str) else None


def _algorithms(key: object) -> tuple[str, ...]:
    match key:
        case RSAPublicKey():
            return _RSA if key.key_size >= MIN_RSA_BITS else ()
        case EllipticCurvePublicKey():
            return (_EC[key.curve.name],) if key.curve.name in _EC else ()
        case Ed25519PublicKey():
            return ("EdDSA",)
    return ()
