"""Who may use the gateway: API keys of requests, looked up by their hashes, and the tenants they belong to.

Neither a key nor a hash leaves this module: not in an error, a log line, a metric or a repr.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mmd_api.contract.errors import InvalidApiKeyError, KeysUnavailableError, UnknownTenantError
from mmd_api.tenants import MAX_FILE_BYTES, InvalidKeysError, Tenant, digest, digest_of, parse_tenants
from mmd_workers.gateway.access.tenant_limits import TenantUsage
from mmd_workers.observe.logs import RepeatedWarning
from mmd_workers.observe.metrics import Metrics
from mmd_workers.process.live import LiveSecret

REMOVED = "(removed)"
"""Label of requests that end after their tenant was removed. It bounds the number of labels by the tenants in the file."""
_HOW = "send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"

_log = logging.getLogger(__name__)
_warn = RepeatedWarning(_log)


@dataclass(slots=True, eq=False)
class KnownTenant:
    """A tenant at this gateway: its present entry in the file, and its usage. It outlives changes of the file."""

    tenant: Tenant = field(repr=False)
    usage: TenantUsage = field(default_factory=TenantUsage)

    @property
    def name(self) -> str:
        """The tenant's name."""
        return self.tenant.name

    def may_use(self, model: str) -> bool:
        """True if the tenant may use a served model."""
        return self.tenant.models is None or model in self.tenant.models


class Access:
    """The tenants and keys in force. `gateways()`: number of gateways that share a tenant's requests, including this one."""

    def __init__(self, metrics: Metrics, gateways: Callable[[], int] = lambda: 1) -> None:
        self._metrics, self._gateways = metrics, gateways
        self._known: dict[str, KnownTenant] = {}
        self._removed: dict[str, KnownTenant] = {}  # tenants whose requests still count if they come back
        self._by_digest: Mapping[bytes, tuple[KnownTenant, datetime | None]] | None = None
        self.fault = "not read yet"
        metrics.keys_rejected.set(0)

    @property
    def unavailable(self) -> str:
        """The reason no key can be checked; empty once a valid file has been read."""
        return f"no valid API keys: {self.fault}" if self._by_digest is None else ""

    def take(self, tenants: Iterable[Tenant]) -> None:
        """Put tenants and their keys in force, all at once. Requests in flight continue.

        If a removed tenant comes back, its requests of the last minute and those in flight are still counted.
        """
        remembered = self._removed | self._known
        current, by_digest = {}, dict[bytes, tuple[KnownTenant, datetime | None]]()
        for tenant in tenants:
            account = current[tenant.name] = remembered.get(tenant.name) or KnownTenant(tenant)
            account.tenant = tenant
            by_digest |= {digest_of(key): (account, key.expires) for key in tenant.keys}
        for removed in self._known.keys() - current.keys():
            for counter in (self._metrics.tenant_requests, self._metrics.tenant_work):
                counter.remove_by_labels({"tenant": removed})
        now = time.monotonic()
        self._removed = {
            name: account
            for name, account in remembered.items()
            if name not in current and account.usage.counts(now)
        }
        self._known, self._by_digest, self.fault = current, by_digest, ""

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> KnownTenant:
        """The tenant that a request's key belongs to. `headers`: raw names and values.

        Raises:
            InvalidApiKeyError: there is no key, or several, or an invalid one.
            KeysUnavailableError: no file of keys has been readable since the start.
        """
        return self.holder(self.credential(headers))

    def credential(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The unchecked credential of a request. `headers`: raw names and values.

        Raises:
            InvalidApiKeyError: there is no credential, or several that differ.
            KeysUnavailableError: no file of keys has been readable since the start.
        """
        if self._by_digest is None:
            raise KeysUnavailableError(
                "this gateway has no valid API keys yet; retry, and have spec.gateway.auth.keysSecret checked"
            )
        try:
            key = _presented(headers)
        except _MalformedError as error:
            raise self._refused("malformed", str(error)) from None
        if key is None:
            raise self._refused("missing", f"this gateway needs an API key; {_HOW}")
        return key

    def holder(self, key: bytes) -> KnownTenant:
        """The tenant that a key belongs to.

        A key is hashed before any comparison. So the time of hashing depends only on the key's length, and the time of the look-up on a hash,
        which nobody can choose.

        Raises:
            InvalidApiKeyError: the key is not valid.
        """
        entry = (self._by_digest or {}).get(digest(key))
        if entry is None:
            raise self._refused(
                "unknown", "the API key is not valid; check that it is complete, or use another"
            )
        account, expires = entry
        if expires is not None and datetime.now(UTC) >= expires:
            raise self._refused("expired", f"the API key has expired ({expires.isoformat()}); use a new one")
        return account

    def named(self, name: str, default: str | None) -> KnownTenant:
        """The tenant that a valid token names, or else that of `spec.gateway.auth.oidc.defaultTenant`.

        Raises:
            UnknownTenantError: there is no such tenant.
        """
        for candidate in (name, default):
            if candidate and (account := self._known.get(candidate)):
                return account
        self._metrics.refused_keys.labels("tenant").inc()
        if default:
            _warn(
                "default tenant",
                "keys.yaml has no tenant %s, and tokens that name no other are refused; add it, or change spec.gateway.auth.oidc.defaultTenant",
                default,
            )
            raise UnknownTenantError(
                "the token names no tenant of this gateway, and keys.yaml lacks that of spec.gateway.auth.oidc.defaultTenant; have either added to it"
            )
        raise UnknownTenantError(
            "the token names no tenant of this gateway; have its tenant added to keys.yaml, or use another token"
        )

    def lacks(self, name: str) -> bool:
        """True if a file of keys is in force without a tenant of this name."""
        return self._by_digest is not None and name not in self._known

    def refused_token(self) -> None:
        """Count a request whose token is not valid."""
        self._metrics.refused_keys.labels("token").inc()

    def _refused(self, reason: str, message: str) -> InvalidApiKeyError:
        self._metrics.refused_keys.labels(reason).inc()
        return InvalidApiKeyError(message)

    def check_limits(self, known: KnownTenant) -> None:
        """Check whether a tenant may have one more request, like `admitted`, but without counting it.

        Raises:
            RateLimitError: the tenant may not.
        """
        known.usage.check(known.name, known.tenant.limits, self._gateways(), time.monotonic())

    @contextlib.contextmanager
    def admitted(self, known: KnownTenant) -> Iterator[None]:
        """Count a request of a tenant in and out.

        Raises:
            RateLimitError: the tenant has reached a limit.
        """
        started_at = time.monotonic()
        known.usage.begin(known.name, known.tenant.limits, self._gateways(), started_at)
        try:
            yield
        finally:
            known.usage.end(time.monotonic() - started_at)

    def tenants(self) -> list[KnownTenant]:
        """The tenants in force."""
        return list(self._known.values())

    def gateways(self) -> int:
        """Number of gateways that share a tenant's requests, including this one."""
        return self._gateways()

    def label_of(self, known: KnownTenant) -> str:
        """A tenant's label in metrics."""
        return known.name if self._known.get(known.name) is known else REMOVED

    def count(self, known: KnownTenant, status: int) -> None:
        """Count a request of a tenant that has ended."""
        self._metrics.tenant_requests.labels(self.label_of(known), str(status)).inc()

    def sample(self) -> None:
        """Set the gauge of requests in flight, at a scrape."""
        self._metrics.tenant_running.clear()
        for name, account in self._known.items():
            self._metrics.tenant_running.labels(name).set(account.usage.running)

    def summary(self) -> dict[str, Any]:
        """The section of `/debug/state` about keys."""
        return {"enabled": True, "tenants": len(self._known), "fault": self.fault}


class LiveKeys(LiveSecret):
    """Follows the file of keys. If it is missing or invalid, the last valid one stays in force; without one nobody is let in."""

    def __init__(self, file: Path, access: Access, metrics: Metrics) -> None:
        super().__init__(file, MAX_FILE_BYTES)
        self._access, self._metrics = access, metrics

    async def _take(self, text: str) -> None:
        try:
            tenants = await asyncio.to_thread(parse_tenants, text)
        except InvalidKeysError:
            raise
        except Exception as error:  # noqa: BLE001 - no file may end the gateway, and the error may quote it
            raise InvalidKeysError(f"cannot be read ({type(error).__name__}); check it") from None
        self._access.take(tenants)
        keys = sum(len(tenant.keys) for tenant in tenants)
        _log.info("API keys in force: %d of %d tenants, from %s", keys, len(tenants), self._file)

    def _rejected(self, reason: str) -> None:
        if reason != self._access.fault:
            consequence = (
                "nobody is let in" if self._access.unavailable else "the last valid keys stay in force"
            )
            _log.error(
                "cannot use the file of API keys %s, %s: %s; fix the Secret that spec.gateway.auth.keysSecret names",
                self._file,
                consequence,
                reason,
            )
        self._access.fault = reason
        self._metrics.keys_rejected.set(1)

    def _accepted(self) -> None:
        self._metrics.keys_rejected.set(0)


class _MalformedError(Exception):
    """The headers that hold a key are malformed."""


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key of a request; None if it has none. Keys are bytes and never decoded.

    Raises:
        _MalformedError: the scheme is unknown, or there are two different keys, of which a proxy may have checked one.
    """
    keys: set[bytes] = set()
    for name, value in headers:
        match name.lower():
            case b"x-api-key":
                keys.add(value.strip())
            case b"authorization":
                scheme, _, rest = value.strip().partition(b" ")
                if scheme.lower() != b"bearer":
                    raise _MalformedError(f"the Authorization header has another scheme than Bearer; {_HOW}")
                keys.add(rest.strip())
    keys.discard(b"")
    if len(keys) > 1:
        raise _MalformedError("the headers have several API keys; send one")
    return keys.pop() if keys else None
